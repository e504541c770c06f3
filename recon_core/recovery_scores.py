"""Recovery of a training set: errors, peak signal-to-noise ratios and rates.

Autoencoder paper, section 4: an image is recovered accurately if its mean squared error is below
1e-7 (a PSNR above 70 dB), approximately if it is below 5e-4 (33.01 dB); pixels in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Float64
from torch import Tensor

from recon_core.summary import bootstrap_interval, proportion_interval

ACCURATE = 1e-7
APPROXIMATE = 5e-4
THRESHOLDS = (1e-3, 5e-4, 1e-4, 1e-5, 1e-6, 1e-7)
"""Of the autoencoder paper, figure F.3, and the two above."""

Estimate = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Scores of n recovered images. `accurate` and `approximate` are shares with exact intervals
    (Clopper and Pearson 1934), `psnr` is the mean in dB with a bootstrap interval over the images,
    `by_threshold` counts the images below each of `THRESHOLDS`."""

    n: int
    n_accurate: int
    n_approximate: int
    accurate: Estimate
    approximate: Estimate
    psnr: Estimate
    by_threshold: tuple[int, ...]


def errors(
    x: Float[Tensor, "n c h w"], original: Float[Tensor, "n c h w"]
) -> Float64[Tensor, " n"]:
    """The mean squared error of each image (autoencoder paper, eq. 4), summed in float64. Raises
    ValueError if one is not finite."""
    mse = (x.double() - original.double()).square().flatten(1).mean(1)
    if not mse.isfinite().all():
        bad = (~mse.isfinite()).nonzero().flatten().tolist()
        raise ValueError(
            f"images {bad[:5]} or their originals have NaN or infinite pixels; a method gives "
            "finite pixels even where it failed"
        )
    return mse


def psnr(mse: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """10 log10(1 / mse) in dB; errors below 1e-12 count as it (120 dB), so 0 has a PSNR too."""
    return -10 * mse.clamp(min=1e-12).log10()


def rates(mse: Float64[Tensor, " n"]) -> Rates:
    """Counts, shares and the mean PSNR. Raises ValueError for no errors, or for what are none."""
    n = len(mse)
    if not n or not bool((mse >= 0).all() and mse.isfinite().all()):
        raise ValueError(f"mse has {n} numbers; expected at least one, finite and not negative")

    def below(threshold: float) -> int:
        return int((mse < threshold).sum())

    def share(n_hits: int) -> Estimate:
        return (n_hits / n, *proportion_interval(n_hits, n))

    decibels = psnr(mse).cpu().numpy()
    return Rates(
        n=n,
        n_accurate=below(ACCURATE),
        n_approximate=below(APPROXIMATE),
        accurate=share(below(ACCURATE)),
        approximate=share(below(APPROXIMATE)),
        psnr=(float(decibels.mean()), *bootstrap_interval(decibels)),
        by_threshold=tuple(below(threshold) for threshold in THRESHOLDS),
    )
