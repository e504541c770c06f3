"""Axes of a chart: limits, ticks at round or given values, labels as far as they have room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tasks.page.formats import SUPERSCRIPT, cut, power

WIDTH, HEIGHT = 360, 290
LEFT, RIGHT, TOP, BOTTOM = 38, 18, 28, 40
LETTER = 6.4  # width of a letter at the charts' size of type
MAX_TICKS = 6
CLOSE = 0.84  # of the room across in small panels: letters are larger on a phone
PERCENT = [(0.0, "0"), (0.5, "50"), (1.0, "100")]


@dataclass(frozen=True)
class Axis:
    """One axis: its limits, its ticks (value, label), and what it measures."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str
    log: bool = False

    def share(self, value: float) -> float:
        """Share of the way from the lower limit to the upper one at `value`, cut to 0 to 1."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return min(1.0, max(0.0, (at - low) / (high - low)))


def unit_axis(title: str, values: Iterable[float] = ()) -> Axis:
    """Axis from 0, or the lowest of `values` if that is below, to 1."""
    low = min(0.0, *values, 0.0)
    labels = [(tenth / 10, f"{tenth / 10:g}") for tenth in range(0, 11, 2)]
    return Axis(low, 1.0, labels, title)


def round_axis(title: str, values: Iterable[float], *, from_zero: bool = False) -> Axis:
    """Limits at round numbers around `values`, with 3 to `MAX_TICKS` ticks."""
    known = [float(value) for value in values] or [0.0, 1.0]
    low, high = (0.0 if from_zero else min(known)), max(known)
    if high <= low:
        spread = abs(low) / 2 or 0.5
        low, high = (0.0, high or 1.0) if from_zero else (low - spread, high + spread)
    step = _round_step((high - low) / 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [(k * step, _number(k * step, step)) for k in range(first, last + 1)]
    shown = ticks[:: -(-len(ticks) // MAX_TICKS)]
    return Axis(ticks[0][0], ticks[-1][0], shown, title)


def log_axis(title: str, low: float, high: float = 1.0) -> Axis:
    """Powers of ten from the one at or below `low` (positive) to the one at or above `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    first = min(first, last - 1)
    every = max(1, (last - first) // 5)
    ticks = [(10.0**k, f"{10.0**k:g}") for k in range(first, last + 1, every)]
    return Axis(10.0**first, 10.0**last, ticks, title, log=True)


def rank_axis(title: str, n: int) -> Axis:
    """1 to `n`; about five round ranks, and the last one unless it would touch its neighbour."""
    if n <= 1:
        return Axis(1, 2, [(1, "1")] if n else [], title)
    step = max(1, round(_round_step(n / 5)))
    inner = [rank for rank in range(step, n, step) if rank > 1 and n - rank > step / 2]
    ranks = [1, *[rank for rank in inner if rank > step / 2], n]
    return Axis(1, n, [(rank, f"{rank}") for rank in ranks], title)


def category_axis(title: str, labels: Sequence[str]) -> Axis:
    """Places 0, 1, ... for labels, which are cut to what there is room for."""
    room = (WIDTH - LEFT - RIGHT) / max(1, len(labels)) / LETTER
    ticks = [(k, cut(label, max(2, int(room)))) for k, label in enumerate(labels)]
    return Axis(-0.5, max(0.5, len(labels) - 0.5), ticks, title)


def values_axis(title: str, values: Sequence[float], labels: Sequence[str], *, log: bool) -> Axis:
    """Ticks at the values themselves, as far as their labels have room, and a margin either side.

    On a logarithmic axis all `values` must be positive.
    """
    ordered = sorted(zip(values, labels, strict=True)) or [(1.0, "1")]
    low, high = ordered[0][0], ordered[-1][0]
    if log:
        margin = (high / low) ** 0.05 if high > low else 2.0
        axis = Axis(low / margin, high * margin, ordered, title, log=True)
    else:
        margin = (high - low) * 0.05 or abs(high) / 2 or 0.5
        axis = Axis(low - margin, high + margin, ordered, title)
    return fewer(axis, WIDTH)


def loss_axis(title: str, values: Sequence[float], width: int) -> Axis | None:
    """Powers of ten if `values` are positive and span more than two of them, else None."""
    if not values or min(values) <= 0 or max(values) <= 100 * min(values):
        return None
    axis = log_axis(title, min(values), max(values))
    ticks = [
        (value, "10" + f"{round(math.log10(value))}".translate(SUPERSCRIPT))
        for value, _label in axis.ticks
    ]
    return fewer(replace(axis, ticks=ticks), width)


def fewer(axis: Axis, width: int) -> Axis:
    """The axis without the ticks whose labels would touch the one before."""
    room, kept, end = width - LEFT - RIGHT, [], -math.inf
    for value, label in axis.ticks:
        half = len(label) * LETTER / 2 + 2
        middle = axis.share(value) * room
        if middle - half >= end:
            kept.append((value, label))
            end = middle + half
    return replace(axis, ticks=kept)


def falling(value: float) -> float:
    """Place of a positive loss or threshold on an axis on which it falls to the right."""
    return -math.log10(value)


def falling_axis(title: str, values: Sequence[float], width: int) -> Axis:
    """Powers of ten, falling to the right, with half a step of margin either side."""
    places = sorted({falling(value) for value in values}) or [0.0]
    labels = {falling(value): power(value) for value in values}
    margin = min((b - a for a, b in pairwise(places)), default=1.0) / 2
    margin = max(margin, 0.25)
    ticks = [(place, labels.get(place, "")) for place in places]
    axis = Axis(places[0] - margin, places[-1] + margin, ticks, title)
    said = dict(fewer(axis, int(CLOSE * width)).ticks)
    return replace(axis, ticks=[(place, said.get(place, "")) for place in places])


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return float(min((s * power for s in (1, 2, 5, 10)), key=lambda s: abs(s - rough)))


def _number(value: float, step: float) -> str:
    """`value` as short as its step allows, with a true minus sign."""
    if value and (abs(value) >= 1e5 or step < 1e-4):
        return (
            f"{value:.1e}".replace(".0e", "e")
            .replace("e-0", "e-")
            .replace("e+0", "e")
            .replace("-", "−")
        )
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}".replace("-", "−")
