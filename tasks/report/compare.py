"""Several evaluations side by side, as one page: which settings differ, and by how much the scores
do. Where two runs scored the same images, their difference is taken image by image (paired).
Intervals are 95 %, percentile bootstrap over images (Efron 1979): they say nothing about new
victims. The numbers lie beside the page as CSV and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.summary import N_BOOTSTRAP, bootstrap_interval
from storage.files import text_bytes, write_file, write_json
from tasks.evaluation.record import COMMAND, DECIMALS, SIDES, evaluation_folder, read_evaluation
from tasks.page.charts import N_MARKERS, Line, Style, lines
from tasks.page.files import Record, Table, cells_of, page_html, page_of, table_of, write_tables
from tasks.page.formats import NOTHING, interval, leaves, percent, score
from tasks.report.figures import METRIC_TITLES, METRICS, Figure, ranked_panel, score_cells
from tasks.report.headline import method_title

SCHEMA, VERSION = "palimpsest-comparison", 1
COLOURS = (2, 4, 3, 5, 6, 10, 0, 8, 7, 9, 11, 1)
SAME_SOURCE = "the two runs scored the same images"

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evaluated:
    """One evaluation and the name it goes by on the page."""

    name: str
    folder: Path
    record: Record


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


def open_runs(runs: Sequence[Path]) -> list[Evaluated]:
    """The evaluations of `runs` (job folders or evaluation folders), each named by as many last
    parts of its path as tell them apart. Raises ValueError for fewer than two, one folder twice, or
    one without a finished evaluation."""
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run given; a comparison needs at least two folders")
    folders = [evaluation_folder(run).resolve() for run in runs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ValueError(f"{folder} is given twice; give each evaluation once")
    paths = [folder.parent if folder.name == "evaluation" else folder for folder in folders]
    names = [str(folder) for folder in folders]
    for n_parts in range(1, max(len(path.parts) for path in paths) + 1):
        shorter = ["/".join(path.parts[-n_parts:]) for path in paths]
        if len(set(shorter)) == len(shorter):
            names = shorter
            break
    return [
        Evaluated(name, folder, read_evaluation(folder))
        for name, folder in zip(names, folders, strict=True)
    ]


def compare(runs: Sequence[Evaluated]) -> dict[str, Any]:
    """The comparison as JSON has it; the first run is the one that the others are compared with."""
    records = [run.record for run in runs]
    methods = dict.fromkeys(name for record in records for name in record["methods"])
    facts = ("n_victims", "attacks_per_victim", "n_runs", "n_targets", "outcomes")
    first = runs[0]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "runs": [
            {
                "name": run.name,
                "fingerprint": run.record["fingerprint"],
                "source": run.record["source"]["name"],
                "good_threshold": run.record["settings"]["good_threshold"],
            }
            | {key: run.record["dataset"][key] for key in facts}
            for run in runs
        ],
        "settings": differing_settings(records),
        "methods": {
            name: [
                {side: method[side]["summary"] for side in SIDES}
                | {key: method["detection"][key] for key in ("auc", "found_at")}
                if (method := record["methods"].get(name))
                else None
                for record in records
            ]
            for name in methods
        },
        "differences": [
            difference(first, other, method)
            for other in runs[1:]
            for method in methods
            if method in first.record["methods"] and method in other.record["methods"]
        ],
    }


def differing_settings(records: Iterable[Record]) -> dict[str, list[str]]:
    """By dotted name, the setting of each run, where they are not all the same."""
    counts = ("n_victims", "attacks_per_victim", "images_per_victim")
    settings = [
        dict(
            leaves(
                {
                    "source": {key: r["source"][key] for key in ("name", "split", "content_hash")},
                    "dataset": {key: r["dataset"][key] for key in counts},
                    "store": r["dataset"]["manifest"]["campaign"],
                    "evaluation": r["settings"],
                    "restorers": r["restorers"],
                }
            )
        )
        for r in records
    ]
    names = dict.fromkeys(name for found in settings for name in found)
    rows = {name: [found.get(name, NOTHING) for found in settings] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def difference(first: Evaluated, other: Evaluated, method: str) -> dict[str, Any]:
    """Difference of the scores of `other` and `first` by `method`: targets, then decoys."""
    body: dict[str, Any] = {"run": other.name, "against": first.name, "method": method}
    both = first.record, other.record
    for side in SIDES:
        order, why = _pairing(*both, side)
        found: dict[str, Any] = {"paired": order is not None, "why": why}
        scores = {
            f"mean_{m}": [np.array(r["methods"][method][side][m], float) for r in both]
            for m in METRICS
        }
        limits = [record["settings"]["good_threshold"] for record in both]
        scores["good_fraction"] = [
            (ssim > limit) * 1.0 for ssim, limit in zip(scores["mean_ssim"], limits, strict=True)
        ]
        for name, (before, after) in scores.items():
            ends = None
            if len(before) and len(after) and order is not None:
                ends = bootstrap_interval(after[order] - before)
            elif len(before) and len(after):
                ends = unpaired_interval(before, after)
            mean = None if ends is None else round(float(after.mean() - before.mean()), DECIMALS)
            found[name] = mean
            found[f"{name}_interval"] = ends and [round(float(end), DECIMALS) for end in ends]
        body[side] = found
    return body


def unpaired_interval(
    before: Scores, after: Scores, *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of mean(after) - mean(before), neither empty; each is resampled alone."""
    rng = np.random.default_rng(seed)
    differences = [
        rng.choice(after, len(after)).mean() - rng.choice(before, len(before)).mean()
        for _ in range(N_BOOTSTRAP)
    ]
    low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _pairing(first: Record, other: Record, side: str) -> tuple[npt.NDArray[np.int64] | None, str]:
    """(which row of `other` each row of `first` is, why), None where they cannot be paired."""
    if first["source"]["content_hash"] != other["source"]["content_hash"]:
        return None, "they scored images of different sources"
    mine, theirs = (
        list(zip(record[side]["victim"], record[side]["image_id"], strict=True))
        for record in (first, other)
    )
    place = {row: i for i, row in enumerate(theirs)}
    if sorted(mine) != sorted(theirs) or len(place) < len(theirs):
        return None, "they scored other images of the same source, or in other victims"
    return np.array([place[row] for row in mine], np.int64), SAME_SOURCE


def difference_rows(comparison: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per method and run: the differences of the targets, as a screen has them."""
    return [
        {
            "method": found["method"],
            "run": found["run"],
            "images": "paired" if body["paired"] else "unpaired",
            "good": percent(body["good_fraction"]),
            "SSIM": score(body["mean_ssim"]),
            "95 %": interval(body["mean_ssim_interval"]),
            "HaarPSI": score(body["mean_haarpsi"]),
        }
        for found in comparison["differences"]
        for body in (found["targets"],)
    ]


def write_comparison(
    comparison: Mapping[str, Any], runs: Sequence[Evaluated], page: Path
) -> dict[str, Path]:
    """The files: `page`, and beside it PAGE.json and the CSVs in PAGE-data/."""
    data = page.with_name(f"{page.stem}-data")
    tables = {table.name: table for table in _tables(comparison, runs)}
    looks = {
        run.name: Style(k, COLOURS[k % len(COLOURS)], k % N_MARKERS) for k, run in enumerate(runs)
    }
    titles = {name: method_title(name)[0] for name in comparison["methods"]}
    panels = []
    for method, named in titles.items():
        ranked = tables["ranked-curves"].where("method", method)
        curves = []
        for name, look in looks.items():
            rows = ranked.where("run", name)
            sides = [rows.where("side", side).points("rank", "ssim") for side in SIDES]
            curves.append(Line(look, *sides))
        title = f"{METRIC_TITLES['ssim']}: {named}"
        panel = ranked_panel(title, [c for line in curves for c in (line.targets, line.decoys)])
        panels.append(panel.svg(lines(panel, curves), f"{title}, the i-th best image of each run"))
    html = page_html(
        "compare.html",
        {},
        comparison=comparison,
        names=list(looks),
        titles=titles,
        figure=Figure("ranked-curves", panels, [], [(look, n) for n, look in looks.items()]),
        tables=tables,
        styles=looks,
        folder=data.name,
        most_inline=math.inf,
    )
    write_tables(data, tables.values())
    write_json(page.with_suffix(".json"), comparison)
    write_file(page, text_bytes(html))
    return {"page": page, "numbers": page.with_suffix(".json"), "data": data}


def _tables(comparison: Mapping[str, Any], runs: Sequence[Evaluated]) -> list[Table]:
    """The scores by method and run, the differences, the settings that differ, a column per run,
    and the i-th best score of every method in every run."""
    names = [run.name for run in runs]
    methods = [
        {"method": method, "run": name} | score_cells(numbers, numbers)
        for method, found in comparison["methods"].items()
        for name, numbers in zip(names, found, strict=True)
        if numbers is not None
    ]
    keys = ("method", "run", "against")
    differences = [
        {key: found[key] for key in keys} | {"side": side} | cells_of(found[side])
        for found in comparison["differences"]
        for side in SIDES
    ]
    settings = comparison["settings"]
    columns = {name: [values[k] for values in settings.values()] for k, name in enumerate(names)}
    keys_ranked = ("method", "run", "side", "rank", *METRICS)
    ranked = []
    for run in runs:
        for method, body in run.record["methods"].items():
            for side in SIDES:
                best = (sorted(body[side][metric], reverse=True) for metric in METRICS)
                for rank, scores in enumerate(zip(*best, strict=True), 1):
                    cells = (method, run.name, side, rank, *scores)
                    ranked.append(dict(zip(keys_ranked, cells, strict=True)))
    return [
        table_of("methods", methods, ("method", "run")),
        table_of("differences", differences, (*keys, "side")),
        Table("settings", {"setting": list(settings), **columns}),
        table_of("ranked-curves", ranked, keys_ranked),
    ]
