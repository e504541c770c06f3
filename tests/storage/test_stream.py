from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recon_core.balance import Curation, curated_repeats, occurrences
from storage.dataset import Dataset
from storage.errors import CorruptPartError, StoreMismatchError
from storage.stream import PairStream
from tests.storage.stores import store

Batch = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Five parts of 600 pairs: three chunks each, the last one partial."""
    return store(tmp_path_factory.mktemp("stream") / "s", 5, n_runs=3, n_images=20, n_pairs=200)


def once(part: int, columns: Batch) -> np.ndarray[Any, Any]:
    return np.ones(len(columns["image_id"]), np.int64)


def by_place(part: int, columns: Batch) -> np.ndarray[Any, Any]:
    """0, 1, 2 or 3 times, and every pair of part 3 not at all."""
    n_pairs = len(columns["image_id"])
    return np.zeros(n_pairs, np.int64) if part == 3 else (np.arange(n_pairs) + part) % 4


def stream(dataset: Dataset, **changes: Any) -> PairStream:
    settings = {"repeats": by_place, "batch_size": 64, "seed": 7, "buffer_rows": 512} | changes
    return PairStream(dataset, **settings)


def names(batches: list[Batch]) -> list[bytes]:
    """Each example by its reconstruction, which is different for every pair."""
    return [x.tobytes() for batch in batches for x in batch["reconstruction"]]


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"interleave": 1}, {"interleave": 9}, {"buffer_rows": 8192}, {"batch_size": 1000}],
)
def test_every_pair_occurs_exactly_as_often_as_asked(dataset: Dataset, changes: dict[str, int]):
    expected: Counter[bytes] = Counter()
    for receipt in dataset.receipts:
        x = dataset.read(receipt.part, ["pairs/reconstruction"])["pairs/reconstruction"]
        counts = by_place(receipt.part, {"image_id": x})
        expected.update({row.tobytes(): int(n) for row, n in zip(x, counts, strict=True) if n})
    batches = list(stream(dataset, **changes))
    assert Counter(names(batches)) == expected
    sizes = [len(batch["iteration"]) for batch in batches]
    assert sum(sizes) == stream(dataset, **changes).len_examples() == expected.total()
    assert set(sizes[:-1]) <= {changes.get("batch_size", 64)}


def test_examples_belong_together(dataset: Dataset):
    """Each example's target, augmentation, mean image and numbers are those of its pair."""
    table: dict[bytes, dict[str, Any]] = {}
    for receipt in dataset.receipts:
        c = dataset.read(
            receipt.part,
            [
                "pairs/reconstruction",
                "pairs/target_row",
                "pairs/run_row",
                "pairs/iteration",
                "pairs/ssim_best",
                "targets/image",
                "targets/augment",
                "targets/image_id",
                "runs/mean_image",
            ],
        )
        for row, x in enumerate(c["pairs/reconstruction"]):
            target = c["pairs/target_row"][row]
            table[x.tobytes()] = {
                "target": c["targets/image"][target],
                "augment": c["targets/augment"][target],
                "image_id": c["targets/image_id"][target],
                "mean_image": c["runs/mean_image"][c["pairs/run_row"][row]],
                "iteration": c["pairs/iteration"][row],
                "ssim_best": c["pairs/ssim_best"][row],
            }
    for batch in stream(dataset):
        assert batch["reconstruction"].dtype == batch["mean_image"].dtype == np.float32
        assert batch["target"].dtype == np.uint8
        for row, x in enumerate(batch["reconstruction"]):
            for key, value in table[x.tobytes()].items():
                np.testing.assert_array_equal(batch[key][row], value)


def test_the_order_is_that_of_seed_and_epoch(dataset: Dataset):
    first = list(stream(dataset))
    assert same(first, list(stream(dataset)))
    other_seed, other_epoch = list(stream(dataset, seed=8)), list(stream(dataset, epoch=1))
    for other in (other_seed, other_epoch):
        assert names(other) != names(first)
        assert Counter(names(other)) == Counter(names(first))
    assert names(other_seed) != names(other_epoch)


@pytest.mark.parametrize("buffer_rows", [256, 512, 8192])
@pytest.mark.parametrize("n_before", [0, 17, 33])
def test_resuming_gives_the_remaining_batches(dataset: Dataset, n_before: int, buffer_rows: int):
    whole = list(stream(dataset, buffer_rows=buffer_rows))
    interrupted = stream(dataset, buffer_rows=buffer_rows)
    batches = iter(interrupted)
    before = [next(batches) for _ in range(n_before)]
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = stream(dataset, buffer_rows=buffer_rows)
    resumed.load_state_dict(state)
    assert same(whole, before + list(resumed))
    assert list(resumed) == []


def test_resuming_at_the_end_gives_nothing(dataset: Dataset):
    finished = stream(dataset)
    list(finished)
    resumed = stream(dataset)
    resumed.load_state_dict(finished.state_dict())
    assert list(resumed) == []


@pytest.mark.parametrize("changes", [{"seed": 8}, {"epoch": 1}, {"batch_size": 32}])
def test_another_stream_s_state_is_refused(dataset: Dataset, changes: dict[str, int]):
    state = stream(dataset).state_dict()
    with pytest.raises(StoreMismatchError, match=next(iter(changes))):
        stream(dataset, **changes).load_state_dict(state)


def test_the_state_of_another_dataset_is_refused(dataset: Dataset, tmp_path: Path):
    with pytest.raises(StoreMismatchError, match="dataset="):
        stream(store(tmp_path / "s", 1)).load_state_dict(stream(dataset).state_dict())


def test_repeated_pairs_are_spread_over_the_epoch(dataset: Dataset):
    """With everything in the buffer the order is a uniform shuffle: the mean place of the examples
    of each image is within five standard errors of the middle."""
    batches = list(stream(dataset, repeats=lambda p, c: 7 * once(p, c), buffer_rows=8192))
    image_ids = np.concatenate([batch["image_id"] for batch in batches])
    n = len(image_ids)
    for image_id in np.unique(image_ids):
        chosen = np.flatnonzero(image_ids == image_id)
        standard_error = n / np.sqrt(12 * len(chosen))
        assert abs(chosen.mean() - n / 2) < 5 * standard_error


def test_reading_ahead_is_bounded(dataset: Dataset, monkeypatch: pytest.MonkeyPatch):
    """With a small buffer the first batch needs a few chunks, not the whole store."""
    from storage import stream as module

    rows_read = []
    read_column = module.read_column

    def counted(root: Any, receipt: Any, name: str, rows: Any = None) -> Any:
        values = read_column(root, receipt, name, rows)
        if name == "pairs/reconstruction":
            rows_read.append(len(values))
        return values

    monkeypatch.setattr(module, "read_column", counted)
    first = stream(dataset, repeats=once, buffer_rows=512)
    next(iter(first))
    assert sum(rows_read) <= 768
    assert len(first._open) <= 4


def test_nothing_to_give(dataset: Dataset, tmp_path: Path):
    nothing = stream(dataset, repeats=lambda p, c: 0 * once(p, c))
    assert nothing.len_examples() == 0
    assert list(nothing) == []
    assert list(stream(store(tmp_path / "s", 1, n_runs=0))) == []
    assert list(stream(store(tmp_path / "t", 0))) == []


@pytest.mark.parametrize(
    "wrong", [np.ones(3, np.int64), np.ones(600), -np.ones(600, np.int64), np.ones((600, 1), int)]
)
def test_repeats_of_a_wrong_kind_are_refused(dataset: Dataset, wrong: np.ndarray[Any, Any]):
    with pytest.raises(ValueError, match="expected 600 integers"):
        list(stream(dataset, repeats=lambda p, c: wrong))


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"interleave": 0}, {"buffer_rows": 255}])
def test_settings_out_of_range_are_refused(dataset: Dataset, changes: dict[str, int]):
    with pytest.raises(ValueError, match=rf"{next(iter(changes))}={next(iter(changes.values()))}"):
        stream(dataset, **changes)


def test_damage_met_while_streaming_is_raised(tmp_path: Path):
    damaged = store(tmp_path / "s", 1)
    group = tmp_path / "s/parts" / damaged.receipts[0].group
    path = next((group / "targets/image").glob("c.*"))
    content = bytearray(path.read_bytes())
    content[40] ^= 4
    path.write_bytes(content)
    with pytest.raises(CorruptPartError, match="targets/image"):
        list(stream(damaged, repeats=once))


def test_the_balanced_stream_is_distributed_as_literally_drawn_subsets(dataset: Dataset):
    """Paper 001: draw subsets one after another, each keeping a pair with probability share/z."""
    curation = Curation(n_subsets=12, share=6, seed=3)
    image_ids, counts = dataset.image_counts()
    z = occurrences(image_ids, counts)

    n_epochs = 60
    streamed = np.zeros((n_epochs, len(z)))
    drawn = np.zeros((n_epochs, len(z)))
    rng = np.random.default_rng(11)
    columns = [
        {
            "image_id": part["targets/image_id"][part["pairs/target_row"]],
            "iteration": part["pairs/iteration"],
            "confident": part["pairs/confident"],
        }
        for part in (
            dataset.read(
                receipt.part,
                ["targets/image_id", "pairs/target_row", "pairs/iteration", "pairs/confident"],
            )
            for receipt in dataset.receipts
        )
    ]
    pair_images = np.concatenate([c["image_id"][c["confident"]] for c in columns])
    for epoch in range(n_epochs):
        for part, column in enumerate(columns):
            times = curated_repeats(column, z, curation=curation, part=part, epoch=epoch)
            np.add.at(streamed[epoch], column["image_id"], times)
        for _subset in range(curation.n_subsets):
            kept = rng.random(len(pair_images)) < curation.share / z[pair_images]
            np.add.at(drawn[epoch], pair_images[kept], 1)
    mean = curation.n_subsets * np.minimum(z, curation.share)
    spread = np.sqrt(curation.n_subsets * curation.share * (1 - curation.share / np.maximum(z, 7)))
    for totals in (streamed, drawn):
        assert (np.abs(totals.mean(axis=0) - mean) < 5 * spread / np.sqrt(n_epochs)).all()
        ratio = totals.std(axis=0, ddof=1)[z > 0] / spread[z > 0]
        assert 0.8 < ratio.mean() < 1.2

    def times(part: int, shown: Batch) -> np.ndarray[Any, Any]:
        return curated_repeats(shown, z, curation=curation, part=part, epoch=0)

    batches = list(stream(dataset, repeats=times))
    streamed_ids = np.concatenate([batch["image_id"] for batch in batches])
    np.testing.assert_array_equal(np.bincount(streamed_ids, minlength=len(z)), streamed[0])
