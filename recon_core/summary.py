"""From pictures to the numbers of a table: best matches per image, good counts, intervals.

The protocol is that of paper 001, section 5.1.1: each image is scored by its best match among all
pictures that a method gives, found by SSIM; HaarPSI is that of the same match. The best match is
chosen with the image at hand, so a high score is evidence only beside the scores that images get
which the victim never saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from recon_core.matching import best_per_target
from recon_core.metrics import haarpsi_pairs, ssim_matrix

N_BOOTSTRAP = 2000
NOTICEABLE = 0.01
"""The smallest difference of SSIM that counts as better or worse."""


@dataclass(frozen=True, kw_only=True)
class BestMatches:
    """Per image: the row of its best picture (-1: there is none), and the scores of that picture.

    An image without any picture scores 0 in both: nothing came back.
    """

    row: Int[Tensor, " t"]
    ssim: Float[Tensor, " t"]
    haarpsi: Float[Tensor, " t"]


class Summary(TypedDict):
    """One side (targets or decoys) of one method. Without images, fractions and means are None."""

    n: int
    n_good: int
    good_fraction: float | None
    mean_ssim: float | None
    mean_ssim_interval: tuple[float, float] | None
    mean_haarpsi: float | None
    best_ssim: float | None


class Comparison(TypedDict):
    """How many images score better or worse after than before, by more than `NOTICEABLE`."""

    n_better: int
    n_worse: int
    mean_difference: float | None


def best_matches(
    pictures: Float[Tensor, "p c h w"], images: Float[Tensor, "t c h w"]
) -> BestMatches:
    """Each image's best picture by SSIM; pictures and images in [0, 1] on one device."""
    row, ssim = best_per_target(ssim_matrix(pictures, images))
    found = row >= 0
    haarpsi = torch.zeros_like(ssim)
    haarpsi[found] = haarpsi_pairs(pictures[row[found]], images[found]).to(ssim.dtype)
    return BestMatches(row=row, ssim=ssim.where(found, 0.0), haarpsi=haarpsi)


def summarise(
    ssim: npt.NDArray[np.float64], haarpsi: npt.NDArray[np.float64], *, good_threshold: float
) -> Summary:
    """Counts and means of one score per image; good means SSIM strictly above the threshold."""
    n = len(ssim)
    n_good = int((ssim > good_threshold).sum())
    return Summary(
        n=n,
        n_good=n_good,
        good_fraction=n_good / n if n else None,
        mean_ssim=float(ssim.mean()) if n else None,
        mean_ssim_interval=bootstrap_interval(ssim) if n else None,
        mean_haarpsi=float(haarpsi.mean()) if n else None,
        best_ssim=float(ssim.max()) if n else None,
    )


def bootstrap_interval(
    values: npt.NDArray[np.float64], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, resampling images (Efron 1979).

    Images of one run share a victim, so it speaks of these victims and not of the next one.
    Raises ValueError for no values.
    """
    if len(values) == 0:
        raise ValueError("values is empty; an interval needs at least one")
    rng = np.random.default_rng(seed)
    means = [rng.choice(values, len(values)).mean() for _ in range(N_BOOTSTRAP)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def compare(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> Comparison:
    """Image by image, what a restorer did to the scores (001, figure 3)."""
    difference = after - before
    return Comparison(
        n_better=int((difference > NOTICEABLE).sum()),
        n_worse=int((difference < -NOTICEABLE).sum()),
        mean_difference=float(difference.mean()) if len(difference) else None,
    )


def n_above_every(ssim: npt.NDArray[np.float64], decoy_ssim: npt.NDArray[np.float64]) -> int:
    """How many images score above the best decoy: what survives a threshold without false hits."""
    return int((ssim > decoy_ssim.max(initial=-1.0)).sum())
