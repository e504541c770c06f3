"""Any history of writes, failures and repairs leaves exactly the parts that were written."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage import files
from storage.dataset import Dataset, create_or_open
from storage.errors import StoreFullError
from storage.verify import vacuum
from tests.storage.stores import MANIFEST, columns, write

PARTS = st.integers(0, 3)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp()) / "s"
        create_or_open(self.root, MANIFEST)
        self.reader = Dataset(self.root)
        self.written: set[int] = set()
        self.hashes: dict[int, dict[str, str]] = {}

    @rule(part=PARTS)
    def write(self, part: int) -> None:
        receipt = write(self.root, part)
        assert self.hashes.setdefault(part, receipt.array_hashes) == receipt.array_hashes
        self.written.add(part)

    @rule(part=PARTS, at=st.integers(0, 60))
    def write_on_a_full_device(self, part: int, at: int) -> None:
        fsync, calls = os.fsync, iter(range(1000))

        def failing(descriptor: int) -> None:
            if next(calls) >= at:
                raise OSError(28, "No space left on device")
            fsync(descriptor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files.os, "fsync", failing)
            if part in self.written:
                write(self.root, part)
            else:
                with pytest.raises(StoreFullError):
                    write(self.root, part)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def lose_a_receipt(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(sorted(self.written)))
        (self.root / f"receipts/part-{part:06d}.json").unlink()
        self.written.remove(part)

    @rule()
    def vacuum(self) -> None:
        vacuum(self.root, older_than_s=-1)
        assert len(list((self.root / "parts").iterdir())) == len(self.written)

    @invariant()
    def readers_see_what_was_written(self) -> None:
        self.reader.refresh()
        assert [receipt.part for receipt in self.reader.receipts] == sorted(self.written)
        assert self.reader.content_hash == Dataset(self.root).content_hash
        for part in self.written:
            iteration = self.reader.read(part, ["pairs/iteration"])["pairs/iteration"]
            assert iteration.tolist() == columns(seed=part)["pairs/iteration"].tolist()

    def teardown(self) -> None:
        report = self.reader.verify()
        assert report.ok
        assert report.n_checked == len(self.written)
        shutil.rmtree(self.root.parent)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=5,
    stateful_step_count=7,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
