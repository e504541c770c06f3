"""The figures of a recovery study, drawn from the record's list, each with its table.

Rates are drawn against the loss, which falls to the right. A method has the same colour and marker
in every figure; the style sheet dashes the lines of methods that are given the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.families.autoencoder.study.figure_specs import (
    SHARES,
    TITLES,
    VALUES,
    at_lowest,
    cells_of,
    group_name,
    incomplete,
    lowest,
    measure,
    method_styles,
    pooled,
    psnr,
    rates_table,
    triple,
    unreached,
    victim_note,
    victims_of,
)
from tasks.page.charts import (
    APART,
    PERCENT,
    Axis,
    Estimate,
    Panel,
    Style,
    estimates,
    falling,
    falling_axis,
    round_axis,
)
from tasks.page.files import Arrays, Cell, Record, table_of
from tasks.page.formats import (
    NOTHING,
    brackets,
    decibels,
    names,
    percent,
    power,
    with_interval,
)
from tasks.page.heatmaps import MAX_MARKS, Lane, Mark, dotplot, side_lines
from tasks.page.pictures import data_uri
from tasks.page.study_page import Draw, Drawing, Figure, Row

UNITS = {"accurate": "%", "approximate": "%", "psnr": "dB"}
PERCENT_AXIS = Axis(0.0, 1.0, PERCENT, "")
WIDTH, HEIGHT, TOP = 200, 172, 25
SPLITS = ("train", "test")
QUARTERS = [(0.0, "0"), (0.25, "25"), (0.5, "50"), (0.75, "75"), (1.0, "100 %")]
KNOWN, MISSING = (236, 231, 220), (70, 65, 58)

Point = Callable[[Record, Record], Estimate]
"""Makes the point of a method from a row of the table."""


def rates_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """A value by train loss, a panel per network and mask (autoencoder paper, figures 3, F.1,
    F.2)."""
    value, sigma = figure["value"], figure["sigma"]
    victims = victims_of(record, figure["victims"])
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
            panels.append(Drawing(svg, mask["title"], icon=_mask_tile(pictures, mask["name"])))
        rows.append(Row(victim["title"], victim_note(victim), panels))
    notes = incomplete(record, victims, cells)
    if value != "psnr" and not any(row[value] for row in found):
        notes.insert(0, f"No image reaches {TITLES[value]} in any of these cells.")
    more = {"unreached": any(map(unreached, victims))}
    return Figure(figure, [table], rows, _legend(record, cells), notes, more)


def noise_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """The three values by train loss with noise, a row per network and mask (G.1)."""
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
            panels = []
            for value in VALUES:
                svg = _rates_panel(record, victim, title, value, mine, panel=frames[value])
                panels.append(Drawing(svg, TITLES[value].capitalize().replace("psnr", "PSNR")))
            rows.append(Row(f"{victim['title']}, {title}", victim_note(victim), panels))
    notes = [] if rows else ["No cell has this noise."]
    more = {"unreached": any(map(unreached, victims))}
    return Figure(figure, [table], rows, _legend(record, cells), notes, more)


def _of(rows: Iterable[Record], **where: str) -> list[Record]:
    return [row for row in rows if all(row[key] == at for key, at in where.items())]


def _frames(
    victims: Sequence[Record], rows: Sequence[Record], values: Sequence[str]
) -> dict[str, Panel]:
    """The frame of each value's panels, the same for all networks and masks of a figure."""
    levels = {level for victim in victims for level in victim["wanted"]}
    levels |= {at["level"] for victim in victims for at in victim["levels"]}
    across = falling_axis("train loss", [level for level in levels if level > 0], WIDTH)
    ends = [row.get(f"psnr{end}") for row in rows for end in ("", " low", " high")]
    up = {"psnr": round_axis("", [end for end in ends if end is not None])}
    return {
        value: Panel(UNITS[value], across, up.get(value, PERCENT_AXIS), WIDTH, HEIGHT, top=TOP)
        for value in values
    }


def _rates_panel(
    record: Record, victim: Record, mask: str, value: str, rows: Sequence[Record], *, panel: Panel
) -> str:
    """Draw the panel of one network and mask; empty if nothing was run."""
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
    about = f"{TITLES[value]} by train loss, {victim['title']}, {mask}"
    return _lines(record, panel, known, point, behind=grey, about=about, level=True)


def _lines(
    record: Record,
    panel: Panel,
    rows: Sequence[Record],
    point: Point,
    *,
    behind: Sequence[str],
    about: str,
    level: bool = False,
) -> str:
    """Draw a line per method; with `level`, a generic method's single point becomes a horizontal
    line, since it holds for all losses."""
    styles, parts, words = method_styles(record), list(behind), []
    drawn: list[tuple[Style, list[Estimate]]] = []
    for method in record["methods"]:
        style = styles[method["name"]]
        points = [point(method, row) for row in _of(rows, method=method["name"])]
        words += [at.about for at in points]
        points.sort(key=lambda at: at.x)
        drawn.append((style, points))
        if level and method["generic"] and len(points) == 1 and points[0].y is not None:
            (x1, y), (x2, _y) = (panel.at((x, points[0].y)) for x in (panel.x.low, panel.x.high))
            parts.append(
                f'<g class="s{style.number} m{style.colour}"><polyline class="curve targets" '
                f'points="{x1:.1f},{y:.1f} {x2:.1f},{y:.1f}"/></g>'
            )
    parts += estimates(panel, drawn, apart=APART)
    return panel.svg(parts, f"{about}. {'; '.join(words)}")


def thresholds_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Share recovered by the error allowed, a panel per level (autoencoder paper, figure F.3)."""
    (victim,) = victims_of(record, [figure["victim"]])
    mask = {mask["name"]: mask for mask in record["masks"]}[figure["mask"]]
    where = {"victim": victim["name"], "mask": mask["name"], "sigma": figure["sigma"]}
    cells, limits = cells_of(record, split="train", **where), record["thresholds"]
    keys = ("victim", "mask", "sigma", "level", "loss", "method")
    table_rows: list[dict[str, Cell]] = [
        {key: cell[key] for key in keys}
        | {"threshold": threshold, "n": cell["n"], "count": count}
        | {"share": count / cell["n"] if cell["n"] else None}
        for cell in cells
        for threshold, count in zip(limits["all"], cell["by_threshold"], strict=True)
    ]
    table = table_of(figure["name"], table_rows, (*keys, "threshold", "n", "count", "share"))
    found = list(table.rows())
    across = falling_axis("error allowed", limits["all"], WIDTH)
    panel = Panel("%", across, PERCENT_AXIS, WIDTH, HEIGHT, top=TOP)
    dotted = [panel.vertical(falling(limits[key])) for key in ("approximate", "accurate")]

    def point(method: Record, row: Record) -> Estimate:
        about = (
            f"{method['title']}, error below {power(row['threshold'])}: {row['count']} of "
            f"{row['n']}, {measure('accurate', row['share'])}"
        )
        return Estimate(falling(row["threshold"]), row["share"], None, None, about)

    panels = []
    for level in sorted((at["level"] for at in victim["levels"]), reverse=True):
        mine = [row for row in found if row["level"] == level]
        have = {row["method"] for row in mine}
        for method in record["methods"]:
            if method["generic"] and method["name"] not in have:
                others = _of(found, method=method["name"])
                mine += [row for row in others if row["level"] == others[0]["level"]]
        about = f"Share recovered by the error allowed, at a loss of {power(level)}"
        known = [row for row in mine if row["share"] is not None]
        svg = _lines(record, panel, known, point, behind=dotted, about=about) if mine else ""
        panels.append(Drawing(svg, f"loss {power(level)}"))
    row = Row(f"{victim['title']}, {mask['title']}", victim_note(victim), panels)
    notes = incomplete(record, [victim], cells)
    return Figure(figure, [table], [row], _legend(record, cells), notes)


def table_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """A table of one network's value by mask and method (autoencoder paper, tables 1 and 2)."""
    (victim,), value = victims_of(record, [figure["victim"]]), figure["value"]
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
    heads = [(mask["title"], _mask_tile(pictures, mask["name"])) for mask in masks]
    shown = {**victim, "levels": [lowest(victim)]}
    notes = [victim_note(victim) + ".", *incomplete(record, [shown], cells)]
    return Figure(figure, [table], notes=notes, more={"grid": (heads, body)})


def _legend(record: Record, cells: Sequence[Record]) -> list[tuple[Style, str]]:
    have, styles = {cell["method"] for cell in cells}, method_styles(record)
    return [(styles[m["name"]], m["title"]) for m in record["methods"] if m["name"] in have]


def control_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Shares of training and of test images, per method and network (autoencoder paper,
    section 4)."""
    victims = victims_of(record, figure["victims"])
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
            sides = {split: cells[victim["name"], split] for split in SPLITS}
            panels.append(Drawing(_control_panel(record, victim, value, sides), title))
        rows.append(Row(TITLES[value].capitalize(), "", panels))
    attempts: dict[str, Mapping[str, int]] = {}
    tested = [cell for victim in victims for cell in cells[victim["name"], "test"]]
    for method in record["methods"]:
        if mine := [cell for cell in tested if cell["method"] == method["name"]]:
            attempts[method["title"]] = pooled(mine)
    parts = []
    for key, word in (("n_accurate", "accurately"), ("n_approximate", "approximately")):
        some = [f"{of[key]} of {of['n']} with {t}" for t, of in attempts.items() if of[key]]
        parts.append(f"{names(some)} came back {word}" if some else f"none came back {word}")
    n = sum(of["n"] for of in attempts.values())
    notes = [f"Of {n:,} attempts on test images, {'; '.join(parts)}."]
    have = {victim["name"] for victim in victims}
    without = [victim["title"] for victim in record["victims"] if victim["name"] not in have]
    notes += [f"Without test images: {'; '.join(without)}."] if without else []
    return Figure(figure, [table], rows, notes=notes)


def _control_panel(
    record: Record, victim: Record, value: str, cells: Mapping[str, Sequence[Record]]
) -> str:
    """Draw a lane per method with a mark per mask, for the cells of both splits."""
    styles, masks = method_styles(record), {mask["name"]: mask["title"] for mask in record["masks"]}
    lanes, words, show = [], [], partial(measure, value)
    for method in record["methods"]:
        sides: list[list[Mark]] = []
        numbers: list[str] = []
        for split in SPLITS:
            mine = _of(cells[split], method=method["name"])
            marks = []
            for cell in mine:
                if (found := triple(cell, value))[0] is not None:
                    title = masks.get(cell["mask"], cell["mask"])
                    marks.append(Mark(found[0], f"{title}, {split}: {with_interval(show, found)}"))
            sides.append(marks)
            numbers.append(percent(pooled(mine)[value]))
        if not any(sides):
            continue
        words.append(f"{method['title']}: training {numbers[0]}, test {numbers[1]}")
        title, style = side_lines(method["title"]), styles[method["name"]]
        lanes.append(Lane(title, style, sides[0], sides[1], (numbers[0], numbers[1])))
    if not lanes:
        return ""
    axis = Axis(0.0, 1.0, QUARTERS, f"share, {TITLES[value]}")
    about = f"{TITLES[value]} of training and test images, {victim['title']}. {'; '.join(words)}"
    return dotplot(lanes, axis, at=None, description=about)


def contraction_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """The spectral radius at every examined image, a lane per network."""
    victims = victims_of(record, figure["victims"])
    table_rows: list[dict[str, Cell]] = [
        {"victim": victim["name"], "split": split, "image": k, "radius": radius}
        for victim in victims
        for split in SPLITS
        for k, radius in enumerate((victim["contraction"] or {}).get(split) or ())
    ]
    table = table_of(figure["name"], table_rows, ("victim", "split", "image", "radius"))
    known = [row for row in table.rows() if isinstance(row["radius"], int | float)]
    radii = [row["radius"] for row in known]
    if not radii:
        return Figure(figure, [table], notes=["No radius is known: nothing to draw."])
    lanes, words = [], []
    for victim in victims:
        sides, numbers = [], []
        for split in SPLITS:
            marks = [
                Mark(float(r["radius"]), f"{split} image {r['image']}: {r['radius']:.3g}")
                for r in _of(known, victim=victim["name"], split=split)
            ]
            below = sum(mark.x < 1 for mark in marks)
            sides.append(marks)
            numbers.append(f"{below} of {len(marks)}" if marks else NOTHING)
        words.append(f"{victim['title']}: below 1 at {numbers[0]} training and {numbers[1]} test")
        lines, style = side_lines(victim["title"]), Style(0, 2, 0)
        lanes.append(Lane(lines, style, sides[0], sides[1], (numbers[0], numbers[1])))
    about = f"Spectral radii. {'; '.join(words)} images."
    title, low, high = "spectral radius of the Jacobian", min(radii), max(radii)
    axis = round_axis(title, [*radii, 1.0], from_zero=low >= 0)
    if low > 0 and high > 50 * low:
        first, last = min(math.floor(math.log10(low)), 0), max(math.ceil(math.log10(high)), 0)
        powers = range(first, last + 1, max(1, (last - first) // 4))
        ticks = [(10.0**k, power(10.0**k)) for k in powers]
        axis = Axis(10.0**first, 10.0 ** max(last, first + 1), ticks, f"{title} (log)", log=True)
    svg = dotplot(lanes, axis, at=1.0, description=about)
    notes = ["At the right: at how many images the radius is below 1, of those looked at."]
    if max(len(side) for lane in lanes for side in (lane.train, lane.test)) > MAX_MARKS:
        notes.append(f"At most {MAX_MARKS} marks of a lane are drawn, evenly picked.")
    return Figure(figure, [table], [Row("", "", [Drawing(svg)])], notes=notes)


def masks_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """Every mask as a picture, with its title and its share of known pixels (autoencoder paper,
    figure 3)."""
    rows: list[dict[str, Cell]] = [
        {"mask": mask["name"], "title": mask["title"], "known_share": mask["known_share"]}
        for mask in record["masks"]
    ]
    tiles = [
        {
            "uri": _mask_tile(pictures, mask["name"]),
            "title": mask["title"],
            "known": f"{percent(mask['known_share'])} known",
        }
        for mask in record["masks"]
    ]
    table = table_of(figure["name"], rows, ("mask", "title", "known_share"))
    return Figure(figure, [table], more={"tiles": tiles})


def examples_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """Originals, degraded images and recoveries (autoencoder paper, figure 1): a row per image, a
    column per method and estimated mask.

    Raises ValueError if a group does not have as many pictures as the record says.
    """
    titles = {victim["name"]: victim["title"] for victim in record["victims"]}
    masks = {mask["name"]: mask["title"] for mask in record["masks"]}
    groups = []
    rows: list[dict[str, Cell]] = []
    for k, shown in enumerate(record["shown"]):
        for method in record["methods"]:
            errors = pictures.get(f"{group_name(shown)}/{method['name']}/mse", ())
            for image, error in zip(shown["rows"], np.asarray(errors).tolist(), strict=False):
                mse = error if math.isfinite(error) else None
                rows.append(
                    {key: shown[key] for key in ("victim", "level", "mask", "sigma")}
                    | {"image": image, "method": method["name"], "mse": mse, "psnr": psnr(mse)}
                )
        title = (
            f"{titles.get(shown['victim'], shown['victim'])}, loss {power(shown['level'])}; "
            f"{masks.get(shown['mask'], shown['mask'])}"
        )
        columns = list(_columns(record, pictures, shown))
        there = {column["key"] for column in columns}
        absent = [m["title"] for m in record["methods"] if m["name"] not in there]
        groups.append(
            {
                "title": title + (f"; noise {shown['sigma']:g}" if shown["sigma"] else ""),
                "open": k < 2,
                "columns": columns,
                "rows": [
                    {"image": image, "tiles": [column["tiles"][row] for column in columns]}
                    for row, image in enumerate(shown["rows"])
                ],
                "absent": absent if columns else [],
            }
        )
    keys = ("victim", "level", "mask", "sigma", "image", "method", "mse", "psnr")
    return Figure(figure, [table_of(figure["name"], rows, keys)], more={"groups": groups})


def _columns(record: Record, pictures: Arrays, shown: Record) -> list[dict[str, Any]]:
    """The columns whose pictures are stored; none without the originals."""
    group, images, methods = group_name(shown), shown["rows"], record["methods"]
    if f"{group}/original" not in pictures:
        return []

    def of_images(name: str) -> npt.NDArray[Any]:
        array = pictures[name]
        if len(array) != len(images):
            raise ValueError(
                f"the record shows {len(images)} images of {name.rpartition('/')[0]!r}, but the "
                f"pictures hold {len(array)} in {name!r}; make the study's record again"
            )
        return array

    wanted: list[tuple[str, str, str, Callable[[npt.NDArray[Any]], str]]] = [
        ("original", "original", "image {0}: {1}", data_uri),
        ("degraded", "what was left", "image {0}: {1}", data_uri),
        *((m["name"], m["title"], "image {0}: {1}", data_uri) for m in methods),
    ]
    for m in methods:
        title = f"mask by {m['title'].partition(',')[0]}"
        wanted.append((f"mask/{m['name']}", title, "{1}, image {0}", _mask_uri))
    columns = []
    for key, title, alt, uri in wanted:
        name = f"{group}/{key}"
        if name not in pictures:
            continue
        tiles: list[dict[str, str]] = [
            {"uri": uri(picture), "alt": alt.format(image, title)}
            for picture, image in zip(of_images(name), images, strict=True)
        ]
        columns.append({"key": key, "title": title, "tiles": tiles})
        if f"{name}/mse" in pictures:
            for tile, error in zip(tiles, of_images(f"{name}/mse").tolist(), strict=True):
                thresholds, found = record["thresholds"], psnr(error)
                kind, about = "", "no error known"
                if found is not None:
                    kind = "approximate" if error < thresholds["approximate"] else ""
                    kind = "accurate" if error < thresholds["accurate"] else kind
                    about = f"mean square error {error:.2g}"
                tile.update({"score": decibels(found), "kind": kind, "about": about})
    return columns


def _mask_tile(pictures: Arrays, name: str) -> str:
    """A mask as a URL; empty if it is not stored."""
    mask = pictures.get(f"masks/{name}")
    return "" if mask is None else _mask_uri(mask)


def _mask_uri(mask: npt.NDArray[Any]) -> str:
    """A mask as the URL of a picture: known pixels light, missing ones dark."""
    colours = np.where(mask.astype(bool)[..., None], KNOWN, MISSING).astype(np.uint8)
    return data_uri(colours.transpose(2, 0, 1))


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
