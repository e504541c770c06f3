"""The numbers of a recovery study as tables: what its page draws, and the CSVs beside it.

A figure is drawn from its table, so the two cannot differ (docs/pages.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tasks.families.autoencoder.study.figure_specs import VALUES, at_lowest, group_name, lowest
from tasks.page.files import Arrays, Record
from tasks.page.tables import Cell, Table, estimate, table_of

WHERE = ("victim", "level", "loss", "mask", "sigma", "split", "method")
PSNR_FLOOR = 1e-12
SUMMED = ("n", "n_accurate", "n_approximate")
SHARES = ("accurate", "approximate")


def triple(cell: Record, value: str) -> tuple[float | None, float | None, float | None]:
    """(`value` of a cell, low and high end of its interval), None where unknown."""
    found, low, high = cell[value] or (None, None, None)
    return found, low, high


def psnr(mse: float | None) -> float | None:
    """Decibels for images in [0, 1], at most 120; None for an error that is none."""
    if mse is None or not math.isfinite(mse) or mse < 0:
        return None
    return -10 * math.log10(max(mse, PSNR_FLOOR))


def pooled(cells: Sequence[Record]) -> dict[str, Any]:
    """Counts of several cells together, shares of them, and the mean PSNR of all their images."""
    sums = {key: sum(cell[key] for cell in cells) for key in SUMMED}
    n = sums["n"]
    means = [(cell["psnr"][0], cell["n"]) for cell in cells if triple(cell, "psnr")[0] is not None]
    weight = sum(of for _mean, of in means)
    applied = [cell["n_applied"] for cell in cells if cell["n_applied"] is not None]
    return sums | {
        "accurate": sums["n_accurate"] / n if n else None,
        "approximate": sums["n_approximate"] / n if n else None,
        "psnr": sum(mean * of for mean, of in means) / weight if weight else None,
        "n_applied": sum(applied) / len(applied) if applied else None,
        "n_masks": len({cell["mask"] for cell in cells}),
    }


def cells_table(record: Record) -> Table:
    """One row per cell: every number of it but the single errors."""
    rows: list[dict[str, Cell]] = []
    for cell in record["cells"]:
        row: dict[str, Cell] = {key: cell[key] for key in (*WHERE, *SUMMED)}
        for value in VALUES:
            row |= estimate(value, triple(cell, value))
        for threshold, count in zip(record["thresholds"]["all"], cell["by_threshold"], strict=True):
            row[f"below {threshold:g}"] = count
        row["n_applied"] = cell["n_applied"]
        row |= {f"ended {how}": n for how, n in (cell["endings"] or {}).items()}
        row |= {"mask_accuracy": cell["mask_accuracy"], "seconds": cell["seconds"]}
        rows.append(row)
    return table_of("cells", rows, (*WHERE, *SUMMED))


def victims_table(record: Record) -> Table:
    """One row per network."""

    def listed(values: Sequence[float]) -> str:
        return " ".join(f"{value:g}" for value in values)

    rows: list[dict[str, Cell]] = []
    for victim in record["victims"]:
        at = lowest(victim) or {}
        rows.append(
            {key: victim[key] for key in ("name", "title", "n_parameters", "n_images", "gamma")}
            | {"wanted": listed(victim["wanted"])}
            | {"reached": listed([level["level"] for level in victim["levels"]])}
            | {"loss": at.get("loss"), "epoch": at.get("epoch")}
            | {f"last {key}": victim["last"][key] for key in ("loss", "epoch")}
            | {key: victim[key] for key in ("diverged", "test_loss", "seconds")}
        )
    return table_of("victims", rows, ("name", "title"))


def summary_table(record: Record, victim: Record | None) -> Table:
    """One row per method: what came back from `victim` at its lowest level, over all masks."""
    rows: list[dict[str, Cell]] = []
    for method in record["methods"] if victim else ():
        row: dict[str, Cell] = {"victim": victim["name"] if victim else None}
        row |= {"method": method["name"], "title": method["title"]}
        row["knows_mask"] = method["knows_mask"]
        for split in ("train", "test"):
            cells = at_lowest(record, victim or {}, split=split, sigma=0.0, method=method["name"])
            found = pooled(cells)
            row |= {f"{split} {key}": found[key] for key in (*SUMMED, "n_masks", *VALUES)}
            for value in SHARES:
                shares = [c[value][0] for c in cells if triple(c, value)[0] is not None]
                row[f"{split} {value} of the worst mask"] = min(shares, default=None)
                row[f"{split} {value} of the best mask"] = max(shares, default=None)
            if split == "train":
                row["n_applied"] = found["n_applied"]
        rows.append(row)
    return table_of("summary", rows, ("victim", "method"))


def masks_table(record: Record, name: str) -> Table:
    """One row per mask."""
    rows: list[dict[str, Cell]] = [
        {"mask": mask["name"], "title": mask["title"], "known_share": mask["known_share"]}
        for mask in record["masks"]
    ]
    return table_of(name, rows, ("mask", "title", "known_share"))


def rates_table(name: str, cells: Sequence[Record], values: Sequence[str]) -> Table:
    """One row per cell: where it is, its values and their intervals."""
    keys = ("victim", "mask", "sigma", "level", "loss", "split", "method", "n")
    rows: list[dict[str, Cell]] = []
    for cell in cells:
        row: dict[str, Cell] = {key: cell[key] for key in keys}
        for value in values:
            row |= estimate(value, triple(cell, value))
        rows.append(row)
    return table_of(name, rows, (*keys, *(k for v in values for k in (v, f"{v} low", f"{v} high"))))


def thresholds_table(name: str, record: Record, cells: Sequence[Record]) -> Table:
    """One row per cell and threshold: how many images are below it, and the share."""
    keys = ("victim", "mask", "sigma", "level", "loss", "method")
    rows: list[dict[str, Cell]] = [
        {key: cell[key] for key in keys}
        | {"threshold": threshold, "n": cell["n"], "count": count}
        | {"share": count / cell["n"] if cell["n"] else None}
        for cell in cells
        for threshold, count in zip(record["thresholds"]["all"], cell["by_threshold"], strict=True)
    ]
    return table_of(name, rows, (*keys, "threshold", "n", "count", "share"))


def contraction_table(name: str, victims: Sequence[Record]) -> Table:
    """One row per image: the radius at it."""
    rows: list[dict[str, Cell]] = [
        {"victim": victim["name"], "split": split, "image": k, "radius": radius}
        for victim in victims
        for split in ("train", "test")
        for k, radius in enumerate((victim["contraction"] or {}).get(split) or ())
    ]
    return table_of(name, rows, ("victim", "split", "image", "radius"))


def examples_table(name: str, record: Record, pictures: Arrays) -> Table:
    """One row per picture that a method made: whose it is, its error and PSNR."""
    rows: list[dict[str, Cell]] = []
    for shown in record["shown"]:
        for method in record["methods"]:
            errors = pictures.get(f"{group_name(shown)}/{method['name']}/mse", ())
            for image, error in zip(shown["rows"], np.asarray(errors).tolist(), strict=False):
                mse = error if math.isfinite(error) else None
                rows.append(
                    {key: shown[key] for key in ("victim", "level", "mask", "sigma")}
                    | {"image": image, "method": method["name"], "mse": mse, "psnr": psnr(mse)}
                )
    keys = ("victim", "level", "mask", "sigma", "image", "method", "mse", "psnr")
    return table_of(name, rows, keys)
