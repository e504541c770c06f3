"""Drawings of an inversion study: heatmaps, accuracy against leakage, layers.

Each function turns the rows of a figure's table into rows of panels, one per source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from tasks.families.inversion.study.tables import ends, mean_of, measure, small, with_role
from tasks.page.charts import (
    APART,
    LEFT,
    N_MARKERS,
    RIGHT,
    Axis,
    Estimate,
    Panel,
    Style,
    estimates,
    marker,
    round_axis,
    styles_of,
    words,
)
from tasks.page.files import Record, Table
from tasks.page.formats import number, power
from tasks.page.heatmaps import Square, heatmap
from tasks.page.study_page import Drawing, Row

ATTACK_COLOURS, OTHER_COLOURS = {"paper": 13, "strong": 14, "restored": 15}, (12, 16, 17)
"""Distinct with any colour vision (templates/matrix.css)."""
NEAR_POINTS = 3.0  # of accuracy below vanilla that the close-up shows
WIDE_SPREAD = 50.0  # of distances that are shaded by their logarithm
LAYERS = (260, 210)
SETTING_COLOURS = (17, 16, 12, 15, 14, 13)
FIRST_SETTING = 20  # styles are numbered on the whole page
LETTER_BOX = (10.0, 13.0)
LETTER_PLACES = ((7, -4), (-15, -4), (-4, -8), (-4, 17), (9, 9), (-17, 9), (9, -13), (-17, -13))


def attack_styles(record: Record) -> dict[str, Style]:
    """Look of each attack, the same everywhere on the page."""
    names = [attack["name"] for attack in record["attacks"]]
    return styles_of(names, ATTACK_COLOURS, OTHER_COLOURS)


def heat_rows(record: Record, table: Table) -> list[Row]:
    """Accuracy, distance and the SSIM of each attack that most of the grid has, by source."""
    rows = []
    for source in record["sources"]:
        mine = list(table.where("source", source["name"]).rows())
        if not mine:
            continue
        note, vanilla = f"layer {source['cut']}", with_role(record, source, "vanilla")
        if vanilla is None:
            note += "; without vanilla"
        else:
            parts = [f"{name} {measure(name, mean_of(vanilla[1], name))}"
                     for name in ("accuracy", "distance")]  # fmt: skip
            for attack in record["attacks"]:
                found = mean_of(vanilla[1], "ssim", attack["name"])
                parts += [f"SSIM {found:.2f} ({attack['title']})"] if found is not None else []
            note += f"; without the defence: {', '.join(parts)}"
        values = [("accuracy", "Test accuracy, %"), ("distance", "Mean distance of the features")]
        for attack in record["attacks"]:
            column = f"ssim {attack['name']}"
            if 2 * sum(row.get(column) is not None for row in mine) >= len(mine):
                values.append((column, f"SSIM, {attack['title']}"))
        panels = [Drawing(_heat(source, value, title, mine), title) for value, title in values]
        rows.append(Row(source["title"], note, panels))
    return rows


def _heat(source: Record, value: str, title: str, rows: Sequence[Record]) -> str:
    lams, betas = sorted(source["lams"]), sorted(source["betas"], reverse=True)
    known = [row[value] for row in rows if row[value] is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    log = value == "distance" and 0 < WIDE_SPREAD * low < high
    squares: dict[tuple[int, int], Square] = {}
    for row in rows:
        about = f"{row['title']}: {_interval(value, row)}"
        about += f"; diverged with {row['diverged']} of {row['n_seeds']}" if row["diverged"] else ""
        text, share = ["div." if row["diverged"] else "–"], None
        if (mean := row[value]) is not None:
            share = (mean - low) / (high - low) if high > low else 0.5
            share = math.log(mean / low) / math.log(high / low) if log else share
            text = [f"{100 * mean:.1f}" if value == "accuracy" else f"{mean:.2f}"]
            if value == "distance":  # two digits in at most six letters: 0.0035, 6.9e−4
                text = [small(mean)]
                if 0 < mean < 1e-3:
                    digits, _e, exponent = f"{mean:.1e}".partition("e")
                    text = [f"{digits}e{int(exponent)}".replace("-", "−")]
            text += [row["letter"]] if row["letter"] else []
            text += [f"{row['diverged']}/{row['n_seeds']} div."] if row["diverged"] else []
        place = lams.index(row["lam"]), betas.index(row["beta"])
        squares[place] = Square(share, text, about)
    described = "; ".join(square.about for square in squares.values())
    return heatmap(
        [number(lam) for lam in lams],
        [power(beta) for beta in betas],
        squares,
        titles=("λ", "β"),
        description=f"{title} by λ and β, {source['title']}. {described}",
    )


def _interval(value: str, row: Record) -> str:
    name, found = value.partition(" ")[0], {end: row[f"{value} {end}"] for end in ("low", "high")}
    return f"{measure(name, row[value])} {ends(name, found)}".strip()


Series = tuple[Style, list[dict[str, Any]]]
"""Style of an attack, and the rows that are its marks, with `x` and a tooltip `about`."""


def pareto_rows(record: Record, table: Table) -> tuple[list[Row], list[tuple[Style, str]]]:
    """All settings, a close-up of those near vanilla's accuracy, and the legend."""
    styles = attack_styles(record)
    run = [attack for attack in record["attacks"] if attack["name"] in table.columns["attack"]]
    rows = []
    for source in record["sources"]:
        mine = sorted(table.where("source", source["name"]).rows(), key=lambda r: r["accuracy"])
        if not mine:
            rows.append(Row(source["title"], "nothing was measured", []))
            continue
        series: list[Series] = []
        for attack in run:
            own = []
            for row in (row for row in mine if row["attack"] == attack["name"]):
                about = f"{row['title']}, {attack['title']}: accuracy "
                about += f"{_interval('accuracy', row)}, SSIM {_interval('ssim', row)}"
                own.append({**row, "x": 100 * row["accuracy"], "about": about})
            series += [(styles[attack["name"]], own)] if own else []
        known = [row["chance"] for row in mine if row["chance"] is not None]
        level = sum(known) / len(known) if known else None
        panels = [_trade_panel(source, series, level, None)]
        vanilla = with_role(record, source, "vanilla")
        base = mean_of(vanilla[1], "accuracy") if vanilla else None
        if base is not None and mine[0]["accuracy"] < base - NEAR_POINTS / 100:
            panels.append(_trade_panel(source, series, level, 100 * base - NEAR_POINTS))
        rows.append(Row(source["title"], f"layer {source['cut']}", panels))
    return rows, [(styles[attack["name"]], attack["title"]) for attack in run]


def _trade_panel(
    source: Record, series: Sequence[Series], level: float | None, least: float | None
) -> Drawing:
    """Marks with whiskers both ways, each attack's front as a line, and letters beside some marks;
    of all rows, or of those with an accuracy of at least `least`. `level`: height of a dotted
    line."""
    shown = [row for _style, rows in series for row in rows if least is None or row["x"] >= least]
    heights = [row[end] for row in shown for end in ("ssim", "ssim low", "ssim high")]
    known = [min(1.0, max(0.0, height)) for height in (*heights, level) if height is not None]
    across = round_axis("test accuracy, %", [row["x"] for row in shown])
    panel = Panel("SSIM", across, round_axis("", known))
    title = "all settings"
    if least is not None:
        title = f"close-up: at most {NEAR_POINTS:g} points below vanilla"
    about = f"SSIM by test accuracy, {source['title']}, {title}. "
    about += "; ".join(row["about"] for row in shown if row["letter"])
    parts = [panel.horizontal(level)] if level is not None else []
    inside: list[dict[str, Any]] = []
    for style, rows in series:
        drawn = [f'<g class="s{style.number} m{style.colour}">']
        on_x = [row for row in rows if panel.x.low <= row["x"] <= panel.x.high]
        own = [row for row in on_x if panel.y.low <= row["ssim"] <= panel.y.high]
        inside += own
        on_front = [panel.at((row["x"], row["ssim"])) for row in own if row["on_front"]]
        if len(on_front) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in on_front)
            drawn.append(f'<polyline class="curve front" points="{path}"/>')
        for row in own:
            (x, y), whiskers = panel.at((row["x"], row["ssim"])), ""
            if row["ssim low"] is not None:
                low, high = (panel.at((row["x"], row[f"ssim {end}"]))[1] for end in ("low", "high"))
                whiskers += f"M{x:.1f} {low:.1f}V{high:.1f}"
            if row["accuracy low"] is not None:
                ends_of = (100 * row[f"accuracy {end}"] for end in ("low", "high"))
                low, high = (panel.at((end, row["ssim"]))[0] for end in ends_of)
                whiskers += f"M{low:.1f} {y:.1f}H{high:.1f}"
            path = f'<path class="whisker" d="{whiskers}"/>' if whiskers else ""
            drawn.append(
                f"<g><title>{escape(row['about'])}</title>{path}{marker(style.marker, x, y)}</g>"
            )
        parts.append("\n".join([*drawn, "</g>"]))
    return Drawing(panel.svg([*parts, *_letters(panel, inside)], about), title)


def _letters(panel: Panel, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each letter near its mark, at the first place that no other letter has."""
    (width, height), boxes, parts = LETTER_BOX, list[tuple[float, float]](), []
    right, base = panel.width - RIGHT, panel.at((panel.x.low, panel.y.low))[1]
    for row in (row for row in rows if row["letter"]):
        x, y = panel.at((row["x"], row["ssim"]))
        free = [
            (left, bottom)
            for left, bottom in ((x + dx, y + dy) for dx, dy in LETTER_PLACES)
            if LEFT < left <= right - width and panel.top + height <= bottom < base
            and all(abs(left - a) >= width or abs(bottom - b) >= height for a, b in boxes)
        ]  # fmt: skip
        boxes += free[:1]
        parts += [words(row["letter"], *place, "axis letter halo") for place in free[:1]]
    return parts


def layer_rows(record: Record, table: Table) -> tuple[list[Row], list[tuple[Style, str]]]:
    """SSIM by layer, a panel per attack with the same axes for a source, and the legend."""
    found = sorted(table.rows(), key=lambda row: row["cut"])
    titles = {_setting(row): row["title"] for row in table.rows()}
    styles = {
        setting: Style(FIRST_SETTING + k, SETTING_COLOURS[k % 6], k % N_MARKERS)
        for k, setting in enumerate(titles)
    }
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
            if len({row["cut"] for row in of_attack}) < 2:
                continue
            series = []
            for setting, style in styles.items():
                points = []
                for row in (row for row in of_attack if _setting(row) == setting):
                    about = f"{row['title']}, layer {row['cut']}: SSIM {_interval('ssim', row)}, "
                    about += f"accuracy {_interval('accuracy', row)}"
                    low, high = row["ssim low"], row["ssim high"]
                    points.append(Estimate(row["cut"], row["ssim"], low, high, about))
                series += [(style, points)] if points else []
            about = f"SSIM by layer, {source['title']}, {attack['title']}. "
            about += "; ".join(point.about for _style, points in series for point in points)
            frame = Panel("SSIM", across, up, *LAYERS)
            svg = frame.svg(estimates(frame, series, apart=APART), about)
            panels.append(Drawing(svg, attack["title"]))
        rows.append(Row(source["title"], "", panels))
    return rows, [(styles[setting], title) for setting, title in titles.items()]


def _setting(row: Record) -> tuple[Any, ...]:
    return row["kind"], row["lam"], row["beta"]
