"""Results of an attack on encodings, for people: a page, a sheet of pictures, raw files.

The page is one file that needs no network. Its figures are heat maps of the overlaps and the graph.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.attacks.instahide.recover import Recovered
from storage.files import text_bytes, write_file
from tasks.families.instahide.attack import METHODS, SAME, Attacked, PreparedChallenge
from tasks.families.instahide.results import WHY, best_of, image_row, left_open
from tasks.page.files import page_html
from tasks.page.pictures import COLUMNS, Tile, data_uri, png_bytes, strips_sheet, wrapped

ENCODINGS_SHOWN = 10
LARGEST_SHOWN = 64
"""Side, in pixels, from which on pictures are made smaller for the page."""
IMAGES = "images"
HEAT = 360
"""Pixels of a heat map's side, about; of more encodings some are shown."""
DRAWN = 30
"""Images up to which the graph is drawn, with their pictures at its vertices."""
RADIUS = 273.0
"""Of the circle on which vertices are."""
WHITE, DARK = (255.0, 255.0, 255.0), (16.0, 48.0, 110.0)

Picture = npt.NDArray[np.uint8]
COLOURS = {
    "recovered": "#2f7d4f",
    "estimated": "#b7791f",
    "ambiguous": "#8a4fbf",
    "free": "#777777",
    "several graphs": "#1f6fb7",
    "unsolved": "#b73a3a",
}
COLUMNS_OF_CSV = (
    *("image", "status", "n_encodings", "n_pixels_open", "class"),
    *("truth", "rms_error", "worst_error", "ssim"),
)


def write_images(folder: Path, attacked: Attacked, prepared: PreparedChallenge) -> None:
    """images.npy in the encodings' units (NaN: not determined), images/NNNN.png, and statuses.csv:
    of every image its status, its encodings, and its scores where the truth is known."""
    images = _images(attacked, prepared)
    content, text = io.BytesIO(), io.StringIO()
    np.save(content, images.astype(np.float32), allow_pickle=False)
    write_file(folder / "images.npy", content.getvalue())
    (folder / IMAGES).mkdir(exist_ok=True)
    for k, image in enumerate(images):
        if not np.isnan(image).all():
            path = folder / IMAGES / f"{k:04}.png"
            write_file(path, png_bytes(picture(image, prepared)))
    table = csv.DictWriter(text, COLUMNS_OF_CSV, lineterminator="\n")
    table.writeheader()
    table.writerows(image_row(attacked, k) for k in range(len(images)))
    write_file(folder / "statuses.csv", text_bytes(text.getvalue()))


def clear_images(folder: Path) -> None:
    """Removes what `write_images` left of an earlier attack."""
    for old in (folder / IMAGES).glob("[0-9]*.png"):
        old.unlink()
    for name in ("images.npy", "statuses.csv", "reconstructions.png"):
        (folder / name).unlink(missing_ok=True)


def picture(image: npt.NDArray[Any], prepared: PreparedChallenge) -> Picture:
    """uint8 (c, h, w); grey where nothing is known."""
    shown = np.where(np.isnan(image), 0.5, prepared.units.shown(np.nan_to_num(image)))
    return (shown * 255).round().astype(np.uint8)


def instahide_sheet(attacked: Attacked, prepared: PreparedChallenge, n_shown: int) -> bytes:
    """PNG: the truth over what came back, ten a row, each with its SSIM."""
    cells = tiles(attacked, prepared, n_shown)
    nothing = np.full(prepared.challenge.shape, 255, np.uint8)

    def row(key: str, words: list[str]) -> list[Tile]:
        pictures = (nothing if cell[key] is None else cell[key] for cell in cells)
        return [(shown, text, False) for shown, text in zip(pictures, words, strict=True)]

    rows = [("found", row("picture", [cell["label"].rpartition(", ")[2] for cell in cells]))]
    if any(cell["truth_picture"] is not None for cell in cells):
        rows = [("true", row("truth_picture", [""] * len(cells))), *rows]
    return strips_sheet([*wrapped(rows)], columns=COLUMNS)


def tiles(attacked: Attacked, prepared: PreparedChallenge, n_shown: int) -> list[dict[str, Any]]:
    """Images by status, then by error: the picture, the true one if it is known, and the words.

    Without public images a pixel's sign is not known: absolute values are shown of both.
    """
    found = attacked.found
    assert found is not None
    ranks = list(COLOURS)
    error = np.zeros(len(found.status)) if attacked.error is None else attacked.error
    order = sorted(
        range(len(found.status)),
        key=lambda k: (ranks.index(found.status[k].value), np.nan_to_num(error[k], nan=9e9), k),
    )
    if len(order) > n_shown:
        order = [order[p] for p in np.linspace(0, len(order) - 1, n_shown).round().astype(int)]
    images = _images(attacked, prepared)
    private = prepared.challenge.secret.get("private")
    cells = []
    for k in order:
        truth = -1 if attacked.truth_of is None else int(attacked.truth_of[k])
        original = None if truth < 0 or private is None else private[truth]
        image = images[k]
        if prepared.scheme.k_pub == 0:
            image, original = np.abs(image), None if original is None else np.abs(original)
        cells.append(
            {
                "number": k,
                "status": found.status[k].value,
                "picture": None if np.isnan(image).all() else picture(image, prepared),
                "truth_picture": None if original is None else picture(original, prepared),
                "label": _label(attacked, prepared, k),
                "n_open": int(np.isnan(image).sum()),
            }
        )
    return cells


def _label(attacked: Attacked, prepared: PreparedChallenge, k: int) -> str:
    """`exact`, or `off by` the error in grey levels (of normal pixels in deviations), and SSIM."""
    if attacked.worst is None or attacked.error is None or np.isnan(attacked.worst[k]):
        return ""
    if attacked.worst[k] <= SAME:
        return "exact"
    error, ssim = attacked.error[k] * (1.0 if prepared.units.is_normal else 127.5), attacked.ssim
    alike = "" if ssim is None or np.isnan(ssim[k]) else f", SSIM {ssim[k]:.2f}"
    return f"off by {error:.0f}{alike}" if error >= 10 else f"off by {error:.2g}{alike}"


def instahide_page(
    record: Mapping[str, Any],
    prepared: PreparedChallenge,
    attacked: Sequence[Attacked],
    context: Mapping[str, Any],
) -> str:
    """The page. `context`: `command`, `created`, `outcome`, `n_shown` and `versions`."""
    best = best_of(attacked)
    its = None if best is None else record["methods"][record["best"]]
    some = prepared.challenge.encodings[:ENCODINGS_SHOWN]
    most = max(float(np.quantile(np.abs(some), 0.999)), 1e-30)  # white, but for a few above it
    n_shown = context["n_shown"]
    walls = [
        {
            "title": METHODS[a.name].title,
            "n": len(a.found.status),
            "cells": tiles(a, prepared, n_shown),
        }
        for a in sorted(attacked, key=lambda a: a is not best)
        if a.found is not None
    ]
    filters = {
        "uri": _uri,
        "map": data_uri,
        "share": lambda value: "–" if value is None else f"{100 * value:.1f} %",
    }
    return page_html(
        "attack-instahide.html", filters, record=record,
        units=prepared.units, walls=walls,
        encodings=[
            [(share.clip(0, 1) * 255).round().astype(np.uint8) for share in both]
            for both in zip((some / most + 1) / 2, np.abs(some) / most, strict=True)
        ],
        heat=heat_maps(best.found) if best and best.found else [],
        graph=graph(best, prepared) if best and best.found else None, best=its,
        open=left_open(its, record["scheme"]["k_pub"]) if its else [], why=WHY, colours=COLOURS,
        context=context,
    )  # fmt: skip


def heat_maps(found: Recovered) -> list[dict[str, Any]]:
    """Scores in the encodings' order and by recovered image, and common images by recovered image:
    of each `title`, `picture`, the values `low` and `high` of its scale, and the number of rows."""
    m = len(found.edges)
    by_image = np.lexsort((found.edges[:, 1], found.edges[:, 0]))
    own = np.linspace(0, m - 1, min(m, HEAT)).round().astype(int)
    some = by_image[own]
    scores, common = np.asarray(found.scores.cpu()), np.asarray(found.common.cpu()).astype(float)
    np.fill_diagonal(common, 2)
    mine = scores[np.ix_(some, some)]
    off = mine[~np.eye(len(mine), dtype=bool)] if len(mine) > 1 else mine.ravel()
    off = off[np.isfinite(off)]
    low, high = (float(np.median(off)), float(np.quantile(off, 0.995))) if len(off) else (0.0, 1.0)
    return [
        _heat("measured, in the encodings' order", scores[np.ix_(own, own)], low, high),
        _heat("measured, by recovered image", mine, low, high),
        _heat("common images, by recovered image", common[np.ix_(some, some)], 0.0, 2.0),
    ]


def _heat(title: str, values: npt.NDArray[Any], low: float, high: float) -> dict[str, Any]:
    share = ((np.nan_to_num(values) - low) / max(high - low, 1e-30)).clip(0, 1)
    rgb = np.array(WHITE) + share[..., None] * (np.array(DARK) - np.array(WHITE))
    side = max(1, HEAT // max(len(values), 1))
    large = rgb.repeat(side, 0).repeat(side, 1)
    pixels: Picture = large.round().astype(np.uint8).transpose(2, 0, 1)
    return {"title": title, "picture": pixels, "low": low, "high": high, "n": len(values)}


def graph(attacked: Attacked, prepared: PreparedChallenge) -> dict[str, Any]:
    """Images as vertices on a circle, encodings as lines; of many images the matrix of counts."""
    found, images = attacked.found, _images(attacked, prepared)
    assert found is not None
    n = len(found.status)
    known = found.edges[(found.edges >= 0).all(1)]
    counts = np.zeros((n, n), np.int64)
    np.add.at(counts, (known[:, 0], known[:, 1]), 1)
    counts += counts.T
    per_image = np.sort(counts.sum(1))
    said = {
        "n": n,
        "n_known": len(known),
        "fewest": int(per_image[0]),
        "half": int(per_image[n // 2]),
        "most": int(per_image[-1]),
        "n_pairs": int((np.triu(counts) > 0).sum()),
        "most_of_a_pair": int(counts.max(initial=0)),
    }
    if n > DRAWN:
        high = float(max(counts.max(initial=1), 1))
        return said | {"drawn": False, "matrix": _heat("", counts.astype(float), 0.0, high)}
    if prepared.scheme.k_pub == 0:
        images = np.abs(images)
    turn = 2 * np.pi * np.arange(n) / n
    at = 300.0 + RADIUS * np.stack([np.sin(turn), -np.cos(turn)], 1)
    vertices = [
        {
            "k": k,
            "x": at[k, 0],
            "y": at[k, 1],
            "uri": "" if np.isnan(images[k]).all() else _uri(picture(images[k], prepared)),
            "status": found.status[k].value,
            "n": int(counts[k].sum()),
        }
        for k in range(n)
    ]
    lines = [
        {"x1": at[i, 0], "y1": at[i, 1], "x2": at[j, 0], "y2": at[j, 1], "n": int(counts[i, j])}
        for i, j in zip(*np.nonzero(np.triu(counts)), strict=True)
    ]
    return said | {"drawn": True, "vertices": vertices, "lines": lines, "height": 600.0}


def _images(attacked: Attacked, prepared: PreparedChallenge) -> npt.NDArray[np.float64]:
    assert attacked.found is not None
    images = np.asarray(attacked.found.images.cpu(), np.float64)
    return images.reshape(-1, *prepared.challenge.shape)


def _uri(pixels: Picture) -> str:
    """For the page: large pictures by the means of squares."""
    step = math.ceil(max(pixels.shape[1:]) / LARGEST_SHOWN)
    if step == 1:
        return data_uri(pixels)
    c, h, w = pixels.shape
    whole = pixels[:, : h // step * step, : w // step * step].astype(np.float64)
    means = whole.reshape(c, h // step, step, w // step, step).mean((2, 4))
    return data_uri(means.round().astype(np.uint8))
