"""Less of the start's noise in sources, once their mixing is known.

A start that is not taken off is noise: W = M X + N, of the same variance sigma^2 in every weight.
With M from a separation, and images whose cosines are independent with variances v_i C_f, the most
likely images are Wiener's estimate, for v_i = 1,

    X_f = (M^T M + sigma^2 / C_f)^{-1} M^T W_f.

C is measured on W itself, whose noise is known, in rings of equal frequency.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from recon_core.attacks.span.source_model import cosines
from recon_core.attacks.span.subspace import mixing_of

SMALLEST_VARIANCE = 1e-3
"""Of a ring, in units of the noise's."""


def denoised(
    x: Float[Tensor, "k d"],
    weight: Float[Tensor, "h d"],
    *,
    noise: float,
    shape: tuple[int, int, int],
) -> Float[Tensor, "k d"]:
    """Wiener's estimate of sources `x` in `weight`, with noise of standard deviation `noise`;
    without it `x`."""
    if noise <= 0:
        return x
    norm = x.double().square().mean(1).sqrt().clamp_min(1e-30)
    unit = x.double() / norm[:, None]
    wide = weight.double()
    mixing = mixing_of(unit, wide)
    seen = cosines(wide.unflatten(1, shape))
    relative = noise**2 / image_spectrum(seen, noise).flatten()
    strengths, axes = torch.linalg.eigh(mixing.mT @ mixing)
    projected = axes.mT @ (mixing.mT @ seen.flatten(1))
    estimate = axes @ (projected / (strengths.clamp_min(0)[:, None] + relative))
    pictures = cosines(estimate.unflatten(1, shape), inverse=True)
    return (pictures.flatten(1) * norm[:, None]).to(x.dtype)


def image_spectrum(seen: Float64[Tensor, "h c a b"], noise: float) -> Float64[Tensor, "c a b"]:
    """Variances of the images' cosines, 1 on the average, from those of weights with noise."""
    variance = seen.square().mean(0) - noise**2
    sides = seen.shape[2:]
    across, down = (torch.arange(n, dtype=seen.dtype, device=seen.device) / n for n in sides)
    radius = (across[:, None].square() + down.square()).sqrt() * max(sides)
    ring = radius.round().long().flatten()
    n_rings = int(ring.max()) + 1
    total = variance.new_zeros(len(variance), n_rings).index_add_(1, ring, variance.flatten(1))
    mean = total / torch.bincount(ring, minlength=n_rings).clamp_min(1)
    spectrum = mean[:, ring].clamp_min(SMALLEST_VARIANCE * noise**2).view_as(variance)
    return spectrum / spectrum.mean()
