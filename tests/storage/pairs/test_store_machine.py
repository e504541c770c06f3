"""Any history of writes, races, deaths, failures and repairs leaves exactly what was written."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from storage.errors import CorruptPartError, StoreFullError
from storage.object_store import Location, open_place
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import ENCODINGS, Encoding
from storage.pairs.parts import write_part
from storage.pairs.receipts import Receipt
from storage.pairs.verify import vacuum
from tests.storage.calls import Calls, Killed
from tests.storage.s3_server import S3Server
from tests.storage.stores import MANIFEST, columns, provenance
from tests.storage.storm import Storm, run_apart

PARTS = st.integers(0, 3)
MOMENTS = st.integers(0, 400) | st.integers(0, 40)


class StoreMachine(RuleBasedStateMachine):
    """`written` are the parts that must be there; whatever else is found is an orphan."""

    def __init__(self, new_root: Callable[[], Location]) -> None:
        super().__init__()
        self.root = new_root()
        self.place = open_place(self.root)
        self.written: set[int] = set()
        self.hashes: dict[int, dict[str, str]] = {}

    @initialize(encoding=st.sampled_from(ENCODINGS))
    def create(self, encoding: Encoding) -> None:
        self.encoding = encoding
        create_or_open(self.root, MANIFEST, encoding=encoding)
        self.reader = Dataset(self.root)

    def put(self, part: int) -> Receipt:
        return write_part(self.root, part, columns(seed=part), provenance=provenance())

    @rule(part=PARTS)
    def write(self, part: int) -> None:
        receipt = self.put(part)
        assert self.hashes.setdefault(part, receipt.array_hashes) == receipt.array_hashes
        self.written.add(part)

    @rule(part=PARTS)
    def race(self, part: int) -> None:
        """Another writer publishes when this one has all but published."""
        kind: Any = type(self.place)
        create, others = kind.create, []

        def late(place: Any, name: str, content: bytes) -> bool:
            patch.undo()
            others.append(self.put(part))
            return bool(create(place, name, content))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "create", late)
            receipt = self.put(part)
        assert len(others) == (part not in self.written)
        assert all(other == receipt for other in others)
        self.written.add(part)

    @rule(part=PARTS, at=MOMENTS, once=st.booleans())
    def write_on_a_full_device(self, part: int, at: int, once: bool) -> None:
        if not isinstance(self.root, Path):
            return
        n_before = len(self.place.children("parts"))
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch, lambda: OSError(28, "No space left on device"), at=at, once=once)
            try:
                self.put(part)
            except StoreFullError:
                assert part not in self.written
        if calls.n > at:
            self.look_for(part)
        else:
            self.written.add(part)
        assert len(self.place.children("parts")) - n_before in {0, 1}
        assert not any(name.startswith(".tmp-") for name in self.place.children("receipts")[:1])

    @rule(part=PARTS, at=MOMENTS)
    def die(self, part: int, at: int) -> None:
        """Killed at some moment of the write: nothing that comes after it happens."""

        def kill() -> BaseException:
            return Killed()

        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch, kill, at=at, death=True)
            try:
                self.put(part)
            except Killed:
                assert calls.n > at
        self.look_for(part)

    def look_for(self, part: int) -> None:
        """A write that did not return has published or it has not; never anything between."""
        if f"part-{part:06d}.json" in self.place.children("receipts"):
            self.written.add(part)
        else:
            assert part not in self.written

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def lose_a_receipt(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(sorted(self.written)))
        self.place.remove(f"receipts/part-{part:06d}.json")
        self.written.remove(part)

    @rule()
    def vacuum(self) -> None:
        orphans = sorted(self.reader.verify().orphans)
        if self.written or not any(name.startswith("parts/") for name in orphans):
            assert vacuum(self.root) == ()
        else:  # it looks like a store that lost its receipts
            with pytest.raises(CorruptPartError, match="and no receipt"):
                vacuum(self.root, older_than_s=-1)
        for dry_run in (True, False):
            options = {"older_than_s": -1, "dry_run": dry_run, "without_receipts": True}
            assert sorted(vacuum(self.root, **options)) == orphans
        assert len(self.place.children("parts")) == len(self.written)
        assert len(self.place.children("receipts")) == len(self.written)

    @rule()
    def reopen(self) -> None:
        self.reader = create_or_open(self.root, MANIFEST, encoding=self.encoding)

    @rule()
    def verify(self) -> None:
        report = self.reader.verify()
        assert report.ok, report.problems
        assert report.n_checked == len(self.written)
        assert set(report.gaps) == set(range(max(self.written, default=0))) - self.written

    @invariant()
    def readers_see_what_was_written(self) -> None:
        self.reader.refresh()
        assert [receipt.part for receipt in self.reader.receipts] == sorted(self.written)
        assert self.reader.content_hash == Dataset(self.root).content_hash
        for part in self.written:
            given = columns(seed=part)["pairs/iteration"]
            np.testing.assert_array_equal(self.reader.stored(part, "pairs/iteration"), given)

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self.verify()
            self.vacuum()
            assert self.reader.verify().orphans == ()


def explore(new_root: Callable[[], Location], n_examples: int, n_steps: int) -> None:
    run_state_machine_as_test(
        lambda: StoreMachine(new_root),
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=n_steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.slow
def test_any_history_in_a_folder(memory_path: Path):
    folders: list[Path] = []

    def new_root() -> Path:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        folders[:] = [Path(tempfile.mkdtemp(dir=memory_path))]
        return folders[0] / "s"

    explore(new_root, n_examples=20, n_steps=15)


def test_any_history_on_s3(s3: S3Server):
    numbers = iter(range(10_000))
    explore(lambda: s3.location(str(next(numbers))), n_examples=4, n_steps=8)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_death_at_every_call(memory_path: Path, monkeypatch: pytest.MonkeyPatch, every: int):
    """Before and after each call by which the store changes (in the short test at every eleventh,
    and at all of the last ones): all of a part is there, or nothing, and it can be written."""
    root = memory_path / "s"
    create_or_open(root, MANIFEST)
    reader = Dataset(root)
    given = columns(n_pairs=2, n_images=2)
    with monkeypatch.context() as patch:
        calls = Calls(patch, Killed, death=True)
        write_part(root, 0, given, provenance=provenance())
    moments = sorted({*range(0, calls.n, every), *range(calls.n - 10, calls.n)})
    n_published = 0
    for part, at in enumerate(moments, 1):
        given = columns(seed=part, n_pairs=2, n_images=2)
        with monkeypatch.context() as patch:
            Calls(patch, Killed, at=at, death=True)
            with pytest.raises(Killed):
                write_part(root, part, given, provenance=provenance())
        reader.refresh()
        n_published += part in {receipt.part for receipt in reader.receipts}
        if at % 3 == 0:
            write_part(root, part, given, provenance=provenance())
            reader.refresh()
        if part in {receipt.part for receipt in reader.receipts}:
            right = given["pairs/iteration"]
            np.testing.assert_array_equal(reader.stored(part, "pairs/iteration"), right)
    report = reader.verify()
    assert report.ok, report.problems
    n_groups = sum(name.startswith("parts/") for name in report.orphans)
    n_dead = len(moments)
    assert n_dead - 1 <= n_groups + n_published <= n_dead  # the first died before its folder
    assert 1 <= n_published < 10 < n_groups
    assert sorted(vacuum(root, older_than_s=-1)) == sorted(report.orphans)
    assert reader.verify() == replace(report, orphans=())


TIMEOUT_S = 240.0


def survived(storm: Storm, environment: dict[str, str]) -> None:
    report = run_apart(storm, environment, TIMEOUT_S)
    assert report["faults"] == [], report
    assert report["n_kills"] == storm.n_kills
    assert 0 < report["n_parts_during_the_storm"] <= storm.n_parts
    assert report["reader_columns"] >= 22 * storm.n_parts
    assert report["left_groups"] <= storm.n_kills


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "n_kills"), [("spread", 15), ("race", 8)])
def test_a_storm_of_kills(tmp_path: Path, variant: str, n_kills: int):
    """Nothing torn is seen, nothing receipted is lost, and the end is as if nobody had died."""
    storm = Storm(
        variant=variant,
        location=str(tmp_path / "s"),
        expected=str(tmp_path / "expected.json"),
        scratch=str(tmp_path),
        n_parts=40,
        n_kills=n_kills,
    )
    survived(storm, {})


@pytest.mark.slow
def test_a_storm_of_kills_on_s3(tmp_path: Path, s3: S3Server):
    """The same content hash as in a folder, with two writers at every part."""
    storm = Storm(
        variant="race",
        location=s3.location("s"),
        expected=str(tmp_path / "expected.json"),
        scratch=str(tmp_path),
        n_parts=32,
        n_kills=8,
    )
    survived(storm, s3.environment)
