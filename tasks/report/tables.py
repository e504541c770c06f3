"""The numbers behind every figure of a report as tables, named after the record's own names
(docs/pages.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tasks.page.tables import Cell, Table, cells_of, table_of
from tasks.report.record import SIDES, Record, sampled_means

THRESHOLDS = [k / 100 for k in range(101)]
METRICS = ("ssim", "haarpsi")
Columns = dict[str, list[Cell]]


def tables_of(record: Record) -> dict[str, Table]:
    """The tables that stand on every page of this record, but for those of its figures alone."""
    several = bool(record["side_by_side"])
    made = [methods_table(record), *placed_tables(record), examples_table(record)]
    made += [attacks_table(record)] if several else []
    made += [unlike_table(record)] if record["nothing"]["n"] else []
    made += [excluded_table(record)] if record["excluded"] else []
    return {table.name: table for table in (*made, images_table(record), runs_table(record))}


def methods_table(record: Record) -> Table:
    """One row per method: every number of the table of methods."""
    spans = bool(record.get("span"))
    rows = [
        {"method": name, "kind": method["kind"]}
        | score_cells({side: method[side]["summary"] for side in SIDES}, method["detection"])
        | {"n_targets_above_every_decoy": method["n_targets_above_every_decoy"]}
        | ({"headroom_closed": record["span"]["headroom_closed"].get(name)} if spans else {})
        | cells_of(method["targets"]["compared_with_plain"], "compared ")
        for name, method in record["methods"].items()
    ]
    return table_of("methods", rows)


def score_cells(summaries: Mapping[str, Any], detection: Mapping[str, Any]) -> dict[str, Cell]:
    """A method's summary of each side, and how well it tells them apart, as cells of a row."""
    row: dict[str, Cell] = {}
    for side in SIDES:
        row |= cells_of(summaries[side], f"{side} ")
    return row | {"auc": detection["auc"]} | cells_of(detection["found_at"] or {}, "found at ")


def images_table(record: Record) -> Table:
    """One row per image, targets then decoys: every method's scores."""
    return _both("before-after", lambda side: _scores(record, side, METRICS))


def placed_tables(record: Record) -> list[Table]:
    """The images of figure 1, those that are shown with every attack, and those of the appendix, in
    their order."""

    def placed(shown: str) -> Callable[[str], Columns]:
        return lambda side: _placed(record, side, record[shown][side])

    tables = [_both("best-images", placed("grid"))]
    if record["side_by_side"]:
        tables.append(_both("attacks-side-by-side", placed("side_by_side")))
    appendix = _placed(record, "targets", record["appendix"]["targets"])
    return [*tables, Table("all-images", appendix)]


def attacks_table(record: Record) -> Table:
    """One row per attack on the same victims: what was made, and how long it took; its scores are
    in `methods`."""
    names = ("method", "kind", "n_runs", "n_candidates", "seconds", "content_hash")
    return Table("attacks", {name: [a[name] for a in record["attacks"]] for name in names})


def unlike_table(record: Record) -> Table:
    """The pictures that resemble nothing, column by column of their figure."""
    names = ("victim", "run", "candidate", "iteration", "ssim", "closest")
    place: Columns = {"place": list(range(1, record["nothing"]["n"] + 1))}
    return Table("nothing", place | {n: record["nothing"][n] for n in names})


def examples_table(record: Record) -> Table:
    """The pairs that show what a threshold means, bin by bin."""
    examples = record["examples"]

    def columns(side: str) -> Columns:
        bins = zip(pairwise(examples["edges"]), examples[side], strict=True)
        found = [(row, low, high) for (low, high), rows in bins for row in rows]
        edges = {name: [f[k] for f in found] for k, name in enumerate(("row", "above", "at most"))}
        return edges | _scores(record, side, ("ssim",), edges["row"])

    return _both("examples", columns)


def ranked_table(record: Record) -> Table:
    """The i-th best score of every method; each column is sorted by itself."""
    return _both(
        "ranked-curves",
        lambda side: (
            _ranks(record, side)
            | {
                f"{name} {metric}": sorted(method[side][metric], reverse=True)
                for name, method in record["methods"].items()
                for metric in METRICS
            }
        ),
    )


def halves_table(record: Record) -> Table:
    """The ranked scores of the two halves of the attacks, per method that has them."""
    return _both(
        "split-halves",
        lambda side: (
            _ranks(record, side)
            | {
                f"{name} {metric} {k}": sorted(half, reverse=True)
                for name in halved(record)
                for metric in METRICS
                for k, half in enumerate(record["methods"][name]["halves"][side][metric], 1)
            }
        ),
    )


def halved(record: Record) -> list[str]:
    """The methods whose attacks were split into halves."""
    return [name for name, method in record["methods"].items() if method["halves"]]


def margin_table(record: Record) -> Table:
    """Distance from the decision boundary and scores, of targets whose distance is known."""
    margins = record["targets"]["margin"]
    known = [i for i, margin in enumerate(margins) if margin is not None]
    scores = _scores(record, "targets", ("ssim",), known)
    return Table("margin", {"margin": [margins[i] for i in known]} | scores)


def thresholds_table(record: Record) -> Table:
    """Number of images that score above each threshold from 0 to 1."""
    columns: Columns = {"threshold": list(THRESHOLDS)}
    for name, method in record["methods"].items():
        for side in SIDES:
            scores = method[side]["ssim"]
            columns[f"{name} {side}"] = [sum(s > level for s in scores) for level in THRESHOLDS]
    return Table("thresholds", columns)


def roc_table(record: Record) -> Table:
    """Share of targets found against share of decoys taken for targets, per method."""
    keys = ("false_positives", "found")
    rows = [
        {"method": name} | dict(zip(keys, point, strict=True))
        for name, method in record["methods"].items()
        for roc in (method["detection"]["roc"],)
        for point in zip(*(roc[key] for key in keys), strict=True)
    ]
    return table_of("roc", rows, ("method", *keys))


def runs_table(record: Record) -> Table:
    """Every run: its outcome, settings and criteria, and what truly came back."""
    return Table("runs", {name: list(cells) for name, cells in record["runs"].items()})


def ranking_table(record: Record) -> Table:
    """Rank correlations of each criterion with what came back of the runs."""
    ranking = record["ranking"] or {}
    rows = [{"criterion": name} | cells_of(found) for name, found in ranking.items()]
    return table_of("ranking", rows, ("criterion",))


def hallucination_table(record: Record) -> Table:
    """Disagreement of the samples and error of the match, of every image with a picture."""
    keys = ("disagreement", "rmse", "ssim")
    rows = [
        {"method": name, "side": side} | dict(zip(keys, values, strict=True))
        for name in sampled_means(record)
        for side in SIDES
        for values in zip(*(record["methods"][name][side][key] for key in keys), strict=True)
        if values[0] is not None
    ]
    return table_of("hallucination", rows, ("method", "side", *keys))


def bins_table(record: Record) -> Table:
    """The hallucination check in bins of disagreement."""
    keys = ("n", "mean_rmse", "mean_ssim")
    rows = [
        {"method": name}
        | dict(zip(("from", "to"), part["disagreement"], strict=True))
        | {key: part[key] for key in keys}
        | {f"decoys {key}": (part.get("decoys") or {}).get(key) for key in keys}
        for name, check in record["hallucination"].items()
        for part in check["bins"]
    ]
    return table_of("hallucination-bins", rows, ("method",))


def excluded_table(record: Record) -> Table:
    """Held-out images that were left out as near copies of training images."""
    rows = (record["excluded"] or {}).get("rows", [])
    return table_of("excluded", rows, ("image_id", "nearest", "correlation"))


def _ranks(record: Record, side: str) -> Columns:
    return {"rank": list(range(1, len(record[side]["image_id"]) + 1))}


def _placed(record: Record, side: str, rows: Sequence[int]) -> Columns:
    place: Columns = {"place": list(range(1, len(rows) + 1)), "row": list(rows)}
    return place | _scores(record, side, ("ssim",), rows)


def _scores(
    record: Record, side: str, metrics: Sequence[str], rows: Iterable[int] | None = None
) -> Columns:
    """Identity and scores of `rows` (all of them by default) of one side."""
    chosen = range(len(record[side]["image_id"])) if rows is None else list(rows)
    identity = {key: record[side][key] for key in ("victim", "image_id", "label")}
    scores = {
        f"{name} {metric}": method[side][metric]
        for name, method in record["methods"].items()
        for metric in metrics
    }
    return {key: [cells[i] for i in chosen] for key, cells in (identity | scores).items()}


def _both(name: str, columns: Callable[[str], Columns]) -> Table:
    """The columns of both sides under each other, with the side in front."""
    parts = {side: columns(side) for side in SIDES}
    sides: list[Cell] = [
        side for side, part in parts.items() for _row in next(iter(part.values()), [])
    ]
    both = {key: [*cells, *parts["decoys"][key]] for key, cells in parts["targets"].items()}
    return Table(name, {"side": sides} | both)
