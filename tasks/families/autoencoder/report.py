"""What an autoencoder gave back, for people: a sheet of pictures, a page, raw files.

Nothing is computed here. The page looks like that of `palimpsest attack kkt` and uses the same
style sheet; it is one file that asks nothing of the network.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from safetensors.numpy import save
from torch import Tensor

from storage.files import text_bytes, write_file
from tasks.families.autoencoder.material import Case
from tasks.families.autoencoder.results import SIDES, Cell, arrays, pairs
from tasks.families.weights.report import STEPS
from tasks.page.formats import duration
from tasks.page.pictures import data_uri
from tasks.page.writer import TEMPLATES

COLUMNS = 10
MIN_COLUMNS = 4
LABELS = 1.8
"""The width of the methods' names, in tiles."""
TILE_INCHES = 0.72
MAX_SHOWN = 20
"""Images of each mask and side on the page."""

Tile = tuple[Float[Tensor, "c h w"], str, bool]
Strip = str | tuple[str, list[Tile]]


def write_recoveries(path: Path, cells: Sequence[Cell]) -> None:
    """Pictures in [0, 1] as safetensors, `SIDE/MASK/METHOD/x` and what they were made from."""
    write_file(path, save({k: np.ascontiguousarray(t.numpy()) for k, t in arrays(cells).items()}))


def contact_sheet(cells: Sequence[Cell], n_shown: int) -> bytes:
    """PNG: per mask, originals over degraded images over what each method made of them."""
    from matplotlib.figure import Figure

    strips = list(_strips(cells, n_shown))
    heights = [
        0.42 if isinstance(strip, str) else 1.0 + 0.26 * any(text for _p, text, _b in strip[1])
        for strip in strips
    ]
    n_columns = max(len(strip[1]) for strip in strips if not isinstance(strip, str))
    width = max(n_columns, MIN_COLUMNS) + LABELS + 0.1
    size = (TILE_INCHES * width, TILE_INCHES * sum(heights) + 0.12)
    figure = Figure(figsize=size, dpi=160)
    grid = figure.add_gridspec(
        len(strips), max(n_columns, MIN_COLUMNS), height_ratios=heights,
        left=LABELS / width, right=0.995,
        top=1 - 0.03 / size[1], bottom=0.06 / size[1], wspace=0.06, hspace=0.0,
    )  # fmt: skip
    for row, strip in enumerate(strips):
        if isinstance(strip, str):
            axes = figure.add_subplot(grid[row, :])
            axes.set_axis_off()
            start = (0.1 - LABELS) / (0.995 * width - LABELS)  # the page's edge, in the axes' units
            axes.text(start, 0.3, strip, transform=axes.transAxes, fontsize=7.5, fontweight="bold")
            continue
        title, tiles = strip
        for column, (picture, text, bold) in enumerate(tiles):
            axes = figure.add_subplot(grid[row, column])
            axes.set_axis_off()
            axes.imshow(_bytes(picture).transpose(1, 2, 0), interpolation="nearest")
            axes.set_anchor("N")
            if text:
                axes.text(0.5, -0.05, text, transform=axes.transAxes, ha="center", va="top",
                          fontsize=6, fontweight="bold" if bold else "normal")  # fmt: skip
            if column == 0:
                axes.text(-0.12, 0.5, title, transform=axes.transAxes, ha="right", va="center",
                          fontsize=6.5)  # fmt: skip
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None})
    return content.getvalue()


def _strips(cells: Sequence[Cell], n_shown: int) -> Iterator[Strip]:
    for case, group in _by_case(cells):
        order = group[0].order()[:n_shown]
        yield _heading(case, len(order))
        for first in range(0, len(order), COLUMNS):
            rows = order[first : first + COLUMNS]
            if case.original is not None:
                yield "original", [(case.original[i], "", False) for i in rows]
            yield "degraded", [(case.y[i], "", False) for i in rows]
            for cell in group:
                tiles = [(cell.recovery.x[i], cell.label(i), cell.is_accurate(i)) for i in rows]
                yield "\n".join([*cell.title.split(", "), *_count(cell)]), tiles


def _heading(case: Case, n_shown: int) -> str:
    n = len(case.names)
    shown = f": the best {n_shown} of {n}" if n_shown < n else ""
    if case.original is None:
        return f"degraded pictures, and how far f moves what came back{shown}"
    where = "" if case.mask_name == "given" else f", mask {case.mask_name}"
    return f"{SIDES[case.side]}{where}{shown}"


def _count(cell: Cell) -> list[str]:
    """`6 of 8 accurate`, if that is known."""
    return [] if cell.rates is None else [f"{cell.rates.n_accurate} of {cell.rates.n} accurate"]


def _by_case(cells: Sequence[Cell]) -> list[tuple[Case, list[Cell]]]:
    """Cells of the same degraded images, in their order."""
    groups: list[tuple[Case, list[Cell]]] = []
    for cell in cells:
        if not groups or groups[-1][0] is not cell.recovery.case:
            groups.append((cell.recovery.case, []))
        groups[-1][1].append(cell)
    return groups


def write_page(
    path: Path, record: Mapping[str, Any], cells: Sequence[Cell], context: Mapping[str, Any]
) -> None:
    """The page. `context`: `command` and `created` as texts, `versions` as a mapping."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "percent": percent, "small": small}
    page = environment.get_template("attack-autoencoder.html").render(
        style=environment.get_template("report.css").render(styles={}),
        record=record,
        rows=list(_rows(cells)),
        walls=[_wall(case, group) for case, group in _by_case(cells)],
        steps=STEPS,
        context=context,
    )
    write_file(path, text_bytes(page))


def percent(estimate: Sequence[float]) -> str:
    """`50 % (21 to 79)`."""
    value, low, high = (100 * number for number in estimate)
    return f"{value:.0f} % ({low:.0f} to {high:.0f})"


def small(value: float | None) -> str:
    """A mean square error, or a dash."""
    return "–" if value is None else f"{value:.1e}"


def _rows(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """The table: training images beside their control."""
    for cell, control in pairs(cells):
        case = cell.recovery.case
        yield {
            "mask": case.mask_name,
            "known": None if case.mask is None else float(case.mask.double().mean()),
            "method": cell.title,
            "n_applied": float(cell.recovery.n_applied.double().mean()),
            "seconds": cell.recovery.seconds,
            "train": cell.rates,
            "control": None if control is None else control.rates,
            "residual": float(cell.recovery.residual.median()),
        }


def _wall(case: Case, group: Sequence[Cell]) -> dict[str, Any]:
    order = group[0].order()[:MAX_SHOWN]
    given = [("degraded", case.y)]
    if case.original is not None:
        given = [("original", case.original), *given]
    return {
        "heading": _heading(case, len(order)),
        "side": case.side,
        "mask": case.mask_name,
        "names": [case.names[i] for i in order],
        "given": [(title, [data_uri(_bytes(images[i])) for i in order]) for title, images in given],
        "methods": [
            (
                cell.title,
                "".join(_count(cell)),
                [
                    (data_uri(_bytes(cell.recovery.x[i])), cell.label(i), cell.is_accurate(i))
                    for i in order
                ],
            )
            for cell in group
        ],
    }


def _bytes(picture: Float[Tensor, "c h w"]) -> npt.NDArray[np.uint8]:
    """uint8 (3, h, w); a grey picture three times."""
    pixels = picture if len(picture) == 3 else picture[:1].expand(3, -1, -1)
    return np.asarray((pixels.nan_to_num(nan=0.0).clamp(0, 1) * 255).round().byte().numpy())
