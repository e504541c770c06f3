"""Pairs on their way to other formats: which ones, joined with what belongs to them; and as tar
files that WebDataset streams.

An export is a copy for other tools; the store stays the original. It needs memory for a thousand
pairs, and for a file of a part while its checksum is compared. The same store and selection give
the same bytes. A tar has four files per pair, of the same name:

    pairs-000000.tar
        000012-00000345.original.png          the training image
        000012-00000345.picture.png           its reconstruction, scaled to fit [0, 1]
        000012-00000345.reconstruction.npy    the raw one, float32 (c, h, w)
        000012-00000345.json                  every number

Names are part and row in the store, so they sort as the store does. Owner, time and mode of every
entry are fixed.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from storage.pairs.dataset import Dataset
from storage.pairs.layout import CHUNK_ROWS, OFFSETS, OUTCOMES, OnPart

WINDOW_ROWS = 4 * CHUNK_ROWS
ROWS_PER_TAR = 10_000
ROWS_AT_ONCE = 1000

Array = npt.NDArray[Any]
Render = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32]], npt.NDArray[np.uint8]]
"""Pictures (n, c, h, w) of raw reconstructions (n, c, h, w) and the mean images of their runs."""

NUMBERS: Mapping[str, tuple[str, str]] = {
    "part": ("int32", "the part of the store it is from"),
    "row": ("int64", "its row in that part's table of pairs"),
    "run": ("int64", "number of the run: one victim and its attack"),
    "image_id": ("int32", "row of the original in the source split; an image has many pairs"),
    "label": ("int16", "class of the original in the task that the victim learned"),
    "augment": ("float32", "EDM's nine augmentation labels of the original; all 0: none"),
    "candidate": ("int32", "which of the attack's candidates"),
    "iteration": ("int32", "iteration of the attack at which it was saved"),
    "ssim_best": ("float32", "SSIM of `picture` to `original`"),
    "ssim_second": ("float32", "SSIM to the second most similar image of the run; -1: none"),
    "confident": ("bool", "at some saved iteration best > 0.4 and best - second >= 0.05"),
    "scale": ("float32", "`reconstruction` times this is the raw reconstruction"),
    "outcome": ("string", "how the run ended: " + ", ".join(OUTCOMES)),
    "train_loss": ("float32", "final loss of the victim"),
    "train_accuracy": ("float32", "of the victim on its own training images, 0 to 1"),
    "margin_min": ("float32", "smallest y phi(x) over the training images"),
    "attack_loss": ("float32", "the attack's objective at the end"),
    "kkt_residual": ("float32", "relative, after the attack; missing where it does not apply"),
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

    @property
    def keys(self) -> list[str]:
        """Names of the pairs, `000012-00000345`: part and row in the store."""
        parts, rows = self.numbers["part"], self.numbers["row"]
        return [f"{part:06d}-{row:08d}" for part, row in zip(parts, rows, strict=True)]

    def raw(self) -> npt.NDArray[np.float32]:
        x: npt.NDArray[np.float32] = self.reconstruction.astype(np.float32)
        x *= self.numbers["scale"][:, None, None, None]
        return x

    def __getitem__(self, rows: slice) -> Pairs:
        numbers = {name: values[rows] for name, values in self.numbers.items()}
        return Pairs(self.original[rows], self.picture[rows], self.reconstruction[rows], numbers)

    def __add__(self, more: Pairs) -> Pairs:
        return Pairs(
            np.concatenate([self.original, more.original]),
            np.concatenate([self.picture, more.picture]),
            np.concatenate([self.reconstruction, more.reconstruction]),
            {name: np.concatenate([v, more.numbers[name]]) for name, v in self.numbers.items()},
        )


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
        stored = pairs["reconstruction"]
        x = dataset.expand(stored, pairs["scale"])
        if offset := OFFSETS[dataset.encoding]:  # exact in float16 for 8-bit integers
            stored = (stored.astype(np.int16) - offset).astype(np.float16)
        yield Pairs(
            original=targets["targets/image"][target],
            picture=render(x, runs["runs/mean_image"][run]),
            reconstruction=stored,
            numbers={name: numbers[name] for name in NUMBERS},
        )


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A uint8 image (c, h, w), grey or RGB, as a PNG file."""
    content = io.BytesIO()
    grey = len(pixels) == 1
    Image.fromarray(pixels[0] if grey else pixels.transpose(1, 2, 0)).save(content, "png")
    return content.getvalue()


def in_files(
    batches: Iterable[Pairs], rows_per_file: int, ending: str
) -> Iterator[tuple[str, Iterator[Pairs]]]:
    """The pairs by the files that they go into, `pairs-000000.tar` and so on for the ending "tar",
    a thousand at a time, fewer at the end of a file."""

    def cut() -> Iterator[tuple[int, Pairs]]:
        n_given = 0
        rest: Pairs | None = None
        for pairs in itertools.chain(batches, [None]):
            if pairs is not None:
                rest = pairs if rest is None else rest + pairs
            while rest is not None and len(rest):
                size = min(ROWS_AT_ONCE, rows_per_file - n_given % rows_per_file)
                if pairs is not None and len(rest) < size:
                    break
                yield n_given // rows_per_file, rest[:size]
                n_given, rest = n_given + size, rest[size:]

    for number, numbered in itertools.groupby(cut(), key=lambda piece: piece[0]):
        yield f"pairs-{number:06d}.{ending}", (pairs for _number, pairs in numbered)


def write_tars(
    folder: Path, batches: Iterable[Pairs], *, rows_per_file: int = ROWS_PER_TAR
) -> dict[str, int]:
    """Writes `pairs-000000.tar` and so on into `folder`; their names and numbers of pairs."""
    written: dict[str, int] = {}
    for name, pieces in in_files(batches, rows_per_file, "tar"):
        with tarfile.open(folder / name, "x", format=tarfile.USTAR_FORMAT) as tar:
            for pairs in pieces:
                written[name] = written.get(name, 0) + len(pairs)
                x = pairs.raw()
                for i, key in enumerate(pairs.keys):
                    numbers = {n: _plain(values[i]) for n, values in pairs.numbers.items()}
                    raw = io.BytesIO()
                    np.lib.format.write_array(raw, x[i], version=(1, 0), allow_pickle=False)
                    files = {
                        "original.png": png(pairs.original[i]),
                        "picture.png": png(pairs.picture[i]),
                        "reconstruction.npy": raw.getvalue(),
                        "json": json.dumps(numbers, allow_nan=False).encode(),
                    }
                    for kind, content in files.items():
                        entry = tarfile.TarInfo(f"{key}.{kind}")
                        entry.size, entry.mode = len(content), 0o644
                        tar.addfile(entry, io.BytesIO(content))
    return written


def _plain(value: Any) -> Any:
    """A number, list or string for JSON; null where it is not finite, as JSON has no NaN."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, np.floating):
        short = float(f"{value:.9g}")  # the digits that tell float32 apart
        return short if math.isfinite(short) else None
    return value.item()
