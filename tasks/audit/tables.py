"""The numbers of an audit as tables: what its page draws and shows, and the CSVs beside it.

A figure is drawn from its table, so the two cannot differ (docs/pages.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tasks.page.charts import letter
from tasks.page.files import Cell, Record, Table, cells_of, claims_table, estimate, table_of
from tasks.page.formats import NOTHING, fixed

SIDES = (("good", "good_at"), ("found", "found_at"))
"""Shares of an attack: images that come back good, and those that are told from others."""
NUMBERS = (
    *("n", "n_good", "n_good_decoys", "n_good_control"),
    *("mean_ssim", "mean_ssim_decoys", "mean_ssim_control", "auc", "p_value"),
)
EXPOSED = ("image_id", "label", "class", "n_in", "n_back", "mean_ssim", "margin", "n_copies", "why")
CHECKS = ("condition", "cell", "attack", "value", "limit", "outcome")

Estimated = tuple[float | None, float | None, float | None]
"""A mean over victims and the ends of its interval."""
UNKNOWN: Estimated = (None, None, None)


def share(value: float | None) -> str:
    """`66 %`; with a decimal where whole percents would say 0 or 100: `4.2 %`."""
    if value is None:
        return NOTHING
    decimals = 0 if value in (0, 1) or 0.0995 <= value < 0.995 else 1
    return f"{fixed(100 * value, decimals)} %"


def within(interval: Sequence[float]) -> str:
    """`60 to 72 %`."""
    low, high = map(share, interval)
    return f"{low.removesuffix(' %')} to {high}"


def points(change: float | None) -> str:
    """A change of accuracy in percent of the images, with its sign: `−3.0`, `+0.4`."""
    if change is None:
        return NOTHING
    return ("+" if round(1000 * change) > 0 else "") + fixed(100 * change, 1).replace("−0.0", "0.0")


def rate_text(rate: float) -> str:
    """`0 %`, `0.1 %`, `1 %`."""
    return f"{100 * rate:g} %"


def key_of(rate: float) -> str:
    """The key of a false positive rate in a record."""
    return f"{rate:g}"


def estimated(found: Record | None) -> Estimated:
    """(mean, low, high) of a share of the record; None where unknown."""
    if found is None:
        return UNKNOWN
    low, high = found["interval"] or (None, None)
    return found["mean"], low, high


def attacked(cell: Record, attack: str) -> dict[str, Any] | None:
    """The numbers of an attack on a cell, None where it was not run or was refused."""
    found = cell["attacks"].get(attack)
    return dict(found) if found and found["status"] == "ran" else None


def side_of(kind: str) -> str:
    """The shares that count for a kind of attack: good pictures, or images told from others."""
    return "good_at" if kind == "reconstruction" else "found_at"


def headline(record: Record, cell: Record, attack: Record) -> Estimated:
    """The share of an attack on a cell at the rate of headlines."""
    found = attacked(cell, attack["name"])
    shares = found and found[side_of(attack["kind"])]
    return estimated(shares[key_of(record["rate"])]) if shares else UNKNOWN


def membership(record: Record, cell: Record) -> tuple[str, Estimated]:
    """(title, share) of the membership attack that tells most images of a cell from others."""
    found = [
        (attack["title"], headline(record, cell, attack))
        for attack in record["attacks"]
        if attack["kind"] == "membership"
    ]
    known = [entry for entry in found if entry[1][0] is not None]
    return max(known, key=lambda entry: entry[1][0] or 0.0, default=("", UNKNOWN))


def accuracy(cell: Record) -> Estimated:
    """Test accuracy of a cell, or the variance that its autoencoders explain."""
    return _of_accuracy(cell, "test")


def change(cell: Record) -> Estimated:
    """Change of test accuracy against the base."""
    return _of_accuracy(cell, "change")


def _of_accuracy(cell: Record, key: str) -> Estimated:
    if (found := cell["accuracy"]) is None:
        return UNKNOWN
    return (found[key], *(found[f"{key}_interval"] or (None, None)))


def cells_table(
    record: Record, name: str = "cells", shown: Callable[[Record], bool] = lambda _cell: True
) -> Table:
    """One row per defence that is `shown`: its price, and the most that any attack got."""
    rows: list[dict[str, Cell]] = [
        {"cell": cell["number"], "letter": letter(cell["number"])}
        | {key: cell[key] for key in ("name", "kind", "group", "about", "base", "epsilon", "delta")}
        | {"n_images": cell["n_images"], "failed": cell["failed"]}
        | {"train accuracy": (cell["accuracy"] or {}).get("train")}
        | estimate("test accuracy", accuracy(cell))
        | estimate("change", change(cell))
        | {"leak by": (cell["leak"] or {}).get("attack")}
        | estimate("leak", estimated(cell["leak"]))
        | estimate("membership", membership(record, cell)[1])
        | {"effect": (cell["effect"] or {}).get("word"), "on_front": cell["on_front"]}
        for cell in record["cells"]
        if shown(cell)
    ]
    return table_of(name, rows, ("cell", "letter", "name", "base", "on_front"))


def front_table(record: Record) -> Table:
    """The defences whose leak and price are both known; other ways to train are none."""

    def shown(cell: Record) -> bool:
        is_priced = accuracy(cell)[0] is not None and not record["no_price"]
        return bool(is_priced and cell["kind"] != "variant" and not cell["failed"] and cell["leak"])

    return cells_table(record, "front", shown)


def attacks_table(record: Record) -> Table:
    """One row per defence and attack: every number of it, or why there is none."""
    rows: list[dict[str, Cell]] = []
    for cell in record["cells"]:
        for attack in record["attacks"]:
            found = cell["attacks"].get(attack["name"]) or {}
            row: dict[str, Cell] = {"cell": cell["number"], "name": cell["name"]}
            row |= {"attack": attack["name"], "kind": attack["kind"]}
            row |= {"status": found.get("status") or "not run"}
            row |= {"why": found.get("why") or cell["failed"]}
            ran = attacked(cell, attack["name"]) or {}
            for side, shares in SIDES:
                for rate in record["rates"]:
                    of_rate = (ran.get(shares) or {}).get(key_of(rate))
                    row |= estimate(f"{side} at {key_of(rate)}", estimated(of_rate))
            for key in ("identified", "identified_decoys"):
                row |= estimate(key.replace("_", " of "), estimated(ran.get(key)))
            rows.append(row | {key: ran.get(key) for key in (*NUMBERS, "seconds")})
    return table_of("attacks", rows, ("cell", "name", "attack", "kind", "status", "why"))


def victims_table(record: Record) -> Table:
    """One row per network: its accuracy, and the shares that each attack got of it."""
    rows: list[dict[str, Cell]] = []
    for cell in record["cells"]:
        accuracies = (cell["accuracy"] or {}).get("each") or []
        for victim in range(record["n_victims"] if cell["attacks"] or accuracies else 0):
            row: dict[str, Cell] = {"cell": cell["number"], "name": cell["name"], "victim": victim}
            row["test accuracy"] = accuracies[victim] if victim < len(accuracies) else None
            for attack in record["attacks"]:
                ran = attacked(cell, attack["name"]) or {}
                for side, shares in SIDES:
                    for rate, found in (ran.get(shares) or {}).items():
                        each = found["each"] or []
                        value = each[victim] if victim < len(each) else None
                        row[f"{attack['name']} {side} at {rate}"] = value
            rows.append(row)
    return table_of("victims", rows, ("cell", "name", "victim", "test accuracy"))


def own_tables(record: Record) -> list[Table]:
    """The tables that stand on every page, of checks and claims only where there are some."""
    classes = [cells_of(entry) for entry in record["classes_exposed"]]
    for row in classes:
        row |= {f"share {end}": row.pop(f"interval {end}") for end in ("low", "high")}

    def places(name: str, entries: Sequence[Record], columns: tuple[str, ...]) -> Table:
        rows: list[dict[str, Cell]] = [
            {"place": place} | {key: entry.get(key) for key in columns}
            for place, entry in enumerate(entries, 1)
        ]
        return table_of(name, rows, ("place", *columns))

    made = [
        cells_table(record),
        attacks_table(record),
        victims_table(record),
        places("exposed", record["exposed"], EXPOSED),
        table_of("classes", classes, ("class", "n", "share", "share low", "share high")),
        places("decoys", record["decoys_shown"], ("image_id", "ssim")),
    ]
    if record["checks"]:
        rows = [{key: check[key] for key in CHECKS} for check in record["checks"]]
        made.append(table_of("checks", rows, CHECKS))
    return made + ([claims_table(record)] if record["claims"] else [])
