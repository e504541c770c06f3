"""Training images beside test images: what came back of both, and how strongly f contracts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from tasks.families.autoencoder.study.figure_specs import (
    TITLES,
    at_lowest,
    lowest,
    measure,
    method_styles,
    victims_of,
)
from tasks.families.autoencoder.study.tables import (
    SHARES,
    contraction_table,
    pooled,
    rates_table,
    triple,
)
from tasks.page.axes import Axis, round_axis
from tasks.page.charts import Style
from tasks.page.dotplots import MAX_MARKS, Lane, Mark, dotplot, side_lines
from tasks.page.files import Arrays, Record
from tasks.page.formats import NOTHING, names, percent, power, with_interval
from tasks.page.study_page import Drawing, Figure, Row

SPLITS = ("train", "test")
PERCENT = [(0.0, "0"), (0.25, "25"), (0.5, "50"), (0.75, "75"), (1.0, "100 %")]
VICTIM_STYLE = Style(0, 2, 0)
MOST_SPREAD = 50.0  # of radii on a plain axis


def control_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Shares of training and test images per method, by network (autoencoder paper, section 4)."""
    victims = victims_of(record, figure)
    cells = {
        (victim["name"], split): at_lowest(record, victim, split=split, sigma=0.0)
        for victim in victims
        for split in SPLITS
    }
    table = rates_table(figure["name"], [c for found in cells.values() for c in found], SHARES)
    rows = []
    for value in SHARES:
        panels = []
        for victim in victims:
            at, title = lowest(victim), victim["title"]
            title += f", loss {power(at['level'])}" if at else ""
            panels.append(Drawing(_control_panel(record, victim, value, cells), title))
        rows.append(Row(TITLES[value].capitalize(), "", panels))
    have = {victim["name"] for victim in victims}
    without = [victim["title"] for victim in record["victims"] if victim["name"] not in have]
    notes = [tested(record, victims)]
    notes += [f"Without test images: {'; '.join(without)}."] if without else []
    return Figure(figure, [table], rows, notes=notes)


def tested(record: Record, victims: Sequence[Record]) -> str:
    """A sentence on how many test images came back."""
    cells = [c for v in victims for c in at_lowest(record, v, split="test", sigma=0.0)]
    counts: dict[str, Mapping[str, int]] = {}
    for method in record["methods"]:
        if mine := [cell for cell in cells if cell["method"] == method["name"]]:
            counts[method["title"]] = pooled(mine)
    parts = []
    for key, word in (("n_accurate", "accurately"), ("n_approximate", "approximately")):
        some = [f"{of[key]} of {of['n']} with {t}" for t, of in counts.items() if of[key]]
        parts.append(f"{names(some)} came back {word}" if some else f"none came back {word}")
    n = sum(of["n"] for of in counts.values())
    return f"Of {n:,} attempts on test images, {'; '.join(parts)}."


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
        for split in SPLITS:
            mine = [c for c in cells[victim["name"], split] if c["method"] == method["name"]]
            known = [(cell["mask"], triple(cell, value)) for cell in mine]
            sides.append(
                [
                    Mark(
                        found[0], f"{masks.get(mask, mask)}, {split}: {with_interval(show, found)}"
                    )
                    for mask, found in known
                    if found[0] is not None
                ]
            )
            numbers.append(percent(pooled(mine)[value]))
        said.append(f"{method['title']}: training {numbers[0]}, test {numbers[1]}")
        title, style = side_lines(method["title"]), styles[method["name"]]
        lanes.append(Lane(title, style, sides[0], sides[1], (numbers[0], numbers[1])))
    if not lanes:
        return ""
    axis = Axis(0.0, 1.0, PERCENT, f"share, {TITLES[value]}")
    about = f"{TITLES[value]} of training and test images, {victim['title']}. {'; '.join(said)}"
    return dotplot(lanes, axis, at=None, description=about)


def contraction_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """The spectral radius at every image that was looked at, a lane per network."""
    victims = victims_of(record, figure)
    table = contraction_table(figure["name"], victims)
    radii = [r for r in table.columns["radius"] if isinstance(r, int | float)]
    if not radii:
        return Figure(figure, [table], notes=["No radius is known: nothing to draw."])
    lanes, said = [], []
    for victim in victims:
        rows = table.where("victim", victim["name"])
        sides, numbers = [], []
        for split in SPLITS:
            found = rows.where("split", split).columns
            sides.append(
                [
                    Mark(float(radius), f"{split} image {image}: {radius:.3g}")
                    for radius, image in zip(found["radius"], found["image"], strict=True)
                    if isinstance(radius, int | float)
                ]
            )
            below, n = sum(mark.x < 1 for mark in sides[-1]), len(sides[-1])
            numbers.append(f"{below} of {n}" if n else NOTHING)
        said.append(f"{victim['title']}: below 1 at {numbers[0]} training and {numbers[1]} test")
        title = side_lines(victim["title"])
        lanes.append(Lane(title, VICTIM_STYLE, sides[0], sides[1], (numbers[0], numbers[1])))
    about = f"Spectral radii. {'; '.join(said)} images."
    svg = dotplot(lanes, _radii_axis(radii), at=1.0, description=about)
    notes = ["At the right: at how many images the radius is below 1, of those looked at."]
    if max(len(side) for lane in lanes for side in (lane.train, lane.test)) > MAX_MARKS:
        notes.append(f"At most {MAX_MARKS} marks of a lane are drawn, evenly picked.")
    return Figure(figure, [table], [Row("", "", [Drawing(svg)])], notes=notes)


def _radii_axis(radii: Sequence[float]) -> Axis:
    title = "spectral radius of the Jacobian"
    if min(radii) <= 0 or max(radii) <= MOST_SPREAD * min(radii):
        return round_axis(title, [*radii, 1.0], from_zero=min(radii) >= 0)
    first = min(math.floor(math.log10(min(radii))), 0)
    last = max(math.ceil(math.log10(max(radii))), 0)
    step = max(1, (last - first) // 4)
    ticks = [(10.0**k, power(10.0**k)) for k in range(first, last + 1, step)]
    return Axis(10.0**first, 10.0 ** max(last, first + 1), ticks, f"{title} (log)", log=True)
