"""The page of a comparison: one self-contained HTML file, its numbers as CSV and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.files import text_bytes, write_file, write_json
from tasks.page.charts import N_MARKERS, Line, Style, lines
from tasks.page.files import page_html, page_of, write_tables
from tasks.page.formats import interval, percent, score
from tasks.page.tables import Cell, Table, cells_of, table_of
from tasks.report.compare import METRICS, Evaluated, compare, open_runs
from tasks.report.figures import METRIC_TITLES, Figure, ranked_panel
from tasks.report.headline import method_title
from tasks.report.record import COMMAND, SIDES
from tasks.report.tables import score_cells

COLOURS = (2, 4, 3, 5, 6, 10, 0, 8, 7, 9, 11, 1)


def compare_runs(runs: Sequence[Path], page: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """The comparison of finished evaluations (jobs' folders or evaluations' own) with the first,
    and the files written of it. Raises ValueError for fewer than two, for one without a finished
    evaluation, or if `page` does not end in .html."""
    if page.suffix != ".html":
        raise ValueError(f"--out {page} does not end in .html; the page is one")
    opened = open_runs(runs)
    page.parent.mkdir(parents=True, exist_ok=True)
    with page_of(" or ".join(str(run.folder / "evaluation.json") for run in opened), COMMAND):
        comparison = compare(opened)
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
    """The files: `page`, and beside it PAGE.json and the CSVs in PAGE-data/."""
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
    rows = [
        {"method": method, "run": run["name"]} | score_cells(numbers, numbers)
        for method, found in comparison["methods"].items()
        for run, numbers in zip(comparison["runs"], found, strict=True)
        if numbers is not None
    ]
    return table_of("methods", rows, ("method", "run"))


def differences_table(comparison: Mapping[str, Any]) -> Table:
    """One row per method, run and side: how far it is from the first run."""
    keys = ("method", "run", "against")
    rows = [
        {key: found[key] for key in keys} | {"side": side} | cells_of(found[side])
        for found in comparison["differences"]
        for side in SIDES
    ]
    return table_of("differences", rows, (*keys, "side"))


def settings_table(comparison: Mapping[str, Any]) -> Table:
    """The settings that differ, a column per run."""
    columns: dict[str, list[Cell]] = {"setting": list(comparison["settings"])}
    for k, run in enumerate(comparison["runs"]):
        columns[run["name"]] = [values[k] for values in comparison["settings"].values()]
    return Table("settings", columns)


def ranked_table(runs: Sequence[Evaluated]) -> Table:
    """The i-th best score of every method in every run."""
    keys = ("method", "run", "side", "rank", *METRICS)
    rows = [
        dict(zip(keys, (method, run.name, side, rank, *scores), strict=True))
        for run in runs
        for method, body in run.record["methods"].items()
        for side in SIDES
        for rank, scores in enumerate(
            zip(*(sorted(body[side][metric], reverse=True) for metric in METRICS), strict=True), 1
        )
    ]
    return table_of("ranked-curves", rows, keys)


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
        title = f"{METRIC_TITLES['ssim']}: {method_title(method)[0]}"
        panel = ranked_panel(title, [c for line in curves for c in (line.targets, line.decoys)])
        panels.append(panel.svg(lines(panel, curves), f"{title}, the i-th best image of each run"))
    return panels
