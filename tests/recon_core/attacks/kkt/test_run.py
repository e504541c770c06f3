"""The kkt family from images to pairs, with candidates and with a separated span."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt import attacks as kkt_attacks
from recon_core.attacks.kkt import run as kkt_run
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.kkt.run import KKT
from recon_core.attacks.span.attack import SpanAttack
from recon_core.attacks.span.rows import SpanRows
from recon_core.attacks.span.subspace import NoSpanError
from recon_core.matching import best_per_target, fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.optimisers import Optimiser
from recon_core.types import Outcome, RunResult
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Conv, Network, Parameters
from recon_core.victims.training import Training
from tests.recon_core.drawing import refuses
from tests.recon_core.small_runs import (
    ALL,
    FROZEN,
    QUICK,
    QUICK_ALL,
    SAVED,
    SIDE,
    SMALL,
    THRESHOLD,
    TILES,
    Kept,
    N,
    R,
    assert_all_equal,
    assert_equal_results,
    images,
    run,
    specs,
    with_attack,
)


@pytest.fixture(scope="module")
def everything() -> list[RunResult]:
    """Two real runs with every candidate kept."""
    return run(ALL, specs(2))


def best_ssim(result: RunResult, pictures: Tensor) -> Tensor:
    """Of each picture, over everything the run's attack has saved."""
    found = fit_to_range(result.pairs.reconstruction, result.mean_image)
    return best_per_target(ssim_matrix(found, pictures.float() / 255))[1]


def test_training_images_come_back_and_others_do_not(everything: list[RunResult]) -> None:
    decoys = TILES[R * N : R * N + 2 * N]
    assert {r.outcome for r in everything} == {Outcome.OK}
    of_targets = torch.stack([best_ssim(r, r.targets).mean() for r in everything])
    of_decoys = torch.stack([best_ssim(r, decoys).mean() for r in everything])
    assert bool((of_targets > 0.55).all()), of_targets
    assert bool((of_targets - of_decoys > 0.3).all()), (of_targets, of_decoys)


MULTICLASS = replace(
    ALL,
    n_classes=3,
    training=Training(epochs=300, loss=Loss(kind="ce")),
    attack=KKTAttack(condition="multiclass", n_candidates=18, save_at=(80, 250)),
)
REGRESSION = replace(
    ALL,
    training=Training(epochs=500, loss=Loss(kind="mse"), weight_decay=1e-2),
    attack=KKTAttack(condition="regression", n_candidates=16, save_at=(80, 250)),
)
CONVOLUTION = replace(
    ALL,
    victim=Network(widths=(48,), conv=Conv(kernel=5, channels=12), bias="first"),
    training=Training(epochs=200),
    attack=KKTAttack(n_candidates=8, save_at=(80, 200)),
)
HAIM = replace(
    ALL,
    victim=Network(widths=(64, 64), bias="first", init_rest="torch"),
    training=Training(epochs=800, optimiser=Optimiser(rule="gd", lr=0.5), span=True),
    attack=KKTAttack(
        n_candidates=16,
        optimiser=Optimiser(rule="gd", lr=0.02, momentum=0.9),
        sigma=1e-2,
        save_at=(100, 300),
    ),
)
MULTI: dict[str, Any] = {
    "n_classes": 3,
    "training": Training(epochs=1, loss=Loss(kind="ce")),
    "attack": KKTAttack(condition="multiclass", n_candidates=18, save_at=(1,)),
}


@pytest.mark.parametrize(
    ("experiment", "n", "n_classes"),
    [(MULTICLASS, 9, 3), (REGRESSION, 8, 2), (CONVOLUTION, 4, 2), (HAIM, 8, 2)],
    ids=["multiclass", "regression", "convolution", "haim2022"],
)
def test_images_come_back_from_every_kind_of_victim(
    experiment: KKT, n: int, n_classes: int
) -> None:
    chosen = specs(1, n=n, n_classes=n_classes)
    (result,) = run(experiment, chosen)
    assert result.outcome is Outcome.OK
    assert result.stats["kkt_residual"] < 1
    decoys = TILES[n : n + 2 * N]
    of_targets, of_decoys = best_ssim(result, result.targets), best_ssim(result, decoys)
    if experiment.attack.condition != "regression":  # whose candidates have no label
        sure = result.pairs.ssim_best > THRESHOLD
        own = result.pairs.candidate[sure] * n_classes // experiment.attack.n_candidates
        label = torch.tensor(result.spec.labels)[result.pairs.target_row[sure]]
        assert float((label == own).float().mean()) > 0.9
    assert float(of_targets.mean() - of_decoys.mean()) > 0.2, (of_targets, of_decoys)


def test_confident_keeps_the_flagged_candidates_with_one_target_each(
    everything: list[RunResult],
) -> None:
    flags = torch.cat([result.pairs.confident for result in everything])
    assert 0 < int(flags.sum()) < len(flags)
    kept = run(SMALL, specs(1))
    assert sum(len(r.pairs) for r in kept) > 0
    for some, full in zip(kept, everything[:1], strict=True):
        flagged = full.pairs.confident
        assert torch.equal(some.pairs.candidate, full.pairs.candidate[flagged])
        assert torch.equal(some.pairs.iteration, full.pairs.iteration[flagged])
        assert torch.equal(some.pairs.reconstruction, full.pairs.reconstruction[flagged])
        assert bool(some.pairs.confident.all())
        found = fit_to_range(some.pairs.reconstruction, some.mean_image)
        scores = ssim_matrix(found, some.targets.float() / 255)
        to_target = scores.gather(1, some.pairs.target_row[:, None]).squeeze(1)
        torch.testing.assert_close(some.pairs.ssim_best, to_target, rtol=0, atol=1e-5)
        by_candidate = some.pairs.target_row.view(-1, len(SAVED))
        assert torch.equal(by_candidate, by_candidate[:, :1].expand_as(by_candidate))


def test_targets_are_what_the_victim_saw() -> None:
    (plain,) = run(QUICK, specs(1))
    assert torch.equal(plain.targets, images(specs(1))[0])
    assert not bool(plain.augment.any())
    torch.testing.assert_close(plain.mean_image, images(specs(1))[0].float().mean(0) / 255)
    (moved,) = run(replace(QUICK, augment_p=1.0), specs(1))
    assert not torch.equal(moved.targets, plain.targets)
    assert bool(moved.augment.any())
    torch.testing.assert_close(moved.mean_image, moved.targets.float().mean(0) / 255)


def test_the_attack_starts_from_the_runs_own_noise() -> None:
    for result in run(with_attack(QUICK_ALL, optimiser=FROZEN, save_at=(1,), sigma=0.01)):
        shape = (2 * N, 3 * SIDE * SIDE)
        start = 0.01 * torch.randn(shape, generator=result.spec.generator("attack"))
        saved = result.pairs.reconstruction.flatten(1)
        torch.testing.assert_close(saved, start, rtol=0, atol=1e-6)


def test_an_unfitted_victim_is_said_to_be_one() -> None:
    (result,) = run(replace(QUICK, training=Training(epochs=1)), specs(1))
    assert result.outcome is Outcome.UNFITTED
    assert result.stats["train_accuracy"] < 1


@pytest.mark.parametrize("keep", ["confident", "all"])
@pytest.mark.parametrize("what", ["victim", "attack", "attacks"])
def test_a_huge_rate_is_a_result_without_pairs(keep: Any, what: str) -> None:
    huge = Optimiser(rule="gd", lr=1e30)
    diverging = replace(QUICK, keep=keep)
    if what == "victim":
        diverging = replace(diverging, training=Training(epochs=40, optimiser=huge))
    else:
        diverging = with_attack(diverging, optimiser=huge)
    if what == "attacks":
        diverging = replace(diverging, n_attacks=3)
    for result in run(diverging, specs(2)):
        assert result.outcome is Outcome.NONFINITE
        assert len(result.pairs) == 0
        assert result.pairs.reconstruction.shape == (0, 3, SIDE, SIDE)
        assert torch.equal(result.targets, images()[result.spec.run])


def test_a_diverging_run_does_not_disturb_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recon_core.attacks.family_run.stack_size", lambda _device, n_runs: n_runs)
    calm = run(QUICK_ALL)
    initial = Architecture.initial

    def with_one_explosive(
        self: Architecture, generators: Sequence[torch.Generator], *, dtype: torch.dtype
    ) -> Parameters:
        parameters = initial(self, generators, dtype=dtype)
        parameters.weights[0][1] *= 1e38
        return parameters

    monkeypatch.setattr(Architecture, "initial", with_one_explosive)
    wild = run(QUICK_ALL)
    assert [r.outcome for r in wild][1] is Outcome.NONFINITE
    assert calm[1].outcome is not Outcome.NONFINITE
    for which in (0, 2):
        # The stack is smaller once the run has left it: equal to rounding.
        assert_equal_results(wild[which], calm[which], tolerance=1e-4)


@pytest.mark.parametrize(
    ("changes", "labels", "message"),
    [
        ({}, (0,) * 7 + (2,), r"run 0 has labels \[0, 2\].* labels from 0 to 1"),
        (
            {"victim": Network(widths=(4,), conv=Conv(kernel=17))},
            (0, 1) * 4,
            "kernel=17 does not fit in images of 16x16",
        ),
        (MULTI, (0, 1, 2, 3) * 2, r"run 0 has labels \[0, 1, 2, 3\].* from 0 to 2"),
        (
            MULTI | {"attack": KKTAttack(condition="multiclass", n_candidates=2)},
            (0, 0, 0, 1, 1, 1, 2, 2),
            "n_candidates=2 is less than one per class of 3",
        ),
    ],
)
def test_refuses_batches_that_do_not_fit(
    changes: dict[str, Any], labels: tuple[int, ...], message: str
) -> None:
    refuses(message, run, replace(QUICK, **changes), [replace(specs(1)[0], labels=labels)])


SHORT = SpanAttack(n_images=4, n_independent=20, overcomplete=1.0)
KNOWN = replace(SHORT, start="known")
SEPARATED = replace(QUICK_ALL, attack=SHORT)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"victim": Network(widths=(9,), conv=Conv()), "attack": SHORT}, "span patches, not image"),
        ({"attack": replace(SHORT, n_images=17)}, "a first layer of 16 neurons; it has 16 at most"),
        ({"attack": KKTAttack(condition="multiclass")}, "'bce' with attack.condi"),
    ],
)
def test_attacks_that_do_not_fit_the_victim_are_refused(changed: Any, said: str) -> None:
    refuses(said, replace, QUICK_ALL, **changed)


def test_both_signs_of_every_source_are_candidates_of_iteration_0() -> None:
    for result in run(SEPARATED):
        pairs, m = result.pairs, SHORT.n_images
        assert m is not None
        assert pairs.candidate.tolist() == list(range(2 * m))
        assert pairs.iteration.tolist() == [0] * 2 * m
        assert torch.equal(pairs.reconstruction[:m], -pairs.reconstruction[m:])
        assert math.isfinite(result.stats["attack_loss"])
        assert 0 < result.stats["n_iterations"] <= SHORT.n_iterations
        for name in ("kkt_residual", "residual_relu", "lr", "sigma", "lam_min"):
            assert math.isnan(result.stats[name])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_start_that_a_span_attack_knows_is_the_one_that_was_trained(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Tensor] = []
    told: list[Tensor] = []
    train, separate = kkt_run.train, kkt_attacks.separate

    def spied_train(of: Any, parameters: Any, *given: Any, **named: Any) -> Any:
        trained.append(parameters.weights[0].clone())
        return train(of, parameters, *given, **named)

    def spied_separate(*given: Any, **named: Any) -> Any:
        told.extend(own.start[None] for own in named["rows"])
        return separate(*given, **named)

    monkeypatch.setattr(kkt_run, "train", spied_train)
    monkeypatch.setattr(kkt_attacks, "separate", spied_separate)
    run(replace(SEPARATED, attack=KNOWN, dtype=dtype))
    assert len(trained) == len(told) == len(specs())
    assert all(torch.equal(a, b) for a, b in zip(trained, told, strict=True))
    assert not torch.equal(told[0], told[1])


@pytest.mark.parametrize("source", ["state", "gradients"])
def test_what_is_taken_apart_of_trained_victims_spans_their_images(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[SpanRows] = []
    inputs: list[Tensor] = []
    separate, attacked = kkt_attacks.separate, kkt_run.KKT._attacked

    def spied_separate(*given: Any, **named: Any) -> Any:
        taken.extend(named["rows"])
        return separate(*given, **named)

    def spied_attacked(self: Any, victims: Any, some: Any, x: Tensor) -> Any:
        inputs.extend(x)
        return attacked(self, victims, some, x)

    monkeypatch.setattr(kkt_attacks, "separate", spied_separate)
    monkeypatch.setattr(kkt_run.KKT, "_attacked", spied_attacked)
    adam = replace(SEPARATED.training, optimiser=Optimiser(rule="adam", lr=1e-3), weight_decay=0.0)
    run(replace(SEPARATED, attack=replace(SHORT, source=source), training=adam, dtype="float64"))
    assert len(taken) == len(inputs) == len(specs())
    for rows, x in zip(taken, inputs, strict=True):
        assert (rows.source, rows.start) == (source, None)
        basis = torch.linalg.svd(rows.rows[:, : x.shape[1]], full_matrices=False)
        kept = basis.Vh[1e-9 * basis.S[0] < basis.S]
        outside = x - (x @ kept.mT) @ kept
        assert float(outside.norm() / x.norm()) < 1e-6
    plain = replace(adam, optimiser=Optimiser(rule="gd"))
    with pytest.raises(ValueError, match=r"source='state' with training.optimiser.rule='gd'"):
        replace(SEPARATED, attack=replace(SHORT, source="state"), training=plain)


@pytest.mark.parametrize("attack", [KNOWN, replace(SHORT, source="state")])
def test_attacks_of_a_sweep_are_given_what_is_kept_of_a_victim(attack: SpanAttack) -> None:
    sweep = [replace(spec, victim=0, image_ids=specs()[0].image_ids) for spec in specs()]
    training = SEPARATED.training
    if attack.source == "state":
        training = replace(training, optimiser=Optimiser(rule="gd", lr=0.01, momentum=0.9))
    experiment, kept = replace(SEPARATED, attack=attack, training=training), Kept()
    given = images(sweep)
    device = torch.device("cpu")
    once = experiment.run_batch(sweep, given, device=device, victims=kept)
    again = experiment.run_batch(sweep[1:], given[1:], device=device, victims=kept)
    assert_all_equal(once[1:], again)
    assert not torch.equal(once[0].pairs.reconstruction, once[1].pairs.reconstruction)


def test_weights_with_nothing_in_them_are_an_outcome_and_harm_no_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = run(SEPARATED)
    separate = kkt_attacks.separate

    def failing(attack_: Any, of: Any, parameters: Any, generators: Any, **named: Any) -> Any:
        seeds = [g.initial_seed() for g in generators]
        if specs()[1].generator("attack").initial_seed() in seeds:
            raise NoSpanError("nothing stands out")
        return separate(attack_, of, parameters, generators, **named)

    monkeypatch.setattr(kkt_attacks, "separate", failing)
    results = run(SEPARATED)
    assert [r.outcome for r in results] == [usual[0].outcome, Outcome.STOPPED, usual[2].outcome]
    assert len(results[1].pairs) == 0
    assert math.isnan(results[1].stats["attack_loss"])
    for k in (0, 2):
        assert_equal_results(results[k], usual[k])


def test_a_training_that_moved_nothing_or_diverged_leaves_nothing_to_separate() -> None:
    free = replace(SHORT, n_images=None)
    still = replace(QUICK_ALL, attack=free, victim=Network(widths=(16, 16), init_std_first=10.0))
    still = replace(still, training=Training(epochs=1, optimiser=Optimiser(rule="gd", lr=1e-9)))
    assert {r.outcome for r in run(still)} == {Outcome.STOPPED}
    wild = replace(SEPARATED, training=Training(epochs=50, optimiser=Optimiser(rule="gd", lr=1e30)))
    assert {r.outcome for r in run(wild)} == {Outcome.NONFINITE}


def test_more_images_than_pictures_have_features_are_refused_before_a_victim_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kkt_run, "train", lambda *_given, **_named: pytest.fail("trained"))
    many = replace(SEPARATED, attack=replace(SHORT, n_images=3000), victim=Network(widths=(3000,)))
    refuses("2205 features cannot tell 3000 images apart", run, many)
