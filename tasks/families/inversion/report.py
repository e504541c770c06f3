"""Results of an attack on features, for people: a sheet of pictures, a page, raw files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.attack_file.pictures import Named
from tasks.attack_file.report import as_bytes, write_arrays
from tasks.families.inversion.attack import Attacked
from tasks.page.files import page_html
from tasks.page.pictures import COLUMNS, Tile, data_uri, strips_sheet, wrapped

LABELS = 1.5
"""The width of the rows' names, in tiles."""
TILE_INCHES = 0.78


def write_reconstructions(path: Path, data: Named, attacked: Sequence[Attacked]) -> None:
    """Pictures in [0, 1] as safetensors: `original`, and `sgd` and `strong` in the same order."""
    write_arrays(path, {"original": data.images} | {a.method.kind: a.found.x for a in attacked})


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
    originals: list[Tile] = [(as_bytes(data.images[i]), "", False) for i in rows]
    found = [("original", originals)]
    for a in attacked:
        tiles = [
            (as_bytes(a.found.x[i]), f"{float(a.ssim[i]):.2f}", bool(a.identified[i])) for i in rows
        ]
        found.append((a.title, tiles))
    return found


def inversion_sheet(data: Named, attacked: Sequence[Attacked], n_shown: int) -> bytes:
    """PNG: originals over reconstructions, ten a row, from best to worst."""
    rows = shown_rows(attacked, n_shown)
    lines = [(t.replace("'s ", "'s\n"), tiles) for t, tiles in strips(data, attacked, rows)]
    columns = min(len(rows), COLUMNS)
    return strips_sheet([*wrapped(lines)], columns=columns, labels=LABELS, tile_inches=TILE_INCHES)


def inversion_page(
    record: Mapping[str, Any],
    data: Named,
    attacked: Sequence[Attacked],
    context: Mapping[str, Any],
) -> str:
    """The page. `context`: `command` and `created` as texts, `versions` as a mapping, `outcome` in
    a sentence or two, `n_shown`."""
    rows = shown_rows(attacked, context["n_shown"])
    walls = [
        (title, [(data_uri(picture), text, bold) for picture, text, bold in tiles])
        for title, tiles in strips(data, attacked, rows)
    ]
    return page_html(
        "attack-inversion.html",
        {"figure": _figure, "spread": _spread},
        record=record,
        names=[data.names[i] for i in rows],
        walls=walls,
        context=context,
    )


def _figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _spread(found: Mapping[str, Any], digits: int = 2) -> str:
    """`.53 ± .08`."""
    return f"{_figure(found['mean'], digits)} ± {_figure(found['std'], digits)}"
