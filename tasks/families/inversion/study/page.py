"""The page of an inversion study: inversion.json and its pictures as one HTML file
(docs/pages.md)."""

from __future__ import annotations

from typing import Any

from tasks.families.inversion.study.charts import attack_styles
from tasks.families.inversion.study.figure_specs import attacks_in, cells_of, letters, value_of
from tasks.families.inversion.study.figures import KINDS, check_sources
from tasks.families.inversion.study.headline import (
    chance,
    divergence,
    ends,
    headline,
    measure,
    spread,
)
from tasks.families.inversion.study.tables import cells_table, seeds_table, spots_table
from tasks.page.files import Arrays, Record
from tasks.page.study_page import StudyPage, Tables
from tasks.page.tables import Table, claims_table


def own_tables(record: Record) -> list[Table]:
    """The tables that every page has.

    Raises ValueError for cells of a source, or sweet spots at a cell, that is not there.
    """
    check_sources(record)
    return [cells_table(record), seeds_table(record), claims_table(record), spots_table(record)]


def words(record: Record, _pictures: Arrays, _tables: Tables) -> dict[str, Any]:
    """Values that only this page shows."""
    return {
        "headline": headline(record),
        "attacks": attack_styles(record),
        "dashed": [],
        "tables_of_cells": [_cells_of(record, source) for source in record["sources"]],
        "run": [("sources", len(record["sources"])), ("cells", len(record["cells"]))],
    }


def _cells_of(record: Record, source: Record) -> dict[str, Any]:
    """A source with all its cells and their scores as texts."""
    cells = cells_of(record, source)
    attacks = attacks_in(record, cells)
    rows = []
    for k, cell in cells:
        values = {
            value: (measure(value, found["mean"]), ends(value, found))
            for value in ("accuracy", "train_accuracy", "distance", "min_distance")
            for found in [value_of(cell, value)]
        }
        scores = [
            {
                "ssim": spread("ssim", cell["attacks"].get(attack["name"])),
                "ssim_ends": ends("ssim", value_of(cell, "ssim", attack["name"])),
                "chance": measure("ssim", chance(cell, attack["name"])),
                "psim": spread("psim", cell["attacks"].get(attack["name"])),
                "psnr": spread("psnr", cell["attacks"].get(attack["name"])),
            }
            for attack in attacks
        ]
        rows.append(
            {
                "number": k,
                "letter": letters(record, source).get(k, ""),
                "title": cell["title"],
                "cut": cell["cut"],
                "values": values,
                "scores": scores,
                "divergence": divergence(cell),
            }
        )
    return {"source": source, "attacks": attacks, "rows": rows}


INVERSION_PAGE = StudyPage(
    name="inversion",
    version=2,
    command="palimpsest study inversion",
    kinds=KINDS,
    tables=own_tables,
    words=words,
    stages={
        "train": "to train the networks",
        "invert": "to invert them",
        "restore": "to restore",
        "synthetic": "for synthetic points",
    },
    most_inline=300_000,
)
