"""Similarity of two images: SSIM (single pairs and all pairs at once), HaarPSI and correlation.

Two conventions of SSIM are offered, both with K1 = .01, K2 = .03, data range 1, population
covariance, and the mean over positions and channels; they give other values:

* ``gaussian11``: Wang et al. 2004, window 11x11, sigma 1.5, valid region only; scikit-image's
  `gaussian_weights=True, sigma=1.5, use_sample_covariance=False`. The default everywhere.
* ``gaussian3``: kornia's `window_size=3`, window 3x3, sigma 1.5, borders reflected; what papers
  the KKT paper and Haim et al. 2022 report.

All-pairs SSIM is one matrix product per pixel position. With windows of weights w,
cov(x, y) = sum_k w_k x_k (y_k - mu_y) = X diag(w) Y_centred^T. Centring happens before the product,
so flat windows lose no digits.

Images are float in [0, 1]. A NaN or infinite pixel makes the scores of its image NaN and leaves
all others alone.

Similarity up to scale and offset is that of Haim et al. 2022 (KKT paper, appendix A.1, eq. 16),
whose candidates have an arbitrary scale:

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

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from recon_core.torchvision_compat import import_piq

SSIMConvention = Literal["gaussian11", "gaussian3"]

C1 = 0.01**2
C2 = 0.03**2
SIGMA = 1.5
HAARPSI_MIN_SIDE = 16
_RADIUS: dict[str, int] = {"gaussian11": 5, "gaussian3": 1}
_CPU_CHUNK = 1 << 18  # scratch of one block: 1 MiB per float32 buffer, enough to feed two threads
_CUDA_CHUNK = 1 << 25


def ssim_matrix(
    a: Float[Tensor, "p c h w"],
    b: Float[Tensor, "t c h w"],
    *,
    convention: SSIMConvention = "gaussian11",
) -> Float32[Tensor, "p t"]:
    """SSIM of every image of `a` with every image of `b`, in [-1, 1] (Wang et al. 2004, eq. 13).

    Equal to scikit-image within 1e-6. Computed in float32, in blocks; on CUDA keep TF32 off, or
    lose four digits. Raises ValueError for images smaller than the window, or shapes that do not
    match.
    """
    _check(a, b, convention)
    n_a, n_b = len(a), len(b)
    total = a.new_zeros((n_a, n_b), dtype=torch.float64)
    if n_a == 0 or n_b == 0:
        return total.float()
    limit = _CUDA_CHUNK if a.is_cuda else _CPU_CHUNK
    rows = max(1, min(n_a, limit // n_b))
    x, mu_x, var_x, _ = _windows(a, convention)
    y, mu_y, var_y, centre_y = _windows(b, convention)
    side = _window(convention, device=a.device).float()
    weights = 2 * side.outer(side)
    n_channels, height, width = x.shape[1:4]
    group = max(1, min(width, limit // (rows * n_b)))
    for channel in range(n_channels):
        for i in range(height):
            row = torch.zeros_like(total, dtype=torch.float32)
            for j in range(0, width, group):
                here = (slice(None), channel, i, slice(j, j + group))
                right = ((y[here] - centre_y[here][..., None, None]) * weights).flatten(2)
                right = right.permute(1, 2, 0).contiguous()
                left = x[here].flatten(2).transpose(0, 1)
                mu_b, var_b = mu_y[here].T.unsqueeze(1), var_y[here].T.unsqueeze(1)
                mu_a, var_a = mu_x[here].T.unsqueeze(2), var_x[here].T.unsqueeze(2)
                of_a = (2 * mu_a, mu_a.square(), var_a)
                of_b = (mu_b, mu_b.square() + C1, var_b + C2)
                for start in range(0, n_a, rows):
                    block = slice(start, start + rows)
                    row[block] += _ssim_block(
                        left[:, block], right, tuple(term[:, block] for term in of_a), of_b
                    )
            total += row
    return total.div_(n_channels * height * width).float()


def ssim_pairs(
    a: Float[Tensor, "p c h w"],
    b: Float[Tensor, "p c h w"],
    *,
    convention: SSIMConvention = "gaussian11",
) -> Float32[Tensor, " p"]:
    """SSIM of image i of `a` with image i of `b`, in [-1, 1], computed in float64."""
    _check(a, b, convention)
    _check_same_length(a, b)
    x, y = _padded(a.double(), convention), _padded(b.double(), convention)
    mu_x, mu_y = _blur(x, convention), _blur(y, convention)
    var_x = (_blur(x * x, convention) - mu_x**2).clamp_min(0.0)
    var_y = (_blur(y * y, convention) - mu_y**2).clamp_min(0.0)
    cov = _blur(x * y, convention) - mu_x * mu_y
    luminance = (2 * mu_x * mu_y + C1) / (mu_x**2 + mu_y**2 + C1)
    structure = (2 * cov + C2) / (var_x + var_y + C2)
    return (luminance * structure).mean(dim=(1, 2, 3)).float()


def haarpsi_pairs(
    a: Float[Tensor, "p c h w"], b: Float[Tensor, "p c h w"]
) -> Float32[Tensor, " p"]:
    """HaarPSI of image i of `a` with image i of `b`, in [0, 1] (Reisenhofer et al. 2018).

    C = 30, alpha = 4.2, YIQ for three channels, halved resolution first: piq's implementation, in
    float64. Two images without any contrast have no weights: 0/0 is taken as 1, its limit.

    Raises ValueError for images smaller than 16x16, outside [0, 1], or of different shapes.
    """
    require_same_shape(a, b)
    _check_same_length(a, b)
    if min(a.shape[-2:]) < HAARPSI_MIN_SIDE:
        raise ValueError(
            f"HaarPSI needs images of at least {HAARPSI_MIN_SIDE}x{HAARPSI_MIN_SIDE}, "
            f"got {a.shape[-2]}x{a.shape[-1]}; enlarge them first"
        )
    finite = _finite_rows(a) & _finite_rows(b)
    x, y = (torch.where(finite[:, None, None, None], images.double(), 0.0) for images in (a, b))
    for name, images in (("a", x), ("b", y)):
        if images.numel() and (images.min() < 0 or images.max() > 1):
            raise ValueError(
                f"{name} has values in [{images.min():.3g}, {images.max():.3g}]; HaarPSI needs "
                "[0, 1]: use matching.fit_to_range or clamp first"
            )
    if len(a) == 0:
        return a.new_zeros(0, dtype=torch.float32)
    score = import_piq().haarpsi(x, y, reduction="none", scales=3, subsample=True, c=30, alpha=4.2)
    score = torch.nan_to_num(score, nan=1.0, posinf=1.0).clamp(0.0, 1.0)
    return torch.where(finite, score, torch.nan).float()


def _ssim_block(
    left: Float32[Tensor, "g p k"],
    right: Float32[Tensor, "g k t"],
    of_a: tuple[Tensor, ...],
    of_b: tuple[Tensor, ...],
) -> Float32[Tensor, "p t"]:
    """SSIM map of p x t pairs, summed over g positions; `right` is centred and carries 2 w. `of_a`
    is (2 mu, mu^2, var), each (g, p, 1); `of_b` is (mu, mu^2 + C1, var + C2), (g, 1, t)."""
    numerator = torch.bmm(left, right).add_(C2)
    numerator *= (of_a[0] * of_b[0]).add_(C1)
    denominator = of_a[1] + of_b[1]
    denominator *= of_a[2] + of_b[2]
    return numerator.div_(denominator).sum(dim=0)


def _windows(
    images: Float[Tensor, "n c h w"], convention: SSIMConvention
) -> tuple[Float32[Tensor, "n c i j k k"], Tensor, Tensor, Tensor]:
    """(a view of all windows, means, variances, means of the view); statistics from float64. In the
    view, each image's channel mean is taken off, which keeps the products small."""
    exact = torch.where(_finite_rows(images)[:, None, None, None], images.double(), torch.nan)
    exact = _padded(exact, convention)
    mean = _blur(exact, convention)
    offset = exact.mean(dim=(2, 3), keepdim=True)
    centred = exact - offset
    centred_mean = _blur(centred, convention)
    var = (_blur(centred.square(), convention) - centred_mean.square()).clamp_min(0.0)
    size = 2 * _RADIUS[convention] + 1
    windows = centred.float().unfold(2, size, 1).unfold(3, size, 1)
    return windows, mean.float(), var.float(), centred_mean.float()


def _window(convention: SSIMConvention, *, device: torch.device) -> Float64[Tensor, " k"]:
    radius = _RADIUS[convention]
    offsets = torch.arange(-radius, radius + 1, device=device, dtype=torch.float64)
    weights = torch.exp(-0.5 * (offsets / SIGMA) ** 2)
    return weights / weights.sum()


def _blur(
    images: Float64[Tensor, "n c h w"], convention: SSIMConvention
) -> Float64[Tensor, "n c i j"]:
    """Weighted mean of every window that lies inside the image: two banded matrix products."""
    window = _window(convention, device=images.device)
    return _band(images.shape[2], window) @ images @ _band(images.shape[3], window).T


def _band(length: int, window: Float64[Tensor, " k"]) -> Float64[Tensor, "i n"]:
    """The matrix whose row i has the window at columns i to i + k - 1."""
    n_positions = length - len(window) + 1
    band = window.new_zeros((n_positions, length))
    for offset, weight in enumerate(window):
        band.diagonal(offset).fill_(weight)
    return band


def _padded(images: Tensor, convention: SSIMConvention) -> Tensor:
    if convention == "gaussian11":
        return images
    radius = _RADIUS[convention]
    return F.pad(images, (radius, radius, radius, radius), mode="reflect")


def _finite_rows(images: Float[Tensor, "n c h w"]) -> Tensor:
    return images.isfinite().flatten(1).all(dim=1)


def _check(a: Tensor, b: Tensor, convention: str) -> None:
    if convention not in _RADIUS:
        raise ValueError(
            f"convention={convention!r} is unknown; choose one of {get_args(SSIMConvention)}"
        )
    require_same_shape(a, b)
    size = 2 * _RADIUS[convention] + 1
    if min(a.shape[-2:]) < size:
        raise ValueError(
            f"images of {a.shape[-2]}x{a.shape[-1]} are smaller than the {size}x{size} window of "
            f"convention={convention!r}; use larger images or convention='gaussian3'"
        )


def require_same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape[1:] != b.shape[1:]:
        raise ValueError(
            f"a has images of shape {tuple(a.shape[1:])} and b of {tuple(b.shape[1:])}; "
            "bring both to the same channels, height and width"
        )


def _check_same_length(a: Tensor, b: Tensor) -> None:
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} images and b {len(b)}; pairs need one of each")


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
        height, width = images.shape[2:]
        if min(height, width) < 2:
            raise ValueError(
                f"images of {height}x{width} cannot be halved; use half_size=False or larger images"
            )
        exact = (
            F.interpolate(
                exact, scale_factor=0.5, mode="bicubic", align_corners=False, antialias=False
            )
            if images.numel()
            else exact[:, :, : height // 2, : width // 2]
        )
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
