"""Pictures for people: as URLs that need no server, and sheets of them as PNG, strips under each
other with a title before each."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GAP = 1  # pixels between the pictures of a strip
STRIP_INCHES = 0.72
COLUMNS = 10

Tile = tuple[npt.NDArray[np.uint8], str, bool]
"""A picture (3, h, w) or (1, h, w), what stands below it, and whether that is bold."""
Strip = str | tuple[str, list[Tile]]
"""A heading; or pictures and the title before them; or, without pictures, a line of text."""


def eight_bits(values: Tensor) -> npt.NDArray[np.uint8]:
    """[0, 1] as 0 .. 255, rounded; black where it is NaN."""
    levels = (values.nan_to_num(nan=0.0).clamp(0, 1) * 255).round()
    return np.asarray(levels.to(torch.uint8).cpu().numpy())


def data_uri(picture: npt.NDArray[np.uint8]) -> str:
    """A (3, h, w) picture, or a grey (1, h, w), as a PNG inside a URL."""
    return _url(png_bytes(picture), "png")


def png_bytes(picture: npt.NDArray[np.uint8]) -> bytes:
    """A (3, h, w) picture, or a grey (1, h, w), in colours."""
    rgb = np.broadcast_to(picture, (3, *picture.shape[1:]))
    return _encoded(rgb.transpose(1, 2, 0), "png")


def strips(rows: Sequence[npt.NDArray[np.uint8]], *, most_bytes: int) -> tuple[list[str], bool]:
    """(URLs, whether they are exact): each (k, 3, h, w) of `rows` as one picture, side by side with
    transparent gaps: PNG if all fit into `most_bytes` of text, else exact WebP if those do, else
    WebP of quality 90."""
    images = []
    for row in rows:
        k, _channels, height, width = row.shape
        tiles = np.zeros((height, k, width + GAP, 4), np.uint8)
        tiles[:, :, :width, :3], tiles[:, :, :width, 3] = row.transpose(2, 0, 3, 1), 255
        images.append(tiles.reshape(height, -1, 4)[:, : k * (width + GAP) - GAP])
    for kind, lossless in (("png", True), ("webp", True), ("webp", False)):
        urls = [_url(_encoded(image, kind, lossless=lossless), kind) for image in images]
        if sum(len(url) for url in urls) <= most_bytes:
            break
    return urls, lossless


def _encoded(image: npt.NDArray[np.uint8], kind: str, *, lossless: bool = True) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    webp: dict[str, Any] = {"lossless": lossless, "quality": 75 if lossless else 90, "method": 4}
    how = webp if kind == "webp" else {"optimize": True}
    Image.fromarray(np.ascontiguousarray(image)).save(file, kind, **how)
    return file.getvalue()


def _url(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


def wrapped(rows: Sequence[tuple[str, list[Tile]]], columns: int = COLUMNS) -> Iterator[Strip]:
    """Strips of rows of pictures that belong under each other, so many of each at a time."""
    for first in range(0, max((len(tiles) for _title, tiles in rows), default=0), columns):
        yield from ((title, tiles[first : first + columns]) for title, tiles in rows)


def strips_sheet(
    strips: Sequence[Strip],
    *,
    columns: int,
    labels: float = 1.0,
    tile_inches: float = STRIP_INCHES,
    at_edge: bool = False,
) -> bytes:
    """PNG of strips below each other, of at most `columns` pictures each. `labels`: the width of
    the titles before pictures, in tiles; `at_edge`: headings begin at the sheet's edge, not at the
    first picture."""
    from matplotlib.figure import Figure

    heights = [
        0.42 if isinstance(strip, str)
        else 1.0 + 0.26 * any(text for _picture, text, _bold in strip[1]) if strip[1]
        else 0.27
        for strip in strips
    ]  # fmt: skip
    width = columns + labels + 0.1
    size = (tile_inches * width, tile_inches * sum(heights) + 0.12)
    start = (0.1 - labels) / (0.995 * width - labels) if at_edge else 0.0  # in the axes' units
    figure = Figure(figsize=size, dpi=160)
    grid = figure.add_gridspec(
        len(strips), columns, height_ratios=heights, left=labels / width, right=0.995,
        top=1 - 0.03 / size[1], bottom=0.06 / size[1], wspace=0.06, hspace=0.0,
    )  # fmt: skip
    for row, strip in enumerate(strips):
        title, tiles = (strip, []) if isinstance(strip, str) else strip
        if not tiles:
            axes = figure.add_subplot(grid[row, :])
            axes.set_axis_off()
            axes.text(start, 0.3, title, transform=axes.transAxes, fontsize=7.5,
                      fontweight="bold" if isinstance(strip, str) else "normal")  # fmt: skip
        for column, (picture, text, bold) in enumerate(tiles):
            axes = figure.add_subplot(grid[row, column])
            axes.set_axis_off()
            rgb = np.broadcast_to(picture, (3, *picture.shape[1:]))  # grey in three channels
            axes.imshow(rgb.transpose(1, 2, 0), interpolation="nearest")
            axes.set_anchor("N")
            if text:
                axes.text(0.5, -0.05, text, transform=axes.transAxes, ha="center", va="top",
                          fontsize=6, fontweight="bold" if bold else "normal")  # fmt: skip
            if column == 0:
                axes.text(-0.12, 0.5, title, transform=axes.transAxes, ha="right", va="center",
                          fontsize=6.5)  # fmt: skip
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names may be in any script
        figure.savefig(content, format="png", facecolor="white", metadata={"Software": None})
    return content.getvalue()
