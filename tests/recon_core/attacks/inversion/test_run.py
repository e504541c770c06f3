"""The family `inversion`: what is trained on and what is inverted, its outcomes, sweeps, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks import family_run
from recon_core.attacks.inversion import run as inversion
from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.run import Inversion, KnownClassifier
from recon_core.attacks.inversion.strong_inversion import StrongInversion, whiten
from recon_core.matching import fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.types import Outcome, RunResult, RunSpec
from recon_core.victims import split_training
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.split import LeNet5, SplitMLP, SplitNetwork
from recon_core.victims.split_training import SplitTraining
from tests.recon_core.small_runs import Kept, assert_all_equal, assert_equal_results
from tests.recon_core.tiles import photograph_tiles

CPU = torch.device("cpu")
N, SIDE = 12, 28
TILES = photograph_tiles(SIDE, shrink=2).float().mean(1, keepdim=True).to(torch.uint8)
SPEC = RunSpec(run=3, root_seed=7, image_ids=tuple(range(N)), labels=(0, 1) * (N // 2))
SMALL = Inversion(
    n_classes=2,
    victim=LeNet5(cut=1),
    training=SplitTraining(epochs=3, per_class=2),
    held_out=2,
    attack=StrongInversion(n_steps=100, zeta=0.03, starts=("grey",)),
    keep="all",
)
QUICK = replace(SMALL, attack=StrongInversion(n_steps=3, starts=("noise",)))


def run(experiment: Inversion, *specs: RunSpec, images: Tensor | None = None) -> list[RunResult]:
    own = [TILES[list(spec.image_ids)] for spec in specs]
    return experiment.run_batch(specs, torch.stack(own) if images is None else images, device=CPU)


@pytest.fixture(scope="module")
def result() -> RunResult:
    torch.set_num_threads(1)
    return run(SMALL, SPEC)[0]


def test_images_that_were_held_out_come_back_from_the_first_cut(result: RunResult) -> None:
    pairs = result.pairs
    assert result.outcome is Outcome.OK
    assert len(pairs) == 4
    assert float(pairs.ssim_best.mean()) > 0.85
    assert float(pairs.ssim_best.min()) > 0.7
    assert pairs.confident.all()


def test_every_inversion_is_paired_with_the_image_that_its_features_are_of(
    result: RunResult,
) -> None:
    pairs = result.pairs
    assert pairs.candidate.tolist() == [0, 1, 2, 3]
    assert pairs.iteration.tolist() == [100] * 4
    scores = ssim_matrix(pairs.reconstruction, TILES[:N].float() / 255)
    own = scores[torch.arange(4), pairs.target_row]
    others = scores.scatter(1, pairs.target_row[:, None], -1).amax(1)
    torch.testing.assert_close(pairs.ssim_best, own, atol=1e-6, rtol=0)
    torch.testing.assert_close(pairs.ssim_second, others, atol=1e-6, rtol=0)
    assert torch.equal(result.targets, TILES[:N])
    assert not bool(result.mean_image.any())
    pictures = fit_to_range(pairs.reconstruction, result.mean_image)
    assert torch.equal(pictures, pairs.reconstruction)


def test_statistics_are_of_what_was_trained_on_and_margins_of_all(result: RunResult) -> None:
    known = {name: value for name, value in result.stats.items() if math.isfinite(value)}
    assert set(known) == {
        *("train_loss", "train_accuracy", "margin_min", "attack_loss", "n_iterations")
    }
    victim = SMALL.train_victim(SPEC, TILES[:N], device=CPU)
    x, labels = TILES[:N].float() / 255, torch.tensor(SPEC.labels)
    phi = victim.model.classify(victim.weights, victim.model.features(victim.weights, x[None]))[0]
    margins = (phi[:, 1] - phi[:, 0]) * (2 * labels - 1)
    torch.testing.assert_close(result.margins, margins, atol=1e-5, rtol=0)
    trained = torch.ones(N, dtype=torch.bool)
    trained[result.pairs.target_row] = False
    assert known["margin_min"] == pytest.approx(float(margins[trained].min()), abs=1e-5)
    assert known["margin_min"] != pytest.approx(float(margins[~trained].min()), abs=1e-5)
    loss = torch.nn.functional.cross_entropy(phi[trained], labels[trained])
    assert known["train_loss"] == pytest.approx(float(loss), abs=1e-5)
    assert known["train_accuracy"] == float((margins[trained] > 0).float().mean())
    assert known["n_iterations"] == 100


def test_the_strong_attack_whitens_with_the_z_that_the_server_sees() -> None:
    attack = StrongInversion(n_steps=30, starts=("noise", "grey"))
    exact = replace(SMALL, attack=attack, dtype="float64")
    (result,) = run(exact, SPEC)
    victim = exact.train_victim(SPEC, TILES[:N], device=CPU)
    rows = result.pairs.target_row
    z = victim.sent(TILES[rows].double() / 255)
    found = attack.invert(
        lambda x: victim.model.features(victim.weights, x[None])[0],
        z,
        shape=(1, SIDE, SIDE),
        generators=[SPEC.generator(f"start {row}") for row in rows.tolist()],
        whitening=whiten(z),
    )
    torch.testing.assert_close(result.pairs.reconstruction, found.x.float(), atol=1e-5, rtol=0)
    assert result.stats["attack_loss"] == pytest.approx(float(found.objective.mean()), rel=1e-6)
    assert result.stats["n_iterations"] == 60


def test_held_out_images_are_not_trained_on_and_only_they_are_inverted(
    result: RunResult,
) -> None:
    rows = result.pairs.target_row
    assert sorted(SPEC.labels[row] for row in rows.tolist()) == [0, 0, 1, 1]
    before = SMALL.train_victim(SPEC, TILES[:N], device=CPU)
    other = TILES[:N].clone()
    other[rows] = 255 - other[rows]
    after = SMALL.train_victim(SPEC, other, device=CPU)
    assert_same_weights(before, after)
    other = TILES[:N].clone()
    other[min(set(range(N)) - set(rows.tolist()))] = 0
    changed = SMALL.train_victim(SPEC, other, device=CPU)
    assert not torch.equal(before.weights["fc3.bias"], changed.weights["fc3.bias"])


def assert_same_weights(one: KnownClassifier, other: KnownClassifier) -> None:
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, other.weights[name]), name


def test_which_are_held_out_depends_on_the_victim_and_on_nothing_of_the_attack() -> None:
    rows = [run(QUICK, replace(SPEC, run=k, victim=9))[0].pairs.target_row.tolist() for k in (3, 4)]
    assert rows[0] == rows[1]
    others = [run(QUICK, replace(SPEC, root_seed=s))[0].pairs.target_row.tolist() for s in range(3)]
    assert any(other != others[0] for other in others)


def test_with_none_held_out_the_training_images_are_inverted() -> None:
    (whole,) = run(replace(QUICK, held_out=0), SPEC)
    assert whole.pairs.target_row.tolist() == list(range(N))
    assert whole.stats["margin_min"] == float(whole.margins.min())


def test_a_batch_is_its_runs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [replace(SPEC, run=k, victim=k) for k in (3, 4, 5)]
    noisy = replace(QUICK, attack=StrongInversion(n_steps=20, starts=("noise", "grey", "noise")))
    alone = [run(noisy, spec)[0] for spec in specs]
    assert_all_equal(alone, run(noisy, *specs))
    monkeypatch.setattr(family_run, "stack_size", lambda _device, n_runs: n_runs)
    monkeypatch.setattr(inversion, "INVERTED_AT_ONCE", 3)  # of 4
    assert_all_equal(alone, run(noisy, *specs), tolerance=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_victim_of_a_sweep_is_trained_once_and_starts_are_the_runs_own(
    stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stacked:
        monkeypatch.setattr(family_run, "stack_size", lambda _device, n_runs: n_runs)
    trainings: list[int] = []
    train = split_training.train_split

    def counted(model: Any, weights: Any, *given: Any, **settings: Any) -> Any:
        trainings.append(len(settings["defences"]))
        return train(model, weights, *given, **settings)

    monkeypatch.setattr(inversion, "train_split", counted)
    kept = Kept()
    sweep = [replace(SPEC, run=k, victim=9) for k in (18, 19)]
    images = torch.stack([TILES[:N]] * 2)
    first, second = QUICK.run_batch(sweep, images, device=CPU, victims=kept)
    assert (trainings, list(kept)) == ([1], [9])
    assert first.stats["train_loss"] == second.stats["train_loss"]
    assert torch.equal(first.margins, second.margins)
    assert not torch.equal(first.pairs.reconstruction, second.pairs.reconstruction)
    again = QUICK.run_batch(sweep[1:], images[1:], device=CPU, victims=kept)
    assert trainings == [1]
    assert_all_equal([second], again, tolerance=1e-5 if stacked else 0.0)
    monkeypatch.undo()
    tolerance = 1e-5 if stacked else 0.0
    assert_all_equal((first, second), run(QUICK, *sweep), tolerance=tolerance)


def test_a_victim_that_diverges_leaves_no_pairs_and_its_neighbours_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hot = replace(QUICK, training=replace(QUICK.training, lr=1e30))
    (nonfinite,) = run(hot, SPEC)
    assert nonfinite.outcome is Outcome.NONFINITE
    assert len(nonfinite.pairs) == 0
    assert tuple(nonfinite.pairs.reconstruction.shape) == (0, 1, SIDE, SIDE)
    each_of = KnownClassifier.each_of

    def second_is_lost(model: Any, trained: Any) -> list[KnownClassifier]:
        found = each_of(model, trained)
        return [found[0], replace(found[1], diverged=True), found[2]]

    specs = [replace(SPEC, run=k, victim=k) for k in (3, 4, 5)]
    alone = [run(QUICK, spec)[0] for spec in specs]
    monkeypatch.setattr(family_run, "stack_size", lambda _device, n_runs: n_runs)
    monkeypatch.setattr(KnownClassifier, "each_of", second_is_lost)
    together = run(QUICK, *specs)
    assert [r.outcome for r in together] == [Outcome.OK, Outcome.NONFINITE, Outcome.OK]
    for k in (0, 2):
        assert_equal_results(alone[k], together[k], tolerance=1e-4)


def test_an_attack_that_diverges_everywhere_is_nonfinite() -> None:
    hot = replace(QUICK, attack=GradientInversion(lr=1e38, n_steps=30, weight_decay=1.0))
    (result,) = run(hot, SPEC)
    assert result.outcome is Outcome.NONFINITE
    assert math.isfinite(result.stats["train_loss"])
    assert math.isnan(result.stats["attack_loss"])


def test_only_confident_pairs_are_kept_unless_all_are_asked_for(result: RunResult) -> None:
    threshold = float(result.pairs.ssim_best.median())
    (kept,) = run(replace(SMALL, keep="confident", confident_ssim=threshold), SPEC)
    wanted = result.pairs.ssim_best > threshold
    assert 0 < int(wanted.sum()) < len(wanted)
    assert kept.pairs.candidate.tolist() == wanted.nonzero().flatten().tolist()
    assert torch.equal(kept.pairs.target_row, result.pairs.target_row[wanted])
    assert torch.equal(kept.pairs.reconstruction, result.pairs.reconstruction[wanted])


@pytest.mark.parametrize("victim", [LeNet5(cut=4), SplitMLP(widths=(30, 20), cut=1, init="torch")])
@pytest.mark.parametrize("attack", [GradientInversion(n_steps=3), StrongInversion(n_steps=3)])
@pytest.mark.parametrize("defence", [None, MixCon(), UniCon()])
def test_every_attack_goes_with_every_network_and_defence(
    victim: SplitNetwork, attack: Any, defence: MixCon | UniCon | None
) -> None:
    brief = replace(SMALL.training, epochs=1)
    experiment = replace(SMALL, victim=victim, attack=attack, defence=defence, training=brief)
    (result,) = run(replace(experiment, dtype="float64"), SPEC)
    assert result.outcome is Outcome.OK
    assert 0 <= result.pairs.reconstruction.min() <= result.pairs.reconstruction.max() <= 1


@pytest.mark.parametrize(
    ("change", "labels", "said"),
    [
        ({}, (0, 2) * 6, "run 3 has label 2, which is none of the classes 0 to 1; set n_classes"),
        ({}, (0, -1) * 6, "label -1"),
        (
            {"held_out": 5},
            (0, 1) * 6,
            "6 images of a class less held_out=5 leave 1 to train on, fewer than "
            "training.per_class=2 .* a run of 2 classes needs 14 images",
        ),
        ({"held_out": 9}, (0, 1) * 6, "held_out=9 leave 0 to train on"),
        ({}, (0,) * 9 + (1,) * 3, "3 images of a class less held_out=2 leave 1"),
        ({"n_classes": 3}, (0, 1) * 6, "0 images of a class"),
    ],
)
def test_runs_that_cannot_be_trained_are_refused_with_the_fix(
    change: dict[str, Any], labels: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run(replace(QUICK, **change), replace(SPEC, labels=labels))


@pytest.mark.parametrize(("height", "width"), [(10, 16), (16, 10)])
def test_images_below_ssims_window_are_refused_before_any_training(
    height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*_arguments: object, **_settings: object) -> None:
        raise AssertionError("a victim was trained")

    monkeypatch.setattr("recon_core.attacks.inversion.run.train_split", trained)
    small = TILES[None, :N, :, :height, :width]
    with pytest.raises(ValueError, match=f"{height}x{width} are smaller than SSIM's window of 11"):
        SMALL.run_batch([SPEC], small, device=CPU)
    with pytest.raises(ValueError, match="enlarge them first"):
        SMALL.train_victim(SPEC, small[0], device=CPU)
