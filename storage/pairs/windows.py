"""Windows of a dataset: some thousand rows from several parts, read whole, one ahead of need.

A *block* is a few successive inner chunks of one part, the unit of reading. A *window* is the rows
of the next blocks that occur at all, with the order in which their occurrences are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.pairs.dataset import Dataset
from storage.pairs.layout import CHUNK_ROWS, dtype_of, shape_of

Arrays = dict[str, npt.NDArray[Any]]
Repeats = Callable[[int, Arrays], npt.NDArray[np.int64]]
Map = Callable[..., Iterable[Any]]

BLOCK_ROWS = 2 * CHUNK_ROWS
"""Rows that are read at a time. More are read a little faster, fewer mix more parts."""

N_THREADS = 2
"""That decode side by side. More help where reading waits for a network."""

_ORDER, _WINDOW = 1, 2
"""Keep the random streams of the block order and of the windows apart."""

_PER_PAIR = ("iteration", "ssim_best", "confident", "target_row", "run_row", "scale")
_COLUMNS = {
    "reconstruction": "pairs/reconstruction",
    "scale": "pairs/scale",
    "target": "targets/image",
    "augment": "targets/augment",
    "iteration": "pairs/iteration",
    "ssim_best": "pairs/ssim_best",
}


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of the pairs of `part`."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Window:
    """Rows that occur, as columns; the mean images their `mean_row` means; each example's row."""

    columns: Arrays
    means: npt.NDArray[np.float32]
    order: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class OpenPart:
    """The small columns of a part, how often each of its pairs occurs, its runs' mean images."""

    pairs: Arrays
    counts: npt.NDArray[np.int64]
    means: npt.NDArray[np.float32]


def block_order(dataset: Dataset, seed: int, epoch: int, interleave: int) -> list[Block]:
    """All blocks: parts shuffled, `interleave` of them active, each giving a block per round. The
    order within a round is random too, or each n-th block would be of the same few parts."""
    rng = np.random.default_rng((seed, epoch, _ORDER))
    receipts = [dataset.receipts[index] for index in rng.permutation(len(dataset.receipts))]
    waiting = iter([receipt for receipt in receipts if receipt.n_pairs])
    active: list[list[Block]] = []
    order: list[Block] = []
    while True:
        while len(active) < interleave and (receipt := next(waiting, None)) is not None:
            starts = rng.permutation(np.arange(0, receipt.n_pairs, BLOCK_ROWS)).tolist()
            ends = [min(start + BLOCK_ROWS, receipt.n_pairs) for start in starts]
            active.append([Block(receipt.part, *span) for span in zip(starts, ends, strict=True)])
        if not active:
            return order
        order.extend(active[index].pop() for index in rng.permutation(len(active)))
        active = [blocks for blocks in active if blocks]


class WindowReader:
    """Reads the windows of `n_per_window` of the `blocks` each; `seeds` are those of the orders."""

    def __init__(
        self,
        dataset: Dataset,
        repeats: Repeats | None,
        blocks: Sequence[Block],
        *,
        n_per_window: int,
        seeds: tuple[int, ...],
    ) -> None:
        self._dataset, self._repeats, self._blocks = dataset, repeats, blocks
        self._n_per_window, self._seeds = n_per_window, seeds
        self.n_windows = -(-len(blocks) // n_per_window)

    def open(self, part: int) -> OpenPart:
        """The small columns of `part`, and what `repeats` makes of them."""
        pairs = {name: self._dataset.stored(part, f"pairs/{name}") for name in _PER_PAIR}
        image_ids = self._dataset.stored(part, "targets/image_id")
        pairs["image_id"] = image_ids[pairs["target_row"]].astype(np.int64)
        means = self._dataset.stored(part, "runs/mean_image")
        n_pairs = len(pairs["image_id"])
        if self._repeats is None:
            return OpenPart(pairs, np.ones(n_pairs, np.int64), means)
        shown = ("image_id", "iteration", "ssim_best", "confident")
        counts = np.asarray(self._repeats(part, {name: pairs[name] for name in shown}))
        if counts.shape != (n_pairs,) or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise ValueError(
                f"repeats gave {counts.dtype} {counts.shape} for part {part}; expected "
                f"{n_pairs} integers, 0 or more"
            )
        return OpenPart(pairs, counts.astype(np.int64, copy=False), means)

    def read(self, number: int, opened: dict[int, OpenPart], spread: Map = map) -> Window:
        """Window `number`, its blocks read by `spread`: `map`, or that of a pool of threads.
        `opened` has the open parts and is left with those of this window and the next one."""
        first = number * self._n_per_window
        blocks = self._blocks[first : first + self._n_per_window]
        parts = sorted({block.part for block in blocks})
        new = [part for part in parts if part not in opened]
        opened.update(zip(new, spread(self.open, new), strict=True))

        counts = [opened[block.part].counts[block.start : block.stop] for block in blocks]
        rows = [block.start + np.flatnonzero(n) for block, n in zip(blocks, counts, strict=True)]
        ends = np.cumsum([len(chosen) for chosen in rows])
        columns = self._empty(blocks[0].part, int(ends[-1]))
        n_means = np.cumsum([0, *(len(opened[part].means) for part in parts)])
        first_mean = dict(zip(parts, n_means.tolist(), strict=False))

        def fill(block: Block, chosen: npt.NDArray[np.int64], end: int) -> None:
            if len(chosen):
                place = slice(end - len(chosen), end)
                into = {name: values[place] for name, values in columns.items()}
                self._fill(into, opened[block.part], block.part, chosen)
                into["mean_row"] += first_mean[block.part]

        for _ in spread(fill, blocks, rows, ends.tolist()):
            pass
        times = np.concatenate(counts)
        order = np.repeat(np.arange(ends[-1]), times[times > 0])
        np.random.default_rng((*self._seeds, number, _WINDOW)).shuffle(order)
        means = np.concatenate([opened[part].means for part in parts])
        soon = {block.part for block in self._blocks[first : first + 2 * self._n_per_window]}
        for part in opened.keys() - soon:
            del opened[part]
        return Window(columns, means, order)

    def _empty(self, part: int, n_rows: int) -> Arrays:
        receipt = self._dataset.receipt(part)
        columns: Arrays = {
            name: np.empty(
                shape_of(column, n_rows, receipt.picture), dtype_of(column, receipt.encoding)
            )
            for name, column in _COLUMNS.items()
        }
        return columns | {
            "image_id": np.empty(n_rows, np.int64),
            "mean_row": np.empty(n_rows, np.int64),
        }

    def _fill(self, into: Arrays, opened: OpenPart, part: int, rows: npt.NDArray[np.int64]) -> None:
        """Reads `rows`, ascending and of one block, of a part; pictures are copied only once."""
        targets = opened.pairs["target_row"][rows].astype(np.int64)
        for name, chosen in (("reconstruction", rows), ("target", targets), ("augment", targets)):
            first, last = int(chosen.min()), int(chosen.max())
            stored = self._dataset.stored(part, _COLUMNS[name], slice(first, last + 1))
            np.take(stored, chosen - first, axis=0, out=into[name], mode="clip")
        for name in ("scale", "iteration", "ssim_best", "image_id"):
            into[name][...] = opened.pairs[name][rows]
        into["mean_row"][...] = opened.pairs["run_row"][rows]


class WindowsInTurn:
    """Windows from `first` on; with `ahead`, the next one is read, by threads that end with the
    context, while the last one is used."""

    def __init__(self, reader: WindowReader, first: int, *, ahead: bool) -> None:
        self._reader, self._next, self._ahead = reader, first, ahead
        self._opened: dict[int, OpenPart] = {}
        self._coordinator: ThreadPoolExecutor | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: Future[Window] | None = None

    def __enter__(self) -> WindowsInTurn:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The pool goes first: what the coordinator waits for is then cancelled.
        for executor in (self._pool, self._coordinator):
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)
        self._waiting = None

    def take(self) -> Window | None:
        """The next window, None after the last. The one given before should be let go by now."""
        if self._next >= self._reader.n_windows:
            return None
        number = self._next
        self._next += 1
        if not self._ahead:
            return self._reader.read(number, self._opened)
        waiting = self._waiting or self._submit(number)
        self._waiting = None
        window = waiting.result()
        if self._next < self._reader.n_windows:
            self._waiting = self._submit(self._next)
        return window

    def _submit(self, number: int) -> Future[Window]:
        if self._coordinator is None or self._pool is None:
            self._pool = ThreadPoolExecutor(N_THREADS, "read-block")
            self._coordinator = ThreadPoolExecutor(1, "read-window")
        return self._coordinator.submit(self._reader.read, number, self._opened, self._pool.map)
