"""The page of a recovery study: recovery.json and its pictures as one self-contained HTML file.

Nothing is measured here: numbers are the record's, rounded for reading, or sums and means of them
over masks. No request leaves the page; it works from a file, on paper and in the dark. The numbers
behind each figure lie beside it, in recovery-data/ (docs/pages.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.files import text_bytes, write_file
from tasks.families.autoencoder.study.charts import power, styles_of
from tasks.families.autoencoder.study.figure_specs import at_lowest, best_victim, lowest, unreached
from tasks.families.autoencoder.study.figures import recovery_figures
from tasks.families.autoencoder.study.headline import decibels, headline, whole
from tasks.families.autoencoder.study.tables import (
    Arrays,
    cells_table,
    claims_table,
    summary_table,
    triple,
    victims_table,
)
from tasks.page.files import page_of, read_arrays, read_record, write_tables
from tasks.page.tables import Table
from tasks.report.headline import NOTHING, duration, leaves
from tasks.report.page import environment
from tasks.report.record import Record
from tasks.study.figure_types import RecoveryFigure
from tasks.study.headline import number, runs, short

SCHEMA, VERSION = "palimpsest-recovery", 2
PAGE, DATA_FOLDER = "recovery.html", "recovery-data"
COMMAND = "palimpsest study autoencoder"
MOST_INLINE = 3_000_000  # letters of a table that the page itself holds


def write_page(folder: Path) -> Path:
    """Makes `folder`/recovery.html from recovery.json and recovery-pictures.npz; returns its path.

    The tables of the page are written to `folder`/recovery-data; CSVs of an earlier page there are
    removed. Raises ValueError if a file is missing, cannot be read, is of another version, or if
    they do not belong together.
    """
    record = read_record(folder / "recovery.json", schema=SCHEMA, version=VERSION, command=COMMAND)
    pictures = read_arrays(folder / "recovery-pictures.npz", command=COMMAND)
    with page_of(folder / "recovery.json", COMMAND):
        figures = recovery_figures(record, pictures)
        tables = _tables(record, figures)
        html = _render(record, figures, tables)
    write_tables(folder / DATA_FOLDER, tables)
    write_file(folder / PAGE, text_bytes(html))
    return folder / PAGE


def render(record: Record, pictures: Arrays) -> str:
    """The page's HTML; ValueError if a figure asks for what is not in the record."""
    figures = recovery_figures(record, pictures)
    return _render(record, figures, _tables(record, figures))


def _render(record: Record, figures: Sequence[RecoveryFigure], tables: Mapping[str, Table]) -> str:
    env = environment()
    env.filters |= {
        "number": number,
        "runs": runs,
        "short": short,
        "power": power,
        "decibels": decibels,
        "whole": whole,
        "triple": triple,
        "lowest": lowest,
        "unreached": unreached,
    }
    facts = {
        "Time": {
            {"train": "to train the networks", "inpainter": "to train the inpainter",
             "recover": "to recover"}.get(stage, stage): _seconds(seconds)
            for stage, seconds in record["seconds"].items()
        },
        "Source of the images": record["source"],
        "Versions": record.get("versions") or {},
        "Record": {
            "study": record["name"],
            "preset": record["preset"],
            "kind of record": f"{record['schema']}, version {record['version']}",
            "fingerprint of its settings": record["fingerprint"],
        },
    }  # fmt: skip
    styles = styles_of(record)
    page: str = env.get_template("recovery.html").render(
        record=record,
        headline=headline(record, tables["summary"]),
        figures=figures,
        tables=tables,
        folder=DATA_FOLDER,
        most_inline=MOST_INLINE,
        methods=styles,
        styles={style.number: style for style in styles.values()},
        dashed=[styles[m["name"]].colour for m in record["methods"] if m["knows_mask"]],
        tables_of_cells=[_cells_of(record, victim) for victim in record["victims"]],
        facts={title: list(leaves(values)) for title, values in facts.items() if values},
        run=[("networks", len(record["victims"])), ("cells", len(record["cells"]))],
        settings=list(leaves(record["settings"])),
    )
    return page


def _cells_of(record: Record, victim: Record) -> dict[str, Any]:
    """A victim with its cells at its lowest level, by noise, training or test, mask and method."""
    masks = {mask["name"]: (k, mask["title"]) for k, mask in enumerate(record["masks"])}
    methods = {method["name"]: (k, method["title"]) for k, method in enumerate(record["methods"])}
    last = len(masks) + len(methods)

    def place(cell: Record) -> tuple[float, bool, int, int]:
        mask, method = (masks.get(cell["mask"], (last,)), methods.get(cell["method"], (last,)))
        return cell["sigma"], cell["split"] == "test", mask[0], method[0]

    found = sorted(at_lowest(record, victim), key=place)
    return {
        "victim": victim,
        "level": lowest(victim),
        "cells": [
            dict(cell)
            | {"mask_title": masks.get(cell["mask"], (0, cell["mask"]))[1]}
            | {"method_title": methods.get(cell["method"], (0, cell["method"]))[1]}
            for cell in found
        ],
    }


def _seconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else duration(seconds)


def _tables(record: Record, figures: Sequence[RecoveryFigure]) -> dict[str, Table]:
    own = [
        summary_table(record, best_victim(record)),
        cells_table(record),
        victims_table(record),
        claims_table(record),
    ]
    return {table.name: table for table in (*own, *(figure.table for figure in figures))}
