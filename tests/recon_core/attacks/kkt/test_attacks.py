"""Runs whose attack separates the span."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt import attacks as kkt_attacks
from recon_core.attacks.kkt import run as kkt_run
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.kkt.settings import most_candidates
from recon_core.attacks.span.attack import SpanAttack
from recon_core.attacks.span.rows import SpanRows
from recon_core.attacks.span.separator import shipped_separator
from recon_core.attacks.span.subspace import NoSpanError
from recon_core.optimisers import Optimiser
from recon_core.types import Outcome, RunSpec
from recon_core.victims.network import Conv, Network
from recon_core.victims.training import Training
from tests.recon_core.small_runs import (
    QUICK_ALL,
    Kept,
    assert_all_equal,
    assert_equal_results,
    images,
    run,
    specs,
)

SHORT = SpanAttack(n_images=4, n_independent=20, overcomplete=1.0)
KNOWN = replace(SHORT, start="known")
SEPARATED = replace(QUICK_ALL, attack=SHORT)


def test_operations_of_a_separation() -> None:
    """6 k^2 T of T features; 6 k^2 d and what a network does."""
    shape, k = (3, 32, 32), 100
    operations = {
        sources: kkt_attacks.separation_operations(
            SpanAttack(start="known", sources=sources, overcomplete=1.0), k, shape
        )
        for sources in ("independent", "network", "auto")
    }
    alone = 6 * k**2 * 45 * 15**2
    separator = shipped_separator("cifar")
    network = 6 * k**2 * 3072 + k * separator.operations
    assert operations == {
        "independent": alone,
        "network": network,
        "auto": max(alone, network),
    }
    other = kkt_attacks.separation_operations(
        SpanAttack(overcomplete=1.0), k, (3, 16, 16)
    )  # no network
    assert other == 6 * k**2 * 45 * 7**2
    frame = SpanAttack(sources="independent", overcomplete=4.0)
    assert kkt_attacks.separation_operations(frame, k, shape) == 4 * alone
    victim = Network(widths=(60,))
    attack = SpanAttack(overcomplete=2.5)
    assert most_candidates(kkt_run.KKT(victim=victim, attack=attack)) == 2 * 150


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


def test_of_several_attacks_the_one_with_the_lowest_objective_is_told() -> None:
    several = replace(SEPARATED, n_attacks=3)
    for result in run(several, specs(2)):
        assert result.pairs.candidate.tolist() == list(range(3 * 8))
        alone = []
        for k in range(3):
            (one,) = run(SEPARATED, [renamed(result.spec, k)])
            alone.append(one.stats["attack_loss"])
        assert result.stats["attack_loss"] == min(alone)


def renamed(spec: RunSpec, k: int) -> RunSpec:
    """The run whose one attack draws what attack `k` of `spec` draws."""

    class Renamed(RunSpec):
        def generator(self, purpose: str) -> torch.Generator:
            return spec.generator(f"attack {k}" if purpose == "attack" else purpose)

    return Renamed(**vars(spec))


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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"victim": Network(widths=(9,), conv=Conv()), "attack": SHORT}, "span patches, not image"),
        ({"attack": replace(SHORT, n_images=17)}, "a first layer of 16 neurons; it has 16 at most"),
        ({"attack": KKTAttack(condition="multiclass")}, "'bce' with attack.condi"),
    ],
)
def test_what_cannot_be_separated_is_refused_with_the_settings(changed: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refusal:
        replace(QUICK_ALL, **changed)
    assert "\n" not in str(refusal.value)


def test_more_images_than_pictures_have_features_are_refused_before_a_victim_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kkt_run, "train", lambda *_given, **_named: pytest.fail("trained"))
    with pytest.raises(ValueError, match="2205 features cannot tell 3000 images apart"):
        run(
            replace(SEPARATED, attack=replace(SHORT, n_images=3000), victim=Network(widths=(3000,)))
        )
