"""Batches for training: what is in them, how readers share them, where they resume."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recon_core.balance import Curation, curated_repeats, occurrences
from recon_core.matching import fit_to_range
from storage.errors import CorruptPartError, StorageError, StoreMismatchError
from storage.pairs.dataset import Dataset
from storage.pairs.stream import BLOCK_ROWS
from tasks.dataset.pair_stream import PairExamples, made_up_before
from tests.storage.stores import store

CURATION = Curation(n_subsets=9, share=40, noise_fraction=0.1, seed=5)
Batch = dict[str, Tensor]
FORKED = multiprocessing.get_context("fork")
"""What DataLoader takes on Linux by itself, except in a process that was spawned."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Six parts of 1,100 pairs, 18 blocks."""
    folder = tmp_path_factory.mktemp("pair_stream")
    return store(folder / "s", 6, n_runs=3, n_images=20, n_pairs=1100 // 3 + 1, size=2)


@pytest.fixture(scope="module")
def fresh() -> Iterator[ProcessPoolExecutor]:
    """A process in which nothing but the test has run. `FORKED` workers start at once, but what
    Prefect and Dask leave in a process makes its forked children end with an error."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(os.getpid).result()
        yield pool


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert set(threading.enumerate()) <= before


def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (50, 3, 2, 2), dtype=np.uint8)


def examples(dataset: Dataset, **changes: Any) -> PairExamples:
    given = {
        "batch_size": 64,
        "seed": 3,
        "curation": CURATION,
        "images_for_noise": images(),
        "window_rows": 2 * BLOCK_ROWS,
    } | changes
    return PairExamples(dataset, **given)


def rows(batches: Iterable[Batch]) -> list[bytes]:
    """The examples, one by one."""
    return [
        b"".join(batch[name][row].numpy().tobytes() for name in ("condition", "target", "augment"))
        for batch in batches
        for row in range(len(batch["target"]))
    ]


def n_noise(batches: Iterable[Batch]) -> int:
    """Only noise examples have augmentation labels of nothing but 0 in these stores."""
    return sum(int((batch["augment"] == 0).all(dim=1).sum()) for batch in batches)


def pairs_only(sequence: Iterable[bytes]) -> Counter[bytes]:
    return Counter(row for row in sequence if any(row[-36:]))


def expected_pairs(dataset: Dataset, curation: Curation | None, epoch: int = 0) -> Counter[bytes]:
    """The pairs' examples, by the plain formulas."""
    z = occurrences(*dataset.image_counts())
    expected: Counter[bytes] = Counter()
    for receipt in dataset.receipts:
        c = dataset.read(receipt.part, [*NAMES])
        target = c["pairs/target_row"]
        shown = {
            "image_id": c["targets/image_id"][target],
            "iteration": c["pairs/iteration"],
            "confident": c["pairs/confident"],
        }
        times = np.ones(receipt.n_pairs, int)
        if curation is not None:
            times = curated_repeats(shown, z, curation=curation, part=receipt.part, epoch=epoch)
        image = torch.from_numpy(c["targets/image"][target])
        for row, n in enumerate(times):
            key = image[row].numpy().tobytes(), c["targets/augment"][target[row]].tobytes()
            expected[b"".join(key)] += int(n)
    return +expected


NAMES = (
    "pairs/target_row",
    "pairs/iteration",
    "pairs/confident",
    "targets/image_id",
    "targets/image",
    "targets/augment",
)


def targets(batches: Iterable[Batch]) -> Counter[bytes]:
    """Target and augmentation of the pairs among the examples, as `expected_pairs` has them."""
    found: Counter[bytes] = Counter()
    for batch in batches:
        image = ((batch["target"] + 1) / 2 * 255).round().to(torch.uint8)
        for row in range(len(image)):
            augment = batch["augment"][row]
            if augment.any():
                found[image[row].numpy().tobytes() + augment.numpy().tobytes()] += 1
    return found


def test_an_epoch_has_the_curated_pairs_and_a_tenth_of_noise(dataset: Dataset) -> None:
    batches = list(examples(dataset))
    expected = expected_pairs(dataset, CURATION)
    assert targets(batches) == expected
    n_examples = sum(len(batch["target"]) for batch in batches)
    assert n_examples == expected.total() + n_noise(batches)
    assert abs(n_noise(batches) - 0.1 * expected.total()) <= 1
    assert {len(batch["target"]) for batch in batches[:-1]} == {64}
    for batch in batches:
        assert abs(n_noise([batch]) - len(batch["target"]) / 11) <= 1
        assert {name: (v.dtype, v.shape[1:]) for name, v in batch.items()} == {
            "condition": (torch.float32, (3, 2, 2)),
            "target": (torch.float32, (3, 2, 2)),
            "augment": (torch.float32, (9,)),
        }
        assert all(values.isfinite().all() for values in batch.values())
        assert batch["condition"].abs().max() <= 1
        assert batch["target"].abs().max() <= 1


def test_mixtures_are_added_in_their_proportion(dataset: Dataset) -> None:
    curation = replace(CURATION, noise_fraction=0.1, mixture_fraction=0.3)
    mixed = list(examples(dataset, curation=curation))
    n_pairs = expected_pairs(dataset, curation).total()
    assert targets(mixed) == expected_pairs(dataset, curation)
    assert abs(n_noise(mixed) - 0.4 * n_pairs) <= 1
    only = [
        list(examples(dataset, curation=replace(CURATION, **fractions)))
        for fractions in (
            {"noise_fraction": 0.0, "mixture_fraction": 0.1},
            {"noise_fraction": 0.1, "mixture_fraction": 0.0},
        )
    ]
    assert abs(n_noise(only[0]) - 0.1 * n_pairs) <= 1
    assert rows(only[1]) == rows(examples(dataset))
    stronger = replace(CURATION, noise_fraction=0.0, mixture_fraction=0.1, mixture_strength=9.0)
    assert rows(examples(dataset, curation=stronger)) != rows(only[0])


def test_conditions_are_reconstructions_fitted_to_the_range(dataset: Dataset) -> None:
    table: dict[bytes, list[Tensor]] = {}
    for receipt in dataset.receipts:
        c = dataset.read(
            receipt.part,
            ["pairs/reconstruction", "pairs/run_row", "runs/mean_image", *NAMES],
        )
        mean = torch.from_numpy(c["runs/mean_image"][c["pairs/run_row"]])
        fitted = 2 * fit_to_range(torch.from_numpy(c["pairs/reconstruction"]), mean) - 1
        for row, target in enumerate(c["pairs/target_row"]):
            table.setdefault(c["targets/augment"][target].tobytes(), []).append(fitted[row])
    for batch in examples(dataset, curation=None):
        for condition, augment in zip(batch["condition"], batch["augment"], strict=True):
            choices = torch.stack(table[augment.numpy().tobytes()])
            assert (choices - condition).abs().amax(dim=(1, 2, 3)).min() < 1e-6


def test_images_that_are_left_out_are_in_no_pair(dataset: Dataset) -> None:
    left_out = np.array([2, 5, 900])
    kept = Counter[bytes]()
    for receipt in dataset.receipts:
        c = dataset.read(receipt.part, [*NAMES])
        for row in np.flatnonzero(~np.isin(c["targets/image_id"], left_out)):
            kept[c["targets/image"][row].tobytes() + c["targets/augment"][row].tobytes()] += 1
    everything = expected_pairs(dataset, CURATION)
    given = targets(examples(dataset, left_out=left_out))
    assert given == Counter({row: n for row, n in everything.items() if row in kept})
    assert 0 < given.total() < everything.total()
    other = examples(dataset).state_dict()
    with pytest.raises(StoreMismatchError, match="left_out"):
        examples(dataset, left_out=left_out).load_state_dict(other)
    with pytest.raises(StorageError, match="of other than 12 images is a confident one"):
        examples(dataset, left_out=np.arange(12))


def test_without_a_curation_each_pair_comes_once(dataset: Dataset) -> None:
    batches = list(examples(dataset, curation=None, images_for_noise=None))
    assert targets(batches) == expected_pairs(dataset, None)
    assert n_noise(batches) == 0


def test_the_sequence_is_that_of_seed_and_epoch(dataset: Dataset) -> None:
    first = rows(examples(dataset))
    assert rows(examples(dataset, prefetch=False)) == first
    for size in (1, 10, 11, 5000):
        assert rows(examples(dataset, batch_size=size)) == first
    second = examples(dataset)
    second.set_epoch(1)
    later = rows(second)
    assert targets_of(later) != targets_of(first)
    assert set(noise_of(first)).isdisjoint(noise_of(later))
    assert rows(examples(dataset, seed=4)) != first


def noise_of(sequence: Iterable[bytes]) -> list[bytes]:
    return [row for row in sequence if not any(row[-36:])]


def targets_of(sequence: Iterable[bytes]) -> Counter[bytes]:
    return Counter(row[48:] for row in pairs_only(sequence).elements())


@pytest.mark.parametrize(("world_size", "n_workers"), [(3, 4), (2, 1)])
def test_readers_are_disjoint_and_complete(
    dataset: Dataset, world_size: int, n_workers: int
) -> None:
    n_readers = world_size * n_workers
    given = [list(examples(dataset, rank=r, world_size=n_readers)) for r in range(n_readers)]
    assert sum((targets(batches) for batches in given), Counter()) == expected_pairs(
        dataset, CURATION
    )
    conditions = [set(pairs_only(rows(batches))) for batches in given]
    assert len(set().union(*conditions)) == sum(map(len, conditions))
    for batches in given:
        n = sum(len(batch["target"]) for batch in batches)
        assert n_noise(batches) == made_up_before(n, 0.1 / 1.1)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_resuming_gives_the_rest(dataset: Dataset, data: Any) -> None:
    changes = {
        "rank": data.draw(st.integers(0, 1)),
        "world_size": 2,
        "curation": data.draw(st.sampled_from([CURATION, None])),
        "prefetch": data.draw(st.booleans()),
    }
    whole = rows(examples(dataset, **changes))
    before: list[bytes] = []
    state = json.loads(json.dumps(examples(dataset, **changes).state_dict()))
    for _ in range(data.draw(st.integers(0, 3))):
        one = examples(dataset, batch_size=data.draw(st.integers(1, 900)), **changes)
        one.load_state_dict(state)
        batches = iter(one)
        for _ in range(data.draw(st.integers(1, 4))):
            before += rows([batch] if (batch := next(batches, None)) else [])
        state = json.loads(json.dumps(one.state_dict()))
        assert one.n_given == len(before)
    rest = examples(dataset, batch_size=data.draw(st.integers(1, 900)), **changes)
    rest.load_state_dict(state)
    assert before + rows(rest) == whole
    assert list(rest) == []


def test_endless_examples_are_the_epochs_one_after_another(dataset: Dataset) -> None:
    endless = examples(dataset, endless=True)
    expected: list[bytes] = []
    for epoch in range(3):
        one = examples(dataset)
        one.set_epoch(epoch)
        expected += rows(one)
    given: list[bytes] = []
    for batch in endless:
        given += rows([batch])
        if len(given) >= len(expected):
            break
    assert given == expected
    assert endless.n_given == len(expected)
    assert endless.epoch == 2


@pytest.mark.parametrize("n_batches", [5, 60, 130])
def test_endless_examples_resume_in_any_epoch(dataset: Dataset, n_batches: int) -> None:
    through = iter(examples(dataset, endless=True))
    expected = [rows([next(through)]) for _ in range(n_batches + 20)]
    interrupted = examples(dataset, endless=True)
    batches = iter(interrupted)
    for _ in range(n_batches):
        next(batches)
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = examples(dataset, endless=True)
    resumed.load_state_dict(state)
    rest = iter(resumed)
    assert [rows([next(rest)]) for _ in range(20)] == expected[n_batches:]
    assert resumed.n_given == sum(map(len, expected))
    for one in (through, batches, rest):
        one.close()


def test_epochs(dataset: Dataset) -> None:
    one = examples(dataset)
    first = rows(one)
    assert rows(one) == []  # it has ended
    one.set_epoch(0)
    assert rows(one) == []
    one.set_epoch(1)
    batches = iter(one)
    before = rows([next(batches)])
    batches.close()
    one.set_epoch(1)  # the present one: goes on
    assert one.n_given == len(first) + 64
    other = examples(dataset)
    other.set_epoch(1)
    assert before + rows(one) == rows(other)
    one.set_epoch(0)
    assert rows(one) == first


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("n_left", [0, 1, 20, None])
def test_a_stateful_loader_resumes(
    dataset: Dataset, fresh: ProcessPoolExecutor, n_workers: int, n_left: int | None
) -> None:
    """With one batch left, one of the two workers has come to its end already."""
    found = fresh.submit(loaded_in_two_attempts, dataset.root, n_workers, n_left).result()
    whole, attempts, next_epoch, expected_next = found
    assert attempts == whole
    assert next_epoch == expected_next
    readers = range(max(1, n_workers))
    assert sum(map(len, whole)) == sum(
        len(rows(examples(dataset, rank=r, world_size=len(readers)))) for r in readers
    )


def loaded_in_two_attempts(root: str, n_workers: int, n_left: int | None) -> Any:
    """Batches of an epoch; the same interrupted and resumed; the next epoch of both."""
    stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    dataset = Dataset(root)

    def loader(source: PairExamples) -> Any:
        context = FORKED if n_workers else None
        return stateful(
            source, batch_size=None, num_workers=n_workers, multiprocessing_context=context
        )

    whole = [rows([batch]) for batch in loader(examples(dataset))]
    n_before = 0 if n_left is None else len(whole) - n_left
    interrupted = loader(examples(dataset))
    batches = iter(interrupted)
    before = [rows([next(batches)]) for _ in range(n_before)]
    state = interrupted.state_dict()
    del batches, interrupted
    source = examples(dataset)
    resumed = loader(source)
    resumed.load_state_dict(state)
    attempts = before + [rows([batch]) for batch in resumed]
    source.set_epoch(1)
    after = examples(dataset)
    after.set_epoch(1)
    next_epochs = [[rows([batch]) for batch in each] for each in (resumed, loader(after))]
    return whole, attempts, *next_epochs


def test_no_thread_is_left(dataset: Dataset) -> None:
    before = set(threading.enumerate())
    for endless in (False, True):
        for _ in examples(dataset, endless=endless):
            assert set(threading.enumerate()) > before
            break
        assert set(threading.enumerate()) == before
    for _ in examples(dataset, prefetch=False):
        assert set(threading.enumerate()) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"curation": None},
        {"rank": 1, "world_size": 2},
        {"world_size": 2},
        {"window_rows": BLOCK_ROWS},
    ],
)
def test_a_state_of_other_settings_is_refused(dataset: Dataset, changes: dict[str, Any]) -> None:
    one = examples(dataset)
    next(iter(one))
    other = examples(dataset, **changes)
    with pytest.raises(StoreMismatchError, match=next(iter(changes))):
        other.load_state_dict(one.state_dict())


def test_damage_is_raised(tmp_path: Path) -> None:
    damaged = store(tmp_path / "s", 2, size=2)
    group = tmp_path / "s/parts" / damaged.receipts[1].group
    next((group / "pairs/reconstruction").glob("c.*")).unlink()
    with pytest.raises(CorruptPartError, match="part 1"):
        list(examples(damaged))


def test_readers_without_pairs(dataset: Dataset, tmp_path: Path) -> None:
    assert list(examples(dataset, rank=39, world_size=40)) == []
    with pytest.raises(StorageError, match="reader 39 of 40 has none of the 6606 pairs"):
        next(iter(examples(dataset, rank=39, world_size=40, endless=True)))
    nothing = store(tmp_path / "s", 0)
    assert list(examples(nothing, curation=None)) == []
    with pytest.raises(StorageError, match="none of the 0 pairs is a confident one"):
        examples(nothing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"images_for_noise": None}, "add up to 0.1 but there are no images"),
        ({"images_for_noise": images()[:0]}, "add up to 0.1 but there are no images"),
        ({"images_for_noise": np.zeros((5, 3, 4, 4), np.uint8)}, r"\(3, 4, 4\).*\(3, 2, 2\)"),
    ],
)
def test_settings_out_of_range_are_refused(
    dataset: Dataset, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        examples(dataset, **changes)
