"""The drawings of an inversion study: heatmaps, accuracy against leakage, layers.

Each function goes from rows of a figure's table to rows of panels, one per source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.families.inversion.study.charts import Mark, Series, trade_off
from tasks.families.inversion.study.figure_specs import (
    attack_styles,
    ends,
    mean_of,
    measure,
    small,
    with_role,
)
from tasks.page.axes import Axis, round_axis
from tasks.page.charts import APART, N_MARKERS, Estimate, Panel, Style, estimates
from tasks.page.files import Record
from tasks.page.formats import number, power
from tasks.page.heatmaps import Square, heatmap
from tasks.page.study_page import Drawing, Row
from tasks.page.tables import Table

NEAR_POINTS = 3.0  # of accuracy below vanilla that the close-up shows
WIDE_SPREAD = 50.0  # of distances that are shaded by their logarithm
LAYERS = (260, 210)
SETTING_COLOURS = (17, 16, 12, 15, 14, 13)
FIRST_SETTING = 20  # styles are numbered on the whole page


def heat_rows(record: Record, figure: Record, table: Table) -> list[Row]:
    """Accuracy, distance and the SSIM of each attack that most of the grid has, by source.

    Raises ValueError for two cells at one place of a grid.
    """
    rows = []
    for source in record["sources"]:
        mine = list(table.where("source", source["name"]).rows())
        if not mine:
            continue
        values = [("accuracy", "Test accuracy, %"), ("distance", "Mean distance of the features")]
        for attack in record["attacks"]:
            column = f"ssim {attack['name']}"
            known = sum(row.get(column) is not None for row in mine)
            if 2 * known >= len(mine):
                values.append((column, f"SSIM, {attack['title']}"))
        panels = [
            Drawing(_heat(source, figure, value, title, mine), title) for value, title in values
        ]
        rows.append(Row(source["title"], _vanilla_note(record, source), panels))
    return rows


def _vanilla_note(record: Record, source: Record) -> str:
    note = f"layer {source['cut']}"
    vanilla = with_role(record, source, "vanilla")
    if vanilla is None:
        return f"{note}; without vanilla"
    cell = vanilla[1]
    parts = [f"accuracy {measure('accuracy', mean_of(cell, 'accuracy'))}"]
    parts.append(f"distance {measure('distance', mean_of(cell, 'distance'))}")
    for attack in record["attacks"]:
        found = mean_of(cell, "ssim", attack["name"])
        parts += [f"SSIM {found:.2f} ({attack['title']})"] if found is not None else []
    return f"{note}; without the defence: {', '.join(parts)}"


def _heat(source: Record, figure: Record, value: str, title: str, rows: Sequence[Record]) -> str:
    lams, betas = sorted(source["lams"]), sorted(source["betas"], reverse=True)
    known = [row[value] for row in rows if row[value] is not None]
    log = value == "distance" and bool(known) and 0 < WIDE_SPREAD * min(known) < max(known)
    squares: dict[tuple[int, int], Square] = {}
    said = []
    for row in rows:
        if row["lam"] not in lams or row["beta"] not in betas:
            raise ValueError(
                f"cell {row['cell']} ({row['name']!r}) is said to be in the grid, but its λ, β "
                f"({row['lam']}, {row['beta']}) are not among {lams} and {betas}"
            )
        place = lams.index(row["lam"]), betas.index(row["beta"])
        if place in squares:
            raise ValueError(
                f"figure {figure['name']!r} has two cells at λ={row['lam']:g}, β={row['beta']:g} "
                f"of source {source['name']!r}; only one of them can be in the grid"
            )
        about = f"{row['title']}: {_interval(value, row)}"
        about += f"; diverged with {row['diverged']} of {row['n_seeds']}" if row["diverged"] else ""
        said.append(about)
        squares[place] = Square(_share(row[value], known, log=log), _texts(value, row), about)
    return heatmap(
        [number(lam) for lam in lams],
        [power(beta) for beta in betas],
        squares,
        titles=("λ", "β"),
        description=f"{title} by λ and β, {source['title']}. {'; '.join(said)}",
    )


def _share(found: float | None, known: Sequence[float], *, log: bool) -> float | None:
    """Between the least and the most of a heatmap."""
    if found is None:
        return None
    low, high, at = min(known), max(known), found
    if log:
        low, high, at = math.log(low), math.log(high), math.log(found)
    return (at - low) / (high - low) if high > low else 0.5


def _texts(value: str, row: Record) -> list[str]:
    """The number, and below it the cell's letter and how many networks diverged."""
    if row[value] is None:
        return ["div."] if row["diverged"] else ["–"]
    if value == "accuracy":
        text = f"{100 * row[value]:.1f}"
    else:
        text = _narrow(row[value]) if value == "distance" else f"{row[value]:.2f}"
    below = [row["letter"]] if row["letter"] else []
    below += [f"{row['diverged']}/{row['n_seeds']} div."] if row["diverged"] else []
    return [text, *below]


def _narrow(found: float) -> str:
    """Two digits in at most six letters: `0.0035`, `6.9e−4`."""
    if found >= 1e-3 or found <= 0:
        return small(found)
    digits, _e, exponent = f"{found:.1e}".partition("e")
    return f"{digits}e{int(exponent)}".replace("-", "−")


def _interval(value: str, row: Record) -> str:
    name, found = value.partition(" ")[0], {end: row[f"{value} {end}"] for end in ("low", "high")}
    return f"{measure(name, row[value])} {ends(name, found)}".strip()


def pareto_rows(record: Record, table: Table) -> tuple[list[Row], list[tuple[Style, str]]]:
    """All settings, and a close-up of those near vanilla's accuracy; with the legend."""
    styles = attack_styles(record)
    run = [attack for attack in record["attacks"] if attack["name"] in table.columns["attack"]]
    rows = []
    for source in record["sources"]:
        mine = list(table.where("source", source["name"]).rows())
        if not mine:
            rows.append(Row(source["title"], "nothing was measured", []))
            continue
        series = [
            _series(styles[attack["name"]], attack, mine)
            for attack in run
            if any(row["attack"] == attack["name"] for row in mine)
        ]
        known = [row["chance"] for row in mine if row["chance"] is not None]
        level = sum(known) / len(known) if known else None
        panels = [_trade_panel(source, series, level, None)]
        vanilla = with_role(record, source, "vanilla")
        base = mean_of(vanilla[1], "accuracy") if vanilla else None
        if base is not None and min(row["accuracy"] for row in mine) < base - NEAR_POINTS / 100:
            panels.append(_trade_panel(source, series, level, 100 * base - NEAR_POINTS))
        rows.append(Row(source["title"], f"layer {source['cut']}", panels))
    return rows, [(styles[attack["name"]], attack["title"]) for attack in run]


def _series(style: Style, attack: Record, rows: Sequence[Record]) -> Series:
    mine = [row for row in rows if row["attack"] == attack["name"]]
    mine.sort(key=lambda row: row["accuracy"])
    marks = [
        Mark(
            100 * row["accuracy"],
            row["ssim"],
            _ends(row, "accuracy", 100),
            _ends(row, "ssim", 1),
            row["letter"] or "",
            f"{row['title']}, {attack['title']}: accuracy {_interval('accuracy', row)}, "
            f"SSIM {_interval('ssim', row)}",
        )
        for row in mine
    ]
    return Series(style, marks, [k for k, row in enumerate(mine) if row["on_front"]])


def _ends(row: Record, value: str, factor: float) -> tuple[float, float] | None:
    low, high = row[f"{value} low"], row[f"{value} high"]
    return None if low is None or high is None else (factor * low, factor * high)


def _trade_panel(
    source: Record, series: Sequence[Series], level: float | None, least: float | None
) -> Drawing:
    """A panel of all marks, or of those with an accuracy of at least `least`."""
    shown = [m for one in series for m in one.marks if least is None or m.x >= least]
    heights = [end for mark in shown for end in (mark.y, *(mark.up or ()))]
    heights += [level] if level is not None else []
    heights = [min(1.0, max(0.0, height)) for height in heights]
    across = round_axis("test accuracy, %", [mark.x for mark in shown])
    frame = Panel("SSIM", across, round_axis("", heights))
    title = "all settings"
    if least is not None:
        title = f"close-up: at most {NEAR_POINTS:g} points below vanilla"
    about = f"SSIM by test accuracy, {source['title']}, {title}. "
    about += "; ".join(mark.about for mark in shown if mark.letter)
    return Drawing(trade_off(frame, series, level=level, description=about), title)


def layer_rows(record: Record, table: Table) -> tuple[list[Row], list[tuple[Style, str]]]:
    """SSIM by layer, a panel per attack with one axis for a source; with the legend of settings."""
    found = list(table.rows())
    settings = list(dict.fromkeys(_setting(row) for row in found))
    styles = {
        setting: Style(FIRST_SETTING + k, SETTING_COLOURS[k % 6], k % N_MARKERS)
        for k, setting in enumerate(settings)
    }
    titles = {_setting(row): row["title"] for row in found}
    rows = []
    for source in record["sources"]:
        mine = [row for row in found if row["source"] == source["name"]]
        if not mine:
            continue
        cuts = sorted({row["cut"] for row in mine})
        if len(cuts) == 1:
            rows.append(Row(source["title"], f"only layer {cuts[0]} has scores", []))
            continue
        ticks = [(cut, f"{cut}") for cut in cuts]
        across = Axis(cuts[0] - 0.4, cuts[-1] + 0.4, ticks, "layer")
        heights = [row[k] for row in mine for k in ("ssim", "ssim low", "ssim high")]
        up = round_axis("", [min(1.0, max(0.0, at)) for at in heights if at is not None])
        panels = []
        for attack in record["attacks"]:
            of_attack = [row for row in mine if row["attack"] == attack["name"]]
            if len({row["cut"] for row in of_attack}) > 1:
                frame = Panel("SSIM", across, up, *LAYERS)
                svg = _layers_panel(source, attack, of_attack, styles, frame)
                panels.append(Drawing(svg, attack["title"]))
        rows.append(Row(source["title"], "", panels))
    return rows, [(styles[setting], titles[setting]) for setting in settings]


def _setting(row: Record) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("kind", "lam", "beta"))


def _layers_panel(
    source: Record,
    attack: Record,
    rows: Sequence[Record],
    styles: Mapping[tuple[Any, ...], Style],
    frame: Panel,
) -> str:
    series, said = [], []
    for setting, style in styles.items():
        points = []
        for row in sorted((r for r in rows if _setting(r) == setting), key=lambda r: r["cut"]):
            about = f"{row['title']}, layer {row['cut']}: SSIM {_interval('ssim', row)}, accuracy "
            about += _interval("accuracy", row)
            said.append(about)
            low, high = row["ssim low"], row["ssim high"]
            points.append(Estimate(row["cut"], row["ssim"], low, high, about))
        if points:
            series.append((style, points))
    about = f"SSIM by layer, {source['title']}, {attack['title']}. {'; '.join(said)}"
    return frame.svg(estimates(frame, series, apart=APART), about)
