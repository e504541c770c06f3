"""Minimisation over square matrices by limited-memory BFGS in the relative gradient, batched.

A matrix W moves by a step p to exp(p) W or (I + p) W (Cardoso and Laheld 1996), in directions of
Nocedal's two loops around an approximated Hessian (Ablin, Cardoso and Gramfort 2018).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MEMORY = 20
CURVATURE = 1e-12
"""Share of |s| |y| that s.y must exceed: pairs without curvature are not remembered."""
TRIALS = 12
DECREASE = 1e-4
"""Armijo's constant."""
SHORTEST, LONGEST = 0.1, 0.5
"""Bounds of a step's length over that of the trial before."""
SHORTEST_FIRST = 0.25
"""The least length that a search begins with."""
LOOK_BACK = 20
"""Iterations over which the objective must have fallen."""
FLAT = 1e-4
"""Largest entry of a relative gradient at which a matrix has arrived."""
CLEAN_EVERY = 20
"""Iterations after which Y = W Z is computed anew and W is cleaned of roundings."""

SMALLEST_EIGENVALUE, SMALLEST_OWN = 0.01, 0.2
"""Bounds of the approximated Hessian's eigenvalues, off its diagonal and on it."""

Solve = Callable[[Float[Tensor, "r k k"]], Float[Tensor, "r k k"]]
"""H^{-1} g of every matrix, with the approximated Hessian H."""
Derivatives = Callable[[], tuple[Float[Tensor, "r k k"], Solve]]
"""The relative gradients at one W, and their Hessians' approximation."""
Report = Callable[[int], None]
"""Called with the iterations that are done."""


def unheard(_n: int) -> None: ...


def after(report: Report, before: int, n: int) -> None:
    report(before + n)


@runtime_checkable
class Objective(Protocol):
    """A function of W and of the sources Y = W Z, and how W moves."""

    def at(
        self, w: Float[Tensor, "r k k"], y: Float[Tensor, "r k t"]
    ) -> tuple[Float[Tensor, " r"], Derivatives]:
        """The values, and what gives the derivatives there."""
        ...

    def step(self, p: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        """Factors of W and Y."""
        ...

    def clean(self, w: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        """W where it is allowed to be."""
        ...


@dataclass(frozen=True)
class Descent:
    """W (r, m, k), its sources Y = W Z (r, m, t), the objective (r,) and the iterations it took.
    `settled`: the objective of every matrix stopped falling before the iterations were used up."""

    rotation: Float[Tensor, "r m k"]
    sources: Float[Tensor, "r m t"]
    objective: Float[Tensor, " r"]
    n_iterations: int
    settled: bool


def minimise(
    objective: Objective,
    z: Float[Tensor, "r k t"],
    start: Float[Tensor, "r k k"],
    *,
    n_iterations: int,
    tolerance: float,
    report: Report = unheard,
) -> Descent:
    """W with a low objective of (W, W Z), from `start`. Ends early once no matrix's objective falls
    by more than `tolerance` of itself (of 1, where it is smaller) in 20 iterations, or every
    gradient is flat."""
    at, memory = _at(objective, start, start @ z), Memory()
    gradient, solve = at.derivatives()
    length, history = torch.ones_like(at.loss), deque([at.loss], maxlen=LOOK_BACK + 1)
    n, settled = 0, False
    while n < n_iterations and not settled:
        n += 1
        direction = memory.direction(gradient, solve)
        slope = _dot(gradient, direction).flatten()
        p, at, length = _line_search(objective, at, direction, slope, length)
        if n % CLEAN_EVERY == 0:
            w = objective.clean(at.w)
            at = _at(objective, w, w @ z)._replace(loss=at.loss)
        before = gradient
        gradient, solve = at.derivatives()
        memory.add(p, gradient - before)
        memory.forget(p.abs().amax((1, 2)) == 0)
        history.append(at.loss)
        fell = history[0] - at.loss
        stalled = fell <= tolerance * at.loss.abs().clamp_min(1.0)
        flat = gradient.abs().amax((1, 2)) < FLAT
        settled = bool(flat.all()) or (len(history) > LOOK_BACK and bool(stalled.all()))
        report(n)
    w = objective.clean(at.w)
    return Descent(w, w @ z, at.loss, n, settled)


class _Place(NamedTuple):
    """W, Y = W Z, the objective there and what gives its derivatives."""

    w: Float[Tensor, "r k k"]
    y: Float[Tensor, "r k t"]
    loss: Float[Tensor, " r"]
    derivatives: Derivatives


def _at(objective: Objective, w: Float[Tensor, "r k k"], y: Float[Tensor, "r k t"]) -> _Place:
    return _Place(w, y, *objective.at(w, y))


def _line_search(
    objective: Objective,
    at: _Place,
    direction: Float[Tensor, "r k k"],
    slope: Float[Tensor, " r"],
    length: Float[Tensor, " r"],
) -> tuple[Float[Tensor, "r k k"], _Place, Float[Tensor, " r"]]:
    """(step, where it leads, the length to try next) after backtracking from `length` (Armijo). A
    step that is too long is cut where the parabola through both values and the slope is lowest
    (Nocedal and Wright 2006, section 3.5), and the next begins there. A matrix that finds nothing
    lower stays."""
    w, y, loss, _ = at
    for _ in range(TRIALS):
        p = length[:, None, None] * direction
        move = objective.step(p)
        there = _at(objective, move @ w, move @ y)
        new = there.loss
        good = new <= loss + DECREASE * length * slope
        bend = new - loss - length * slope
        lowest = torch.where(bend > 0, -slope * length.square() / (2 * bend), torch.inf)
        longer = torch.minimum(torch.maximum(lowest, length), 2 * length)
        longer = longer.clamp(SHORTEST_FIRST, 1.0)
        if bool(good.all()):
            return p, there, longer
        shorter = torch.minimum(torch.maximum(lowest, SHORTEST * length), LONGEST * length)
        length = torch.where(good, length, shorter)
    stay = (~good)[:, None, None]
    p, w = torch.where(stay, 0.0, p), torch.where(stay, w, there.w)
    y, loss = torch.where(stay, y, there.y), torch.where(good, new, loss)
    return p, _Place(w, y, loss, objective.at(w, y)[1]), torch.where(good, longer, 1.0)


def likelihood_blocks(h: Float[Tensor, "r k k"]) -> Solve:
    """The inverse of the Hessian of -log|det W| + sum_i E_i(y_i), as independent sources have it:
    for i != j the block of (p_ij, p_ji) is ((h_ij, 1), (1, h_ji)), h_ij = E[psi'_i] E[y_j^2]; of
    p_ii it is h_ii + 1, h_ii = E[psi'_i y_i^2]. Eigenvalues below a bound are lifted to it."""
    eye = torch.eye(h.shape[1], dtype=h.dtype, device=h.device)
    own = (h.diagonal(dim1=1, dim2=2) + 1).clamp_min(SMALLEST_OWN)
    middle, apart = (h + h.mT) / 2, (h - h.mT) / 2
    lowest = middle - (apart.square() + 1).sqrt()
    h = h + (SMALLEST_EIGENVALUE - lowest).clamp_min(0.0)
    determinant = (h * h.mT - 1).clamp_min(SMALLEST_EIGENVALUE**2)

    def solve(v: Tensor) -> Tensor:
        off = (h.mT * v - v.mT) / determinant
        return off * (1 - eye) + torch.diag_embed(v.diagonal(dim1=1, dim2=2) / own)

    return solve


class Memory:
    """The last steps with what they changed of the gradient."""

    def __init__(self) -> None:
        self.pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=MEMORY)

    def add(self, step: Float[Tensor, "r k k"], change: Float[Tensor, "r k k"]) -> None:
        product = _dot(step, change)
        floor = CURVATURE * (_dot(step, step) * _dot(change, change)).sqrt()
        rho = torch.where(product > floor, 1 / product.clamp_min(1e-30), 0.0)
        self.pairs.append((step, change, rho))

    def forget(self, stuck: Bool[Tensor, " r"]) -> None:
        """Leaves the approximated Hessian alone to matrices that found nothing lower."""
        if bool(stuck.any()):
            for step, change, rho in [self.pairs.popleft() for _ in range(len(self.pairs))]:
                self.pairs.append((step, change, torch.where(stuck[:, None, None], 0.0, rho)))

    def direction(self, gradient: Float[Tensor, "r k k"], solve: Solve) -> Float[Tensor, "r k k"]:
        """-H^{-1} g; where that does not descend, by the approximated Hessian alone."""
        q, kept = gradient, []
        for step, change, rho in reversed(self.pairs):
            alpha = rho * _dot(step, q)
            q = q - alpha * change
            kept.append(alpha)
        q = solve(q)
        for (step, change, rho), alpha in zip(self.pairs, reversed(kept), strict=True):
            q = q + step * (alpha - rho * _dot(change, q))
        climbs = _dot(gradient, q) <= 0
        return -torch.where(climbs, solve(gradient), q)


def _dot(a: Float[Tensor, "r k k"], b: Float[Tensor, "r k k"]) -> Float[Tensor, "r 1 1"]:
    return (a * b).sum((1, 2), keepdim=True)
