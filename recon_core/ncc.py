"""Similarity of images up to scale and offset: normalised distance and correlation, all pairs.

Haim et al. 2022 (KKT paper, appendix A.1, eq. 16), whose candidates have an arbitrary scale:

    d(x, y) = || (x - mu_x) / sigma_x - (y - mu_y) / sigma_y ||^2 / D,

D numbers an image, unbiased sigma. The authors' code takes mu and sigma of each channel and divides
by D, as here; eq. 16 as printed takes them of the whole image and does not divide. Their `ncc2` is
d between images halved by bicubic interpolation *without* antialiasing, here `half_size=True`.

A normalised image is a vector of fixed length, so all distances are one matrix product: with n
numbers sharing a mean, d = 2 (1 - 1/n) (1 - rho), where rho in [-1, 1] is the correlation.

Where eq. 16 divides by zero: a constant channel (one that varies by no more than its own rounding)
becomes zeros and the others keep the length of the vector; a constant image has rho = 0 with
everything, itself included. A NaN or infinite pixel makes the scores of its image NaN and leaves
all others alone. Computed in float64, so that the distances of near copies keep their digits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from recon_core.metrics import require_same_shape

ROUNDING = 8

ROWS = 512


def ncc_matrix(
    a: Float[Tensor, "p c h w"],
    b: Float[Tensor, "t c h w"],
    *,
    half_size: bool = False,
) -> Float32[Tensor, "p t"]:
    """Distance d of every image of `a` to every image of `b`, in [0, 4]: lower is more alike. 0 for
    images equal up to a positive scale and an offset of each channel, about 2 for unrelated ones.
    Raises ValueError if the shapes do not match, or for half size if a side is below 2."""
    require_same_shape(a, b)
    right = unit_vectors(b, half_size=half_size).T
    rho = right.new_empty((len(a), len(b)))
    for start in range(0, len(a), ROWS):
        rows = slice(start, start + ROWS)
        torch.mm(unit_vectors(a[rows], half_size=half_size), right, out=rho[rows])
    height, width = (side // 2 if half_size else side for side in a.shape[2:])
    distance = rho.clamp_(-1.0, 1.0).neg_().add_(1).mul_(2 * (1 - 1 / (height * width)))
    return distance.float()


def unit_vectors(
    images: Float[Tensor, "n c h w"], *, half_size: bool = False, per_channel: bool = True
) -> Float64[Tensor, "n d"]:
    """Normalised images of length 1: their inner products are the correlations. Zeros for a
    constant image, NaN for one with a NaN or infinite pixel."""
    exact = images.double()
    if half_size:
        exact = _halved(exact)
    sharing = exact.flatten(2) if per_channel else exact.flatten(1)[:, None]
    low, high = torch.aminmax(sharing, dim=-1, keepdim=True)
    magnitude = torch.maximum(low.abs(), high.abs())
    constant = high - low <= ROUNDING * torch.finfo(images.dtype).eps * magnitude
    centred = sharing - sharing.mean(dim=-1, keepdim=True)
    length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    n_varying = (~constant).double().sum(dim=1, keepdim=True)
    unit = torch.where(constant, 0.0, centred / (length * n_varying.sqrt()))
    finite = images.isfinite().flatten(1).all(dim=1)
    return torch.where(finite[:, None], unit.flatten(1), torch.nan)


def _halved(images: Float64[Tensor, "n c h w"]) -> Float64[Tensor, "n c i j"]:
    if min(images.shape[2:]) < 2:
        raise ValueError(
            f"images of {images.shape[2]}x{images.shape[3]} cannot be halved; "
            "use half_size=False or larger images"
        )
    if math.prod(images.shape) == 0:
        return images[:, :, : images.shape[2] // 2, : images.shape[3] // 2]
    return F.interpolate(
        images, scale_factor=0.5, mode="bicubic", align_corners=False, antialias=False
    )
