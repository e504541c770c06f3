"""Batches for training restorers: the balanced stream and noise examples, ready for the network.

An epoch of one reader (a worker of a rank) is a sequence of examples, of which batches are slices:
after every few pairs come made-up examples, of pure noise (image restoration paper, section 3) and,
if the curation wants any, of mixed images, so that of each stretch of the sequence the share
f / (1 + f) is made up, with f the sum of their fractions. Made-up example number k of a reader is a
function of (seed, epoch, reader, k). Nothing depends on the batch size, on threads, or on where an
iteration was interrupted.

    loader = DataLoader(PairExamples(dataset, ...), batch_size=None)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from recon_core.balance import Curation, curated_repeats, occurrences
from recon_core.restore.examples import (
    Examples,
    interleaved,
    make_examples,
    mixture_examples,
    noise_examples,
)
from recon_core.types import N_AUGMENT, seeded_generator
from storage.errors import StorageError
from storage.pairs.dataset import Dataset
from storage.pairs.stream import Arrays, PairStream, check_settings

ORDER = 2
"""Which sequence of examples this is: to be raised when the code gives another one."""

MADE_UP_BLOCK = 64
"""Made-up examples that are drawn at a time."""
N_SHARING = 16
"""Made-up examples of the same images, as the reconstructions of a run are; see there."""

PIECE = 128
"""Pairs that are read, normalised and put into the batch at a time: they stay in the cache."""

Batch = dict[str, Tensor]
Columns = dict[str, npt.NDArray[np.float32]]


class PairExamples(IterableDataset[Batch]):
    """Batches {"condition", "target", "augment"} of `batch_size` examples, already collated.

    `condition` and `target` float32 (b, 3, h, w) in [-1, 1], grey ones three times; `augment`
    float32 (b, 9). The last batch of an epoch is smaller. `curation` says which pairs occur how
    often and how much noise is added; None: each pair once, and no noise. `images_for_noise`, uint8
    (n, c, h, w), are needed where noise or mixtures are added. `left_out`: ids of images whose
    pairs no curation gives.

    Iterating gives what is left of the epoch, and after its end nothing: call `set_epoch` for each
    epoch, or be `endless`. Workers of a DataLoader get copies: only a StatefulDataLoader carries
    their states. Raises ValueError for settings out of range, StorageError if the dataset has no
    pair that `curation` admits.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int,
        curation: Curation | None = None,
        images_for_noise: npt.NDArray[np.uint8] | None = None,
        left_out: npt.NDArray[np.int64] | None = None,
        rank: int = 0,
        world_size: int = 1,
        endless: bool = False,
        interleave: int = 8,
        window_rows: int = 16384,
        prefetch: bool = True,
    ) -> None:
        super().__init__()
        fraction = curation.noise_fraction + curation.mixture_fraction if curation else 0.0
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}; expected 1 or more")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}; expected 0 <= rank < size")
        if images_for_noise is None:
            images_for_noise = np.empty((0, 3, 1, 1), np.uint8)
        if fraction and not len(images_for_noise):
            raise ValueError(
                f"noise_fraction and mixture_fraction add up to {fraction} but there are no "
                "images_for_noise; give the source's training images, or set both to 0"
            )
        pictures = {receipt.picture for receipt in dataset.receipts}
        if fraction and pictures - {images_for_noise.shape[1:]}:
            raise ValueError(
                f"images_for_noise have shape {images_for_noise.shape[1:]}, the pairs "
                f"{next(iter(pictures))}; give the images that the runs were trained on"
            )
        self._dataset, self._curation, self._seed = dataset, curation, seed
        self._batch_size, self._endless, self._prefetch = batch_size, endless, prefetch
        self._rank, self._world_size = rank, world_size
        self._reading = {"interleave": interleave, "window_rows": window_rows}
        self._made_up_share = fraction / (1 + fraction)
        self._images = torch.from_numpy(np.ascontiguousarray(images_for_noise))
        picture = next(iter(pictures), (0, 0, 0))
        self._shapes = {"condition": picture, "target": picture, "augment": (N_AUGMENT,)}
        self._n_averaged = max(1, round(dataset.n_targets / max(1, dataset.n_runs)))
        self._z = np.zeros(0, np.int64)
        self._left_out = np.zeros(0, np.int64) if left_out is None else left_out
        if curation is not None:
            self._z = occurrences(*dataset.image_counts(curation.min_iteration))
            if not np.delete(self._z, self._left_out[self._left_out < len(self._z)]).any():
                others = "" if left_out is None else f" of other than {len(left_out)} images"
                raise StorageError(
                    f"none of the {dataset.n_pairs} pairs{others} is a confident one from "
                    f"iteration {curation.min_iteration} on; lower min_iteration or generate more "
                    "runs"
                )
        self._settings = {
            "dataset": dataset.content_hash,
            "seed": seed,
            "curation": asdict(curation) if curation else None,
            "rank": rank,
            "world_size": world_size,
            **self._reading,
        }
        if left_out is not None:
            self._settings["left_out"] = left_out.tolist()
        self._at = _Position()

    @property
    def n_given(self) -> int:
        """Examples given in all epochs together."""
        return self._at.n_before + self._at.n_given

    @property
    def epoch(self) -> int:
        return self._at.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; change nothing if that is the present one."""
        if epoch != self._at.epoch:
            self._at = _Position(epoch=epoch, n_before=self.n_given)

    def state_dict(self) -> dict[str, Any]:
        """State of the reader after the batch given last: JSON numbers and strings."""
        return {"settings": self._settings, **asdict(self._at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; StoreMismatchError for that of another dataset, or of
        other settings."""
        check_settings(state["settings"], self._settings, "these examples have")
        self._at = _Position(**{key: state[key] for key in asdict(self._at)})

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        n_workers, index = (worker.num_workers, worker.id) if worker else (1, 0)
        share = (self._rank * n_workers + index, self._world_size * n_workers)
        steps = self._all_epochs(self._at, share)
        if self._prefetch:
            steps = _one_ahead(steps)
        with closing(steps):
            for position, batch in steps:
                self._at = position
                yield batch

    def _all_epochs(self, at: _Position, share: tuple[int, int]) -> Steps:
        while True:
            with closing(self._one_epoch(at, share)) as steps:
                for step in steps:
                    at = step[0]
                    yield step
            if not self._endless:
                return
            n_before = at.n_before + at.n_given
            if n_before == 0:
                raise StorageError(self._why_nothing(share))
            at = _Position(epoch=at.epoch + 1, n_before=n_before)

    def _one_epoch(self, at: _Position, share: tuple[int, int]) -> Steps:
        """The batches from `at` to the end of its epoch, each with the position after it."""
        curation, size, z = self._curation, self._batch_size, self._z

        def repeats(part: int, columns: Arrays) -> npt.NDArray[np.int64]:
            assert curation is not None
            times = curated_repeats(columns, z, curation=curation, part=part, epoch=at.epoch)
            times[np.isin(columns["image_id"], self._left_out)] = 0
            return times

        stream = PairStream(
            self._dataset,
            repeats=repeats if curation else None,
            seed=self._seed,
            epoch=at.epoch,
            share=share,
            prefetch=self._prefetch,
            **self._reading,
        )
        if at.stream is not None:
            stream.load_state_dict(at.stream)
        made_up = _made_up(
            curation or Curation(),
            self._images,
            n_images=self._n_averaged,
            seed=self._seed,
            purpose=f"noise of {at.epoch} for {share}",
        )
        first, made_up_share = at.n_given, self._made_up_share
        sizes = (
            piece
            for start in itertools.count(first, size)
            for end in (start + size,)
            for n in (made_up_before(end, made_up_share) - made_up_before(start, made_up_share),)
            for piece in _pieces(size - n)
        )
        with closing(stream.batches(sizes, scaled=False)) as pieces:
            while batch := self._next_batch(first, pieces, made_up):
                first += len(batch["target"])
                yield replace(at, n_given=first, stream=stream.state_dict()), batch

    def _next_batch(
        self, first: int, pieces: Iterator[Arrays], made_up: Callable[[int], Examples]
    ) -> Batch:
        """Examples `first` and on of an epoch: a batch; fewer at its end, and after it none."""
        share, last = self._made_up_share, first + self._batch_size
        before = [made_up_before(k, share) for k in range(first, last + 1)]
        is_made_up = np.diff(before).astype(bool)
        batch: Columns = {
            name: np.empty((self._batch_size, *shape), np.float32)
            for name, shape in self._shapes.items()
        }
        places, n_pairs = np.flatnonzero(~is_made_up), 0
        for size in _pieces(len(places)):
            columns = next(pieces, {"iteration": places[:0]})
            n_read = len(columns["iteration"])
            if n_read:
                _put(batch, places[n_pairs : n_pairs + n_read], make_examples(columns))
            n_pairs += n_read
            if n_read < size:  # the epoch's last pairs: what comes next may still be made up
                last = first + int(places[n_pairs])
                break
        rows, number = np.flatnonzero(is_made_up[: last - first]), before[0]
        while len(rows):
            block, start = divmod(number, MADE_UP_BLOCK)
            here = rows[: MADE_UP_BLOCK - start]
            _put(batch, here, made_up(block), start)
            rows, number = rows[len(here) :], number + len(here)
        n_given = last - first
        return {name: in_rgb(torch.from_numpy(a[:n_given])) for name, a in batch.items() if n_given}

    def _why_nothing(self, share: tuple[int, int]) -> str:
        if self._curation is None or share[1] > 1:
            return (
                f"reader {share[0]} of {share[1]} has none of the {self._dataset.n_pairs} pairs; "
                "use fewer ranks and workers, or generate more runs"
            )
        return (
            f"curation n_subsets={self._curation.n_subsets} and share={self._curation.share} drew "
            "none of the pairs; raise either"
        )


def in_rgb(pictures: Tensor) -> Tensor:
    """(n, 3, h, w) of grey pictures (n, 1, h, w); anything else as it is."""
    is_grey = pictures.dim() == 4 and pictures.shape[1] == 1
    return pictures.repeat(1, 3, 1, 1) if is_grey else pictures


@dataclass(frozen=True, kw_only=True)
class _Position:
    """Examples given of an epoch and in all epochs before, and where the pairs' stream stands."""

    epoch: int = 0
    n_given: int = 0
    n_before: int = 0
    stream: dict[str, Any] | None = None


Steps = Generator[tuple[_Position, Batch], None, None]


def _made_up(
    curation: Curation, images: Tensor, *, n_images: int, seed: int, purpose: str
) -> Callable[[int], Examples]:
    """Function that gives block `number` of the made-up examples of one reader and epoch, in which
    mixtures are as evenly spread as they can be; `n_images` of `images` are averaged for noise, and
    mixed. The block given last is kept."""
    fraction = curation.noise_fraction + curation.mixture_fraction
    share = curation.mixture_fraction / fraction if fraction else 0.0

    @lru_cache(maxsize=1)
    def block(number: int) -> Examples:
        first = number * MADE_UP_BLOCK
        before = [made_up_before(k, share) for k in range(first, first + MADE_UP_BLOCK + 1)]
        is_mixed = torch.from_numpy(np.diff(before).astype(bool))
        n_mixed = int(is_mixed.sum())
        generator = seeded_generator(seed, number, purpose)
        kinds = []
        if n_mixed < MADE_UP_BLOCK:
            noise = noise_examples(
                images,
                n_examples=MADE_UP_BLOCK - n_mixed,
                n_averaged=n_images,
                n_sharing=N_SHARING,
                generator=generator,
            )
            kinds.append((~is_mixed, noise))
        if n_mixed:
            mixed = mixture_examples(
                images,
                n_examples=n_mixed,
                n_mixed=max(2, n_images),
                strength=curation.mixture_strength,
                n_sharing=N_SHARING,
                generator=generator,
            )
            kinds.append((is_mixed, mixed))
        return interleaved(*kinds)

    return block


def made_up_before(example: int, share: float) -> int:
    """Number of the first `example` examples that are of a kind that has this share."""
    return math.floor(example * share)


def _pieces(n_pairs: int) -> list[int]:
    return [min(PIECE, n_pairs - start) for start in range(0, n_pairs, PIECE)]


def _put(batch: Columns, rows: npt.NDArray[np.int64], examples: Examples, start: int = 0) -> None:
    """Examples from `start` on into `rows`; numpy does it three times faster than torch."""
    for name, values in batch.items():
        values[rows] = getattr(examples, name)[start : start + len(rows)].numpy()


def _one_ahead(steps: Steps) -> Steps:
    """The same steps, each made by a thread while the one before is used."""
    with ThreadPoolExecutor(1, "next-batch", initializer=_alone) as thread:
        waiting = thread.submit(next, steps, None)
        try:
            while (step := waiting.result()) is not None:
                waiting = thread.submit(next, steps, None)
                yield step
        finally:
            thread.shutdown(wait=True, cancel_futures=True)
            steps.close()


def _alone() -> None:
    """Keep torch's loops in this thread: OpenMP's others, which wait for each other by spinning,
    would take the cores from the network's step. OpenMP's limit is per thread; torch applies that
    of the process to a thread when it is first asked there."""
    torch.get_num_threads()
    threadpool_limits(1, user_api="openmp")
