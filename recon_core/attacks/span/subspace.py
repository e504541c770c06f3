"""The subspace that a dense first layer's weights span, and how many images are in it.

Every gradient of a dense first layer is a sum of delta_i x_i^T over training images, so

    W = c W_0 + M X,

with X (n, d) the images, M (h, n) unknown, and W_0 the start, which weight decay shrank to c W_0.
Where the start is known it is taken off; where it is not, it is noise. With biases the rows are (w,
b) and the images (x, 1). Rules that move every weight at its own rate (Adam, Adadelta) leave the
span a little.

White noise, as of an unknown start: with the k largest singular values taken for signal, the others
give its variance, and the next one is signal, too, if it is above the edge that noise of this size
reaches in one case of 200 (Kritchman and Nadler 2009, IEEE Trans. Signal Process. 57(10); Johnstone
2001). Rounding is not white: neurons and pixels with large weights round more, far above that edge.
So a sharp end is looked for first, a fall that is large beside the scatter of the values behind it.
What the directions before it leave is then the noise of every neuron and pixel; both are divided by
it, and the end is looked for again. The weakest directions of an optimiser's state, which drown in
the rounding of a few neurons, then stand out by a factor of ten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Float64
from torch import Tensor

TRACY_WIDOM = 2.4224
"""Quantile .995 of the Tracy-Widom distribution for real matrices (beta = 1)."""
NOISE_ROUGHNESS, BAND = 2.0, 0.1 * 3072**0.5
"""`roughness` of white noise, and how far from it noise may be in one pixel (.1 at 32x32x3)."""
TAIL = 20
"""Values behind an end whose scatter is looked at, and half of those left at most."""
SCATTERS, FALL, FEW, LAST = 1.25, 1.5, 4.0, 2.0
"""The fall at a sharp end is that many times the one of the values behind it, in logarithms, and at
least a factor exp(FEW / k + LAST / m) FALL behind k values and before m: falls between a few images
are large, and a few values of noise do not tell their scatter."""
NOTHING = 1e-13
"""Share of the largest singular value below which the others are float64's own rounding."""
FAR, BEHIND = 1000.0, 3e-5
"""Fall, to so small a share of the largest value, that is an end whatever stands out behind it, as
the rounding of a mean that was taken off in single precision does."""
CLEAR = 100.0
"""Fall from half of the directions to behind a sharp end: the noise of a start reaches higher."""
OWN, OWN_ROUNDED = 1e-4, 1e-6
"""Share of the mean that directions leave of a neuron below which it has a direction to itself: its
unknown start, as it hardly learned, or else its rounding, as neurons with few images come near."""
ROUNDED = 0.2
"""Share of the precision that a number's own rounding has: what has a direction of its own, a bias
where images sum to zero, nearly a neuron that one image moves, is known no better."""
WHITENINGS = 5
QUIETEST, MOVED = 1e-25, 1e-6
"""Least size of a neuron or pixel beside the loudest; least change of one that was trained."""
RIDGE = 1e-10
"""Share of a row's norm that keeps rows solvable where some are the same, or nothing."""
FIT_ROUNDS, FIT_TOLERANCE = 30, 1e-10
SLOWEST = 0.95
"""Ratio of two steps of the fit up to which they are taken for a geometric series."""
ROUNDING = 1e-16
"""Share of the largest singular value that the others are known to."""
_singular = partial(torch.linalg.svd, full_matrices=False)


class NoSpanError(ValueError):
    """These weights hold nothing to separate, whatever the settings."""


@dataclass(frozen=True)
class Subspace:
    """Orthonormal directions of one victim's first layer, strongest first.

    `vectors` (k, d), or (k, d + 1) with biases; `values` are all singular values of W - c W_0.
    `n_signal` of them stand out of noise of standard deviation `noise`, whose values end at `edge`;
    `ends_sharply`: by far, so that the span is known as exactly as numbers are. `start_shares`: the
    fitted c of all that is joined; none with an unknown start.
    """

    vectors: Float[Tensor, "k e"]
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
    shape: tuple[int, int, int] | None = None,
    n_directions: int | None = None,
    surplus: float = 0.0,
) -> Subspace:
    """The strongest directions of `rows`, less the start where it is known, in the dtype of `rows`;
    of `n_joined` equal parts each less a share of its own. `has_start`: an unknown one may be in
    them, as in weights, and not in gradients.

    `shape` (c, h, w): the rows are pictures; where the span has no sharp end it ends before the
    directions that are as rough as noise from there on, however strong. `n_directions`: how many;
    None takes those that stand out of the noise and, unless the span ends sharply, the share
    `surplus` of them more. Raises NoSpanError for rows that are not finite or all zero, or nothing
    that stands out of the noise; ValueError for rows of another shape than the start, or more
    directions than there are.
    """
    if n_bad := int((~rows.isfinite()).sum()):
        raise NoSpanError(
            f"{n_bad} of {rows.numel():,} first-layer numbers are NaN or infinite; a training that "
            "diverged leaves nothing to separate: give an earlier checkpoint"
        )
    wide = rows.double()
    shares: tuple[float, ...] = ()
    if start is not None:
        if start.shape != rows.shape:
            raise ValueError(
                f"the start's first layer is {tuple(start.shape)}, the trained one "
                f"{tuple(rows.shape)}; give the weights that this training started from"
            )
        if not bool(start.isfinite().all()):
            raise ValueError("the start's first layer has values that are NaN or infinite")
        shares = fit_shares(wide, start.double(), n_joined)
        each = wide.new_tensor(shares).repeat_interleave(len(wide) // n_joined)
        wide = wide - each[:, None] * start.double()
    _, values, vectors = _singular(wide)
    if not float(values[0]) > 0:
        raise NoSpanError(
            "what is to be taken apart is all zero, or is its start; give trained weights"
        )
    own = OWN if has_start and start is None else OWN_ROUNDED
    sharp = _sharp_span(wide, rows.double(), own)
    if sharp is None:
        n_signal, noise, edge = count_signal(values, rows.shape)
        if shape is not None:
            pixels = math.prod(shape)
            rough = roughness(vectors[:n_signal, :pixels].unflatten(1, shape))
            clear = ((rough - NOISE_ROUGHNESS).abs() > BAND / pixels**0.5).nonzero()
            n_signal = int(clear[-1]) + 1 if len(clear) else n_signal
        more = round(surplus * n_signal)
    else:
        n_signal, more = len(sharp), 0
        noise, edge = _noise_behind(n_signal, values, rows.shape)
    if n_directions is None and n_signal == 0:
        raise NoSpanError(
            f"no direction of the first layer stands out of noise (largest singular value "
            f"{float(values[0]):.3g}, edge {edge:.3g}): of weights, training moved them less than "
            "their start is large; give the start (--initial)"
        )
    if n_directions is None:
        n_directions = min(len(values), n_signal + more)
    if not 1 <= n_directions <= len(values):
        raise ValueError(
            f"{n_directions} directions of a first layer of {rows.shape[0]} neurons and "
            f"{rows.shape[1]} inputs; it has 1 to {len(values)}"
        )
    if sharp is not None and n_directions <= n_signal:
        vectors = sharp
    chosen = vectors[:n_directions].to(rows.dtype)
    return Subspace(chosen, values, n_signal, noise, edge, shares, sharp is not None)


def count_signal(
    values: Float64[Tensor, " s"], shape: tuple[int, ...] | torch.Size
) -> tuple[int, float, float]:
    """(how many singular values of an (h, d) matrix are above the noise, sigma, the edge). sigma is
    the standard deviation of the noise in an entry of the matrix. Where everything stands out the
    count is min(h, d) - 1 at most."""
    sigma = edge = 0.0
    for k in range(len(values) - 1):
        sigma, edge = _noise_behind(k, values, shape)
        if float(values[k]) <= edge:
            return k, sigma, edge
    return len(values) - 1, sigma, edge


def mixing_of(rows: Float[Tensor, "k e"], weight: Float[Tensor, "h e"]) -> Float64[Tensor, "h k"]:
    """M of W = M X by least squares, the same to the bit wherever its arguments lie in memory."""
    norm = rows.double().norm(dim=1, keepdim=True).clamp_min(1e-30)
    unit = rows / norm
    gram = unit @ unit.mT
    gram.diagonal().add_(RIDGE)
    mixing: Tensor = (torch.linalg.solve(gram, unit @ weight.double().mT) / norm).mT
    return mixing


def fit_shares(
    rows: Float64[Tensor, "h e"], start: Float64[Tensor, "h e"], n_joined: int = 1
) -> tuple[float, ...]:
    """c of W = c W_0 + M X where log |det A A^T|, A = W - c W_0, is least: the likelihood of normal
    columns of any covariance, exact for up to one direction fewer than there are neurons. Each of
    `n_joined` equal parts of the rows has a c of its own, fitted to the part first, then to all.

    Least squares, weighted by the inverse of the covariance before; every two steps are followed to
    their limit (Aitken), as they shrink slowly where noise is left."""
    if not bool(start.any()):
        return (0.0,) * n_joined
    blocks = torch.eye(n_joined).to(start).repeat_interleave(len(start) // n_joined, 1)
    starts, before = blocks[:, :, None] * start, start.new_zeros(n_joined)
    share = start.new_ones(n_joined)
    if n_joined > 1:
        parts = zip(rows.chunk(n_joined), start.chunk(n_joined), strict=True)
        share = start.new_tensor([fit_shares(*part)[0] for part in parts])
    if rows.shape[0] > rows.shape[1]:
        rows, starts = rows.mT, starts.mT
    for _ in range(FIT_ROUNDS):
        left, values, vectors = _singular(rows - torch.einsum("p,pij->ij", share, starts))
        size = values.clamp_min(ROUNDING * float(values[0]))
        if not float(size[0]) > 0:
            break
        seen = (left.mT @ starts) / size[:, None]
        square = torch.einsum("pij,qij->pq", seen, seen)
        step = torch.linalg.pinv(square, hermitian=True) @ (seen * vectors).sum((1, 2))
        if float((step / share.abs().clamp_min(1.0)).abs().amax()) <= FIT_TOLERANCE:
            share = share + step
            break
        moved = float(before.square().sum())
        ratio = float(step @ before) / moved if moved else 0.0
        before = torch.zeros_like(step) if moved else step
        share = share + step * (1 / (1 - ratio) if 0 < ratio < SLOWEST else 1.0)
    return tuple(share.tolist())


def roughness(pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, " k"]:
    """Mean square difference of neighbouring pixels over the mean square: 2 of white noise, .3 to
    1.8 of mixtures of images with noise in them."""
    across = (pictures[..., 1:] - pictures[..., :-1]).square().mean((1, 2, 3))
    down = (pictures[:, :, 1:] - pictures[:, :, :-1]).square().mean((1, 2, 3))
    return (across + down) / 2 / pictures.square().mean((1, 2, 3)).clamp_min(1e-300)


def _sharp_span(
    matrix: Float64[Tensor, "h e"], stored: Float64[Tensor, "h e"], own: float
) -> Float64[Tensor, "k e"] | None:
    """The span's orthonormal directions, strongest first, if it ends sharply. `stored` are the
    weights as they were kept, to whose size rounding was in proportion: neurons and pixels are
    compared at that size, or else as they are. Then each is divided by its own noise, and the end
    looked for anew, until it stays."""
    least = QUIETEST * float(stored.norm())
    moved = [matrix.norm(dim=i) > (MOVED * stored.norm(dim=i)).clamp_min(least) for i in (0, 1)]
    counted = min(int(m.sum()) for m in moved)
    is_exact = not torch.equal(stored.float().double(), stored)
    precision = torch.finfo(torch.float64 if is_exact else torch.float32).eps
    for sizes in (_sizes(stored), (stored.new_ones(1), stored.new_ones(1))):
        by_neuron, by_pixel = sizes
        scaled, rounding, before = matrix, ROUNDED * precision * stored, None
        pixels = torch.ones_like(by_pixel)
        for _ in range(1 + WHITENINGS):
            scaled, rounding = (some / by_neuron[:, None] / by_pixel for some in (scaled, rounding))
            pixels = pixels * by_pixel
            left, values, right = _singular(scaled)
            end = _sharp_end(values[:counted], is_exact=is_exact)
            if end is None or end == before:
                break
            rest = scaled - (left[:, :end] * values[:end]) @ right[:end]
            by_neuron, by_pixel = _sizes(torch.hypot(rest, rounding))
            before = end
        if before is None:
            continue
        if end is None or float(values[(end - 1) // 2]) < CLEAR * float(values[end]):
            return None
        seen = left[:, :end] * values[:end]
        unit = seen / seen.norm(dim=1, keepdim=True).clamp_min(torch.finfo(seen.dtype).tiny)
        free = 1 - torch.linalg.qr(unit).Q.square().sum(1)
        if float(free.min()) < own * (1 - end / len(left)):
            continue
        basis = torch.linalg.qr((right[:end] * pixels).mT).Q.mT
        ordered: Tensor = _singular(matrix @ basis.mT)[2] @ basis
        return ordered
    return None


def _sharp_end(values: Float64[Tensor, " s"], *, is_exact: bool) -> int | None:
    """The place at which singular values fall by most beside how those behind it scatter, if that
    is enough. A fall to nothing is an end only of weights that are `is_exact`, more than single
    precision, and if there is no other; it is else where noise ends, of pixels that are alike."""
    if len(values) < 2:
        return None
    logs = values.clamp_min(ROUNDING * float(values[0])).log()
    falls, n = logs[:-1] - logs[1:], len(logs) - 1
    before = torch.arange(1, n + 1, dtype=values.dtype, device=values.device)
    behind = n + 1 - before
    seen = ((behind + 1) / 2).long().clamp_max(TAIL)
    total = torch.cat([falls.new_zeros(1), falls.cumsum(0)])
    scatter = total[before.long() + seen - 1] - total[before.long()]
    least = math.log(FALL) + FEW / before + LAST / behind
    clear = falls / torch.maximum(SCATTERS * scatter, least)
    above = torch.where(values[1:] > NOTHING * values[0], clear, 0.0)
    is_far = (falls > math.log(FAR)) & (values[1:] < BEHIND * values[0])
    far = ((above > 1) & is_far).nonzero()
    if len(far):
        return int(far[0]) + 1
    if bool((above > 1).any()):
        return int(above.argmax()) + 1
    ends = (clear > 1).nonzero()
    return int(ends[0]) + 1 if is_exact and len(ends) else None


def _sizes(of: Float64[Tensor, "h e"]) -> tuple[Float64[Tensor, " h"], Float64[Tensor, " e"]]:
    """Root mean squares by row, and by column once rows are divided by them."""
    found = []
    for dim in (1, 0):
        sizes = of.square().mean(dim, keepdim=True).sqrt()
        sizes = sizes.clamp_min(max(QUIETEST * float(sizes.max()), torch.finfo(of.dtype).tiny))
        found.append(sizes.flatten())
        of = of / sizes
    return found[0], found[1]


def _noise_behind(
    k: int, values: Float64[Tensor, " s"], shape: tuple[int, ...] | torch.Size
) -> tuple[float, float]:
    """(sigma, the edge) if all but the k largest singular values are noise's. The edge is what the
    largest of p x n normal numbers exceeds in a case of 200."""
    p, n = (max(1, size - k) for size in sorted(shape))
    sigma = float((values[k:].double().square().sum() / (p * n)).sqrt())
    a, b = max(p - 0.5, 0.5) ** 0.5, max(n - 0.5, 0.5) ** 0.5
    width = (a + b) * (1 / a + 1 / b) ** (1 / 3)
    return sigma, sigma * ((a + b) ** 2 + TRACY_WIDOM * width) ** 0.5
