"""Dotplots as inline SVG: lanes of marks, those of training images above those of test images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tasks.page.axes import LETTER, WIDTH, Axis
from tasks.page.charts import Style, drawing, evenly, marker, rule, words
from tasks.page.formats import cut

SIDE, END = 112.0, 62.0  # room for the lane's name, and for its two numbers
LANE, BETWEEN, HEAD = 22.0, 9.0, 8.0
MAX_MARKS = 400
GOLDEN = 0.618034


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


def dotplot(lanes: Sequence[Lane], axis: Axis, *, at: float | None, description: str) -> str:
    """Lanes under each other: filled marks are training images, crosses test images.

    Marks of a lane are spread a little up and down. `at`: where a dotted line stands, if any.
    """
    step = 2 * LANE + BETWEEN
    height = HEAD + step * len(lanes) + 34
    room = WIDTH - SIDE - END
    top, base = HEAD - 4, HEAD + step * len(lanes)
    parts = []
    for value, label in axis.ticks:
        x = SIDE + axis.share(value) * room
        parts += [rule("rule", x, top, x, base), words(label, x, base + 14, at="middle")]
    if at is not None:
        x = SIDE + axis.share(at) * room
        parts.append(rule("threshold", x, top, x, base))
    for k, lane in enumerate(lanes):
        parts += _lane(lane, axis, HEAD + step * k, room)
    parts.append(words(axis.title, SIDE + room / 2, height - 4, "axis", at="middle"))
    return drawing(WIDTH, height, parts, description)


def _lane(lane: Lane, axis: Axis, top: float, room: float) -> list[str]:
    first = top + LANE + 4 - 6.5 * (len(lane.title) - 1)
    parts = [words(line, 0, first + 13 * k, "axis") for k, line in enumerate(lane.title)]
    parts.append(rule("rule", 0, top - 4, WIDTH, top - 4))
    sides = ((lane.train, top + LANE / 2, "axis"), (lane.test, top + 1.5 * LANE, "test"))
    for (marks, y, kind), number in zip(sides, lane.numbers, strict=True):
        drawn = evenly(marks, MAX_MARKS)
        for k, mark in enumerate(drawn):
            x = SIDE + axis.share(mark.x) * room
            at = y + (_spread(k, len(drawn)) - 0.5) * (LANE - 9)
            shape = f'<path class="crosses" d="M{x - 2.5:.1f} {at - 2.5:.1f}l5 5m-5 0l5-5"/>'
            group = ""
            if kind != "test":
                shape = marker(lane.style.marker, x, at)
                group = f' class="m{lane.style.colour}"'
            parts.append(f"<g{group}><title>{escape(mark.about)}</title>{shape}</g>")
        parts.append(words(number, WIDTH, y + 4, kind, at="end"))
    return parts


def _spread(k: int, n: int) -> float:
    """Evenly from top to bottom for a few, scattered for many."""
    if n <= 12:
        return k / (n - 1) if n > 1 else 0.5
    return (k * GOLDEN) % 1


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
    shown = [cut(line, most) for line in lines]
    return shown if len(shown) <= 3 else [*shown[:2], shown[2][: most - 1] + "…"]
