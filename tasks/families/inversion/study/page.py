"""The page of an inversion study: inversion.json and its pictures as one self-contained HTML file.

Nothing is measured here: numbers are the record's, rounded for reading. No request leaves the page;
it works from a file, on paper and in the dark. The numbers behind each figure lie beside it, in
inversion-data/ (docs/pages.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.files import text_bytes, write_file
from tasks.families.inversion.study.charts import attack_styles
from tasks.families.inversion.study.figure_specs import attacks_in, cells_of, letters, value_of
from tasks.families.inversion.study.figures import InversionFigure, inversion_figures
from tasks.families.inversion.study.headline import (
    brackets,
    chance,
    divergence,
    headline,
    measure,
    spread,
)
from tasks.families.inversion.study.tables import (
    Arrays,
    cells_table,
    claims_table,
    seeds_table,
    spots_table,
)
from tasks.page.files import page_of, read_arrays, read_record, write_tables
from tasks.page.tables import Table
from tasks.report.headline import NOTHING, duration, leaves
from tasks.report.page import environment
from tasks.report.record import Record
from tasks.study.headline import number, short

SCHEMA, VERSION = "palimpsest-inversion", 2
PAGE, DATA_FOLDER = "inversion.html", "inversion-data"
COMMAND = "palimpsest study inversion"
MOST_INLINE = 300_000  # letters of a table that the page itself holds
STAGES = {
    "train": "to train the networks",
    "invert": "to invert them",
    "restore": "to restore",
    "synthetic": "for synthetic points",
}


def write_page(folder: Path) -> Path:
    """Makes `folder`/inversion.html from inversion.json and inversion-pictures.npz; returns its
    path.

    The tables of the page are written to `folder`/inversion-data; CSVs of an earlier page there are
    removed. Raises ValueError if a file is missing, cannot be read, is of another version, or if
    they do not belong together.
    """
    record = read_record(folder / "inversion.json", schema=SCHEMA, version=VERSION, command=COMMAND)
    pictures = read_arrays(folder / "inversion-pictures.npz", command=COMMAND)
    with page_of(folder / "inversion.json", COMMAND):
        figures = inversion_figures(record, pictures)
        tables = _tables(record, figures)
        html = _render(record, figures, tables)
    write_tables(folder / DATA_FOLDER, tables)
    write_file(folder / PAGE, text_bytes(html))
    return folder / PAGE


def render(record: Record, pictures: Arrays) -> str:
    """The page's HTML; ValueError if a figure asks for what is not in the record."""
    figures = inversion_figures(record, pictures)
    return _render(record, figures, _tables(record, figures))


def _render(record: Record, figures: Sequence[InversionFigure], tables: Mapping[str, Table]) -> str:
    env = environment()
    env.filters |= {"number": number, "short": short}
    facts = {
        "Time": {
            STAGES.get(stage, stage): NOTHING if seconds is None else duration(seconds)
            for stage, seconds in record["seconds"].items()
        },
        "Record": {
            "study": record["name"],
            "preset": record["preset"],
            "kind of record": f"{record['schema']}, version {record['version']}",
            "fingerprint of its settings": record["fingerprint"],
        },
    }
    shown = [style for figure in figures for style, _title in figure.legend]
    page: str = env.get_template("inversion.html").render(
        record=record,
        headline=headline(record),
        figures=figures,
        tables=tables,
        folder=DATA_FOLDER,
        most_inline=MOST_INLINE,
        attacks=attack_styles(record),
        styles={style.number: style for style in shown},
        dashed=[],
        tables_of_cells=[_cells_of(record, source) for source in record["sources"]],
        facts={title: list(leaves(values)) for title, values in facts.items()},
        run=[("sources", len(record["sources"])), ("cells", len(record["cells"]))],
        settings=list(leaves(record["settings"])),
    )
    return page


def _cells_of(record: Record, source: Record) -> dict[str, Any]:
    """A source with all its cells and their scores as texts."""
    cells = cells_of(record, source)
    attacks = attacks_in(record, cells)
    rows = []
    for k, cell in cells:
        values = {
            value: (measure(value, found["mean"]), brackets(value, found))
            for value in ("accuracy", "train_accuracy", "distance", "min_distance")
            for found in [value_of(cell, value)]
        }
        scores = [
            {
                "ssim": spread("ssim", cell["attacks"].get(attack["name"])),
                "ssim_ends": brackets("ssim", value_of(cell, "ssim", attack["name"])),
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


def _tables(record: Record, figures: Sequence[InversionFigure]) -> dict[str, Table]:
    own = [cells_table(record), seeds_table(record), spots_table(record), claims_table(record)]
    drawn = [table for figure in figures for table in figure.tables]
    return {table.name: table for table in (*own, *drawn)}
