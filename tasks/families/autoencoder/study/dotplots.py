"""Training images beside test images: what came back of both, and how strongly f contracts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from tasks.families.autoencoder.study.charts import method_styles
from tasks.families.autoencoder.study.figure_specs import at_lowest, lowest
from tasks.families.autoencoder.study.headline import TITLES, measure, tested
from tasks.families.autoencoder.study.tables import contraction_table, pooled, rates_table, triple
from tasks.page.axes import Axis, round_axis
from tasks.page.charts import Style
from tasks.page.dotplots import MAX_MARKS, Lane, Mark, dotplot, side_lines
from tasks.page.files import Record
from tasks.page.formats import NOTHING, percent, power, with_interval
from tasks.page.study_page import Drawing, Figure, Row
from tasks.page.tables import Cell

SHARES = ("accurate", "approximate")
PERCENT = [(0.0, "0"), (0.25, "25"), (0.5, "50"), (0.75, "75"), (1.0, "100 %")]
VICTIM_COLOUR = 2
MOST_SPREAD = 50.0  # of radii on a plain axis


def control_figure(record: Record, figure: Record, victims: Sequence[Record]) -> Figure:
    """Shares of training and test images per method, by network (autoencoder paper, section 4)."""
    cells = {
        (victim["name"], split): at_lowest(record, victim, split=split, sigma=0.0)
        for victim in victims
        for split in ("train", "test")
    }
    table = rates_table(figure["name"], [c for found in cells.values() for c in found], SHARES)
    rows = [
        Row(
            TITLES[value].capitalize(),
            "",
            [
                Drawing(_control_panel(record, victim, value, cells), _at(victim))
                for victim in victims
            ],
        )
        for value in SHARES
    ]
    have = {victim["name"] for victim in victims}
    without = [victim["title"] for victim in record["victims"] if victim["name"] not in have]
    notes = [tested(record, victims)]
    notes += [f"Without test images: {'; '.join(without)}."] if without else []
    return Figure(figure, [table], rows, notes=notes)


def _at(victim: Record) -> str:
    at = lowest(victim)
    return f"{victim['title']}, loss {power(at['level'])}" if at else str(victim["title"])


def _control_panel(
    record: Record,
    victim: Record,
    value: str,
    cells: Mapping[tuple[str, str], Sequence[Record]],
) -> str:
    styles, masks = method_styles(record), {mask["name"]: mask["title"] for mask in record["masks"]}
    lanes, said, show = [], [], partial(measure, value)
    run = {cell["method"] for found in cells.values() for cell in found}
    for method in record["methods"]:
        if method["name"] not in run:
            continue
        sides: list[list[Mark]] = []
        numbers = []
        for split in ("train", "test"):
            mine = [c for c in cells[victim["name"], split] if c["method"] == method["name"]]
            sides.append(
                [
                    Mark(cell[value][0], f"{masks.get(cell['mask'], cell['mask'])}, {split}: "
                         f"{with_interval(show, triple(cell, value))}")
                    for cell in mine
                    if triple(cell, value)[0] is not None
                ]
            )  # fmt: skip
            numbers.append(percent(pooled(mine)[value]))
        said.append(f"{method['title']}: training {numbers[0]}, test {numbers[1]}")
        lanes.append(
            Lane(side_lines(method["title"]), styles[method["name"]], sides[0], sides[1],
                 (numbers[0], numbers[1]))
        )  # fmt: skip
    if not lanes:
        return ""
    axis = Axis(0.0, 1.0, PERCENT, f"share, {TITLES[value]}")
    about = f"{TITLES[value]} of training and test images, {victim['title']}. {'; '.join(said)}"
    return dotplot(lanes, axis, at=None, description=about)


def contraction_figure(figure: Record, victims: Sequence[Record]) -> Figure:
    """The spectral radius at every image that was looked at, a lane per network."""
    table = contraction_table(figure["name"], victims)
    radii = [r for r in table.columns["radius"] if isinstance(r, int | float)]
    if not radii:
        notes = ["No radius is known: nothing to draw."]
        return Figure(figure, [table], notes=notes)
    positive = [radius for radius in radii if radius > 0]
    log = len(positive) == len(radii) and max(radii) > MOST_SPREAD * min(radii)
    axis = _radii_axis(radii, log=log)
    lanes, said = [], []
    for victim in victims:
        rows = table.where("victim", victim["name"])
        sides, numbers = [], []
        for split in ("train", "test"):
            found = rows.where("split", split)
            known = [
                (float(radius), image)
                for radius, image in zip(
                    found.columns["radius"], found.columns["image"], strict=True
                )
                if isinstance(radius, int | float)
            ]
            sides.append([Mark(r, _said(split, image, r)) for r, image in known])
            below = sum(radius < 1 for radius, _image in known)
            numbers.append(f"{below} of {len(known)}" if known else NOTHING)
        said.append(f"{victim['title']}: below 1 at {numbers[0]} training and {numbers[1]} test")
        style = Style(0, VICTIM_COLOUR, 0)
        lanes.append(
            Lane(side_lines(victim["title"]), style, sides[0], sides[1], (numbers[0], numbers[1]))
        )
    svg = dotplot(lanes, axis, at=1.0, description=f"Spectral radii. {'; '.join(said)} images.")
    notes = ["At the right: at how many images the radius is below 1, of those looked at."]
    hidden = max(len(side) for lane in lanes for side in (lane.train, lane.test)) - MAX_MARKS
    if hidden > 0:
        notes.append(f"At most {MAX_MARKS} marks of a lane are drawn, evenly picked.")
    return Figure(figure, [table], [Row("", "", [Drawing(svg)])], notes=notes)


def _said(split: str, image: Cell, radius: float) -> str:
    return f"{split} image {image}: {radius:.3g}"


def _radii_axis(radii: Sequence[float], *, log: bool) -> Axis:
    title = "spectral radius of the Jacobian"
    if not log:
        return round_axis(title, [*radii, 1.0], from_zero=min(radii) >= 0)
    first, last = (f(math.log10(r)) for f, r in ((math.floor, min(radii)), (math.ceil, max(radii))))
    first, last = min(first, 0), max(last, 0)
    step = max(1, (last - first) // 4)
    ticks = [(10.0**k, power(10.0**k)) for k in range(first, last + 1, step)]
    return Axis(10.0**first, 10.0 ** max(last, first + 1), ticks, f"{title} (log)", log=True)
