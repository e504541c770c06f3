"""The figures of an inversion study: from its record's list to drawings, each with its tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.families.inversion.study.figure_specs import (
    MEASURES,
    Numbered,
    attacks_in,
    compared,
    letters,
    role_title,
    value_of,
    with_roles,
)
from tasks.families.inversion.study.headline import (
    brackets,
    chance,
    divergence,
    few_networks,
    incomplete,
    measure,
    n_networks,
    spread,
    without_front,
)
from tasks.families.inversion.study.image_grids import groups
from tasks.families.inversion.study.panels import heat_rows, layer_rows, pareto_rows, plane_rows
from tasks.families.inversion.study.tables import (
    Arrays,
    features_table,
    heatmaps_table,
    layers_table,
    pareto_table,
    plates_table,
    scores_table,
    settings_table,
)
from tasks.page.charts import Style
from tasks.page.tables import Table
from tasks.report.headline import score
from tasks.report.record import Record
from tasks.study.figure_types import Row

OWN_TABLES = ("cells", "seeds", "claims", "sweet-spots")


@dataclass(frozen=True)
class InversionFigure:
    """A figure of the page: the record's words on it, its drawings or pictures, and its tables.

    `keys` are letters and what they stand for, by source; `scores` are tables like the paper's
    third; `settings` are rows of the table of synthetic points.
    """

    about: Mapping[str, Any]
    tables: Sequence[Table]
    rows: Sequence[Row] = ()
    legend: Sequence[tuple[Style, str]] = ()
    keys: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    groups: Sequence[Mapping[str, Any]] = ()
    scores: Sequence[Mapping[str, Any]] = ()
    settings: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()


def inversion_figures(record: Record, pictures: Arrays) -> list[InversionFigure]:
    """The record's figures in their order.

    Raises ValueError for a kind that is not known, for a name that is no file's or is used twice,
    for cells of a source that is not there, and for pictures that do not belong to the record.
    """
    _check_sources(record)
    names = [figure["name"] for figure in record["figures"]]
    made = []
    for figure in record["figures"]:
        name = figure["name"]
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name in OWN_TABLES:
            raise ValueError(
                f"a figure is named {name!r}; expected letters, digits and hyphens, and none of "
                f"{', '.join(OWN_TABLES)}, since its numbers are kept in a file of that name"
            )
        if names.count(name) > 1:
            raise ValueError(f"two figures are named {name!r}; give each its own name")
        if figure["kind"] not in DRAW:
            raise ValueError(
                f"figure {name!r} is of kind {figure['kind']!r}; expected one of {sorted(DRAW)}"
            )
        made.append(DRAW[figure["kind"]](record, pictures, figure))
    return made


def _check_sources(record: Record) -> None:
    have = [source["name"] for source in record["sources"]]
    for k, cell in enumerate(record["cells"]):
        if cell["source"] not in have:
            raise ValueError(f"cell {k} is of source {cell['source']!r}; expected one of {have}")
    for spot in record["sweet_spots"]:
        for key in ("cell", "vanilla"):
            if spot[key] is not None and not 0 <= spot[key] < len(record["cells"]):
                raise ValueError(
                    f"a sweet spot of {spot['source']!r} has {key} {spot[key]}, but the study has "
                    f"{len(record['cells'])} cells, numbered from 0"
                )


def table3_figure(record: Record, _pictures: Arrays, figure: Mapping[str, Any]) -> InversionFigure:
    """Scores of the cells with a role, by source and attack (003, table 3)."""
    found = [(source, with_roles(record, source)) for source in record["sources"]]
    notes = [note for source in record["sources"] for note in incomplete(record, source)]
    return _scores_figure(record, figure, found, notes)


def table4_figure(record: Record, _pictures: Arrays, figure: Mapping[str, Any]) -> InversionFigure:
    """Scores of UniCon beside MixCon and vanilla (003, table 4)."""
    found = [(source, compared(record, source)) for source in record["sources"]]
    without = [source["title"] for source, cells in found if not cells]
    notes = [f"Without UniCon: {'; '.join(without)}."] if without else []
    return _scores_figure(record, figure, found, notes)


def _scores_figure(
    record: Record,
    figure: Mapping[str, Any],
    found: Sequence[tuple[Record, Sequence[Numbered]]],
    notes: Sequence[str],
) -> InversionFigure:
    table = scores_table(figure["name"], record, found)
    scores = [
        {
            "source": source,
            "networks": n_networks([cell for _k, cell in cells]),
            "rows": [_score_row(record, source, *numbered) for numbered in cells],
        }
        for source, cells in found
        if cells
    ]
    return InversionFigure(figure, [table], scores=scores, notes=notes)


def _score_row(record: Record, source: Record, k: int, cell: Record) -> dict[str, Any]:
    """A cell as the tables show it: its accuracy, and a line for each attack."""
    accuracy = value_of(cell, "accuracy")
    roles = [role_title(record, role) for role in cell["roles"] if role != "vanilla"]
    notes = ["; ".join(roles), _layer(source, cell), divergence(cell)]
    return {
        "cell": k,
        "letter": letters(record, source).get(k, ""),
        "title": cell["title"],
        "notes": [note for note in notes if note],
        "accuracy": measure("accuracy", accuracy["mean"]),
        "accuracy_ends": brackets("accuracy", accuracy),
        "attacks": [
            {
                "name": attack["name"],
                "title": attack["title"],
                "chance": score(chance(cell, attack["name"])),
                "n": cell["attacks"][attack["name"]]["n"],
            }
            | {name: spread(name, cell["attacks"][attack["name"]]) for name in MEASURES}
            | {
                f"{name}_ends": brackets(name, value_of(cell, name, attack["name"]))
                for name in MEASURES
            }
            for attack in attacks_in(record, [(k, cell)])
        ],
    }  # fmt: skip


def _layer(source: Record, cell: Record) -> str:
    return f"cut at layer {cell['cut']}" if cell["cut"] != source["cut"] else ""


def plates_figure(record: Record, pictures: Arrays, figure: Mapping[str, Any]) -> InversionFigure:
    """Originals and what came back (003, figure 4)."""
    made = groups(record, pictures)
    table = plates_table(figure["name"], record, pictures)
    return InversionFigure(figure, [table], groups=made)


def heatmaps_figure(
    record: Record, _pictures: Arrays, figure: Mapping[str, Any]
) -> InversionFigure:
    """Four values by lambda and beta, a row per source (003, figures 3 and 6 to 17)."""
    table = heatmaps_table(figure["name"], record)
    rows = heat_rows(record, figure, table)
    return InversionFigure(figure, [table], rows, keys=_keys(record))


def pareto_figure(record: Record, _pictures: Arrays, figure: Mapping[str, Any]) -> InversionFigure:
    """Accuracy against SSIM, all settings and those near vanilla, a row per source."""
    table = pareto_table(figure["name"], record)
    rows, legend = pareto_rows(record, table)
    sources = record["sources"]
    notes = [note for source in sources for note in without_front(record, source)]
    notes += [note for source in sources for note in few_networks(record, source)]
    return InversionFigure(figure, [table], rows, legend, keys=_keys(record), notes=notes)


def layers_figure(record: Record, _pictures: Arrays, figure: Mapping[str, Any]) -> InversionFigure:
    """SSIM against the layer, a row per source and a panel per attack (003, appendix D.2)."""
    table = layers_table(figure["name"], record)
    rows, legend = layer_rows(record, table)
    return InversionFigure(figure, [table], rows, legend)


def synthetic_figure(
    record: Record, _pictures: Arrays, figure: Mapping[str, Any]
) -> InversionFigure:
    """Accuracy and inversion of synthetic points, and their features (003, tables 1 and 2)."""
    cells = (record["synthetic"] or {"cells": []})["cells"]
    tables = [
        settings_table(figure["name"], cells),
        features_table(f"{figure['name']}-features", cells),
    ]
    settings = [_setting(cell) for cell in cells]
    rows, notes = plane_rows(cells)
    return InversionFigure(figure, tables, rows, settings=settings, notes=notes)


def _setting(cell: Record) -> dict[str, Any]:
    row = {key: cell[key] for key in ("name", "title", "server", "start")}
    for value in ("train_accuracy", "test_accuracy", "distance"):
        row[value] = (measure(value, cell[value]["mean"]), brackets(value, cell[value]))
    for value in ("se", "cs"):
        mean = cell[value]["mean"] if cell[value] else {"mean": None, "low": None, "high": None}
        worst = cell[value]["worst"] if cell[value] else None
        text = measure("ssim", mean["mean"])
        text += f" ({measure('ssim', worst)})" if worst is not None else ""
        row[value] = (text, brackets("ssim", mean))
    return row


def _keys(record: Record) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the letters stand for, by source."""
    return [
        (
            source["title"],
            [(letters(record, source)[k], _named(record, cell)) for k, cell in cells],
        )
        for source in record["sources"]
        if (cells := with_roles(record, source))
    ]


def _named(record: Record, cell: Record) -> str:
    roles = [role_title(record, role) for role in cell["roles"] if role != "vanilla"]
    return f"{cell['title']}{': ' if roles else ''}{'; '.join(roles)}"


DRAW: dict[str, Callable[[Record, Arrays, Mapping[str, Any]], InversionFigure]] = {
    "table3": table3_figure,
    "plates": plates_figure,
    "heatmaps": heatmaps_figure,
    "pareto": pareto_figure,
    "layers": layers_figure,
    "table4": table4_figure,
    "synthetic": synthetic_figure,
}
