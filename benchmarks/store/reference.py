"""Pairs in plain zarr, as somebody with no other wish would write and read them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import ZstdCodec

from benchmarks.store.sample import Columns
from storage.pairs.dataset import Dataset
from storage.pairs.layout import CHUNK_ROWS
from storage.pairs.receipts import PARTS_FOLDER
from storage.pairs.shards import LEVEL, shard_rows

STREAMED = (
    "pairs/reconstruction",
    "pairs/scale",
    "pairs/target_row",
    "pairs/iteration",
    "targets/image",
    "targets/augment",
)
"""What a training example is made of, as far as it has a row per pair or target."""
ROWS_AT_ONCE = (CHUNK_ROWS, 4 * CHUNK_ROWS, 16 * CHUNK_ROWS, 1 << 40)
"""How many rows a plain read asks zarr for; the fastest is the reference."""


Arrays = dict[str, zarr.Array[Any]]


def plain_write(path: Path, columns: Columns) -> None:
    """A new group of the arrays, in the store's own codec, chunks and shards."""
    group = zarr.create_group(path, zarr_format=3)
    for name, values in columns.items():
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=(CHUNK_ROWS, *values.shape[1:]),
            shards=(shard_rows(len(values)), *values.shape[1:]),
            compressors=ZstdCodec(level=LEVEL, checksum=True),
        )
        array[...] = values


def open_plain(dataset: Dataset) -> list[Arrays]:
    """The arrays of `STREAMED` of every part, opened by zarr."""
    folders = [Path(dataset.root, PARTS_FOLDER, receipt.group) for receipt in dataset.receipts]
    return [{name: zarr.open_array(f / name, mode="r") for name in STREAMED} for f in folders]


def plain_read(parts: list[Arrays], rows_at_once: int) -> None:
    """Everything once, in order."""
    for arrays in parts:
        for array in arrays.values():
            for start in range(0, array.shape[0], rows_at_once):
                array[start : start + rows_at_once]


def fastest_plain_read(parts: list[Arrays]) -> int:
    """The entry of `ROWS_AT_ONCE` that reads everything in the shortest time here."""

    def seconds(rows_at_once: int) -> float:
        start = time.perf_counter()
        plain_read(parts, rows_at_once)
        return time.perf_counter() - start

    seconds(CHUNK_ROWS)
    return min(ROWS_AT_ONCE, key=seconds)


def single_rows(parts: list[Arrays], n_rows: int) -> None:
    """The reconstruction and the target of random pairs, one after another, by zarr."""
    rng = np.random.default_rng(0)
    for _ in range(n_rows):
        arrays = parts[rng.integers(len(parts))]
        row = int(rng.integers(arrays["pairs/reconstruction"].shape[0]))
        arrays["pairs/reconstruction"][row]
        arrays["targets/image"][int(np.asarray(arrays["pairs/target_row"][row]))]
