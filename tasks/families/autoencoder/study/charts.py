"""The charts of a recovery study as inline SVG: rates against the loss, and strips of marks.

They share the frame, the markers and the whiskers of the other pages. A method has its colour and
its marker on every figure; lines of methods that are given the mask are dashed by the style sheet.
The loss falls to the right, as -log10 on a plain axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from tasks.page.charts import N_MARKERS, WIDTH, Axis, Panel, Style, marker
from tasks.page.heatmaps import LETTER, SUPERSCRIPT, Estimate, estimates, fewer
from tasks.report.record import Record

COLOURS = {
    "iteration": 12,
    "unknown": 13,
    "known": 14,
    "noise_aware": 15,
    "ddnm": 16,
    "biharmonic": 17,
}
"""Told apart with any colour vision (templates/recovery.css)."""
OTHER_COLOURS = (7, 9, 1)
SMALL = (200, 172)
SMALL_TOP = 25
APART = 2.6
SIDE, END = 112.0, 62.0  # of a strip: room for the lane's name, and for its two numbers
LANE, BETWEEN, HEAD = 22.0, 9.0, 8.0
MAX_MARKS = 400
GOLDEN = 0.618034
CLOSE = 0.84  # of the room across: letters are larger on a phone


@dataclass(frozen=True)
class Mark:
    """A point of a lane and what a pointer on it says."""

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


def styles_of(record: Record) -> dict[str, Style]:
    """How each method is drawn, everywhere on the page."""
    styles: dict[str, Style] = {}
    n_others = 0
    for k, method in enumerate(record["methods"]):
        colour = COLOURS.get(method["name"])
        if colour is None:
            colour = OTHER_COLOURS[n_others % len(OTHER_COLOURS)]
            n_others += 1
        styles[method["name"]] = Style(k, colour, k % N_MARKERS)
    return styles


def power(value: float) -> str:
    """`10⁻⁸`, `5·10⁻⁴`: a level or a threshold."""
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, _e, exponent = f"{value:.2e}".partition("e")
    number = f"{float(mantissa):g}"
    raised = "10" + str(int(exponent)).translate(SUPERSCRIPT)
    return raised if number == "1" else f"{number}·{raised}"


def falling(value: float) -> float:
    """Where a positive loss or threshold lies on an axis on which it falls to the right."""
    return -math.log10(value)


def falling_axis(title: str, values: Sequence[float], width: int) -> Axis:
    """Powers of ten, falling to the right, with half a step of margin either side."""
    places = sorted({falling(value) for value in values}) or [0.0]
    labels = {falling(value): power(value) for value in values}
    margin = min((b - a for a, b in pairwise(places)), default=1.0) / 2
    margin = max(margin, 0.25)
    ticks = [(place, labels.get(place, "")) for place in places]
    axis = Axis(places[0] - margin, places[-1] + margin, ticks, title)
    said = dict(fewer(axis, int(CLOSE * width)).ticks)
    return replace(axis, ticks=[(place, said.get(place, "")) for place in places])


def small_panel(unit: str, across: Axis, up: Axis) -> Panel:
    """The frame of a small multiple, with the unit of the axis upwards over it."""
    return Panel(unit, across, replace(up, title=""), *SMALL, top=SMALL_TOP)


def lines(
    panel: Panel,
    series: Sequence[tuple[Style, Sequence[Estimate], bool]],
    *,
    behind: Sequence[str] = (),
    description: str,
) -> str:
    """A panel of methods: (style, points, whether a single point stands for all levels)."""
    parts = list(behind)
    for style, points, everywhere in series:
        if everywhere and len(points) == 1 and points[0].y is not None:
            (x1, y), (x2, _y) = (panel.at((x, points[0].y)) for x in (panel.x.low, panel.x.high))
            parts.append(
                f'<g class="s{style.number} m{style.colour}"><polyline class="curve targets" '
                f'points="{x1:.1f},{y:.1f} {x2:.1f},{y:.1f}"/></g>'
            )
    drawn = [(style, points) for style, points, _everywhere in series]
    return panel.svg([*parts, *estimates(panel, drawn, apart=APART)], description)


def not_reached(panel: Panel, level: float, half: float = 0.5) -> str:
    """A grey area around a level that the network did not reach."""
    x1, x2 = (panel.at((falling(level) + side, panel.y.low))[0] for side in (-half, half))
    top, base = (panel.at((panel.x.low, y))[1] for y in (panel.y.high, panel.y.low))
    return (
        f'<g><title>a loss of {power(level)} was not reached</title><rect class="unreached" '
        f'x="{x1:.1f}" y="{top:.1f}" width="{x2 - x1:.1f}" height="{base - top:.1f}"></rect></g>'
    )


def upright(panel: Panel, x: float) -> str:
    """A dotted line up from `x`."""
    at, base = panel.at((x, panel.y.low))
    _at, top = panel.at((x, panel.y.high))
    return f'<line class="threshold" x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{base:.1f}"/>'


def strip(lanes: Sequence[Lane], axis: Axis, *, at: float | None, description: str) -> str:
    """Lanes under each other: filled marks are training images, crosses test images.

    Marks of a lane are spread a little up and down. `at`: where a dotted line stands, if any.
    """
    step = 2 * LANE + BETWEEN
    height = HEAD + step * len(lanes) + 34
    base = HEAD + step * len(lanes)
    room = WIDTH - SIDE - END
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
    ]
    for value, label in axis.ticks:
        x = SIDE + axis.share(value) * room
        parts.append(
            f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 4:.1f}" y2="{base:.1f}"/>'
            f'<text x="{x:.1f}" y="{base + 14:.1f}" text-anchor="middle">{escape(label)}</text>'
        )
    if at is not None:
        x = SIDE + axis.share(at) * room
        parts.append(
            f'<line class="threshold" x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 4:.1f}" '
            f'y2="{base:.1f}"/>'
        )
    for k, lane in enumerate(lanes):
        parts += _lane(lane, axis, HEAD + step * k, room)
    parts.append(
        f'<text class="axis" x="{SIDE + room / 2:.0f}" y="{height - 4:.0f}" text-anchor="middle">'
        f"{escape(axis.title)}</text></svg>"
    )
    return "\n".join(parts)


def _lane(lane: Lane, axis: Axis, top: float, room: float) -> list[str]:
    middle = top + LANE
    first = middle + 4 - 6.5 * (len(lane.title) - 1)
    parts = [
        f'<text class="axis" x="0" y="{first + 13 * k:.1f}">{escape(line)}</text>'
        for k, line in enumerate(lane.title)
    ]
    parts.append(f'<line class="rule" x1="0" x2="{WIDTH}" y1="{top - 4:.1f}" y2="{top - 4:.1f}"/>')
    sides = ((lane.train, top + LANE / 2, "axis"), (lane.test, top + 1.5 * LANE, "test"))
    for (marks, y, kind), number in zip(sides, lane.numbers, strict=True):
        drawn = evenly(marks)
        for k, mark in enumerate(drawn):
            x = SIDE + axis.share(mark.x) * room
            at = y + (_spread(k, len(drawn)) - 0.5) * (LANE - 9)
            shape = _cross(x, at) if kind == "test" else marker(lane.style.marker, x, at)
            group = "" if kind == "test" else f' class="m{lane.style.colour}"'
            parts.append(f"<g{group}><title>{escape(mark.about)}</title>{shape}</g>")
        parts.append(
            f'<text class="{kind}" x="{WIDTH}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(number)}</text>"
        )
    return parts


def evenly(marks: Sequence[Mark]) -> list[Mark]:
    """At most MAX_MARKS of them, evenly picked, the first and the last among them."""
    if len(marks) <= MAX_MARKS:
        return list(marks)
    last = len(marks) - 1
    return [marks[round(k * last / (MAX_MARKS - 1))] for k in range(MAX_MARKS)]


def _spread(k: int, n: int) -> float:
    """Evenly from top to bottom for a few, scattered for many."""
    if n <= 12:
        return k / (n - 1) if n > 1 else 0.5
    return (k * GOLDEN) % 1


def _cross(x: float, y: float) -> str:
    return f'<path class="crosses" d="M{x - 2.5:.1f} {y - 2.5:.1f}l5 5m-5 0l5-5"/>'


def side_lines(title: str) -> list[str]:
    """A name in lines that fit beside a strip: broken at a comma, then at blanks."""
    most = int(SIDE / LETTER)
    lines: list[str] = []
    for piece in title.split(", "):
        words = piece.split()
        line = ""
        for word in words:
            longer = f"{line} {word}".strip()
            if len(longer) > most and line:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    shown = [line if len(line) <= most else line[: most - 1] + "…" for line in lines]
    return shown if len(shown) <= 3 else [*shown[:2], shown[2][: most - 1] + "…"]
