"""Similarity of recovered and original images as the MixCon paper has it (section 4.3, C.3).

Two scores in [0, 1] where higher is more alike: `unit_ssim`, and PSIM, which is 1 minus a
perceptual loss (`perceptual_similarity`; the paper names no network, layers or scaling).

Recovery of a training set (autoencoder paper, section 4): an image is recovered accurately if its
mean squared error is below 1e-7 (a PSNR above 70 dB), approximately if it is below 5e-4 (33.01 dB);
pixels in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from recon_core.metrics import SSIMConvention, ssim_pairs
from recon_core.summary import bootstrap_interval, proportion_interval

Maps = Sequence[Tensor]
"""The feature maps of n images, layer by layer: each (n, channels, positions ...)."""
_EPS = 1e-10


@dataclass(frozen=True, kw_only=True)
class Similarities:
    """Scores of every recovered image with its original: `ssim` is `unit_ssim`, `psnr` in dB (120
    at most), `mse` the mean squared error, `psim` the `perceptual_similarity` (None without feature
    maps)."""

    ssim: Float64[Tensor, " n"]
    psnr: Float64[Tensor, " n"]
    mse: Float64[Tensor, " n"]
    psim: Float64[Tensor, " n"] | None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Scores of n images: mean, standard deviation (without Bessel's correction), and the worst
    case for who defends: the image recovered best, and its row."""

    n: int
    mean: float
    std: float
    worst: float
    worst_row: int


def similarities(
    recovered: Float[Tensor, "n c h w"],
    original: Float[Tensor, "n c h w"],
    *,
    recovered_maps: Maps | None = None,
    original_maps: Maps | None = None,
    convention: SSIMConvention = "gaussian11",
) -> Similarities:
    """All scores of every image; pixels in [0, 1]. PSIM needs the feature maps of both. Raises
    ValueError if images, pixels or maps do not match or are not finite, or for images smaller than
    SSIM's window."""
    if (recovered_maps is None) != (original_maps is None):
        raise ValueError("maps are given of one side only; give those of both images, or none")
    ssim = unit_ssim(recovered, original, convention=convention)
    mse = errors(recovered, original)
    psim = None
    if recovered_maps is not None and original_maps is not None:
        psim = perceptual_similarity(recovered_maps, original_maps)
        if len(psim) != len(mse):
            raise ValueError(f"the maps are of {len(psim)} images, not {len(mse)}; map all of them")
    return Similarities(ssim=ssim, psnr=psnr(mse), mse=mse, psim=psim)


def unit_ssim(
    recovered: Float[Tensor, "n c h w"],
    original: Float[Tensor, "n c h w"],
    *,
    convention: SSIMConvention = "gaussian11",
) -> Float64[Tensor, " n"]:
    """(SSIM + 1) / 2, in [0, 1] (MixCon paper, C.3); unrelated images score about .5. Raises
    ValueError for images that do not match or are smaller than the window."""
    return (ssim_pairs(recovered, original, convention=convention).double() + 1) / 2


def perceptual_similarity(recovered_maps: Maps, original_maps: Maps) -> Float64[Tensor, " n"]:
    """1 - perceptual loss, from the feature maps of each layer of some network.

        loss = mean over layers and positions of 1/2 ||f / ||f|| - g / ||g|| ||^2

    f and g being the k channels at one position of the two images' maps: LPIPS (Zhang et al. 2018,
    eq. 1) without learned weights. 1/2 makes the similarity the cosine of f and g: in [0, 1] for
    maps that are not negative, as after ReLU, else in [-1, 1]; 1 for equal images. A position where
    both maps are 0 counts as alike, one where only one is as 1/2. A layer without positions (n, k)
    is one position. Numbers of different networks do not compare. Summed in float64.

    Raises ValueError for no layers, layers that do not match, or maps that are not finite.
    """
    if not recovered_maps or len(recovered_maps) != len(original_maps):
        raise ValueError(
            f"maps of {len(recovered_maps)} and {len(original_maps)} layers; give the same layers "
            "of both images, at least one"
        )
    losses = []
    for layer, maps in enumerate(zip(recovered_maps, original_maps, strict=True)):
        f, g = maps
        if f.shape != g.shape or f.numel() == 0 or f.dim() < 2:
            raise ValueError(
                f"maps of layer {layer} are {tuple(f.shape)} and {tuple(g.shape)}; expected "
                "(n, channels, positions ...) of the same shape for both images"
            )
        if not bool(f.isfinite().all() and g.isfinite().all()):
            raise ValueError(f"maps of layer {layer} are not finite; check the network's weights")
        exact = (one.double().reshape(*one.shape[:2], -1) for one in maps)
        unit = [one / (torch.linalg.vector_norm(one, dim=1, keepdim=True) + _EPS) for one in exact]
        losses.append((unit[0] - unit[1]).square().sum(1).mean(1) / 2)
    return 1 - torch.stack(losses).mean(0)


def spread(scores: Float[Tensor, " n"], *, higher_is_alike: bool = True) -> Spread:
    """Mean, standard deviation and worst case (MixCon paper, tables 2 to 4). Raises ValueError for
    no scores or one not finite."""
    if not len(scores) or not bool(scores.isfinite().all()):
        raise ValueError(f"{len(scores)} scores; expected at least one, all of them finite")
    exact = scores.double()
    row = int(exact.argmax() if higher_is_alike else exact.argmin())
    return Spread(
        n=len(scores),
        mean=float(exact.mean()),
        std=float(exact.std(correction=0)),
        worst=float(exact[row]),
        worst_row=row,
    )


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
