"""The numbers behind every figure of a report as tables, named after the record's own names
(docs/pages.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from tasks.page.tables import Cell, Table, cells_of, table_of
from tasks.report.record import SIDES, Record, sampled_means

THRESHOLDS = [k / 100 for k in range(101)]
METRICS = ("ssim", "haarpsi")


def methods_table(record: Record) -> Table:
    """One row per method: every number of the table of methods."""
    rows: list[dict[str, Cell]] = []
    for name, method in record["methods"].items():
        row: dict[str, Cell] = {"method": name, "kind": method["kind"]}
        for side in SIDES:
            for key, value in method[side]["summary"].items():
                row |= cells_of(f"{side} {key}", value)
        row["auc"] = method["detection"]["auc"]
        for rate, found in (method["detection"]["found_at"] or {}).items():
            row[f"found at {rate}"] = found
        row["n_targets_above_every_decoy"] = method["n_targets_above_every_decoy"]
        for key, value in method["targets"]["compared_with_plain"].items():
            row |= cells_of(f"compared {key}", value)
        for key, value in (method.get("fast") or {}).items():
            row[f"fast {key}"] = value
        rows.append(row)
    return table_of("methods", rows)


def images_table(record: Record) -> Table:
    """One row per image, targets then decoys: every method's scores."""
    return Table("before-after", _both(lambda side: _scores(record, side, METRICS)))


def grid_table(record: Record) -> Table:
    """The images of figure 1 with their place, targets then decoys."""

    def columns(side: str) -> dict[str, list[Cell]]:
        rows = record["grid"][side]
        return _placed(rows) | _scores(record, side, ("ssim",), rows)

    return Table("best-images", _both(columns))


def side_by_side_table(record: Record) -> Table:
    """The images of one victim that are shown with every attack, targets then decoys."""
    chosen = record["side_by_side"]
    return Table(
        "attacks-side-by-side",
        _both(lambda side: _placed(chosen[side]) | _scores(record, side, ("ssim",), chosen[side])),
    )


def attacks_table(record: Record) -> Table:
    """One row per attack on the same victims: what was made, and how long it took; its scores are
    in `methods`."""
    names = ("method", "kind", "n_runs", "n_candidates", "seconds", "content_hash")
    return Table("attacks", {name: [a[name] for a in record["attacks"]] for name in names})


def appendix_table(record: Record) -> Table:
    """The images of the appendix in its order."""
    rows = record["appendix"]["targets"]
    return Table("all-images", _placed(rows) | _scores(record, "targets", ("ssim",), rows))


def unlike_table(record: Record) -> Table:
    """The pictures that resemble nothing, column by column of their figure."""
    nothing = record["nothing"]
    names = ("victim", "run", "candidate", "iteration", "ssim", "closest")
    return Table(
        "nothing", {"place": list(range(1, nothing["n"] + 1))} | {n: nothing[n] for n in names}
    )


def examples_table(record: Record) -> Table:
    """The pairs that show what a threshold means, bin by bin."""
    examples = record["examples"]
    low_and_high = list(pairwise(examples["edges"]))

    def columns(side: str) -> dict[str, list[Cell]]:
        rows = [row for of_bin in examples[side] for row in of_bin]
        bins = [
            between
            for between, of_bin in zip(low_and_high, examples[side], strict=True)
            for _ in of_bin
        ]
        edges: dict[str, list[Cell]] = {
            "row": list(rows),
            "above": [low for low, _ in bins],
            "at most": [high for _, high in bins],
        }
        return edges | _scores(record, side, ("ssim",), rows)

    return Table("examples", _both(columns))


def ranked_table(record: Record) -> Table:
    """The i-th best score of every method; each column is sorted by itself."""

    def columns(side: str) -> dict[str, list[Cell]]:
        methods = record["methods"].items()
        columns: dict[str, list[Cell]] = {"rank": _ranks(record, side)}
        columns |= {
            f"{name} {metric}": sorted(method[side][metric], reverse=True)
            for name, method in methods
            for metric in METRICS
        }
        return columns

    return Table("ranked-curves", _both(columns))


def halves_table(record: Record) -> Table:
    """The ranked scores of the two halves of the attacks, per method that has them."""

    def columns(side: str) -> dict[str, list[Cell]]:
        scores: dict[str, list[Cell]] = {"rank": _ranks(record, side)}
        for name in halved(record):
            for metric in METRICS:
                for k, half in enumerate(record["methods"][name]["halves"][side][metric]):
                    scores[f"{name} {metric} {k + 1}"] = sorted(half, reverse=True)
        return scores

    return Table("split-halves", _both(columns))


def halved(record: Record) -> list[str]:
    """The methods whose attacks were split into halves."""
    return [name for name, method in record["methods"].items() if method.get("halves")]


def margin_table(record: Record) -> Table:
    """Distance from the decision boundary and scores, of targets whose distance is known."""
    known = [i for i, margin in enumerate(record["targets"]["margin"]) if margin is not None]
    margins = [record["targets"]["margin"][i] for i in known]
    scores = _scores(record, "targets", ("ssim",), known)
    return Table("margin", {"margin": margins} | scores)


def thresholds_table(record: Record) -> Table:
    """Number of images that score above each threshold from 0 to 1."""
    columns: dict[str, list[Cell]] = {"threshold": list(THRESHOLDS)}
    for name, method in record["methods"].items():
        for side in SIDES:
            scores = method[side]["ssim"]
            columns[f"{name} {side}"] = [sum(s > level for s in scores) for level in THRESHOLDS]
    return Table("thresholds", columns)


def roc_table(record: Record) -> Table:
    """Share of targets found against share of decoys taken for targets, per method."""
    rows = [
        {"method": name, "false_positives": false, "found": found}
        for name, method in record["methods"].items()
        if method["detection"].get("roc")
        for false, found in zip(
            method["detection"]["roc"]["false_positives"],
            method["detection"]["roc"]["found"],
            strict=True,
        )
    ]
    return table_of("roc", rows, ("method", "false_positives", "found"))


def runs_table(record: Record) -> Table:
    """Every run: its outcome, settings and criteria, and what truly came back."""
    return Table("runs", {name: list(cells) for name, cells in record["runs"].items()})


def ranking_table(record: Record) -> Table:
    """Rank correlations of each criterion with what came back of the runs."""
    rows = []
    for name, found in (record["ranking"] or {}).items():
        row: dict[str, Cell] = {"criterion": name}
        for key, value in found.items():
            row |= cells_of(key, value)
        rows.append(row)
    return table_of("ranking", rows, ("criterion",))


def hallucination_table(record: Record) -> Table:
    """Disagreement of the samples and error of the match, of every image with a picture."""
    rows: list[dict[str, Cell]] = []
    for name in sampled_means(record):
        for side in SIDES:
            body = record["methods"][name][side]
            rows += [
                {"method": name, "side": side, "disagreement": spread, "rmse": rmse, "ssim": ssim}
                for spread, rmse, ssim in zip(
                    body["disagreement"], body["rmse"], body["ssim"], strict=True
                )
                if spread is not None
            ]
    return table_of("hallucination", rows, ("method", "side", "disagreement", "rmse", "ssim"))


def bins_table(record: Record) -> Table:
    """The hallucination check in bins of disagreement."""
    rows: list[dict[str, Cell]] = []
    for name, check in record["hallucination"].items():
        for part in check["bins"]:
            low, high = part["disagreement"]
            row: dict[str, Cell] = {"method": name, "from": low, "to": high}
            row |= {key: part[key] for key in ("n", "mean_rmse", "mean_ssim")}
            decoys = part.get("decoys") or {}
            row |= {f"decoys {k}": decoys.get(k) for k in ("n", "mean_rmse", "mean_ssim")}
            rows.append(row)
    return table_of("hallucination-bins", rows, ("method",))


def excluded_table(record: Record) -> Table:
    """Held-out images that were left out as near copies of training images."""
    rows = (record["excluded"] or {}).get("rows", [])
    return table_of("excluded", rows, ("image_id", "nearest", "correlation"))


def _ranks(record: Record, side: str) -> list[Cell]:
    return list(range(1, len(record[side]["image_id"]) + 1))


def _placed(rows: Sequence[int]) -> dict[str, list[Cell]]:
    return {"place": list(range(1, len(rows) + 1)), "row": list(rows)}


def _scores(
    record: Record, side: str, metrics: Sequence[str], rows: Iterable[int] | None = None
) -> dict[str, list[Cell]]:
    """Identity and scores of `rows` (all of them by default) of one side."""
    chosen = range(len(record[side]["image_id"])) if rows is None else list(rows)
    identity = {key: record[side][key] for key in ("victim", "image_id", "label")}
    scores = {
        f"{name} {metric}": method[side][metric]
        for name, method in record["methods"].items()
        for metric in metrics
    }
    return {key: [cells[i] for i in chosen] for key, cells in (identity | scores).items()}


def _both(columns: Any) -> dict[str, list[Cell]]:
    """The columns of both sides under each other, with the side in front."""
    parts = {side: columns(side) for side in SIDES}
    sides: list[Cell] = [
        side for side, part in parts.items() for _row in next(iter(part.values()), [])
    ]
    names = parts["targets"]
    return {"side": sides} | {n: [*parts["targets"][n], *parts["decoys"][n]] for n in names}
