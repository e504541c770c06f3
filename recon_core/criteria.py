"""Prediction of the truth by a number that is known without it: rank correlations.

Criteria of a run (its residual, how far others agree with it) and of a picture (how far samples of
a restorer disagree about it) are held against what only the evaluation knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from recon_core.summary import N_BOOTSTRAP, TAILS

MIN_VALUES = 3
"""Of fewer values every order is likely; no correlation is given."""

Values = npt.NDArray[np.float64]
Groups = npt.NDArray[np.integer[Any]]


class RankCorrelation(TypedDict):
    """Spearman's coefficient over `n` values, in [-1, 1]; None if either side is constant or there
    are fewer than `MIN_VALUES`. `interval`: 95 %, None where resamples have no coefficient."""

    n: int
    spearman: float | None
    interval: tuple[float, float] | None


def rank_correlation(
    x: Values,
    y: Values,
    *,
    within: Groups | None = None,
    units: Groups | None = None,
) -> RankCorrelation:
    """Spearman's rank correlation of `x` and `y`; equal values share their mean rank.

    With `within`, values are ranked in their group alone, and ranks enter as (rank - mean rank) /
    size of the group. The interval is a percentile bootstrap (Efron 1979) that draws values, or
    whole `units` of values that belong together. Raises ValueError if a value is not finite or the
    lengths differ.
    """
    groups = np.zeros(len(x), np.int64) if within is None else _numbered(within)
    if not len(x) == len(y) == len(groups) or not (np.isfinite(x) & np.isfinite(y)).all():
        raise ValueError(
            f"x has {len(x)} and y {len(y)} values; expected as many, all of them finite"
        )
    if len(x) < MIN_VALUES:
        return RankCorrelation(n=len(x), spearman=None, interval=None)
    sides = [_Ranks(x, groups), _Ranks(y, groups)]
    unit_of = np.arange(len(x)) if units is None else _numbered(units)
    n_units = int(unit_of.max()) + 1
    rng = np.random.default_rng(0)
    draws = rng.integers(n_units, size=(N_BOOTSTRAP if n_units > 1 else 0, n_units))
    rows = max(1, 2**15 // len(x))  # at once: as many as a cache holds
    (whole,) = _correlations(sides, np.ones((1, len(x))))
    usable: list[float] = []
    for block in np.split(draws, range(rows, len(draws), rows)):
        copies = _summed(np.ones(block.shape), block, n_units).take(unit_of, axis=1)
        usable += [value for value in _correlations(sides, copies) if value is not None]
    interval = None
    if whole is not None and usable:
        low, high = np.quantile(usable, TAILS)
        interval = (float(low), float(high))
    return RankCorrelation(n=len(x), spearman=whole, interval=interval)


def best_in_top_quarter(criterion: Values, truth: Values) -> bool:
    """True if the value with the highest `truth` (at least one) is among the quarter (rounded up)
    with the highest `criterion`. Equal criteria count as ranking before it."""
    if not len(truth):
        raise ValueError("truth is empty; expected at least one value")
    best = int(np.argmax(truth))
    n_before = int((criterion >= criterion[best]).sum()) - 1
    return n_before < -(-len(truth) // 4)


def images_found(
    scores: npt.NDArray[np.floating[Any]],
    *,
    good: float = 0.4,
    false_shares: Sequence[float] = (0.0, 0.01, 0.05),
) -> tuple[int, ...]:
    """Different training images in the longest heads of a ranking that hold few false pictures.

    `scores` (pictures, training images), the best ranked picture first. A picture without a score
    above `good` is false; a head is the longest of which at most a share of `false_shares` is
    false. An image is found if it has the best score of a picture in the head that is not false.
    """
    if not scores.size:
        return tuple(0 for _share in false_shares)
    best, image = scores.max(1), scores.argmax(1)
    false = np.cumsum(best <= good)
    length = np.arange(1, len(best) + 1)
    heads = [np.flatnonzero(false <= share * length) for share in false_shares]
    ends = [int(head[-1]) + 1 if len(head) else 0 for head in heads]
    return tuple(len(np.unique(image[:end][best[:end] > good])) for end in ends)


def equal_count_edges(values: Values, n_bins: int = 5) -> Values:
    """`n_bins` + 1 edges between which as many of `values` (at least one) lie, lowest to
    highest."""
    if not len(values):
        raise ValueError("values is empty; expected at least one")
    return np.quantile(values, np.linspace(0, 1, n_bins + 1))


def bin_of(values: Values, edges: Values) -> npt.NDArray[np.int64]:
    """The bin of each value, an edge belonging to the bin above it; the outer bins are open."""
    return np.searchsorted(edges[1:-1], values, side="right").astype(np.int64)


def _numbered(groups: Groups) -> npt.NDArray[np.int64]:
    return np.unique(groups, return_inverse=True)[1].astype(np.int64)


class _Ranks:
    def __init__(self, values: Values, groups: npt.NDArray[np.int64]) -> None:
        from scipy import stats  # half a second, for those who rank

        level = stats.rankdata(values, method="dense").astype(np.int64)
        keys, self.key = np.unique(groups * (level.max() + 1) + level, return_inverse=True)
        self.group_of_key = keys // (level.max() + 1)

    def centred(self, copies: Values) -> Values:
        """(draws, values) ranks less their group's mean, over its size, given copies of each."""
        counts = _summed(copies, self.key, len(self.group_of_key))
        in_group = _summed(counts, self.group_of_key, int(self.group_of_key.max()) + 1)
        before = (np.cumsum(in_group, axis=1) - in_group).take(self.group_of_key, axis=1)
        middle = np.cumsum(counts, axis=1) - counts + counts / 2 - before
        size = np.maximum(in_group.take(self.group_of_key, axis=1), 1)
        centred: Values = ((middle - size / 2) / size).take(self.key, axis=1)
        return centred


def _summed(values: Values, number: npt.NDArray[np.int64], n: int) -> Values:
    """(rows, n) sums of each row's values by their numbers below n."""
    places = number + n * np.arange(len(values))[:, None]
    summed = np.bincount(places.ravel(), values.ravel(), n * len(values))
    return summed.astype(np.float64).reshape(-1, n)


def _correlations(sides: list[_Ranks], copies: Values) -> list[float | None]:
    """The coefficient of each row of copies (draws, values); None where a side is constant."""
    a, b = (side.centred(copies) for side in sides)
    spread = (copies * a * a).sum(axis=1) * (copies * b * b).sum(axis=1)
    found = (copies * a * b).sum(axis=1) / np.sqrt(np.maximum(spread, 1e-300))
    there = spread > 1e-20 * copies.shape[1]
    return [float(r) if ok else None for r, ok in zip(found.clip(-1, 1), there, strict=True)]
