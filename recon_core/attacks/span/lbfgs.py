"""Limited-memory BFGS in the relative gradient, for a batch of square matrices.

A matrix W is moved to (I + p) W or exp(p) W; gradients and steps are k x k matrices at the identity
(Cardoso and Laheld 1996). Directions are those of Nocedal's two loops around a diagonal or 2x2
block approximation of the Hessian (Ablin, Cardoso and Gramfort 2018), each matrix of the batch with
its own memory, step and end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MEMORY = 10
CURVATURE = 1e-12
"""Share of |s| |y| that s.y must exceed: pairs without curvature are not remembered."""
HALVINGS = 12
DECREASE = 1e-4
"""Armijo's constant."""

Inverse = Callable[[Float[Tensor, "r k k"]], Float[Tensor, "r k k"]]
"""H_0^{-1} g of each matrix."""


class Memory:
    """The last steps and what they changed of the gradient, and the directions that they give."""

    def __init__(self, size: int = MEMORY) -> None:
        self.pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=size)

    def add(self, step: Float[Tensor, "r k k"], change: Float[Tensor, "r k k"]) -> None:
        product = _dot(step, change)
        floor = CURVATURE * (_dot(step, step) * _dot(change, change)).sqrt()
        rho = torch.where(product > floor, 1 / product.clamp_min(1e-300), 0.0)
        self.pairs.append((step, change, rho))

    def direction(
        self, gradient: Float[Tensor, "r k k"], inverse: Inverse
    ) -> Float[Tensor, "r k k"]:
        """-H g; where that is no descent, minus the preconditioned gradient."""
        q, kept = gradient, []
        for step, change, rho in reversed(self.pairs):
            alpha = rho * _dot(step, q)
            q = q - alpha * change
            kept.append(alpha)
        q = inverse(q)
        for (step, change, rho), alpha in zip(self.pairs, reversed(kept), strict=True):
            q = q + step * (alpha - rho * _dot(change, q))
        climbs = _dot(gradient, q) <= 0
        return -torch.where(climbs, inverse(gradient), q)


def slope(gradient: Float[Tensor, "r k k"], direction: Float[Tensor, "r k k"]) -> Tensor:
    """The derivative along a direction, (r,)."""
    return _dot(gradient, direction).flatten()


def accepted(
    loss: Float[Tensor, " r"], before: Float[Tensor, " r"], step: Tensor, slope_: Tensor
) -> Bool[Tensor, " r"]:
    """Armijo's rule."""
    return loss <= before + DECREASE * step * slope_


def _dot(a: Float[Tensor, "r k k"], b: Float[Tensor, "r k k"]) -> Float[Tensor, "r 1 1"]:
    return (a * b).sum((1, 2), keepdim=True)
