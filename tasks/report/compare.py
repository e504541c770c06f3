"""Several evaluations side by side, as one page: which settings differ, and by how much the scores
do. Where two runs scored the same images, their difference is taken image by image (paired).
Intervals are 95 %, percentile bootstrap over images (Efron 1979): they say nothing about new
victims. The numbers lie beside the page as CSV and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
COUNTS = ("n_victims", "attacks_per_victim")

Records = Mapping[str, Record]
"""Evaluations by their names on the page; the others are compared with the first."""


def compare_runs(runs: Sequence[Path], page: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """The comparison of finished evaluations (jobs' folders or evaluations' own) with the first,
    and the files written of it. Raises ValueError for fewer than two, for one without a finished
    evaluation, or if `page` does not end in .html."""
    if page.suffix != ".html":
        raise ValueError(f"--out {page} does not end in .html; the page is one")
    records = open_runs(runs)
    page.parent.mkdir(parents=True, exist_ok=True)
    files = (str(evaluation_folder(run).resolve() / "evaluation.json") for run in runs)
    with page_of(" or ".join(files), COMMAND):
        comparison = compare(records)
        return comparison, write_comparison(comparison, records, page)


def open_runs(runs: Sequence[Path]) -> dict[str, Record]:
    """The evaluations of `runs` (job folders or evaluation folders), each named by as many last
    parts of its path as distinguish them. Raises ValueError for fewer than two, one folder twice,
    or one without a finished evaluation."""
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run given; a comparison needs at least two folders")
    folders = [evaluation_folder(run).resolve() for run in runs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ValueError(f"{folder} is given twice; give each evaluation once")
    paths = [folder.parent if folder.name == "evaluation" else folder for folder in folders]
    names = [str(folder) for folder in folders]
    for n_parts in range(max(len(path.parts) for path in paths), 0, -1):
        shorter = ["/".join(path.parts[-n_parts:]) for path in paths]
        names = shorter if len(set(shorter)) == len(shorter) else names
    return dict(zip(names, map(read_evaluation, folders), strict=True))


def compare(records: Records) -> dict[str, Any]:
    """The comparison as JSON has it."""
    methods = dict.fromkeys(name for record in records.values() for name in record["methods"])
    facts = (*COUNTS, "n_runs", "n_targets", "outcomes")
    first, *others = records
    settings = [  # by dotted name
        dict(
            leaves(
                {
                    "source": {key: r["source"][key] for key in ("name", "split", "content_hash")},
                    "dataset": {key: r["dataset"][key] for key in (*COUNTS, "images_per_victim")},
                    "store": r["dataset"]["manifest"]["campaign"],
                    "evaluation": r["settings"],
                    "restorers": r["restorers"],
                }
            )
        )
        for r in records.values()
    ]
    rows = {n: [own.get(n, NOTHING) for own in settings] for own in settings for n in own}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "runs": [
            {
                "name": name,
                "fingerprint": record["fingerprint"],
                "source": record["source"]["name"],
                "good_threshold": record["settings"]["good_threshold"],
            }
            | {key: record["dataset"][key] for key in facts}
            for name, record in records.items()
        ],
        "settings": {name: values for name, values in rows.items() if len(set(values)) > 1},
        "methods": {
            name: [
                {side: method[side]["summary"] for side in SIDES}
                | {key: method["detection"][key] for key in ("auc", "found_at")}
                if (method := record["methods"].get(name))
                else None
                for record in records.values()
            ]
            for name in methods
        },
        "differences": [
            {"run": other, "against": first, "method": method}
            | {side: difference(records[first], records[other], method, side) for side in SIDES}
            for other in others
            for method in methods
            if method in records[first]["methods"] and method in records[other]["methods"]
        ],
    }


def difference(first: Record, other: Record, method: str, side: str) -> dict[str, Any]:
    """Means and intervals of the scores of `other` less those of `first`, paired where both scored
    the same images in the same victims."""
    mine, theirs = (
        list(zip(record[side]["victim"], record[side]["image_id"], strict=True))
        for record in (first, other)
    )
    row_of = {image: row for row, image in enumerate(theirs)}
    paired, why = False, "they scored images of different sources"
    if first["source"]["content_hash"] == other["source"]["content_hash"]:
        paired = sorted(mine) == sorted(theirs) and len(row_of) == len(theirs)
        why = "they scored other images of the same source, or in other victims"
        why = "the two runs scored the same images" if paired else why
    body: dict[str, Any] = {"paired": paired, "why": why}
    both = [(r["methods"][method][side], r["settings"]["good_threshold"]) for r in (first, other)]
    scores = {f"mean_{m}": [np.array(own[m], float) for own, _limit in both] for m in METRICS}
    scores["good_fraction"] = [(np.array(own["ssim"]) > limit) * 1.0 for own, limit in both]
    for name, (before, after) in scores.items():
        mean = ends = None
        if len(before) and len(after):
            mean = round(float(after.mean() - before.mean()), DECIMALS)
            ends = unpaired_interval(before, after)
            if paired:
                ends = bootstrap_interval(after[[row_of[image] for image in mine]] - before)
        body[name] = mean
        body[f"{name}_interval"] = ends and [round(float(end), DECIMALS) for end in ends]
    return body


def unpaired_interval(
    before: npt.NDArray[np.float64], after: npt.NDArray[np.float64], *, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of mean(after) - mean(before), neither empty; each is resampled alone."""
    rng = np.random.default_rng(seed)
    differences = [
        rng.choice(after, len(after)).mean() - rng.choice(before, len(before)).mean()
        for _ in range(N_BOOTSTRAP)
    ]
    low, high = np.quantile(differences, [0.025, 0.975])
    return float(low), float(high)


def difference_rows(comparison: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per method and run: the differences of the targets, as a screen has them."""
    return [
        {
            "method": entry["method"],
            "run": entry["run"],
            "images": "paired" if body["paired"] else "unpaired",
            "good": percent(body["good_fraction"]),
            "SSIM": score(body["mean_ssim"]),
            "95 %": interval(body["mean_ssim_interval"]),
            "HaarPSI": score(body["mean_haarpsi"]),
        }
        for entry in comparison["differences"]
        for body in (entry["targets"],)
    ]


def write_comparison(
    comparison: Mapping[str, Any], records: Records, page: Path
) -> dict[str, Path]:
    """The files: `page`, and beside it PAGE.json and the CSVs in PAGE-data/."""
    data = page.with_name(f"{page.stem}-data")
    methods = [
        {"method": method, "run": name} | score_cells(numbers, numbers)
        for method, of_runs in comparison["methods"].items()
        for name, numbers in zip(records, of_runs, strict=True)
        if numbers is not None
    ]
    keys = ("method", "run", "against")
    differences = [
        {key: entry[key] for key in keys} | {"side": side} | cells_of(entry[side])
        for entry in comparison["differences"]
        for side in SIDES
    ]
    settings = comparison["settings"]
    columns = {name: [v[k] for v in settings.values()] for k, name in enumerate(records)}
    ranks = [
        {"method": method, "run": name, "side": side, "rank": rank}
        | dict(zip(METRICS, scores, strict=True))
        for name, record in records.items()
        for method, body in record["methods"].items()
        for side in SIDES
        for rank, scores in enumerate(
            zip(*(sorted(body[side][metric], reverse=True) for metric in METRICS), strict=True), 1
        )
    ]
    ranked = table_of("ranked-curves", ranks, ("method", "run", "side", "rank", *METRICS))
    tables = [
        table_of("methods", methods, ("method", "run")),
        table_of("differences", differences, (*keys, "side")),
        Table("settings", {"setting": list(settings), **columns}),
        ranked,
    ]
    looks = {
        name: Style(k, COLOURS[k % len(COLOURS)], k % N_MARKERS) for k, name in enumerate(records)
    }
    titles = {name: method_title(name)[0] for name in comparison["methods"]}
    panels = []
    for method, named in titles.items():
        curves = []
        for name, look in looks.items():
            rows = ranked.where("method", method).where("run", name)
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
        tables={table.name: table for table in tables},
        styles=looks,
        folder=data.name,
        most_inline=math.inf,
    )
    write_tables(data, tables)
    write_json(page.with_suffix(".json"), comparison)
    write_file(page, text_bytes(html))
    return {"page": page, "numbers": page.with_suffix(".json"), "data": data}
