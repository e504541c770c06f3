"""Results of an attack on encodings, for people: a page, a sheet of pictures, raw files.

Nothing is computed here but what is drawn. The page is one file that asks nothing of the network.
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
from tasks.families.instahide.figures import graph, heat_maps
from tasks.families.instahide.headline import WHY, left_open
from tasks.families.instahide.inputs import PreparedChallenge
from tasks.families.instahide.results import Scored, image_row
from tasks.page.files import page_html
from tasks.page.pictures import COLUMNS, data_uri, png_bytes, strips_sheet, wrapped

ENCODINGS_SHOWN = 10
LARGEST_SHOWN = 64
"""Side, in pixels, from which on pictures are made smaller for the page."""
IMAGES = "images"

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


def write_images(folder: Path, scored: Scored, prepared: PreparedChallenge) -> None:
    """images.npy in the encodings' units (NaN: not determined), images/NNNN.png, statuses.csv."""
    images = _images(scored, prepared)
    content = io.BytesIO()
    np.save(content, images.astype(np.float32), allow_pickle=False)
    write_file(folder / "images.npy", content.getvalue())
    (folder / IMAGES).mkdir(exist_ok=True)
    for k, image in enumerate(images):
        if not np.isnan(image).all():
            path = folder / IMAGES / f"{k:04}.png"
            write_file(path, png_bytes(picture(image, prepared)))
    write_file(folder / "statuses.csv", text_bytes(statuses(scored)))


def clear_images(folder: Path) -> None:
    """Removes what `write_images` left of an earlier attack."""
    for old in (folder / IMAGES).glob("[0-9]*.png"):
        old.unlink()
    for name in ("images.npy", "statuses.csv", "reconstructions.png"):
        (folder / name).unlink(missing_ok=True)


def statuses(scored: Scored) -> str:
    """CSV: of every image its status, its encodings, and its scores where the truth is known."""
    assert scored.found is not None
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS_OF_CSV, lineterminator="\n")
    table.writeheader()
    table.writerows(image_row(scored, k) for k in range(len(scored.found.status)))
    return text.getvalue()


def picture(image: npt.NDArray[Any], prepared: PreparedChallenge) -> Picture:
    """uint8 (c, h, w); grey where nothing is known."""
    shown = np.where(np.isnan(image), 0.5, prepared.units.shown(np.nan_to_num(image)))
    return (shown * 255).round().astype(np.uint8)


def instahide_sheet(scored: Scored, prepared: PreparedChallenge, n_shown: int) -> bytes:
    """PNG: the truth over what came back, ten a row, each with its SSIM."""
    cells = tiles(scored, prepared, n_shown)
    nothing = np.full(prepared.challenge.shape, 255, np.uint8)
    found = [
        (_or(cell["picture"], nothing), cell["label"].rpartition(", ")[2], False) for cell in cells
    ]
    rows = [("found", found)]
    if any(cell["truth_picture"] is not None for cell in cells):
        true = [(_or(cell["truth_picture"], nothing), "", False) for cell in cells]
        rows = [("true", true), *rows]
    return strips_sheet([*wrapped(rows)], columns=COLUMNS)


def _or(picture: Picture | None, nothing: Picture) -> Picture:
    return nothing if picture is None else picture


def tiles(scored: Scored, prepared: PreparedChallenge, n_shown: int) -> list[dict[str, Any]]:
    """Images by status, then by error: the picture, the true one if it is known, and the words.

    Without public images a pixel's sign is not known: absolute values are shown of both.
    """
    found = scored.found
    assert found is not None
    ranks = list(COLOURS)
    error = np.zeros(len(found.status)) if scored.error is None else scored.error
    order = sorted(
        range(len(found.status)),
        key=lambda k: (ranks.index(found.status[k].value), np.nan_to_num(error[k], nan=9e9), k),
    )
    if len(order) > n_shown:
        order = [order[p] for p in np.linspace(0, len(order) - 1, n_shown).round().astype(int)]
    images = _images(scored, prepared)
    private = prepared.challenge.secret.get("private")
    cells = []
    for k in order:
        truth = -1 if scored.truth_of is None else int(scored.truth_of[k])
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
                "label": _label(scored, prepared, k),
                "n_open": int(np.isnan(image).sum()),
            }
        )
    return cells


def _label(scored: Scored, prepared: PreparedChallenge, k: int) -> str:
    """`exact`, or `off by` the error in grey levels (of normal pixels in deviations), and SSIM."""
    if scored.worst is None or scored.error is None or np.isnan(scored.worst[k]):
        return ""
    if scored.worst[k] <= scored.same:
        return "exact"
    units = prepared.units
    error = scored.error[k] * (1.0 if units.is_normal else 127.5 * units.sd)
    ssim = "" if scored.ssim is None or np.isnan(scored.ssim[k]) else f", SSIM {scored.ssim[k]:.2f}"
    return f"off by {error:.0f}{ssim}" if error >= 10 else f"off by {error:.2g}{ssim}"


def instahide_page(
    record: Mapping[str, Any],
    prepared: PreparedChallenge,
    scored: Sequence[Scored],
    context: Mapping[str, Any],
) -> str:
    """The page. `context`: `command`, `created`, `outcome`, `n_shown` and `versions`."""
    best = best_of(scored)
    its = None if best is None else record["methods"][record["best"]]
    return page_html(
        "attack-instahide.html", {"uri": _uri, "map": data_uri, "share": _share}, record=record,
        units=prepared.units, encodings=_encodings(prepared),
        walls=_walls(scored, best, prepared, context["n_shown"]),
        heat=heat_maps(best.found) if best and best.found else [],
        graph=_graph(best.found, best, prepared) if best and best.found else None, best=its,
        open=left_open(its, record["scheme"]["k_pub"]) if its else [], why=WHY, colours=COLOURS,
        context=context,
    )  # fmt: skip


def best_of(scored: Sequence[Scored]) -> Scored | None:
    """The method with most images recovered; the first of equals."""
    there = [s for s in scored if s.found is not None]
    return max(there, key=lambda s: s.found.n_recovered if s.found else 0, default=None)


def _walls(
    scored: Sequence[Scored], best: Scored | None, prepared: PreparedChallenge, n_shown: int
) -> list[dict[str, Any]]:
    """Every method's images, the best's first."""
    return [
        {
            "title": s.title,
            "cells": tiles(s, prepared, n_shown),
            "n": len(s.found.status),
        }
        for s in sorted(scored, key=lambda s: s is not best)
        if s.found is not None
    ]


def _graph(found: Recovered, scored: Scored, prepared: PreparedChallenge) -> dict[str, Any]:
    images = _images(scored, prepared)

    def thumbnail(k: int) -> str:
        if np.isnan(images[k]).all():
            return ""
        shown = np.abs(images[k]) if prepared.scheme.k_pub == 0 else images[k]
        return _uri(picture(shown, prepared))

    return graph(found, thumbnail)


def _encodings(prepared: PreparedChallenge) -> list[tuple[Picture, Picture]]:
    """Some encodings as they are published and without signs, both from black to white: of theirs
    the largest values are white, less a few that stand out."""
    some = prepared.challenge.encodings[:ENCODINGS_SHOWN]
    most = max(float(np.quantile(np.abs(some), 0.999)), 1e-30)
    return [(_grey((e / most + 1) / 2), _grey(np.abs(e) / most)) for e in some]


def _grey(shares: npt.NDArray[Any]) -> Picture:
    pixels: Picture = (shares.clip(0, 1) * 255).round().astype(np.uint8)
    return pixels


def _images(scored: Scored, prepared: PreparedChallenge) -> npt.NDArray[np.float64]:
    assert scored.found is not None
    return np.asarray(scored.found.images.cpu(), np.float64).reshape(-1, *prepared.challenge.shape)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _uri(pixels: Picture) -> str:
    """For the page: large pictures by the means of squares."""
    step = math.ceil(max(pixels.shape[1:]) / LARGEST_SHOWN)
    if step == 1:
        return data_uri(pixels)
    c, h, w = pixels.shape
    whole = pixels[:, : h // step * step, : w // step * step].astype(np.float64)
    means = whole.reshape(c, h // step, step, w // step, step).mean((2, 4))
    return data_uri(means.round().astype(np.uint8))
