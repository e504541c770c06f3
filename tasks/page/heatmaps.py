"""A study's charts as inline SVG: heatmaps, lines with intervals, small scatters; pure functions.

They share the frame, the colours and the markers of `tasks.page.charts`. A heatmap's cells carry
their numbers as text, so its shades are only an aid; every line has a marker of its own.
"""

from __future__ import annotations

import math
import string
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from tasks.page.charts import (
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Panel,
    Point,
    Style,
    log_axis,
    marker,
)

LETTER = 6.4  # width of a letter at the charts' size of type
SQUARE, LOWEST_SQUARE, SQUARE_HEIGHT = 104.0, 50.0, 42.0
HATCH_STEP = 9.0
LINE_HEIGHT = 13.0
SET_APART = 5.0  # between the marks of lines that share an x
N_BASELINES = 4
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Place = tuple[int, int]


@dataclass(frozen=True)
class Square:
    """A cell of a heatmap: how dark, its text, and what a pointer on it says.

    `share` is 0 to 1, or None if the cell has no number; it is hatched then.
    """

    share: float | None
    text: Sequence[str]
    about: str


@dataclass(frozen=True)
class Estimate:
    """A point of a line; None for y breaks the line, None for an end leaves the whisker out."""

    x: float
    y: float | None
    low: float | None
    high: float | None
    about: str


def heatmap(
    columns: Sequence[str],
    rows: Sequence[str],
    squares: Mapping[Place, Square],
    *,
    titles: tuple[str, str],
    description: str,
) -> str:
    """Squares by (column, row from the top); a place without one is hatched and has a dash.

    `titles` are those of the axis across and of the one up.
    """
    sides = [textwrap.wrap(row, 18, max_lines=2, placeholder="…") or [""] for row in rows]
    widest = max((len(line) for lines in sides for line in lines), default=0)
    left = max(LEFT, math.ceil(widest * LETTER) + 12)
    size = min(SQUARE, max(LOWEST_SQUARE, (WIDTH - left - RIGHT) / max(1, len(columns))))
    bottoms = [textwrap.wrap(c, int(size / LETTER), max_lines=2, placeholder="…") for c in columns]
    n_lines = max((len(lines) for lines in bottoms), default=1)
    needed = LETTER * max(len(titles[0]) + 4, len(titles[1]))
    width = max(left + size * len(columns) + RIGHT, needed)
    base = TOP + SQUARE_HEIGHT * len(rows)
    height = base + 10 + LINE_HEIGHT * (n_lines + 1) + 6
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" class="heat" '
        f'style="min-width: {0.94 * width:.0f}px; max-width: {1.4 * width:.0f}px" '
        f'aria-label="{escape(description)}">',
        f'<text class="axis" x="2" y="14">{escape(titles[1])}</text>',
    ]
    for k, lines in enumerate(sides):
        middle = TOP + SQUARE_HEIGHT * (k + 0.5)
        parts += _stacked(lines, left - 7, middle, "end")
    for k, lines in enumerate(bottoms):
        parts += _stacked(lines, left + size * (k + 0.5), base + 10 + LINE_HEIGHT * len(lines) / 2)
    for row in range(len(rows)):
        for column in range(len(columns)):
            x, y = left + size * column, TOP + SQUARE_HEIGHT * row
            parts.append(_square(squares.get((column, row)), x, y, size))
    middle = left + size * len(columns) / 2
    parts.append(
        f'<text class="axis" x="{max(middle, needed / 2):.0f}" y="{height - 6:.0f}" '
        f'text-anchor="middle">{escape(titles[0])}</text></svg>'
    )
    return "\n".join(parts)


def _square(square: Square | None, x: float, y: float, size: float) -> str:
    frame = f'x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{SQUARE_HEIGHT:.1f}"'
    centre = (x + size / 2, y + SQUARE_HEIGHT / 2)
    about = f"<title>{escape(square.about if square else 'no such cell')}</title>"
    if square is None or square.share is None:
        text = _stacked(square.text if square else ["–"], *centre, halo=True)
        inside = [f'<rect class="void-square" {frame}></rect>', _hatch(x, y, size), *text]
    else:
        text = _stacked(square.text, *centre)
        shade = f'style="--share: {min(1.0, max(0.0, square.share)):.4f}"'
        inside = [f'<rect class="shade" {shade} {frame}></rect>', *text]
    return f'<g class="square">{about}{"".join(inside)}</g>'


def _hatch(x: float, y: float, size: float) -> str:
    """Diagonals inside a square."""
    steps, n = [], int((size + SQUARE_HEIGHT) / HATCH_STEP)
    for k in range(1, n + 1):
        across = k * HATCH_STEP
        x1, y1 = min(across, size), max(0.0, across - size)
        x2, y2 = max(0.0, across - SQUARE_HEIGHT), min(across, SQUARE_HEIGHT)
        steps.append(f"M{x + x1:.1f} {y + y1:.1f}L{x + x2:.1f} {y + y2:.1f}")
    return f'<path class="hatch" d="{"".join(steps)}"/>'


def _stacked(
    lines: Sequence[str], x: float, y: float, anchor: str = "middle", *, halo: bool = False
) -> list[str]:
    """Lines of text around the height `y`; the first is the strong one."""
    top = y + 4 - LINE_HEIGHT * (len(lines) - 1) / 2
    kinds = ["first" if k == 0 else "second" for k in range(len(lines))]
    return [
        f'<text class="{kind}{" halo" if halo else ""}" x="{x:.1f}" '
        f'y="{top + LINE_HEIGHT * k:.1f}" text-anchor="{anchor}">{escape(line)}</text>'
        for k, (kind, line) in enumerate(zip(kinds, lines, strict=True))
    ]


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
        parts.append(
            f'<line class="baseline b{k % N_BASELINES}" x1="{LEFT}" x2="{right}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/><text class="axis letter" x="{right + 5}" y="{heights[-1]:.1f}">'
            f"{letter(k)}</text>"
        )
    return parts


def letter(k: int) -> str:
    """What baseline `k` is called: A, B, ..., Z, A1, B1, ..."""
    return string.ascii_uppercase[k % 26] + (str(k // 26) if k >= 26 else "")


def level(panel: Panel, value: float) -> str:
    """A thin dotted line at y = `value` that differs from a threshold's."""
    y = panel.at((panel.x.low, value))[1]
    return (
        f'<line class="baseline b1" x1="{LEFT}" x2="{panel.width - RIGHT}" y1="{y:.1f}" '
        f'y2="{y:.1f}"/>'
    )


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


def cut(text: str, most: int) -> str:
    """`text`, or its beginning and an ellipsis if it is longer than `most`."""
    return text if len(text) <= most else text[: most - 1] + "…"
