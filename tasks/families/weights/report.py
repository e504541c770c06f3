"""The outcome of an attack on given weights as a page, a sheet of pictures, and raw files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tasks.attack_file.comparison import sentences
from tasks.attack_file.pictures import Named
from tasks.attack_file.report import STEPS, as_bytes, uri_of, write_arrays
from tasks.families.weights.preflight import PUBLISH
from tasks.families.weights.results import FALSE_SHARES, GOOD, Matches, Ranked, Results
from tasks.page.charts import Panel, dots, log_axis, rank_axis
from tasks.page.files import page_html
from tasks.page.pictures import COLUMNS, Strip, strips_sheet, wrapped

N_DECOYS = 5
MAX_SHOWN_IMAGES = 40


def write_reconstructions(path: Path, results: Results) -> None:
    """The ranked pictures as safetensors: raw x, picture in [0, 1], attack, candidate, and lam, or
    trust of the span attack; with known images each one's best match (`best/picture`, `best/ssim`).
    """
    ranked = results.ranked
    arrays: dict[str, Tensor | npt.NDArray[Any]] = {}
    if ranked:
        arrays = {
            "x": torch.stack([r.x for r in ranked]),
            "picture": torch.stack([r.picture for r in ranked]),
            "attack": np.array([r.attack for r in ranked], np.int64),
            "candidate": np.array([r.candidate for r in ranked], np.int64),
        }
        name = "lam" if results.method == "kkt" else "trust"
        values = [r.lam if r.lam is not None else r.agreement for r in ranked]
        arrays[name] = np.array(values, np.float32)
    if results.truth is not None:
        arrays |= {"best/picture": results.truth.picture, "best/ssim": results.truth.ssim}
    write_arrays(path, arrays)


def weights_sheet(
    results: Results, truth: Named | None = None, decoys: Named | None = None
) -> bytes:
    """PNG: known images over their best matches with scores, decoys likewise, and the ranking."""
    return strips_sheet([*_strips(results, truth, decoys)], columns=COLUMNS)


def _strips(results: Results, truth: Named | None, decoys: Named | None) -> Iterator[Strip]:
    for given, found, name, limit in (
        (truth, results.truth, "training images", MAX_SHOWN_IMAGES),
        (decoys, results.decoys, "decoys, which the network never saw", N_DECOYS),
    ):
        if given is None or found is None:
            continue
        order, ssim = best_rows(found, limit), found.ssim
        shown = f", the best {len(order)}" if len(order) < len(given) else ""
        yield f"{found.n_good} of {len(given)} {name}{shown}: good above SSIM {GOOD:g}"
        originals = [(as_bytes(given.images[i]), "", False) for i in order]
        best = [(as_bytes(found.picture[i]), f"{ssim[i]:.2f}", bool(ssim[i] > GOOD)) for i in order]
        yield from wrapped([("original", originals), ("best match", best)])
    if not results.ranked:
        yield "no attack left a picture"
        return
    several, span = results.n_ranked_attacks > 1, results.method == "span"
    alone = "trust" if span else "consistency"
    by = f"how many of {results.n_ranked_attacks} attacks have it" if several else alone
    below = "; below each its SSIM with a training image (neg: of its negative)"
    yield (
        f"ranked without the originals, by {by}"
        f"{below if span and results.truth is not None else ''}"
    )
    tiles = []
    for rank, r in enumerate(results.ranked, start=1):
        support = f"{r.n_attacks}/{results.n_ranked_attacks}" if several else f"{r.agreement:.2f}"
        if r.ssim is not None:
            support = _known(r) if span else f"{support}  ({_known(r)})"
        good = max(r.ssim or 0, r.as_negative or 0) > GOOD
        tiles.append((as_bytes(r.picture), f"{rank}: {support}", good))
    yield from wrapped([("", tiles)])


def _known(r: Ranked) -> str:
    """The SSIM with the nearest training image, of the negative if that is more like one."""
    if r.as_negative is not None and r.as_negative > GOOD:
        return f"neg {r.as_negative:.2f}"
    return f"{r.ssim:.2f}"


def weights_page(
    record: Mapping[str, Any],
    results: Results,
    *,
    truth: Named | None,
    decoys: Named | None,
    context: Mapping[str, Any],
) -> str:
    """The page. `context`: `command` and `created` as texts, `settings` and `versions`."""
    return page_html(
        "attack.html",
        {"lower_first": lambda text: text[:1].lower() + text[1:], "shown": uri_of},
        record=record,
        publish=PUBLISH,
        results=results,
        truth=truth,
        decoys=decoys,
        best={"images": best_rows(results.truth), "decoys": best_rows(results.decoys)},
        said=[]
        if results.compared is None
        else sentences(record["scores"], record["preflight"]["outlook"]),
        shares=[f"{share:.0%}" for share in FALSE_SHARES],
        spectrum=None if record["spectrum"] is None else _spectrum_svg(record["spectrum"]),
        steps=STEPS,
        good=GOOD,
        context=context,
    )


def best_rows(found: Matches | None, limit: int = MAX_SHOWN_IMAGES) -> list[int]:
    """Rows of the images that are shown, the best matched first."""
    ssim = torch.zeros(0) if found is None else found.ssim
    rows: list[int] = ssim.argsort(descending=True, stable=True)[:limit].tolist()
    return rows


def _spectrum_svg(spectrum: Mapping[str, Any]) -> str:
    """The first layer's singular values, the edge of its noise, and how many were taken."""
    values, n_taken, edge = spectrum["values"], spectrum["n_taken"], spectrum["edge"]
    points = [(i, value) for i, value in enumerate(values, start=1) if value > 0]
    low = min(edge or values[0], values[n_taken - 1] or values[0]) / 2
    axis = log_axis("singular value", max(low, values[0] * 1e-12), values[0])
    panel = Panel("singular value", rank_axis("direction of the first layer", len(values)), axis)
    parts = [dots(panel, points, (), colour=1)]
    if n_taken < 0.85 * len(values):  # beyond, its words leave the frame
        parts.append(panel.vertical(n_taken, f"{n_taken} taken"))
    parts += [panel.horizontal(edge)] if edge > 0 else []
    said = f"{spectrum['n_above']} of {len(values)} singular values are above the noise"
    return panel.svg(parts, said)
