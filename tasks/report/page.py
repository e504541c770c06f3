"""The page that people see first: evaluation.json and pictures.npz as one self-contained HTML file.
Nothing is computed here: every number is the record's, rounded or binned for reading. The numbers
behind each figure lie beside it, in report-data/ (docs/pages.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.documents import read_document
from storage.files import text_bytes, write_file, write_json
from tasks.evaluation.record import (
    COMMAND,
    SIDES,
    best_trained,
    evaluation_folder,
    read_evaluation,
    sampled_means,
    trained,
)
from tasks.evaluation.settings import PROJECTED
from tasks.page.files import page_html, page_of, read_arrays, write_tables
from tasks.page.formats import leaves
from tasks.report import headline, image_grids
from tasks.report.figures import before_after_figure, figures_of, styles, tables_of

DATA_FOLDER = "report-data"
CONTEXT = "context.json"
COMPARED = ("trained", "external", "vote", "projected", "oracle")
"""Kinds of methods whose scores are shown beside those of the attack, image by image."""

EMPTY_CONTEXT: dict[str, Any] = {
    "stages": [],
    **{name: {} for name in ("recipe", "seeds", "versions", "pairs", "restorers")},
    "machine": "",
    "command": "",
    "created": "",
}


def write_report(out: Path, context: Mapping[str, Any], *, page: Path | None = None) -> Path:
    """Make `report.html` (or `page`) from what an evaluation left in `out`; returns its path.

    Beside the page, the folder report-data gets the numbers of each figure as CSV, and `context`,
    so that the page can be made again from its folder alone. `context` is what only the caller
    knows, all of it optional: `stages` (a list of {name, seconds}), `recipe` (the job's settings),
    `seeds`, `versions`, `pairs` (facts about the pairs that restorers learned from) and `restorers`
    (their cards, by name), mappings that are shown as lists; `machine`, `command` and `created` are
    texts.

    Raises ValueError if there is no finished evaluation in `out`, or one of another version, or if
    `context` has another key.
    """
    if unknown := sorted(set(context) - set(EMPTY_CONTEXT)):
        raise ValueError(f"context has {unknown}; expected keys among {sorted(EMPTY_CONTEXT)}")
    folder = evaluation_folder(out)
    known = EMPTY_CONTEXT | dict(context)
    record = read_evaluation(folder)
    pictures = read_arrays(folder / "pictures.npz", again="evaluate again")
    page = page or folder / "report.html"
    data = page.parent / DATA_FOLDER
    with page_of(folder / "evaluation.json", COMMAND):
        figures, tables = figures_of(record), tables_of(record)
        tables |= {table.name: table for figure in figures.values() for table in figure.tables}
        kinds = {name: method["kind"] for name, method in record["methods"].items()}
        best = best_trained(record)
        others = [
            name
            for name, kind in kinds.items()
            if name not in ("plain", best) and kind in COMPARED
            if kinds.get(name.removesuffix(PROJECTED)) != "classical"
        ]
        machine = {"machine": known["machine"]} if known["machine"] else {}
        facts = {
            "The images attacked": record["source"],
            "The pairs restorers learned from": known["pairs"],
            "Seeds": known["seeds"],
            "Settings of the evaluation": record["settings"],
            "Settings of the job": known["recipe"],
            "Restorers": known["restorers"],
            "Software and hardware": known["versions"] | machine,
        }
        blocks, exact = image_grids.appendix_blocks(record, pictures)
        places = {"bands": "grid"}
        if record["side_by_side"]:
            places["attack_bands"] = "side_by_side"
        html = page_html(
            "report.html",
            {"criterion": headline.criterion_title},
            record=record,
            context=known,
            methods={name: headline.method_title(name, kind) for name, kind in kinds.items()},
            attacker=headline.attacker(record),
            victims=headline.victims(record),
            attacks=headline.attack_rows(record),
            **{
                name: {side: image_grids.bands(record, pictures, place, side) for side in SIDES}
                for name, place in places.items()
            },
            nothing=image_grids.nothing_rows(pictures),
            pair_bins=image_grids.pair_bins(record, pictures),
            blocks=blocks,
            blocks_exact=exact,
            per_block=image_grids.PER_BLOCK,
            picture_width=record["source"]["size"][-1],
            figures=figures,
            tables=tables,
            folder=DATA_FOLDER,
            most_inline=math.inf,
            styles=styles(record),
            best=best,
            strengths=headline.strengths(known["restorers"]),
            headroom=headline.headroom(record),
            trained=trained(record),
            sampled=sampled_means(record),
            others={
                name: before_after_figure(record, name, ("ssim",)) if best else None
                for name in others
            },
            facts={title: list(leaves(values)) for title, values in facts.items() if values},
            threshold=f"{record['settings']['good_threshold']:g}",
        )
    write_tables(data, tables.values())
    if context:
        write_json(data / CONTEXT, dict(context))
    write_file(page, text_bytes(html))
    return page


def saved_context(run: Path) -> dict[str, Any]:
    """The `context` of the report that was last made in `run`'s evaluation; empty if none was.
    Raises ValueError if there is no finished evaluation, or the file is not a context."""
    path = evaluation_folder(run) / DATA_FOLDER / CONTEXT
    context = read_document(path, "remove it") if path.exists() else {}
    if set(context) - set(EMPTY_CONTEXT):
        raise ValueError(f"{path} is not a report's context; remove it")
    return context


def rebuild_report(run: Path, page: Path | None = None) -> Path:
    """The report of a finished evaluation (`run`: a job's folder or the evaluation's own), written
    from its folder alone, by default into it; times and settings of the job are taken from an
    earlier report there. Raises ValueError for a folder without a finished evaluation, or of
    another version."""
    folder = evaluation_folder(run)
    return write_report(folder, saved_context(folder), page=page)
