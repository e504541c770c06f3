"""What came back from features, for people: a sheet of pictures, a page, raw files.

Nothing is computed here. The page looks like those of the other attacks and uses the same style
sheet; it is one file that asks nothing of the network.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from safetensors.numpy import save
from torch import Tensor

from storage.files import text_bytes, write_file
from tasks.attack_file.pictures import Named
from tasks.families.inversion.attack import Attacked
from tasks.page.formats import duration
from tasks.page.pictures import data_uri
from tasks.page.writer import TEMPLATES

COLUMNS = 10
LABELS = 1.5
"""The width of the rows' names, in tiles."""
TILE_INCHES = 0.78

Tile = tuple[Float[Tensor, "c h w"], str, bool]


def write_reconstructions(path: Path, data: Named, attacked: Sequence[Attacked]) -> None:
    """Pictures in [0, 1] as safetensors: `original`, and `sgd` and `strong` in the same order."""
    pictures: dict[str, Tensor] = {a.method.kind: a.found.x for a in attacked}
    arrays = {"original": data.images} | pictures
    write_file(path, save({k: np.ascontiguousarray(t.numpy()) for k, t in arrays.items()}))


def shown_rows(attacked: Sequence[Attacked], n_shown: int) -> list[int]:
    """From best to worst by the last attack, which is ours where there are both; where not all are
    shown, at equal steps from the best to the worst."""
    order = attacked[-1].order()
    if len(order) <= n_shown:
        return order
    places = np.linspace(0, len(order) - 1, n_shown).round().astype(int)
    return [order[place] for place in places]


def strips(
    data: Named, attacked: Sequence[Attacked], rows: Sequence[int]
) -> list[tuple[str, list[Tile]]]:
    """Originals over what each attack made of their features, with its SSIM; bold: identified."""
    originals: list[Tile] = [(data.images[i], "", False) for i in rows]
    found = [("original", originals)]
    for a in attacked:
        tiles = [(a.found.x[i], f"{float(a.ssim[i]):.2f}", bool(a.identified[i])) for i in rows]
        found.append((a.title, tiles))
    return found


def contact_sheet(data: Named, attacked: Sequence[Attacked], n_shown: int) -> bytes:
    """PNG: originals over reconstructions, ten a row, from best to worst."""
    from matplotlib.figure import Figure

    rows = shown_rows(attacked, n_shown)
    lines = [
        strip
        for first in range(0, len(rows), COLUMNS)
        for strip in strips(data, attacked, rows[first : first + COLUMNS])
    ]
    heights = [1.0 + 0.26 * any(text for _p, text, _b in tiles) for _title, tiles in lines]
    n_columns = min(len(rows), COLUMNS)
    width = n_columns + LABELS + 0.1
    size = (TILE_INCHES * width, TILE_INCHES * sum(heights) + 0.12)
    figure = Figure(figsize=size, dpi=160)
    grid = figure.add_gridspec(
        len(lines), n_columns, height_ratios=heights, left=LABELS / width, right=0.995,
        top=1 - 0.03 / size[1], bottom=0.06 / size[1], wspace=0.06, hspace=0.0,
    )  # fmt: skip
    for row, (title, tiles) in enumerate(lines):
        for column, (picture, text, bold) in enumerate(tiles):
            axes = figure.add_subplot(grid[row, column])
            axes.set_axis_off()
            axes.imshow(_bytes(picture).transpose(1, 2, 0), interpolation="nearest")
            axes.set_anchor("N")
            if text:
                axes.text(0.5, -0.05, text, transform=axes.transAxes, ha="center", va="top",
                          fontsize=6, fontweight="bold" if bold else "normal")  # fmt: skip
            if column == 0:
                axes.text(-0.12, 0.5, title.replace("'s ", "'s\n"), transform=axes.transAxes,
                          ha="right", va="center", fontsize=6.5)  # fmt: skip
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None})
    return content.getvalue()


def write_page(
    path: Path,
    record: Mapping[str, Any],
    data: Named,
    attacked: Sequence[Attacked],
    context: Mapping[str, Any],
) -> None:
    """The page. `context`: `command` and `created` as texts, `versions` as a mapping, `outcome` in
    a sentence or two, `n_shown`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "figure": _figure, "spread": _spread}
    rows = shown_rows(attacked, context["n_shown"])
    walls = [
        (title, [(data_uri(_bytes(picture)), text, bold) for picture, text, bold in tiles])
        for title, tiles in strips(data, attacked, rows)
    ]
    page = environment.get_template("attack-inversion.html").render(
        style=environment.get_template("report.css").render(styles={}),
        record=record,
        names=[data.names[i] for i in rows],
        walls=walls,
        context=context,
    )
    write_file(path, text_bytes(page))


def _figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _spread(found: Mapping[str, Any], digits: int = 2) -> str:
    """`.53 ± .08`."""
    return f"{_figure(found['mean'], digits)} ± {_figure(found['std'], digits)}"


def _bytes(picture: Float[Tensor, "c h w"]) -> npt.NDArray[np.uint8]:
    """uint8 (3, h, w); a grey picture three times."""
    pixels = picture if len(picture) == 3 else picture[:1].expand(3, -1, -1)
    return np.asarray((pixels.nan_to_num(nan=0.0).clamp(0, 1) * 255).round().byte().numpy())
