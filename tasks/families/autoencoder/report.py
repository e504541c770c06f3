"""Results of an attack on an autoencoder, for people: a sheet of pictures, a page, raw files.

Nothing is computed here. The page looks like that of `palimpsest attack kkt`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.attack_file.report import STEPS, as_bytes, write_arrays
from tasks.families.autoencoder.material import Case
from tasks.families.autoencoder.results import SIDES, Cell, arrays, pairs
from tasks.page.picture_sheet import Strip, strips_sheet
from tasks.page.pictures import data_uri
from tasks.page.writer import page_html

COLUMNS = 10
MIN_COLUMNS = 4
LABELS = 1.8
"""The width of the methods' names, in tiles."""
MAX_SHOWN = 20
"""Images of each mask and side on the page."""


def write_recoveries(path: Path, cells: Sequence[Cell]) -> None:
    """Pictures in [0, 1] as safetensors, `SIDE/MASK/METHOD/x` and what they were made from."""
    write_arrays(path, arrays(cells))


def recoveries_sheet(cells: Sequence[Cell], n_shown: int) -> bytes:
    """PNG: per mask, originals over degraded images over what each method made of them."""
    strips = list(_strips(cells, n_shown))
    n = max(len(strip[1]) for strip in strips if not isinstance(strip, str))
    return strips_sheet(strips, columns=max(n, MIN_COLUMNS), labels=LABELS, at_edge=True)


def _strips(cells: Sequence[Cell], n_shown: int) -> Iterator[Strip]:
    for case, group in _by_case(cells):
        order = group[0].order()[:n_shown]
        yield _heading(case, len(order))
        for first in range(0, len(order), COLUMNS):
            rows = order[first : first + COLUMNS]
            if case.original is not None:
                yield "original", [(as_bytes(case.original[i]), "", False) for i in rows]
            yield "degraded", [(as_bytes(case.y[i]), "", False) for i in rows]
            for cell in group:
                tiles = [
                    (as_bytes(cell.recovery.x[i]), cell.label(i), cell.is_accurate(i)) for i in rows
                ]
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


def autoencoder_page(
    record: Mapping[str, Any], cells: Sequence[Cell], context: Mapping[str, Any]
) -> str:
    """The page. `context`: `command` and `created` as texts, `settings` and `versions`."""
    return page_html(
        "attack-autoencoder.html", {"percent": percent, "small": small}, record=record,
        rows=list(_rows(cells)), walls=[_wall(case, group) for case, group in _by_case(cells)],
        steps=STEPS, context=context,
    )  # fmt: skip


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
        "given": [
            (title, [data_uri(as_bytes(images[i])) for i in order]) for title, images in given
        ],
        "methods": [
            (
                cell.title,
                "".join(_count(cell)),
                [
                    (data_uri(as_bytes(cell.recovery.x[i])), cell.label(i), cell.is_accurate(i))
                    for i in order
                ],
            )
            for cell in group
        ],
    }
