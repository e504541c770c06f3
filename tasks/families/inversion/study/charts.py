"""The charts of an inversion study as inline SVG: accuracy against leakage, and plane features.

They share the frame, the markers and the colours of the other pages. Attacks have their colour and
marker on every figure, and so have the settings of the study of layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from tasks.page.axes import LEFT, RIGHT, Axis, round_axis
from tasks.page.charts import N_MARKERS, Panel, Style, marker, styles_of
from tasks.page.files import Record
from tasks.page.formats import power

ATTACK_COLOURS = {"paper": 13, "strong": 14, "restored": 15}
OTHER_COLOURS = (12, 16, 17)
"""Told apart with any colour vision (templates/matrix.css)."""
SETTING_COLOURS = (17, 16, 12, 15, 14, 13)
FIRST_SETTING = 20  # styles are numbered on the whole page
CLASS_COLOURS = (14, 13, 12, 15, 16, 17)
SQUARE = (214, 196)
SQUARE_TOP = 25
MAX_MARKS = 120  # of a class in a panel
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


@dataclass(frozen=True)
class Series:
    """The marks of an attack, and the places of those on its front, by x."""

    style: Style
    marks: Sequence[Mark]
    front: Sequence[int]


def attack_styles(record: Record) -> dict[str, Style]:
    """Look of each attack, the same everywhere on the page."""
    names = [attack["name"] for attack in record["attacks"]]
    return styles_of(names, ATTACK_COLOURS, OTHER_COLOURS)


def setting_style(k: int) -> Style:
    """Look of the `k`-th setting of the study of layers."""
    return Style(FIRST_SETTING + k, SETTING_COLOURS[k % len(SETTING_COLOURS)], k % N_MARKERS)


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
        on_front = [one.marks[k] for k in one.front if _inside(panel, one.marks[k])]
        if len(on_front) > 1:
            path = " ".join("{:.1f},{:.1f}".format(*panel.at((m.x, m.y))) for m in on_front)
            drawn.append(f'<polyline class="curve front" points="{path}"/>')
        for mark in one.marks:
            if not _inside(panel, mark):
                continue
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


def _inside(panel: Panel, mark: Mark) -> bool:
    return panel.x.low <= mark.x <= panel.x.high and panel.y.low <= mark.y <= panel.y.high


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
        best: tuple[float, float, float] | None = None
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
            cost = 4.0 * covered + place / 4
            if best is None or cost < best[0]:
                best = cost, left, bottom
        if best is None:
            continue
        _cost, left, bottom = best
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


@dataclass(frozen=True)
class Plane:
    """Frame of features: what is taken off them, what they are multiplied by, the axes."""

    offset: tuple[float, float]
    exponent: int
    axes: tuple[Axis, Axis]

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        """The features in the units of the axes."""
        x, y = (
            (at - off) * 10.0**-self.exponent for at, off in zip(point, self.offset, strict=True)
        )
        return x, y

    @property
    def unit(self) -> str:
        """`, in 10⁻⁹`; nothing if the axes are in units of the features."""
        return f", in {power(10.0**self.exponent)}" if self.exponent else ""

    @property
    def said(self) -> str:
        """Words on axes that do not start at 0; empty where they do."""
        if not any(self.offset):
            return ""
        return "drawn around ({:.4g}, {:.4g})".format(*self.offset).replace("-", "−")


def plane(points: Sequence[tuple[float, float]]) -> Plane:
    """The plane that holds all points: moved and multiplied where they are far off, or tiny."""
    finite = [point for point in points if all(map(math.isfinite, point))] or [(0.0, 0.0)]
    sides = [[point[k] for point in finite] for k in (0, 1)]
    size = max(max(side) - min(side) for side in sides)
    far = max(abs(value) for side in sides for value in side)
    moved = 0 < size < 1e-2 * far
    offset = [(max(side) + min(side)) / 2 if moved else 0.0 for side in sides]
    scale = size if moved else far
    exponent = math.floor(math.log10(scale)) if scale > 0 else 0
    exponent = 0 if -1 <= exponent <= 2 else exponent
    centred = [
        [(value - off) * 10.0**-exponent for value in side]
        for side, off in zip(sides, offset, strict=True)
    ]
    across, up = (round_axis("h₁" if k == 0 else "", side) for k, side in enumerate(centred))
    return Plane((offset[0], offset[1]), exponent, (across, up))


def features(
    where: Plane, points: Sequence[tuple[float, float]], labels: Sequence[int], description: str
) -> str:
    """Features in the plane by class: each class has its colour and its marker."""
    across, up = where.axes
    panel = Panel(
        f"h₂{where.unit}", replace(across, title=f"h₁{where.unit}"), up, *SQUARE, top=SQUARE_TOP
    )
    parts = []
    for n, label in enumerate(sorted(set(labels))):
        mine = [p for p, of in zip(points, labels, strict=True) if of == label]
        colour = CLASS_COLOURS[n % len(CLASS_COLOURS)]
        drawn = [f'<g class="cloud m{colour}"><title>class {label}</title>']
        for point in mine[:MAX_MARKS]:
            if all(map(math.isfinite, point)):
                drawn.append(marker(n, *panel.at(where.place(point))))
        parts.append("".join([*drawn, "</g>"]))
    return panel.svg(parts, description)
