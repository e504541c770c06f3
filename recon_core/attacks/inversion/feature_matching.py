"""Recovery of images from their features at the cut of a split network (MixCon paper, eq. 3).

    s* = argmin over s of L(h(s), z) + zeta TV(s)

A server that knows h sees z = h(x) and looks for an s with the same features. All images of a batch
are solved together and each is a problem of its own, which ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from recon_core.attacks.plug_and_play import Ending
from recon_core.optimisers import Optimiser, Stepper
from recon_core.strict import Count, NonNegative, Positive, Strict

Features = Callable[[Tensor], Tensor]
"""h, from a batch of images (b, c, h, w) to features (b, m), differentiable. Every row depends on
its own image alone. Rows keep their places: row i belongs to feature vector i modulo the number of
vectors (several starts come one after another), so that h may be another network for every row."""
Objective = Callable[[Tensor], Tensor]
"""Of a batch of images, one number each."""

_CHECK_EVERY = 25
"""Steps between looks at whether any image is left; on a GPU each look waits for it."""


@dataclass(frozen=True)
class Inverted:
    """Estimates of B images and the objectives of exactly these, regulariser included. `ending`
    holds values of `Ending`; `n_steps` counts gradients taken, those of all starts."""

    x: Float[Tensor, "b c h w"]
    objective: Float[Tensor, " b"]
    ending: Int64[Tensor, " b"]
    n_steps: Int64[Tensor, " b"]


def total_variation(x: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Isotropic: the sum over pixels and channels of sqrt(dx^2 + dy^2) (MixCon paper, C.2), dx and
    dy being differences to the next row and column, 0 in the last ones (Chambolle 2004). Where dx =
    dy = 0 the gradient is the subgradient of smallest norm, 0."""
    down = F.pad(x.diff(dim=2), (0, 0, 0, 1))
    right = F.pad(x.diff(dim=3), (0, 1))
    square = down.square() + right.square()
    is_flat = square == 0
    root = torch.where(is_flat, 1.0, square).sqrt()
    return torch.where(is_flat, 0.0, root).flatten(1).sum(1)


@dataclass(frozen=True, kw_only=True)
class GradientInversion(Strict):
    """The paper's attack: gradient descent with weight decay, all steps done (MixCon paper, C.2).

        s <- s - lr (grad_s [L(h(s), z) + zeta TV(s)] + weight_decay s)

    The paper gives lr = 10, weight decay 1e-4, 500 steps, zeta = .01 for SVHN and 1e-5 for MNIST
    and FashionMNIST. L is the mean over features of squared distances, and TV the mean over pixels
    and channels; the paper writes sums. Descent on a sum of squares is stable while lr < 1 /
    ||J||^2 with J the Jacobian of h, so lr = 10 would ask for ||J|| < .32; on the mean of m squares
    lr < m / ||J||^2, which holds for ordinary networks. Measured on an untrained LeNet5, sums
    diverge with ReLU or never settle where means descend; with sigmoids (||J|| = .02) they got
    further. The start, which the paper leaves open, is grey; pixels are clipped at the end.

    `vectors`: the attack on vectors (C.1): L is the l1 distance, a sum; from zeros, without bounds.
    """

    kind: Literal["sgd"] = "sgd"
    vectors: bool = False
    zeta: NonNegative = 1e-5
    lr: Positive = 10.0
    weight_decay: NonNegative = 1e-4
    n_steps: Count = 500

    def invert(
        self,
        h: Features,
        z: Float[Tensor, "b m"],
        *,
        shape: tuple[int, int, int],
        generators: object = (),
    ) -> Inverted:
        """Images of `shape` (c, h, w) whose features are z, in the dtype and on the device of z.
        Nothing is drawn from `generators`. Raises ValueError for features that are not finite or
        not as many as z has."""
        del generators
        s = z.new_full((len(z), *shape), 0.0 if self.vectors else 0.5)
        check_features(h, s, z)

        def objective(x: Tensor) -> Tensor:
            difference = h(x).to(z.dtype) - z
            if self.vectors:
                return penalised(difference.abs().sum(1), self.zeta, x)
            return penalised(difference.square().mean(1), self.zeta / x[0].numel(), x)

        return descend(
            objective,
            s,
            optimiser=Optimiser(rule="gd", lr=self.lr),
            n_steps=self.n_steps,
            weight_decay=self.weight_decay,
            bounded=not self.vectors,
        )


def penalised(
    data: Float[Tensor, " b"], zeta: float, x: Float[Tensor, "b c h w"]
) -> Float[Tensor, " b"]:
    return data + zeta * total_variation(x) if zeta else data


def descend(
    objective: Objective,
    start: Float[Tensor, "b c h w"],
    *,
    optimiser: Optimiser,
    n_steps: int,
    weight_decay: float = 0.0,
    bounded: bool = True,
    rate: Callable[[int], float] | None = None,
) -> Inverted:
    """Minimise the objective of every image from its start; the result is in [0, 1] if `bounded`.
    `rate`: Adam's rate at step 0, 1, ..., after each of which pixels are clipped; None: that of the
    optimiser. The result of an image is its last iterate, or, once an objective or gradient was not
    finite, the last where both were."""
    s = start.detach().clone(memory_format=torch.contiguous_format)
    stepper, kept = Stepper(optimiser, s), s.clone()
    going = s.new_ones(len(s), dtype=torch.bool)
    taken = torch.zeros_like(going, dtype=torch.int64)
    for k in range(n_steps):
        if rate is not None:
            stepper.set_rate(rate(k))
        with torch.enable_grad():
            leaf = s.detach().requires_grad_()
            value = objective(leaf)
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        taken += going
        going = going & value.isfinite() & _finite_rows(gradient)
        kept.copy_(torch.where(_per_row(going), s, kept))
        stepper.step_(gradient.add(s, alpha=weight_decay))
        if rate is not None:
            s.clamp_(0.0, 1.0)
        s.copy_(torch.where(_per_row(going), s, kept))
        if k % _CHECK_EVERY == _CHECK_EVERY - 1 and not bool(going.any()):
            break

    def result(s: Tensor) -> tuple[Tensor, Tensor]:
        x = s.clamp(0.0, 1.0) if bounded else s.clone()
        with torch.no_grad():
            return x, objective(x)

    x, value = result(s)
    lost = going & ~(_finite_rows(s) & value.isfinite())
    if bool(lost.any()):
        x, value = result(torch.where(_per_row(lost), kept, s))
    ending = torch.where(going & ~lost, int(Ending.LIMIT), int(Ending.NONFINITE))
    return Inverted(x, value, ending, taken)


def check_features(h: Features, s: Float[Tensor, "k c h w"], z: Float[Tensor, "b m"]) -> None:
    """ValueError unless h gives as many finite, differentiable features as z has; z is finite."""
    if not bool(z.isfinite().all()):
        bad = (~_finite_rows(z)).nonzero().flatten().tolist()
        raise ValueError(f"z has NaN or infinite features for images {bad[:5]}; leave them out")
    with torch.enable_grad():
        leaf = s.detach().requires_grad_()
        found = h(leaf)
    if not isinstance(found, Tensor) or found.shape != (len(s), z.shape[1]):
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"h gives {what} for images {tuple(s.shape)} and z has {z.shape[1]} features; h must "
            "give one row of as many per image: flatten them, and cut where z was taken"
        )
    with torch.enable_grad():
        if not (
            found.requires_grad
            and torch.autograd.grad(found.sum(), leaf, allow_unused=True)[0] is not None
        ):
            raise ValueError(
                "h gives features without a gradient; leave out no_grad and detach inside it"
            )
    if not bool(found.isfinite().all()):
        bad = ((~_finite_rows(found)).nonzero().flatten() % len(z)).unique().tolist()
        raise ValueError(
            f"h gives NaN or infinite features at the start, for images {bad[:5]}; check "
            "the network's weights"
        )


def _per_row(rows: Bool[Tensor, " b"]) -> Bool[Tensor, "b 1 1 1"]:
    return rows.view(-1, 1, 1, 1)


def _finite_rows(x: Tensor) -> Bool[Tensor, " b"]:
    return x.flatten(1).isfinite().all(1)


MNIST = GradientInversion()
"""MixCon paper, C.2, for MNIST and FashionMNIST."""
SVHN = GradientInversion(zeta=0.01)
"""MixCon paper, C.2."""
SYNTHETIC = GradientInversion(vectors=True, zeta=0.0, lr=0.01)
"""MixCon paper, C.1: vectors of d numbers are images of shape (1, 1, d)."""
