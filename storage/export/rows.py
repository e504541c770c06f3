"""Pairs on their way to other formats: which ones, joined with what belongs to them.

An export is a copy for other tools; the store stays the original. It needs memory for a thousand
pairs, and for a file of a part while its checksum is compared. The same store and selection give
the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from storage.pairs.dataset import Dataset
from storage.pairs.layout import (
    CHUNK_ROWS,
    OFFSETS,
    OUTCOMES,
    Encoding,
    OnPart,
)

WINDOW_ROWS = 4 * CHUNK_ROWS

Array = npt.NDArray[Any]
Render = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32]], npt.NDArray[np.uint8]]
"""Pictures (n, c, h, w) of raw reconstructions (n, c, h, w) and the mean images of their runs."""

NUMBERS: Mapping[str, tuple[str, str]] = {
    "part": ("int32", "the part of the store it is from"),
    "row": ("int64", "its row in that part's table of pairs"),
    "run": ("int64", "number of the run: one victim and its attack"),
    "image_id": (
        "int32",
        "row of the original in the source split; not unique, an image has many pairs",
    ),
    "label": ("int16", "class of the original in the task that the victim learned"),
    "augment": (
        "float32",
        "augmentation parameters of the original (EDM's nine labels); all 0: none",
    ),
    "candidate": ("int32", "which of the attack's candidates"),
    "iteration": ("int32", "iteration of the attack at which it was saved"),
    "ssim_best": ("float32", "SSIM of `picture` to `original`"),
    "ssim_second": (
        "float32",
        "SSIM to the second most similar image of the run; -1 if there is none",
    ),
    "confident": ("bool", "at some saved iteration best > 0.4 and best - second >= 0.05"),
    "scale": ("float32", "`reconstruction` times this is the raw reconstruction"),
    "outcome": ("string", "how the run ended: " + ", ".join(OUTCOMES)),
    "train_loss": ("float32", "final loss of the victim"),
    "train_accuracy": ("float32", "of the victim on its own training images, 0 to 1"),
    "margin_min": ("float32", "smallest y phi(x) over the training images"),
    "attack_loss": ("float32", "the attack's objective at the end"),
    "kkt_residual": (
        "float32",
        "relative, at the end of the attack; missing where it does not apply",
    ),
}
"""Arrow's type of the numbers of every pair, and what they mean."""

_OF_PAIR = ("candidate", "iteration", "ssim_best", "ssim_second", "confident", "scale")
_OF_TARGET = ("image_id", "label", "augment")
_OF_RUN = ("run", "train_loss", "train_accuracy", "margin_min", "attack_loss", "kkt_residual")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selection of exported pairs: confident ones (or all), saved at `min_iteration` or later, and
    of those the first `limit` in the order of the store (None: all)."""

    confident_only: bool = True
    min_iteration: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.min_iteration < 0 or (self.limit is not None and self.limit < 1):
            raise ValueError(
                f"min_iteration={self.min_iteration} must be 0 or more, limit={self.limit} 1 or "
                "more (leave it out for all pairs)"
            )


@dataclass(frozen=True)
class Pairs:
    """Some pairs of one part, with what belongs to them; rows along axis 0. `original` and
    `picture` are uint8 (n, c, h, w). `reconstruction` (float16 or float32) times `numbers["scale"]`
    is the raw one, exactly as in the store. `numbers` has the names of `NUMBERS`."""

    original: npt.NDArray[np.uint8]
    picture: npt.NDArray[np.uint8]
    reconstruction: Array
    numbers: dict[str, Array]

    def __len__(self) -> int:
        return len(self.original)

    def raw(self) -> npt.NDArray[np.float32]:
        x: npt.NDArray[np.float32] = self.reconstruction.astype(np.float32)
        x *= self.numbers["scale"][:, None, None, None]
        return x

    def __getitem__(self, rows: slice) -> Pairs:
        numbers = {name: values[rows] for name, values in self.numbers.items()}
        return Pairs(self.original[rows], self.picture[rows], self.reconstruction[rows], numbers)


def selected_pairs(
    dataset: Dataset,
    selection: Selection,
    *,
    render: Render,
    on_part: OnPart = lambda _done, _n: None,
) -> Iterator[Pairs]:
    """The selected pairs in the order of the store, a thousand at a time. Every file is compared
    with its checksum before it is used. Raises CorruptPartError where the stored bytes are not what
    was written."""
    dataset = dataset.with_whole_files()
    left = dataset.n_pairs if selection.limit is None else selection.limit
    n_parts = len(dataset.receipts)
    on_part(0, n_parts)
    for done, receipt in enumerate(dataset.receipts, start=1):
        for pairs in _of_part(dataset, receipt.part, selection, render):
            yield pairs[: min(left, len(pairs))]
            left -= len(pairs)
            if left <= 0:
                on_part(n_parts, n_parts)
                return
        on_part(done, n_parts)


def _of_part(dataset: Dataset, part: int, selection: Selection, render: Render) -> Iterator[Pairs]:
    columns = dataset.read(part, ["pairs/confident", "pairs/iteration"])
    wanted = columns["pairs/iteration"] >= selection.min_iteration
    if selection.confident_only:
        wanted &= columns["pairs/confident"]
    chosen = np.flatnonzero(wanted)
    if not len(chosen):
        return
    targets = dataset.read(part, [f"targets/{name}" for name in ("image", *_OF_TARGET)])
    runs = dataset.read(part, [f"runs/{name}" for name in ("mean_image", "outcome", *_OF_RUN)])
    for window in range(0, len(wanted), WINDOW_ROWS):
        first, last = np.searchsorted(chosen, [window, window + WINDOW_ROWS])
        if last == first:
            continue
        rows = chosen[first:last]
        pairs = {
            name: dataset.stored(part, f"pairs/{name}", slice(window, int(rows[-1]) + 1))[
                rows - window
            ]
            for name in ("reconstruction", "target_row", "run_row", *_OF_PAIR)
        }
        target, run = pairs["target_row"], pairs["run_row"]
        numbers = {
            "part": np.full(len(rows), part, np.int32),
            "row": rows.astype(np.int64),
            "outcome": np.array(OUTCOMES)[runs["runs/outcome"][run]],
            **{name: pairs[name] for name in _OF_PAIR},
            **{name: targets[f"targets/{name}"][target] for name in _OF_TARGET},
            **{name: runs[f"runs/{name}"][run] for name in _OF_RUN},
        }
        x = dataset.expand(pairs["reconstruction"], pairs["scale"])
        yield Pairs(
            original=targets["targets/image"][target],
            picture=render(x, runs["runs/mean_image"][run]),
            reconstruction=_without_offset(pairs["reconstruction"], dataset.encoding),
            numbers={name: numbers[name] for name in NUMBERS},
        )


def _without_offset(stored: Array, encoding: Encoding) -> Array:
    """What times the scale is the raw reconstruction; exact in float16 for 8-bit integers."""
    if OFFSETS[encoding]:
        return (stored.astype(np.int16) - OFFSETS[encoding]).astype(np.float16)
    return stored


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A uint8 image (c, h, w), grey or RGB, as a PNG file."""
    content = io.BytesIO()
    grey = len(pixels) == 1
    Image.fromarray(pixels[0] if grey else pixels.transpose(1, 2, 0)).save(content, "png")
    return content.getvalue()
