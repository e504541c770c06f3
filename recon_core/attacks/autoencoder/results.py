"""What a run of the family `autoencoder` is given and leaves: degraded images, scores, pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from recon_core.attacks.candidate_matching import ROWS, no_pairs, own_pairs
from recon_core.attacks.plug_and_play import Ending, Recovered
from recon_core.degradation import degrade, mask_pattern
from recon_core.types import STATS, Outcome, RunResult, RunSpec

if TYPE_CHECKING:
    from recon_core.attacks.autoencoder.run import AutoencoderRecovery, KnownAutoencoder


@dataclass(frozen=True)
class Learned:
    """What a victim is trained on: its images, augmented, and how they were."""

    targets: UInt8[Tensor, "n c h w"]
    augment: Float[Tensor, "n 9"]


@dataclass(frozen=True)
class DegradedImages:
    """All n images of a run by all its masks, mask after mask: row k n + i is image i by mask k.

    `mask` is True where a pixel was kept.
    """

    y: Float[Tensor, "b c h w"]
    mask: Bool[Tensor, "b c h w"]


def degraded_images(
    spec: RunSpec, x: Float[Tensor, "n c h w"], *, masks: Sequence[str], sigma: float
) -> DegradedImages:
    """What the attack of a run is given, on the CPU; masks and noise depend on the spec alone."""
    pieces, kept = [], []
    for name in masks:
        generator = spec.generator(f"mask {name}")
        mask = mask_pattern(name, x.shape[2], x.shape[3], generator=generator)
        noise = [spec.generator(f"noise {name} {i}") for i in range(len(x))] if sigma else []
        pieces.append(degrade(x, mask, sigma=sigma, generators=tuple(noise)))
        kept.append(mask.expand(x.shape))
    return DegradedImages(y=torch.cat(pieces), mask=torch.cat(kept))


def result_of(
    experiment: AutoencoderRecovery,
    spec: RunSpec,
    *,
    victim: KnownAutoencoder,
    learned: Learned,
    recovered: Recovered | None,
) -> RunResult:
    """The result of one run; `recovered` is None of a victim that diverged."""
    targets = learned.targets
    stats = dict.fromkeys(STATS, math.nan) | {"train_loss": victim.checkpoint.loss}
    outcome = Outcome.OK if victim.ok else Outcome.UNFITTED
    pairs = no_pairs(targets.shape[1:])
    if recovered is None or bool((recovered.ending == Ending.NONFINITE).all()):
        outcome = Outcome.NONFINITE
    else:
        stats |= {
            "attack_loss": _residual(victim, recovered),
            "n_iterations": float(recovered.n_applied.double().mean()),
        }
        pairs = own_pairs(
            recovered.x,
            targets,
            torch.arange(len(recovered.x)) % len(targets),
            iterations=recovered.n_applied,
            keep=experiment.keep,
            threshold=experiment.confident_ssim,
            gap=experiment.confident_gap,
        )
    return RunResult(
        spec=spec,
        outcome=outcome,
        targets=targets,
        augment=learned.augment,
        mean_image=torch.zeros(targets.shape[1:]),
        margins=torch.full((len(targets),), math.nan),
        pairs=pairs,
        stats=stats,
    )


def _residual(victim: KnownAutoencoder, recovered: Recovered) -> float:
    """The mean square of f(x) - x, which is 0 at a training image that was learned perfectly; of
    the recoveries for which f was finite."""
    total, n = 0.0, 0
    for x, ending in zip(recovered.x.split(ROWS), recovered.ending.split(ROWS), strict=True):
        error = (victim.f(x) - x)[ending != Ending.NONFINITE].double()
        total += float(error.square().sum())
        n += error.numel()
    return total / n
