"""Named columns behind every figure: what is drawn, and the CSV beside the page.

A figure is drawn from its table, so the two cannot differ.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.files import text_bytes
from tasks.page.formats import is_ours

CLAIM_KEYS = ("claim", "where", "theirs", "ours", "rule", "outcome")
OUTCOMES = {"holds": "holds", "fails": "does not hold", "undecided": "undecided",
            "untestable": "not testable"}  # fmt: skip

Cell = str | int | float | bool | None


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
        return self.kept([cell == value for cell in self.columns[column]])

    def kept(self, keep: Sequence[bool]) -> Table:
        """The rows whose place in `keep` is true."""
        return Table(
            self.name,
            {
                name: [cell for cell, kept in zip(cells, keep, strict=True) if kept]
                for name, cells in self.columns.items()
            },
        )

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


def claim_counts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Number of the paper's claims (`n_claims`) and of each outcome of them; of questions of our
    own (`n_own`), and of those that hold (`own_holds`)."""
    found = [claim["outcome"] for claim in record["claims"] if not is_ours(claim["where"])]
    own = [claim["outcome"] for claim in record["claims"] if is_ours(claim["where"])]
    counts = {name: found.count(text) for name, text in OUTCOMES.items()}
    holds = own.count(OUTCOMES["holds"])
    return {"n_claims": len(found), **counts, "n_own": len(own), "own_holds": holds,
            "n_said": len(record["claims"])}  # fmt: skip


def claims_table(record: Mapping[str, Any]) -> Table:
    """One row per claim."""
    cells = {key: [claim[key] for claim in record["claims"]] for key in CLAIM_KEYS}
    plain = (type(None), str, int, float)
    return Table(
        "claims",
        {key: [v if isinstance(v, plain) else str(v) for v in cells[key]] for key in CLAIM_KEYS},
    )
