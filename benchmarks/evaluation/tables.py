"""An evaluation read back from the tables of its report, for claims that are to be recomputed.

`palimpsest report` writes them to `evaluation/report-data` of a job (docs/pages.md); `TABLES` are
what the claims of the image restoration paper need. Rank correlations and their intervals are
computed anew from the single images; sums over all pictures, which no table has, are those of
`methods.csv`.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evaluation.evaluated import PLAIN, Evaluated
from tasks.evaluation.sweep import describe_hallucination

TABLES = ("before-after.csv", "methods.csv", "runs.csv", "context.json")
"""`split-halves.csv` and `hallucination.csv` are read as well where they are there."""
SIDES = ("targets", "decoys")
METRICS = ("ssim", "haarpsi")

Rows = Sequence[dict[str, str]]


def has_tables(folder: Path) -> bool:
    """True if `folder` has the files that `read_tables` needs."""
    return all((folder / name).is_file() for name in TABLES)


def read_tables(folder: Path) -> Evaluated:
    """The evaluation whose report left the tables in `folder`.

    Raises ValueError, naming the folder, if they are not those of a report.
    """
    try:
        cards = json.loads((folder / "context.json").read_bytes()).get("restorers", {})
        pairs = {name: int(card["dataset"]["n_pairs_used"]) for name, card in cards.items()}
        return Evaluated(_record(folder), pairs)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{folder} is no report-data of an evaluation ({error!r}); rebuild it with palimpsest "
            "report"
        ) from error


def _record(folder: Path) -> dict[str, Any]:
    context = json.loads((folder / "context.json").read_bytes())
    images, kinds, runs = (_rows(folder / name) for name in TABLES[:3])
    of_side = {side: [row for row in images if row["side"] == side] for side in SIDES}
    victims = {side: [int(row["victim"]) for row in rows] for side, rows in of_side.items()}
    halves, samples = _rows(folder / "split-halves.csv"), _rows(folder / "hallucination.csv")
    methods: dict[str, Any] = {}
    for row in kinds:
        name = row["method"]
        body: dict[str, Any] = {
            "kind": row["kind"],
            "halves": _halves(halves, name),
            **{side: {m: _column(rows, f"{name} {m}") for m in METRICS}
               for side, rows in of_side.items()},
        }  # fmt: skip
        mine = [sample for sample in samples if sample["method"] == name]
        for side in SIDES if mine else ():
            body[side] |= _of_samples([s for s in mine if s["side"] == side], body[side]["ssim"])
        methods[name] = body
    if PLAIN not in methods:
        raise ValueError(f"methods.csv has no {PLAIN!r}")
    recipe = context["recipe"]
    return {
        "settings": recipe["evaluation"],
        "dataset": {
            "attacks_per_victim": recipe["heldout"]["attacks_per_victim"],
            "n_runs": len(runs),
            "outcomes": dict(Counter(row["outcome"] for row in runs)),
        },
        **{side: {"victim": victims[side]} for side in SIDES},
        "methods": methods,
        "hallucination": describe_hallucination(methods, victims["targets"]),
        "seconds": {s["name"]: s["seconds"] for s in context["stages"] if s["name"] == "evaluate"},
    }


def _rows(path: Path) -> Rows:
    """Of a CSV file; none of one that is not there."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _column(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def _halves(rows: Rows, method: str) -> dict[str, Any] | None:
    """The two curves of targets by SSIM; None if there are none."""
    mine = [row for row in rows if row["side"] == "targets"]
    if not mine or f"{method} ssim 1" not in mine[0]:
        return None
    return {"targets": {"ssim": [_column(mine, f"{method} ssim {half}") for half in (1, 2)]}}


def _of_samples(rows: Rows, ssim: Sequence[float]) -> dict[str, list[float | None]]:
    """Disagreement and error by image; None of images without a picture, which score 0."""
    left = iter(rows)
    found: dict[str, list[float | None]] = {"disagreement": [], "rmse": []}
    for score in ssim:
        row = None if score == 0 else next(left)
        if row is not None and float(row["ssim"]) != score:
            raise ValueError("hallucination.csv and before-after.csv are not of one evaluation")
        for name, values in found.items():
            values.append(None if row is None else float(row[name]))
    return found
