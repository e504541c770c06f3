"""A picture of a store: originals over what came back of them, by saved iteration, with SSIM.

Columns are pairs chosen by a rule that the picture states. A pixel is a square of whole pixels.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont

from recon_core.matching import fit_to_range
from storage.pairs.dataset import Dataset

OnPart = Callable[[int, int], None]

N_PAIRS = 12
PARTS_PER_IMAGE = 16
"""Parts in which the best pair of an image is looked for; a large store has it in hundreds."""

TILE_SIDE, GAP, SCORE_HEIGHT, MARGIN = 96, 10, 22, 20
LABEL_WIDTH, HEAD_HEIGHT, LINE_HEIGHT, TITLE_HEIGHT = 118, 24, 21, 38
MIN_WIDTH = 700
INK, FAINT, EMPTY, PAPER = (24, 24, 28), (104, 104, 112), (234, 234, 238), (255, 255, 255)


@dataclass(frozen=True)
class Shown:
    """A candidate of an attack whose pairs are shown: where it is, and its best SSIM."""

    part: int
    run_row: int
    candidate: int
    image_id: int
    run: int
    ssim: float


@dataclass(frozen=True)
class PairSheet:
    """The picture: `columns` are candidates, `iterations` the rows below the originals.

    `corners[r][c]` is the left upper corner (x, y) of a tile, row 0 being the originals; tiles have
    `scale` pixels of the sheet per pixel of the image.
    """

    png: bytes
    caption: str
    columns: tuple[Shown, ...]
    iterations: tuple[int, ...]
    corners: tuple[tuple[tuple[int, int], ...], ...]
    scale: int


@dataclass(frozen=True)
class _Tile:
    picture: npt.NDArray[np.uint8]
    ssim: float


def pair_sheet(
    dataset: Dataset,
    *,
    n: int = N_PAIRS,
    seed: int = 0,
    image_id: int | None = None,
    on_part: OnPart = lambda _done, _n: None,
) -> PairSheet:
    """The best confident pair of each of `n` images drawn at random, or the `n` best of one image.

    Raises ValueError for `n` or `seed` out of range, and if there is no confident pair to show.
    """
    if n < 1 or seed < 0:
        raise ValueError(f"--n {n} must be 1 or more, --seed {seed} 0 or more")
    images, n_covered = _images(dataset, n, seed, image_id)
    parts, all_parts = _parts(dataset, images, seed)
    found: list[Shown] = []
    on_part(0, len(parts))
    for done, (part, wanted) in enumerate(sorted(parts.items()), start=1):
        found += _confident(dataset, part, wanted)
        on_part(done, len(parts))
    found.sort(key=lambda shown: (-shown.ssim, shown.part, shown.run_row, shown.candidate))
    if image_id is None:
        first = {shown.image_id: shown for shown in reversed(found)}
        columns = tuple(shown for shown in found if first[shown.image_id] is shown)
    else:
        columns = tuple(found[:n])
    caption = _caption(columns, n_covered, seed, image_id, all_parts)
    return _drawn(dataset, columns, caption, head="image" if image_id is None else "run")


def _images(
    dataset: Dataset, n: int, seed: int, image_id: int | None
) -> tuple[npt.NDArray[np.int64], int]:
    """The images that are shown, and how many they were drawn from."""
    ids, counts = dataset.image_counts()
    covered = ids[counts > 0]
    if image_id is None:
        if not len(covered):
            raise ValueError(
                f"{dataset.root} has no confident pair to show ({len(dataset.receipts)} parts, "
                f"{dataset.n_pairs} pairs); generate more, or look at its outcomes with info"
            )
        rng = np.random.default_rng(seed)
        return rng.permutation(covered)[:n], len(covered)
    if image_id not in covered:
        why = "has no confident pair" if image_id in ids else "is no image that a run trained on"
        some = ", ".join(map(str, covered[:5]))
        raise ValueError(f"--image-id {image_id} {why} here; images that came back: {some}, ...")
    return np.array([image_id]), len(covered)


def _parts(
    dataset: Dataset, images: npt.NDArray[np.int64], seed: int
) -> tuple[dict[int, list[int]], bool]:
    """In which part which images are looked for, and whether that is every part they are in."""
    holders: dict[int, list[int]] = {image: [] for image in images.tolist()}
    for receipt in dataset.receipts:
        table = receipt.image_table()
        present = table.image_ids[table.n_pairs > 0]
        for image in np.intersect1d(images, present).tolist():
            holders[image].append(receipt.part)
    rng = np.random.default_rng((seed, 1))
    parts: dict[int, list[int]] = {}
    for image, among in holders.items():
        for part in rng.permutation(among)[:PARTS_PER_IMAGE].tolist():
            parts.setdefault(part, []).append(image)
    return parts, all(len(among) <= PARTS_PER_IMAGE for among in holders.values())


def _confident(dataset: Dataset, part: int, images: list[int]) -> Iterator[Shown]:
    """The confident candidates of a part whose targets are `images`, with their best SSIM."""
    names = ("target_row", "run_row", "candidate", "ssim_best", "confident")
    columns = dataset.read(part, [f"pairs/{name}" for name in names])
    tables = dataset.read(part, ["targets/image_id", "runs/run"])
    image = tables["targets/image_id"][columns["pairs/target_row"]]
    rows = np.flatnonzero(columns["pairs/confident"] & np.isin(image, images))
    rows = rows[np.argsort(-columns["pairs/ssim_best"][rows], kind="stable")]
    seen: set[tuple[int, int]] = set()
    for row in rows.tolist():
        run_row = int(columns["pairs/run_row"][row])
        candidate = int(columns["pairs/candidate"][row])
        if (run_row, candidate) not in seen:
            seen.add((run_row, candidate))
            yield Shown(
                part=part,
                run_row=run_row,
                candidate=candidate,
                image_id=int(image[row]),
                run=int(tables["runs/run"][run_row]),
                ssim=float(columns["pairs/ssim_best"][row]),
            )


def _caption(
    columns: tuple[Shown, ...], n_covered: int, seed: int, image_id: int | None, all_parts: bool
) -> str:
    n = len(columns)
    if image_id is None:
        said = (
            f"The best confident pair of each of {n} images, drawn at random (seed {seed}) from "
            f"the {n_covered:,} images with a confident pair"
        )
    else:
        said = f"The {n} best confident pairs of image {image_id}, each of another candidate"
    if not all_parts:
        said += f", among {PARTS_PER_IMAGE} of the parts that have them"
    return said + "; the best first."


def _drawn(dataset: Dataset, columns: tuple[Shown, ...], caption: str, *, head: str) -> PairSheet:
    originals, tiles = _pictures(dataset, columns)
    is_once = all(len(column) == 1 for column in tiles)
    if is_once:  # whenever each was: they share a row
        latest = max(iteration for column in tiles for iteration in column)
        tiles = [dict.fromkeys([latest], *column.values()) for column in tiles]
    iterations = tuple(sorted({iteration for column in tiles for iteration in column}))
    height, width = originals[0].shape[1:]
    scale = max(1, TILE_SIDE // max(height, width))
    step_x, step_y = width * scale + GAP, height * scale + SCORE_HEIGHT
    full_width = max(MIN_WIDTH, LABEL_WIDTH + len(columns) * step_x - GAP + 2 * MARGIN)
    lines = [
        *_wrapped(caption, full_width - 2 * MARGIN),
        *_wrapped(
            "Rows: the same candidate of the attack at each saved iteration, scaled as far as a "
            "picture's range allows. Below it: SSIM with the original, bold where it is the best.",
            full_width - 2 * MARGIN,
        ),
    ]
    top = MARGIN + TITLE_HEIGHT + LINE_HEIGHT * len(lines) + HEAD_HEIGHT + GAP
    corners = tuple(
        tuple(
            (MARGIN + LABEL_WIDTH + c * step_x, top + r * step_y - (SCORE_HEIGHT - GAP) * (r > 0))
            for c in range(len(columns))
        )
        for r in range(len(iterations) + 1)
    )
    full_height = corners[-1][0][1] + step_y + MARGIN - GAP
    sheet = Image.new("RGB", (full_width, full_height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), "Originals over their reconstructions", INK, _font(22, True))
    for i, line in enumerate(lines):
        y = MARGIN + TITLE_HEIGHT + i * LINE_HEIGHT
        draw.text((MARGIN, y), line, FAINT, _font(14))
    titles = ["original", *(f"iteration {iteration:,}" for iteration in iterations)]
    if is_once:
        titles = ["original", "reconstruction"]
    for title, row in zip(titles, corners, strict=True):
        middle = row[0][1] + height * scale // 2
        draw.text((row[0][0] - 12, middle), title, INK, _font(13), anchor="rm")
    for c, (shown, original, column) in enumerate(zip(columns, originals, tiles, strict=True)):
        x, y = corners[0][c]
        name = f"{head} {shown.image_id if head == 'image' else shown.run}"
        draw.text((x + width * scale // 2, y - 6), name, FAINT, _font(12), anchor="ms")
        _paste(sheet, original, (x, y), scale)
        best = max(tile.ssim for tile in column.values())
        for r, iteration in enumerate(iterations, start=1):
            x, y = corners[r][c]
            if iteration not in column:
                draw.rectangle((x, y, x + width * scale - 1, y + height * scale - 1), EMPTY)
                continue
            tile = column[iteration]
            _paste(sheet, tile.picture, (x, y), scale)
            under = (x + width * scale // 2, y + height * scale + 3)
            font = _font(13, tile.ssim == best)
            draw.text(under, f"{tile.ssim:.2f}", INK, font, anchor="ma")
    content = io.BytesIO()
    sheet.save(content, "png")
    return PairSheet(content.getvalue(), caption, columns, iterations, corners, scale)


def _pictures(
    dataset: Dataset, columns: tuple[Shown, ...]
) -> tuple[list[npt.NDArray[np.uint8]], list[dict[int, _Tile]]]:
    """The original of each column, and its tiles by iteration."""
    ends = itertools.accumulate(receipt.n_pairs for receipt in dataset.receipts)
    firsts = {r.part: end - r.n_pairs for r, end in zip(dataset.receipts, ends, strict=True)}
    originals, tiles = [], []
    for shown in columns:
        names = ["run_row", "candidate", "iteration", "ssim_best"]
        found = dataset.read(shown.part, [f"pairs/{name}" for name in names])
        run_row, candidate, iteration, ssim = (found[f"pairs/{name}"] for name in names)
        rows = np.flatnonzero((run_row == shown.run_row) & (candidate == shown.candidate))
        taken = dataset.take(
            ["pairs/reconstruction", "targets/image", "runs/mean_image"],
            firsts[shown.part] + rows,
        )
        pictures = fit_to_range(
            torch.from_numpy(taken["pairs/reconstruction"]),
            torch.from_numpy(taken["runs/mean_image"]),
        )
        as_bytes = (pictures * 255).round().to(torch.uint8).numpy()
        originals.append(taken["targets/image"][0])
        tiles.append(
            {
                int(iteration[row]): _Tile(picture, float(ssim[row]))
                for row, picture in zip(rows.tolist(), as_bytes, strict=True)
            }
        )
    return originals, tiles


def _paste(
    sheet: Image.Image, pixels: npt.NDArray[np.uint8], corner: tuple[int, int], scale: int
) -> None:
    """`pixels` (c, h, w), each as a square of `scale` x `scale`."""
    large = np.repeat(np.repeat(pixels.transpose(1, 2, 0), scale, axis=0), scale, axis=1)
    rgb = np.ascontiguousarray(np.broadcast_to(large, (*large.shape[:2], 3)))
    sheet.paste(Image.fromarray(rgb), corner)


def _wrapped(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _font(14).getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


@cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """The typeface of the other pictures: the one that matplotlib brings along."""
    import matplotlib

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(fonts / ("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"), size)
