"""Panels of a figure as inline SVG: axes with round ticks, lines with bands or whiskers, dots.

Colours are CSS variables for light and dark; every method also has a marker of its own, and targets
differ from decoys by line and by shape. A panel is as wide as a phone, and two fit side by side on
a desk.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import count, groupby, pairwise
from typing import TypeVar

from tasks.page.formats import SUPERSCRIPT, cut, power

WIDTH, HEIGHT = 360, 290
LEFT, RIGHT, TOP, BOTTOM = 38, 18, 28, 40
LETTER, LINE_HEIGHT = 6.4, 13.0  # width and height of a letter at the charts' size of type
MAX_TICKS = 6
CLOSE = 0.84  # of the room across in small panels: letters are larger on a phone
PERCENT = [(0.0, "0"), (0.5, "50"), (1.0, "100")]
MAX_POINTS, MAX_DOTS, MANY_DOTS = 400, 2500, 300
N_MARKERS, MARKS_PER_LINE = 6, 6
SET_APART, APART = 5.0, 2.6  # between the marks of lines that share an x; in small panels
N_BASELINES = 4

Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """One axis: its limits, its ticks (value, label), and what it measures."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str
    log: bool = False

    def share(self, value: float) -> float:
        """Share of the way from the lower limit to the upper one at `value`, clipped to 0 to 1."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return min(1.0, max(0.0, (at - low) / (high - low)))


def unit_axis(title: str, values: Iterable[float] = ()) -> Axis:
    """Axis from 0, or the lowest of `values` if that is below, to 1."""
    labels = [(tenth / 10, f"{tenth / 10:g}") for tenth in range(0, 11, 2)]
    return Axis(min(0.0, *values, 0.0), 1.0, labels, title)


def round_axis(title: str, values: Iterable[float], *, from_zero: bool = False) -> Axis:
    """Limits at round numbers around `values`, with 3 to `MAX_TICKS` ticks."""
    known = [float(value) for value in values] or [0.0, 1.0]
    low, high = (0.0 if from_zero else min(known)), max(known)
    if high <= low:
        spread = abs(low) / 2 or 0.5
        low, high = (0.0, high or 1.0) if from_zero else (low - spread, high + spread)
    step = _round_step((high - low) / 4)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = []
    for k in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1):
        value = k * step
        label = f"{value:.{decimals}f}"
        if value and (abs(value) >= 1e5 or step < 1e-4):
            label = f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")
        ticks.append((value, label.replace("-", "−")))
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
    """Positions 0, 1, ... for labels, which are cut to what there is room for."""
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
        factor = (high / low) ** 0.05 if high > low else 2.0
        low, high = low / factor, high * factor
    else:
        margin = (high - low) * 0.05 or abs(high) / 2 or 0.5
        low, high = low - margin, high + margin
    return fewer(Axis(low, high, ordered, title, log), WIDTH)


def loss_axis(title: str, values: Sequence[float], width: int) -> Axis | None:
    """Powers of ten if `values` are positive and span more than two of them, else None."""
    if not values or min(values) <= 0 or max(values) <= 100 * min(values):
        return None
    axis = log_axis(title, min(values), max(values))
    labels = [f"{round(math.log10(value))}".translate(SUPERSCRIPT) for value, _ in axis.ticks]
    ticks = [(at, f"10{label}") for (at, _), label in zip(axis.ticks, labels, strict=True)]
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
    """Position of a positive loss or threshold on an axis on which it falls to the right."""
    return -math.log10(value)


def falling_axis(title: str, values: Sequence[float], width: int) -> Axis:
    """Powers of ten, falling to the right, with half a step of margin either side."""
    places = sorted({falling(value) for value in values}) or [0.0]
    labels = {falling(value): power(value) for value in values}
    margin = max(0.25, min((b - a for a, b in pairwise(places)), default=1.0) / 2)
    ticks = [(place, labels.get(place, "")) for place in places]
    axis = Axis(places[0] - margin, places[-1] + margin, ticks, title)
    shown = dict(fewer(axis, int(CLOSE * width)).ticks)
    return replace(axis, ticks=[(place, shown.get(place, "")) for place in places])


def _round_step(rough: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return float(min((s * magnitude for s in (1, 2, 5, 10)), key=lambda s: abs(s - rough)))


@dataclass(frozen=True)
class Style:
    """Look of a method: its number on the page (which toggles it), colour, marker, weight; dotted
    for the twin of another method."""

    number: int
    colour: int
    marker: int
    thin: bool = False
    twin: bool = False


@dataclass(frozen=True)
class Line:
    """One method's curves: targets solid with markers, decoys dashed."""

    style: Style
    targets: Sequence[Point]
    decoys: Sequence[Point] = ()


@dataclass(frozen=True)
class Estimate:
    """A point of a line; None for y breaks the line, None for an end leaves the whisker out."""

    x: float
    y: float | None
    low: float | None
    high: float | None
    about: str


@dataclass(frozen=True)
class Panel:
    """The frame that (x, y) values are drawn in."""

    title: str
    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    top: int = TOP

    def at(self, point: Point) -> Point:
        """Position of the values in the plane of the drawing."""
        return (
            LEFT + self.x.share(point[0]) * (self.width - LEFT - RIGHT),
            self.height - BOTTOM - self.y.share(point[1]) * (self.height - self.top - BOTTOM),
        )

    def svg(self, parts: Iterable[str], description: str) -> str:
        """The panel with its axes and `parts`; screen readers read the `description`."""
        base, right = self.height - BOTTOM, self.width - RIGHT
        axes = [words(self.title, 2, 14, "axis")]
        for value, label in self.y.ticks:
            y = self.at((self.x.low, value))[1]
            axes += [rule("rule", LEFT, y, right, y), words(label, LEFT - 6, y + 4, at="end")]
        for value, label in self.x.ticks:
            x = self.at((value, self.y.low))[0]
            anchor = "end" if x > right - 8 and len(label) > 4 else "middle"
            axes += [rule("tick", x, base, x, base + 4), words(label, x, base + 16, at=anchor)]
        axes.append(words(self.x.title, (LEFT + right) / 2, self.height - 6, "axis", at="middle"))
        return drawing(self.width, self.height, [*axes, *parts], description)

    def horizontal(self, value: float, kind: str = "threshold") -> str:
        """A dotted line at y = `value`."""
        y = self.at((self.x.low, value))[1]
        return rule(kind, LEFT, y, self.width - RIGHT, y)

    def vertical(self, value: float, text: str = "") -> str:
        """A dotted line at x = `value`, with `text` beside its top."""
        x = self.at((value, self.y.low))[0]
        line = rule("threshold", x, self.top, x, self.height - BOTTOM)
        return line + words(text, x + 5, self.top + 11, "axis halo") if text else line

    def area(self, low: float, high: float, about: str) -> str:
        """A grey area from x = `low` to `high`, with the tooltip `about`."""
        (x1, top), (x2, base) = self.at((low, self.y.high)), self.at((high, self.y.low))
        return (
            f'<g><title>{escape(about)}</title><rect class="unreached" '
            f'x="{x1:.1f}" y="{top:.1f}" width="{x2 - x1:.1f}" height="{base - top:.1f}"></rect>'
            "</g>"
        )

    def diagonal(self) -> str:
        """The line y = x between the limits that both axes share."""
        low, high = max(self.x.low, self.y.low), min(self.x.high, self.y.high)
        return rule("threshold", *self.at((low, low)), *self.at((high, high)))


def drawing(
    width: float, height: float, parts: Iterable[str], description: str, more: str = ""
) -> str:
    """The SVG of `parts`; `more` attributes."""
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img"{more} '
    return "\n".join([f'{head}aria-label="{escape(description)}">', *parts, "</svg>"])


def rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line of that class."""
    x1, x2, y1, y2 = (round(end, 1) for end in (x1, x2, y1, y2))
    return f'<line class="{kind}" x1="{x1:g}" x2="{x2:g}" y1="{y1:g}" y2="{y2:g}"/>'


def words(text: str, x: float, y: float, kind: str = "", *, at: str = "start") -> str:
    """Text of that class that starts at (x, y), or has its end or its middle there."""
    look = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{at}"' if at != "start" else ""
    return f'<text{look} x="{round(x, 1):g}" y="{round(y, 1):g}"{anchor}>{escape(text)}</text>'


def styles_of(
    names: Iterable[str], colours: Mapping[str, int], others: Sequence[int]
) -> dict[str, Style]:
    """A style per name, the same everywhere on a page: its colour, or one of `others` in turn."""
    spare = (others[k % len(others)] for k in count())
    return {
        name: Style(k, colours[name] if name in colours else next(spare), k % N_MARKERS)
        for k, name in enumerate(names)
    }


def lines(panel: Panel, curves: Sequence[Line]) -> list[str]:
    """Every method's decoys, then its targets with markers, which are evenly spaced and shifted by
    method, in a group that can be hidden."""
    parts = []
    for line in curves:
        weight = (" thin" if line.style.thin else "") + (" twin" if line.style.twin else "")
        drawn = [_group(line.style)]
        for points, kind in ((line.decoys, "decoys"), (line.targets, "targets")):
            if len(points):
                path = _path(_thinned(panel, points))
                drawn.append(f'<polyline class="curve {kind}{weight}" points="{path}"/>')
        if len(line.targets) and not line.style.thin:
            shift, last = line.style.marker % N_MARKERS / N_MARKERS, len(line.targets) - 1
            chosen = {round((k + shift) / MARKS_PER_LINE * last) for k in range(MARKS_PER_LINE)}
            for k in sorted(chosen):
                drawn.append(marker(line.style.marker, *panel.at(line.targets[k])))
        parts.append("\n".join([*drawn, "</g>"]))
    return parts


def bands(
    panel: Panel, areas: Sequence[tuple[Style, str, Sequence[Point], Sequence[Point]]]
) -> str:
    """The area between two curves for each of (style, targets or decoys, one curve, the other)."""
    parts = []
    for style, kind, one, other in areas:
        if len(one):
            path = _path([*_thinned(panel, one), *reversed(_thinned(panel, other))])
            parts.append(f'{_group(style)}<polygon class="band {kind}" points="{path}"/></g>')
    return "\n".join(parts)


def dots(panel: Panel, targets: Sequence[Point], decoys: Sequence[Point], *, colour: int) -> str:
    """Targets as dots, decoys as crosses over them, at most MAX_DOTS of each, evenly picked."""
    crosses = "".join(
        f"M{x - 2:.1f} {y - 2:.1f}l4 4m-4 0l4-4" for x, y in map(panel.at, evenly(decoys))
    )
    circles = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in map(panel.at, evenly(targets)))
    many = " many" if len(targets) > MANY_DOTS else ""
    return (
        f'<path class="dots{many} m{colour}" d="{circles}"/><path class="crosses" d="{crosses}"/>'
    )


def estimates(
    panel: Panel, series: Sequence[tuple[Style, Sequence[Estimate]]], *, apart: float = SET_APART
) -> list[str]:
    """Each line with markers and whiskers, in a group that can be hidden.

    Lines are shifted sideways by `apart`, so that whiskers at the same x can be told apart.
    """
    parts = []
    for k, (style, points) in enumerate(series):
        aside = apart * (k - (len(series) - 1) / 2)
        drawn, shapes = [_group(style)], []
        for known, run in groupby(points, key=lambda point: point.y is not None):
            if not known:
                continue
            stretch = [(p, *panel.at((p.x, p.y or 0.0))) for p in run]
            if len(stretch) > 1:
                path = _path([(x + aside, y) for _point, x, y in stretch])
                drawn.append(f'<polyline class="curve targets" points="{path}"/>')
            for point, at, y in stretch:
                x, whisker = at + aside, ""
                if point.low is not None and point.high is not None:
                    low, high = (panel.at((point.x, end))[1] for end in (point.low, point.high))
                    whisker = (
                        f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}'
                        f'M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"/>'
                    )
                shape = f"{whisker}{marker(style.marker, x, y)}"
                shapes.append(f"<g><title>{escape(point.about)}</title>{shape}</g>")
        parts.append("\n".join([*drawn, *shapes, "</g>"]))
    return parts


def baselines(panel: Panel, levels: Sequence[float]) -> list[str]:
    """Dotted lines across at the levels, each with its `letter` right of its end, none on another.

    The lines of four neighbours differ in their dots.
    """
    right, parts = panel.width - RIGHT, []
    height = math.inf
    for k in sorted(range(len(levels)), key=lambda k: levels[k]):
        y = panel.at((panel.x.low, levels[k]))[1]
        height = min(y + 4, height - LINE_HEIGHT)
        parts.append(rule(f"baseline b{k % N_BASELINES}", LEFT, y, right, y))
        parts.append(words(letter(k), right + 5, height, "axis letter"))
    return parts


def letter(k: int) -> str:
    """Name of baseline `k`: A, B, ..., Z, A1, B1, ..."""
    return string.ascii_uppercase[k % 26] + (str(k // 26) if k >= 26 else "")


def marker(shape: int, x: float, y: float) -> str:
    """A small filled figure around (x, y), one of N_MARKERS by number."""
    corners = [
        None,
        ((-3, -3), (3, -3), (3, 3), (-3, 3)),
        ((0, -4), (3.7, 3), (-3.7, 3)),
        ((0, -4.4), (4.4, 0), (0, 4.4), (-4.4, 0)),
        ((0, 4), (3.7, -3), (-3.7, -3)),
        ((-1.2, -4), (1.2, -4), (1.2, -1.2), (4, -1.2), (4, 1.2), (1.2, 1.2), (1.2, 4), (-1.2, 4),
         (-1.2, 1.2), (-4, 1.2), (-4, -1.2), (-1.2, -1.2)),
    ][shape % N_MARKERS]  # fmt: skip
    if corners is None:
        return f'<circle class="marker" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>'
    points = _path([(x + dx, y + dy) for dx, dy in corners])
    return f'<polygon class="marker" points="{points}"/>'


def evenly(points: Sequence[T], limit: int = MAX_DOTS) -> list[T]:
    """At most `limit` of the points, the first and the last among them."""
    if len(points) <= limit:
        return list(points)
    last = len(points) - 1
    return [points[round(k * last / (limit - 1))] for k in range(limit)]


def _group(style: Style) -> str:
    return f'<g class="s{style.number} m{style.colour}">'


def _path(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _thinned(panel: Panel, points: Sequence[Point]) -> list[Point]:
    drawn = [panel.at(point) for point in evenly(points, MAX_POINTS)]
    if len(drawn) == 1:
        drawn.append((drawn[0][0] + 6, drawn[0][1]))  # a dot needs a length
    return drawn
