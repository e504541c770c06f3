"""The panels of a recovery study: rates against the loss, which falls to the right.

A method has its colour and its marker on every figure; lines of methods that are given the mask are
dashed by the style sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tasks.page.axes import Axis
from tasks.page.charts import APART, Estimate, Panel, Style, estimates, styles_of
from tasks.page.files import Record

COLOURS = {
    "iteration": 12,
    "unknown": 13,
    "known": 14,
    "noise_aware": 15,
    "ddnm": 16,
    "biharmonic": 17,
}
"""Told apart with any colour vision (templates/matrix.css)."""
OTHER_COLOURS = (7, 9, 1)
SMALL = (200, 172)
SMALL_TOP = 25

Series = tuple[Style, Sequence[Estimate], bool]
"""A method, its points, and whether a single point stands for all levels."""


def method_styles(record: Record) -> dict[str, Style]:
    """Look of each method, the same everywhere on the page."""
    return styles_of([m["name"] for m in record["methods"]], COLOURS, OTHER_COLOURS)


def small_panel(unit: str, across: Axis, up: Axis) -> Panel:
    """The frame of a small multiple, with the unit of the axis upwards over it."""
    return Panel(unit, across, replace(up, title=""), *SMALL, top=SMALL_TOP)


def lines(panel: Panel, series: Sequence[Series], *, behind: Sequence[str], about: str) -> str:
    """A panel of methods."""
    parts = list(behind)
    for style, points, everywhere in series:
        if everywhere and len(points) == 1 and points[0].y is not None:
            (x1, y), (x2, _y) = (panel.at((x, points[0].y)) for x in (panel.x.low, panel.x.high))
            parts.append(
                f'<g class="s{style.number} m{style.colour}"><polyline class="curve targets" '
                f'points="{x1:.1f},{y:.1f} {x2:.1f},{y:.1f}"/></g>'
            )
    drawn = [(style, points) for style, points, _everywhere in series]
    return panel.svg([*parts, *estimates(panel, drawn, apart=APART)], about)
