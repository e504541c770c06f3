"""Inputs and outputs of pages: a JSON record and an .npz of pictures, read with errors that help;
tables, from which figures are drawn and which are CSVs beside the page; and the page from its
template, one file that asks nothing of the network."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.documents import read_document, understood
from storage.files import text_bytes, write_file
from tasks.page import formats
from tasks.page.charts import marker
from tasks.page.formats import is_ours
from tasks.page.pictures import data_uri

TEMPLATES = Path(__file__).parent / "templates"
FORMATS = ("percent", "score", "duration", "interval", "number", "count", "runs", "short", "power",
           "decibels", "whole")  # fmt: skip
CLAIM_KEYS = ("claim", "where", "theirs", "ours", "rule", "outcome")
OUTCOMES = {"holds": "holds", "fails": "does not hold", "undecided": "undecided",
            "untestable": "not testable"}  # fmt: skip

Record = Mapping[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]
Cell = str | int | float | bool | None


def read_record(path: Path, *, schema: str, version: int, command: str) -> dict[str, Any]:
    """The JSON object in `path`, of this schema and version. Raises ValueError, which names
    `command` as the way to make it, if there is no such file, or it is something else."""
    try:
        record = read_document(path, f"run `{command}` again")
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}; run `{command}` first") from None
    name, other = record.get("schema"), record.get("version")
    if (name, other) != (schema, version):
        raise ValueError(
            f"{path} is {name!r} version {other!r}, expected {schema!r} version {version}; "
            f"run `{command}` again with this release"
        )
    return record


@contextlib.contextmanager
def page_of(records: Path | str, command: str) -> Iterator[None]:
    """Turn errors in making a page into ValueErrors of one line that name its `records` and the
    `command` that makes them anew."""
    import jinja2

    with understood(records, f"run `{command}` again"):
        try:
            yield
        except jinja2.UndefinedError as error:
            raise ValueError(str(error)) from error


def read_arrays(path: Path, *, again: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of the .npz `path`; ValueError, which says what to do `again`, if there is none,
    or it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} has no {path.name}, so its study was not finished or not copied whole; "
            f"copy it, or {again}"
        ) from None
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}); {again}") from error


def page_html(template: str, filters: Mapping[str, Any], **values: Any) -> str:
    """The page that `template` makes of `values`; all of `FORMATS` are filters, and `uri` of a
    picture, `filters` come on top. Raises jinja2.UndefinedError for a value that is not there."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {name: getattr(formats, name) for name in FORMATS}
    environment.filters |= {"uri": data_uri, **filters}
    environment.tests["ours"] = is_ours
    environment.globals |= {"marker": marker}
    return environment.get_template(template).render(**values)


@dataclass(frozen=True)
class Table:
    """Named columns of equally many cells; `name` is the file's, without its ending."""

    name: str
    columns: dict[str, list[Cell]]

    def __post_init__(self) -> None:
        lengths = {len(cells) for cells in self.columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"table {self.name!r} has columns of {sorted(lengths)} cells")

    @property
    def n_rows(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def csv(self) -> str:
        """RFC 4180 text with a header; None is an empty cell."""
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(self.columns)
        writer.writerows(zip(*self.columns.values(), strict=True))
        return file.getvalue()

    def uri(self) -> str:
        """The CSV inside a URL."""
        content = base64.b64encode(text_bytes(self.csv())).decode()
        return f"data:text/csv;charset=utf-8;base64,{content}"

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """The rows, one mapping each."""
        for cells in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, cells, strict=True))

    def where(self, column: str, value: Cell) -> Table:
        """The rows with `value` in `column`."""
        rows = [k for k, cell in enumerate(self.columns[column]) if cell == value]
        return Table(self.name, {n: [cells[k] for k in rows] for n, cells in self.columns.items()})

    def points(self, x: str, y: str) -> list[tuple[float, float]]:
        """(x, y) of the rows that have both."""
        return [
            (float(a), float(b))
            for a, b in zip(self.columns[x], self.columns[y], strict=True)
            if isinstance(a, int | float) and isinstance(b, int | float)
        ]


def table_of(name: str, rows: Sequence[dict[str, Cell]], columns: Sequence[str] = ()) -> Table:
    """A table of all keys that any row has, in order of appearance; `columns` come in any case."""
    names = dict.fromkeys([*columns, *(key for row in rows for key in row)])
    return Table(name, {key: [row.get(key) for row in rows] for key in names})


def write_tables(folder: Path, tables: Iterable[Table]) -> None:
    """Every table as CSV in `folder`; CSVs of an earlier page there are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.csv"):
        old.unlink()
    for table in tables:
        write_file(folder / f"{table.name}.csv", text_bytes(table.csv()))


def cells_of(values: Mapping[str, Any], before: str = "") -> dict[str, Cell]:
    """Cells of a row by name, `before` in front of each; of an interval two, `NAME low` and
    `NAME high`."""
    row: dict[str, Cell] = {}
    for name, value in values.items():
        if name.endswith("interval"):
            ends = zip(("low", "high"), value or (None, None), strict=True)
            row |= {f"{before}{name} {end}": limit for end, limit in ends}
        else:
            row[f"{before}{name}"] = value
    return row


def estimate(name: str, found: Sequence[float | None]) -> dict[str, Cell]:
    """A value and the ends of its interval as cells of a row."""
    return dict(zip((name, f"{name} low", f"{name} high"), found, strict=True))


def claim_counts(record: Record) -> dict[str, Any]:
    """Number of the paper's claims (`n_claims`) and of each outcome of them; of questions of our
    own (`n_own`), and of those that hold (`own_holds`)."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for claim in record["claims"]:
        found[is_ours(claim["where"])].append(claim["outcome"])
    counts = {name: found[False].count(text) for name, text in OUTCOMES.items()}
    return {"n_claims": len(found[False]), **counts, "n_own": len(found[True]),
            "own_holds": found[True].count(OUTCOMES["holds"]),
            "n_said": len(record["claims"])}  # fmt: skip


def claims_table(record: Record) -> Table:
    """One row per claim."""
    plain = (type(None), str, int, float)
    cells = {key: [claim[key] for claim in record["claims"]] for key in CLAIM_KEYS}
    return Table(
        "claims", {k: [v if isinstance(v, plain) else str(v) for v in cells[k]] for k in cells}
    )
