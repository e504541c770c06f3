"""The page of an inversion study: inversion.json and its pictures as one HTML file
(docs/pages.md), with the figures that the record lists, each with its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.families.inversion.study.panels import (
    attack_styles,
    heat_rows,
    layer_rows,
    pareto_rows,
)
from tasks.families.inversion.study.tables import (
    OF_CELL,
    Numbered,
    attacks_in,
    cells_of,
    compared,
    divergence,
    ends,
    examples_table,
    first_seed,
    has_front,
    heatmaps_table,
    is_spot,
    layer_groups,
    layers_table,
    letters,
    mean_of,
    measure,
    own_tables,
    pareto_table,
    role_titles,
    scores_of,
    scores_table,
    sweet_spot,
    value_of,
    with_role,
    with_roles,
)
from tasks.page.files import Arrays, Record, claim_counts
from tasks.page.formats import fixed, score
from tasks.page.pictures import data_uri
from tasks.page.study_page import Figure, StudyPage, Tables

MOST_LISTED = 6
MOST_PICTURES = 1_500_000  # letters that all pictures of a page may take, before compression
MOST_LAYER_ROWS = 3


def scores_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Scores by source and attack, of the cells with a role (MixCon paper, table 3) or of UniCon
    beside MixCon and vanilla (table 4)."""
    chosen = with_roles if figure["kind"] == "table3" else compared
    found = [(source, chosen(record, source)) for source in record["sources"]]
    if figure["kind"] == "table3":
        notes = [note for source in record["sources"] for note in _incomplete(record, source)]
    else:
        without = "; ".join(source["title"] for source, cells in found if not cells)
        notes = [f"Without UniCon: {without}."] if without else []
    scores = []
    for source, cells in found:
        rows = [_row(record, source, one, attacks_in(record, [one])) for one in cells]
        if rows:
            counts = sorted({len(cell["seeds"]) for _k, cell in cells})
            networks = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
            scores.append({"source": source, "networks": networks, "rows": rows})
    table = scores_table(figure["name"], record, found)
    return Figure(figure, [table], notes=notes, more={"scores": scores})


def _row(
    record: Record, source: Record, numbered: Numbered, attacks: Sequence[Record]
) -> dict[str, Any]:
    """A cell as tables show it: its own numbers, and the scores of each attack."""
    k, cell = numbered
    layer = f"cut at layer {cell['cut']}" if cell["cut"] != source["cut"] else ""
    notes = [role_titles(record, cell), layer, divergence(cell)]
    values = {name: value_of(cell, name) for name in OF_CELL}
    return {
        "cell": k,
        "letter": letters(record, source).get(k, ""),
        "title": cell["title"],
        "cut": cell["cut"],
        "notes": [note for note in notes if note],
        "divergence": divergence(cell),
        "values": {n: (measure(n, at["mean"]), ends(n, at)) for n, at in values.items()},
        "attacks": [
            {"name": attack["name"], "title": attack["title"]} | scores_of(cell, attack["name"])
            for attack in attacks
        ],
    }


def _incomplete(record: Record, source: Record) -> list[str]:
    """Sentences on what a source lacks: attacks, intervals, sweet spots, networks that diverged."""
    cells, notes = cells_of(record, source), []
    run = attacks_in(record, cells)
    notes += [f"{a['title']} was not run." for a in record["attacks"] if a not in run]
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


def examples_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """Originals and reconstructions (MixCon paper, figure 4): a group per source, and one for its
    layers; a row per image, columns in groups by cell.

    Pictures are those of seed 0. Cells with a role must have them; for other layers the stored ones
    are shown. Raises ValueError if a picture is missing, its size is not the original's, or there
    are more pictures than scores.
    """
    made = []
    for source in record["sources"]:
        if chosen := with_roles(record, source):
            made.append((source, source["title"], chosen, True))
        layers = [found for group in layer_groups(record, source) for found in group]
        elsewhere = [f"{k}" for k, cell in layers if cell["cut"] != source["cut"]]
        if any(name.partition("/")[0] in elsewhere for name in pictures):
            made.append((source, f"{source['title']}: by layer", layers, False))
    budget = MOST_PICTURES / max(1, len(made))
    groups = [
        _group(record, pictures, source, cells, required=required, budget=budget) | {"title": title}
        for source, title, cells, required in made
    ]
    table = examples_table(figure["name"], record, pictures)
    return Figure(figure, [table], more={"groups": groups})


def _group(
    record: Record,
    pictures: Arrays,
    source: Record,
    cells: Sequence[Numbered],
    *,
    required: bool,
    budget: float,
) -> dict[str, Any]:
    originals = _kept(pictures, f"{source['name']}/original", f"source {source['name']!r}")
    heads, columns = [], [[{"uri": _uri(o), "alt": f"image {k}"} for k, o in enumerate(originals)]]
    absent, signs = [], letters(record, source)
    for k, cell in cells:
        there, run = [], first_seed(cell)["attacks"]
        for attack in record["attacks"]:
            name = f"{k}/{attack['name']}"
            if attack["name"] in run and (required or name in pictures):
                there.append(attack["title"])
                made = _kept(pictures, name, f"{attack['title']} on {cell['title']!r}")
                ssim = run[attack["name"]]["ssim"]
                if made.shape != originals.shape or len(ssim) < len(made):
                    raise ValueError(
                        f"the pictures hold {made.shape} in {name!r} for originals of "
                        f"{originals.shape} and {len(ssim)} scores; make the study's record again"
                    )
                about = f"{cell['title']}, layer {cell['cut']}, {attack['title']}"
                columns.append(
                    [
                        {
                            "uri": _uri(picture),
                            "alt": f"image {image}: {about}",
                            "score": fixed(ssim[image], 2),
                            "about": f"SSIM {score(ssim[image])}",
                        }
                        for image, picture in enumerate(made)
                    ]
                )
        about = cell["title"] if required else f"{cell['title']}, layer {cell['cut']}"
        if there:
            heads.append({"letter": signs.get(k, ""), "title": about, "attacks": there})
        else:
            absent.append(about)
    size = max((o.size for o in originals), default=1) * 4 / 3
    n_rows = min(len(originals), max(1, int(budget / (size * len(columns)))))
    n_rows = n_rows if required else min(n_rows, MOST_LAYER_ROWS)
    return {
        "open": required,
        "heads": heads,
        "n_columns": len(columns),
        "rows": [
            {"image": image, "tiles": [column[image] for column in columns]}
            for image in range(n_rows)
        ],
        "hidden": len(originals) - n_rows,
        "absent": absent,
    }


def _kept(pictures: Arrays, name: str, what: str) -> npt.NDArray[Any]:
    if name not in pictures:
        raise ValueError(
            f"the pictures have no {name!r}, of {what}; copy inversion-pictures.npz whole, or make "
            "the study's record again"
        )
    return pictures[name]


def _uri(picture: npt.NDArray[Any]) -> str:
    """A picture (h, w) or (h, w, 3) as a URL."""
    colours = np.repeat(picture[..., None], 3, axis=-1) if picture.ndim == 2 else picture
    return data_uri(colours.astype(np.uint8).transpose(2, 0, 1))


def heatmaps_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Four values by lambda and beta, a row per source (MixCon paper, figures 3 and 6 to 17)."""
    table = heatmaps_table(figure["name"], record)
    return Figure(figure, [table], heat_rows(record, table), more=_keys(record))


def pareto_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Accuracy against SSIM, all settings and those near vanilla, a row per source."""
    table = pareto_table(figure["name"], record)
    rows, legend = pareto_rows(record, table)
    notes, few = [], []
    for source in record["sources"]:
        here = cells_of(record, source, cut=source["cut"])
        for attack in attacks_in(record, here):
            if not has_front(record, source, attack["name"]):
                n = sum(attack["name"] in cell["attacks"] for _k, cell in here)
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
    """The key to the letters of a figure, by source."""
    keys = []
    for source in record["sources"]:
        signs, named = letters(record, source), []
        for k, cell in with_roles(record, source):
            roles = role_titles(record, cell)
            named.append((signs[k], f"{cell['title']}: {roles}" if roles else cell["title"]))
        keys += [(source["title"], named)] if named else []
    return {"signs": keys}


def words(record: Record, _pictures: Arrays, _tables: Tables) -> dict[str, Any]:
    """Values for this page's template alone."""
    answers = [_answer(record, source) for source in record["sources"]]
    tables = []
    for source in record["sources"]:
        cells = cells_of(record, source)
        attacks = attacks_in(record, cells)
        rows = [_row(record, source, numbered, attacks) for numbered in cells]
        tables.append({"source": source, "attacks": attacks, "rows": rows})
    return {
        "headline": {**claim_counts(record), "answers": answers},
        "attacks": attack_styles(record),
        "dashed": [],
        "tables_of_cells": tables,
        "run": [("sources", len(record["sources"])), ("cells", len(record["cells"]))],
    }


def _answer(record: Record, source: Record) -> dict[str, Any]:
    """A source's sweet spot under the first attack that has one, beside vanilla, attack by attack.

    `shown` is None if there is nothing to compare with vanilla; `why` then gives the reason.
    """
    vanilla, paper = (with_role(record, source, role) for role in ("vanilla", "paper"))
    found = [(sweet_spot(record, source, a["name"]), a["title"]) for a in record["attacks"]]
    spots = [(record["cells"][spot["cell"]], title) for spot, title in found
             if spot and is_spot(spot)]  # fmt: skip
    shown, under = spots[0] if spots else (None, "")
    loss = f"{100 * record['thresholds']['accuracy_loss']:g}"
    points = "point" if loss == "1" else "points"
    why = f"no setting of the grid costs at most {loss} {points} of accuracy and leaks less"
    if shown is None and paper and mean_of(paper[1], "accuracy") is not None:
        shown = paper[1]
    attacks = [
        {
            "title": attack["title"],
            "before": mean_of(vanilla[1], "ssim", attack["name"]),
            "after": mean_of(shown, "ssim", attack["name"]),
            "chance": shown["attacks"][attack["name"]].get("chance"),
        }
        for attack in (attacks_in(record, [vanilla]) if vanilla else [])
        if vanilla and shown and mean_of(shown, "ssim", attack["name"]) is not None
    ]
    return {
        "source": source,
        "vanilla": vanilla[1] if vanilla else None,
        "shown": shown,
        "is_spot": bool(spots),
        "under": under,
        "why": why if any(spot for spot, _title in found) else "no sweet spot was sought",
        "attacks": attacks,
    }


INVERSION_PAGE = StudyPage(
    name="inversion",
    version=2,
    command="palimpsest study inversion",
    kinds={
        "table3": scores_figure,
        "plates": examples_figure,
        "heatmaps": heatmaps_figure,
        "pareto": pareto_figure,
        "layers": layers_figure,
        "table4": scores_figure,
    },
    tables=own_tables,
    words=words,
    stages={
        "train": "to train the networks",
        "invert": "to invert them",
        "restore": "to restore",
    },
    most_inline=300_000,
)
