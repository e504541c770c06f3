"""The figures of a recovery study: from its record's list to drawings, each with its table.

Rates stand against the loss, which falls to the right. A method has its colour and its marker on
every figure; lines of methods that are given the mask are dashed by the style sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from tasks.families.autoencoder.study.dotplots import contraction_figure, control_figure
from tasks.families.autoencoder.study.figure_specs import (
    TITLES,
    VALUES,
    at_lowest,
    cells_of,
    incomplete,
    lowest,
    measure,
    method_styles,
    unreached,
    victim_note,
    victims_of,
)
from tasks.families.autoencoder.study.image_grids import examples_figure, mask_tile, masks_figure
from tasks.families.autoencoder.study.tables import rates_table, thresholds_table, triple
from tasks.page.axes import PERCENT, Axis, falling, falling_axis, round_axis
from tasks.page.charts import APART, Estimate, Panel, Style, estimates
from tasks.page.files import Arrays, Record
from tasks.page.formats import NOTHING, brackets, power, with_interval
from tasks.page.study_page import Draw, Drawing, Figure, Row, entry_of

UNITS = {"accurate": "%", "approximate": "%", "psnr": "dB"}
SHARES = Axis(0.0, 1.0, PERCENT, "")
WIDTH, HEIGHT, TOP = 200, 172, 25

Series = tuple[Style, Sequence[Estimate], bool]
"""A method, its points, and whether a single point stands for all levels."""


def rates_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """A value by train loss, network and mask (autoencoder paper, figures 3, F.1, F.2)."""
    value, sigma, victims = _value(figure), figure["sigma"], victims_of(record, figure)
    cells = [
        cell
        for victim in victims
        for cell in cells_of(record, victim=victim["name"], split="train", sigma=sigma)
    ]
    table = rates_table(figure["name"], cells, [value])
    found = list(table.rows())
    frame = _frames(victims, found, [value])[value]
    rows = []
    for victim in victims:
        panels = []
        for mask in record["masks"]:
            mine = _of(found, victim=victim["name"], mask=mask["name"])
            svg = _rates_panel(record, victim, mask["title"], value, mine, panel=frame)
            panels.append(Drawing(svg, mask["title"], icon=mask_tile(pictures, mask["name"])))
        rows.append(Row(victim["title"], victim_note(victim), panels))
    notes = incomplete(record, victims, cells)
    if value != "psnr" and not any(row[value] for row in found):
        notes.insert(0, f"No image reaches {TITLES[value]} in any of these cells.")
    more = {"unreached": any(map(unreached, victims))}
    return Figure(figure, [table], rows, _legend(record, cells), notes, more)


def noise_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """The three values by train loss for cells with noise: a row per network and mask (G.1)."""
    cells = cells_of(record, split="train", sigma=figure["sigma"])
    table = rates_table(figure["name"], cells, VALUES)
    found = list(table.rows())
    titles = {mask["name"]: mask["title"] for mask in record["masks"]}
    with_cells = {cell["victim"] for cell in cells}
    victims = [victim for victim in record["victims"] if victim["name"] in with_cells]
    frames = _frames(victims, found, VALUES)
    rows = []
    for victim in victims:
        for mask in dict.fromkeys(c["mask"] for c in cells if c["victim"] == victim["name"]):
            mine, title = _of(found, victim=victim["name"], mask=mask), titles.get(mask, mask)
            panels = [
                Drawing(
                    _rates_panel(record, victim, title, value, mine, panel=frames[value]),
                    TITLES[value].capitalize().replace("psnr", "PSNR"),
                )
                for value in VALUES
            ]
            rows.append(Row(f"{victim['title']}, {title}", victim_note(victim), panels))
    notes = [] if rows else ["No cell has this noise."]
    more = {"unreached": any(map(unreached, victims))}
    return Figure(figure, [table], rows, _legend(record, cells), notes, more)


def _of(rows: Iterable[Record], **where: str) -> list[Record]:
    return [row for row in rows if all(row[key] == at for key, at in where.items())]


def _rates_panel(
    record: Record, victim: Record, mask: str, value: str, rows: Sequence[Record], *, panel: Panel
) -> str:
    """A panel of one network and mask; empty if nothing of it was run."""
    known = [row for row in rows if row[value] is not None]
    if not known:
        return ""

    def point(method: Record, row: Record) -> Estimate:
        ends = row[f"{value} low"], row[f"{value} high"]
        at = f" at a loss of {power(row['level'])}" if row["level"] else ""
        text = with_interval(partial(measure, value), (row[value], *ends))
        places = [falling(loss) for loss in (row["loss"], row["level"]) if loss and loss > 0]
        x = places[0] if places else (panel.x.low + panel.x.high) / 2
        return Estimate(x, row[value], *ends, f"{method['title']}{at}: {text}")

    grey = [
        panel.area(at - 0.5, at + 0.5, f"a loss of {power(level)} was not reached")
        for level in unreached(victim)
        for at in [falling(level)]
    ]
    series, said = _series(record, known, point)
    about = f"{TITLES[value]} by train loss, {victim['title']}, {mask}. {said}"
    return _lines(panel, series, behind=grey, about=about)


def _series(
    record: Record, rows: Sequence[Record], point: Callable[[Record, Record], Estimate]
) -> tuple[list[Series], str]:
    """(each method's points by x, all that is said of them); `point` is of (method, row)."""
    styles, said = method_styles(record), []
    series: list[Series] = []
    for method in record["methods"]:
        points = [point(method, row) for row in _of(rows, method=method["name"])]
        said += [at.about for at in points]
        points.sort(key=lambda at: at.x)
        series.append((styles[method["name"]], points, method["generic"]))
    return series, "; ".join(said)


def _lines(panel: Panel, series: Sequence[Series], *, behind: Sequence[str], about: str) -> str:
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


def _small_panel(unit: str, across: Axis, up: Axis) -> Panel:
    """The frame of a small multiple, with the unit of the axis upwards over it."""
    return Panel(unit, across, replace(up, title=""), WIDTH, HEIGHT, top=TOP)


def _frames(
    victims: Sequence[Record], rows: Sequence[Record], values: Sequence[str]
) -> dict[str, Panel]:
    """The frame of a value's panels, the same for all networks and masks of a figure."""
    levels = {level for victim in victims for level in victim["wanted"]}
    levels |= {at["level"] for victim in victims for at in victim["levels"]}
    across = falling_axis("train loss", [level for level in levels if level > 0], WIDTH)
    ends = [row.get(f"psnr{end}") for row in rows for end in ("", " low", " high")]
    psnr = round_axis("", [end for end in ends if end is not None])
    return {
        value: _small_panel(UNITS[value], across, psnr if value == "psnr" else SHARES)
        for value in values
    }


def thresholds_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Share recovered by the error allowed, a panel per level (autoencoder paper, figure F.3)."""
    victim = entry_of(record, figure, "victim", figure["victim"])
    mask = entry_of(record, figure, "mask", figure["mask"])
    where = {"victim": victim["name"], "mask": mask["name"], "sigma": figure["sigma"]}
    cells = cells_of(record, split="train", **where)
    table = thresholds_table(figure["name"], record, cells)
    found = list(table.rows())
    across = falling_axis("error allowed", record["thresholds"]["all"], WIDTH)
    panels = []
    for level in sorted((at["level"] for at in victim["levels"]), reverse=True):
        mine = [row for row in found if row["level"] == level]
        have = {row["method"] for row in mine}
        for method in record["methods"]:
            if method["generic"] and method["name"] not in have:
                others = _of(found, method=method["name"])
                mine += [row for row in others if row["level"] == others[0]["level"]]
        svg = _thresholds_panel(record, mine, across, level) if mine else ""
        panels.append(Drawing(svg, f"loss {power(level)}"))
    row = Row(f"{victim['title']}, {mask['title']}", victim_note(victim), panels)
    notes = incomplete(record, [victim], cells)
    return Figure(figure, [table], [row], _legend(record, cells), notes)


def _thresholds_panel(record: Record, rows: Sequence[Record], across: Axis, level: float) -> str:
    def point(method: Record, row: Record) -> Estimate:
        about = (
            f"{method['title']}, error below {power(row['threshold'])}: {row['count']} of "
            f"{row['n']}, {measure('accurate', row['share'])}"
        )
        return Estimate(falling(row["threshold"]), row["share"], None, None, about)

    panel = _small_panel("%", across, SHARES)
    series, said = _series(record, [row for row in rows if row["share"] is not None], point)
    series = [(style, points, False) for style, points, _everywhere in series]
    limits = [record["thresholds"][key] for key in ("approximate", "accurate")]
    dotted = [panel.vertical(falling(limit)) for limit in limits]
    about = f"Share recovered by the error allowed, at a loss of {power(level)}. {said}"
    return _lines(panel, series, behind=dotted, about=about)


def table_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """A value of one network by mask and method (autoencoder paper, tables 1 and 2)."""
    victim, value = entry_of(record, figure, "victim", figure["victim"]), _value(figure)
    show = partial(measure, value)
    cells = at_lowest(record, victim, split="train", sigma=0.0)
    table = rates_table(figure["name"], cells, [value])
    masks = [mask for mask in record["masks"] if mask["name"] in {cell["mask"] for cell in cells}]
    body = []
    for method in record["methods"]:
        texts = []
        for mask in masks:
            found = _of(cells, mask=mask["name"], method=method["name"])
            share, low, high = triple(found[0], value) if found else (None, None, None)
            texts.append((show(share), brackets(show, low, high)))
        if any(text != NOTHING for text, _ends in texts):
            body.append((method["title"], texts))
    heads = [(mask["title"], mask_tile(pictures, mask["name"])) for mask in masks]
    shown = {**victim, "levels": [lowest(victim)]}
    notes = [victim_note(victim) + ".", *incomplete(record, [shown], cells)]
    return Figure(figure, [table], notes=notes, more={"grid": (heads, body)})


def _value(figure: Record) -> str:
    value = str(figure["value"])
    if value not in VALUES:
        raise ValueError(
            f"figure {figure['name']!r} shows value {value!r}; expected one of {VALUES}"
        )
    return value


def _legend(record: Record, cells: Sequence[Record]) -> list[tuple[Style, str]]:
    have, styles = {cell["method"] for cell in cells}, method_styles(record)
    return [(styles[m["name"]], m["title"]) for m in record["methods"] if m["name"] in have]


KINDS: dict[str, Draw] = {
    "masks": masks_figure,
    "plates": examples_figure,
    "rates": rates_figure,
    "thresholds": thresholds_figure,
    "table": table_figure,
    "control": control_figure,
    "contraction": contraction_figure,
    "noise": noise_figure,
}
