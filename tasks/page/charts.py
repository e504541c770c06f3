"""Panels of a figure as inline SVG: lines with bands or whiskers, dots. Colours are CSS variables
for light and dark; every method also has a marker of its own, and targets differ from decoys by
line and by shape. A panel is as wide as a phone, and two fit side by side on a desk."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import TypeVar

from tasks.page.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis

MAX_POINTS = 400
MAX_DOTS = 2500
MANY_DOTS = 300
N_MARKERS = 6
MARKS_PER_LINE = 6
SET_APART, APART = 5.0, 2.6  # between the marks of lines that share an x; in small panels
N_BASELINES = 4
LINE_HEIGHT = 13.0

Point = tuple[float, float]
T = TypeVar("T")


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
        """Place of the values in the plane of the drawing."""
        return (
            LEFT + self.x.share(point[0]) * (self.width - LEFT - RIGHT),
            self.height - BOTTOM - self.y.share(point[1]) * (self.height - self.top - BOTTOM),
        )

    def svg(self, parts: Iterable[str], description: str) -> str:
        """The panel with `parts` in it; `description` is for who cannot see it."""
        return drawing(self.width, self.height, [*self._axes(), *parts], description)

    def _axes(self) -> list[str]:
        base, right = self.height - BOTTOM, self.width - RIGHT
        parts = [words(self.title, 2, 14, "axis")]
        for value, label in self.y.ticks:
            y = self.at((self.x.low, value))[1]
            parts += [rule("rule", LEFT, y, right, y), words(label, LEFT - 6, y + 4, at="end")]
        for value, label in self.x.ticks:
            x = self.at((value, self.y.low))[0]
            anchor = "end" if x > right - 8 and len(label) > 4 else "middle"
            parts += [rule("tick", x, base, x, base + 4), words(label, x, base + 16, at=anchor)]
        title = words(self.x.title, (LEFT + right) / 2, self.height - 6, "axis", at="middle")
        return [*parts, title]

    def horizontal(self, value: float, kind: str = "threshold") -> str:
        """A dotted line at y = `value`."""
        y = self.at((self.x.low, value))[1]
        return rule(kind, LEFT, y, self.width - RIGHT, y)

    def level(self, value: float) -> str:
        """A dotted line across at y = `value` that differs from a threshold's."""
        return self.horizontal(value, "baseline b1")

    def vertical(self, value: float, text: str = "") -> str:
        """A dotted line at x = `value`, with `text` beside its top."""
        x = self.at((value, self.y.low))[0]
        line = rule("threshold", x, self.top, x, self.height - BOTTOM)
        return line + words(text, x + 5, self.top + 11, "axis halo") if text else line

    def area(self, low: float, high: float, about: str) -> str:
        """A grey area from x = `low` to `high`, and what a pointer on it says."""
        x1, x2 = (self.at((x, self.y.low))[0] for x in (low, high))
        top, base = (self.at((self.x.low, y))[1] for y in (self.y.high, self.y.low))
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
    return "\n".join(
        [
            f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img"{more} '
            f'aria-label="{escape(description)}">',
            *parts,
            "</svg>",
        ]
    )


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
    spare = (k % len(others) for k in count())
    return {
        name: Style(k, colours[name] if name in colours else others[next(spare)], k % N_MARKERS)
        for k, name in enumerate(names)
    }


def lines(panel: Panel, curves: Sequence[Line]) -> list[str]:
    """Every method's decoys, then its targets with its markers, in a group that can be hidden."""
    parts = []
    for line in curves:
        weight = (" thin" if line.style.thin else "") + (" twin" if line.style.twin else "")
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

    The lines are set `apart` a little sideways, so that whiskers at the same x can be told apart.
    """
    parts = []
    for k, (style, points) in enumerate(series):
        aside = apart * (k - (len(series) - 1) / 2)
        drawn = [f'<g class="s{style.number} m{style.colour}">']
        for run in _unbroken(points):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _moved(panel, run, aside))
            drawn.append(f'<polyline class="curve targets" points="{path}"/>')
        known = [point for point in points if point.y is not None]
        for point, (x, y) in zip(known, _moved(panel, known, aside), strict=True):
            drawn.append(
                f"<g><title>{escape(point.about)}</title>{_whisker(panel, point, x)}"
                f"{marker(style.marker, x, y)}</g>"
            )
        parts.append("\n".join([*drawn, "</g>"]))
    return parts


def _unbroken(points: Sequence[Estimate]) -> Iterator[list[Estimate]]:
    """The stretches of at least two points without a None between them."""
    run: list[Estimate] = []
    for point in [*points, Estimate(0, None, None, None, "")]:
        if point.y is not None:
            run.append(point)
            continue
        if len(run) > 1:
            yield run
        run = []


def _moved(panel: Panel, points: Sequence[Estimate], aside: float) -> list[Point]:
    places = [panel.at((point.x, point.y or 0.0)) for point in points]
    return [(x + aside, y) for x, y in places]


def _whisker(panel: Panel, point: Estimate, x: float) -> str:
    if point.low is None or point.high is None:
        return ""
    low, high = (panel.at((point.x, end))[1] for end in (point.low, point.high))
    return (
        f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}'
        f'M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"/>'
    )


def baselines(panel: Panel, levels: Sequence[float]) -> list[str]:
    """Dotted lines across at the levels, each with its `letter` right of its end, none on another.

    The lines of four neighbours differ in their dots.
    """
    right, parts = panel.width - RIGHT, []
    heights: list[float] = []
    for k in sorted(range(len(levels)), key=lambda k: levels[k]):
        y = panel.at((panel.x.low, levels[k]))[1]
        heights.append(min(y + 4, heights[-1] - LINE_HEIGHT) if heights else y + 4)
        parts.append(rule(f"baseline b{k % N_BASELINES}", LEFT, y, right, y))
        parts.append(words(letter(k), right + 5, heights[-1], "axis letter"))
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
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="marker" points="{points}"/>'


def _marked(panel: Panel, line: Line) -> list[Point]:
    """Places of the markers of the targets' curve: evenly spaced, shifted by method."""
    points = line.targets
    if line.style.thin or not len(points):
        return []
    shift = (line.style.marker % N_MARKERS) / N_MARKERS
    places = [(k + shift) / MARKS_PER_LINE for k in range(MARKS_PER_LINE)]
    chosen = sorted({round(place * (len(points) - 1)) for place in places})
    return [panel.at(points[k]) for k in chosen]


def evenly(points: Sequence[T], limit: int = MAX_DOTS) -> list[T]:
    """At most `limit` of the points, the first and the last among them."""
    if len(points) <= limit:
        return list(points)
    last = len(points) - 1
    return [points[round(k * last / (limit - 1))] for k in range(limit)]


def _thinned(panel: Panel, points: Sequence[Point]) -> list[Point]:
    drawn = [panel.at(point) for point in evenly(points, MAX_POINTS)]
    if len(drawn) == 1:
        drawn.append((drawn[0][0] + 6, drawn[0][1]))  # a dot needs a length
    return drawn
