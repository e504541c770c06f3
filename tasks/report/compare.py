"""Several evaluations side by side: which settings differ, and by how much the scores do. Where two
runs scored the same images, their difference is taken image by image (paired). Intervals are 95 %,
percentile bootstrap over images (Efron 1979): they say nothing about new victims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.summary import N_BOOTSTRAP, bootstrap_interval
from tasks.page.files import Record
from tasks.page.formats import NOTHING, leaves
from tasks.report.record import SIDES, campaign_of, evaluation_folder, read_record

SCHEMA, VERSION = "palimpsest-comparison", 1
METRICS = ("ssim", "haarpsi")
DECIMALS = 6
SAME_SOURCE = "the two runs scored the same images"

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evaluated:
    """One evaluation and the name it goes by on the page."""

    name: str
    folder: Path
    record: Record


def open_runs(runs: Sequence[Path]) -> list[Evaluated]:
    """The evaluations of `runs` (job folders or evaluation folders), with names that tell them
    apart. Raises ValueError for fewer than two, one folder twice, or one without a finished
    evaluation."""
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run given; a comparison needs at least two folders")
    folders = [evaluation_folder(run).resolve() for run in runs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ValueError(f"{folder} is given twice; give each evaluation once")
    return [
        Evaluated(name, folder, read_record(folder / "evaluation.json"))
        for name, folder in zip(_names(folders), folders, strict=True)
    ]


def compare(runs: Sequence[Evaluated]) -> dict[str, Any]:
    """The comparison as JSON has it; the first run is the one that the others are compared with."""
    methods = dict.fromkeys(name for run in runs for name in run.record["methods"])
    first = runs[0]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "runs": [_facts(run) for run in runs],
        "settings": differing_settings(runs),
        "methods": {
            name: [_numbers(run.record["methods"].get(name)) for run in runs] for name in methods
        },
        "differences": [
            difference(first, other, method)
            for other in runs[1:]
            for method in methods
            if method in first.record["methods"] and method in other.record["methods"]
        ],
    }


def differing_settings(runs: Sequence[Evaluated]) -> dict[str, list[str]]:
    """By dotted name, the setting of each run, where they are not all the same."""
    counts = ("n_victims", "attacks_per_victim", "images_per_victim")
    settings = [
        dict(
            leaves(
                {
                    "source": {key: r["source"][key] for key in ("name", "split", "content_hash")},
                    "dataset": {key: r["dataset"][key] for key in counts},
                    "store": campaign_of(r),
                    "evaluation": r["settings"],
                    "restorers": r["restorers"],
                }
            )
        )
        for r in (run.record for run in runs)
    ]
    names = dict.fromkeys(name for found in settings for name in found)
    rows = {name: [found.get(name, NOTHING) for found in settings] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def difference(first: Evaluated, other: Evaluated, method: str) -> dict[str, Any]:
    """Difference of the scores of `other` and `first` by `method`: targets, then decoys."""
    body: dict[str, Any] = {"run": other.name, "against": first.name, "method": method}
    both = first.record, other.record
    for side in SIDES:
        order, why = _pairing(first.record, other.record, side)
        found: dict[str, Any] = {"paired": order is not None, "why": why}
        scores = {
            f"mean_{m}": [np.array(r["methods"][method][side][m], float) for r in both]
            for m in METRICS
        }
        scores["good_fraction"] = [
            (np.array(r["methods"][method][side]["ssim"]) > r["settings"]["good_threshold"]) * 1.0
            for r in both
        ]
        for name, (before, after) in scores.items():
            known = len(before) > 0 and len(after) > 0
            found[name] = _rounded(after.mean() - before.mean()) if known else None
            found[f"{name}_interval"] = _interval(before, after, order) if known else None
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


def _interval(before: Scores, after: Scores, order: npt.NDArray[np.int64] | None) -> list[float]:
    if order is None:
        limits = unpaired_interval(before, after)
    else:
        limits = bootstrap_interval(after[order] - before)
    return [_rounded(limit) for limit in limits]


def _pairing(first: Record, other: Record, side: str) -> tuple[npt.NDArray[np.int64] | None, str]:
    """(which row of `other` each row of `first` is, why), None where they cannot be paired."""
    if first["source"]["content_hash"] != other["source"]["content_hash"]:
        return None, "they scored images of different sources"
    rows = [
        list(zip(record[side]["victim"], record[side]["image_id"], strict=True))
        for record in (first, other)
    ]
    place = {row: i for i, row in enumerate(rows[1])}
    if sorted(rows[0]) != sorted(rows[1]) or len(place) < len(rows[1]):
        return None, "they scored other images of the same source, or in other victims"
    return np.array([place[row] for row in rows[0]], np.int64), SAME_SOURCE


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart; `evaluation` at the end goes."""
    paths = [folder.parent if folder.name == "evaluation" else folder for folder in folders]
    for n_parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-n_parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _facts(run: Evaluated) -> dict[str, Any]:
    counts = ("n_victims", "attacks_per_victim", "n_runs", "n_targets", "outcomes")
    return {
        "name": run.name,
        "fingerprint": run.record["fingerprint"],
        "source": run.record["source"]["name"],
        "good_threshold": run.record["settings"]["good_threshold"],
    } | {key: run.record["dataset"][key] for key in counts}


def _numbers(method: dict[str, Any] | None) -> dict[str, Any] | None:
    """Numbers of one run's method in the table of methods; None if the run has it not."""
    if method is None:
        return None
    found = {key: method["detection"][key] for key in ("auc", "found_at")}
    return {side: method[side]["summary"] for side in SIDES} | found


def _rounded(value: float) -> float:
    return round(float(value), DECIMALS)
