"""Panels of a figure as inline SVG: axes, lines, bands and dots; pure functions of numbers.

Colours are CSS variables, so that the page's light and dark schemes apply; every method also has a
marker of its own, and targets differ from decoys by line and by shape: nothing hangs on colour
alone. A panel is as wide as a phone, and two fit side by side on a desk; small ones
may be given another size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 290
LEFT, RIGHT, TOP, BOTTOM = 38, 18, 28, 40
MAX_POINTS = 400
MAX_TICKS = 6
MAX_DOTS = 2500
MANY_DOTS = 300
N_MARKERS = 6
MARKS_PER_LINE = 6

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """One axis: its limits, its ticks (value, label), and what it measures."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str
    log: bool = False

    def share(self, value: float) -> float:
        """Where `value` is between the limits, cut to 0 to 1."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return min(1.0, max(0.0, (at - low) / (high - low)))


@dataclass(frozen=True)
class Style:
    """How a method is drawn: its number on the page (which toggles it), colour, marker, weight."""

    number: int
    colour: int
    marker: int
    thin: bool = False


@dataclass(frozen=True)
class Line:
    """One method's curves: targets solid with markers, decoys dashed."""

    style: Style
    targets: Sequence[Point]
    decoys: Sequence[Point] = ()


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
        """Where the values lie in the plane of the drawing."""
        return (
            LEFT + self.x.share(point[0]) * (self.width - LEFT - RIGHT),
            self.height - BOTTOM - self.y.share(point[1]) * (self.height - self.top - BOTTOM),
        )

    def svg(self, parts: Iterable[str], description: str) -> str:
        """The panel with `parts` in it; `description` is for who cannot see it."""
        return "\n".join(
            [
                f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
                f'aria-label="{escape(description)}">',
                *self._axes(),
                *parts,
                "</svg>",
            ]
        )

    def _axes(self) -> list[str]:
        base, right = self.height - BOTTOM, self.width - RIGHT
        parts = [f'<text class="axis" x="2" y="14">{escape(self.title)}</text>']
        for value, label in self.y.ticks:
            y = self.at((self.x.low, value))[1]
            parts.append(
                f'<line class="rule" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
            )
        for value, label in self.x.ticks:
            x = self.at((value, self.y.low))[0]
            anchor = "end" if x > right - 8 and len(label) > 4 else "middle"
            parts.append(
                f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>'
                f'<text x="{x:.1f}" y="{base + 16}" text-anchor="{anchor}">{escape(label)}</text>'
            )
        middle = (LEFT + right) / 2
        parts.append(
            f'<text class="axis" x="{middle:.0f}" y="{self.height - 6}" text-anchor="middle">'
            f"{escape(self.x.title)}</text>"
        )
        return parts

    def horizontal(self, value: float) -> str:
        """A dotted line at y = `value`."""
        y = self.at((self.x.low, value))[1]
        return (
            f'<line class="threshold" x1="{LEFT}" x2="{self.width - RIGHT}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
        )

    def vertical(self, value: float, text: str) -> str:
        """A dotted line at x = `value`, with `text` beside its top."""
        x = self.at((value, self.y.low))[0]
        return (
            f'<line class="threshold" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" '
            f'y2="{self.height - BOTTOM}"/>'
            f'<text class="axis halo" x="{x + 5:.1f}" y="{self.top + 11}">'
            f"{escape(text)}</text>"
        )

    def diagonal(self) -> str:
        """The line y = x between the limits that both axes share."""
        low, high = max(self.x.low, self.y.low), min(self.x.high, self.y.high)
        (x1, y1), (x2, y2) = self.at((low, low)), self.at((high, high))
        return f'<line class="threshold" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def unit_axis(title: str, values: Iterable[float] = ()) -> Axis:
    """From 0, or the lowest of `values` if that is below, to 1."""
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


def lines(panel: Panel, curves: Sequence[Line]) -> list[str]:
    """Every method's decoys, then its targets with its markers, in a group that can be hidden."""
    parts = []
    for line in curves:
        weight = " thin" if line.style.thin else ""
        drawn = [f'<g class="s{line.style.number} m{line.style.colour}">']
        for points, kind in ((line.decoys, "decoys"), (line.targets, "targets")):
            if len(points):
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _thinned(panel, points))
                drawn.append(f'<polyline class="curve {kind}{weight}" points="{path}"/>')
        drawn += [marker(line.style.marker, *at) for at in _marked(panel, line)]
        parts.append("\n".join([*drawn, "</g>"]))
    return parts


def bands(
    panel: Panel, areas: Sequence[tuple[Style, str, Sequence[Point], Sequence[Point]]]
) -> str:
    """The area between two curves for each of (style, targets or decoys, one curve, the other)."""
    parts = []
    for style, kind, one, other in areas:
        if not len(one):
            continue
        edges = [*_thinned(panel, one), *reversed(_thinned(panel, other))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in edges)
        parts.append(
            f'<g class="s{style.number} m{style.colour}">'
            f'<polygon class="band {kind}" points="{path}"/></g>'
        )
    return "\n".join(parts)


def dots(panel: Panel, targets: Sequence[Point], decoys: Sequence[Point], *, colour: int) -> str:
    """Targets as dots, decoys as crosses over them, at most MAX_DOTS of each, evenly picked."""
    crosses = "".join(
        f"M{x - 2:.1f} {y - 2:.1f}l4 4m-4 0l4-4" for x, y in map(panel.at, _evenly(decoys))
    )
    circles = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in map(panel.at, _evenly(targets)))
    many = " many" if len(targets) > MANY_DOTS else ""
    return (
        f'<path class="dots{many} m{colour}" d="{circles}"/><path class="crosses" d="{crosses}"/>'
    )


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
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="marker" points="{points}"/>'


def _marked(panel: Panel, line: Line) -> list[Point]:
    """Where the markers of the targets' curve go: evenly spaced, another start for every method."""
    points = line.targets
    if line.style.thin or not len(points):
        return []
    shift = (line.style.marker % N_MARKERS) / N_MARKERS
    places = [(k + shift) / MARKS_PER_LINE for k in range(MARKS_PER_LINE)]
    chosen = sorted({round(place * (len(points) - 1)) for place in places})
    return [panel.at(points[k]) for k in chosen]


def _evenly(points: Sequence[Point], limit: int = MAX_DOTS) -> list[Point]:
    """At most `limit` of the points, the first and the last among them."""
    if len(points) <= limit:
        return list(points)
    last = len(points) - 1
    return [points[round(k * last / (limit - 1))] for k in range(limit)]


def _thinned(panel: Panel, points: Sequence[Point]) -> list[Point]:
    drawn = [panel.at(point) for point in _evenly(points, MAX_POINTS)]
    if len(drawn) == 1:
        drawn.append((drawn[0][0] + 6, drawn[0][1]))  # a dot needs a length
    return drawn
