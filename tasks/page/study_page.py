"""The page of a study: its record and pictures as one self-contained HTML file.

Nothing is measured here: numbers are the record's, rounded for reading, or sums and means of them.
No request leaves the page; it works from a file, on paper and in the dark. The numbers behind each
figure lie beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.files import text_bytes, write_file
from tasks.page.figures import Draw, Figure, drawn
from tasks.page.files import Arrays, Record, page_of, read_arrays, read_record, write_tables
from tasks.page.formats import duration, leaves
from tasks.page.tables import Table
from tasks.page.writer import page_html

Tables = Mapping[str, Table]
Words = Callable[[Record, Arrays, Tables], Mapping[str, Any]]


@dataclass(frozen=True)
class StudyPage:
    """A kind of study: its files are NAME.json, NAME-pictures.npz, NAME.html and NAME-data/.

    `kinds` draw its figures, `tables` are those that stand on every page, `words` is what only its
    template NAME.html shows, `stages` what the times are of; CSVs of more than `most_inline`
    letters are only beside the page.
    """

    name: str
    version: int
    command: str
    kinds: Mapping[str, Draw]
    tables: Callable[[Record], Sequence[Table]]
    words: Words
    stages: Mapping[str, str] = field(default_factory=dict)
    filters: Mapping[str, Any] = field(default_factory=dict)
    most_inline: int = 3_000_000

    @property
    def schema(self) -> str:
        return f"palimpsest-{self.name}"

    def write(self, folder: Path) -> Path:
        """Makes the page from the record and the pictures in `folder`; returns its path.

        CSVs of an earlier page are removed. Raises ValueError if a file is missing, cannot be read,
        is of another version, or if they do not belong together.
        """
        path = folder / f"{self.name}.json"
        record = read_record(path, schema=self.schema, version=self.version, command=self.command)
        again = f"run `{self.command}` again"
        pictures = read_arrays(folder / f"{self.name}-pictures.npz", again=again)
        with page_of(path, self.command):
            html, tables = self._made(record, pictures)
        write_tables(folder / f"{self.name}-data", tables.values())
        write_file(path.with_suffix(".html"), text_bytes(html))
        return path.with_suffix(".html")

    def render(self, record: Record, pictures: Arrays) -> str:
        """The page's HTML; ValueError if a figure asks for what is not in the record."""
        return self._made(record, pictures)[0]

    def _made(self, record: Record, pictures: Arrays) -> tuple[str, Tables]:
        own = self.tables(record)
        figures = drawn(record, pictures, self.kinds, [table.name for table in own])
        tables = {table.name: table for table in (*own, *_tables(figures))}
        shown = [style for figure in figures for style, _title in figure.legend]
        values = {
            "record": record,
            "figures": figures,
            "tables": tables,
            "folder": f"{self.name}-data",
            "most_inline": self.most_inline,
            "styles": {style.number: style for style in shown},
            "facts": self._facts(record),
            "settings": list(leaves(record["settings"])),
        }
        html = page_html(
            f"{self.name}.html",
            self.filters,
            **(values | dict(self.words(record, pictures, tables))),
        )
        return html, tables

    def _facts(self, record: Record) -> dict[str, list[tuple[str, str]]]:
        """Rows of "How it was made", by title."""
        seconds = record["seconds"].items()
        facts = {
            "Time": {self.stages.get(stage, f"to {stage}"): duration(s) for stage, s in seconds},
            "Source of the images": record.get("source"),
            "Versions": record.get("versions"),
            "Record": {
                "study": record["name"],
                "preset": record["preset"],
                "kind of record": f"{record['schema']}, version {record['version']}",
                "fingerprint of its settings": record["fingerprint"],
            },
        }
        return {title: list(leaves(values)) for title, values in facts.items() if values}


def _tables(figures: Sequence[Figure]) -> list[Table]:
    return [table for figure in figures for table in figure.tables]
