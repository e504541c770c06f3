"""Training examples in shuffled order from one sequential pass over a dataset.

Parts are visited in random order, `interleave` of them side by side, and read in whole inner chunks
of 256 rows, because single rows of a compressed store are a hundred times slower. Pairs that occur
at all go into a buffer of `buffer_rows` *distinct* pairs, each with the number of times it is still
to be given. A batch is a random draw without replacement from that multiset, so a pair that occurs
a hundred times is spread out rather than repeated, and a dataset smaller than the buffer is
shuffled perfectly.

The order depends on (dataset, repeats, batch_size, seed, epoch, interleave, buffer_rows) only. The
state is small (which pairs are in the buffer, where reading stands) and JSON: a stream that loads
it gives the remaining batches exactly as the first one would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.dataset import Dataset
from storage.errors import StoreMismatchError
from storage.layout import CHUNK_ROWS, expand_reconstruction
from storage.parts import read_column

Arrays = dict[str, npt.NDArray[Any]]
Repeats = Callable[[int, Arrays], npt.NDArray[np.int64]]

_PER_PAIR = ("iteration", "ssim_best", "confident", "target_row", "run_row")


@dataclass(frozen=True, eq=False)
class _OpenPart:
    """The small columns of a part, and how often each of its pairs occurs."""

    part: int
    pairs: Arrays
    image_id: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


class PairStream:
    """One epoch of batches of examples; iterate it.

    A batch is a dict of arrays over b examples (the last batch may be smaller): `reconstruction`
    float32 (b, 3, h, w) raw, `mean_image` float32 (b, 3, h, w) of its run, `target` uint8
    (b, 3, h, w), `augment` float32 (b, 9), `image_id` int64, `iteration` int32, `ssim_best`
    float32.

    `repeats(part, {"image_id", "iteration", "ssim_best", "confident"})` says how often each of the
    part's p pairs occurs in this epoch, int64 (p,); it must give the same answer each time.

    Iterating gives what is left of the epoch, so iterating again after the end gives nothing.
    Memory: `buffer_rows` pairs at 9 bytes per value and pixel, 75 MB for 8,192 of 32 x 32.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        repeats: Repeats,
        batch_size: int,
        seed: int,
        epoch: int = 0,
        interleave: int = 4,
        buffer_rows: int = 8192,
    ) -> None:
        if batch_size < 1 or interleave < 1 or buffer_rows < CHUNK_ROWS:
            raise ValueError(
                f"batch_size={batch_size}, interleave={interleave}, buffer_rows={buffer_rows}; "
                f"expected at least 1, 1 and {CHUNK_ROWS}"
            )
        self._dataset = dataset
        self._repeats = repeats
        self._batch_size = batch_size
        self._seed, self._epoch = seed, epoch
        n_slots = min(buffer_rows, dataset.n_pairs + CHUNK_ROWS)  # always room for one more chunk
        self._settings: dict[str, Any] = {
            "dataset": dataset.content_hash,
            "batch_size": batch_size,
            "seed": seed,
            "epoch": epoch,
            "interleave": interleave,
            "buffer_rows": buffer_rows,
        }
        self._chunks = _chunk_order(dataset, seed, epoch, interleave)
        self._open: dict[int, _OpenPart] = {}
        self._means: dict[int, npt.NDArray[np.float32]] = {}
        self._slots: Arrays = {}
        self._part = np.full(n_slots, -1, np.int64)
        self._row = np.zeros(n_slots, np.int64)
        self._left = np.zeros(n_slots, np.int64)
        self._n_batches = self._n_chunks = 0

    def len_examples(self) -> int:
        """Examples in the whole epoch, those already given included. Reads the small columns."""
        return sum(int(self._load_part(part).counts.sum()) for part in self._parts())

    def __iter__(self) -> Iterator[Arrays]:
        while pieces := self._next_pieces():
            self._n_batches += 1
            yield {
                name: np.concatenate([piece[name] for piece in pieces])
                if len(pieces) > 1
                else values
                for name, values in pieces[0].items()
            }

    def _next_pieces(self) -> list[Arrays]:
        """A batch, in one piece unless the buffer runs empty before the batch is full."""
        rng = np.random.default_rng((self._seed, self._epoch, self._n_batches, _DRAW))
        pieces: list[Arrays] = []
        n_wanted = self._batch_size
        while n_wanted:
            self._fill()
            n_taken = min(n_wanted, int(self._left.sum()))
            if n_taken == 0:
                break
            taken = rng.multivariate_hypergeometric(self._left, n_taken, method="marginals")
            pieces.append(self._gather(rng.permutation(np.repeat(np.arange(len(taken)), taken))))
            self._left -= taken
            n_wanted -= n_taken
        return pieces

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands between two batches: JSON numbers, strings and lists."""
        used = np.flatnonzero(self._left)
        return {
            "settings": dict(self._settings),
            "n_batches": self._n_batches,
            "n_chunks": self._n_chunks,
            "slots": used.tolist(),
            "parts": self._part[used].tolist(),
            "rows": self._row[used].tolist(),
            "left": self._left[used].tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken; reads the buffer's pairs again.

        Raises:
            StoreMismatchError: it was taken from another dataset, or with other settings.
        """
        for key, value in self._settings.items():
            if state["settings"].get(key) != value:
                raise StoreMismatchError(
                    f"the stream's saved state is of {key}={state['settings'].get(key)!r}, this "
                    f"stream has {value!r}; start over, or restore that setting"
                )
        self._n_batches, self._n_chunks = state["n_batches"], state["n_chunks"]
        self._left[:] = 0
        self._part[:] = -1
        slots, parts, rows, left = (
            np.array(state[key], np.int64) for key in ("slots", "parts", "rows", "left")
        )
        blocks = np.stack([parts, rows // CHUNK_ROWS], axis=1)
        for part, block in np.unique(blocks, axis=0):
            here = (parts == part) & (rows // CHUNK_ROWS == block)
            self._put(self._part_of(int(part)), slots[here], rows[here], left[here])
        self._forget_unused()

    def _parts(self) -> list[int]:
        return [receipt.part for receipt in self._dataset.receipts]

    def _fill(self) -> None:
        """Reads chunks while the buffer has room for a whole one."""
        while self._n_chunks < len(self._chunks):
            free = np.flatnonzero(self._left == 0)
            if len(free) < CHUNK_ROWS:
                return
            part, start = self._chunks[self._n_chunks]
            opened = self._part_of(part)
            rows = np.arange(start, min(start + CHUNK_ROWS, len(opened.counts)))
            rows = rows[opened.counts[rows] > 0]
            if len(rows):
                self._put(opened, free[: len(rows)], rows, opened.counts[rows])
            self._n_chunks += 1
            self._forget_unused()

    def _part_of(self, part: int) -> _OpenPart:
        if part not in self._open:
            self._open[part] = self._load_part(part)
        return self._open[part]

    def _load_part(self, part: int) -> _OpenPart:
        columns = self._dataset.read(
            part, ["targets/image_id", *(f"pairs/{name}" for name in _PER_PAIR)]
        )
        pairs = {name: columns[f"pairs/{name}"] for name in _PER_PAIR}
        image_id = columns["targets/image_id"][pairs["target_row"]].astype(np.int64)
        shown = {name: pairs[name] for name in ("iteration", "ssim_best", "confident")}
        counts = np.asarray(self._repeats(part, {"image_id": image_id} | shown))
        if counts.shape != image_id.shape or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise ValueError(
                f"repeats gave {counts.dtype} {counts.shape} for part {part}; expected "
                f"{len(image_id)} integers, 0 or more"
            )
        return _OpenPart(part, pairs, image_id, counts.astype(np.int64))

    def _put(
        self,
        opened: _OpenPart,
        slots: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        left: npt.NDArray[np.int64],
    ) -> None:
        """Reads `rows`, ascending and of one chunk, of a part into `slots`."""
        part, receipt = opened.part, self._dataset.receipt(opened.part)
        root = self._dataset.root
        start = int(rows[0]) // CHUNK_ROWS * CHUNK_ROWS
        chunk = slice(start, start + CHUNK_ROWS)
        targets = opened.pairs["target_row"][rows]
        first = int(targets.min())
        span = slice(first, int(targets.max()) + 1)
        arrays = {
            "reconstruction": read_column(root, receipt, "pairs/reconstruction", chunk)[
                rows - start
            ],
            "scale": read_column(root, receipt, "pairs/scale", chunk)[rows - start],
            "target": read_column(root, receipt, "targets/image", span)[targets - first],
            "augment": read_column(root, receipt, "targets/augment", span)[targets - first],
            "image_id": opened.image_id[rows],
            "iteration": opened.pairs["iteration"][rows],
            "ssim_best": opened.pairs["ssim_best"][rows],
            "run_row": opened.pairs["run_row"][rows],
        }
        for name, values in arrays.items():
            if name not in self._slots:
                self._slots[name] = np.zeros((len(self._left), *values.shape[1:]), values.dtype)
            self._slots[name][slots] = values
        self._part[slots], self._row[slots], self._left[slots] = part, rows, left
        if part not in self._means:
            self._means[part] = read_column(root, receipt, "runs/mean_image")

    def _forget_unused(self) -> None:
        """Drops the columns of parts that are read to the end, the means of those given away."""
        soon = self._chunks[self._n_chunks : self._n_chunks + self._settings["interleave"]]
        ahead = {part for part, _start in soon}
        self._open = {part: opened for part, opened in self._open.items() if part in ahead}
        held = set(self._part[self._left > 0].tolist())
        self._means = {part: mean for part, mean in self._means.items() if part in held}

    def _gather(self, slots: npt.NDArray[np.int64]) -> Arrays:
        held = {name: values[slots] for name, values in self._slots.items()}
        runs = held.pop("run_row")
        means = [self._means[p][r] for p, r in zip(self._part[slots].tolist(), runs, strict=True)]
        return held | {
            "reconstruction": expand_reconstruction(held["reconstruction"], held.pop("scale")),
            "mean_image": np.stack(means),
        }


_ORDER, _DRAW = 1, 2
"""Keep the random streams of the chunk order and of the batches apart."""


def _chunk_order(dataset: Dataset, seed: int, epoch: int, interleave: int) -> list[tuple[int, int]]:
    """(part, first row) of every chunk: parts shuffled, `interleave` of them read in turns."""
    rng = np.random.default_rng((seed, epoch, _ORDER))
    waiting = [dataset.receipts[index] for index in rng.permutation(len(dataset.receipts))]
    waiting = [receipt for receipt in reversed(waiting) if receipt.n_pairs]
    active: list[tuple[int, list[int]]] = []
    order: list[tuple[int, int]] = []
    while waiting or active:
        while waiting and len(active) < interleave:
            receipt = waiting.pop()
            starts = np.arange(0, receipt.n_pairs, CHUNK_ROWS)
            active.append((receipt.part, rng.permutation(starts).tolist()))
        order.extend((part, remaining.pop()) for part, remaining in active)
        active = [(part, remaining) for part, remaining in active if remaining]
    return order
