"""The figures of an inversion study: from its record's list to drawings, each with its tables."""

from __future__ import annotations

from collections.abc import Sequence
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
    chance,
    divergence,
    ends,
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
    examples_table,
    features_table,
    heatmaps_table,
    layers_table,
    pareto_table,
    scores_table,
    settings_table,
)
from tasks.page.files import Arrays, Record
from tasks.page.formats import score
from tasks.page.study_page import Draw, Figure


def check_sources(record: Record) -> None:
    """Raises ValueError for cells of a source, or sweet spots at a cell, that is not there."""
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


def table3_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Scores of the cells with a role, by source and attack (MixCon paper, table 3)."""
    found = [(source, with_roles(record, source)) for source in record["sources"]]
    notes = [note for source in record["sources"] for note in incomplete(record, source)]
    return _scores_figure(record, figure, found, notes)


def table4_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Scores of UniCon beside MixCon and vanilla (MixCon paper, table 4)."""
    found = [(source, compared(record, source)) for source in record["sources"]]
    without = [source["title"] for source, cells in found if not cells]
    notes = [f"Without UniCon: {'; '.join(without)}."] if without else []
    return _scores_figure(record, figure, found, notes)


def _scores_figure(
    record: Record,
    figure: Record,
    found: Sequence[tuple[Record, Sequence[Numbered]]],
    notes: Sequence[str],
) -> Figure:
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
    return Figure(figure, [table], notes=notes, more={"scores": scores})


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
        "accuracy_ends": ends("accuracy", accuracy),
        "attacks": [
            {
                "name": attack["name"],
                "title": attack["title"],
                "chance": score(chance(cell, attack["name"])),
                "n": cell["attacks"][attack["name"]]["n"],
            }
            | {name: spread(name, cell["attacks"][attack["name"]]) for name in MEASURES}
            | {
                f"{name}_ends": ends(name, value_of(cell, name, attack["name"]))
                for name in MEASURES
            }
            for attack in attacks_in(record, [(k, cell)])
        ],
    }  # fmt: skip


def _layer(source: Record, cell: Record) -> str:
    return f"cut at layer {cell['cut']}" if cell["cut"] != source["cut"] else ""


def examples_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """Originals and what came back (MixCon paper, figure 4)."""
    table = examples_table(figure["name"], record, pictures)
    return Figure(figure, [table], more={"groups": groups(record, pictures)})


def heatmaps_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Four values by lambda and beta, a row per source (MixCon paper, figures 3 and 6 to 17)."""
    table = heatmaps_table(figure["name"], record)
    rows = heat_rows(record, figure, table)
    return Figure(figure, [table], rows, more=_keys(record))


def pareto_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Accuracy against SSIM, all settings and those near vanilla, a row per source."""
    table = pareto_table(figure["name"], record)
    rows, legend = pareto_rows(record, table)
    sources = record["sources"]
    notes = [note for source in sources for note in without_front(record, source)]
    notes += [note for source in sources for note in few_networks(record, source)]
    return Figure(figure, [table], rows, legend, notes, _keys(record))


def layers_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """SSIM against the layer, by source and attack (MixCon paper, appendix D.2)."""
    table = layers_table(figure["name"], record)
    rows, legend = layer_rows(record, table)
    return Figure(figure, [table], rows, legend)


def synthetic_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Accuracy, inversion and features of synthetic points (MixCon paper, tables 1 and 2)."""
    cells = (record["synthetic"] or {"cells": []})["cells"]
    tables = [
        settings_table(figure["name"], cells),
        features_table(f"{figure['name']}-features", cells),
    ]
    settings = [_setting(cell) for cell in cells]
    rows, notes = plane_rows(cells)
    return Figure(figure, tables, rows, notes=notes, more={"settings": settings})


def _setting(cell: Record) -> dict[str, Any]:
    row = {key: cell[key] for key in ("name", "title", "server", "start")}
    for value in ("train_accuracy", "test_accuracy", "distance"):
        row[value] = (measure(value, cell[value]["mean"]), ends(value, cell[value]))
    for value in ("se", "cs"):
        mean = cell[value]["mean"] if cell[value] else {"mean": None, "low": None, "high": None}
        worst = cell[value]["worst"] if cell[value] else None
        text = measure("ssim", mean["mean"])
        text += f" ({measure('ssim', worst)})" if worst is not None else ""
        row[value] = (text, ends("ssim", mean))
    return row


def _keys(record: Record) -> dict[str, Any]:
    """Letters and what they stand for, by source."""
    keys = []
    for source in record["sources"]:
        signs, cells = letters(record, source), with_roles(record, source)
        if cells:
            named = [(signs[k], _named(record, cell)) for k, cell in cells]
            keys.append((source["title"], named))
    return {"signs": keys}


def _named(record: Record, cell: Record) -> str:
    roles = [role_title(record, role) for role in cell["roles"] if role != "vanilla"]
    return f"{cell['title']}{': ' if roles else ''}{'; '.join(roles)}"


KINDS: dict[str, Draw] = {
    "table3": table3_figure,
    "plates": examples_figure,
    "heatmaps": heatmaps_figure,
    "pareto": pareto_figure,
    "layers": layers_figure,
    "table4": table4_figure,
    "synthetic": synthetic_figure,
}
