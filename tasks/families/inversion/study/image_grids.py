"""An inversion study's pictures: rows of originals and of what each attack makes of their features.

Pictures are of seed 0. Those of cells with a role must be there; the study of layers shows what was
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.families.inversion.study.figure_specs import Numbered, layer_groups, letters, with_roles
from tasks.families.inversion.study.tables import examples_table, first_seed
from tasks.page.files import Arrays, Record
from tasks.page.formats import fixed, score
from tasks.page.pictures import data_uri
from tasks.page.study_page import Figure

MOST_PICTURES = 1_500_000  # letters that all pictures of a page may take, before compression
MOST_LAYER_ROWS = 3


def examples_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """Originals and what came back (MixCon paper, figure 4): a group per source, and one for its
    layers; a row per image, columns in groups by cell.

    Raises ValueError if a picture is missing, has another size than its original, or if there are
    more pictures than scores.
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
    of_source = f"the images that the record shows of source {source['name']!r}"
    originals = _kept(pictures, f"{source['name']}/original", of_source)
    heads, columns = [], [[{"uri": _uri(o), "alt": f"image {k}"} for k, o in enumerate(originals)]]
    absent, signs = [], letters(record, source)
    for k, cell in cells:
        there, run = [], first_seed(cell).get("attacks") or {}
        for attack in record["attacks"]:
            name = f"{k}/{attack['name']}"
            if attack["name"] in run and (required or name in pictures):
                there.append(attack["title"])
                columns.append(_column(pictures, name, cell, attack, originals))
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
            f"the pictures have no {name!r}, {what}; copy inversion-pictures.npz whole, or make "
            "the study's record again"
        )
    return pictures[name]


def _column(
    pictures: Arrays, name: str, cell: Record, attack: Record, originals: npt.NDArray[Any]
) -> list[dict[str, str]]:
    found = _kept(pictures, name, f"what {attack['title']} made of {cell['title']!r}")
    scores = first_seed(cell)["attacks"][attack["name"]]["ssim"]
    if found.shape != originals.shape or len(scores) < len(found):
        raise ValueError(
            f"the pictures hold {found.shape} in {name!r} for originals of {originals.shape} and "
            f"{len(scores)} scores; make the study's record again"
        )
    return [
        {
            "uri": _uri(picture),
            "alt": f"image {image}: {cell['title']}, layer {cell['cut']}, {attack['title']}",
            "score": fixed(scores[image], 2),
            "about": f"SSIM {score(scores[image])}",
        }
        for image, picture in enumerate(found)
    ]


def _uri(picture: npt.NDArray[Any]) -> str:
    """(h, w) or (h, w, 3) as a URL."""
    colours = np.repeat(picture[..., None], 3, axis=-1) if picture.ndim == 2 else picture
    return data_uri(colours.astype(np.uint8).transpose(2, 0, 1))
