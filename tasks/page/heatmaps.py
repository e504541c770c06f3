"""Heatmaps and dotplots as inline SVG: squares that carry their numbers as text, so that shades are
only an aid, and lanes of marks, those of training images above those of test images."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product

from tasks.page.charts import (
    LEFT,
    LETTER,
    LINE_HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Style,
    drawing,
    evenly,
    marker,
    rule,
    words,
)
from tasks.page.formats import NOTHING, cut

SQUARE, LOWEST_SQUARE, SQUARE_HEIGHT = 104.0, 50.0, 42.0
HATCH_STEP = 9.0
SIDE, END = 112.0, 62.0  # room for a lane's name, and for its two numbers
LANE, BETWEEN, HEAD = 22.0, 9.0, 8.0
MAX_MARKS = 400
GOLDEN = 0.618034


@dataclass(frozen=True)
class Square:
    """A square of a heatmap: how dark, its text, and its tooltip.

    `share` is 0 to 1, or None if the square has no number; it is hatched then.
    """

    share: float | None
    text: Sequence[str]
    about: str


MISSING = Square(None, [NOTHING], "no such cell")


def heatmap(
    columns: Sequence[str],
    rows: Sequence[str],
    squares: Mapping[tuple[int, int], Square],
    *,
    titles: tuple[str, str],
    description: str,
) -> str:
    """Squares by (column, row from the top); a missing one is hatched and has a dash.

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
    parts = [words(titles[1], 2, 14, "axis")]
    for k, lines in enumerate(sides):
        parts += _stacked(lines, left - 7, TOP + SQUARE_HEIGHT * (k + 0.5), "end")
    for k, lines in enumerate(bottoms):
        parts += _stacked(lines, left + size * (k + 0.5), base + 10 + LINE_HEIGHT * len(lines) / 2)
    for row, column in product(range(len(rows)), range(len(columns))):
        x, y = left + size * column, TOP + SQUARE_HEIGHT * row
        parts.append(_square(squares.get((column, row), MISSING), x, y, size))
    middle = left + size * len(columns) / 2
    parts.append(words(titles[0], max(middle, needed / 2), height - 6, "axis", at="middle"))
    wide = f' class="heat" style="min-width: {0.94 * width:.0f}px; max-width: {1.4 * width:.0f}px"'
    return drawing(width, height, parts, description, wide)


def _square(square: Square, x: float, y: float, size: float) -> str:
    """A square with its text; diagonals hatch one without a number."""
    frame = f'x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{SQUARE_HEIGHT:.1f}"'
    if square.share is None:
        steps = []
        for k in range(1, int((size + SQUARE_HEIGHT) / HATCH_STEP) + 1):
            across = k * HATCH_STEP
            x1, y1 = min(across, size), max(0.0, across - size)
            x2, y2 = max(0.0, across - SQUARE_HEIGHT), min(across, SQUARE_HEIGHT)
            steps.append(f"M{x + x1:.1f} {y + y1:.1f}L{x + x2:.1f} {y + y2:.1f}")
        hatch = f'<path class="hatch" d="{"".join(steps)}"/>'
        drawn = f'<rect class="void-square" {frame}></rect>{hatch}'
    else:
        shade = f'style="--share: {min(1.0, max(0.0, square.share)):.4f}"'
        drawn = f'<rect class="shade" {shade} {frame}></rect>'
    centre = (x + size / 2, y + SQUARE_HEIGHT / 2)
    text = "".join(_stacked(square.text, *centre, halo=square.share is None))
    return f'<g class="square"><title>{escape(square.about)}</title>{drawn}{text}</g>'


def _stacked(
    lines: Sequence[str], x: float, y: float, anchor: str = "middle", *, halo: bool = False
) -> list[str]:
    """Lines of text around the height `y`; the first is the strong one."""
    top = y + 4 - LINE_HEIGHT * (len(lines) - 1) / 2
    kinds = [("second" if k else "first") + " halo" * halo for k in range(len(lines))]
    return [
        words(line, x, top + LINE_HEIGHT * k, kind, at=anchor)
        for k, (line, kind) in enumerate(zip(lines, kinds, strict=True))
    ]


@dataclass(frozen=True)
class Mark:
    """A point of a lane and its tooltip."""

    x: float
    about: str


@dataclass(frozen=True)
class Lane:
    """Marks of training images above those of test images, with a number at the end of each."""

    title: Sequence[str]
    style: Style
    train: Sequence[Mark]
    test: Sequence[Mark]
    numbers: tuple[str, str]


def dotplot(lanes: Sequence[Lane], axis: Axis, *, at: float | None, description: str) -> str:
    """Lanes under each other: filled marks are training images, crosses test images.

    A few marks of a lane are spread evenly from top to bottom, many are scattered. `at`: where a
    dotted line stands, if any.
    """
    step = 2 * LANE + BETWEEN
    height, base = HEAD + step * len(lanes) + 34, HEAD + step * len(lanes)
    room = WIDTH - SIDE - END
    parts = []
    for value, label in axis.ticks:
        x = SIDE + axis.share(value) * room
        parts += [rule("rule", x, HEAD - 4, x, base), words(label, x, base + 14, at="middle")]
    if at is not None:
        x = SIDE + axis.share(at) * room
        parts.append(rule("threshold", x, HEAD - 4, x, base))
    for number, lane in enumerate(lanes):
        top = HEAD + step * number
        first = top + LANE + 4 - 6.5 * (len(lane.title) - 1)
        parts += [words(line, 0, first + 13 * k, "axis") for k, line in enumerate(lane.title)]
        parts.append(rule("rule", 0, top - 4, WIDTH, top - 4))
        groups = ((lane.train, top + LANE / 2, "axis"), (lane.test, top + 1.5 * LANE, "test"))
        for (marks, y, kind), text in zip(groups, lane.numbers, strict=True):
            drawn = evenly(marks, MAX_MARKS)
            n = len(drawn)
            for k, mark in enumerate(drawn):
                spread = (k * GOLDEN) % 1 if n > 12 else k / (n - 1) if n > 1 else 0.5
                x, up = SIDE + axis.share(mark.x) * room, y + (spread - 0.5) * (LANE - 9)
                shape = f'<path class="crosses" d="M{x - 2.5:.1f} {up - 2.5:.1f}l5 5m-5 0l5-5"/>'
                group = ""
                if kind != "test":
                    shape = marker(lane.style.marker, x, up)
                    group = f' class="m{lane.style.colour}"'
                parts.append(f"<g{group}><title>{escape(mark.about)}</title>{shape}</g>")
            parts.append(words(text, WIDTH, y + 4, kind, at="end"))
    parts.append(words(axis.title, SIDE + room / 2, height - 4, "axis", at="middle"))
    return drawing(WIDTH, height, parts, description)


def side_lines(title: str) -> list[str]:
    """A name in lines that fit beside a lane: broken at a comma, then at blanks."""
    most = int(SIDE / LETTER)
    shown = [
        cut(line, most)
        for piece in title.split(", ")
        for line in textwrap.wrap(piece, most, break_long_words=False, break_on_hyphens=False)
        or [""]
    ]
    return shown if len(shown) <= 3 else [*shown[:2], shown[2][: most - 1] + "…"]
