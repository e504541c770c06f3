"""A recovery study's pictures: the masks, and rows of original, degraded and what came back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.families.autoencoder.study.figure_specs import group_name
from tasks.families.autoencoder.study.tables import examples_table, masks_table, psnr
from tasks.page.files import Arrays, Record
from tasks.page.formats import decibels, percent, power
from tasks.page.pictures import data_uri
from tasks.page.study_page import Figure

KNOWN, MISSING = (236, 231, 220), (70, 65, 58)
OPEN_GROUPS = 2


def mask_tile(pictures: Arrays, name: str) -> str:
    """A mask as a URL: known pixels light, missing ones dark; empty if it was not kept."""
    mask = pictures.get(f"masks/{name}")
    return "" if mask is None else _mask_uri(mask)


def masks_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """A picture of every mask, its title, and how much is known (autoencoder paper, figure 3)."""
    tiles = [
        {
            "uri": mask_tile(pictures, mask["name"]),
            "title": mask["title"],
            "known": f"{percent(mask['known_share'])} known",
        }
        for mask in record["masks"]
    ]
    return Figure(figure, [masks_table(record, figure["name"])], more={"tiles": tiles})


def examples_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """Originals, what was left of them and what came back (autoencoder paper, figure 1): a row per
    image, a column per method and estimated mask.

    Raises ValueError if a group has more or fewer pictures than it says.
    """
    titles = {victim["name"]: victim["title"] for victim in record["victims"]}
    masks = {mask["name"]: mask["title"] for mask in record["masks"]}
    made = []
    for k, shown in enumerate(record["shown"]):
        title = (
            f"{titles.get(shown['victim'], shown['victim'])}, loss {power(shown['level'])}; "
            f"{masks.get(shown['mask'], shown['mask'])}"
        )
        title += f"; noise {shown['sigma']:g}" if shown["sigma"] else ""
        columns = list(_columns(record, pictures, shown))
        there = {column["key"] for column in columns}
        absent = [m["title"] for m in record["methods"] if m["name"] not in there]
        made.append(
            {
                "title": title,
                "open": k < OPEN_GROUPS,
                "columns": columns,
                "rows": [
                    {"image": image, "tiles": [column["tiles"][row] for column in columns]}
                    for row, image in enumerate(shown["rows"])
                ],
                "absent": absent if columns else [],
            }
        )
    table = examples_table(figure["name"], record, pictures)
    return Figure(figure, [table], more={"groups": made})


def _columns(record: Record, pictures: Arrays, shown: Record) -> list[dict[str, Any]]:
    """The columns whose pictures were kept; none without the originals."""
    group, images, methods = group_name(shown), shown["rows"], record["methods"]
    if f"{group}/original" not in pictures:
        return []
    wanted: list[tuple[str, str, str, Callable[[npt.NDArray[Any]], str]]] = [
        ("original", "original", "image {0}: {1}", data_uri),
        ("degraded", "what was left", "image {0}: {1}", data_uri),
        *((m["name"], m["title"], "image {0}: {1}", data_uri) for m in methods),
    ]
    for m in methods:
        title = f"mask by {m['title'].partition(',')[0]}"
        wanted.append((f"mask/{m['name']}", title, "{1}, image {0}", _mask_uri))
    columns = []
    for key, title, alt, uri in wanted:
        name = f"{group}/{key}"
        if name not in pictures:
            continue
        tiles: list[dict[str, str]] = [
            {"uri": uri(picture), "alt": alt.format(image, title)}
            for picture, image in zip(_of_images(pictures, name, images), images, strict=True)
        ]
        columns.append({"key": key, "title": title, "tiles": tiles})
        if f"{name}/mse" in pictures:
            errors = _of_images(pictures, f"{name}/mse", images)
            for tile, error in zip(tiles, errors.tolist(), strict=True):
                tile.update(_scored(record, error))
    return columns


def _of_images(pictures: Arrays, name: str, images: Sequence[int]) -> npt.NDArray[Any]:
    array = pictures[name]
    if len(array) != len(images):
        raise ValueError(
            f"the record shows {len(images)} images of {name.rpartition('/')[0]!r}, but the "
            f"pictures hold {len(array)} in {name!r}; make the study's record again"
        )
    return array


def _scored(record: Record, error: float) -> Mapping[str, str]:
    """The words under a picture: its PSNR, and how good that is."""
    thresholds, found = record["thresholds"], psnr(error)
    kind = ""
    if found is not None:
        close = "approximate" if error < thresholds["approximate"] else ""
        kind = "accurate" if error < thresholds["accurate"] else close
    about = "no error known" if found is None else f"mean square error {error:.2g}"
    return {"score": decibels(found), "kind": kind, "about": about}


def _mask_uri(mask: npt.NDArray[Any]) -> str:
    colours = np.where(mask.astype(bool)[..., None], KNOWN, MISSING).astype(np.uint8)
    return data_uri(colours.transpose(2, 0, 1))
