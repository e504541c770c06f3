"""What came back from InstaHide's encodings, for people: a page, a sheet of pictures, raw files.

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

from storage.files import write_file
from tasks.instahide_attack import Prepared, Scored, scores_of
from tasks.inversion_attack_page import COLUMNS
from tasks.report import TEMPLATES, data_uri, duration

HEAT = 360
"""Pixels of a heat map's side, at most."""
DRAWN = 40
"""Images up to which the graph is drawn with their pictures at its vertices."""
ENCODINGS_SHOWN = 10

Picture = npt.NDArray[np.uint8]
COLOURS = {
    "recovered": "#2f7d4f",
    "estimated": "#b7791f",
    "ambiguous": "#8a4fbf",
    "free": "#777777",
    "several graphs": "#1f6fb7",
    "unsolved": "#b73a3a",
}


def write_images(folder: Path, scored: Scored, prepared: Prepared) -> None:
    """images.npy in the encodings' units (NaN: not determined), images/NNN.png and statuses.csv."""
    found = scored.found
    assert found is not None
    shape = prepared.challenge.shape
    images = np.asarray(found.images.cpu(), np.float32).reshape(-1, *shape)
    content = io.BytesIO()
    np.save(content, images, allow_pickle=False)
    write_file(folder / "images.npy", content.getvalue())
    pictures = folder / "images"
    pictures.mkdir(exist_ok=True)
    for old in pictures.glob("*.png"):
        old.unlink()
    for k, image in enumerate(images):
        if not np.isnan(image).all():
            write_file(pictures / f"{k:04}.png", _png(picture(image, prepared)))
    write_file(folder / "statuses.csv", statuses(scored).encode())


def statuses(scored: Scored) -> str:
    """CSV: of every image its status, its encodings, and its scores where the truth is known."""
    assert scored.found is not None
    text = io.StringIO()
    names = ["image", "status", "n_encodings", "truth", "rms_error", "worst_error", "ssim"]
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    edges = scored.found.edges
    n_seen = np.bincount(edges[edges >= 0], minlength=len(scored.found.status))
    for k, status in enumerate(scored.found.status):
        row = {"image": k, "status": status.value, "n_encodings": int(n_seen[k])}
        table.writerow(row | scores_of(scored, k))
    return text.getvalue()


def picture(image: npt.NDArray[Any], prepared: Prepared) -> Picture:
    """uint8 (c, h, w). Normal pixels from -3 to 3, others from -1 to 1; where nothing is known,
    grey."""
    normal = prepared.challenge.facts.get("pixels", {}).get("kind") == "normal"
    span = 3.0 if normal else 1.0
    values = np.nan_to_num(np.asarray(image, np.float64) / span, nan=0.0)
    return ((values.clip(-1, 1) + 1) * 127.5).round().astype(np.uint8)


def sheet(scored: Scored, prepared: Prepared, n_shown: int) -> bytes:
    """PNG: the truth over what came back, ten a row."""
    cells = tiles(scored, prepared, n_shown)
    _c, h, w = prepared.challenge.shape
    n_rows = math.ceil(len(cells) / COLUMNS)
    has_truth = any(cell["truth_picture"] is not None for cell in cells)
    tall = (2 if has_truth else 1) * h + 4
    canvas = np.full((3, n_rows * tall, COLUMNS * (w + 2)), 255, np.uint8)
    for k, cell in enumerate(cells):
        top, left = (k // COLUMNS) * tall, (k % COLUMNS) * (w + 2)
        both = [cell["truth_picture"]] if has_truth else []
        for part in [*both, cell["picture"]]:
            if part is not None:
                canvas[:, top : top + h, left : left + w] = part
            top += h
    return _png(np.repeat(np.repeat(canvas, 2, axis=1), 2, axis=2))


def tiles(scored: Scored, prepared: Prepared, n_shown: int) -> list[dict[str, Any]]:
    """Images by status, then by error: the picture, the true one if it is known, and the words."""
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
    shape = prepared.challenge.shape
    private = prepared.challenge.secret.get("private")
    cells = []
    for k in order:
        image = np.asarray(found.images[k].cpu()).reshape(shape)
        truth = None if scored.truth_of is None else int(scored.truth_of[k])
        original = None if truth is None or truth < 0 or private is None else private[truth]
        if original is not None and prepared.scheme.k_pub == 0:
            original, image = np.abs(original), np.abs(image)
        cells.append(
            {
                "number": k,
                "status": found.status[k].value,
                "picture": None if np.isnan(image).all() else picture(image, prepared),
                "truth_picture": None if original is None else picture(original, prepared),
                "label": _label(scored, k),
            }
        )
    return cells


def _label(scored: Scored, k: int) -> str:
    if scored.worst is None or scored.error is None or np.isnan(scored.worst[k]):
        return ""
    if scored.worst[k] < 1e-5:
        return "exact"
    return f"±{scored.error[k]:.2g}"


def write_page(
    path: Path,
    record: Mapping[str, Any],
    prepared: Prepared,
    scored: Sequence[Scored],
    context: Mapping[str, Any],
) -> None:
    """The page. `context`: `command`, `created`, `outcome`, `n_shown` and `versions`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "uri": data_uri, "share": _share}
    best = best_of(scored)
    page = environment.get_template("attack-instahide.html").render(
        style=environment.get_template("report.css").render(styles={}),
        record=record,
        encodings=_encodings(prepared),
        cells=tiles(best, prepared, context["n_shown"]) if best else [],
        best=best,
        heat=_heat_maps(best) if best else None,
        graph=_graph(best, prepared) if best else None,
        colours=COLOURS,
        context=context,
    )
    write_file(path, page.encode())


def best_of(scored: Sequence[Scored]) -> Scored | None:
    """The method with most images recovered; the first of equals."""
    there = [s for s in scored if s.found is not None]
    return max(there, key=lambda s: s.found.n_recovered if s.found else 0, default=None)


def _encodings(prepared: Prepared) -> list[tuple[Picture, Picture]]:
    """Some encodings as they are published and without signs."""
    some = prepared.challenge.encodings[:ENCODINGS_SHOWN]
    return [(picture(e, prepared), picture(2 * np.abs(e) - 1, prepared)) for e in some]


def _heat_maps(scored: Scored) -> dict[str, Picture]:
    """Scores and common images, encodings ordered by the images they are found to have."""
    found = scored.found
    assert found is not None
    order = np.lexsort((found.edges[:, 1], found.edges[:, 0]))
    some = order[np.linspace(0, len(order) - 1, min(len(order), HEAT)).round().astype(int)]
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(some)
    scores, common = np.asarray(found.scores.cpu()), np.asarray(found.common.cpu())
    np.fill_diagonal(common, 2)
    return {
        "as they came": _heat(scores[np.ix_(shuffled, shuffled)]),
        "in the order that was found": _heat(scores[np.ix_(some, some)]),
        "common images": _heat(common[np.ix_(some, some)].astype(np.float64), low=0.0, high=2.0),
    }


def _heat(values: npt.NDArray[Any], low: float | None = None, high: float | None = None) -> Picture:
    """From white to dark blue, from the median to the 99.5th percentile off the diagonal."""
    off = values[~np.eye(len(values), dtype=bool)] if len(values) > 1 else values
    low = float(np.median(off)) if low is None else low
    high = float(np.quantile(off, 0.995)) if high is None else high
    share = ((values - low) / max(high - low, 1e-30)).clip(0, 1)
    ends = np.array([[255, 255, 255], [16, 48, 110]], np.float64)
    rgb = ends[0] + share[..., None] * (ends[1] - ends[0])
    side = max(1, HEAT // max(len(values), 1))
    large = rgb.repeat(side, 0).repeat(side, 1)
    pixels: Picture = large.round().astype(np.uint8).transpose(2, 0, 1)
    return pixels


def _graph(scored: Scored, prepared: Prepared) -> dict[str, Any]:
    """Images on a circle and encodings between them; of many images, the matrix of encodings."""
    found = scored.found
    assert found is not None
    n = len(found.status)
    known = found.edges[(found.edges >= 0).all(1)]
    counts = np.zeros((n, n), np.int64)
    np.add.at(counts, (known[:, 0], known[:, 1]), 1)
    counts += counts.T
    if n > DRAWN:
        return {"drawn": False, "matrix": _heat(counts.astype(float), low=0.0), "n": n}
    angle = 2 * np.pi * np.arange(n) / n - np.pi / 2
    x, y = 300 + 250 * np.cos(angle), 300 + 250 * np.sin(angle)
    shape = prepared.challenge.shape
    vertices = []
    for k in range(n):
        image = np.asarray(found.images[k].cpu()).reshape(shape)
        lost = np.isnan(image).all()
        uri = "" if lost else data_uri(picture(image, prepared))
        colour = COLOURS[found.status[k].value]
        vertices.append({"x": x[k], "y": y[k], "uri": uri, "colour": colour, "k": k})
    lines = [
        {"x1": x[i], "y1": y[i], "x2": x[j], "y2": y[j], "n": int(counts[i, j])}
        for i in range(n)
        for j in range(i + 1, n)
        if counts[i, j]
    ]
    return {"drawn": True, "vertices": vertices, "lines": lines, "n": n}


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _png(pixels: Picture) -> bytes:
    from PIL import Image

    channels_last = np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)
    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(channels_last)).save(content, "PNG")
    return content.getvalue()
