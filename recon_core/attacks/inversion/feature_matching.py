"""Recovery of images from their features at the cut of a split network (MixCon paper, eq. 3).

    s* = argmin over s of L(h(s), z) + zeta TV(s)

A server that knows h sees z = h(x) and looks for an s with the same features. All images of a batch
are solved together and each is a problem of its own, which ends by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from recon_core.attacks.plug_and_play import (
    Ending,
    mean_square,
)
from recon_core.optimisers import Optimiser
from recon_core.strict import Count, NonNegative, Positive, Strict

Features = Callable[[Tensor], Tensor]
"""h, from a batch of images (b, c, h, w) to features (b, m), differentiable. Every row depends on
its own image alone. Rows keep their places: row i belongs to feature vector i modulo the number of
vectors (several starts come one after another), so that h may be another network for every row."""
Objective = Callable[[Tensor], Tensor]
"""Of a batch of images, one number each."""
Start = Literal["zeros", "grey", "noise"]
Range = tuple[float, float]
UNIT: Range = (0.0, 1.0)

_CHECK_EVERY = 25
"""Steps between looks at whether any image still moves; on a GPU each look waits for it."""


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

    L is the square of the l2 distance of the features, or the l1 distance. The paper gives lr = 10,
    weight decay 1e-4, 500 steps, zeta = .01 for SVHN and 1e-5 for MNIST and FashionMNIST, and for
    vectors the l1 distance with lr = .01 (`SYNTHETIC`). What it leaves open:

    * `scale`: whether L and TV are sums, as C.2 writes them, or the "mean" over features and over
    pixels and channels. Descent on a sum of squares is stable while lr < 1 / ||J||^2 with J the
    Jacobian of h, so lr = 10 would ask for ||J|| < .32; on the mean of m squares lr < m / ||J||^2,
    which holds for ordinary networks. Measured on an untrained LeNet5, sums diverge with ReLU or
    never settle where means descend; with sigmoids (||J|| = .02) they got further.
    * `start`: "zeros", "grey" (the middle of the range) or "noise" (uniform in the range; standard
    normal without one), which takes a CPU generator per image.
    * `clip`: whether pixels are brought into `value_range` only at the "end" or after every "step".
    `value_range` None: data without bounds, never clipped.

    An image ends early, as converged, once the mean square of a step is below `tolerance` (0 in the
    paper).
    """

    kind: Literal["sgd"] = "sgd"
    norm: Literal["l2", "l1"] = "l2"
    scale: Literal["mean", "sum"] = "mean"
    zeta: NonNegative = 1e-5
    lr: Positive = 10.0
    weight_decay: NonNegative = 1e-4
    n_steps: Count = 500
    start: Start = "grey"
    clip: Literal["end", "step"] = "end"
    value_range: Range | None = UNIT
    tolerance: NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(norm=(self.norm, ("l2", "l1")), scale=(self.scale, ("mean", "sum")))
        check_choice(clip=(self.clip, ("end", "step")))
        check_range(self.value_range)
        check_starts((self.start,), self.value_range)

    def invert(
        self,
        h: Features,
        z: Float[Tensor, "b m"],
        *,
        shape: tuple[int, int, int],
        generators: Sequence[torch.Generator] = (),
    ) -> Inverted:
        """Images of `shape` (c, h, w) whose features are z, in the dtype and on the device of z.
        Raises ValueError for features that are not finite or not as many as z has."""
        s = first_images(
            (self.start,), z, shape=shape, value_range=self.value_range, generators=generators
        )[0]
        check_features(h, s, z)

        def objective(x: Tensor) -> Tensor:
            difference = h(x).to(z.dtype) - z
            each = difference.abs() if self.norm == "l1" else difference.square()
            if self.scale == "sum":
                return penalised(each.sum(1), self.zeta, x)
            return penalised(each.mean(1), self.zeta / x[0].numel(), x)

        return descend(
            objective,
            s,
            optimiser=Optimiser(rule="gd", lr=self.lr),
            n_steps=self.n_steps,
            weight_decay=self.weight_decay,
            tolerance=self.tolerance,
            value_range=self.value_range,
            clip_steps=self.clip == "step",
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
    tolerance: float = 0.0,
    value_range: Range | None = UNIT,
    clip_steps: bool = False,
    rate: Callable[[int], float] | None = None,
) -> Inverted:
    """Minimise the objective of every image from its start; the result is in `value_range`. `rate`:
    Adam's rate at step 0, 1, ...; None: that of the optimiser. The result of an image is its last
    iterate, or, once an objective or gradient was not finite, the last where both were."""
    descent, clip = _Descent(objective, start, optimiser), value_range if clip_steps else None
    for k in range(n_steps):
        if rate is not None:
            descent.stepper.set_rate(rate(k))
        descent.step(weight_decay, tolerance, clip)
        if k % _CHECK_EVERY == _CHECK_EVERY - 1 and not bool(descent.is_going.any()):
            break
    return descent.result(value_range)


class _Descent:
    """All images move in place; those that have ended are put back to where they ended."""

    def __init__(
        self, objective: Objective, start: Float[Tensor, "b c h w"], optimiser: Optimiser
    ) -> None:
        self.objective = objective
        self.s = start.detach().clone(memory_format=torch.contiguous_format)
        self.stepper = optimiser.stepper(self.s)
        self.kept = self.s.clone()
        self.is_going: Bool[Tensor, " b"] = start.new_ones(len(start), dtype=torch.bool)
        self.ending = torch.full_like(self.is_going, Ending.LIMIT, dtype=torch.int64)
        self.n_steps = torch.zeros_like(self.ending)

    def step(self, weight_decay: float, tolerance: float, clip: Range | None) -> None:
        value, gradient = value_and_gradient(self.objective, self.s)
        self.n_steps += self.is_going
        finite = value.isfinite() & gradient.flatten(1).isfinite().all(1)
        self._end(self.is_going & ~finite, Ending.NONFINITE)
        self._keep()
        self.stepper.step_(gradient.add(self.s, alpha=weight_decay))
        if clip is not None:
            self.s.clamp_(*clip)
        moved = mean_square(self.s - self.kept)
        converged = self.is_going & (moved < tolerance)
        self._keep(converged)
        self._end(converged, Ending.CONVERGED)
        self.s.copy_(torch.where(_per_row(self.is_going), self.s, self.kept))

    def result(self, value_range: Range | None) -> Inverted:
        """Clipped, with the objectives of what was clipped."""
        x, value = self._values(self.s, value_range)
        lost = self.is_going & ~(_finite_rows(self.s) & value.isfinite())
        if bool(lost.any()):
            self._end(lost, Ending.NONFINITE)
            x, value = self._values(torch.where(_per_row(lost), self.kept, self.s), value_range)
        return Inverted(x, value, self.ending, self.n_steps)

    def _values(self, s: Tensor, value_range: Range | None) -> tuple[Tensor, Tensor]:
        x = s.clone() if value_range is None else s.clamp(*value_range)
        with torch.no_grad():
            return x, self.objective(x)

    def _end(self, rows: Tensor, why: Ending) -> None:
        self.ending.masked_fill_(rows, int(why))
        self.is_going &= ~rows

    def _keep(self, rows: Tensor | None = None) -> None:
        """What these rows are now is what they go back to; None: those that still move."""
        rows = self.is_going if rows is None else rows
        self.kept.copy_(torch.where(_per_row(rows), self.s, self.kept))


def value_and_gradient(
    objective: Objective, s: Float[Tensor, "b c h w"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b c h w"]]:
    with torch.enable_grad():
        leaf = s.detach().requires_grad_()
        value = objective(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def first_images(
    starts: Sequence[Start],
    z: Float[Tensor, "b m"],
    *,
    shape: tuple[int, int, int],
    value_range: Range | None,
    generators: Sequence[torch.Generator] = (),
) -> Float[Tensor, "k b c h w"]:
    if not len(z) or len(shape) != 3 or any(side < 1 for side in shape):
        raise ValueError(f"{len(z)} feature vectors, shape={shape}; need at least one, (c, h, w)")
    if "noise" in starts and len(generators) != len(z):
        raise ValueError(
            f"start='noise' needs one generator per image: {len(generators)} for {len(z)}"
        )
    low, high = value_range or (0.0, 0.0)

    def images(start: Start) -> Tensor:
        if start == "noise":
            draw = torch.randn if value_range is None else torch.rand
            drawn = [draw(*shape, generator=g, dtype=torch.float64) for g in generators]
            unit = torch.stack(drawn)
            scaled = unit if value_range is None else low + (high - low) * unit
            return scaled.to(z.device, z.dtype)
        return z.new_full((len(z), *shape), (low + high) / 2 if start == "grey" else 0.0)

    return torch.stack([images(start) for start in starts])


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
    if not _depends(found, leaf):
        raise ValueError(
            "h gives features without a gradient; leave out no_grad and detach inside it"
        )
    if not bool(found.isfinite().all()):
        bad = ((~_finite_rows(found)).nonzero().flatten() % len(z)).unique().tolist()
        raise ValueError(
            f"h gives NaN or infinite features at the start, for images {bad[:5]}; check "
            "the network's weights"
        )


def check_choice(**values: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, choices) in values.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")


def check_range(value_range: Range | None) -> None:
    if value_range is None:
        return
    if len(value_range) != 2 or not all(map(math.isfinite, value_range)):
        raise ValueError(f"value_range={value_range} must be two finite numbers, or None")
    if value_range[0] >= value_range[1]:
        raise ValueError(f"value_range={value_range} is empty; give the lower bound first")


def check_starts(starts: Sequence[str], value_range: Range | None) -> None:
    if not starts:
        raise ValueError("starts is empty; give at least one")
    for start in starts:
        check_choice(start=(start, get_args(Start)))
        if start == "grey" and value_range is None:
            raise ValueError("start='grey' is the middle of value_range=None; use 'zeros'")


def _depends(found: Tensor, leaf: Tensor) -> bool:
    if not found.requires_grad:
        return False
    with torch.enable_grad():
        return torch.autograd.grad(found.sum(), leaf, allow_unused=True)[0] is not None


def _per_row(rows: Bool[Tensor, " b"]) -> Bool[Tensor, "b 1 1 1"]:
    return rows.view(-1, 1, 1, 1)


def _finite_rows(x: Tensor) -> Bool[Tensor, " b"]:
    return x.flatten(1).isfinite().all(1)


MNIST = GradientInversion()
"""MixCon paper, C.2, for MNIST and FashionMNIST."""
SVHN = GradientInversion(zeta=0.01)
"""MixCon paper, C.2."""
SYNTHETIC = GradientInversion(
    norm="l1", scale="sum", zeta=0.0, lr=0.01, start="zeros", value_range=None
)
"""MixCon paper, C.1: vectors of d numbers are images of shape (1, 1, d)."""
