"""An evaluation.json as arrays: scores by method, paired differences and their intervals.

Rows are (victim, image). A difference is taken row by row and its interval is the wider of two
percentile bootstraps of 95 %: over whole victims, whose images stand or fall together, and over
rows, which is what is left where there are one or two victims.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from recon_core.summary import bootstrap_interval
from tasks.evaluation.record import SCHEMA, VERSION
from tasks.evaluation.sweep import describe_hallucination
from tasks.study import statements
from tasks.study.statements import NotTestableError

PLAIN = "plain"
PAPER_PAIRS = 60_000_000
"""That the restorers of the image restoration paper learned from, about."""

Values = npt.NDArray[np.float64]
Side = Literal["targets", "decoys"]
Metric = Literal["ssim", "haarpsi"]


class Difference(statements.Difference):
    """A mean over targets with its interval of 95 %."""

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Evaluated:
    """The record of an evaluation (docs/evaluation.md). `restorers`: of those that were
    trained, the pairs that each learned from, where that is known."""

    record: Mapping[str, Any]
    restorers: Mapping[str, int] = field(default_factory=dict)

    def short_of(self) -> str | None:
        """The pairs that restorers learned from, if they are fewer than the paper's or unknown."""
        if not self.restorers:
            return f"the pairs that restorers learned from are not known (theirs {PAPER_PAIRS:,})"
        fewest = min(self.restorers.values())
        if fewest >= PAPER_PAIRS:
            return None
        return f"small restorers, which learned from {fewest:,} pairs (theirs {PAPER_PAIRS:,})"

    @property
    def methods(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.record["methods"]
        return found

    @property
    def threshold(self) -> float:
        return float(self.record["settings"]["good_threshold"])

    def of_kind(self, *kinds: str) -> list[str]:
        return [name for name, body in self.methods.items() if body["kind"] in kinds]

    def generic(self) -> list[str]:
        """The restorers that did not learn from reconstructions.

        Raises NotTestableError if none was scored.
        """
        names = self.of_kind("classical", "external")
        if not names:
            raise NotTestableError("no generic restorer was scored")
        return names

    def samples(self) -> tuple[str, str]:
        """(one sample, the mean of most samples) of the first generative restorer.

        Raises NotTestableError without one.
        """
        counts = {name: int(found[2]) for name in self.of_kind("trained")
                  if (found := re.fullmatch(r"(.+)_x(\d+)", name))}  # fmt: skip
        for name in counts:
            stem = name.rpartition("_x")[0]
            most = max((other for other in counts if other.rpartition("_x")[0] == stem),
                       key=counts.__getitem__)  # fmt: skip
            if counts[most] > 1 and f"{stem}_x1" in counts:
                return f"{stem}_x1", most
        raise NotTestableError("no mean of samples was scored")

    def restored(self) -> str:
        """The paper's method, the mean of samples; else the first trained restorer.

        Raises NotTestableError without one.
        """
        try:
            return self.samples()[1]
        except NotTestableError:
            for name in self.of_kind("trained"):
                return name
        raise NotTestableError("no trained restorer was scored")

    def trained(self) -> list[str]:
        """All trained restorers, generative ones by their means alone.

        Raises NotTestableError if there is none.
        """
        names = [name for name in self.of_kind("trained") if not name.endswith("_x1")]
        if not names:
            raise NotTestableError("no trained restorer was scored")
        return names

    def scores(self, method: str, side: Side = "targets", metric: Metric = "ssim") -> Values:
        return np.array(self.methods[method][side][metric], np.float64)

    def good(self, method: str, side: Side = "targets") -> Values:
        """1 where the SSIM is above the threshold, else 0."""
        return (self.scores(method, side) > self.threshold).astype(np.float64)

    def gain(self, after: str, before: str = PLAIN, metric: Metric = "ssim") -> Values:
        """Per target, the score with `after` less the score with `before`."""
        return self.scores(after, metric=metric) - self.scores(before, metric=metric)

    def mean(self, values: Values) -> Difference:
        """The mean of one value per target."""
        victims = np.array(self.record["targets"]["victim"])
        intervals = [bootstrap_interval(values), bootstrap_interval(values, groups=victims)]
        low, high = max(intervals, key=lambda ends: ends[1] - ends[0])
        return Difference(float(values.mean()), low, high)

    def with_decoys(self, targets: Values, decoys: Values) -> Values:
        """Per target, its value plus that of a decoy of the same victim.

        Raises ValueError if the victims do not have as many decoys as targets.
        """
        mine, theirs = (np.array(self.record[side]["victim"]) for side in ("targets", "decoys"))
        order, beside = (np.argsort(victims, kind="stable") for victims in (mine, theirs))
        if not np.array_equal(mine[order], theirs[beside]):
            raise ValueError("victims do not have as many decoys as targets; evaluate again")
        total = targets.copy()
        total[order] += decoys[beside]
        return total

    def detection(self, method: str) -> Values:
        """One value per target whose mean is the area under the ROC curve.

        With V(target) the share of decoys below it and V(decoy) the share of targets above it, ties
        counting half, the values are V(target) + V(decoy) - area (DeLong et al. 1988): resampling
        them varies targets and decoys.
        """
        scores, decoys = self.scores(method), self.scores(method, "decoys")
        of_targets, of_decoys = _share_below(decoys, scores), 1 - _share_below(scores, decoys)
        return self.with_decoys(of_targets - of_targets.mean(), of_decoys)


def read_evaluation(path: Path) -> Evaluated:
    """The evaluation in a file, or in a folder that has it.

    Raises ValueError if it is something else or has no target.
    """
    file = path / "evaluation.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} is not there; give an evaluation.json, or the folder it is in")
    try:
        record = json.loads(file.read_bytes())
        found = record.get("schema"), record.get("version")
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{file} is no evaluation ({error}); evaluate the job again") from error
    if found != (SCHEMA, VERSION):
        raise ValueError(
            f"{file}: schema and version are {found}, expected {(SCHEMA, VERSION)}; evaluate the "
            "job again with this version"
        )
    if not record["targets"]["victim"]:
        raise ValueError(f"{file} has no target; evaluate a store with runs")
    return Evaluated(record)


def _share_below(values: Values, thresholds: Values) -> Values:
    """Of each threshold, the share of `values` below it; ties count half."""
    ordered = np.sort(values)
    below = np.searchsorted(ordered, thresholds, side="left")
    not_above = np.searchsorted(ordered, thresholds, side="right")
    share: Values = (below + not_above) / (2 * len(values))
    return share


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
        mine = [row for row in halves if row["side"] == "targets"]
        curves = None  # two, of targets by SSIM
        if mine and f"{name} ssim 1" in mine[0]:
            curves = {"targets": {"ssim": [_column(mine, f"{name} ssim {h}") for h in (1, 2)]}}
        body: dict[str, Any] = {
            "kind": row["kind"],
            "halves": curves,
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
