"""The kkt family from images to pairs: what is kept, what fails, and that pictures come back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt import KKT
from recon_core.attacks.kkt_objective import KKTAttack
from recon_core.matching import best_per_target, fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.optimisers import Optimiser
from recon_core.types import Outcome, Pairs, RunResult, RunSpec
from recon_core.victims.mlp import MLP, Weights
from recon_core.victims.training import Training
from tests.recon_core.tiles import photograph_tiles

N, SIDE, R = 8, 16, 3
SAVED = (125, 500)
THRESHOLD, GAP = 0.5, 0.35  # stricter than the paper, so that some candidates fail either
CPU = torch.device("cpu")
SMALL = KKT(
    augment_p=0.0,
    victim=MLP(widths=(64, 64)),
    training=Training(epochs=600),
    attack=KKTAttack(n_candidates=2 * N, save_at=SAVED),
    confident_ssim=THRESHOLD,
    confident_gap=GAP,
)
QUICK = dataclasses.replace(
    SMALL,
    training=Training(epochs=40),
    attack=KKTAttack(n_candidates=2 * N, save_at=(5, 20)),
)
ALL = dataclasses.replace(SMALL, keep="all")
TILES = photograph_tiles(SIDE, shrink=4)


def specs(n_runs: int = R) -> list[RunSpec]:
    labels = (0,) * (N // 2) + (1,) * (N // 2)
    return [
        RunSpec(run=run, root_seed=0, image_ids=tuple(range(run * N, (run + 1) * N)), labels=labels)
        for run in range(n_runs)
    ]


def images(n_runs: int = R) -> Tensor:
    return torch.stack([TILES[list(spec.image_ids)] for spec in specs(n_runs)])


@pytest.fixture(scope="module")
def everything() -> list[RunResult]:
    """Three real runs with every candidate kept."""
    return ALL.run_batch(specs(), images(), device=CPU)


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


def test_the_attack_needs_the_training(everything: list[RunResult]) -> None:
    untrained = dataclasses.replace(ALL, training=Training(epochs=1))
    (result,) = untrained.run_batch(specs(1), images(1), device=CPU)
    with_training = best_ssim(everything[0], everything[0].targets).mean()
    assert best_ssim(result, result.targets).mean() < with_training - 0.2


def test_all_keeps_every_candidate_at_every_saved_iteration(everything: list[RunResult]) -> None:
    for result in everything:
        pairs = result.pairs
        assert len(pairs) == len(SAVED) * 2 * N
        assert pairs.candidate.tolist() == [c for c in range(2 * N) for _ in SAVED]
        assert pairs.iteration.tolist() == list(SAVED) * (2 * N)
        found = fit_to_range(pairs.reconstruction, result.mean_image)
        scores = ssim_matrix(found, result.targets.float() / 255)
        top = scores.topk(2, dim=1)
        assert torch.equal(pairs.target_row, top.indices[:, 0])
        torch.testing.assert_close(pairs.ssim_best, top.values[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(pairs.ssim_second, top.values[:, 1], rtol=0, atol=1e-5)


def test_confident_keeps_the_flagged_candidates_with_one_target_each(
    everything: list[RunResult],
) -> None:
    pairs = [r.pairs for r in everything]
    confident = torch.cat([p.confident for p in pairs])
    by_rule = torch.cat([_by_rule(p) for p in pairs]).unflatten(0, (-1, len(SAVED)))
    assert 0 < int(confident.sum()) < len(confident)
    assert torch.equal(confident.unflatten(0, (-1, len(SAVED)))[:, 0], by_rule.any(1))
    kept = SMALL.run_batch(specs(), images(), device=CPU)
    assert sum(len(r.pairs) for r in kept) > 0
    for some, full in zip(kept, everything, strict=True):
        flagged = full.pairs.confident
        assert torch.equal(some.pairs.candidate, full.pairs.candidate[flagged])
        assert torch.equal(some.pairs.iteration, full.pairs.iteration[flagged])
        assert torch.equal(some.pairs.reconstruction, full.pairs.reconstruction[flagged])
        assert bool(some.pairs.confident.all())
        found = fit_to_range(some.pairs.reconstruction, some.mean_image)
        scores = ssim_matrix(found, some.targets.float() / 255)
        to_target = scores.gather(1, some.pairs.target_row[:, None]).squeeze(1)
        torch.testing.assert_close(some.pairs.ssim_best, to_target, rtol=0, atol=1e-5)
        _check_one_target_by_the_rule(some)


def _check_one_target_by_the_rule(result: RunResult) -> None:
    pairs = result.pairs
    for candidate in pairs.candidate.unique():
        rows = pairs.candidate == candidate
        assert len(pairs.target_row[rows].unique()) == 1
        assert int(rows.sum()) == len(SAVED)
        assert bool(_by_rule(pairs)[rows].any())


def _by_rule(pairs: Pairs) -> Tensor:
    return (pairs.ssim_best > THRESHOLD) & (pairs.ssim_best - pairs.ssim_second >= GAP)


def test_targets_are_what_the_victim_saw() -> None:
    (plain,) = QUICK.run_batch(specs(1), images(1), device=CPU)
    assert torch.equal(plain.targets, images(1)[0])
    assert not bool(plain.augment.any())
    torch.testing.assert_close(plain.mean_image, images(1)[0].float().mean(0) / 255)
    augmented = dataclasses.replace(QUICK, augment_p=1.0)
    (moved,) = augmented.run_batch(specs(1), images(1), device=CPU)
    assert not torch.equal(moved.targets, plain.targets)
    assert bool(moved.augment.any())
    torch.testing.assert_close(moved.mean_image, moved.targets.float().mean(0) / 255)


def test_the_attack_starts_from_the_runs_own_noise() -> None:
    frozen = Optimiser(rule="gd", lr=1e-12)
    attack = dataclasses.replace(QUICK.attack, optimiser=frozen, save_at=(1,), sigma=0.01)
    still = dataclasses.replace(QUICK, attack=attack, keep="all")
    for result in still.run_batch(specs(), images(), device=CPU):
        shape = (2 * N, 3 * SIDE * SIDE)
        start = 0.01 * torch.randn(shape, generator=result.spec.generator("attack"))
        saved = result.pairs.reconstruction.flatten(1)
        torch.testing.assert_close(saved, start, rtol=0, atol=1e-6)


def test_an_unfitted_victim_is_said_to_be_one() -> None:
    hardly = dataclasses.replace(QUICK, training=Training(epochs=1))
    (result,) = hardly.run_batch(specs(1), images(1), device=CPU)
    assert result.outcome is Outcome.UNFITTED
    assert result.stats["train_accuracy"] < 1


@pytest.mark.parametrize("keep", ["confident", "all"])
@pytest.mark.parametrize("what", ["victim", "attack"])
def test_a_huge_rate_is_a_result_without_pairs(keep: str, what: str) -> None:
    huge = Optimiser(rule="gd", lr=1e30)
    diverging = dataclasses.replace(QUICK, keep=keep)
    if what == "victim":
        diverging = dataclasses.replace(diverging, training=Training(epochs=40, optimiser=huge))
    else:
        attack = dataclasses.replace(QUICK.attack, optimiser=huge)
        diverging = dataclasses.replace(diverging, attack=attack)
    for result in diverging.run_batch(specs(), images(), device=CPU):
        assert result.outcome is Outcome.NONFINITE
        assert len(result.pairs) == 0
        assert result.pairs.reconstruction.shape == (0, 3, SIDE, SIDE)
        assert torch.equal(result.targets, images()[result.spec.run])


def test_a_diverging_run_does_not_disturb_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recon_core.attacks.kkt.stack_size", lambda _device, n_runs: n_runs)
    quick_all = dataclasses.replace(QUICK, keep="all")
    calm = quick_all.run_batch(specs(), images(), device=CPU)
    init = MLP.init

    def init_with_one_explosive(
        self: MLP, d_in: int, generators: Sequence[torch.Generator], *, dtype: torch.dtype
    ) -> Weights:
        weights = init(self, d_in, generators, dtype=dtype)
        weights[0][1] *= 1e38
        return weights

    monkeypatch.setattr(MLP, "init", init_with_one_explosive)
    wild = quick_all.run_batch(specs(), images(), device=CPU)
    assert [r.outcome for r in wild][1] is Outcome.NONFINITE
    assert calm[1].outcome is not Outcome.NONFINITE
    for run in (0, 2):
        assert wild[run].outcome is calm[run].outcome
        assert torch.equal(wild[run].pairs.reconstruction, calm[run].pairs.reconstruction)
        assert wild[run].stats == calm[run].stats


def test_float64_victims_give_float32_pairs() -> None:
    wide = dataclasses.replace(QUICK, dtype="float64", keep="all")
    narrow = dataclasses.replace(QUICK, keep="all")
    for a, b in zip(
        wide.run_batch(specs(), images(), device=CPU),
        narrow.run_batch(specs(), images(), device=CPU),
        strict=True,
    ):
        assert a.pairs.reconstruction.dtype == a.mean_image.dtype == torch.float32
        assert a.stats["train_loss"] == pytest.approx(b.stats["train_loss"], rel=1e-3)
        assert not torch.equal(a.pairs.reconstruction, b.pairs.reconstruction)


def test_refuses_batches_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="3 specs came with images of 2 runs"):
        QUICK.run_batch(specs(), images(2), device=CPU)
    with pytest.raises(ValueError, match="run 0 plans 8 images, the batch has 7"):
        QUICK.run_batch(specs(1), images(1)[:, :-1], device=CPU)
    odd = dataclasses.replace(specs(1)[0], labels=(0,) * 7 + (2,))
    with pytest.raises(ValueError, match=r"run 0 has labels \[0, 2\]"):
        QUICK.run_batch([odd], images(1), device=CPU)
    with pytest.raises(ValueError, match=r"augment_p=1\.5"):
        KKT(augment_p=1.5)
