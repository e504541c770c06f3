"""The page of an inversion study: inversion.json and its pictures as one HTML file
(docs/pages.md)."""

from __future__ import annotations

from typing import Any

from tasks.families.inversion.study.figure_specs import (
    Numbered,
    attack_styles,
    attacks_in,
    cells_of,
    divergence,
    ends,
    is_spot,
    letters,
    mean_of,
    measure,
    scores_of,
    sweet_spot,
    value_of,
    with_role,
)
from tasks.families.inversion.study.figures import KINDS
from tasks.families.inversion.study.tables import OF_CELL, cells_table, seeds_table, spots_table
from tasks.page.files import Arrays, Record
from tasks.page.study_page import StudyPage, Tables
from tasks.page.tables import Table, claim_counts, claims_table


def own_tables(record: Record) -> list[Table]:
    """The tables that every page has.

    Raises ValueError for cells of a source, or sweet spots at a cell, that is not there.
    """
    have = [source["name"] for source in record["sources"]]
    for k, cell in enumerate(record["cells"]):
        if cell["source"] not in have:
            raise ValueError(f"cell {k} is of source {cell['source']!r}; expected one of {have}")
    for spot in record["sweet_spots"]:
        for key in ("cell", "vanilla"):
            if spot[key] is not None and not 0 <= spot[key] < len(record["cells"]):
                raise ValueError(
                    f"a sweet spot of {spot['source']!r} has {key} {spot[key]}, but the study has "
                    f"{len(record['cells'])} cells, numbered from 0"
                )
    return [cells_table(record), seeds_table(record), claims_table(record), spots_table(record)]


def words(record: Record, _pictures: Arrays, _tables: Tables) -> dict[str, Any]:
    """Values that only this page shows."""
    answers = [_answer(record, source) for source in record["sources"]]
    return {
        "headline": {**claim_counts(record), "answers": answers},
        "attacks": attack_styles(record),
        "dashed": [],
        "tables_of_cells": [_cells_of(record, source) for source in record["sources"]],
        "run": [("sources", len(record["sources"])), ("cells", len(record["cells"]))],
    }


def _answer(record: Record, source: Record) -> dict[str, Any]:
    """A source's sweet spot under the first attack that has one, beside vanilla, attack by attack.

    `shown` is None if nothing stands beside vanilla; `why` says then what was found.
    """
    vanilla, paper = (with_role(record, source, role) for role in ("vanilla", "paper"))
    shown, under, sought = None, "", False
    for attack in record["attacks"]:
        spot = sweet_spot(record, source, attack["name"])
        sought = sought or spot is not None
        if spot and is_spot(spot) and shown is None:
            shown, under = record["cells"][spot["cell"]], attack["title"]
    loss = f"{100 * record['thresholds']['accuracy_loss']:g}"
    points = "point" if loss == "1" else "points"
    why = f"no setting of the grid costs at most {loss} {points} of accuracy and leaks less"
    if shown is None and paper and mean_of(paper[1], "accuracy") is not None:
        shown = paper[1]
    return {
        "source": source,
        "vanilla": vanilla[1] if vanilla else None,
        "shown": shown,
        "is_spot": bool(under),
        "under": under,
        "why": why if sought else "no sweet spot was sought",
        "attacks": _compared(record, vanilla, shown) if vanilla and shown else [],
    }


def _compared(record: Record, vanilla: Numbered, shown: Record) -> list[dict[str, Any]]:
    return [
        {
            "title": attack["title"],
            "before": mean_of(vanilla[1], "ssim", attack["name"]),
            "after": mean_of(shown, "ssim", attack["name"]),
            "chance": shown["attacks"][attack["name"]].get("chance"),
        }
        for attack in attacks_in(record, [vanilla])
        if mean_of(shown, "ssim", attack["name"]) is not None
    ]


def _cells_of(record: Record, source: Record) -> dict[str, Any]:
    cells, signs = cells_of(record, source), letters(record, source)
    attacks = attacks_in(record, cells)
    rows = []
    for k, cell in cells:
        found = {name: value_of(cell, name) for name in OF_CELL}
        rows.append(
            {
                "number": k,
                "letter": signs.get(k, ""),
                "title": cell["title"],
                "cut": cell["cut"],
                "values": {n: (measure(n, at["mean"]), ends(n, at)) for n, at in found.items()},
                "scores": [scores_of(cell, attack["name"]) for attack in attacks],
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
    },
    most_inline=300_000,
)
