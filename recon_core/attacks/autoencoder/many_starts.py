"""Our recovery: the mask from the noise, and projections from many starts.

The autoencoder paper's mask step erases a pixel where x > 2 y, whatever y is. But an erased pixel
holds nothing except noise, so H follows from y alone, and the effort goes into many starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.attacks.plug_and_play import (
    Degraded,
    Estimates,
    Function,
    Recovered,
    admm,
    evaluated,
    mean_square,
    recovered,
)
from recon_core.strict import Count, Natural, NonNegative, Positive, Strict

FALSE_VISIBLE = 1e4
"""An erased pixel in so many is taken for a visible one, because of its noise."""
SLACK = 4.0
"""The mean square of the noise of n pixels is sigma^2, give or take sigma^2 sqrt(2 / n); so many
times that is still put down to the noise."""


def noise_level(y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """The noise's standard deviation, from the values below 0, which only noise can make: E[y^2 | y
    < 0] = sigma^2 where a pixel was erased. 0 for a sample that has none."""
    below = y.clamp(max=0).double()
    count = (y < 0).flatten(1).sum(1).clamp(min=1)
    return (below.square().flatten(1).sum(1) / count).sqrt().to(y.dtype)


def visible(y: Float[Tensor, "b c h w"], sigma: Float[Tensor, " b"]) -> Bool[Tensor, "b c h w"]:
    """Pixels that noise alone would not have made as bright: sum over channels of y^2 above
    sigma^2 q, with q the quantile of chi-squared that one erased pixel in `FALSE_VISIBLE` exceeds.
    Without noise those that are not exactly 0."""
    energy = y.square().sum(1, keepdim=True)
    from scipy.stats import chi2

    quantile = float(chi2.isf(1 / FALSE_VISIBLE, y.shape[1]))
    limit = sigma.view(-1, 1, 1, 1).square() * quantile
    return (energy > limit).expand_as(y)


@dataclass(frozen=True, kw_only=True)
class NoiseAware(Strict):
    """Ours: H from the noise (`visible`), then projections from many starts; the best one is kept.

    From x = y with every erased pixel at one of `fills`, x <- P f(x), where P puts y back (half of
    it, if there is noise) where H says so; also ADMM, once per entry of `gammas`, after the first
    of the fills. Kept is the result that f changes least and that fits y best: right ones cost as
    little as the autoencoder's training loss. A sample whose cost is below `solved_below` leaves.
    With noise the estimate is what f alone makes of it in the end (`n_release` times), if that fits
    y no worse than the noise allows.
    """

    kind: Literal["noise_aware"] = "noise_aware"
    fills: tuple[float, ...] = (0.5, 0.3, 0.7, 0.1, 0.9, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    gammas: tuple[Positive, ...] = (0.5, 0.1, 1.0)
    n_steps: Count = 100
    tolerance: NonNegative = 1e-13
    solved_below: NonNegative = 1e-8
    n_release: Natural = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fills and not self.gammas:
            raise ValueError("fills and gammas are both empty; give at least one start")
        if not all(math.isfinite(fill) for fill in self.fills):
            raise ValueError(f"fills={self.fills} must be brightnesses, usually in [0, 1]")

    def recover(self, f: Function, degraded: Degraded) -> Recovered:
        y, given = degraded.y, degraded.sigma
        sigma = noise_level(y) if given is None else torch.full_like(y[:, 0, 0, 0], given)
        theta = visible(y, sigma)
        best = Estimates.at(y)
        lowest = torch.full_like(sigma, math.inf)
        rows = torch.arange(len(y), device=y.device)
        attempts = [(fill, 0.0) for fill in self.fills]
        attempts[1:1] = [(0.0, gamma) for gamma in self.gammas]
        for number, (fill, gamma) in enumerate(attempts):
            problem = _Problem(f, y[rows], theta[rows], sigma[rows])
            if gamma:
                out = admm(
                    f, problem.y, problem.theta, gamma=gamma, n_iterations=self.n_steps,
                    tolerance=self.tolerance,
                )  # fmt: skip
                out.x = problem.put_back(out.x, out.x)
            else:
                start = torch.where(problem.theta, problem.y, fill)
                out = problem.project(start, self.n_steps, self.tolerance)
            noisy = problem.sigma > 0
            if self.n_release and bool(noisy.any()):  # f alone, kept where the cost does not rise
                x = out.x
                for _ in range(self.n_release):
                    x = evaluated(f, x)
                out.n_applied += self.n_release
                better = (problem.cost(x) <= problem.cost(out.x)) & noisy
                out.x = torch.where(better.view(-1, 1, 1, 1), x, out.x)
            cost = problem.cost(out.x).where(out.finite, math.inf)
            out.n_applied += 1
            best.take(rows, out, (cost < lowest[rows]) | (number == 0))
            lowest[rows] = torch.minimum(lowest[rows], cost)
            rows = rows[lowest[rows] > self.solved_below]
            if not len(rows):
                break
        return recovered(best, theta)


@dataclass(frozen=True)
class _Problem:
    f: Function
    y: Float[Tensor, "b c h w"]
    theta: Bool[Tensor, "b c h w"]
    sigma: Float[Tensor, " b"]

    def put_back(self, x: Tensor, otherwise: Tensor) -> Tensor:
        """y, where H says so and there is no noise; `otherwise` where there is."""
        exact = (self.sigma == 0).view(-1, 1, 1, 1)
        return torch.where(self.theta, torch.where(exact, self.y, otherwise), x)

    def cost(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
        """Mean squares: what f changes, and what f misses of y beyond what noise explains."""
        value = evaluated(self.f, x)
        n_visible = self.theta.flatten(1).sum(1).clamp(min=1)
        misfit = (self.theta * (value - self.y)).square().flatten(1).sum(1) / n_visible
        explained = self.sigma**2 * (1 + SLACK * (2 / n_visible).sqrt())
        cost = mean_square(value - x) + (misfit - explained).clamp(min=0)
        return cost.nan_to_num(nan=math.inf)

    def project(self, x: Float[Tensor, "b c h w"], n_steps: int, tolerance: float) -> Estimates:
        """x <- P f(x) until the mean square of its change is below the tolerance."""
        rows, out = torch.arange(len(x), device=x.device), Estimates.at(x)
        x = out.x
        for k in range(n_steps):
            value = evaluated(self.f, x)
            part = _Problem(self.f, self.y[rows], self.theta[rows], self.sigma[rows])
            new = part.put_back(value, (value + part.y) / 2)
            out.n_applied[rows] += 1
            finite = value.flatten(1).isfinite().all(1)
            done = (mean_square(new - x) < tolerance) | ~finite
            stay = out.ended(rows, new, done, finite, last=k == n_steps - 1)
            rows, x = rows[stay], new[stay]
            if not len(rows):
                break
        return out
