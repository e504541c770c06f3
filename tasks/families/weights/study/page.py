"""The page of a study of the attacks on weights: study.json and its pictures as one HTML file
(docs/pages.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tasks.families.weights.study.figures import KINDS
from tasks.families.weights.study.tables import (
    cells_table,
    known_mean,
    shown_table,
    victims_table,
)
from tasks.page.files import Arrays, Record
from tasks.page.formats import count, fixed, percent, plural
from tasks.page.pictures import data_uri
from tasks.page.study_page import StudyPage, Tables
from tasks.page.tables import Table, claim_counts, claims_table

LARGE_CELLS = 6  # with more cells, their pictures are shown smaller


def own_tables(record: Record) -> list[Table]:
    """The tables that every page has."""
    return [cells_table(record), victims_table(record), claims_table(record), shown_table(record)]


def words(record: Record, pictures: Arrays, _tables: Tables) -> dict[str, Any]:
    """Values that only this page shows."""
    return {
        "headline": headline(record),
        "networks": _networks(record),
        "pairs": [{"cell": cell, "pairs": _pairs(record, cell, pictures)}
                  for cell in record["cells"]],
        "large": len(record["cells"]) <= LARGE_CELLS,
        "run": [("networks per cell", record["n_victims"]),
                ("attacks on each", record["n_attacks"])],
        "threshold": f"{record['good_threshold']:g}",
        "votes": any(cell["vote"] for cell in record["cells"]),
    }  # fmt: skip


def headline(record: Record) -> dict[str, Any]:
    """Counts of claims by outcome, the best and the worst cell.

    The best is the one with the largest share of good images, then the highest mean SSIM; the worst
    is None if there is one cell, or none.
    """

    def merit(cell: Record) -> tuple[float, float]:
        mean = cell["targets"]["mean_ssim"]
        return cell["targets"]["good_fraction"] or 0.0, -1.0 if mean is None else mean

    cells = [cell for cell in record["cells"] if cell["targets"]["n"]]
    ranked = sorted(cells, key=merit, reverse=True)
    return {
        **claim_counts(record),
        "best": ranked[0] if ranked else None,
        "worst": ranked[-1] if len(ranked) > 1 else None,
        "any_good": any(cell["targets"]["n_good"] for cell in record["cells"]),
    }


def _networks(record: Record) -> str:
    cells = record["cells"]
    n = sum(len(cell["victims"]) for cell in cells)
    made = plural(n, "network was", "networks were")
    where = "in one cell" if len(cells) == 1 else f"in {len(cells)} cells of settings"
    attacked = plural(record["n_attacks"], "time", "times")
    return f"{made} trained {where} and attacked {attacked}{' each' if n != 1 else ''}."


def _pairs(record: Record, cell: Record, pictures: Arrays) -> list[dict[str, Any]]:
    """A cell's best pairs (original, reconstruction), best first, with their SSIM, if any was kept.

    Raises ValueError if it has more or fewer than it says.
    """
    names = [f"cell_{cell['number']:04d}/{kind}" for kind in ("original", "reconstruction")]
    if not all(name in pictures for name in names):
        return []
    originals, made = (pictures[name] for name in names)
    if not len(originals) == len(made) == len(cell["shown"]):
        raise ValueError(
            f"cell {cell['number']} shows {len(cell['shown'])} images, but the pictures hold "
            f"{len(originals)} originals and {len(made)} reconstructions; make the study's record "
            "again"
        )
    images = record["images"]
    return [
        {
            "original": data_uri(original),
            "uri": data_uri(found),
            "alt": f"Training picture {images['image_id'][row]} of network {images['victim'][row]}",
            "score": fixed(images["ssim"][row], 2),
            "good": (images["ssim"][row] or 0.0) > record["good_threshold"],
        }
        for original, found, row in zip(originals, made, cell["shown"], strict=True)
    ]


def _spread(values: Sequence[float | None], *, show: Callable[[float | None], str]) -> str:
    """`0.41 to 0.52` over the networks of a cell; empty if they do not differ as shown."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or show(min(known)) == show(max(known)):
        return ""
    return f"{show(min(known)).removesuffix(' %')} to {show(max(known))}"


STUDY_PAGE = StudyPage(
    name="study",
    version=2,
    command="palimpsest study",
    kinds=KINDS,
    tables=own_tables,
    words=words,
    filters={
        "known_mean": known_mean,
        "percents": partial(_spread, show=percent),
        "counts": partial(_spread, show=count),
    },
)
