"""Several evaluations side by side, as one page: which settings differ, and by how much the scores
do. Where two runs scored the same images, their difference is taken image by image (paired).
Intervals are 95 %, percentile bootstrap over images (Efron 1979): they say nothing about new
victims. The numbers lie beside the page as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recon_core.summary import N_BOOTSTRAP, TAILS, bootstrap_interval
from storage.files import text_bytes, write_file, write_json
from tasks.evaluation.record import COMMAND, DECIMALS, SIDES, evaluation_folder, read_evaluation
from tasks.page.charts import Line, lines, styles_of
from tasks.page.files import Record, page_html, page_of
from tasks.page.formats import NOTHING, interval, leaves, percent, score
from tasks.report.figures import METRIC_TITLES, METRICS, Figure, ranked_panel
from tasks.report.headline import method_title

SCHEMA, VERSION = "palimpsest-comparison", 1
COLOURS = (2, 4, 3, 5, 6, 10, 0, 8, 7, 9, 11, 1)
COUNTS = ("n_victims", "attacks_per_victim")

Records = Mapping[str, Record]
"""Evaluations by their names on the page; the others are compared with the first."""


def compare_runs(runs: Sequence[Path], page: Path) -> dict[str, Any]:
    """Compare finished evaluations (jobs' folders or evaluations' own) with the first.

    Writes `page`, and the comparison, which it returns, as JSON beside it. Raises ValueError for
    fewer than two, one given twice or not finished, or if `page` does not end in .html.
    """
    if page.suffix != ".html":
        raise ValueError(f"--out {page} does not end in .html; the page is one")
    records = open_runs(runs)
    page.parent.mkdir(parents=True, exist_ok=True)
    files = (str(evaluation_folder(run).resolve() / "evaluation.json") for run in runs)
    with page_of(" or ".join(files), COMMAND):
        comparison = compare(records)
        write_file(page, text_bytes(comparison_page(comparison, records)))
    write_json(page.with_suffix(".json"), comparison)
    return comparison


def open_runs(runs: Sequence[Path]) -> dict[str, Record]:
    """The evaluations of `runs`, each named by as many last parts of its path as distinguish them.
    Raises ValueError for fewer than two, one folder twice, or one without a finished evaluation."""
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run given; a comparison needs at least two folders")
    folders = [evaluation_folder(run).resolve() for run in runs]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise ValueError(f"{twice[0]} is given twice; give each evaluation once")
    paths = [folder.parent if folder.name == "evaluation" else folder for folder in folders]
    names = [str(folder) for folder in folders]
    for n_parts in range(max(len(path.parts) for path in paths), 0, -1):
        shorter = ["/".join(path.parts[-n_parts:]) for path in paths]
        names = shorter if len(set(shorter)) == len(shorter) else names
    return dict(zip(names, map(read_evaluation, folders), strict=True))


def compare(records: Records) -> dict[str, Any]:
    """The comparison as JSON has it."""
    first, *others = records
    methods = dict.fromkeys(name for record in records.values() for name in record["methods"])
    facts = (*COUNTS, "n_runs", "n_targets", "outcomes")
    runs, settings = [], []  # settings by dotted name
    for name, r in records.items():
        source, dataset = r["source"], r["dataset"]
        about = {"name": name, "fingerprint": r["fingerprint"], "source": source["name"]}
        about["good_threshold"] = r["settings"]["good_threshold"]
        runs.append(about | {key: dataset[key] for key in facts})
        own = {
            "source": {key: source[key] for key in ("name", "split", "content_hash")},
            "dataset": {key: dataset[key] for key in (*COUNTS, "images_per_victim")},
            "store": dataset["manifest"]["campaign"],
            "evaluation": r["settings"],
            "restorers": r["restorers"],
        }
        settings.append(dict(leaves(own)))
    rows = {n: [own.get(n, NOTHING) for own in settings] for own in settings for n in own}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "runs": runs,
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
    the same images in the same victims; else each is resampled by itself."""
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
            if paired:
                low, high = bootstrap_interval(after[[row_of[image] for image in mine]] - before)
            else:
                rng = np.random.default_rng(0)
                old, new = (
                    [rng.choice(own, len(own)).mean() for _ in range(N_BOOTSTRAP)]
                    for own in (before, after)
                )
                low, high = np.quantile(np.subtract(new, old), TAILS)
            ends = [round(float(low), DECIMALS), round(float(high), DECIMALS)]
        body |= {name: mean, f"{name}_interval": ends}
    return body


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


def comparison_page(comparison: Mapping[str, Any], records: Records) -> str:
    """The HTML of the page: a chart per method, a line per run."""
    looks = styles_of(records, {}, COLOURS)
    titles = {name: method_title(name)[0] for name in comparison["methods"]}
    panels = []
    for method, named in titles.items():
        curves = []
        for name, look in looks.items():
            own = records[name]["methods"].get(method)
            ranked = [sorted(own[side]["ssim"], reverse=True) if own else [] for side in SIDES]
            curves.append(Line(look, *(list(enumerate(side, 1)) for side in ranked)))
        title = f"{METRIC_TITLES['ssim']}: {named}"
        panel = ranked_panel(title, [c for line in curves for c in (line.targets, line.decoys)])
        panels.append(panel.svg(lines(panel, curves), f"{title}, the i-th best image of each run"))
    return page_html(
        "compare.html",
        {},
        comparison=comparison,
        names=list(looks),
        titles=titles,
        figure=Figure("ranked-curves", panels, [], [(look, n) for n, look in looks.items()]),
        styles=looks,
    )
