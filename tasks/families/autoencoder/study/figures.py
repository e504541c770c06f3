"""The figures of a recovery study: from its record's list to drawings, each with its table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks.families.autoencoder.study.charts import (
    falling,
    falling_axis,
    lines,
    not_reached,
    power,
    small_panel,
    styles_of,
    upright,
)
from tasks.families.autoencoder.study.dotplots import contraction_figure, control_figure
from tasks.families.autoencoder.study.figure_specs import (
    VALUES,
    at_lowest,
    cells_of,
    lowest,
    unreached,
)
from tasks.families.autoencoder.study.headline import (
    TITLES,
    incomplete,
    measure,
    victim_note,
    with_interval,
)
from tasks.families.autoencoder.study.image_grids import groups, mask_tile, mask_tiles
from tasks.families.autoencoder.study.tables import (
    Arrays,
    masks_table,
    plates_table,
    rates_table,
    thresholds_table,
    triple,
)
from tasks.page.charts import Axis, Style, round_axis
from tasks.page.charts import Panel as Frame
from tasks.page.heatmaps import Estimate
from tasks.report.record import Record
from tasks.study.figure_types import Panel, RecoveryFigure, Row
from tasks.study.tables import rows_of

OWN_TABLES = ("summary", "cells", "victims", "claims")
UNITS = {"accurate": "%", "approximate": "%", "psnr": "dB"}
PERCENT = [(0.0, "0"), (0.5, "50"), (1.0, "100")]
WIDTH = 200


def recovery_figures(record: Record, pictures: Arrays) -> list[RecoveryFigure]:
    """The record's figures in their order.

    Raises ValueError for a kind, a victim or a value that is not there, for a name that is no
    file's or is used twice, and for pictures that do not belong to the record.
    """
    names = [figure["name"] for figure in record["figures"]]
    made = []
    for figure in record["figures"]:
        name = figure["name"]
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name in OWN_TABLES:
            raise ValueError(
                f"a figure is named {name!r}; expected letters, digits and hyphens, and none of "
                f"{', '.join(OWN_TABLES)}, since its numbers are kept in a file of that name"
            )
        if names.count(name) > 1:
            raise ValueError(f"two figures are named {name!r}; give each its own name")
        if figure["kind"] not in DRAW:
            raise ValueError(
                f"figure {name!r} is of kind {figure['kind']!r}; expected one of {sorted(DRAW)}"
            )
        made.append(DRAW[figure["kind"]](record, pictures, figure))
    return made


def masks_figure(record: Record, pictures: Arrays, figure: Mapping[str, Any]) -> RecoveryFigure:
    """A picture of every mask (000, figure 3)."""
    return RecoveryFigure(
        figure, masks_table(record, figure["name"]), tiles=mask_tiles(record, pictures)
    )


def plates_figure(record: Record, pictures: Arrays, figure: Mapping[str, Any]) -> RecoveryFigure:
    """Originals, what was left of them and what came back (000, figure 1)."""
    table = plates_table(figure["name"], record, pictures)
    return RecoveryFigure(figure, table, groups=groups(record, pictures))


def rates_figure(record: Record, pictures: Arrays, figure: Mapping[str, Any]) -> RecoveryFigure:
    """A value by train loss, a row per network, a panel per mask (000, figures 3, F.1, F.2)."""
    value, sigma = _value(figure), figure["sigma"]
    victims = [victim_of(record, figure, name) for name in figure["victims"]]
    cells = [
        cell
        for victim in victims
        for cell in cells_of(record, victim=victim["name"], split="train", sigma=sigma)
    ]
    table = rates_table(figure["name"], cells, [value])
    found = list(rows_of(table))
    frames = _frames(victims, found, [value])
    rows = []
    for victim in victims:
        panels = []
        for mask in record["masks"]:
            mine = [
                row
                for row in found
                if (row["victim"], row["mask"]) == (victim["name"], mask["name"])
            ]
            svg = _rates_panel(record, victim, mask["title"], value, mine, panel=frames[value])
            panels.append(Panel(svg, mask["title"], icon=mask_tile(pictures, mask["name"])))
        rows.append(Row(victim["title"], victim_note(victim), panels))
    notes = [_nothing(value, found), *incomplete(record, victims, cells)]
    return RecoveryFigure(
        figure,
        table,
        rows,
        legend=_legend(record, cells),
        notes=[note for note in notes if note],
        unreached=any(map(unreached, victims)),
    )


def noise_figure(record: Record, _pictures: Arrays, figure: Mapping[str, Any]) -> RecoveryFigure:
    """The three values by train loss for cells with noise: a row per network and mask (G.1)."""
    cells = cells_of(record, split="train", sigma=figure["sigma"])
    table = rates_table(figure["name"], cells, VALUES)
    found = list(rows_of(table))
    titles = {mask["name"]: mask["title"] for mask in record["masks"]}
    with_cells = {cell["victim"] for cell in cells}
    victims = [victim for victim in record["victims"] if victim["name"] in with_cells]
    frames = _frames(victims, found, VALUES)
    rows = []
    for victim in victims:
        for mask in dict.fromkeys(c["mask"] for c in cells if c["victim"] == victim["name"]):
            mine = [row for row in found if (row["victim"], row["mask"]) == (victim["name"], mask)]
            title = titles.get(mask, mask)
            panels = [
                Panel(
                    _rates_panel(record, victim, title, value, mine, panel=frames[value]),
                    TITLES[value].capitalize().replace("psnr", "PSNR"),
                )
                for value in VALUES
            ]
            rows.append(Row(f"{victim['title']}, {title}", victim_note(victim), panels))
    notes = [] if rows else ["No cell has this noise."]
    return RecoveryFigure(
        figure,
        table,
        rows,
        legend=_legend(record, cells),
        notes=notes,
        unreached=any(map(unreached, victims)),
    )


def _rates_panel(
    record: Record,
    victim: Record,
    mask: str,
    value: str,
    mine: Sequence[Mapping[str, Any]],
    *,
    panel: Frame,
) -> str:
    """A panel of one network and mask; empty if nothing of it was run."""
    known = [row for row in mine if row[value] is not None]
    if not known:
        return ""
    grey = [not_reached(panel, level) for level in unreached(victim)]
    styles, series, said = styles_of(record), [], []
    for method in record["methods"]:
        points = []
        for row in known:
            if row["method"] != method["name"]:
                continue
            text = with_interval(value, row[value], row[f"{value} low"], row[f"{value} high"])
            at = f" at a loss of {power(row['level'])}" if row["level"] else ""
            about = f"{method['title']}{at}: {text}"
            said.append(about)
            ends = row[f"{value} low"], row[f"{value} high"]
            points.append(Estimate(_place(row, panel.x), row[value], *ends, about))
        points.sort(key=lambda point: point.x)
        series.append((styles[method["name"]], points, method["generic"]))
    about = f"{TITLES[value]} by train loss, {victim['title']}, {mask}. {'; '.join(said)}"
    return lines(panel, series, behind=grey, description=about)


def _place(row: Mapping[str, Any], across: Axis) -> float:
    for at in (row["loss"], row["level"]):
        if at is not None and at > 0:
            return falling(at)
    return (across.low + across.high) / 2


def _levels_axis(victims: Sequence[Record]) -> Axis:
    levels = {level for victim in victims for level in victim["wanted"]}
    levels |= {at["level"] for victim in victims for at in victim["levels"]}
    return falling_axis("train loss", [level for level in levels if level > 0], WIDTH)


def _frames(
    victims: Sequence[Record], rows: Sequence[Mapping[str, Any]], values: Sequence[str]
) -> dict[str, Frame]:
    """The frame of a value's panels, the same for all networks and masks of a figure."""
    across = _levels_axis(victims)
    return {value: small_panel(UNITS[value], across, _up(value, rows)) for value in values}


def _up(value: str, rows: Sequence[Mapping[str, Any]]) -> Axis:
    """The axis upwards, the same in all panels of a figure."""
    if value != "psnr":
        return Axis(0.0, 1.0, PERCENT, "")
    ends = [
        end
        for row in rows
        for end in (row["psnr"], row["psnr low"], row["psnr high"])
        if end is not None
    ]
    return round_axis("", ends)


def _nothing(value: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if value == "psnr" or any(row[value] for row in rows):
        return ""
    return f"No image reaches {TITLES[value]} in any of these cells."


def thresholds_figure(
    record: Record, _pictures: Arrays, figure: Mapping[str, Any]
) -> RecoveryFigure:
    """The share recovered by the error allowed, a panel per level (000, figure F.3)."""
    victim = victim_of(record, figure, figure["victim"])
    mask = _mask_of(record, figure)
    where = {"victim": victim["name"], "mask": mask["name"], "sigma": figure["sigma"]}
    cells = cells_of(record, split="train", **where)
    generic = [m["name"] for m in record["methods"] if m["generic"]]
    table = thresholds_table(figure["name"], record, cells)
    found = list(rows_of(table))
    across = falling_axis("error allowed", record["thresholds"]["all"], WIDTH)
    panels = []
    for level in sorted((at["level"] for at in victim["levels"]), reverse=True):
        mine = [row for row in found if row["level"] == level]
        have = {row["method"] for row in mine}
        for name in generic:
            if name not in have:
                others = [row for row in found if row["method"] == name]
                mine += [row for row in others if row["level"] == others[0]["level"]]
        svg = _thresholds_panel(record, mine, across, level)
        panels.append(Panel(svg, f"loss {power(level)}"))
    row = Row(f"{victim['title']}, {mask['title']}", victim_note(victim), panels)
    notes = incomplete(record, [victim], cells)
    return RecoveryFigure(figure, table, [row], legend=_legend(record, cells), notes=notes)


def _thresholds_panel(
    record: Record, rows: Sequence[Mapping[str, Any]], across: Axis, level: float
) -> str:
    if not rows:
        return ""
    panel = small_panel("%", across, Axis(0.0, 1.0, PERCENT, ""))
    styles, series, said = styles_of(record), [], []
    for method in record["methods"]:
        points = []
        for row in rows:
            if row["method"] != method["name"] or row["share"] is None:
                continue
            about = (
                f"{method['title']}, error below {power(row['threshold'])}: {row['count']} of "
                f"{row['n']}, {measure('accurate', row['share'])}"
            )
            said.append(about)
            points.append(Estimate(falling(row["threshold"]), row["share"], None, None, about))
        points.sort(key=lambda point: point.x)
        series.append((styles[method["name"]], points, False))
    limits = [record["thresholds"][key] for key in ("approximate", "accurate")]
    dotted = [upright(panel, falling(limit)) for limit in limits]
    about = f"Share recovered by the error allowed, at a loss of {power(level)}. {'; '.join(said)}"
    return lines(panel, series, behind=dotted, description=about)


def table_figure(record: Record, pictures: Arrays, figure: Mapping[str, Any]) -> RecoveryFigure:
    """A value of one network by mask and method (000, tables 1 and 2)."""
    victim, value = victim_of(record, figure, figure["victim"]), _value(figure)
    cells = at_lowest(record, victim, split="train", sigma=0.0)
    table = rates_table(figure["name"], cells, [value])
    masks = [mask for mask in record["masks"] if mask["name"] in {cell["mask"] for cell in cells}]
    body = []
    for method in record["methods"]:
        texts = []
        for mask in masks:
            found = [c for c in cells if (c["mask"], c["method"]) == (mask["name"], method["name"])]
            share, low, high = triple(found[0], value) if found else (None, None, None)
            texts.append((measure(value, share), _ends(value, low, high)))
        if any(text != "–" for text, _ends_ in texts):
            body.append((method["title"], texts))
    heads = [(mask["title"], mask_tile(pictures, mask["name"])) for mask in masks]
    shown = {**victim, "levels": [lowest(victim)]}
    notes = [victim_note(victim) + ".", *incomplete(record, [shown], cells)]
    return RecoveryFigure(figure, table, grid=(heads, body), notes=notes)


def _ends(value: str, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"[{measure(value, low).removesuffix(' %')}, {measure(value, high).removesuffix(' %')}]"


def victim_of(record: Record, figure: Mapping[str, Any], name: str) -> Record:
    """The victim of that name; ValueError if the study has none."""
    for victim in record["victims"]:
        if victim["name"] == name:
            return dict(victim)
    have = [victim["name"] for victim in record["victims"]]
    raise ValueError(f"figure {figure['name']!r} shows victim {name!r}; expected one of {have}")


def _mask_of(record: Record, figure: Mapping[str, Any]) -> Record:
    for mask in record["masks"]:
        if mask["name"] == figure["mask"]:
            return dict(mask)
    have = [mask["name"] for mask in record["masks"]]
    raise ValueError(
        f"figure {figure['name']!r} shows mask {figure['mask']!r}; expected one of {have}"
    )


def _value(figure: Mapping[str, Any]) -> str:
    value = str(figure["value"])
    if value not in VALUES:
        raise ValueError(
            f"figure {figure['name']!r} shows value {value!r}; expected one of {VALUES}"
        )
    return value


def _legend(record: Record, cells: Sequence[Record]) -> list[tuple[Style, str]]:
    """The methods that have a cell."""
    have, styles = {cell["method"] for cell in cells}, styles_of(record)
    return [(styles[m["name"]], m["title"]) for m in record["methods"] if m["name"] in have]


def _control(record: Record, _pictures: Arrays, figure: Mapping[str, Any]) -> RecoveryFigure:
    victims = [victim_of(record, figure, name) for name in figure["victims"]]
    return control_figure(record, figure, victims)


def _contraction(record: Record, _pictures: Arrays, figure: Mapping[str, Any]) -> RecoveryFigure:
    victims = [victim_of(record, figure, name) for name in figure["victims"]]
    return contraction_figure(figure, victims)


DRAW: dict[str, Callable[[Record, Arrays, Mapping[str, Any]], RecoveryFigure]] = {
    "masks": masks_figure,
    "plates": plates_figure,
    "rates": rates_figure,
    "thresholds": thresholds_figure,
    "table": table_figure,
    "control": _control,
    "contraction": _contraction,
    "noise": noise_figure,
}
