"""What a run of the family `autoencoder` is given and leaves: degraded images, scores, pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Float32, UInt8
from torch import Tensor

from recon_core.attacks.pairing import ROWS, no_pairs
from recon_core.attacks.plug_and_play import Ending, Recovered
from recon_core.degradation import degrade, mask_pattern
from recon_core.metrics import ssim_matrix
from recon_core.types import STATS, Outcome, Pairs, RunResult, RunSpec

if TYPE_CHECKING:
    from recon_core.attacks.autoencoder import AutoencoderRecovery, KnownAutoencoder


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
        pairs = _pairs(experiment, recovered, targets)
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


def _pairs(
    experiment: AutoencoderRecovery, recovered: Recovered, targets: UInt8[Tensor, "n c h w"]
) -> Pairs:
    """Every recovery with the image that it was degraded from, in order."""
    x = recovered.x.float()
    candidate = torch.arange(len(x))
    target_row = candidate % len(targets)
    own, others = _scores(x, targets, target_row)
    confident = (own > experiment.confident_ssim) & (own - others >= experiment.confident_gap)
    chosen = confident if experiment.keep == "confident" else torch.ones_like(confident)
    return Pairs(
        reconstruction=x.cpu()[chosen].contiguous(),
        target_row=target_row[chosen],
        candidate=candidate[chosen],
        iteration=recovered.n_applied.cpu()[chosen],
        ssim_best=own[chosen],
        ssim_second=others[chosen],
        confident=confident[chosen],
    )


def _scores(
    x: Float32[Tensor, "b c h w"], targets: UInt8[Tensor, "n c h w"], target_row: Tensor
) -> tuple[Float32[Tensor, " b"], Float32[Tensor, " b"]]:
    """SSIM to the own image, and the highest to any other of the run (-1 if there is none)."""
    truth = targets.to(x.device).float() / 255
    scores = torch.cat([ssim_matrix(rows, truth).cpu() for rows in x.split(ROWS)])
    index = target_row[:, None]
    return scores.gather(1, index).squeeze(1), scores.scatter(1, index, -1.0).amax(dim=1)
