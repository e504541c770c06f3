"""Maximum likelihood without orthogonality: the second half of a separation.

Whitened images are not quite orthogonal, since images have something in common. So W is freed:
minimised is

    -log|det W| + a sum_i E[log(1 + (y_i / c)^2)],

the likelihood of independent Student sources with 2a - 1 degrees of freedom, by L-BFGS in the
relative gradient a E[psi(y) y^T] - I, psi(y) = 2y / (c^2 + y^2), with Picard's 2x2 blocks for the
Hessian (Ablin, Cardoso and Gramfort 2018, "Faster independent component analysis by preconditioning
with Hessian approximations").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.lbfgs import HALVINGS, Memory, accepted, slope
from recon_core.attacks.span.orthogonal import LOOK_BACK, Report, Rotated, contrast

SMALLEST_EIGENVALUE = 0.01


def unmix(
    z: Float[Tensor, "r k t"],
    start: Float[Tensor, "r k k"],
    *,
    shape: float,
    scale: float,
    n_iterations: int,
    tolerance: float = 1e-6,
    report: Report = lambda _n: None,
) -> Rotated:
    """The unmixing matrix W that likelihood ends in, from `start`; rows' scales are fitted, too.

    `shape` is a, `scale` is c. Ends earlier once the objective falls by less than `tolerance` of
    itself in 20 iterations.
    """
    w, y, memory = start, start @ z, Memory()
    loss = _loss(w, y, shape, scale)
    gradient, inverse = _gradient(y, shape, scale)
    history = [loss]
    n, ended = 0, n_iterations == 0
    for n in range(1, n_iterations + 1):
        direction = memory.direction(gradient, inverse)
        p, w, y, loss = _line_search(w, y, loss, gradient, direction, shape, scale)
        before = gradient
        gradient, inverse = _gradient(y, shape, scale)
        memory.add(p, gradient - before)
        history.append(loss)
        report(n)
        if n >= LOOK_BACK:
            fell = history[-LOOK_BACK - 1] - loss
            if bool((fell <= tolerance * loss.abs().clamp_min(1.0)).all()):
                ended = True
                break
    return Rotated(w, w @ z, loss, n, ended)


def _loss(w: Tensor, y: Tensor, shape: float, scale: float) -> Float[Tensor, " r"]:
    volume = torch.linalg.slogdet(w.double()).logabsdet
    return shape * contrast(y, scale).sum(1) - volume.to(y.dtype)


def _gradient(
    y: Float[Tensor, "r k t"], a: float, c: float
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The relative gradient, and the inverse of its Hessian's 2x2 blocks.

    For i != j the block of (p_ij, p_ji) is ((h_ij, 1), (1, h_ji)), h_ij = E[psi'_i] E[y_j^2]; of
    p_ii it is E[psi'_i y_i^2] + 1. Eigenvalues below a bound are lifted to it.
    """
    t = y.shape[2]
    square = y.square()
    inverse = (square + c * c).reciprocal_()
    g = torch.bmm(y * inverse, y.mT).mul_(2 * a / t)
    curve = (inverse - 2 * square * inverse.square()).mul_(2 * a)
    h = curve.mean(2)[:, :, None] * square.mean(2)[:, None, :]
    own = (curve * square).mean(2)
    h.diagonal(dim1=1, dim2=2).copy_(own)
    eye = torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
    middle, apart = (h + h.mT) / 2, (h - h.mT) / 2
    lowest = middle - (apart.square() + 1).sqrt()
    lift = (SMALLEST_EIGENVALUE - lowest).clamp_min(0.0)
    h = h + lift
    determinant = h * h.mT - 1

    def solve(v: Tensor) -> Tensor:
        off = (h.mT * v - v.mT) / determinant.clamp_min(SMALLEST_EIGENVALUE**2)
        diagonal = (v.diagonal(dim1=1, dim2=2)) / (own + 1).clamp_min(SMALLEST_EIGENVALUE)
        return off * (1 - eye) + torch.diag_embed(diagonal)

    return g - eye, solve


def _line_search(
    w: Tensor, y: Tensor, loss: Tensor, gradient: Tensor, direction: Tensor, a: float, c: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(step, W, Y, loss) after backtracking; a matrix that finds nothing lower stays."""
    down = slope(gradient, direction)
    step = torch.ones_like(loss)
    for _ in range(HALVINGS):
        p = step[:, None, None] * direction
        w_new, y_new = w + p @ w, y + p @ y
        new = _loss(w_new, y_new, a, c)
        good = accepted(new, loss, step, down)
        if bool(good.all()):
            return p, w_new, y_new, new
        step = torch.where(good, step, step / 2)
    stay = (~good)[:, None, None]
    p = torch.where(stay, torch.zeros_like(p), p)
    return p, w + p @ w, y + p @ y, torch.where(good, new, loss)
