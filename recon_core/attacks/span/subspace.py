"""The subspace that a dense first layer's weights span, and how many images are in it.

Every gradient of a dense first layer is a sum of delta_i x_i^T over images, so W = c W_0 + M X,
with X (n, d) the images, M (h, n) unknown, and W_0 the start, which weight decay shrank to c W_0. A
known start is taken off, an unknown one is noise. With biases rows are (w, b) and images (x, 1).
Rules that move every weight at its own rate (Adam, Adadelta) leave the span a little.

In white noise, as of an unknown start, the signal is the singular values above an edge that noise
as strong as the rest exceeds in one case of 200 (Kritchman and Nadler 2009, IEEE Trans. Signal
Process. 57(10); Johnstone 2001). Rounding is not white: it is larger in large weights. So a sharp
end is sought first: a fall of the values that is large beside the scatter of those behind it. The
rest behind it measures the noise of every neuron and pixel; both are divided by theirs, and the end
is sought again. Directions hidden by the rounding of a few neurons then stand out by a factor of
ten. Averages of gradients in which most neurons are silent need not end sharply, and seem to have
no noise: signal is then what exceeds the rounding of single precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Float64
from torch import Tensor

TRACY_WIDOM = 2.4224  # its quantile .995 for real matrices (beta = 1)
SCATTERS, TAIL, FALL, LAST = 1.25, 20, 1.5, 2.0
"""At a sharp end, logarithms fall by SCATTERS times as much as over the TAIL values behind it (over
half if they are few), and values at least by a factor FALL exp(LAST / m) before the last m."""
FAR, BEHIND = 1000.0, 3e-5
"""A fall by FAR to the share BEHIND of the largest value is an end whatever stands out behind it,
such as the rounding of a mean that was subtracted in single precision."""
CLEAR = 100.0
"""Least fall from the middle direction to the first one behind a sharp end, which the noise of a
start does not reach."""
OWN = 1e-4
"""A neuron or input of which directions leave less than this share of the mean has a direction of
its own, such as the unknown start of a neuron that hardly learned, or of biases."""
WHITENINGS = 5
ROUNDED = 0.2 * torch.finfo(torch.float32).eps  # relative rounding error
QUIETEST, MOVED = 1e-25, 1e-6
"""Least size of a neuron or pixel beside the loudest; least relative change of a trained one."""
ALIKE = 1e-10  # share of the largest eigenvalue below which sources are the same
FIT_ROUNDS, FIT_TOLERANCE = 30, 1e-10
SLOWEST = 0.95  # ratio of two steps of the fit up to which they are taken for a series
NOTHING = 1e-13  # share of the largest singular value below which the others are rounding
_singular = partial(torch.linalg.svd, full_matrices=False)


class NoSpanError(ValueError):
    """The weights hold nothing to separate, whatever the settings."""


@dataclass(frozen=True)
class Subspace:
    """Orthonormal directions `vectors` of one victim's first layer, strongest first.

    `learned` is W - c W_0, `values` are all its singular values, and `start_shares` the c of every
    joined part, empty for an unknown start. `n_signal` values stand out of noise of standard
    deviation `noise`, which ends at `edge`; if the span `ends_sharply`, it is exact.
    """

    vectors: Float[Tensor, "k e"]
    learned: Float[Tensor, "h e"]
    values: Float64[Tensor, " s"]
    n_signal: int
    noise: float
    edge: float
    start_shares: tuple[float, ...]
    ends_sharply: bool


def subspace_of(
    rows: Float[Tensor, "h e"],
    start: Float[Tensor, "g f"] | None = None,
    *,
    n_joined: int = 1,
    has_start: bool = True,
    n_directions: int | None = None,
    surplus: float = 0.0,
) -> Subspace:
    """The strongest directions of `rows` less shares of a known start, in the dtype of `rows`.

    Each of `n_joined` equal parts of the rows has its own share. `has_start`: an unknown start may
    be in them, as in weights but not in gradients. `n_directions`: how many; None takes those that
    stand out of the noise and, unless the span ends sharply, the share `surplus` of them more.
    Raises NoSpanError for rows that are not finite, all zero, or noise alone; ValueError for a
    start that does not fit, or more directions than there are.
    """
    if n_bad := int((~rows.isfinite()).sum()):
        raise NoSpanError(
            f"{n_bad} of {rows.numel():,} first-layer numbers are NaN or infinite; a training that "
            "diverged leaves nothing to separate: give an earlier checkpoint"
        )
    stored = learned = rows.float().double()  # more digits would not make ends clearer
    shares = tuple[float, ...]()
    if start is not None:
        if start.shape != rows.shape or not bool(start.isfinite().all()):
            raise ValueError(
                f"the start's first layer, {tuple(start.shape)}, must be finite and as large as "
                f"the trained one, {tuple(rows.shape)}; give what this training started from"
            )
        begun = start.float().double()
        shares = fit_shares(stored, begun, n_joined)
        each = stored.new_tensor(shares).repeat_interleave(len(rows) // n_joined)
        learned = stored - each[:, None] * begun
    _, values, vectors = _singular(learned)
    if not float(values[0]) > 0:
        raise NoSpanError("what is taken apart is all zero, or is its start; give trained weights")
    sharp = _sharp_span(learned, stored, has_unknown_start=has_start and start is None)
    n_signal, noise, edge = count_signal(values, rows.shape, len(sharp))
    rounding = torch.finfo(torch.float32).eps * stored.abs()
    floor = float(rounding.norm(dim=1).amax() + rounding.norm(dim=0).amax())
    above = n_signal if has_start else int((values > floor).sum())
    if above < n_signal and not len(sharp):
        sharp, n_signal, edge = vectors[:above], above, floor
    if n_directions is None:
        if n_signal == 0:
            raise NoSpanError(
                f"no direction of the first layer stands out of noise (largest singular value "
                f"{float(values[0]):.3g}, edge {edge:.3g}): of weights, training moved them less "
                "than their start is large; give the start (--initial)"
            )
        more = 0.0 if len(sharp) else surplus
        n_directions = min(len(values), n_signal + round(more * n_signal))
    if not 1 <= n_directions <= len(values):
        raise ValueError(
            f"{n_directions} directions of a first layer of {rows.shape[0]} neurons and "
            f"{rows.shape[1]} inputs; it has 1 to {len(values)}"
        )
    chosen = (sharp if n_directions <= len(sharp) else vectors)[:n_directions].to(rows)
    return Subspace(chosen, learned.to(rows), values, n_signal, noise, edge, shares, len(sharp) > 0)


def count_signal(
    values: Float64[Tensor, " s"], shape: tuple[int, ...], known: int = 0
) -> tuple[int, float, float]:
    """(number of singular values of an (h, d) matrix above the noise, at most all but one, or the
    `known` number; standard deviation of the noise; its edge)."""
    for k in (known,) if known else range(len(values)):
        p, n = (max(1, size - k) for size in sorted(shape))
        noise = float((values[k:].double().square().sum() / (p * n)).sqrt())
        a, b = max(p - 0.5, 0.5) ** 0.5, max(n - 0.5, 0.5) ** 0.5
        width = (a + b) * (1 / a + 1 / b) ** (1 / 3)
        edge = noise * ((a + b) ** 2 + TRACY_WIDOM * width) ** 0.5
        if float(values[k]) <= edge:
            break
    return k, noise, edge


def mixing_of(rows: Float[Tensor, "k e"], weight: Float[Tensor, "h e"]) -> Float64[Tensor, "h k"]:
    """M of W = M X by least squares, bit for bit the same wherever its arguments lie in memory."""
    norm: Tensor = rows.double().norm(dim=1, keepdim=True).clamp_min(1e-30)
    unit = rows / norm
    inverse: Tensor = torch.linalg.pinv(unit @ unit.mT, hermitian=True, rtol=ALIKE)
    return weight.double() @ unit.mT @ inverse / norm.mT


def fit_shares(
    rows: Float64[Tensor, "h e"], start: Float64[Tensor, "h e"], n_joined: int = 1
) -> tuple[float, ...]:
    """c of W = c W_0 + M X, of each of `n_joined` equal parts of the rows, where log |det A A^T|,
    A = W - c W_0, is least: the likelihood of normal columns of any covariance, exact for up to one
    direction fewer than there are neurons.

    Least squares, weighted by the inverse of the covariance before. Steps that shrink as a series,
    slowly where noise is left, are followed to its limit (Aitken)."""
    blocks = torch.eye(n_joined).to(start).repeat_interleave(len(start) // n_joined, 1)
    starts, share = blocks[:, :, None] * start, start.new_ones(n_joined)
    before = torch.zeros_like(share)
    if n_joined > 1:  # from the best shares of the parts alone
        parts = zip(rows.chunk(n_joined), start.chunk(n_joined), strict=True)
        share = start.new_tensor([fit_shares(*part)[0] for part in parts])
    if rows.shape[0] > rows.shape[1]:
        rows, starts = rows.mT, starts.mT
    for _ in range(FIT_ROUNDS):
        left, values, vectors = _singular(rows - torch.einsum("p,pij->ij", share, starts))
        if not float(values[0]) > 0:
            break
        seen = (left.mT @ starts) / values.clamp_min(NOTHING * float(values[0]))[:, None]
        square = torch.einsum("pij,qij->pq", seen, seen)
        step = torch.linalg.pinv(square, hermitian=True) @ (seen * vectors).sum((1, 2))
        ratio = float(step @ before / before.square().sum().clamp_min(1e-300))
        is_series = 0 < ratio < SLOWEST
        share = share + step / (1 - ratio * is_series)
        before = step * (not is_series)
        if float((step / share.abs().clamp_min(1.0)).abs().amax()) <= FIT_TOLERANCE:
            break
    return tuple(share.tolist())


def _sharp_span(
    matrix: Float64[Tensor, "h e"], stored: Float64[Tensor, "h e"], *, has_unknown_start: bool
) -> Float64[Tensor, "k e"]:
    """The span's orthonormal directions, strongest first; none without a sharp end. Neurons and
    pixels are divided by the size of the `stored` weights, to which rounding was proportional, or
    left as they are; then each is divided by its own noise until the end stays the same."""
    moved = [matrix.norm(dim=i) > MOVED * stored.norm(dim=i) for i in (0, 1)]
    counted = min(int(m.sum()) for m in moved)
    for sizes in (_sizes(stored), torch.ones_like(stored)):
        scale, before = sizes, None
        for _ in range(1 + WHITENINGS):
            left, values, right = _singular(matrix / scale)
            span, end = right * scale[0], _sharp_end(values[:counted])  # pixels scale alike in rows
            if end is None or end == before:
                break
            before = end
            seen = left[:, :end] * values[:end]
            noise = torch.hypot(matrix / scale - seen @ right[:end], ROUNDED * stored / scale)
            scale = scale * _sizes(noise)
        if end is None or float(values[(end - 1) // 2]) < CLEAR * float(values[end]):
            continue
        seen = left[:, :end] * values[:end]
        unit = seen / seen.norm(dim=1, keepdim=True).clamp_min(torch.finfo(seen.dtype).tiny)
        spans = (torch.linalg.qr(unit).Q.square().sum(1), right[:end].square().sum(0))
        neurons, inputs = (int((1 - s < OWN * (1 - end / len(s))).sum()) for s in spans)
        if has_unknown_start and (neurons > 0 or inputs >= end):
            continue
        basis = torch.linalg.qr(span[:end].mT).Q.mT
        return torch.mm(_singular(matrix @ basis.mT)[2], basis)
    return matrix[:0]


def _sharp_end(values: Float64[Tensor, " s"]) -> int | None:
    """The index at which singular values fall most, relative to the scatter of those behind it, if
    that is enough. A fall to 0 does not count: there noise ends if pixels are alike."""
    n = len(values) - 1
    if n < 1:
        return None
    logs = values.clamp_min(NOTHING * float(values[0])).log()
    k = torch.arange(1, n + 1, device=values.device)
    last = k + ((n + 2 - k) // 2).clamp_max(TAIL) - 1
    falls, scatter = logs[:-1] - logs[1:], logs[1:] - logs[last]
    least = math.log(FALL) + LAST / (n + 1 - k).double()
    clear = falls / torch.maximum(SCATTERS * scatter, least)
    is_far = (falls > math.log(FAR)) & (values[1:] < BEHIND * values[0])
    clear = torch.where((clear > 1) & is_far, torch.inf, clear)
    clear = torch.where(values[1:] > NOTHING * values[0], clear, 0.0)
    return int(clear.argmax()) + 1 if float(clear.amax()) > 1 else None


def _sizes(of: Float64[Tensor, "h e"]) -> Float64[Tensor, "h e"]:
    """Root mean square of a row times that of a column once rows are divided by theirs."""
    sizes, tiny = torch.ones_like(of), torch.finfo(of.dtype).tiny
    for dim in (1, 0):
        own = (of / sizes).square().mean(dim, keepdim=True).sqrt()
        sizes = sizes * own.clamp_min(max(QUIETEST * float(own.max()), tiny))
    return sizes
