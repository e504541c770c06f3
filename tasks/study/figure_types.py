"""What a figure of a recovery study's page is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.page.charts import Style
from tasks.page.tables import Table


@dataclass(frozen=True)
class Panel:
    """A drawing (empty if there is nothing to draw), its title, a picture beside it, a note."""

    svg: str
    title: str
    icon: str = ""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """Panels side by side under a title, with a note."""

    title: str
    note: str
    panels: Sequence[Panel]


Entry = tuple[str, str]
Grid = tuple[Sequence[Entry], Sequence[tuple[str, Sequence[Entry]]]]


@dataclass(frozen=True)
class RecoveryFigure:
    """A figure of the page: the record's words on it, its drawings or pictures, and its table.

    `grid` is a table of texts: (titles of columns with a picture, rows of (title, entries)).
    `unreached`: a loss that was not reached is drawn.
    """

    about: Mapping[str, Any]
    table: Table
    rows: Sequence[Row] = ()
    legend: Sequence[tuple[Style, str]] = ()
    tiles: Sequence[Mapping[str, Any]] = ()
    groups: Sequence[Mapping[str, Any]] = ()
    grid: Grid | None = None
    unreached: bool = False
    notes: Sequence[str] = ()
