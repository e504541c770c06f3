"""Several evaluations side by side: which settings differ, and by how much the scores do.

Where two runs scored the same images (same source, same victims' rows), their difference is taken
image by image (paired), which removes what makes images easy or hard; elsewhere the means are
compared, which needs more images for the same certainty. Intervals are 95 %, percentile bootstrap
over images (Efron 1979): they say nothing about new victims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.summary import N_BOOTSTRAP, bootstrap_interval
from tasks.page.files import Record, page_of
from tasks.page.formats import NOTHING, leaves
from tasks.report.record import SIDES, evaluation_folder, read_record

SCHEMA, VERSION = "palimpsest-comparison", 1
COMMAND = "palimpsest evaluate"
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
    apart.

    Raises ValueError for fewer than two, one folder twice, or one without a finished evaluation.
    """
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
    """The comparison as JSON has it; the first run is the one that the others are compared
    with. Raises ValueError if a record is not one."""
    with page_of(records_of(runs), COMMAND):
        return _compared(runs)


def records_of(runs: Sequence[Evaluated]) -> str:
    """The files that a comparison is made from, for messages."""
    return " or ".join(str(run.folder / "evaluation.json") for run in runs)


def _compared(runs: Sequence[Evaluated]) -> dict[str, Any]:
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
    settings = []
    for run in runs:
        record = run.record
        manifest = record["dataset"]["manifest"]
        source = {key: record["source"][key] for key in ("name", "split", "content_hash")}
        counts = ("n_victims", "attacks_per_victim", "images_per_victim")
        settings.append(
            dict(
                leaves(
                    {
                        "source": source,
                        "dataset": {key: record["dataset"][key] for key in counts},
                        "store": manifest.get("campaign", manifest),
                        "evaluation": record["settings"],
                        "restorers": record["restorers"],
                    }
                )
            )
        )
    names = dict.fromkeys(name for found in settings for name in found)
    rows = {name: [found.get(name, NOTHING) for found in settings] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def difference(first: Evaluated, other: Evaluated, method: str) -> dict[str, Any]:
    """Difference of the scores of `other` and `first` by `method`: targets, then decoys."""
    body: dict[str, Any] = {"run": other.name, "against": first.name, "method": method}
    for side in SIDES:
        order, why = _pairing(first.record, other.record, side)
        found: dict[str, Any] = {"paired": order is not None, "why": why}
        for metric in METRICS:
            before = np.array(first.record["methods"][method][side][metric], np.float64)
            after = np.array(other.record["methods"][method][side][metric], np.float64)
            found[f"mean_{metric}"] = (
                _rounded(after.mean() - before.mean()) if _any(before, after) else None
            )
            found[f"mean_{metric}_interval"] = _interval(before, after, order)
        thresholds = [run.record["settings"]["good_threshold"] for run in (first, other)]
        good = [
            (np.array(run.record["methods"][method][side]["ssim"]) > threshold).astype(float)
            for run, threshold in zip((first, other), thresholds, strict=True)
        ]
        found["good_fraction"] = _rounded(good[1].mean() - good[0].mean()) if _any(*good) else None
        found["good_fraction_interval"] = _interval(good[0], good[1], order)
        body[side] = found
    return body


def unpaired_interval(
    before: Scores, after: Scores, *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of mean(after) - mean(before); each is resampled by itself.

    Raises ValueError if either is empty.
    """
    if not _any(before, after):
        raise ValueError("a difference of means needs at least one value on either side")
    rng = np.random.default_rng(seed)
    differences = [
        rng.choice(after, len(after)).mean() - rng.choice(before, len(before)).mean()
        for _ in range(N_BOOTSTRAP)
    ]
    low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _any(before: Scores, after: Scores) -> bool:
    return len(before) > 0 and len(after) > 0


def _interval(
    before: Scores, after: Scores, order: npt.NDArray[np.int64] | None
) -> list[float] | None:
    if not _any(before, after):
        return None
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
    facts = run.record["dataset"]
    counts = ("n_victims", "attacks_per_victim", "n_runs", "n_targets", "outcomes")
    return {
        "name": run.name,
        "fingerprint": run.record["fingerprint"],
        "source": run.record["source"]["name"],
        "good_threshold": run.record["settings"]["good_threshold"],
    } | {key: facts[key] for key in counts}


def _numbers(method: dict[str, Any] | None) -> dict[str, Any] | None:
    """Numbers of one run's method in the table of methods; None if the run has it not."""
    if method is None:
        return None
    detection = method["detection"]
    return {side: method[side]["summary"] for side in SIDES} | {
        "auc": detection["auc"],
        "found_at": detection["found_at"],
    }


def _rounded(value: float) -> float:
    return round(float(value), DECIMALS)
