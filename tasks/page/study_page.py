"""The page of a study: its record and pictures as one self-contained HTML file, the numbers behind
each figure beside it. Nothing is measured here: numbers are the record's, or sums and means of
them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.files import text_bytes, write_file
from tasks.page.charts import Style
from tasks.page.files import (
    Arrays,
    Record,
    Table,
    page_html,
    page_of,
    read_arrays,
    read_record,
    write_tables,
)
from tasks.page.formats import duration, leaves


@dataclass(frozen=True)
class Drawing:
    """A drawing (empty if there is nothing to draw), its title, a note, a picture beside it."""

    svg: str
    title: str = ""
    note: str = ""
    icon: str = ""


@dataclass(frozen=True)
class Row:
    """Drawings side by side under a title, with a note."""

    title: str
    note: str
    panels: Sequence[Drawing]


@dataclass(frozen=True)
class Figure:
    """A figure of the page: the record's words on it, its drawings, its legend and its tables;
    `more` is what only its kind has."""

    about: Record
    tables: Sequence[Table]
    rows: Sequence[Row] = ()
    legend: Sequence[tuple[Style, str]] = ()
    notes: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


Draw = Callable[[Record, Arrays, Record], Figure]
FigureWords = tuple[str, str, str, str]
"""Of a figure: its title, where in the paper, its caption, and what it does not show."""


def figure_spec(kind: str, name: str, words: FigureWords, **shown: Any) -> dict[str, Any]:
    """A figure as it stands in a record; `shown`: what it is drawn of."""
    title, where, caption, cannot = words
    head = {"kind": kind, "name": name, "title": title, "where": where}
    return {**head, **shown, "caption": caption, "cannot": cannot}


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
        """Make the page from the record and the pictures in `folder`; returns its path. Raises
        ValueError if a file is missing, cannot be read, is of another version, or if they do not
        belong together."""
        path = folder / f"{self.name}.json"
        record = read_record(path, schema=self.schema, version=self.version, command=self.command)
        again = f"run `{self.command}` again"
        pictures = read_arrays(folder / f"{self.name}-pictures.npz", again=again)
        with page_of(path, self.command):
            html, tables = self.render(record, pictures)
        write_tables(folder / f"{self.name}-data", tables.values())
        write_file(path.with_suffix(".html"), text_bytes(html))
        return path.with_suffix(".html")

    def render(self, record: Record, pictures: Arrays) -> tuple[str, Tables]:
        """The page's HTML and tables; ValueError if a figure asks for what is not in the record."""
        own = self.tables(record)
        taken = [table.name for table in own]
        for kind, name in ((figure["kind"], figure["name"]) for figure in record["figures"]):
            if kind not in self.kinds:
                raise ValueError(f"a figure is of kind {kind!r}; expected one of {[*self.kinds]}")
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name in taken:
                raise ValueError(
                    f"a figure is named {name!r}; expected letters, digits and hyphens, and none "
                    f"of {', '.join(taken)}, since its numbers are kept in a file of that name"
                )
            taken.append(name)
        figures = [self.kinds[f["kind"]](record, pictures, f) for f in record["figures"]]
        of_figures = (table for figure in figures for table in figure.tables)
        tables = {table.name: table for table in (*own, *of_figures)}
        times = {
            self.stages.get(stage, f"to {stage}"): duration(seconds)
            for stage, seconds in record["seconds"].items()
        }
        facts = {
            "Time": times,
            "Source of the images": record.get("source"),
            "Versions": record.get("versions"),
            "Record": {
                "study": record["name"],
                "preset": record["preset"],
                "kind of record": f"{record['schema']}, version {record['version']}",
                "fingerprint of its settings": record["fingerprint"],
            },
        }
        shared = {
            "record": record,
            "figures": figures,
            "tables": tables,
            "folder": f"{self.name}-data",
            "most_inline": self.most_inline,
            "styles": {look.number: look for figure in figures for look, _ in figure.legend},
            "facts": {title: list(leaves(values)) for title, values in facts.items() if values},
            "settings": list(leaves(record["settings"])),
        }
        own_values = dict(self.words(record, pictures, tables))
        return page_html(f"{self.name}.html", self.filters, **(shared | own_values)), tables
