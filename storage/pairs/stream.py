"""Training examples in shuffled order from one sequential pass over a dataset.

An epoch is read in *blocks* of a few inner chunks. Parts are visited in random order, `interleave`
of them side by side, each giving its blocks in random order. Blocks are gathered into *windows* of
`window_rows` rows, of which all occurrences are given in one random order. With several readers
(ranks, workers) every reader takes each n-th block of the same order.

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
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import StoreMismatchError
from storage.pairs.dataset import Dataset
from storage.pairs.windows import (
    BLOCK_ROWS,
    Arrays,
    Repeats,
    Window,
    WindowReader,
    WindowsInTurn,
    block_order,
)


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
        self._reader = WindowReader(
            dataset,
            repeats,
            block_order(dataset, seed, epoch, interleave)[share[0] :: share[1]],
            n_per_window=window_rows // BLOCK_ROWS,
            seeds=(seed, epoch, *share),
        )
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
        with WindowsInTurn(self._reader, number, ahead=self._prefetch) as windows:
            for size in wanted_sizes:
                if size < 1:
                    raise ValueError(f"a batch of {size} examples; expected 1 or more")
                pieces: list[Arrays] = []
                missing = size
                while missing:
                    if window is None and (window := windows.take()) is None:
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
                yield _joined(pieces)

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

    def _gather(self, window: Window, chosen: npt.NDArray[np.int64], *, scaled: bool) -> Arrays:
        batch = {name: _rows(values, chosen) for name, values in window.columns.items()}
        stored, scale = batch.pop("reconstruction"), batch.pop("scale")
        means = _rows(window.means, batch.pop("mean_row"))
        scaled = scaled or _any_is_zero(means)
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


def _any_is_zero(means: npt.NDArray[Any]) -> bool:
    maybe = means[means[:, 0, 0, 0] == 0]
    return bool(len(maybe)) and not bool(maybe.any(axis=(1, 2, 3)).all())


def _joined(pieces: list[Arrays]) -> Arrays:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
