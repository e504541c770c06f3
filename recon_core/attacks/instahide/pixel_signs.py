"""One sign for all pixel positions, of images that are known up to a sign for each position.

Without its public images |A X| says nothing about the sign of a position. But photographs'
positions near each other, and channels of one, are alike over the images. Positions are merged into
regions: of all two that touch, the two whose correlations over their border have the largest sum in
absolute value, with the sign of that sum.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

REACH = 2
"""Positions up to this far apart, in rows and columns, are compared."""


def in_one_sign(images: Float[Tensor, "n d"], shape: tuple[int, int, int]) -> Float[Tensor, "n d"]:
    """The images with positions' signs chosen so that neighbours agree; one sign for all remains,
    which is that of the first position. `shape`: (c, h, w)."""
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
