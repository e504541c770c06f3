"""The family `autoencoder`: what its columns mean, its outcomes, its sweeps, its memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.autoencoder.run import AutoencoderRecovery, degraded_images
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.degradation import MASKS
from recon_core.matching import fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.restore.examples import make_examples, to_pictures
from recon_core.types import Outcome, RunResult, RunSpec
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from tests.recon_core.small_runs import Kept, assert_all_equal, assert_equal_results
from tests.recon_core.tiles import photograph_tiles

CPU = torch.device("cpu")
N, SIDE = 4, 16
TILES = photograph_tiles(SIDE, shrink=4)
SPEC = RunSpec(run=3, root_seed=7, image_ids=(0, 1, 2, 3), labels=(5, 0, 5, 2))
SMALL = AutoencoderRecovery(
    victim=FullyConnected(depth=3, width=48),
    training=AutoencoderTraining(epochs=600, lr=3e-3, levels=(0.01, 1e-3)),
    masks=("random", "half", "window"),
    attack=KnownMask(),
    keep="all",
)


def run(experiment: AutoencoderRecovery, *specs: RunSpec) -> list[RunResult]:
    images = torch.stack([TILES[list(spec.image_ids)] for spec in specs])
    return experiment.run_batch(specs, images, device=CPU)


def short(attack: Any) -> Any:
    """With a few iterations."""
    few = {"n_admm": 3, "n_iterations": 3, "n_alternations": 2, "n_steps": 3}
    return replace(attack, **{name: n for name, n in few.items() if hasattr(attack, name)})


@pytest.fixture(scope="module")
def result() -> RunResult:
    torch.set_num_threads(1)
    return run(SMALL, SPEC)[0]


def test_a_candidate_is_a_mask_and_an_image_and_its_target_is_that_image(
    result: RunResult,
) -> None:
    pairs = result.pairs
    assert pairs.candidate.tolist() == list(range(3 * N))
    assert pairs.target_row.tolist() == [0, 1, 2, 3] * 3
    assert pairs.iteration.tolist() == [SMALL.attack.n_admm] * len(pairs)  # type: ignore[union-attr]
    truth = TILES[:N].float() / 255
    scores = ssim_matrix(pairs.reconstruction, truth)
    own = scores[torch.arange(len(pairs)), pairs.target_row]
    others = scores.scatter(1, pairs.target_row[:, None], -1).amax(1)
    torch.testing.assert_close(pairs.ssim_best, own, atol=1e-6, rtol=0)
    torch.testing.assert_close(pairs.ssim_second, others, atol=1e-6, rtol=0)
    assert torch.equal(pairs.confident, (own > 0.4) & (own - others >= 0.05))
    degraded = degraded_images(SPEC, truth, masks=SMALL.masks, sigma=0.0)
    kept = degraded.mask
    assert torch.equal(pairs.reconstruction[kept], degraded.y[kept])  # put back: this very order
    assert float(own.mean()) > 0.6


def test_reconstructions_are_pictures_wherever_they_are_shown(result: RunResult) -> None:
    pairs = result.pairs
    assert not bool(result.mean_image.any())
    pictures = fit_to_range(pairs.reconstruction, result.mean_image)
    assert torch.equal(pictures, pairs.reconstruction)
    perfect = 0.2 + 0.5 * TILES[:2].float() / 255  # touches neither black nor white
    batch = {
        "reconstruction": perfect.numpy(),
        "mean_image": torch.zeros_like(perfect).numpy(),
        "target": TILES[:2].numpy(),
        "augment": torch.zeros(2, 9).numpy(),
    }
    condition = to_pictures(make_examples(batch).condition)
    torch.testing.assert_close(condition, perfect, atol=1e-6, rtol=0)


def test_stats_say_what_applies_and_are_nan_where_nothing_does(result: RunResult) -> None:
    known = {name: value for name, value in result.stats.items() if math.isfinite(value)}
    assert set(known) == {"train_loss", "attack_loss", "n_iterations"}
    assert known["n_iterations"] == 40
    assert known["train_loss"] <= 1e-3
    x = result.pairs.reconstruction
    victim = SMALL.train_victim(SPEC, TILES[:N], device=CPU)
    residual = float((victim.f(x) - x).double().square().mean())
    assert known["attack_loss"] == pytest.approx(residual, rel=1e-4)
    assert result.margins.isnan().all()
    assert result.outcome is Outcome.OK


def test_the_level_is_where_the_training_ends() -> None:
    (early,) = run(replace(SMALL, level=0.01), SPEC)
    assert 1e-3 < early.stats["train_loss"] <= 0.01
    longer = replace(SMALL.training, levels=(0.01, 1e-3, 1e-5))
    (same,) = run(replace(SMALL, level=0.01, training=longer), SPEC)
    assert_equal_results(early, same)


def test_a_victim_that_never_reaches_its_level_is_attacked_where_it_ended() -> None:
    (unfitted,) = run(replace(SMALL, training=replace(SMALL.training, epochs=30)), SPEC)
    assert unfitted.outcome is Outcome.UNFITTED
    assert len(unfitted.pairs) == 3 * N
    assert unfitted.stats["train_loss"] > 1e-3


def test_a_victim_that_diverges_leaves_no_pairs_and_its_neighbours_alone() -> None:
    hot = replace(SMALL, training=replace(SMALL.training, lr=1e30, lr_end=1e30))
    (nonfinite,) = run(hot, SPEC)
    assert nonfinite.outcome is Outcome.NONFINITE
    assert len(nonfinite.pairs) == 0
    assert tuple(nonfinite.pairs.reconstruction.shape) == (0, 3, SIDE, SIDE)


def test_only_confident_pairs_are_kept_unless_all_are_asked_for(result: RunResult) -> None:
    strict = replace(SMALL, keep="confident", confident_ssim=0.9)
    (kept,) = run(strict, SPEC)
    wanted = result.pairs.ssim_best > 0.9
    assert 0 < int(wanted.sum()) < len(wanted)
    assert kept.pairs.candidate.tolist() == wanted.nonzero().flatten().tolist()
    assert torch.equal(kept.pairs.reconstruction, result.pairs.reconstruction[wanted])


def test_masks_noise_and_starts_are_the_runs_own_and_the_victim_is_shared() -> None:
    kept = Kept()
    noisy = replace(SMALL, sigma=0.05, attack=UnknownMask(n_admm=5, n_alternations=4))
    sweep = [replace(SPEC, run=run, victim=9) for run in (18, 19)]
    images = torch.stack([TILES[:N]] * 2)
    first, second = noisy.run_batch(sweep, images, device=CPU, victims=kept)
    assert first.stats["train_loss"] == second.stats["train_loss"]
    assert not torch.equal(first.pairs.reconstruction, second.pairs.reconstruction)
    assert_all_equal([second], noisy.run_batch(sweep[1:], images[1:], device=CPU, victims=kept))
    assert_all_equal((first, second), run(noisy, *sweep))
    assert list(kept) == [9]


@pytest.mark.parametrize(
    "attack", [UnknownMask(), KnownMask(noisy=True), NoiseAware(), Iteration()]
)
def test_every_attack_goes_with_every_mask(attack: object) -> None:
    experiment = replace(
        SMALL,
        masks=MASKS,
        sigma=0.02,
        attack=short(attack),
        training=replace(SMALL.training, epochs=20),
    )
    (result,) = run(experiment, SPEC)
    assert len(result.pairs) == 6 * N
    assert 0 <= result.pairs.reconstruction.min() <= result.pairs.reconstruction.max() <= 1


def test_only_the_attack_that_knows_the_mask_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    for attack in (UnknownMask(), KnownMask(), NoiseAware(), Iteration()):
        recover = type(attack).recover

        def spy(self, f, degraded, recover=recover):  # type: ignore[no-untyped-def]
            told[self.kind] = (degraded.mask is not None, degraded.sigma)
            return recover(self, f, degraded)

        monkeypatch.setattr(type(attack), "recover", spy)
        brief = replace(SMALL, attack=short(attack), training=replace(SMALL.training, epochs=2))
        run(replace(brief, masks=("half",)), SPEC)
    secret = (False, None)
    assert told == {
        **{"unknown": secret, "noise_aware": secret, "iteration": secret},
        "known": (True, None),
    }
