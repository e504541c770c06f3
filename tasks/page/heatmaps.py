"""Heatmaps as inline SVG. Cells carry their numbers as text, so shades are only an aid."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tasks.page.axes import LEFT, LETTER, RIGHT, TOP, WIDTH
from tasks.page.charts import LINE_HEIGHT, drawing, words

SQUARE, LOWEST_SQUARE, SQUARE_HEIGHT = 104.0, 50.0, 42.0
HATCH_STEP = 9.0

Place = tuple[int, int]


@dataclass(frozen=True)
class Square:
    """A cell of a heatmap: how dark, its text, and what a pointer on it says.

    `share` is 0 to 1, or None if the cell has no number; it is hatched then.
    """

    share: float | None
    text: Sequence[str]
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
    parts = [words(titles[1], 2, 14, "axis")]
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
    parts.append(words(titles[0], max(middle, needed / 2), height - 6, "axis", at="middle"))
    wide = f' class="heat" style="min-width: {0.94 * width:.0f}px; max-width: {1.4 * width:.0f}px"'
    return drawing(width, height, parts, description, wide)


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
    return [
        words(
            line, x, top + LINE_HEIGHT * k, ("second" if k else "first") + " halo" * halo, at=anchor
        )
        for k, line in enumerate(lines)
    ]
