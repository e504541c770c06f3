"""A study's pictures: the best pairs of every cell, and first-layer kernels as RGB tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.page.files import Arrays, Record
from tasks.page.formats import fixed
from tasks.page.pictures import data_uri


def pairs(record: Record, pictures: Arrays) -> list[dict[str, Any]]:
    """One entry per cell: its best pairs (original, reconstruction), best first, with their SSIM.

    A cell without pictures has an empty list. Raises ValueError if it has more or fewer than it
    says.
    """
    return [{"cell": cell, "pairs": _of_cell(record, cell, pictures)} for cell in record["cells"]]


def _of_cell(record: Record, cell: Record, pictures: Arrays) -> list[dict[str, Any]]:
    names = [f"cell_{cell['number']:04d}/{kind}" for kind in ("original", "reconstruction")]
    if not all(name in pictures for name in names):
        return []
    originals, made = (pictures[name] for name in names)
    if not len(originals) == len(made) == len(cell["shown"]):
        raise ValueError(
            f"cell {cell['number']} shows {len(cell['shown'])} images, but the pictures hold "
            f"{len(originals)} originals and {len(made)} reconstructions; make the study's record "
            "again"
        )
    images = record["images"]
    return [
        {
            "original": data_uri(original),
            "uri": data_uri(found),
            "alt": f"Training picture {images['image_id'][row]} of network {images['victim'][row]}",
            "score": fixed(images["ssim"][row], 2),
            "good": (images["ssim"][row] or 0.0) > record["good_threshold"],
        }
        for original, found, row in zip(originals, made, cell["shown"], strict=True)
    ]


def kernels(pictures: Arrays, cells: Sequence[Record]) -> list[dict[str, Any]]:
    """One entry per cell: its kernels as URLs; an empty list if it has none."""
    found = []
    for cell in cells:
        tiles = list(pictures.get(f"kernels_{cell['number']:04d}", ()))
        size = " of {} × {}".format(*tiles[0].shape[1:]) if tiles else ""
        found.append({"cell": cell, "tiles": [data_uri(tile) for tile in tiles], "size": size})
    return found
