"""The page of a comparison: one self-contained HTML file, its numbers as CSV and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.files import text_bytes, write_file, write_json
from tasks.page.axes import rank_axis, unit_axis
from tasks.page.charts import N_MARKERS, Line, Panel, Style, lines
from tasks.page.files import page_of, write_tables
from tasks.page.formats import interval, percent, score
from tasks.page.tables import Cell, Table, cells_of, table_of
from tasks.page.writer import page_html
from tasks.report.compare import COMMAND, METRICS, Evaluated, compare, open_runs, records_of
from tasks.report.figures import METRIC_TITLES, Figure
from tasks.report.headline import method_title
from tasks.report.record import SIDES

COLOURS = (2, 4, 3, 5, 6, 10, 0, 8, 7, 9, 11, 1)


def compare_runs(runs: Sequence[Path], page: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """The comparison of finished evaluations with the first, and the files written of it.

    `runs` are jobs' folders or evaluations' own. Raises ValueError for fewer than two, for one
    without a finished evaluation, or if `page` does not end in .html.
    """
    if page.suffix != ".html":
        raise ValueError(f"--out {page} does not end in .html; the page is one")
    opened = open_runs(runs)
    comparison = compare(opened)
    page.parent.mkdir(parents=True, exist_ok=True)
    return comparison, write_comparison(comparison, opened, page)


def difference_rows(comparison: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per method and run: the differences of the targets, as a screen has them."""
    rows = []
    for found in comparison["differences"]:
        body = found["targets"]
        rows.append(
            {
                "method": found["method"],
                "run": found["run"],
                "images": "paired" if body["paired"] else "unpaired",
                "good": percent(body["good_fraction"]),
                "SSIM": score(body["mean_ssim"]),
                "95 %": interval(body["mean_ssim_interval"]),
                "HaarPSI": score(body["mean_haarpsi"]),
            }
        )
    return rows


def write_comparison(
    comparison: Mapping[str, Any], runs: Sequence[Evaluated], page: Path
) -> dict[str, Path]:
    """Writes `page`, and beside it PAGE.json and the CSVs in PAGE-data/; returns where they are.

    Raises ValueError if a record has not what the page shows.
    """
    with page_of(records_of(runs), COMMAND):
        return _written(comparison, runs, page)


def _written(
    comparison: Mapping[str, Any], runs: Sequence[Evaluated], page: Path
) -> dict[str, Path]:
    data = page.with_name(f"{page.stem}-data")
    made = (methods_table(comparison), differences_table(comparison), settings_table(comparison))
    tables = {table.name: table for table in (*made, ranked_table(runs))}
    looks = [Style(k, COLOURS[k % len(COLOURS)], k % N_MARKERS) for k in range(len(runs))]
    names = [run.name for run in runs]
    panels = _panels(tables["ranked-curves"], comparison, names, looks)
    html = page_html(
        "compare.html",
        {},
        comparison=comparison,
        names=names,
        titles={name: method_title(name)[0] for name in comparison["methods"]},
        figure=Figure("ranked-curves", panels, [], list(zip(looks, names, strict=True))),
        tables=tables,
        styles=dict(zip(names, looks, strict=True)),
        folder=data.name,
        most_inline=math.inf,
    )
    write_tables(data, tables.values())
    write_json(page.with_suffix(".json"), comparison)
    write_file(page, text_bytes(html))
    return {"page": page, "numbers": page.with_suffix(".json"), "data": data}


def methods_table(comparison: Mapping[str, Any]) -> Table:
    """One row per method and run that has it."""
    rows: list[dict[str, Cell]] = []
    for method, found in comparison["methods"].items():
        for run, numbers in zip(comparison["runs"], found, strict=True):
            if numbers is None:
                continue
            row: dict[str, Cell] = {"method": method, "run": run["name"]}
            for side in SIDES:
                for key, value in numbers[side].items():
                    row |= cells_of(f"{side} {key}", value)
            row["auc"] = numbers["auc"]
            row |= {f"found at {rate}": v for rate, v in (numbers["found_at"] or {}).items()}
            rows.append(row)
    return table_of("methods", rows, ("method", "run"))


def differences_table(comparison: Mapping[str, Any]) -> Table:
    """One row per method, run and side: how far it is from the first run."""
    rows: list[dict[str, Cell]] = []
    for found in comparison["differences"]:
        for side in SIDES:
            row: dict[str, Cell] = {key: found[key] for key in ("method", "run", "against")}
            row["side"] = side
            for key, value in found[side].items():
                row |= cells_of(key, value)
            rows.append(row)
    return table_of("differences", rows, ("method", "run", "against", "side"))


def settings_table(comparison: Mapping[str, Any]) -> Table:
    """The settings that differ, a column per run."""
    columns: dict[str, list[Cell]] = {"setting": list(comparison["settings"])}
    for k, run in enumerate(comparison["runs"]):
        columns[run["name"]] = [values[k] for values in comparison["settings"].values()]
    return Table("settings", columns)


def ranked_table(runs: Sequence[Evaluated]) -> Table:
    """The i-th best score of every method in every run."""
    rows: list[dict[str, Cell]] = []
    for run in runs:
        for method, body in run.record["methods"].items():
            for side in SIDES:
                ranked = [sorted(body[side][metric], reverse=True) for metric in METRICS]
                rows += [
                    {"method": method, "run": run.name, "side": side, "rank": i + 1}
                    | dict(zip(METRICS, scores, strict=True))
                    for i, scores in enumerate(zip(*ranked, strict=True))
                ]
    return table_of("ranked-curves", rows, ("method", "run", "side", "rank", *METRICS))


def _panels(
    table: Table, comparison: Mapping[str, Any], names: Sequence[str], looks: Sequence[Style]
) -> list[str]:
    """SSIM ranked, one panel per method; one line per run, each over its own number of images."""
    panels = []
    for method in comparison["methods"]:
        of_method = table.where("method", method)
        curves = []
        for name, look in zip(names, looks, strict=True):
            rows = of_method.where("run", name)
            sides = [rows.where("side", side).points("rank", "ssim") for side in SIDES]
            curves.append(Line(look, *sides))
        n_images = max(len(line.targets) for line in curves)
        values = [y for line in curves for _x, y in (*line.targets, *line.decoys)]
        title = f"{METRIC_TITLES['ssim']}: {method_title(method)[0]}"
        panel = Panel(title, rank_axis("images, best first", n_images), unit_axis("", values))
        panels.append(panel.svg(lines(panel, curves), f"{title}, the i-th best image of each run"))
    return panels
