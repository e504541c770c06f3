"""The report's pictures: which picture goes where, with its words; nothing but rows of the record.

Attacks on one victim side by side, figure 1 (image restoration paper) in bands of 15 images, the
appendix in blocks of 45, reconstructions that resemble nothing (image restoration paper, figure 4),
and pairs by their SSIM, to see what a threshold means (KKT paper, figure 8).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.page.files import Arrays, Record
from tasks.page.formats import fixed, score
from tasks.page.pictures import data_uri, strips
from tasks.report.headline import attack_title, method_title, picture_title
from tasks.report.record import SIDES

PER_BAND = 15
PER_ATTACK_BAND = 10
PER_BLOCK = 45
APPENDIX_BYTES = 6_000_000
KINDS = {"targets": "Training picture", "decoys": "Decoy"}


@dataclass(frozen=True)
class Shown:
    """Some rows of one side in their order: `methods`, `rows` of the record, and by what name
    pictures.npz has their pictures."""

    side: str
    rows: list[int]
    methods: list[str]
    place: str


def bands(record: Record, pictures: Arrays, side: str) -> list[dict[str, Any]]:
    """The images of figure 1, PER_BAND at a time: columns are images, rows the original and what
    each method made of it."""
    grid = record["grid"]
    titles = {name: method_title(name)[1] for name in grid["methods"]}
    shown = Shown(side, grid[side], grid["methods"], side)
    return _bands(record, pictures, shown, titles, PER_BAND)


def attack_bands(record: Record, pictures: Arrays, side: str) -> list[dict[str, Any]]:
    """The images of one victim that are shown with every attack on it, in the same form."""
    chosen = record["side_by_side"]
    titles = {name: attack_title(record, name) for name in chosen["methods"]}
    shown = Shown(side, chosen[side], chosen["methods"], f"attacks_{side}")
    return _bands(record, pictures, shown, titles, PER_ATTACK_BAND)


def _bands(
    record: Record, pictures: Arrays, shown: Shown, titles: dict[str, str], width: int
) -> list[dict[str, Any]]:
    kind, ids = KINDS[shown.side], record[shown.side]["image_id"]
    bands = []
    for first in range(0, len(shown.rows), width):
        rows = shown.rows[first : first + width]
        pieces = {
            name: pictures[f"{shown.place}/{name}"][first : first + width]
            for name in ("original", *shown.methods)
        }
        names = [f"{kind} {ids[row]}" for row in rows]
        originals = [
            {"uri": data_uri(picture), "alt": name, "score": "", "good": False}
            for picture, name in zip(pieces["original"], names, strict=True)
        ]
        title = "Original" if shown.side == "targets" else "Decoy"
        tiled = [{"title": title, "tiles": originals}]
        for name in shown.methods:
            found = zip(rows, pieces[name], strict=True)
            tiles = [_tile(record, shown.side, name, row, picture) for row, picture in found]
            tiled.append({"title": titles[name], "tiles": tiles})
        bands.append({"columns": names, "width": width, "first": first + 1, "rows": tiled})
    return bands


def _tile(
    record: Record, side: str, name: str, row: int, picture: npt.NDArray[np.uint8]
) -> dict[str, Any]:
    value = record["methods"][name][side]["ssim"][row]
    there = value != 0 or picture.any()
    return {
        "uri": data_uri(picture) if there else None,
        "alt": f"{method_title(name)[0]}, SSIM {value:.2f}",
        "score": fixed(value, 2),
        "good": value > record["settings"]["good_threshold"],
    }


def nothing_rows(pictures: Arrays) -> list[dict[str, Any]]:
    """Rows of pictures made from reconstructions that resemble no training picture."""
    names = [name.partition("/")[2] for name in pictures if name.startswith("nothing/")]
    last = [name for name in names if name.startswith("disagreement")] + ["closest"]
    ordered = ["plain", *(n for n in names if n != "plain" and n not in last), *last]
    return [
        {
            "title": picture_title(name),
            "tiles": [
                {"uri": data_uri(picture), "alt": f"{picture_title(name)}, reconstruction {k + 1}"}
                for k, picture in enumerate(pictures[f"nothing/{name}"])
            ],
        }
        for name in ordered
        if name in names and len(pictures[f"nothing/{name}"])
    ]


def appendix_blocks(record: Record, pictures: Arrays) -> tuple[list[dict[str, Any]], bool]:
    """(blocks of PER_BLOCK images, whether they are exact): one strip per block and method."""
    rows, names = record["appendix"]["targets"], ["original", *record["appendix"]["methods"]]
    firsts = range(0, len(rows), PER_BLOCK)
    wanted = [(first, name) for first in firsts for name in names]
    pieces = [pictures[f"appendix/{name}"][first : first + PER_BLOCK] for first, name in wanted]
    urls, exact = strips(pieces, most_bytes=APPENDIX_BYTES)
    uri = dict(zip(wanted, urls, strict=True))
    blocks = []
    for first in firsts:
        chosen = rows[first : first + PER_BLOCK]
        blocks.append(
            {
                "first": first + 1,
                "last": first + len(chosen),
                "n": len(chosen),
                "strips": [
                    {
                        "title": "Original" if name == "original" else method_title(name)[1],
                        "uri": uri[first, name],
                        "alt": _strip_words(record, name, chosen, first),
                    }
                    for name in names
                ],
            }
        )
    return blocks, exact


def _strip_words(record: Record, name: str, rows: list[int], first: int) -> str:
    places = f"Places {first + 1} to {first + len(rows)}"
    if name == "original":
        ids = [str(record["targets"]["image_id"][row]) for row in rows]
        return f"{places}: training pictures {', '.join(ids)}"
    scores = [record["methods"][name]["targets"]["ssim"][row] for row in rows]
    return (
        f"{places}, {method_title(name)[0]}: SSIM from {score(max(scores))} to {score(min(scores))}"
    )


def pair_bins(record: Record, pictures: Arrays) -> list[dict[str, Any]]:
    """The record's examples: pairs (original, plain reconstruction) by their SSIM."""
    examples = record["examples"]
    bins = []
    for k, (low, high) in enumerate(pairwise(examples["edges"])):
        body: dict[str, Any] = {"title": _range(low, high)}
        for side in SIDES:
            scores = record["methods"]["plain"][side]["ssim"]
            body[f"n_{side}"] = sum(low < value <= high for value in scores)
            first = sum(len(rows) for rows in examples[side][:k])
            body[side] = list(_pairs(record, pictures, side, examples[side][k], first))
        bins.append(body)
    return bins


def _range(low: float, high: float) -> str:
    if low < 0:
        return f"up to {high:g}"
    return f"above {low:g}" if high == 1 else f"{low:g} to {high:g}"


def _pairs(
    record: Record, pictures: Arrays, side: str, rows: list[int], first: int
) -> Iterator[dict[str, Any]]:
    """The pairs of `rows`, whose pictures begin at place `first`."""
    scores = record["methods"]["plain"][side]["ssim"]
    for k, row in enumerate(rows, first):
        yield {
            "original": data_uri(pictures[f"examples_{side}/original"][k]),
            "uri": data_uri(pictures[f"examples_{side}/plain"][k]),
            "alt": f"{KINDS[side]} {record[side]['image_id'][row]}",
            "score": fixed(scores[row], 2),
        }
