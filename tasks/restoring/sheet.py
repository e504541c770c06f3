"""A picture of restorations: each input beside its mean, a few samples and their disagreement."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from storage.errors import shown

N_ROWS = 24
N_SAMPLES_SHOWN = 4
TILE, GAP, MARGIN, HEAD, TITLE = 96, 8, 20, 26, 66
NAME_WIDTH = 190
INK, FAINT, EDGE, PAPER = (24, 24, 28), (104, 104, 112), (208, 208, 214), (255, 255, 255)

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class SheetRow:
    """Tiles of one picture: uint8 pictures (3, h, w), and a disagreement (h, w)."""

    name: str
    given: Pixels
    mean: Pixels
    samples: tuple[Pixels, ...]
    disagreement: Pixels
    mean_disagreement: float


def restoration_sheet(
    rows: Iterable[SheetRow], *, n_rows: int, n_samples: int, title: str, note: str
) -> bytes:
    """PNG with one line for each of `n_rows` rows: input, mean, `n_samples` samples, disagreement.

    Without samples, of a restorer with one answer, a line has input and answer alone. Rows are
    taken one after the other, and their pictures are not kept.
    """
    heads = ["input", "restored"]
    if n_samples:
        heads = ["input", "mean", *(f"sample {k}" for k in range(n_samples)), "disagreement"]
    width = 2 * MARGIN + NAME_WIDTH + len(heads) * (TILE + GAP) - GAP
    top = MARGIN + TITLE + HEAD
    sheet = Image.new("RGB", (width, top + n_rows * (TILE + GAP) - GAP + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), _fitting(title, width - 2 * MARGIN, 20), INK, _font(20))
    draw.text((MARGIN, MARGIN + 32), _fitting(note, width - 2 * MARGIN, 13), FAINT, _font(13))
    left = MARGIN + NAME_WIDTH
    for c, head in enumerate(heads):
        middle = left + c * (TILE + GAP) + TILE // 2
        draw.text((middle, top - 8), head, INK, _font(12), anchor="ms")
    for r, row in enumerate(rows):
        y = top + r * (TILE + GAP)
        draw.text((MARGIN, y + TILE // 2), _fitting(shown(row.name), NAME_WIDTH - GAP, 12), INK,
                  _font(12), anchor="lm")  # fmt: skip
        facts = row_facts(row, disagreement=n_samples > 0)
        for k, said in enumerate(facts, 1):
            draw.text((MARGIN, y + TILE // 2 + 17 * k), said, FAINT, _font(12), anchor="lm")
        tiles = [row.given, row.mean]
        if n_samples:
            grey = np.repeat(row.disagreement[None], 3, axis=0)
            tiles += [*row.samples, grey]
        for c, pixels in enumerate(tiles):
            sheet.paste(_tile(pixels), (left + c * (TILE + GAP), y))
    content = io.BytesIO()
    sheet.save(content, "png")
    return content.getvalue()


def row_facts(row: SheetRow, *, disagreement: bool) -> list[str]:
    """Line below a picture's name: its size, with a word if it is more than a tile shows."""
    height, width = row.given.shape[1:]
    reduced = ", shown smaller" if max(height, width) > TILE else ""
    facts = [f"{height} x {width}{reduced}"]
    return [*facts, f"disagreement {row.mean_disagreement:.4f}"] if disagreement else facts


def _tile(pixels: Pixels) -> Image.Image:
    """`pixels` (3, h, w) within a square of TILE: whole pixels enlarged, areas averaged."""
    picture = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    longer = max(picture.size)
    shown = (max(1, picture.width * TILE // longer), max(1, picture.height * TILE // longer))
    resample = Image.Resampling.NEAREST if longer <= TILE else Image.Resampling.BOX
    tile = Image.new("RGB", (TILE, TILE), PAPER)
    corner = ((TILE - shown[0]) // 2, (TILE - shown[1]) // 2)
    tile.paste(picture.resize(shown, resample), corner)
    ImageDraw.Draw(tile).rectangle((0, 0, TILE - 1, TILE - 1), outline=EDGE)
    return tile


def _fitting(text: str, width: int, size: int) -> str:
    """`text`, or its end after an ellipsis where it is wider than `width` pixels."""
    if _font(size).getlength(text) <= width:
        return text
    while text and _font(size).getlength("…" + text) > width:
        text = text[1:]
    return "…" + text


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """The typeface of the other pictures: the one that matplotlib brings along."""
    import matplotlib

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(fonts / "DejaVuSans.ttf", size)
