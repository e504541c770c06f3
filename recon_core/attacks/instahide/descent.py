"""The images by gradient descent: the last step of Carlini et al. (2020, arXiv 2011.05315).

Given who is in which encoding and with what weight, minimise over the images X, inside the box of
their pixels,

    sum over encodings and pixels of (|A X| - y)^2,

where row i of A holds the two weights of encoding i; the part of its public images is noise. The
descent is Adam's with a rate that falls to zero. Ours:

- `spread`: with the noise's standard deviation s, y is |N(A X, s^2)|, and what is minimised is (A
X)^2 + y^2 - 2 s^2 log cosh(y A X / s^2). With s = 0 it is the paper's loss.
- A spectral start (Candes, Li and Soltanolkotabi 2015): the leading eigenvector of A^T diag(y^2 -
mean) A; other starts are random, and each pixel keeps its best.
- Nothing fixes the sign of a pixel position (of all images there at once): `in_one_sign` chooses.
`n_smooth`: what was found is put in one sign (once), blurred and the start of another descent, in
which total variation counts.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.strict import Count, NonNegative, Positive, Strict
from recon_core.types import Progress, no_progress

COLUMNS = 128
"""Pixels that go through the equations together: 5,000 encodings of them stay in a CPU's cache."""


@dataclass(frozen=True, kw_only=True)
class Descent(Strict):
    """Settings. `lr`: Adam's first rate, in units of pixels. `n_starts`: the first is spectral,
    others are Gaussian. `total_variation`: weight of the sum of absolute differences of neighbours.
    `low`, `high`: the pixels' box. `spread`: standard deviation of what is mixed in and not known.
    `n_smooth`: how many more descents start from what was found, blurred."""

    n_steps: Count = 200
    lr: Positive = 0.05
    n_starts: Count = 1
    n_power: Count = 20
    total_variation: NonNegative = 0.0
    low: float = -1.0
    high: float = 1.0
    spread: NonNegative = 0.0
    n_smooth: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}, the pixels' box")
        if self.n_smooth < 0 or (self.total_variation and not self.n_smooth):
            raise ValueError(
                f"n_smooth={self.n_smooth} must be 0 or more, and 1 or more for "
                f"total_variation={self.total_variation} to count"
            )


def descend(
    y: Float[Tensor, "m d"],
    edges: Int64[Tensor, "m 2"],
    weights: Float[Tensor, "m 2"],
    n: int,
    *,
    generator: torch.Generator,
    shape: tuple[int, int, int] | None = None,
    how: Descent | None = None,
    progress: Progress = no_progress,
) -> Float32[Tensor, "n d"]:
    """n images from their encodings, NaN where no encoding has the image.

    `edges`: the two images of each encoding, -1 if unknown; such encodings are left out. `weights`:
    theirs. `shape`: (c, h, w) of an image, where neighbours matter.

    Raises ValueError for edges that are no images, and where neighbours matter without a shape.
    """
    how = how or Descent()
    if bool((edges >= n).any()) or bool((edges < -1).any()):
        raise ValueError(f"edges must be -1 or from 0 to n - 1 = {n - 1}; they reach {edges.max()}")
    if how.n_smooth and (shape is None or math.prod(shape) != y.shape[1]):
        raise ValueError(
            f"n_smooth={how.n_smooth} needs the shape (c, h, w) of images with {y.shape[1]} "
            f"pixels, not {shape}"
        )
    known = (edges >= 0).all(1).nonzero()[:, 0]
    matrix = torch.zeros(len(known), n, device=edges.device)
    matrix.scatter_add_(1, edges[known], weights[known].float())
    problem = _Problem(matrix, y[known].abs().float(), how, shape if how.n_smooth else None)
    x = problem.started(generator)
    progress(0.1)
    problem.move(x, 0.0)
    for k in range(how.n_smooth):
        progress((k + 1) / (how.n_smooth + 1))
        problem.smooth(x, align=k == 0)
        problem.move(x, how.total_variation)
    images = problem.chosen(x)
    images[matrix.abs().sum(0) == 0] = torch.nan
    return images


class _Problem:
    """Images are (n, R, d) here: R starts, beside each other like pixels."""

    def __init__(
        self,
        a: Float32[Tensor, "m n"],
        y: Float32[Tensor, "m d"],
        how: Descent,
        shape: tuple[int, int, int] | None,
    ) -> None:
        self.a, self.how, self.shape = a, how, shape
        self.y = [part.contiguous() for part in y.split(COLUMNS, dim=1)]
        self.starts = np.cumsum([0] + [part.shape[1] for part in self.y]).tolist()

    def started(self, generator: torch.Generator) -> Float32[Tensor, "n r d"]:
        n, d, how = self.a.shape[1], self.starts[-1], self.how
        x = torch.randn((n, how.n_starts, d), generator=generator).to(self.a)
        x *= (how.high - how.low) / 8
        x[:, 0] = self._spectral(x[:, 0])
        return x.clamp_(how.low, how.high)

    def _spectral(self, v: Float32[Tensor, "n d"]) -> Float32[Tensor, "n d"]:
        """Scaled so that its mixtures have the encodings' energy above the unknown part's."""
        v = v.clone()
        for k, y in enumerate(self.y):
            at, energy = slice(self.starts[k], self.starts[k + 1]), y.square()
            centred = energy - energy.mean(0)
            shift = centred.abs().mean(0) * self.a.square().sum(0).mean()
            for _ in range(self.how.n_power):
                u = shift * v[:, at] + self.a.T @ (centred * (self.a @ v[:, at]))
                v[:, at] = u / u.norm(dim=0).clamp(min=1e-30)
            own = (energy.mean(0) - self.how.spread**2).clamp(min=1e-6)
            v[:, at] *= (own / (self.a @ v[:, at]).square().mean(0).clamp(min=1e-30)).sqrt()
        return v

    def smooth(self, x: Float32[Tensor, "n r d"], *, align: bool) -> None:
        """Every start blurred by 3 x 3 pixels; with `align`, in one sign before that."""
        assert self.shape is not None
        c, h, w = self.shape
        for r in range(x.shape[1]):
            one = in_one_sign(x[:, r], self.shape) if align else x[:, r]
            padded = F.pad(one.reshape(-1, c, h, w), (1, 1, 1, 1), mode="replicate")
            x[:, r] = F.avg_pool2d(padded, 3, 1).flatten(1)

    def move(self, x: Float32[Tensor, "n r d"], variation: float) -> None:
        """Adam's descent from x, in place. `variation`: weight of the total variation."""
        how, run = self.how, x.unsqueeze(0)
        stepper = Optimiser(rule="adam", lr=how.lr).stepper(run)
        gradient = torch.empty_like(x)
        for step in range(how.n_steps):
            stepper.set_rate(how.lr * (1 + math.cos(math.pi * step / how.n_steps)) / 2)
            for k in range(len(self.y)):
                at = slice(self.starts[k], self.starts[k + 1])
                for r in range(how.n_starts):
                    gradient[:, r, at] = self._gradient(x[:, r, at], k)
            if self.shape is not None and variation:
                gradient += variation * _variation_gradient(x, self.shape)
            stepper.step_(gradient.unsqueeze(0))
            x.clamp_(how.low, how.high)

    def _gradient(self, x: Float32[Tensor, "n k"], k: int) -> Float32[Tensor, "n k"]:
        """2 A^T (r - y s), r = A x, s its sign as far as it is believed."""
        r, y = torch.mm(self.a, x), self.y[k]
        v = self.how.spread**2
        sign = (r * y).mul_(1 / v).tanh_() if v else r.sign()
        return 2 * torch.mm(self.a.T, r.addcmul_(sign, y, value=-1))

    def chosen(self, x: Float32[Tensor, "n r d"]) -> Float32[Tensor, "n d"]:
        """The best start of each pixel; of all pixels, if they are tied together."""
        left = x.new_zeros(x.shape[1:])
        for k in range(len(self.y)):
            at = slice(self.starts[k], self.starts[k + 1])
            for r in range(len(left)):
                left[r, at] = self._losses(x[:, r, at], k)
        if self.shape is not None:
            rough = torch.stack(
                [_variation(x[:, r : r + 1], self.shape) for r in range(x.shape[1])]
            )
            left = (left.sum(1) + self.how.total_variation * rough)[:, None].expand_as(left)
        return x.gather(1, left.argmin(0).expand(len(x), 1, -1))[:, 0]

    def _losses(self, x: Float32[Tensor, "n k"], k: int) -> Float32[Tensor, " k"]:
        r, v = torch.mm(self.a, x), self.how.spread**2
        if not v:
            return r.abs_().sub_(self.y[k]).square_().sum(0)
        fold = (r * self.y[k] / v).abs()
        log_cosh = fold + F.softplus(-2 * fold) - math.log(2)
        total: Tensor = (r.square() + self.y[k].square() - 2 * v * log_cosh).sum(0)
        return total


ROUNDED = 1e-2
"""Differences below this are squared rather than taken absolutely, so that descent can settle."""


def _differences(
    x: Float[Tensor, "n r d"], shape: tuple[int, int, int]
) -> tuple[Float[Tensor, "n r *a"], Float[Tensor, "n r *b"]]:
    images = x.reshape(*x.shape[:2], *shape)
    return images.diff(dim=-1), images.diff(dim=-2)


def _variation(x: Float[Tensor, "n r d"], shape: tuple[int, int, int]) -> Float[Tensor, ""]:
    both = _differences(x, shape)
    return torch.stack([(step.square() + ROUNDED**2).sqrt().sum() for step in both]).sum()


def _variation_gradient(
    x: Float[Tensor, "n r d"], shape: tuple[int, int, int]
) -> Float[Tensor, "n r d"]:
    total = torch.zeros_like(x).reshape(*x.shape[:2], *shape)
    across, down = (step / (step.square() + ROUNDED**2).sqrt() for step in _differences(x, shape))
    total[..., 1:] += across
    total[..., :-1] -= across
    total[..., 1:, :] += down
    total[..., :-1, :] -= down
    return total.view_as(x)


REACH = 2
"""Positions up to this far apart, in rows and columns, are compared."""


def in_one_sign(images: Float[Tensor, "n d"], shape: tuple[int, int, int]) -> Float[Tensor, "n d"]:
    """The images with positions' signs chosen so that neighbours agree; one sign for all remains,
    which is that of the first position. `shape`: (c, h, w).

    Photographs' positions near each other, and channels of one, are alike over the images.
    Positions are merged into regions: of all two that touch, the two whose correlations over their
    border have the largest sum in absolute value, with the sign of that sum.
    """
    x = images.nan_to_num(0.0).double().cpu()
    unit = np.asarray(x / x.norm(dim=0).clamp(min=1e-12))
    first, second = _neighbours(shape)
    alike = (unit[:, first] * unit[:, second]).sum(0)
    sign = _merged(first, second, alike, unit.shape[1])
    return images * torch.from_numpy(sign * sign[0]).to(images)


def _neighbours(
    shape: tuple[int, int, int],
) -> tuple[Int64[np.ndarray, " k"], Int64[np.ndarray, " k"]]:
    """All pairs of positions that are near each other, each once."""
    c, h, w = shape
    channel, row, column = (grid.ravel() for grid in np.indices(shape))
    at = np.arange(c * h * w)
    firsts, seconds = [], []
    for dc in range(c):
        for dr in range(-REACH, REACH + 1):
            for dw in range(-REACH, REACH + 1):
                if (dc, dr, dw) <= (0, 0, 0) or (dc and (dr or dw)):
                    continue
                k, i, j = channel + dc, row + dr, column + dw
                inside = (k < c) & (i >= 0) & (i < h) & (j >= 0) & (j < w)
                firsts.append(at[inside])
                seconds.append((k * h * w + i * w + j)[inside])
    return np.concatenate(firsts), np.concatenate(seconds)


def _merged(
    first: Int64[np.ndarray, " k"],
    second: Int64[np.ndarray, " k"],
    alike: Float64[np.ndarray, " k"],
    n: int,
) -> Float64[np.ndarray, " n"]:
    """Signs of n positions by merging, the surest first; the smaller region is the one turned."""
    sign, region = np.ones(n), [[k] for k in range(n)]
    border: list[dict[int, float]] = [defaultdict(float) for _ in range(n)]
    for i, j, value in zip(first.tolist(), second.tolist(), alike.tolist(), strict=True):
        border[i][j] = border[j][i] = value
    heap = [(-abs(v), i, j, v) for i in range(n) for j, v in border[i].items() if i < j]
    heapq.heapify(heap)
    while heap:
        _size, i, j, value = heapq.heappop(heap)
        if not region[i] or not region[j] or border[i].get(j) != value:
            continue  # one was merged since, or their border has changed
        if len(region[i]) < len(region[j]):
            i, j = j, i
        turn = -1.0 if value < 0 else 1.0
        sign[region[j]] *= turn
        region[i] += region[j]
        region[j] = []
        for other, between in border[j].items():
            del border[other][j]
            if other != i:
                total = border[i].get(other, 0.0) + turn * between
                border[i][other] = border[other][i] = total
                heapq.heappush(heap, (-abs(total), i, other, total))
        border[j] = {}
    return sign
