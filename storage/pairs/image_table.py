"""Record of the images of a part, packed in its receipt: planning and balancing 60 million pairs
must not have to open their arrays."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numcodecs.zstd import Zstd

from storage.pairs.layout import MAX_IMAGE_ID, Columns
from storage.pairs.shards import content_size

_ROW_BYTES = 16
_HEADER_CHARS = 32
"""Of base64: more than the header of a zstd frame."""


@dataclass(frozen=True, eq=False)
class ImageTable:
    """Record of the distinct images among a part's targets, int64 (n,) each, ids ascending.
    `n_runs`: runs that trained on the image; `n_back`: those of them in which a confident pair of
    it came back; `n_pairs`: confident pairs."""

    image_ids: npt.NDArray[np.int64]
    n_runs: npt.NDArray[np.int64]
    n_back: npt.NDArray[np.int64]
    n_pairs: npt.NDArray[np.int64]


def image_table(columns: Columns) -> ImageTable:
    """Record of a part's images, from targets/image_id, targets/run_row, pairs/target_row,
    pairs/confident."""
    image_ids, position = np.unique(columns["targets/image_id"], return_inverse=True)
    confident = columns["pairs/target_row"][columns["pairs/confident"]]
    target_pairs = np.bincount(confident, minlength=len(position))
    n_images = len(image_ids)
    of_run = columns["targets/run_row"].astype(np.int64) * n_images + position
    trained, back = np.unique(of_run), np.unique(of_run[target_pairs > 0])
    return ImageTable(
        image_ids=image_ids.astype(np.int64),
        n_runs=np.bincount(trained % max(1, n_images), minlength=n_images),
        n_back=np.bincount(back % max(1, n_images), minlength=n_images),
        n_pairs=np.bincount(position[confident], minlength=n_images),
    )


def pack_images(table: ImageTable) -> str:
    """A table of images as text: base64 of zstd of four rows of little-endian int32, the first the
    differences of the ids (from 0)."""
    ids = np.diff(table.image_ids, prepend=0)
    rows = np.stack([ids, table.n_runs, table.n_back, table.n_pairs]).astype("<i4")
    return base64.b64encode(Zstd(level=1, checksum=True).encode(rows)).decode()


def unpack_images(packed: str, n_targets: int) -> ImageTable:
    """The inverse of `pack_images`; ValueError if it is no table of at most `n_targets` images."""
    frame = base64.b64decode(packed, validate=True)
    rows = np.zeros((4, _n_images(frame, n_targets)), "<i4")
    try:
        Zstd().decode(frame, rows.reshape(-1).view(np.uint8))
    except RuntimeError as error:
        raise ValueError(f"its images do not decode ({error})") from error
    ids, n_runs, n_back, n_pairs = rows.astype(np.int64)
    np.cumsum(ids, out=ids)
    if rows.min(initial=0) < 0 or (rows[0, 1:] == 0).any() or ids.max(initial=0) > MAX_IMAGE_ID:
        raise ValueError(f"its images are not numbered from 0 to {MAX_IMAGE_ID} at most, ascending")
    return ImageTable(ids, n_runs, n_back, n_pairs)


def count_pairs(columns: Columns, *, min_iteration: int) -> npt.NDArray[np.int64]:
    """Confident pairs, saved at `min_iteration` or later, of each distinct image of the targets;
    also needs pairs/iteration."""
    image_ids, position = np.unique(columns["targets/image_id"], return_inverse=True)
    counted = columns["pairs/confident"] & (columns["pairs/iteration"] >= min_iteration)
    return np.bincount(position[columns["pairs/target_row"][counted]], minlength=len(image_ids))


def check_packed(packed: str, n_targets: int) -> None:
    """Raises ValueError if a packed table says of itself that it is larger than a row for each of
    `n_targets` targets; unpacks nothing."""
    _n_images(base64.b64decode(packed[:_HEADER_CHARS], validate=True), n_targets)


def _n_images(frame: bytes, n_targets: int) -> int:
    size = content_size(frame)
    if size is None or size % _ROW_BYTES or size > _ROW_BYTES * n_targets:
        shown = "an unknown number of" if size is None else f"{size:,}"
        raise ValueError(
            f"its images are {shown} bytes, expected {_ROW_BYTES} for each image among "
            f"{n_targets:,} targets"
        )
    return size // _ROW_BYTES
