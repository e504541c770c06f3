"""The page of a recovery study: recovery.json and its pictures as one HTML file (docs/pages.md)."""

from __future__ import annotations

from typing import Any

from tasks.families.autoencoder.study.figure_specs import (
    at_lowest,
    best_victim,
    cells_table,
    lowest,
    method_styles,
    summary_table,
    triple,
    unreached,
    victims_table,
)
from tasks.families.autoencoder.study.figures import KINDS
from tasks.page.files import Arrays, Record, Table, claim_counts, claims_table
from tasks.page.study_page import StudyPage, Tables


def own_tables(record: Record) -> list[Table]:
    """The tables of every page."""
    return [
        summary_table(record, best_victim(record)),
        cells_table(record),
        victims_table(record),
        claims_table(record),
    ]


def words(record: Record, _pictures: Arrays, tables: Tables) -> dict[str, Any]:
    """Values for this page's template alone."""
    styles = method_styles(record)
    return {
        "headline": headline(record, tables["summary"]),
        "methods": styles,
        "dashed": [styles[m["name"]].colour for m in record["methods"] if m["knows_mask"]],
        "tables_of_cells": [_cells_of(record, victim) for victim in record["victims"]],
        "run": [("networks", len(record["victims"])), ("cells", len(record["cells"]))],
    }


def headline(record: Record, summary: Table) -> dict[str, Any]:
    """Facts for the first sentences: claims by outcome, and the network of the summary."""
    victim, rows = best_victim(record), list(summary.rows())
    blind = [row for row in rows if not row["knows_mask"] and row["train n"]]
    tested = [row for row in rows if row["test n"]]
    return {
        **claim_counts(record),
        "victim": victim,
        "level": lowest(victim) if victim else None,
        "rows": rows,
        "blind": blind,
        "n_masks": max((row["train n_masks"] for row in rows), default=0),
        "any": any(row["train n_accurate"] for row in blind),
        "tested": bool(tested),
        "tested_most": max((row["test accurate"] or 0.0 for row in tested), default=None),
    }


def _cells_of(record: Record, victim: Record) -> dict[str, Any]:
    """A victim with its cells at the lowest level, ordered by noise, split, mask and method."""
    masks = {mask["name"]: (k, mask["title"]) for k, mask in enumerate(record["masks"])}
    methods = {method["name"]: (k, method["title"]) for k, method in enumerate(record["methods"])}
    last = len(masks) + len(methods)

    def place(cell: Record) -> tuple[float, bool, int, int]:
        mask, method = masks.get(cell["mask"], (last,)), methods.get(cell["method"], (last,))
        return cell["sigma"], cell["split"] == "test", mask[0], method[0]

    return {
        "victim": victim,
        "level": lowest(victim),
        "cells": [
            dict(cell)
            | {"mask_title": masks.get(cell["mask"], (0, cell["mask"]))[1]}
            | {"method_title": methods.get(cell["method"], (0, cell["method"]))[1]}
            for cell in sorted(at_lowest(record, victim), key=place)
        ],
    }


RECOVERY_PAGE = StudyPage(
    name="recovery",
    version=2,
    command="palimpsest study autoencoder",
    kinds=KINDS,
    tables=own_tables,
    words=words,
    stages={
        "train": "to train the networks",
        "inpainter": "to train the inpainter",
        "recover": "to recover",
    },
    filters={"triple": triple, "lowest": lowest, "unreached": unreached},
)
