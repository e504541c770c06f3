"""Figures of a study's page: from its record's list to drawings, each with its tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.page.charts import Style
from tasks.page.files import Arrays, Record
from tasks.page.tables import Table


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


def drawn(
    record: Record, pictures: Arrays, kinds: Mapping[str, Draw], taken: Sequence[str]
) -> list[Figure]:
    """The record's figures in their order, each drawn by the function of its kind.

    Raises ValueError for a kind that is not among `kinds`, for a name that is no file's, is used
    twice, or is among `taken`, and for whatever a figure cannot be drawn from.
    """
    names = [figure["name"] for figure in record["figures"]]
    for name, figure in zip(names, record["figures"], strict=True):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name in taken:
            raise ValueError(
                f"a figure is named {name!r}; expected letters, digits and hyphens, and none of "
                f"{', '.join(taken)}, since its numbers are kept in a file of that name"
            )
        if names.count(name) > 1:
            raise ValueError(f"two figures are named {name!r}; give each its own name")
        if figure["kind"] not in kinds:
            raise ValueError(
                f"figure {name!r} is of kind {figure['kind']!r}; expected one of {sorted(kinds)}"
            )
    return [kinds[figure["kind"]](record, pictures, figure) for figure in record["figures"]]


def entry_of(record: Record, figure: Record, key: str, name: str) -> Record:
    """The entry of that `name` in the record's list of `key`s, as `victim`, `mask` or `source`.

    Raises ValueError if it has none.
    """
    entries = record[f"{key}s"]
    for entry in entries:
        if entry["name"] == name:
            return dict(entry)
    have = [entry["name"] for entry in entries]
    raise ValueError(f"figure {figure['name']!r} shows {key} {name!r}; expected one of {have}")
