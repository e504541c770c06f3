"""Separation by filters: whitened mixtures into sparse sources, in views where images are sparse.

The views are outputs of cosine filters. A fixed point is followed by maximum likelihood.

Sources are the rows of Y = W Z. First W is orthogonal or, with more sources than directions, a
tight frame, W^T W = I, and FastICA's fixed point (Hyvarinen 1999) moves it, with a score that knows
which samples belong together:

    g(y) = y / (c^2 + mean over filters at the place of y^2 + y^2).

A large c has few false optima, a small one tells images from mixtures. Rows of a frame are seen at
length 1, as in reconstruction ICA (Le et al. 2011), whose penalty on W^T W z - z is a constraint
here. Whitened images are not quite orthogonal, so a square W is freed at last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d, normalize

SIZE, STRIDE = 4, 2
"""Sides of the cosine filters, and pixels from one place to the next. Of 100 images of a network
with an unknown start 4x4 give 70 back, 3x3 63, 6x6 and 8x8 68; every place 70, in more time."""


def n_filters(channels: int) -> int:
    """Number of features at each place."""
    return (SIZE**2 - 1) * channels


def n_features(shape: tuple[int, int, int]) -> int:
    """Number of features of a picture (c, h, w)."""
    return n_filters(shape[0]) * math.prod((side - SIZE) // STRIDE + 1 for side in shape[1:])


def check_features(n_directions: int, shape: tuple[int, int, int]) -> None:
    """Raises ValueError for pictures smaller than the filters, or with fewer features than there
    are directions."""
    if min(shape[1:]) < SIZE:
        raise ValueError(
            f"images of {shape[1]}x{shape[2]} are smaller than filters of {SIZE}x{SIZE}; use "
            "larger images"
        )
    if n_features(shape) <= n_directions:
        raise ValueError(
            f"{n_features(shape)} features cannot tell {n_directions} images apart; use larger "
            "images"
        )


def colour_axes(channels: int) -> Float[Tensor, "c c"]:
    """Orthonormal: luminance first, then differences of colours (Helmert's matrix)."""
    ones = torch.ones(channels, channels, dtype=torch.float64)
    axes = normalize(ones.tril(-1) - torch.arange(channels).diag(), dim=1)
    axes[0] = channels**-0.5
    return axes


def cosine_matrix(n: int) -> Float[Tensor, "n n"]:
    """The orthonormal cosine transform of n numbers, in float64; row 0 is the constant."""
    places = torch.arange(n, dtype=torch.float64)
    return normalize(torch.cos(torch.pi * (places[None] + 0.5) * places[:, None] / n), dim=1)


def dct_filters(channels: int) -> Float[Tensor, "f c s s"]:
    """The cosine filters but for the constant, of luminance and every difference of colours."""
    wave = cosine_matrix(SIZE)
    flat = torch.einsum("ai,bj->abij", wave, wave).flatten(0, 1)[1:]
    return torch.einsum("fij,ac->afcij", flat, colour_axes(channels)).flatten(0, 1)


def features_of(pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, "k t"]:
    """Every filter at every second place, filter after filter, each of mean square 1 over all
    directions and places."""
    outputs = conv2d(pictures, dct_filters(pictures.shape[1]).to(pictures), stride=STRIDE)
    scale: Tensor = outputs.square().mean((0, 2, 3), keepdim=True).sqrt().clamp_min(1e-30)
    return (outputs / scale).flatten(1)


def whitening(features: Float[Tensor, "k t"]) -> Float[Tensor, "k k"]:
    """The symmetric matrix with which features have the covariance I over directions."""
    wide = features.double()
    values, vectors = torch.linalg.eigh(wide @ wide.mT / features.shape[1])
    floor = float(values[-1]) * torch.finfo(torch.float32).eps
    return torch.mm(vectors / values.clamp_min(floor).sqrt(), vectors.mT).to(features)


def cosines(pictures: Float[Tensor, "k c h w"], *, inverse: bool = False) -> Tensor:
    """The orthonormal cosine transform of luminance and differences of colours, or its inverse."""
    channels, height, width = pictures.shape[1:]
    colours = colour_axes(channels).to(pictures)
    rows, columns = (cosine_matrix(n).to(pictures) for n in (height, width))
    if inverse:
        return torch.einsum("kahw,hi,wj,ac->kcij", pictures, rows, columns, colours)
    return torch.einsum("kchw,ac,ih,jw->kaij", pictures, colours, rows, columns)


WIDE, WIDE_SHARE = 1.0, 0.4
"""c at first, and the share of the iterations with it."""
SCALE = 0.4
"""c at last: of a frame of 2 sources for each direction .3 gave 89, .4 91 and .6 90 good images."""
FREED_SHARE = 0.2  # of the iterations, without orthogonality, of a square W
SMALLEST_ROW = 1e-6
FLAT = 1e-4  # largest entry of a step at which the fixed point has settled
MOMENTUM, LONGEST = 0.7, 0.5
FREE_LENGTH, FREE_CURVATURE = 0.3, 1.0
"""Length of a likelihood step, and the least eigenvalue of the Hessian's blocks there."""
SETTLED, OVER = 0.95, 5
"""Likelihood steps end once the loss falls by less than a twentieth in five of them."""

Report = Callable[[int], None]
"""Called with the number of iterations done."""


class Scored(NamedTuple):
    """Sources of energy 1, y = W z, and their score psi, scaled so that psi_i^T y_i / t = 1;
    `curve` is E psi'_i. Steps end once `loss`, if it is not 0, stops falling."""

    w: Float[Tensor, "r k k"]
    y: Float[Tensor, "r k t"]
    psi: Float[Tensor, "r k t"]
    curve: Float[Tensor, "r k"]
    loss: Float[Tensor, " r"]


@dataclass(frozen=True)
class Descent:
    """W (r, m, k) of sources W z, the sparsity of every source (r, m), the iterations taken, and
    whether every matrix settled before they were used up."""

    w: Float[Tensor, "r m k"]
    sparsity: Float[Tensor, "r m"]
    n_iterations: int
    settled: bool


def independent(
    z: Float[Tensor, "r k t"],
    start: Float[Tensor, "r m k"],
    *,
    n_filters: int,
    n_iterations: int,
    report: Report = lambda _n: None,
) -> Descent:
    """Find sparse sources of whitened features `z` in at most `n_iterations`, from `start`: a
    rotation, or a tight frame of more sources than directions. Each place has `n_filters` samples,
    filter after filter."""
    w, is_frame, n, settled = start, start.shape[1] > start.shape[2], 0, False
    wide, free = round(WIDE_SHARE * n_iterations), round(FREED_SHARE * n_iterations)
    narrow = n_iterations - wide - (0 if is_frame else free)
    for scale, most in ((WIDE, wide), (SCALE, narrow)):
        settled, left = False, most
        while left and not settled:
            before, w = w, fixed_point_step(w, z, n_filters=n_filters, scale=scale)
            settled = float((w.abs() - before.abs()).abs().max()) < FLAT  # signs may turn
            n, left = n + 1, left - 1
            report(n)
    if not is_frame:
        w, more = freed(w, lambda v: student(z, v), free, lambda m: report(n + m))
        n += more
    y = w @ z
    unit = y / y.square().mean(2, keepdim=True).sqrt().clamp_min(SMALLEST_ROW)
    return Descent(w, -contrast(unit), n, settled)


def fixed_point_step(
    w: Float[Tensor, "r m k"], z: Float[Tensor, "r k t"], *, n_filters: int, scale: float
) -> Float[Tensor, "r m k"]:
    """W <- orth(E[g(y) z^T] - diag(E[g'(y)]) W) with the grouped score."""
    if w.shape[1] > w.shape[2]:
        w = w / w.norm(dim=2, keepdim=True).clamp_min(SMALLEST_ROW)
    y = w @ z
    square = y.unflatten(2, (n_filters, -1)).square()
    inverse = (square.mean(2, keepdim=True) + square + scale**2).reciprocal_()
    slope = (inverse - 2 * square * inverse.square()).flatten(2).mean(2)
    g = torch.bmm(y * inverse.flatten(2), z.mT) / z.shape[2]
    return orthogonal(g - slope[:, :, None] * w)


def student(z: Float[Tensor, "r k t"], w: Float[Tensor, "r k k"]) -> Scored:
    """The score y / (c^2 + y^2) of Student's distribution."""
    w = w / w.norm(dim=2, keepdim=True).clamp_min(SMALLEST_ROW)
    y = w @ z
    inverse = y.square().add_(SCALE**2).reciprocal_()
    psi, mean = y * inverse, inverse.mean(2)
    curve, size = 2 * SCALE**2 * inverse.square_().mean(2) - mean, (psi * y).mean(2)
    return Scored(w, y, psi.div_(size[:, :, None]), curve / size, y.new_zeros(len(y)))


def freed(
    w: Float[Tensor, "r k k"],
    score: Callable[[Float[Tensor, "r k k"]], Scored],
    most: int,
    report: Report = lambda _n: None,
) -> tuple[Float[Tensor, "r k k"], int]:
    """(W after likelihood steps W <- W - l H^{-1} G W, with momentum, in which rows need not be
    orthogonal; their number). G_ij = psi_i^T y_j / t - delta_ij."""
    moved, losses = torch.zeros_like(w), []
    for n in range(most):
        w, y, psi, curve, loss = score(w)
        losses.append(loss)
        if n >= OVER and bool((loss > SETTLED * losses[-1 - OVER]).all()):
            return w, n
        g = torch.bmm(psi, y.mT) / y.shape[2]
        g.diagonal(dim1=1, dim2=2).zero_()
        h = curve[:, :, None].expand_as(g)
        moved = bounded(MOMENTUM * moved - FREE_LENGTH * newton_step(g, h))
        w = w + moved @ w
        report(n + 1)
    return w, most


def bounded(moved: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
    """Steps of a root mean square length, over rows, of at most `LONGEST`."""
    length = moved.square().sum(2).mean(1).sqrt()
    return moved * (LONGEST / length.clamp_min(LONGEST))[:, None, None]


def newton_step(g: Float[Tensor, "r k k"], h: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
    """H^{-1} G of Picard's blocks ((h_ij, 1), (1, h_ji)) of p_ij and p_ji, h_ij = E[psi'(y_i)]
    E[y_j^2], with eigenvalues lifted to `FREE_CURVATURE` (Ablin, Cardoso and Gramfort 2018, "Faster
    independent component analysis by preconditioning with Hessian approximations")."""
    lowest = (h + h.mT) / 2 - (((h - h.mT) / 2).square() + 1).sqrt()
    h = h + torch.clamp_min(FREE_CURVATURE - lowest, 0.0)
    return (h.mT * g - g.mT) / (h * h.mT - 1)


def rotation_start(
    size: int, generator: torch.Generator, *, n_sources: int | None = None
) -> Float[Tensor, "m k"]:
    """A random rotation (Haar), or tight frame of `n_sources` rows, drawn on the CPU in float64."""
    drawn = torch.randn(n_sources or size, size, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(drawn)
    return torch.mul(q, r.diagonal().sign())


def contrast(sources: Float[Tensor, "r k t"]) -> Float[Tensor, "r k"]:
    """Mean of log(1 + (y/c)^2) of every source: the lower, the sparser."""
    return (sources / SCALE).square_().log1p_().mean(2)


def cayley(p: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
    """(I - p/2)^{-1} (I + p/2), orthogonal for antisymmetric p and exp(p) up to p^3/12."""
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    solved: Tensor = torch.linalg.solve(eye - p / 2, eye + p / 2)
    return solved


def orthogonal(w: Float[Tensor, "r m k"]) -> Float[Tensor, "r m k"]:
    """The nearest orthogonal matrix, or tight frame, W (W^T W)^{-1/2}."""
    u, _, v = torch.linalg.svd(w.double(), full_matrices=False)
    return torch.bmm(u, v).to(w)
