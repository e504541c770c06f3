"""Millions of real pairs on a real disk: written, verified, streamed and opened once.

`benchmarks.store.speed` compares with plain zarr on three parts in the page cache. Here a store
that is larger than the memory goes through everything once: 200 parts of 24,800 pairs are 5 million
pairs, a twelfth of the paper's 60 million. Parts differ in the rolled order of their runs, and not
in what it costs to handle them. Rates are medians over tenths of the work, so that a slow tenth,
and a rate that falls as the store grows, are seen. Set TMPDIR to choose the device; 40 GB are
needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.record import Measurement, main, measured, process_memory
from benchmarks.store.sample import (
    BATCH,
    PROVENANCE,
    QUICK,
    Sizes,
    sample_columns,
    training_examples,
)
from benchmarks.store.scale import OPEN
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from storage.pairs.verify import verify_store

_line = partial(measured, "store_soak")
N_TENTHS = 10


def measure(quick: bool) -> Iterator[Measurement]:
    """Write, open, verify and stream a store that does not fit in memory."""
    sizes = replace(QUICK, n_parts=12) if quick else Sizes(n_parts=200)
    with tempfile.TemporaryDirectory(prefix="palimpsest-soak-") as folder:
        root = Path(folder, "store")
        yield from _written(root, sizes)
        opened = subprocess.run(
            [sys.executable, "-c", OPEN, str(root)], check=True, capture_output=True
        )
        n_pairs = Dataset(root).n_pairs
        yield _line(
            f"open the metadata of {n_pairs:,} pairs", json.loads(opened.stdout)["open_s"], "s"
        )
        yield from read(root, sizes)


def _written(root: Path, sizes: Sizes) -> Iterator[Measurement]:
    create_or_open(root, {"benchmark": "soak"})
    base = sample_columns(0, sizes)
    seconds = [0.0]
    for part in range(sizes.n_parts):
        # The pairs in another order, so that no two parts have the same bytes.
        shift, first = part * 7 % sizes.pairs_per_part, part * sizes.n_runs
        columns = {
            name: np.roll(values, shift, axis=0) if name.startswith("pairs/") else values
            for name, values in base.items()
        } | {"runs/run": np.arange(first, first + sizes.n_runs)}
        start = time.perf_counter()
        write_part(root, part, columns, provenance=PROVENANCE)
        seconds.append(seconds[-1] + time.perf_counter() - start)
    case = f"write {sizes.n_parts} parts, fsync included"
    amounts = [sizes.pairs_per_part] * sizes.n_parts
    yield from _paced(case, seconds, amounts, "s per million pairs")
    n_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    n_pairs = sizes.n_parts * sizes.pairs_per_part
    yield _line(f"{n_pairs:,} pairs on the disk", n_bytes / 1e9, "GB")


def read(root: Path, sizes: Sizes) -> Iterator[Measurement]:
    """Everything once, by `verify` and by an epoch of training."""
    dataset = Dataset(root)
    # in MB, so that a million of them is a TB
    amounts = [sum(n for n, _crc in receipt.files.values()) / 1e6 for receipt in dataset.receipts]
    seconds, start = [0.0], time.perf_counter()
    found = verify_store(
        root, on_part=lambda _done, _n: seconds.append(time.perf_counter() - start)
    )
    if not found.ok or found.n_checked != len(dataset.receipts):
        raise ValueError(f"the store that was just written does not verify: {found.problems[:3]}")
    yield from _paced("verify, every byte read and hashed", seconds, amounts, "s per TB")
    examples = training_examples(dataset, sizes)
    seconds, amounts, start = [0.0], [], time.perf_counter()
    for batch in examples:
        seconds.append(time.perf_counter() - start)
        amounts.append(len(batch["target"]))
    case = f"one balanced epoch in batches of {BATCH}, normalised, 10 % noise"
    yield from _paced(case, seconds, amounts, "s per million examples")
    yield _line(f"{case}: examples", float(examples.n_given), "examples")
    peak = process_memory("VmHWM") / 1024
    yield _line("peak memory of the process that did all this", peak, "GiB")


def _paced(
    case: str, seconds: Sequence[float], amounts: Sequence[float], unit: str
) -> Iterator[Measurement]:
    """`seconds`: when each piece of work was done, the start included; `amounts` of the pieces."""
    done = np.cumsum([0.0, *amounts])
    marks = np.linspace(0, done[-1], N_TENTHS + 1)
    per_million = 1e6 * np.diff(np.interp(marks, done, seconds)) / np.diff(marks)
    yield _line(f"{case}: median tenth", float(np.median(per_million)), unit, N_TENTHS)
    yield _line(f"{case}: slowest tenth", float(per_million.max()), unit, N_TENTHS)
    yield _line(f"{case}: in all", seconds[-1], "s")


if __name__ == "__main__":
    main(measure)
