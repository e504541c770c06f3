"""The features of synthetic points in the plane, at the start and at the end of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.page.axes import Axis, round_axis
from tasks.page.charts import Panel, marker
from tasks.page.files import Record
from tasks.page.formats import number, power
from tasks.page.study_page import Drawing, Row

CLASS_COLOURS = (14, 13, 12, 15, 16, 17)
SQUARE, SQUARE_TOP = (214, 196), 25
MAX_MARKS = 120  # of a class in a panel

Point = tuple[float, float]


@dataclass(frozen=True)
class Plane:
    """Frame of features: what is taken off them, what they are multiplied by, the axes."""

    offset: Point
    exponent: int
    axes: tuple[Axis, Axis]

    def place(self, point: Point) -> Point:
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


def plane(points: Sequence[Point]) -> Plane:
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
    across, up = (
        round_axis(title, [(value - off) * 10.0**-exponent for value in side])
        for title, side, off in zip(("h₁", ""), sides, offset, strict=True)
    )
    return Plane((offset[0], offset[1]), exponent, (across, up))


def plane_rows(cells: Sequence[Record]) -> tuple[list[Row], list[str]]:
    """Features at the start and at the end on common scales, and the end on scales of its own."""
    drawn = [cell for cell in cells if cell["features"]]
    if not drawn:
        return [], ["No features were kept to be drawn."]
    rows = []
    for moment, own, title in (
        ("start", False, "Start of training"),
        ("end", False, "End of training"),
        ("end", True, "End of training, each on a scale of its own"),
    ):
        of_cells = [[_known(point) for point in cell["features"][moment]] for cell in drawn]
        everything, panels = [point for points in of_cells for point in points], []
        for cell, points in zip(drawn, of_cells, strict=True):
            where, ranges = plane(points if own else everything), _ranges(points)
            about = f"Features, {cell['title']}, {title.lower()}: {ranges}"
            svg = _drawn(where, points, cell["features"]["labels"], about)
            note = "; ".join(text for text in (ranges, where.said if own else "") if text)
            panels.append(Drawing(svg, cell["title"], note=note))
        rows.append(Row(title, "" if own else "one scale for all", panels))
    labels = [cell["features"]["labels"] for cell in drawn]
    notes = ["Each class has a colour and a marker; h₁ and h₂ are the two features."]
    if max((of.count(k) for of in labels for k in set(of)), default=0) > MAX_MARKS:
        notes.append(f"At most {MAX_MARKS} points of a class are drawn; the CSV has all of them.")
    return rows, notes


def _known(point: Sequence[float | None]) -> Point:
    """A point; what is not known of it is no number, and is not drawn."""
    x, y = (math.nan if at is None else float(at) for at in point)
    return x, y


def _ranges(points: Sequence[Point]) -> str:
    """`h₁ from −0.3 to 2.1, h₂ from 0 to 0.9`."""
    parts = []
    for name, side in (("h₁", [x for x, _y in points]), ("h₂", [y for _x, y in points])):
        known = [at for at in side if math.isfinite(at)]
        ends = [number(float(f"{end(known):.3g}")) for end in (min, max)] if known else []
        parts.append(f"{name} from {ends[0]} to {ends[1]}" if ends else f"{name} unknown")
    return ", ".join(parts)


def _drawn(where: Plane, points: Sequence[Point], labels: Sequence[int], description: str) -> str:
    """Features in the plane by class: each class has its colour and its marker."""
    across, up = where.axes
    frame = replace(across, title=f"h₁{where.unit}")
    panel = Panel(f"h₂{where.unit}", frame, up, *SQUARE, top=SQUARE_TOP)
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
