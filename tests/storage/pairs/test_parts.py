"""Writing, racing, dying and running out of space; and what readers see afterwards."""

from __future__ import annotations

import errno
import multiprocessing
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import CorruptPartError, StorageError
from storage.object_store import Place
from storage.pairs import parts
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import stored_columns
from storage.pairs.parts import write_part
from storage.pairs.receipts import Provenance, array_hash
from storage.pairs.shards import shard_rows
from tests.storage.calls import Calls
from tests.storage.stores import MANIFEST, columns, provenance, store, write


@settings(max_examples=7, deadline=None)
@given(
    shape=st.fixed_dictionaries(
        {
            "n_runs": st.integers(0, 3),
            "n_images": st.integers(1, 200),
            "n_pairs": st.integers(0, 300),
            "size": st.integers(1, 3),
        }
    ),
    start=st.integers(0, 900),
    length=st.integers(0, 900),
)
def test_any_shape_round_trips(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, int], start: int, length: int
):
    root = tmp_path_factory.mktemp("any") / "s"
    receipt = write(root, 0, **shape)
    dataset = Dataset(root)
    assert dataset.receipts == (receipt,)
    stored = stored_columns(columns(**shape))  # type: ignore[arg-type]
    rows = slice(start, start + length)
    for name, array in stored.items():
        assert array_hash(array) == receipt.array_hashes[name]
        if name != "pairs/reconstruction":
            np.testing.assert_array_equal(dataset.read(0, [name], rows)[name], array[rows])
    assert dataset.verify().ok


@pytest.mark.parametrize(
    ("n_rows", "expected"),
    [(0, 256), (1, 256), (256, 256), (257, 512), (16384, 16384), (16385, 16384)],
)
def test_shards_are_whole_chunks_and_no_larger_than_needed(n_rows: int, expected: int):
    assert shard_rows(n_rows) == expected


def test_writing_the_same_part_again_changes_nothing(tmp_path: Path):
    first = write(tmp_path / "s", 0)
    before = sorted((tmp_path / "s").rglob("*"))
    again = write_part(tmp_path / "s", 0, columns(), provenance=provenance(seconds=99.0))
    assert again == first
    assert sorted((tmp_path / "s").rglob("*")) == before


def test_writing_a_part_with_other_values_is_refused(tmp_path: Path):
    write(tmp_path / "s", 0)
    other = columns()
    other["pairs/ssim_best"][3] += 0.25
    with pytest.raises(CorruptPartError, match=r"part 0 .*pairs/ssim_best.*not deterministic"):
        write_part(tmp_path / "s", 0, other, provenance=provenance())
    assert Dataset(tmp_path / "s").verify() == store(tmp_path / "t", 1).verify()


def test_negative_parts_and_odd_provenance_are_refused(tmp_path: Path):
    with pytest.raises(StorageError, match=r"is not a store: it has no store\.json"):
        write_part(tmp_path / "s", 0, columns(), provenance=provenance())
    create_or_open(tmp_path / "s", MANIFEST)
    with pytest.raises(ValueError, match="part=-1"):
        write_part(tmp_path / "s", -1, columns(), provenance=provenance())
    odd = {key: value for key, value in asdict(provenance()).items() if key != "seconds"}
    odd["x"] = 1
    with pytest.raises(ValueError, match=r"(?s)2 validation errors .*seconds.*x"):
        Provenance(**odd)


# two writers


def _write_after(barrier: Any, root: Path, part: int, results: Any) -> None:
    barrier.wait()
    results.put(write(root, part).group)


def test_racing_writers_leave_one_receipt_and_one_group(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    create_or_open(tmp_path / "s", MANIFEST)
    writers = [
        context.Process(target=_write_after, args=(barrier, tmp_path / "s", 0, results))
        for _ in range(3)
    ]
    for writer in writers:
        writer.start()
    groups = [results.get(timeout=60) for _ in writers]
    for writer in writers:
        writer.join()
    dataset = Dataset(tmp_path / "s")
    assert set(groups) == {dataset.receipts[0].group}
    report = dataset.verify()
    assert report.ok
    assert report.orphans == ()


def test_losing_the_race_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another writer publishes after we looked and before we link."""
    root = tmp_path / "s"
    create_or_open(root, MANIFEST)
    publish = parts.publish_receipt

    def late(at: Place, receipt: Any) -> Any:
        monkeypatch.setattr(parts, "publish_receipt", publish)
        winner.append(write(root, 0))
        return publish(at, receipt)

    winner: list[Any] = []
    monkeypatch.setattr(parts, "publish_receipt", late)
    assert write(root, 0) == winner[0]
    assert Dataset(root).verify().orphans == ()


def test_an_interrupt_just_after_publishing_keeps_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    publish = parts.publish_receipt

    def interrupted(at: Place, receipt: Any) -> Any:
        publish(at, receipt)
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "publish_receipt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "s", 0)
    report = Dataset(tmp_path / "s").verify()
    assert (report.ok, report.n_checked) == (True, 1)


def test_other_failures_of_the_device_are_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path / "s", 0)
    Calls(monkeypatch, lambda: OSError(errno.EIO, os.strerror(errno.EIO)), at=3)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "s", 1)
