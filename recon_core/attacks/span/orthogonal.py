"""Rotations of whitened mixtures that make the sources sparse: the first half of a separation.

Sources are the rows of Y = W Z with W orthogonal. Minimised is the mean over samples of

    sum_i log(c^2 + y_i^2),

by L-BFGS on the orthogonal group (Picard-O: Ablin, Cardoso and Gramfort 2018, "Faster ICA under
orthogonal constraint"): with psi(y) = y / (c^2 + y^2) and G = E[psi(y) y^T], the relative gradient
is the antisymmetric part of G, its Hessian nearly h_ij = (E psi'_i + E psi'_j - G_ii - G_jj) / 2.
A wide score (large c) has few false optima and a narrow one tells images from mixtures, so c is
lowered in stages. Then a fixed point with a score that knows which samples belong together,

    g(y) = y / (c^2 + mean over filters at the place of y^2 + y^2),

since an image that is flat in a place is flat for every filter there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.lbfgs import HALVINGS, Memory, accepted, slope

SMALLEST_CURVATURE = 0.02
CLEAN_EVERY = 20
"""Iterations between two re-orthogonalisations."""
LOOK_BACK = 20
"""Iterations over which the objective must have fallen."""

Report = Callable[[int], None]
"""Called with the iterations that are done."""


@dataclass(frozen=True)
class Stage:
    """A number of iterations at one scale of the score; it ends earlier once the objective falls by
    less than `tolerance` of itself in 20 iterations."""

    scale: float
    n_iterations: int
    tolerance: float = 1e-6


@dataclass(frozen=True)
class Rotated:
    """W (r, k, k), its sources Y = W Z (r, k, t), the objective (r,) and how many iterations it
    took; `settled`: whether every stage ended because nothing fell any more."""

    rotation: Float[Tensor, "r k k"]
    sources: Float[Tensor, "r k t"]
    objective: Float[Tensor, " r"]
    n_iterations: int
    settled: bool


def rotation_start(size: int, generator: torch.Generator) -> Float[Tensor, "k k"]:
    """A random rotation (Haar), drawn on the CPU in float64."""
    drawn = torch.randn(size, size, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(drawn)
    return q * r.diagonal().sign()


def contrast(sources: Float[Tensor, "r k t"], scale: float) -> Float[Tensor, "r k"]:
    """Mean of log(1 + (y/c)^2) of every source: the lower, the sparser."""
    return (sources / scale).square().log1p().mean(2)


def rotate(
    z: Float[Tensor, "r k t"],
    start: Float[Tensor, "r k k"],
    stages: Sequence[Stage],
    *,
    report: Report = lambda _n: None,
) -> Rotated:
    """The rotations that the stages end in, from `start`; every matrix of the batch on its own."""
    w, y = start, start @ z
    n_done, settled = 0, True
    objective = contrast(y, 1.0).sum(1)
    for stage in stages:
        w, y, objective, n, ended = _minimise(z, w, y, stage, n_done, report)
        n_done, settled = n_done + n, settled and ended
    return Rotated(w, y, objective, n_done, settled)


def _minimise(
    z: Tensor, w: Tensor, y: Tensor, stage: Stage, n_before: int, report: Report
) -> tuple[Tensor, Tensor, Tensor, int, bool]:
    memory, c = Memory(), stage.scale
    loss = contrast(y, c).sum(1)
    gradient, inverse = _gradient(y, c)
    history = [loss]
    n, ended = 0, False
    for n in range(1, stage.n_iterations + 1):
        direction = memory.direction(gradient, inverse)
        p, w, y, loss = _line_search(w, y, loss, gradient, direction, c)
        if n % CLEAN_EVERY == 0:
            w = orthogonal(w)
            y = w @ z
        before = gradient
        gradient, inverse = _gradient(y, c)
        memory.add(p, gradient - before)
        history.append(loss)
        report(n_before + n)
        if n >= LOOK_BACK:
            fell = history[-LOOK_BACK - 1] - loss
            if bool((fell <= stage.tolerance * history[0].abs()).all()):
                ended = True
                break
    w = orthogonal(w)
    return w, w @ z, loss, n, ended


def _gradient(y: Float[Tensor, "r k t"], c: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The antisymmetric relative gradient, and the inverse of its Hessian's diagonal."""
    square = y.square()
    inverse = (square + c * c).reciprocal_()
    g = torch.bmm(y * inverse, y.mT) / y.shape[2]
    curve = inverse - 2 * square * inverse.square()  # psi' = 1/(c^2+y^2) - 2 y^2/(c^2+y^2)^2
    own = curve.mean(2) - g.diagonal(dim1=1, dim2=2)
    h = ((own[:, :, None] + own[:, None, :]) / 2).clamp_min(SMALLEST_CURVATURE)
    return g - g.mT, lambda v: v / (2 * h)


def _line_search(
    w: Tensor, y: Tensor, loss: Tensor, gradient: Tensor, direction: Tensor, c: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(step, W, Y, loss) after backtracking; a matrix that finds nothing lower stays."""
    down = slope(gradient, direction)
    step = torch.ones_like(loss)
    for _ in range(HALVINGS):
        p = step[:, None, None] * direction
        turn = cayley(p)
        y_new = turn @ y
        new = contrast(y_new, c).sum(1)
        good = accepted(new, loss, step, down)
        if bool(good.all()):
            return p, turn @ w, y_new, new
        step = torch.where(good, step, step / 2)
    stay = ~good
    p = torch.where(stay[:, None, None], torch.zeros_like(p), p)
    turn = cayley(p)
    y_new = turn @ y
    return p, turn @ w, y_new, torch.where(stay, loss, new)


def cayley(p: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
    """(I - p/2)^{-1} (I + p/2), orthogonal for antisymmetric p and exp(p) up to p^3/12."""
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    solved: Tensor = torch.linalg.solve(eye - p / 2, eye + p / 2)
    return solved


def orthogonal(w: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
    """The nearest orthogonal matrix, W (W^T W)^{-1/2}."""
    u, _, v = torch.linalg.svd(w.double(), full_matrices=False)
    return (u @ v).to(w.dtype)


def grouped_fixed_point(
    z: Float[Tensor, "r k t"],
    rotation: Float[Tensor, "r k k"],
    *,
    n_filters: int,
    scale: float,
    n_iterations: int,
    report: Report = lambda _n: None,
) -> Rotated:
    """FastICA's steps W <- orth(E[g(y) z^T] - diag(E[g'(y)]) W) with the grouped score.

    `n_filters` samples stand at each place, filter after filter.
    """
    w, places = rotation, (n_filters, z.shape[2] // n_filters)
    y = w @ z
    for n in range(n_iterations):
        square = y.unflatten(2, places).square()
        inverse = (square.mean(2, keepdim=True) + square + scale * scale).reciprocal()
        slope_ = (inverse - 2 * square * inverse.square()).flatten(2).mean(2)
        g = torch.bmm(y * inverse.flatten(2), z.mT) / z.shape[2]
        w = orthogonal(g - slope_[:, :, None] * w)
        y = w @ z
        report(n + 1)
    return Rotated(w, y, contrast(y, scale).sum(1), n_iterations, n_iterations > 0)
