"""The figures of an inversion study: from its record's list to drawings, each with its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.families.inversion.study.figure_specs import (
    Numbered,
    attacks_in,
    cells_of,
    compared,
    divergence,
    ends,
    has_front,
    is_spot,
    letters,
    measure,
    role_titles,
    scores_of,
    sweet_spot,
    value_of,
    with_roles,
)
from tasks.families.inversion.study.image_grids import examples_figure
from tasks.families.inversion.study.panels import heat_rows, layer_rows, pareto_rows
from tasks.families.inversion.study.tables import (
    heatmaps_table,
    layers_table,
    pareto_table,
    scores_table,
)
from tasks.page.files import Arrays, Record
from tasks.page.study_page import Draw, Figure

MOST_LISTED = 6


def table3_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Scores of the cells with a role, by source and attack (MixCon paper, table 3)."""
    found = [(source, with_roles(record, source)) for source in record["sources"]]
    notes = [note for source in record["sources"] for note in _incomplete(record, source)]
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
    scores = []
    for source, cells in found:
        if cells:
            counts = sorted({len(cell["seeds"]) for _k, cell in cells})
            networks = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
            rows = [_score_row(record, source, *numbered) for numbered in cells]
            scores.append({"source": source, "networks": networks, "rows": rows})
    table = scores_table(figure["name"], record, found)
    return Figure(figure, [table], notes=notes, more={"scores": scores})


def _score_row(record: Record, source: Record, k: int, cell: Record) -> dict[str, Any]:
    """A cell as the tables show it: its accuracy, and a line for each attack."""
    accuracy = value_of(cell, "accuracy")
    layer = f"cut at layer {cell['cut']}" if cell["cut"] != source["cut"] else ""
    notes = [role_titles(record, cell), layer, divergence(cell)]
    return {
        "cell": k,
        "letter": letters(record, source).get(k, ""),
        "title": cell["title"],
        "notes": [note for note in notes if note],
        "accuracy": measure("accuracy", accuracy["mean"]),
        "accuracy_ends": ends("accuracy", accuracy),
        "attacks": [
            {"name": attack["name"], "title": attack["title"]} | scores_of(cell, attack["name"])
            for attack in attacks_in(record, [(k, cell)])
        ],
    }


def _incomplete(record: Record, source: Record) -> list[str]:
    """Sentences on what is missing of a source: attacks, intervals, sweet spots, diverged cells."""
    cells, notes = cells_of(record, source), []
    run = {attack["name"] for attack in attacks_in(record, cells)}
    for attack in record["attacks"]:
        notes += [f"{attack['title']} was not run."] if attack["name"] not in run else []
    if source["n_seeds"] == 1:
        notes.append("one network of each setting, so there are no intervals.")
    for attack in record["attacks"]:
        spot = sweet_spot(record, source, attack["name"])
        if spot and not is_spot(spot):
            notes.append(
                f"no sweet spot under “{attack['title']}”; no setting that keeps the accuracy "
                "leaks less than no defence."
            )
    if lost := [cell["title"] for _k, cell in cells if cell["diverged"]]:
        more = f" and {len(lost) - MOST_LISTED} more" if len(lost) > MOST_LISTED else ""
        listed = "; ".join(lost[:MOST_LISTED]) + more
        notes.append(f"training diverged, with some or all seeds, for {listed}.")
    if not with_roles(record, source):
        notes.append("no cell stands for vanilla or for a chosen setting.")
    return [f"{source['title']}: {note}" for note in notes]


def heatmaps_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Four values by lambda and beta, a row per source (MixCon paper, figures 3 and 6 to 17)."""
    table = heatmaps_table(figure["name"], record)
    return Figure(figure, [table], heat_rows(record, figure, table), more=_keys(record))


def pareto_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Accuracy against SSIM, all settings and those near vanilla, a row per source."""
    table = pareto_table(figure["name"], record)
    rows, legend = pareto_rows(record, table)
    notes, few = [], []
    for source in record["sources"]:
        here = cells_of(record, source, cut=source["cut"])
        for attack in attacks_in(record, here):
            n = sum(attack["name"] in cell["attacks"] for _k, cell in here)
            if n and not has_front(record, source, attack["name"]):
                notes.append(
                    f"{source['title']}: {attack['title']} was run on {n} of {len(here)} settings, "
                    "so it has no line."
                )
        ones = sum(len(cell["seeds"]) == 1 for _k, cell in here)
        if ones and source["n_seeds"] != 1:
            few.append(
                f"{source['title']}: {ones} of {len(here)} settings have one network each, so no "
                "interval."
            )
    return Figure(figure, [table], rows, legend, [*notes, *few], _keys(record))


def layers_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """SSIM against the layer, by source and attack (MixCon paper, appendix D.2)."""
    table = layers_table(figure["name"], record)
    rows, legend = layer_rows(record, table)
    return Figure(figure, [table], rows, legend)


def _keys(record: Record) -> dict[str, Any]:
    keys = []
    for source in record["sources"]:
        signs, named = letters(record, source), []
        for k, cell in with_roles(record, source):
            roles = role_titles(record, cell)
            named.append((signs[k], f"{cell['title']}: {roles}" if roles else cell["title"]))
        keys += [(source["title"], named)] if named else []
    return {"signs": keys}


KINDS: dict[str, Draw] = {
    "table3": table3_figure,
    "plates": examples_figure,
    "heatmaps": heatmaps_figure,
    "pareto": pareto_figure,
    "layers": layers_figure,
    "table4": table4_figure,
}
