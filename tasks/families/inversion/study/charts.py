"""Accuracy against leakage as inline SVG: marks with whiskers both ways, fronts, letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tasks.page.axes import LEFT, RIGHT
from tasks.page.charts import Panel, Style, marker

LETTER_BOX = (10.0, 13.0)
NEAR = ((7, -4), (-15, -4), (-4, -8), (-4, 17), (9, 9), (-17, 9), (9, -13), (-17, -13))
FAR = tuple((radius * x, radius * y) for radius in (22, 34, 48) for x, y in
            ((1, -0.5), (-1, -0.5), (0, -1), (0.2, 1), (1, 0.7), (-1, 0.7)))  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """A point, the ends of its whiskers (None: no whisker), a letter, and what is said of it."""

    x: float
    y: float
    across: tuple[float, float] | None
    up: tuple[float, float] | None
    letter: str
    about: str

    def is_inside(self, panel: Panel) -> bool:
        return panel.x.low <= self.x <= panel.x.high and panel.y.low <= self.y <= panel.y.high


@dataclass(frozen=True)
class Series:
    """The marks of an attack, and the places of those on its front, by x."""

    style: Style
    marks: Sequence[Mark]
    front: Sequence[int]


def trade_off(
    panel: Panel, series: Sequence[Series], *, level: float | None, description: str
) -> str:
    """Marks with whiskers both ways, each attack's front as a line, letters beside some marks.

    Marks outside the frame are left out. `level`: where a dotted line lies across, if any.
    """
    parts = [panel.horizontal(level)] if level is not None else []
    taken: list[tuple[float, float]] = []
    lettered: list[tuple[float, float, str]] = []
    for one in series:
        drawn = [f'<g class="s{one.style.number} m{one.style.colour}">']
        on_front = [one.marks[k] for k in one.front if one.marks[k].is_inside(panel)]
        if len(on_front) > 1:
            path = " ".join("{:.1f},{:.1f}".format(*panel.at((m.x, m.y))) for m in on_front)
            drawn.append(f'<polyline class="curve front" points="{path}"/>')
        for mark in (mark for mark in one.marks if mark.is_inside(panel)):
            x, y = panel.at((mark.x, mark.y))
            taken.append((x, y))
            if mark.letter:
                lettered.append((x, y, mark.letter))
            drawn.append(
                f"<g><title>{escape(mark.about)}</title>{_whiskers(panel, mark)}"
                f"{marker(one.style.marker, x, y)}</g>"
            )
        parts.append("\n".join([*drawn, "</g>"]))
    return panel.svg([*parts, *_letters(panel, lettered, taken)], description)


def _whiskers(panel: Panel, mark: Mark) -> str:
    paths = []
    if mark.up:
        (x, low), (_x, high) = (panel.at((mark.x, end)) for end in mark.up)
        paths.append(f"M{x:.1f} {low:.1f}V{high:.1f}")
    if mark.across:
        (low, y), (high, _y) = (panel.at((end, mark.y)) for end in mark.across)
        paths.append(f"M{low:.1f} {y:.1f}H{high:.1f}")
    return f'<path class="whisker" d="{"".join(paths)}"/>' if paths else ""


def _letters(
    panel: Panel, wanted: Sequence[tuple[float, float, str]], taken: Sequence[tuple[float, float]]
) -> list[str]:
    """Each letter near its mark where it covers no other letter and as few marks as can be."""
    boxes: list[tuple[float, float]] = []
    parts = []
    width, height = LETTER_BOX
    right, base = panel.width - RIGHT, panel.at((panel.x.low, panel.y.low))[1]
    for x, y, text in wanted:
        places: list[tuple[float, float, float]] = []
        for place, (dx, dy) in enumerate((*NEAR, *FAR)):
            left, bottom = x + dx, y + dy
            if not (LEFT + 1 <= left <= right - width and panel.top + height <= bottom <= base - 1):
                continue
            if any(abs(left - a) < width and abs(bottom - b) < height for a, b in boxes):
                continue
            covered = sum(
                left - 3 < a < left + width + 2 and bottom - height < b < bottom + 3
                for a, b in taken
            )
            places.append((4.0 * covered + place / 4, left, bottom))
        if not places:
            continue
        _cost, left, bottom = min(places, key=lambda at: at[0])
        boxes.append((left, bottom))
        middle = left + width / 2 - 1, bottom - 4
        if math.dist(middle, (x, y)) > 17:
            parts.append(
                f'<line class="leader" x1="{x:.1f}" y1="{y:.1f}" x2="{middle[0]:.1f}" '
                f'y2="{middle[1]:.1f}"/>'
            )
        parts.append(
            f'<text class="axis letter halo" x="{left:.1f}" y="{bottom:.1f}">{escape(text)}</text>'
        )
    return parts
