"""The subspace that a dense first layer's weights span, and how many images are in it.

Every gradient of a dense first layer is a sum of delta_i x_i^T over training images, so

    W = c W_0 + M X,

with X (n, d) the images, M (h, n) unknown, and W_0 the start, which weight decay shrank to c W_0.
Where the start is known it is taken off; where it is not, it is noise. With biases the rows are (w,
b) and the images (x, 1). Rules that move every weight at its own rate (Adam, Adadelta) leave the
span a little. How many directions stand out of the noise is told by Kritchman and Nadler's rule
(2009, IEEE Trans. Signal Process. 57(10)): with the k largest singular values taken for signal, the
others give the noise's variance, and the next one is signal, too, if it is above the edge that
noise of this size reaches in one case of 200 (Johnstone 2001, Tracy and Widom).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

TRACY_WIDOM = 2.4224
"""Quantile .995 of the Tracy-Widom distribution for real matrices (beta = 1)."""
NOISE_ROUGHNESS = 1.9
"""`roughness` from which on a direction shows no image; noise of 32x32x3 has 2.00 +- .03."""
SHARP = 100.0
"""Fall of one singular value to the next at which a span ends: the training images' own fall by
less, noise of a start and what Adam leaves come without a step, roundings far below."""
RIDGE = 1e-10
"""Share of a row's norm that keeps rows solvable where some are the same, or nothing."""
FIT_ROUNDS = 30
FIT_TOLERANCE = 1e-10
"""Relative change of c at which its fit has ended."""
SLOWEST = 0.95
"""Ratio of two steps of the fit up to which they are taken for a geometric series."""


class NoSpanError(ValueError):
    """These weights hold nothing to separate, whatever the settings."""


@dataclass(frozen=True)
class Subspace:
    """Orthonormal directions of one victim's first layer, strongest first.

    `vectors` (k, d), or (k, d + 1) with biases; `values` are all singular values of W - c W_0.
    `n_signal`: how many of them stand out of the noise, whose singular values end at `edge`, all
    of about the size `noise`. `start_share`: the fitted c; None with an unknown start.
    """

    vectors: Float[Tensor, "k e"]
    values: Float64[Tensor, " s"]
    n_signal: int
    noise: float
    edge: float
    start_share: float | None

    @property
    def ends_sharply(self) -> bool:
        """True if the directions stand out by far: the span is then known as exactly as numbers
        are."""
        return self.n_signal == _sharp_end(self.values) < len(self.values)


def subspace_of(
    rows: Float[Tensor, "h e"],
    start: Float[Tensor, "g f"] | None = None,
    *,
    shape: tuple[int, int, int] | None = None,
    n_directions: int | None = None,
    surplus: float = 0.0,
) -> Subspace:
    """The strongest directions of `rows`, less the start where it is known, in the dtype of `rows`.

    `shape` (c, h, w): the rows are pictures, and directions as rough as noise are none of images,
    however strong. `n_directions`: how many; None takes those that stand out of the noise and,
    unless the span ends sharply, the share `surplus` of them more. Raises NoSpanError for rows that
    are not finite or all zero, or nothing that stands out of the noise; ValueError for rows of
    another shape than the start, or more directions than there are.
    """
    _check(rows, start)
    wide = rows.double()
    share = None
    if start is not None:
        share = fit_share(wide, start.double())
        wide = wide - share * start.double()
    values, vectors = _singular(wide)
    if not float(values[0]) > 0:
        raise NoSpanError(
            "the first layer's weights are all zero, or are their start; give trained weights"
        )
    n_signal, noise, edge = count_signal(values, rows.shape)
    n_signal = min(n_signal, _sharp_end(values))
    if shape is not None:
        pictures = vectors[:n_signal, : math.prod(shape)].unflatten(1, shape)
        n_smooth = int((roughness(pictures) < NOISE_ROUGHNESS).sum())
        n_signal = n_smooth or n_signal
    if n_directions is None:
        if n_signal == 0:
            raise NoSpanError(
                f"no direction of the first layer stands out of noise (largest singular value "
                f"{float(values[0]):.3g}, edge {edge:.3g}): training moved it less than its start "
                "is large; give the start (--initial), or a victim with a smaller one"
            )
        more = 0 if n_signal == _sharp_end(values) else round(surplus * n_signal)
        n_directions = min(len(values), n_signal + more)
    if not 1 <= n_directions <= len(values):
        raise ValueError(
            f"{n_directions} directions of a first layer of {rows.shape[0]} neurons and "
            f"{rows.shape[1]} inputs; it has 1 to {len(values)}"
        )
    chosen = vectors[:n_directions].to(rows.dtype)
    return Subspace(chosen, values, n_signal, noise, edge, share)


def count_signal(
    values: Float64[Tensor, " s"], shape: tuple[int, ...] | torch.Size
) -> tuple[int, float, float]:
    """(how many singular values of an (h, d) matrix are above the noise, sigma, the edge). sigma is
    the standard deviation of the noise in an entry of the matrix. Where everything stands out the
    count is min(h, d) - 1 at most."""
    square = values.double().square()
    tails = square.flip(0).cumsum(0).flip(0)
    h, d = int(shape[0]), int(shape[1])
    sigma = edge = 0.0
    for k in range(len(values) - 1):
        p, n = min(h, d) - k, max(h, d) - k
        sigma = float((tails[k] / (p * n)).sqrt())
        edge = sigma * _largest_of_noise(p, n)
        if float(values[k]) <= edge:
            return k, sigma, edge
    return len(values) - 1, sigma, edge


def mixing_of(rows: Float[Tensor, "k e"], weight: Float[Tensor, "h e"]) -> Float64[Tensor, "h k"]:
    """M of W = M X by least squares, the same to the bit wherever its arguments lie in memory."""
    wide = rows.double()
    norm = wide.norm(dim=1).clamp_min(1e-30)
    unit = wide / norm[:, None]
    gram = unit @ unit.mT
    gram.diagonal().add_(RIDGE)
    solved = torch.linalg.solve(gram, unit @ weight.double().mT)
    mixing: Tensor = (solved / norm[:, None]).mT
    return mixing


def fit_share(rows: Float64[Tensor, "h e"], start: Float64[Tensor, "h e"]) -> float:
    """c of W = c W_0 + M X: alternates between the span of W - c W_0 and the least squares fit of c
    on the rest; half of the directions at the most count as the span. Steps shrink geometrically,
    slowly where noise is left, so that every two of them are followed to their limit (Aitken)."""
    if not bool(start.any()):
        return 0.0
    share, before = 1.0, 0.0
    for _ in range(FIT_ROUNDS):
        values, vectors = _singular(rows - share * start)
        n_signal = min(count_signal(values, rows.shape)[0], len(values) // 2)
        span = vectors[:n_signal]
        rest, noise = (t - (t @ span.mT) @ span for t in (rows, start))
        scale = float(noise.square().sum())
        fitted = float((rest * noise).sum()) / scale if scale > 0 else 0.0
        step = fitted - share
        if abs(step) <= FIT_TOLERANCE * max(1.0, abs(share)):
            return fitted
        ratio, before = (step / before, 0.0) if before else (0.0, step)
        share = fitted + (step * ratio / (1 - ratio) if 0 < ratio < SLOWEST else 0.0)
    return share


def roughness(pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, " k"]:
    """Mean square difference of neighbouring pixels over the mean square: 2 of white noise, .3 to
    1.8 of mixtures of images with noise in them."""
    across = (pictures[..., 1:] - pictures[..., :-1]).square().mean((1, 2, 3))
    down = (pictures[:, :, 1:] - pictures[:, :, :-1]).square().mean((1, 2, 3))
    return (across + down) / 2 / pictures.square().mean((1, 2, 3)).clamp_min(1e-300)


def _sharp_end(values: Float64[Tensor, " s"]) -> int:
    """The first place where singular values fall by the factor SHARP; all of them if none does."""
    falls = (values[1:] * SHARP < values[:-1]).nonzero()
    return int(falls[0]) + 1 if len(falls) else len(values)


def _singular(matrix: Float64[Tensor, "h e"]) -> tuple[Tensor, Tensor]:
    _, values, vectors = torch.linalg.svd(matrix, full_matrices=False)
    return values, vectors


def _largest_of_noise(p: int, n: int) -> float:
    """The largest singular value of p x n standard normal numbers, exceeded in a case of 200."""
    a, b = max(p - 0.5, 0.5) ** 0.5, max(n - 0.5, 0.5) ** 0.5
    centre, width = (a + b) ** 2, (a + b) * (1 / a + 1 / b) ** (1 / 3)
    return float((centre + TRACY_WIDOM * width) ** 0.5)


def _check(rows: Tensor, start: Tensor | None) -> None:
    if not bool(rows.isfinite().all()):
        n_bad = int((~rows.isfinite()).sum())
        raise NoSpanError(
            f"{n_bad} of {rows.numel():,} first-layer weights are NaN or infinite; a training that "
            "diverged leaves nothing to separate: give an earlier checkpoint"
        )
    if start is None:
        return
    if start.shape != rows.shape:
        raise ValueError(
            f"the start's first layer is {tuple(start.shape)}, the trained one "
            f"{tuple(rows.shape)}; give the weights that this training started from"
        )
    if not bool(start.isfinite().all()):
        raise ValueError("the start's first layer has values that are NaN or infinite")
