"""A recovery study's pictures: the masks, and rows of original, degraded and what came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.families.autoencoder.study.figure_specs import group_name
from tasks.families.autoencoder.study.tables import psnr
from tasks.page.files import Arrays, Record
from tasks.page.formats import decibels, percent, power
from tasks.page.pictures import data_uri

KNOWN, MISSING = (236, 231, 220), (70, 65, 58)
OPEN_GROUPS = 2


def mask_tile(pictures: Arrays, name: str) -> str:
    """A mask as a URL: known pixels light, missing ones dark; empty if it was not kept."""
    mask = pictures.get(f"masks/{name}")
    return "" if mask is None else _mask_uri(mask)


def mask_tiles(record: Record, pictures: Arrays) -> list[dict[str, Any]]:
    """One entry per mask: its picture, its title, and how much is known."""
    return [
        {
            "uri": mask_tile(pictures, mask["name"]),
            "title": mask["title"],
            "known": f"{percent(mask['known_share'])} known",
        }
        for mask in record["masks"]
    ]


def groups(record: Record, pictures: Arrays) -> list[dict[str, Any]]:
    """One entry per group that is shown: a row per image, a column per method and estimated mask.

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
        if shown["sigma"]:
            title += f"; noise {shown['sigma']:g}"
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
    return made


def _columns(record: Record, pictures: Arrays, shown: Record) -> list[dict[str, Any]]:
    """The columns whose pictures were kept; none without the originals."""
    group, images = group_name(shown), shown["rows"]
    if f"{group}/original" not in pictures:
        return []
    columns = [
        _column(pictures, f"{group}/{key}", key, title, images)
        for key, title in (("original", "original"), ("degraded", "what was left"))
        if f"{group}/{key}" in pictures
    ]
    for method in record["methods"]:
        name = f"{group}/{method['name']}"
        if name in pictures:
            column = _column(pictures, name, method["name"], method["title"], images)
            columns.append(column)
            errors = pictures.get(f"{name}/mse")
            if errors is not None:
                _check(f"{name}/mse", errors, images)
                for tile, error in zip(column["tiles"], errors.tolist(), strict=True):
                    tile.update(_scored(record, error))
    for method in record["methods"]:
        name = f"{group}/mask/{method['name']}"
        if name in pictures:
            _check(name, pictures[name], images)
            title = f"mask by {method['title'].partition(',')[0]}"
            tiles = [
                {"uri": _mask_uri(mask), "alt": f"{title}, image {image}"}
                for mask, image in zip(pictures[name], images, strict=True)
            ]
            columns.append({"key": f"mask/{method['name']}", "title": title, "tiles": tiles})
    return columns


def _column(
    pictures: Arrays, name: str, key: str, title: str, images: Sequence[int]
) -> dict[str, Any]:
    _check(name, pictures[name], images)
    tiles = [
        {"uri": data_uri(picture), "alt": f"image {image}: {title}"}
        for picture, image in zip(pictures[name], images, strict=True)
    ]
    return {"key": key, "title": title, "tiles": tiles}


def _check(name: str, array: npt.NDArray[Any], images: Sequence[int]) -> None:
    if len(array) != len(images):
        raise ValueError(
            f"the record shows {len(images)} images of {name.rpartition('/')[0]!r}, but the "
            f"pictures hold {len(array)} in {name!r}; make the study's record again"
        )


def _scored(record: Record, error: float) -> Mapping[str, Any]:
    """The words under a picture: its PSNR, and how good that is."""
    thresholds, found = record["thresholds"], psnr(error)
    kind = ""
    if found is not None:
        close = "approximate" if error < thresholds["approximate"] else ""
        kind = "accurate" if error < thresholds["accurate"] else close
    return {
        "score": decibels(found),
        "kind": kind,
        "about": "no error known" if found is None else f"mean square error {error:.2g}",
    }


def _mask_uri(mask: npt.NDArray[Any]) -> str:
    colours = np.where(mask.astype(bool)[..., None], KNOWN, MISSING).astype(np.uint8)
    return data_uri(colours.transpose(2, 0, 1))
