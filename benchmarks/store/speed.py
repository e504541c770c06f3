"""The pair store against plain zarr: writing, reading for training, single rows, verifying.

Both sides use the codec of the store (Zstd level 1 with checksums in chunks of 256 rows, sharded),
the same device and the same process, and agree on the values before they are timed. What the store
does besides is timed with it: conversion from float32, hashes, fsync; normalisation, shuffling,
collation. Everything that is read was written a moment before and is in the page cache. Set
TMPDIR to choose the device.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import zarr
from zarr.codecs import ZstdCodec

from benchmarks.record import Measurement, compared, main, measured
from benchmarks.store.sample import (
    BATCH,
    PROVENANCE,
    QUICK,
    Array,
    Columns,
    Sizes,
    sample_columns,
    sample_store,
    training_examples,
)
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import CHUNK_ROWS, compress_reconstruction
from storage.pairs.parts import write_part
from storage.pairs.receipts import PARTS_FOLDER
from storage.pairs.shards import LEVEL, shard_rows

_line = partial(measured, "store")

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


def plain_read(parts: list[Arrays], rows_at_once: int) -> None:
    """Everything once, in order."""
    for arrays in parts:
        for array in arrays.values():
            for start in range(0, array.shape[0], rows_at_once):
                array[start : start + rows_at_once]


def writing(folder: Path, sizes: Sizes) -> Iterator[Measurement]:
    """A part against one zarr array of its reconstructions, and against all its arrays."""
    columns = sample_columns(0, sizes)
    create_or_open(folder / "store", {"benchmark": "store"})
    parts, names = itertools.count(), itertools.count()
    half, scale = compress_reconstruction(columns["pairs/reconstruction"])
    stored = columns | {"pairs/reconstruction": half, "pairs/scale": scale}

    def ours() -> None:
        write_part(folder / "store", next(parts), columns, provenance=PROVENANCE)

    def one_array() -> None:
        plain_write(folder / f"plain-{next(names)}.zarr", {"pairs/reconstruction": half})

    def all_arrays() -> None:
        plain_write(folder / f"plain-{next(names)}.zarr", stored)

    ours()
    all_arrays()
    dataset, plain = Dataset(folder / "store"), zarr.open_group(folder / "plain-0.zarr", mode="r")
    for name in STREAMED:
        require_equal(name, dataset.stored(0, name), np.asarray(plain[name]))
    n = sizes.pairs_per_part
    what = f"writing a part, per pair: {n} pairs, {len(columns['targets/image'])} images, 3x32x32"
    does = "float32 to float16, all columns, SHA-256, CRC-32C, fsync, receipt"
    seconds: dict[Callable[[], None], list[float]] = {ours: [], one_array: [], all_arrays: []}
    shares = []
    for _ in range(sizes.repeats):
        for action, taken in seconds.items():
            os.sync()  # nobody pays for what another one left to be written
            with timed_fsync() as intervals:
                start = time.perf_counter()
                action()
                taken.append(time.perf_counter() - start)
            if action is ours:
                synced, reached = 0.0, -np.inf
                for first, last in sorted(intervals):  # the length of their union
                    synced += max(0.0, last - max(first, reached))
                    reached = max(reached, last)
                shares.append(100 * synced / taken[-1])
    for reference, theirs in (
        ("zarr: the reconstructions only, float16 given, same codec, no fsync", one_array),
        ("zarr: the same arrays, float16 given, same codec, no fsync", all_arrays),
    ):
        yield _line(
            f"{what} ({does})",
            statistics.median(seconds[ours]) / n,
            "s",
            repeats=sizes.repeats,
            reference=reference,
            reference_value=statistics.median(seconds[theirs]) / n,
        )
    yield _line(
        "of that time, at least one file is being synced",
        statistics.median(shares),
        "%",
        repeats=sizes.repeats,
    )


def reading(dataset: Dataset, sizes: Sizes) -> Iterator[Measurement]:
    """An epoch of training batches against plain reads of the arrays it is made of."""
    folders = [Path(dataset.root, PARTS_FOLDER, receipt.group) for receipt in dataset.receipts]
    parts = [{name: zarr.open_array(f / name, mode="r") for name in STREAMED} for f in folders]
    for receipt, arrays in zip(dataset.receipts, parts, strict=True):
        for name, array in arrays.items():
            require_equal(name, dataset.stored(receipt.part, name), np.asarray(array[:]))
    epochs = itertools.count()

    def ours() -> int:
        feed = training_examples(dataset, sizes)
        feed.set_epoch(next(epochs))
        return sum(len(batch["condition"]) for batch in feed)

    n_examples, n_pairs = ours(), dataset.n_pairs

    def seconds(rows_at_once: int) -> float:
        start = time.perf_counter()
        plain_read(parts, rows_at_once)
        return time.perf_counter() - start

    def single_rows() -> None:
        """The reconstruction and the target of random pairs, one after another."""
        rng = np.random.default_rng(0)
        for _ in range(sizes.n_single_rows):
            arrays = parts[rng.integers(len(parts))]
            row = int(rng.integers(arrays["pairs/reconstruction"].shape[0]))
            arrays["pairs/reconstruction"][row]
            arrays["targets/image"][int(np.asarray(arrays["pairs/target_row"][row]))]

    seconds(CHUNK_ROWS)
    rows_at_once = min(ROWS_AT_ONCE, key=seconds)
    asked = "a whole array" if rows_at_once == ROWS_AT_ONCE[-1] else f"{rows_at_once} rows"
    plain = f"zarr: each array of a part in order, {asked} at a time (the fastest of four sizes)"
    does = f"shuffled, normalised, collated batches of {BATCH}, 10 % noise examples"
    timing = compared(
        "store",
        f"an epoch of the balanced stream, per stored pair: {n_pairs} pairs, {does}",
        ours=ours,
        reference=plain,
        theirs=lambda: plain_read(parts, rows_at_once),
        repeats=sizes.repeats,
        per_call=n_pairs,
    )
    yield timing
    per_example = timing.value * n_pairs / n_examples
    assert timing.reference_value is not None
    yield _line(
        f"the same, per example: an epoch has {n_examples}",
        per_example,
        "s",
        repeats=sizes.repeats,
        reference=f"{plain}, per stored pair",
        reference_value=timing.reference_value,
    )
    yield _line("examples per second", 1 / per_example, "examples/s", repeats=sizes.repeats)
    yield compared(
        "store",
        "an example of the balanced stream",
        ours=ours,
        reference=f"zarr: a[i] of reconstruction and target of {sizes.n_single_rows} random pairs",
        theirs=single_rows,
        repeats=sizes.repeats,
        per_call=n_examples,
        reference_per_call=sizes.n_single_rows,
    )
    rows = np.random.default_rng(1).integers(0, n_pairs, BATCH)
    few = rows[: sizes.n_single_rows]
    offsets = np.cumsum([0, *(receipt.n_pairs for receipt in dataset.receipts)])

    def by_zarr() -> Array:
        found = []
        for row in few.tolist():
            part = int(offsets.searchsorted(row, side="right")) - 1
            arrays, at = parts[part], row - int(offsets[part])
            stored = np.asarray(arrays["pairs/reconstruction"][at], np.float32)
            found.append(stored * np.asarray(arrays["pairs/scale"][at]))
        return np.stack(found)

    def by_take() -> Array:
        return dataset.take(["pairs/reconstruction"], rows)["pairs/reconstruction"]

    require_equal("Dataset.take", by_take()[: len(few)], by_zarr())
    yield compared(
        "store",
        f"a random row by Dataset.take of {BATCH} among {n_pairs} pairs",
        ours=by_take,
        reference=f"zarr: a[i] of the reconstruction and its scale, for {len(few)} rows",
        theirs=by_zarr,
        repeats=sizes.repeats,
        per_call=BATCH,
        reference_per_call=len(few),
    )


def training(dataset: Dataset, sizes: Sizes) -> Iterator[Measurement]:
    """Wait of a trainer of `sizes.trainer_images_per_s` for batches after the first one."""
    step_s = BATCH / sizes.trainer_images_per_s
    busy = torch.randn(256, 256)

    def work() -> None:
        until = time.perf_counter() + step_s
        while time.perf_counter() < until:
            busy @ busy

    trainers: dict[str, Callable[[], None]] = {
        "leaves the CPU alone, as with a GPU": lambda: time.sleep(step_s),
        "keeps a core busy": work,
    }
    for what, step in trainers.items():
        start = time.perf_counter()
        batches = iter(training_examples(dataset, sizes, endless=True))
        next(batches)
        first = time.perf_counter() - start
        waited, start = 0.0, time.perf_counter()
        for _ in range(sizes.n_trainer_batches):
            step()
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
        whole = time.perf_counter() - start
        del batches  # its threads end
        trainer = f"{sizes.trainer_images_per_s:g} images per second that {what}"
        n = sizes.n_trainer_batches
        yield _line(
            f"waiting for data, of the time of a trainer of {trainer} ({n} batches of {BATCH})",
            100 * waited / whole,
            "%",
            repeats=1,
            reference="image restoration paper, of its own training",
            reference_value=20.0,
        )
        yield _line(f"the first batch, before a trainer that {what}", first, "s", repeats=1)


def verifying(dataset: Dataset, sizes: Sizes) -> Iterator[Measurement]:
    """Rate at which `verify` reads, decodes and hashes everything."""
    total = sum(n for r in dataset.receipts for n, _checksum in r.files.values())
    seconds = []
    for _ in range(sizes.repeats):
        start = time.perf_counter()
        report = dataset.verify()
        seconds.append(time.perf_counter() - start)
        if not report.ok or report.n_checked != len(dataset.receipts):
            raise ValueError(f"verify found {report}")
    yield _line(
        f"verify: {total / 1e9:.2f} GB on disk, {dataset.n_pairs} pairs",
        total / 1e9 / statistics.median(seconds),
        "GB/s",
        repeats=sizes.repeats,
    )


@contextmanager
def timed_fsync() -> Iterator[list[tuple[float, float]]]:
    """Fills a list with (start, end) of every fsync while the context lasts."""
    intervals: list[tuple[float, float]] = []
    fsync = os.fsync

    def timed(descriptor: int) -> None:
        start = time.perf_counter()
        fsync(descriptor)
        intervals.append((start, time.perf_counter()))

    with mock.patch.object(os, "fsync", timed):
        yield intervals


def require_equal(name: str, ours: Array, theirs: Array) -> None:
    """Raises ValueError unless both sides have the same values."""
    if not np.array_equal(ours, theirs):
        raise ValueError(f"{name} is not the same here and in plain zarr; nothing was timed")


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds per pair of writing and reading a store of pairs, beside plain zarr."""
    sizes = QUICK if quick else Sizes()
    with tempfile.TemporaryDirectory(prefix="palimpsest-store-") as folder:
        yield from writing(Path(folder, "writing"), sizes)
    with tempfile.TemporaryDirectory(prefix="palimpsest-store-") as folder:
        dataset = sample_store(Path(folder), sizes)
        yield from reading(dataset, sizes)
        yield from training(dataset, sizes)
        yield from verifying(dataset, sizes)


if __name__ == "__main__":
    main(measure)
