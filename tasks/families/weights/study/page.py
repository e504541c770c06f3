"""The page of a study of the attacks on weights: study.json and its pictures as one HTML file
(docs/pages.md)."""

from __future__ import annotations

from typing import Any

from tasks.families.weights.study.figures import KINDS
from tasks.families.weights.study.headline import counts, headline, networks, percents
from tasks.families.weights.study.image_grids import pairs
from tasks.families.weights.study.tables import (
    cells_table,
    known_mean,
    shown_table,
    victims_table,
)
from tasks.page.files import Arrays, Record
from tasks.page.study_page import StudyPage, Tables
from tasks.page.tables import Table, claims_table

LARGE_CELLS = 6  # with more cells, their pictures are shown smaller


def own_tables(record: Record) -> list[Table]:
    """The tables that every page has."""
    return [cells_table(record), victims_table(record), claims_table(record), shown_table(record)]


def words(record: Record, pictures: Arrays, _tables: Tables) -> dict[str, Any]:
    """Values that only this page shows."""
    return {
        "headline": headline(record),
        "networks": networks(record),
        "pairs": pairs(record, pictures),
        "large": len(record["cells"]) <= LARGE_CELLS,
        "run": [("networks per cell", record["n_victims"]),
                ("attacks on each", record["n_attacks"])],
        "threshold": f"{record['good_threshold']:g}",
        "votes": any(cell["vote"] for cell in record["cells"]),
    }  # fmt: skip


STUDY_PAGE = StudyPage(
    name="study",
    version=2,
    command="palimpsest study",
    kinds=KINDS,
    tables=own_tables,
    words=words,
    filters={"known_mean": known_mean, "percents": percents, "counts": counts},
)
