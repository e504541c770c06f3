"""The numbers of a study as tables: what its page draws and shows, and the CSVs beside it.

A figure is drawn from its table, so the two cannot differ (docs/pages.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasks.page.files import Arrays, Record
from tasks.page.formats import count, percent, score
from tasks.page.tables import Cell, Table, cells_of, table_of

VALUES = {
    "n_good": ("good reconstructions per network", count),
    "good_fraction": ("share of good reconstructions", percent),
    "mean_ssim": ("mean SSIM", score),
    "test_accuracy": ("test accuracy", percent),
    "n_effective": ("effective number of images", count),
    "attack_seconds": ("seconds of an attack", count),
}
"""Titles of what a figure can show of a cell, and how it is written."""
VICTIM_KEYS = (
    *("train_loss", "train_accuracy", "test_accuracy"),
    *("n_effective", "n_good", "mean_ssim"),
)
IMAGE_KEYS = ("victim", "image_id", "label")


def known_mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def measured(cell: Record, value: str) -> tuple[float | None, float | None, float | None]:
    """(`value` of a cell, low and high end of its interval), None where unknown.

    Raises ValueError for a `value` that no figure can show.
    """
    targets, n_victims = cell["targets"], len(cell["victims"])
    if value not in VALUES:
        raise ValueError(f"a figure shows value {value!r}; expected one of {sorted(VALUES)}")
    if value == "attack_seconds":
        n_attacks = n_victims * cell["n_attacks"]
        return cell["seconds"] / n_attacks if n_attacks else None, None, None
    if value in ("test_accuracy", "n_effective"):
        return known_mean(cell["victim"][value]), None, None
    interval = "mean_ssim_interval" if value == "mean_ssim" else "good_interval"
    low, high = targets[interval] or (None, None)
    if value != "n_good":
        return targets[value], low, high
    per_victim = targets["n"] / n_victims if n_victims else 0.0
    found = targets["n_good"] / n_victims if n_victims else None
    if low is None or high is None:
        return found, None, None
    return found, low * per_victim, high * per_victim


def values_table(
    name: str, cells: Sequence[Record], axes: Sequence[str], value: str, baselines: Sequence[int]
) -> Table:
    """One row per cell of a heatmap or of lines: where it is, its value and the interval."""
    rows: list[dict[str, Cell]] = []
    for cell in cells:
        found, low, high = measured(cell, value)
        rows.append(
            {"cell": cell["number"], "name": cell["name"]}
            | {f"at {axis}": cell["at"].get(axis) for axis in axes}
            | {"baseline": cell["number"] in baselines}
            | {value: found, "low": low, "high": high}
            | ({"share": cell["targets"]["good_fraction"]} if value == "n_good" else {})
        )
    named = ("cell", "name", *(f"at {axis}" for axis in axes), "baseline", value, "low", "high")
    return table_of(name, rows, named)


def scatter_table(name: str, record: Record, numbers: Sequence[int], x: str) -> Table:
    """One row per training image of the cells, in their order, known or not."""
    images, place = record["images"], {number: k for k, number in enumerate(numbers)}
    rows = [row for row, cell in enumerate(images["cell"]) if cell in place]
    rows.sort(key=lambda row: place[images["cell"][row]])
    columns = ("cell", *IMAGE_KEYS, x, "ssim", "decoy_ssim")
    return Table(name, {key: [images[key][row] for row in rows] for key in columns})


def kernels_table(name: str, pictures: Arrays, numbers: Sequence[int]) -> Table:
    """One row per kernel and colour: its values as drawn, 0 to 255, row by row."""
    rows: list[dict[str, Cell]] = [
        {
            "cell": number,
            "kernel": k,
            "colour": colour,
            "values": " ".join(map(str, np.ravel(part))),
        }
        for number in numbers
        for k, kernel in enumerate(pictures.get(f"kernels_{number:04d}", ()))
        for colour, part in zip(("red", "green", "blue"), kernel, strict=True)
    ]
    return table_of(name, rows, ("cell", "kernel", "colour", "values"))


def cells_table(record: Record) -> Table:
    """One row per cell: every number of the table of cells."""
    rows: list[dict[str, Cell]] = []
    for cell in record["cells"]:
        row: dict[str, Cell] = {key: cell[key] for key in ("number", "name", "panel")}
        row |= {f"at {axis}": cell["at"].get(axis) for axis in record["axes"]}
        row |= {"n_images": cell["n_images"], "n_victims": len(cell["victims"])}
        row["n_attacks"] = cell["n_attacks"]
        for side in ("targets", "decoys"):
            row |= cells_of(cell[side], f"{side} ")
        row["auc"] = cell["auc"]
        vote = dict(cell["vote"] or {})
        row |= {f"nearest {key}": value for key, value in vote.pop("nearest", {}).items()}
        row |= {f"vote {key}": value for key, value in vote.items()}
        row |= {key: known_mean(cell["victim"][key]) for key in VICTIM_KEYS[:4]}
        row |= {f"runs {outcome}": n for outcome, n in cell["outcomes"].items()}
        rows.append(row | {"seconds": cell["seconds"]})
    return table_of("cells", rows, ("number", "name", "panel"))


def victims_table(record: Record) -> Table:
    """One row per network."""
    rows: list[dict[str, Cell]] = [
        {"cell": cell["number"], "victim": victim}
        | {key: cell["victim"][key][k] for key in VICTIM_KEYS}
        for cell in record["cells"]
        for k, victim in enumerate(cell["victims"])
    ]
    return table_of("victims", rows, ("cell", "victim", *VICTIM_KEYS))


def shown_table(record: Record) -> Table:
    """One row per pair of pictures on the page."""
    images = record["images"]
    rows: list[dict[str, Cell]] = [
        {"cell": cell["number"], "place": place, "row": row}
        | {key: images[key][row] for key in (*IMAGE_KEYS, "ssim")}
        for cell in record["cells"]
        for place, row in enumerate(cell["shown"], 1)
    ]
    return table_of("shown", rows, ("cell", "place", "row", *IMAGE_KEYS, "ssim"))
