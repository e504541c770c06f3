"""Pictures for a page: one of them, or a strip of many, as a URL that needs no server."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

GAP = 1  # pixels between the pictures of a strip


def data_uri(picture: npt.NDArray[np.uint8]) -> str:
    """A (3, h, w) picture, or a grey (1, h, w), as a PNG inside a URL."""
    rgb = np.broadcast_to(picture, (3, *picture.shape[1:]))
    return _url(_encoded(rgb.transpose(1, 2, 0), "png"), "png")


def strips(rows: Sequence[npt.NDArray[np.uint8]], *, most_bytes: int) -> tuple[list[str], bool]:
    """(URLs, whether they are exact): each (k, 3, h, w) of `rows` as one picture, side by side.

    PNG if all of them fit into `most_bytes` of text, else exact WebP if those do, else WebP of
    quality 90, which loses a little.
    """
    images = [_side_by_side(row) for row in rows]
    for kind, lossless in (("png", True), ("webp", True), ("webp", False)):
        urls = [_url(_encoded(image, kind, lossless=lossless), kind) for image in images]
        if sum(len(url) for url in urls) <= most_bytes:
            break
    return urls, lossless


def _side_by_side(row: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(h, k w + gaps, 4): transparent between the pictures."""
    k, _channels, height, width = row.shape
    strip = np.zeros((height, k * (width + GAP) - GAP, 4), np.uint8)
    for i, picture in enumerate(row):
        left = i * (width + GAP)
        strip[:, left : left + width, :3] = picture.transpose(1, 2, 0)
        strip[:, left : left + width, 3] = 255
    return strip


def _encoded(image: npt.NDArray[np.uint8], kind: str, *, lossless: bool = True) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    webp: dict[str, Any] = {"lossless": lossless, "quality": 75 if lossless else 90, "method": 4}
    how = webp if kind == "webp" else {"optimize": True}
    Image.fromarray(np.ascontiguousarray(image)).save(file, kind, **how)
    return file.getvalue()


def _url(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()
