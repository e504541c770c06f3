"""The page of a study: study.json and study-pictures.npz as one self-contained HTML file.

Nothing is measured here: numbers are the record's, rounded for reading, or means of them over a
cell's networks. No request leaves the page; it works from a file, on paper and in the dark. The
numbers behind each figure lie beside it, in study-data/ (docs/pages.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from storage.files import text_bytes, write_file
from tasks.page.charts import Style
from tasks.page.files import page_of, read_arrays, read_record, write_tables
from tasks.page.tables import Table
from tasks.report.headline import NOTHING, duration, leaves, percent
from tasks.report.page import environment
from tasks.report.record import Pictures, Record
from tasks.study.figures import StudyFigure, study_figures
from tasks.study.headline import count, headline, networks, number, runs, short, spread
from tasks.study.image_grids import pairs
from tasks.study.tables import (
    cells_table,
    claims_table,
    known_mean,
    shown_table,
    victims_table,
)

SCHEMA, VERSION = "palimpsest-study", 2
PAGE, DATA_FOLDER = "study.html", "study-data"
MOST_INLINE = 3_000_000  # letters of a table that the page itself holds
LARGE_CELLS = 6  # with more cells, their pictures are shown smaller


def write_page(folder: Path) -> Path:
    """Makes `folder`/study.html from the study.json and study-pictures.npz in it; returns its path.

    The tables of the page are written to `folder`/study-data; CSVs of an earlier page there are
    removed. Raises ValueError if a file is missing, cannot be read, is of another version, or if
    they do not belong together.
    """
    record = read_record(
        folder / "study.json", schema=SCHEMA, version=VERSION, command="palimpsest study"
    )
    pictures = read_arrays(folder / "study-pictures.npz", command="palimpsest study")
    with page_of(folder / "study.json", "palimpsest study"):
        figures = study_figures(record, pictures)
        tables = _tables(record, figures)
        html = _render(record, pictures, figures, tables)
    write_tables(folder / DATA_FOLDER, tables)
    write_file(folder / PAGE, text_bytes(html))
    return folder / PAGE


def render(record: Record, pictures: Pictures) -> str:
    """The page's HTML; ValueError if a figure asks for what is not in the record."""
    figures = study_figures(record, pictures)
    return _render(record, pictures, figures, _tables(record, figures))


def _render(
    record: Record,
    pictures: Pictures,
    figures: Sequence[StudyFigure],
    tables: Mapping[str, Table],
) -> str:
    env = environment()
    env.filters |= {
        "number": number,
        "count": count,
        "runs": runs,
        "short": short,
    }
    env.globals |= {
        "known_mean": known_mean,
        "spread": spread,
        "percents": percent,
        "counts": count,
    }
    facts = {
        "Time": {f"to {stage}": _seconds(s) for stage, s in record["seconds"].items()},
        "Source of the images": record["source"],
        "Versions": record.get("versions") or {},
        "Record": {
            "study": record["name"],
            "preset": record["preset"],
            "kind of record": f"{record['schema']}, version {record['version']}",
            "fingerprint of its settings": record["fingerprint"],
        },
    }
    page: str = env.get_template("study.html").render(
        record=record,
        headline=headline(record),
        networks=networks(record),
        figures=figures,
        tables=tables,
        folder=DATA_FOLDER,
        most_inline=MOST_INLINE,
        styles=_styles(figures),
        pairs=pairs(record, pictures),
        large=len(record["cells"]) <= LARGE_CELLS,
        facts={title: list(leaves(values)) for title, values in facts.items() if values},
        run=[("networks per cell", record["n_victims"]), ("attacks on each", record["n_attacks"])],
        settings=list(leaves(record["settings"])),
        threshold=f"{record['good_threshold']:g}",
        votes=any(cell["vote"] for cell in record["cells"]),
    )
    return page


def _styles(figures: Sequence[StudyFigure]) -> dict[int, Style]:
    """The styles of all legends by number, by which the style sheet hides a figure's line."""
    return {style.number: style for figure in figures for style, _title in figure.legend}


def _seconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else duration(seconds)


def _tables(record: Record, figures: Sequence[StudyFigure]) -> dict[str, Table]:
    own = [cells_table(record), victims_table(record), claims_table(record), shown_table(record)]
    return {table.name: table for table in (*own, *(figure.table for figure in figures))}
