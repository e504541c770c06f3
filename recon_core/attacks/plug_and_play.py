"""Recovery of training images from an autoencoder f and degraded copies y = H x + noise.

    min over x, H of ||H x - y||^2 + lambda s_f(x),     H diagonal, of zeros and ones

with H unknown (autoencoder paper, eq. 5), alternately for x, by plug-and-play ADMM in which f
stands for the proximity operator of s_f (algorithm 1), and for H, pixel by pixel in closed form
(eq. 19, 20). Only evaluations of f are needed. Samples form one batch, which each leaves when it
ends.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from recon_core.strict import Count, NonNegative, Positive, Strict

Function = Callable[[Tensor], Tensor]
"""f, for a batch (b, c, h, w); every row depends on its own input alone."""


class Ending(enum.IntEnum):
    """Reason why a sample's iterations ended."""

    CONVERGED = 0
    LIMIT = 1
    NONFINITE = 2  # f gave NaN or infinity; the last finite estimate is kept


@dataclass(frozen=True)
class Recovered:
    """Estimates of B samples, x clamped to [0, 1]; `mask` the estimate of H (ones without one).

    `n_applied` counts evaluations of f; `ending` holds values of `Ending`.
    """

    x: Float[Tensor, "b c h w"]
    mask: Bool[Tensor, "b c h w"]
    n_applied: Int64[Tensor, " b"]
    ending: Int64[Tensor, " b"]


@dataclass(frozen=True, kw_only=True)
class Degraded:
    """B degraded images and what is known of their degradation.

    `y` is in [0, 1] but for noise. `mask`: the true H, True where a pixel was kept; `sigma`: the
    noise's standard deviation; both None if unknown. `generators`: one per sample, for random
    starts.
    """

    y: Float[Tensor, "b c h w"]
    mask: Bool[Tensor, "_ _ _ _"] | None = None
    sigma: float | None = None
    generators: tuple[torch.Generator, ...] = ()

    def __post_init__(self) -> None:
        if self.mask is not None and self.mask.shape != self.y.shape:
            raise ValueError(
                f"mask is {tuple(self.mask.shape)} for images {tuple(self.y.shape)}; give every "
                "sample and channel its own"
            )


def x_step(
    v: Float[Tensor, "b c h w"],
    y: Float[Tensor, "b c h w"],
    theta: Bool[Tensor, "b c h w"],
    gamma: float,
) -> Float[Tensor, "b c h w"]:
    """argmin over x of ||theta x - y||^2 + gamma / 2 ||x - v||^2 (autoencoder paper, eq. 17)."""
    return torch.where(theta, (y + gamma / 2 * v) / (1 + gamma / 2), v)


def mask_step(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Bool[Tensor, "b c h w"]:
    """argmin over H of ||H x - y||^2: False where x > 2 y or x < 0 (eq. 20; y >= 0)."""
    return (x <= 2 * y) & (x >= 0)


def admm(
    f: Function,
    y: Float[Tensor, "b c h w"],
    theta: Bool[Tensor, "b c h w"],
    *,
    gamma: float,
    n_iterations: int,
    tolerance: float = 0.0,
) -> Estimates:
    """Algorithm 1 of the autoencoder paper: xi of the last iteration, for every sample of a batch.

        v~ = v - u,   xi = x_step(v~),   v = f(xi + u),   u = u + xi - v,       v = u = 0 at first

    With a `tolerance` a sample stops when both its residuals, the mean squares of xi - v and of the
    change of v, are below it (Boyd et al. 2011, section 3.3); at 0 all do `n_iterations`.
    """
    rows = torch.arange(len(y), device=y.device)
    out = Estimates.at(y)
    v, u = torch.zeros_like(y), torch.zeros_like(y)
    for k in range(n_iterations):
        xi = x_step(v - u, y[rows], theta[rows], gamma)
        new_v = evaluated(f, xi + u)
        out.n_applied[rows] += 1
        finite = new_v.flatten(1).isfinite().all(1)
        u = u + xi - new_v
        moved = torch.maximum(mean_square(xi - new_v), mean_square(new_v - v))
        done = (moved < tolerance) | ~finite
        stay = out.ended(rows, xi, done, finite, last=k == n_iterations - 1)
        rows, v, u = rows[stay], new_v[stay], u[stay]
        if not len(rows):
            break
    return out


@dataclass
class Estimates:
    """Final estimates of the samples of a batch."""

    x: Float[Tensor, "b c h w"]
    converged: Bool[Tensor, " b"]
    finite: Bool[Tensor, " b"]
    n_applied: Int64[Tensor, " b"]

    @classmethod
    def at(cls, x: Float[Tensor, "b c h w"]) -> Estimates:
        flags = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        return cls(x.clone(), flags, ~flags, torch.zeros_like(flags, dtype=torch.int64))

    def ended(
        self, rows: Tensor, x: Tensor, done: Tensor, finite: Tensor, *, last: bool
    ) -> Tensor | slice:
        """Store the estimates of samples that are `done`, or of all at the `last` step; returns
        which of `rows` go on. A sample that is not finite keeps its estimate of before."""
        if not (last or bool(done.any())):
            return slice(None)
        leaving = done | last
        is_good = leaving & x.flatten(1).isfinite().all(1)
        self.x[rows[is_good]] = x[is_good]
        self.converged[rows[leaving]] = (done & finite)[leaving]
        self.finite[rows[leaving]] = finite[leaving]
        return ~leaving

    def take(self, rows: Tensor, other: Estimates, is_better: Bool[Tensor, " k"]) -> None:
        """Take `other` at the samples `rows` where it is better; evaluations add up."""
        self.n_applied[rows] += other.n_applied
        chosen = rows[is_better]
        self.x[chosen] = other.x[is_better]
        self.converged[chosen] = other.converged[is_better]
        self.finite[chosen] = other.finite[is_better]

    def endings(self) -> Int64[Tensor, " b"]:
        ending = torch.where(self.converged, Ending.CONVERGED, Ending.LIMIT)
        return torch.where(self.finite, ending, Ending.NONFINITE)


def evaluated(f: Function, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """f(x). Raises ValueError if its shape is not that of x."""
    value = f(x)
    if not isinstance(value, Tensor) or value.shape != x.shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"f gives {found} for images {tuple(x.shape)}; an autoencoder gives images of the "
            "shape of its input"
        )
    return value.to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Iteration(Strict):
    """x <- f(x) from x = y, as earlier work does (Radhakrishnan et al. 2020).

    Stops at `n_iterations`, or when a step's mean square is below `stop_below`.
    """

    kind: Literal["iteration"] = "iteration"
    n_iterations: Count = 1000
    stop_below: NonNegative = 1e-14

    def recover(self, f: Function, degraded: Degraded) -> Recovered:
        x = y = degraded.y
        rows, out = torch.arange(len(y), device=y.device), Estimates.at(y)
        for k in range(self.n_iterations):
            new = evaluated(f, x)
            out.n_applied[rows] += 1
            finite = new.flatten(1).isfinite().all(1)
            done = (mean_square(new - x) < self.stop_below) | ~finite
            ends = torch.where(finite.view(-1, 1, 1, 1), new, x)
            stay = out.ended(rows, ends, done, finite, last=k == self.n_iterations - 1)
            rows, x = rows[stay], new[stay]
            if not len(rows):
                break
        return recovered(out, torch.ones_like(y, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class KnownMask(Strict):
    """ADMM once with the true H; without noise the known pixels are then put back (eq. 31).
    `noisy`: y has noise, so what is known of a pixel is not its value."""

    kind: Literal["known"] = "known"
    gamma: Positive = 0.5
    n_admm: Count = 40
    tolerance: NonNegative = 0.0
    noisy: bool = False

    def recover(self, f: Function, degraded: Degraded) -> Recovered:
        y = degraded.y
        if degraded.mask is None:
            raise ValueError("the method 'known' needs the masks; give them, or use 'unknown'")
        theta = degraded.mask.expand_as(y)
        out = admm(
            f, y, theta, gamma=self.gamma, n_iterations=self.n_admm, tolerance=self.tolerance
        )
        if not self.noisy:
            out.x = torch.where(theta, y, out.x)
        return recovered(out, theta)


@dataclass(frozen=True, kw_only=True)
class UnknownMask(Strict):
    """The paper's method: alternate ADMM and the mask step, H unknown (eq. 6, 7, 20).

    Defaults are for a fully connected autoencoder of 10 layers with leaky ReLU; the paper's
    appendix D has gamma .5 there, .1 with PReLU and for 20 layers, 1 for a U-Net, .1 with noise.
    `start`: H at first, "random" (each component known with probability 1/2, drawn from a generator
    per sample) or "nothing" known (U-Net). Ends when the mean square of the change of x was below
    `stop_below` `stop_times` in a row, or after `n_alternations`, of which the paper says nothing.
    """

    kind: Literal["unknown"] = "unknown"
    gamma: Positive = 0.5
    start: Literal["random", "nothing"] = "random"
    n_admm: Count = 40
    n_alternations: Count = 100
    stop_below: NonNegative = 1e-9
    stop_times: Count = 3

    def recover(self, f: Function, degraded: Degraded) -> Recovered:
        y = degraded.y
        theta = self._first_masks(y, degraded.generators)
        rows, out = torch.arange(len(y), device=y.device), Estimates.at(y)
        before = torch.zeros_like(y)
        calm = torch.zeros(len(y), dtype=torch.int64, device=y.device)
        for t in range(self.n_alternations):
            step = admm(f, y[rows], theta[rows], gamma=self.gamma, n_iterations=self.n_admm)
            out.n_applied[rows] += step.n_applied
            theta[rows] = torch.where(
                step.finite.view(-1, 1, 1, 1), mask_step(step.x, y[rows]), theta[rows]
            )
            is_calm = mean_square(step.x - before[rows]) < self.stop_below
            calm[rows] = torch.where(is_calm, calm[rows] + 1, 0)
            before[rows] = step.x
            done = (calm[rows] >= self.stop_times) | ~step.finite
            last = t == self.n_alternations - 1
            rows = rows[out.ended(rows, step.x, done, step.finite, last=last)]
            if not len(rows):
                break
        return recovered(out, theta)

    def _first_masks(
        self, y: Float[Tensor, "b c h w"], generators: Sequence[torch.Generator]
    ) -> Bool[Tensor, "b c h w"]:
        if self.start == "nothing":
            return torch.zeros_like(y, dtype=torch.bool)
        if len(generators) != len(y):
            raise ValueError(
                f"start='random' needs one generator per sample: {len(generators)} for {len(y)}"
            )
        drawn = [torch.rand(y.shape[1:], generator=g) < 0.5 for g in generators]
        return torch.stack(drawn).to(y.device)


def recovered(out: Estimates, mask: Tensor) -> Recovered:
    return Recovered(out.x.clamp(0, 1), mask, out.n_applied, out.endings())


def mean_square(x: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    return x.square().flatten(1).mean(1)
