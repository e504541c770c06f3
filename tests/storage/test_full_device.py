"""A device without space: one clear line, a store that verifies, and the same end afterwards.

Each call by which a store changes fails in turn.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from storage.errors import StoreFullError
from storage.pairs.dataset import Dataset, create_or_open
from tests.storage.calls import Calls
from tests.storage.stores import MANIFEST, store, write

SHAPE = {"n_runs": 1, "n_images": 8, "n_pairs": 40, "size": 8}


def full(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("code", "once"),
    [
        pytest.param(errno.ENOSPC, False, marks=pytest.mark.slow),
        (errno.EDQUOT, False),
        pytest.param(errno.ENOSPC, True, marks=pytest.mark.slow),
    ],
    ids=["full", "over quota", "full for a moment"],
)
def test_no_space_at_any_call(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, once: bool
):
    """Whichever call fails, the part is not there and nothing of it is; then it can be written.

    Only after its receipt has its name a part is there although the last sync failed. A quota is
    another code on the same paths, so every ninth call and the last ten are enough for it.
    """
    root = memory_path / "s"
    dataset = store(root, 1, **SHAPE)
    with monkeypatch.context() as patch:
        calls = Calls(patch, lambda: full(code))
        write(root, 1, **SHAPE)
        n_moments = calls.n
    assert n_moments > 100
    part, n_there = 2, 0
    for at in range(n_moments):
        if code == errno.EDQUOT and at % 9 and at < n_moments - 10:
            continue
        with monkeypatch.context() as patch:
            Calls(patch, lambda: full(code), at=at, once=once)
            with pytest.raises(StoreFullError, match="free some space"):
                write(root, part, **SHAPE)
        report = dataset.verify()
        assert report.ok, (at, report.problems)
        assert report.orphans == (), at
        assert report.n_checked in {part, part + 1}
        there = report.n_checked == part + 1
        assert not there or at > n_moments - 3
        if there or at % 30 == 0:
            write(root, part, **SHAPE)
            part += 1
            n_there += there
    assert n_there < 3
    write(root, part, **SHAPE)
    assert Dataset(root).content_hash == store(memory_path / "calm", part + 1, **SHAPE).content_hash


def test_no_space_for_a_new_store(memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        calls = Calls(patch, lambda: full(errno.ENOSPC))
        create_or_open(memory_path / "first", MANIFEST)
        n_moments = calls.n
    for at in range(n_moments):
        root = memory_path / f"s{at}"
        with monkeypatch.context() as patch:
            Calls(patch, lambda: full(errno.ENOSPC), at=at)
            with pytest.raises(StoreFullError, match="free some space"):
                create_or_open(root, MANIFEST)
        write(root, 0)
        assert Dataset(root).verify().ok
        assert sorted(path.name for path in root.iterdir()) == ["parts", "receipts", "store.json"]
