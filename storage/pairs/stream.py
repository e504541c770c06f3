"""Training examples in shuffled order from one sequential pass over a dataset.

An epoch is read in *blocks* of a few inner chunks of one part. Parts are visited in random order,
`interleave` of them side by side, each giving its blocks in random order. Blocks are gathered into
*windows* of `window_rows` rows, read whole and one ahead of need, of which all occurrences are
given in one random order. With several readers (ranks, workers) every reader takes each n-th block
of the same order.

An epoch is therefore a sequence of examples that depends on (dataset, repeats, seed, epoch, share,
interleave, window_rows) only, and a stream resumes after any number of examples, with batches of
any size, by reading one window again.

The price: all occurrences of a pair in an epoch fall into its window, some 20,000 examples. Where
that matters, let an epoch draw fewer subsets and train for more epochs: 14 epochs of 10 subsets
have the distribution of one of 140. Memory holds two windows: 300 MB for 16,384 rows of 32 x 32
each, stored as float16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from storage.errors import StoreMismatchError
from storage.pairs.dataset import Dataset
from storage.pairs.layout import CHUNK_ROWS, dtype_of, shape_of

Arrays = dict[str, npt.NDArray[Any]]
Repeats = Callable[[int, Arrays], npt.NDArray[np.int64]]
Map = Callable[..., Iterable[Any]]

BLOCK_ROWS = 2 * CHUNK_ROWS
"""Rows that are read at a time. More are read a little faster, fewer mix more parts."""

N_THREADS = 2
"""Threads that decode side by side. More help where reading waits for a network."""

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


class Block(NamedTuple):
    """Rows [start, stop) of the pairs of `part`."""

    part: int
    start: int
    stop: int


class OpenPart(NamedTuple):
    """The small columns of a part, how often each of its pairs occurs, its runs' mean images."""

    pairs: Arrays
    counts: npt.NDArray[np.int64]
    means: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Window:
    """Rows that occur, as columns; the mean images that their `mean_row` refers to; the row of each
    example."""

    columns: Arrays
    means: npt.NDArray[np.float32]
    order: npt.NDArray[np.int64]


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


class PairStream:
    """One reader's share of one epoch; iterate `batches`.

    `repeats(part, {"image_id", "iteration", "ssim_best", "confident"})` says how often each of the
    part's p pairs occurs in this epoch, int64 (p,); it must give the same answer each time, in any
    thread. None: each pair once. `share` is (this reader's index, number of readers).
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        repeats: Repeats | None = None,
        seed: int,
        epoch: int = 0,
        share: tuple[int, int] = (0, 1),
        interleave: int = 8,
        window_rows: int = 16384,
        prefetch: bool = True,
    ) -> None:
        if interleave < 1 or window_rows < BLOCK_ROWS:
            raise ValueError(
                f"interleave={interleave}, window_rows={window_rows}; expected at least 1 and "
                f"{BLOCK_ROWS}"
            )
        if not 0 <= share[0] < share[1]:
            raise ValueError(
                f"share={share}; expected (reader, readers) with a reader from 0 to readers - 1"
            )
        self._dataset, self._prefetch = dataset, prefetch
        self._settings: dict[str, Any] = {
            "dataset": dataset.content_hash,
            "seed": seed,
            "epoch": epoch,
            "share": list(share),
            "interleave": interleave,
            "window_rows": window_rows,
        }
        self._repeats, self._seeds = repeats, (seed, epoch, *share)
        self._blocks = block_order(dataset, seed, epoch, interleave)[share[0] :: share[1]]
        self._n_per_window = window_rows // BLOCK_ROWS
        self.n_windows = -(-len(self._blocks) // self._n_per_window)
        self._window = self._given = self._total = 0
        self._turn = object()

    def batches(
        self, sizes: int | Iterable[int], *, scaled: bool = True
    ) -> Generator[Arrays, None, None]:
        """The rest of the epoch in batches of `sizes` examples (one size, or one after another),
        the last smaller.

        A batch is a dict of arrays over b examples: `reconstruction` float32 (b, 3, h, w) raw,
        `mean_image` float32 (b, 3, h, w) of its run, `target` uint8 (b, 3, h, w), `augment` float32
        (b, 9), `image_id` int64, `iteration` int32, `ssim_best` float32. With `scaled=False` the
        reconstruction is a positive multiple of the raw one, in float16 or float32 as it was
        stored; but the raw one in a batch that has a run whose mean image is 0 everywhere, a
        picture whose scale matters.

        An iterator that another one of the same stream overtook raises RuntimeError;
        CorruptPartError where the stored bytes are not what was written.
        """
        turn = self._turn = object()
        wanted_sizes = itertools.repeat(sizes) if isinstance(sizes, int) else sizes
        number, given = self._window, self._given
        window: Window | None = None
        with closing(self._windows(number)) as windows:
            for size in wanted_sizes:
                if size < 1:
                    raise ValueError(f"a batch of {size} examples; expected 1 or more")
                pieces: list[Arrays] = []
                missing = size
                while missing:
                    if window is None and (window := next(windows, None)) is None:
                        break
                    if given < len(window.order):
                        chosen = window.order[given : given + missing]
                        pieces.append(self._gather(window, chosen, scaled=scaled))
                        given += len(chosen)
                        missing -= len(chosen)
                    if given >= len(window.order):
                        window, number, given = None, number + 1, 0
                if not pieces:
                    return
                if self._turn is not turn:
                    raise RuntimeError("another iteration of this stream has begun; use that one")
                self._window, self._given = number, given
                self._total += size - missing
                yield (
                    pieces[0]
                    if len(pieces) == 1
                    else {n: np.concatenate([piece[n] for piece in pieces]) for n in pieces[0]}
                )

    def state_dict(self) -> dict[str, Any]:
        """State of the stream after the batch given last: JSON numbers and strings."""
        return {
            "settings": dict(self._settings),
            "window": self._window,
            "given": self._given,
            "total": self._total,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken, in the next `batches`; StoreMismatchError if that was
        from another dataset, or with other settings."""
        check_settings(state["settings"], self._settings, "this stream has")
        self._window, self._given, self._total = state["window"], state["given"], state["total"]
        self._turn = object()

    def _open(self, part: int) -> OpenPart:
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

    def read_window(self, number: int, opened: dict[int, OpenPart], spread: Map = map) -> Window:
        """Window `number`, its blocks read by `spread`: `map`, or that of a pool of threads.
        `opened` has the open parts and is left with those of this window and the next one."""
        first = number * self._n_per_window
        blocks = self._blocks[first : first + self._n_per_window]
        parts = sorted({block.part for block in blocks})
        new = [part for part in parts if part not in opened]
        opened.update(zip(new, spread(self._open, new), strict=True))

        counts = [opened[block.part].counts[block.start : block.stop] for block in blocks]
        rows = [block.start + np.flatnonzero(n) for block, n in zip(blocks, counts, strict=True)]
        ends = np.cumsum([len(chosen) for chosen in rows])
        receipt = self._dataset.receipt(blocks[0].part)
        columns: Arrays = {
            name: np.empty(
                shape_of(column, int(ends[-1]), receipt.picture),
                dtype_of(column, receipt.encoding),
            )
            for name, column in _COLUMNS.items()
        }
        columns |= {name: np.empty(ends[-1], np.int64) for name in ("image_id", "mean_row")}
        n_means = np.cumsum([0, *(len(opened[part].means) for part in parts)])
        first_mean = dict(zip(parts, n_means.tolist(), strict=False))

        def fill(block: Block, chosen: npt.NDArray[np.int64], end: int) -> None:
            """Reads rows of one block, ascending; pictures are copied only once."""
            if not len(chosen):
                return
            pairs, part = opened[block.part].pairs, block.part
            into = {name: values[end - len(chosen) : end] for name, values in columns.items()}
            targets = pairs["target_row"][chosen].astype(np.int64)
            for name in ("reconstruction", "target", "augment"):
                wanted = chosen if name == "reconstruction" else targets
                low, high = int(wanted.min()), int(wanted.max())
                stored = self._dataset.stored(part, _COLUMNS[name], slice(low, high + 1))
                np.take(stored, wanted - low, axis=0, out=into[name], mode="clip")
            for name in ("scale", "iteration", "ssim_best", "image_id"):
                into[name][...] = pairs[name][chosen]
            into["mean_row"][...] = pairs["run_row"][chosen] + first_mean[part]

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

    def _windows(self, first: int) -> Generator[Window, None, None]:
        """Windows from `first` on. With `prefetch` the next one is read, by threads that end with
        the generator, while the last one is used. The window before should be released by then."""
        opened: dict[int, OpenPart] = {}
        if not self._prefetch or first >= self.n_windows:
            for number in range(first, self.n_windows):
                yield self.read_window(number, opened)
            return
        pool, coordinator = ThreadPoolExecutor(N_THREADS), ThreadPoolExecutor(1)
        try:
            waiting = coordinator.submit(self.read_window, first, opened, pool.map)
            for number in range(first + 1, self.n_windows):
                window = waiting.result()
                waiting = coordinator.submit(self.read_window, number, opened, pool.map)
                yield window
            yield waiting.result()
        finally:
            # The pool goes first: what the coordinator waits for is then cancelled.
            for executor in (pool, coordinator):
                executor.shutdown(wait=True, cancel_futures=True)

    def _gather(self, window: Window, chosen: npt.NDArray[np.int64], *, scaled: bool) -> Arrays:
        batch = {name: _rows(values, chosen) for name, values in window.columns.items()}
        stored, scale = batch.pop("reconstruction"), batch.pop("scale")
        means = _rows(window.means, batch.pop("mean_row"))
        maybe = means[means[:, 0, 0, 0] == 0]
        scaled = scaled or not maybe.any(axis=(1, 2, 3)).all()  # a mean image of 0 everywhere
        if scaled or stored.dtype.kind != "f":
            stored = self._dataset.expand(stored, scale if scaled else np.ones_like(scale))
        return {"reconstruction": stored, "mean_image": means} | batch


def check_settings(saved: Mapping[str, Any], settings: Mapping[str, Any], here: str) -> None:
    """Raises StoreMismatchError if a state was saved with other than the `settings`."""
    for key, value in settings.items():
        if saved.get(key) != value:
            raise StoreMismatchError(
                f"the saved state is of {key}={saved.get(key)!r}, {here} {value!r}; start over, or "
                "restore that setting"
            )


def _rows(values: npt.NDArray[Any], chosen: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """`values[chosen]`; `take` copies whole rows, and does not check what cannot be wrong."""
    out = np.empty((len(chosen), *values.shape[1:]), values.dtype)
    return np.take(values, chosen, axis=0, out=out, mode="clip")
