from __future__ import annotations

import gc
import json
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import CorruptPartError, StoreMismatchError
from storage.pairs import stream as streams
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import Encoding
from storage.pairs.parts import write_part
from storage.pairs.stream import BLOCK_ROWS, PairStream
from tests.storage.stores import MANIFEST, columns, provenance, store

Batch = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Six parts of 1,100 pairs: three blocks each, the last one small."""
    folder = tmp_path_factory.mktemp("stream")
    return store(folder / "s", 6, n_runs=3, n_images=20, n_pairs=1100 // 3 + 1, size=2)


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """No test of this file may leave a thread behind."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert set(threading.enumerate()) <= before


def once(part: int, columns: Batch) -> np.ndarray[Any, Any]:
    return np.ones(len(columns["image_id"]), np.int64)


def by_place(part: int, columns: Batch) -> np.ndarray[Any, Any]:
    """0, 1, 2 or 3 times, and every pair of part 3 not at all."""
    n_pairs = len(columns["image_id"])
    return np.zeros(n_pairs, np.int64) if part == 3 else (np.arange(n_pairs) + part) % 4


def stream(dataset: Dataset, **changes: Any) -> PairStream:
    given = {"repeats": by_place, "seed": 7, "window_rows": 2 * BLOCK_ROWS} | changes
    return PairStream(dataset, **given)


def names(batches: Any) -> list[bytes]:
    """Each example by its reconstruction, which is different for every pair."""
    return [x.tobytes() for batch in batches for x in batch["reconstruction"]]


def asked_for(dataset: Dataset, repeats: Any) -> Counter[bytes]:
    expected: Counter[bytes] = Counter()
    for receipt in dataset.receipts:
        x = dataset.read(receipt.part, ["pairs/reconstruction"])["pairs/reconstruction"]
        counts = repeats(receipt.part, {"image_id": x})
        expected.update({row.tobytes(): int(n) for row, n in zip(x, counts, strict=True) if n})
    return expected


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 64),
        ({"interleave": 1}, 7),
        ({"interleave": 9, "window_rows": BLOCK_ROWS}, 64),
        ({"window_rows": 16384}, 1000),
        ({}, 100_000),
    ],
)
def test_every_pair_occurs_exactly_as_often_as_asked(
    dataset: Dataset, changes: dict[str, int], size: int, prefetch: bool
):
    expected = asked_for(dataset, by_place)
    batches = list(stream(dataset, prefetch=prefetch, **changes).batches(size))
    assert Counter(names(batches)) == expected
    sizes = [len(batch["iteration"]) for batch in batches]
    assert sum(sizes) == expected.total()
    assert set(sizes[:-1]) <= {size}
    assert 0 < sizes[-1] <= size


COLUMN_OF = {
    "reconstruction": ("pairs/reconstruction", "float32"),
    "mean_image": ("runs/mean_image", "float32"),
    "target": ("targets/image", "uint8"),
    "augment": ("targets/augment", "float32"),
    "image_id": ("targets/image_id", "int64"),
    "iteration": ("pairs/iteration", "int32"),
    "ssim_best": ("pairs/ssim_best", "float32"),
}


def test_examples_belong_together(dataset: Dataset):
    """Each example's target, augmentation, mean image and numbers are those of its pair."""
    columns_ = [column for column, _dtype in COLUMN_OF.values()]
    taken = dataset.take(columns_, np.arange(dataset.n_pairs))
    row_of = {x.tobytes(): row for row, x in enumerate(taken["pairs/reconstruction"])}
    for batch in stream(dataset).batches(64):
        assert set(batch) == set(COLUMN_OF)
        rows = [row_of[x.tobytes()] for x in batch["reconstruction"]]
        for name, (column, dtype) in COLUMN_OF.items():
            assert batch[name].dtype == dtype
            np.testing.assert_array_equal(batch[name], taken[column][rows])


@pytest.mark.parametrize(
    ("encoding", "dtype"), [("float16", "f2"), ("float32", "f4"), ("uint8", "f4")]
)
def test_reconstructions_come_raw_or_up_to_a_factor(tmp_path: Path, encoding: Any, dtype: str):
    create_or_open(tmp_path / "s", MANIFEST, encoding=encoding)
    write_part(tmp_path / "s", 0, columns(n_pairs=300), provenance=provenance())
    dataset = Dataset(tmp_path / "s")
    raw, multiple = (
        np.concatenate([b["reconstruction"] for b in stream(dataset).batches(99, scaled=scaled)])
        for scaled in (True, False)
    )
    assert raw.dtype == np.float32
    assert multiple.dtype == np.dtype(dtype)
    stored = dataset.read(0, ["pairs/reconstruction"])["pairs/reconstruction"]
    assert {x.tobytes() for x in raw} <= {x.tobytes() for x in stored}
    flat, other = raw.reshape(len(raw), -1), multiple.reshape(len(raw), -1).astype(np.float32)
    factor = np.abs(flat).max(axis=1) / np.abs(other).max(axis=1)
    assert (factor > 0).all()
    np.testing.assert_allclose(other * factor[:, None], flat, rtol=1e-5)


def test_the_order_is_that_of_seed_and_epoch_whatever_the_batches(dataset: Dataset):
    first = names(stream(dataset).batches(64))
    assert first == names(stream(dataset, prefetch=False).batches(64))
    for sizes in (1, 1700, iter(range(1, 10**6))):
        assert names(stream(dataset).batches(sizes)) == first
    other_seed = names(stream(dataset, seed=8).batches(64))
    other_epoch = names(stream(dataset, epoch=1).batches(64))
    for other in (other_seed, other_epoch):
        assert other != first
        assert Counter(other) == Counter(first)
    assert other_seed != other_epoch


@pytest.mark.parametrize("n_readers", [2, 5, 12, 30])
def test_shares_are_disjoint_complete_and_even(dataset: Dataset, n_readers: int):
    expected = asked_for(dataset, by_place)
    shares = [stream(dataset, share=(reader, n_readers)) for reader in range(n_readers)]
    given = [Counter(names(share.batches(64))) for share in shares]
    assert sum(given, Counter()) == expected
    assert sum(len(counts) for counts in given) == len(expected)  # no pair has two readers
    plain = [stream(dataset, repeats=None, share=(r, n_readers)) for r in range(n_readers)]
    n_given = [sum(len(b["iteration"]) for b in share.batches(512)) for share in plain]
    assert sum(n_given) == dataset.n_pairs
    n_blocks = [share._blocks for share in plain]
    assert max(map(len, n_blocks)) - min(map(len, n_blocks)) <= 1
    for reader in range(3):  # blocks are not dealt in step with the parts
        share = stream(dataset, repeats=None, share=(reader, 3), interleave=3)
        assert len({block.part for block in share._blocks}) > 2


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_resuming_after_any_number_of_examples_gives_the_rest(dataset: Dataset, data: Any):
    changes = {
        "share": data.draw(st.sampled_from([(0, 1), (1, 2)])),
        "window_rows": data.draw(st.sampled_from([BLOCK_ROWS, 3 * BLOCK_ROWS, 16384])),
        "prefetch": data.draw(st.booleans()),
    }
    interrupted = stream(dataset, **changes)
    whole = names(stream(dataset, **changes).batches(500))
    n_before = data.draw(st.integers(0, len(whole)))
    sizes = data.draw(st.lists(st.integers(1, 2000), max_size=3))
    before: list[bytes] = []
    for size in sizes:
        before += names([next(interrupted.batches(size), {"reconstruction": []})])
    if n_before > len(before):
        before += names([next(interrupted.batches(n_before - len(before)))])
    state = json.loads(json.dumps(interrupted.state_dict()))
    assert state["total"] == len(before)
    resumed = stream(dataset, **changes)
    resumed.load_state_dict(state)
    after = names(resumed.batches(data.draw(st.integers(1, 3000))))
    assert before + after == whole
    assert list(resumed.batches(64)) == []
    at_end = stream(dataset, **changes)
    at_end.load_state_dict(resumed.state_dict())
    assert list(at_end.batches(64)) == []


def test_every_state_of_an_epoch_resumes(dataset: Dataset):
    """Exhaustive, at the examples around each border between windows."""
    whole = names(stream(dataset).batches(500))
    through = stream(dataset)
    states = [through.state_dict()]
    for _ in through.batches(1):
        states.append(through.state_dict())
    assert [state["total"] for state in states] == list(range(len(whole) + 1))
    borders = [k for k, state in enumerate(states) if state["given"] == 0]
    assert len(borders) == 9 + 1  # 18 blocks, two per window, and the end
    for k in {k + step for k in borders for step in (-1, 0, 1) if 0 <= k + step < len(states)}:
        resumed = stream(dataset, prefetch=False)
        resumed.load_state_dict(states[k])
        assert names([next(resumed.batches(40), {"reconstruction": []})]) == whole[k : k + 40]


def test_resuming_reads_one_window(dataset: Dataset, monkeypatch: pytest.MonkeyPatch):
    whole = stream(dataset)
    batches = whole.batches(100)
    for _ in range(40):
        next(batches)
    batches.close()
    numbers = watch_windows(monkeypatch)[0]
    resumed = stream(dataset, prefetch=False)
    resumed.load_state_dict(whole.state_dict())
    next(resumed.batches(1))
    assert numbers == [whole.state_dict()["window"]]


def watch_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[int], list[weakref.ref[streams.Window]]]:
    """The numbers of the windows that are read from now on, and the windows."""
    numbers: list[int] = []
    read_windows: list[weakref.ref[streams.Window]] = []
    read = PairStream.read_window

    def watched(self: Any, number: int, *arguments: Any) -> streams.Window:
        numbers.append(number)
        window = read(self, number, *arguments)
        read_windows.append(weakref.ref(window))
        return window

    monkeypatch.setattr(PairStream, "read_window", watched)
    return numbers, read_windows


@pytest.mark.parametrize("prefetch", [False, True])
def test_reading_ahead_is_bounded(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, prefetch: bool
):
    numbers, read_windows = watch_windows(monkeypatch)
    one = stream(dataset, prefetch=prefetch)
    for _ in one.batches(150):
        if prefetch:
            time.sleep(0.005)  # it would read on if it could
        assert max(numbers) <= one.state_dict()["window"] + int(prefetch)
        assert sum(window() is not None for window in read_windows) <= 1 + int(prefetch)
    assert numbers == list(range(9))


def test_only_the_parts_in_reach_are_open(dataset: Dataset):
    reader = stream(dataset, interleave=2)
    opened: dict[int, Any] = {}
    for number in range(reader.n_windows):
        reader.read_window(number, opened)
        assert len(opened) <= 4
    assert not opened or number == reader.n_windows - 1


def test_the_next_window_is_read_meanwhile(dataset: Dataset, monkeypatch: pytest.MonkeyPatch):
    numbers, _ = watch_windows(monkeypatch)
    batches = stream(dataset).batches(1)
    assert numbers == []  # nothing starts before it is asked for, so a fork is safe
    next(batches)
    for _ in range(200):
        if len(numbers) > 1:
            break
        time.sleep(0.01)
    assert numbers == [0, 1]
    batches.close()


@pytest.mark.parametrize("end", ["close", "delete", "exhaust"])
def test_no_thread_is_left(dataset: Dataset, end: str):
    before = set(threading.enumerate())
    batches = stream(dataset).batches(64)
    assert set(threading.enumerate()) == before
    next(batches)
    assert set(threading.enumerate()) > before
    if end == "close":
        batches.close()
    elif end == "exhaust":
        list(batches)
    del batches
    gc.collect()
    assert set(threading.enumerate()) == before


def test_an_overtaken_iteration_says_so(dataset: Dataset):
    one = stream(dataset, prefetch=False)
    first, second = one.batches(64), one.batches(64)
    next(first)
    next(second)
    with pytest.raises(RuntimeError, match="another iteration"):
        next(first)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 8},
        {"epoch": 1},
        {"share": (0, 2)},
        {"interleave": 3},
        {"window_rows": BLOCK_ROWS},
    ],
)
def test_another_stream_s_state_is_refused(dataset: Dataset, changes: dict[str, Any]):
    state = json.loads(json.dumps(stream(dataset).state_dict()))
    with pytest.raises(StoreMismatchError, match=next(iter(changes))):
        stream(dataset, **changes).load_state_dict(state)
    stream(dataset, prefetch=False).load_state_dict(state)
    with pytest.raises(StoreMismatchError, match="dataset="):
        stream(dataset.subset([1])).load_state_dict(state)


def test_repeated_pairs_are_spread_over_the_epoch(dataset: Dataset):
    """With everything in one window the order is a uniform shuffle: the mean place of the examples
    of each image is within five standard errors of the middle."""
    one = stream(dataset, repeats=lambda p, c: 7 * once(p, c), window_rows=16384)
    image_ids = np.concatenate([batch["image_id"] for batch in one.batches(64)])
    n = len(image_ids)
    for image_id in np.unique(image_ids):
        chosen = np.flatnonzero(image_ids == image_id)
        standard_error = n / np.sqrt(12 * len(chosen))
        assert abs(chosen.mean() - n / 2) < 5 * standard_error


def test_windows_mix_parts(dataset: Dataset):
    """Within a window, the examples of its parts are not in runs."""
    one = stream(dataset, repeats=None, interleave=6, window_rows=6 * BLOCK_ROWS)
    window = one.read_window(0, {})
    part_of = np.repeat(
        [block.part for block in one._blocks[:6]],
        [block.stop - block.start for block in one._blocks[:6]],
    )[window.order]
    assert len(set(part_of)) == 6
    changes = (np.diff(part_of) != 0).mean()
    shares = np.unique(part_of, return_counts=True)[1] / len(part_of)
    assert abs(changes - (1 - (shares**2).sum())) < 0.05


def test_nothing_to_give(dataset: Dataset, tmp_path: Path):
    nothing = stream(dataset, repeats=lambda p, c: 0 * once(p, c))
    assert list(nothing.batches(64)) == []
    assert list(stream(store(tmp_path / "s", 1, n_runs=0)).batches(64)) == []
    assert list(stream(store(tmp_path / "t", 0)).batches(64)) == []
    beyond = stream(dataset, share=(40, 41))
    assert list(beyond.batches(64)) == []


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [np.ones(3, np.int64), np.ones(1101), -np.ones(1101, np.int64), np.ones((1101, 1), int)],
)
def test_repeats_of_a_wrong_kind_are_refused(
    dataset: Dataset, wrong: np.ndarray[Any, Any], prefetch: bool
):
    with pytest.raises(ValueError, match="expected 1101 integers"):
        list(stream(dataset, repeats=lambda p, c: wrong, prefetch=prefetch).batches(64))


@pytest.mark.parametrize(
    "changes", [{"interleave": 0}, {"window_rows": BLOCK_ROWS - 1}, {"share": (2, 2)}]
)
def test_settings_out_of_range_are_refused(dataset: Dataset, changes: dict[str, Any]):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value}")):
        stream(dataset, **changes)
    with pytest.raises(ValueError, match="batch of 0 examples"):
        next(stream(dataset).batches(0))


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", ["targets/image", "pairs/reconstruction", "pairs/iteration"])
def test_damage_met_while_streaming_is_raised(tmp_path: Path, name: str, prefetch: bool):
    damaged = store(tmp_path / "s", 1)
    group = tmp_path / "s/parts" / damaged.receipts[0].group
    path = next((group / name).glob("c.*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 4
    path.write_bytes(content)
    with pytest.raises(CorruptPartError, match=name):
        list(stream(damaged, repeats=once, prefetch=prefetch).batches(64))


def test_damage_further_on_leaves_what_was_given(dataset: Dataset, tmp_path: Path):
    """Batches before the damaged window are given, and the state is that after the last one."""
    damaged = store(tmp_path / "s", 6, n_runs=3, n_images=20, n_pairs=1100 // 3 + 1, size=2)
    whole = names(stream(dataset).batches(64))
    reader = stream(damaged)
    first = {block.part for block in reader._blocks[:2]}
    part = next(block.part for block in reader._blocks if block.part not in first | {3})
    group = tmp_path / "s/parts" / damaged.receipt(part).group
    next((group / "pairs/reconstruction").glob("c.*")).unlink()
    one = stream(damaged)
    before: list[bytes] = []
    with pytest.raises(CorruptPartError, match=f"part {part}"):
        before.extend(name for batch in one.batches(64) for name in names([batch]))
    assert before == whole[: len(before)]
    assert one.state_dict()["total"] == len(before) > 0


@pytest.mark.usefixtures("dataset")  # zarr keeps a thread from its first use on
@pytest.mark.parametrize("encoding", ["float16", "uint8", "float32"])
def test_pictures_keep_their_scale_where_it_is_not_asked_for(
    tmp_path: Path, encoding: Encoding
) -> None:
    """A run with a mean image of 0 has pictures, which no factor may be applied to."""
    given = columns(n_runs=2, n_images=4, n_pairs=6, size=2)
    given["pairs/reconstruction"] = np.abs(given["pairs/reconstruction"]) / 100
    given["runs/mean_image"][1] = 0
    given["runs/mean_image"][0, 0, 0, 0] = 0  # a black pixel says nothing
    create_or_open(tmp_path / "s", MANIFEST, encoding=encoding)
    write_part(tmp_path / "s", 0, given, provenance=provenance())
    dataset = Dataset(tmp_path / "s")
    raw = dataset.column("pairs/reconstruction")
    (batch,) = PairStream(dataset, seed=0).batches(12, scaled=False)
    zero = ~batch["mean_image"].any(axis=(1, 2, 3))
    assert zero.sum() == 6
    found = np.sort(batch["reconstruction"][zero].max(axis=(1, 2, 3)))
    np.testing.assert_allclose(found, np.sort(raw[6:].max(axis=(1, 2, 3))), rtol=1e-6)
