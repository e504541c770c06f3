"""A campaign of writers and a reader that are killed at random moments, and what is left of it.

    python -m tests.storage.storm '{"variant": "spread", "location": ..., ...}'

runs one storm and prints a JSON report. It is a process of its own because it forks: a writer that
is killed is replaced in a few milliseconds. The coordinator therefore touches no store before its
last fork. The columns of part p are a pure function of p, so the campaign's content hash is known
from one that nobody disturbed. Everything that a process must remember beyond its death (what it
was doing, which parts it saw) is in memory that the coordinator shares with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import obstore  # noqa: F401  imported before the forks, which are then quick
import zarr  # noqa: F401

from storage.errors import StorageError
from storage.object_store import open_place
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from storage.pairs.receipts import array_hash
from storage.pairs.verify import vacuum
from tests.storage.stores import MANIFEST, columns, provenance

N_WRITERS = 4
READER = N_WRITERS
STAGES = ("reading", "encoding", "writing", "syncing", "written", "publishing", "linked", "done")
"""What a writer does, in order: looks which parts are missing; compresses; writes the arrays; syncs
them; all of them are there; writes the receipt under a temporary name or sends it; its name is
there (local); the receipt is published."""


@dataclass(frozen=True, kw_only=True)
class Storm:
    """One storm: "spread" gives the writers different parts, "race" two writers every part.

    `expected` is a JSON file with what an undisturbed campaign gives; it is made if it is absent.
    """

    variant: str
    location: str
    expected: str
    scratch: str
    n_parts: int
    n_kills: int
    seed: int = 0


def run_apart(storm: Storm, environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """The report of `storm`, see `run`; none of its processes is left after it. RuntimeError if it
    broke off; faults of the store are in the report's `faults` instead."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.storm", json.dumps(asdict(storm))],
        cwd=Path(__file__).parents[2],
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, _err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        faults = Path(storm.scratch, "faults.txt")
        raise RuntimeError(
            f"the storm ended with code {process.returncode}: "
            f"{faults.read_text() if faults.exists() else ''}"
        )
    report: dict[str, Any] = json.loads(out)
    return report


SHAPE = {"n_runs": 2, "n_images": 40, "n_pairs": 300, "size": 12}
STOP, COLUMNS, ROUNDS = range(3)
"""Places in `Shared.counts`."""

_MEETING_S = 0.05


class Shared:
    """Memory of the coordinator and all its children, which no kill of a child can take."""

    def __init__(self, n_parts: int) -> None:
        def numbers(n: int, dtype: Any) -> Any:
            return np.frombuffer(mmap.mmap(-1, n * np.dtype(dtype).itemsize), dtype)

        self.stage = numbers(N_WRITERS + 1, np.uint8)
        self.part = numbers(N_WRITERS, np.int64)
        self.counts = numbers(3, np.int64)
        self.seen = numbers(n_parts, np.uint64)
        self.returned = numbers(n_parts, np.uint64)


def write_on(storm: Storm, shared: Shared, slot: int, seed: tuple[int, int]) -> None:
    """Writes missing parts until there are none: of its own share in random order, or, of a share
    it has with another writer, always the first one, so that both are at it at the same time."""
    race = storm.variant.startswith("race")
    share, n_shares = (slot // 2, N_WRITERS // 2) if race else (slot, N_WRITERS)
    rng = random.Random(str(seed))
    _watch_stages(storm.location, shared.stage, slot)
    if race:
        _meet_before_publishing(storm.location, shared, slot)
    dataset = Dataset(storm.location)
    while True:
        shared.stage[slot] = STAGES.index("reading")
        dataset.refresh()
        there = {receipt.part for receipt in dataset.receipts}
        missing = [p for p in range(share, storm.n_parts, n_shares) if p not in there]
        if not missing:
            return
        part = missing[0] if race else rng.choice(missing)
        shared.part[slot] = part
        shared.stage[slot] = STAGES.index("encoding")
        receipt = write_part(
            storm.location, part, columns(seed=part, **SHAPE), provenance=provenance()
        )
        group = group_number(receipt.group)
        before = int(shared.returned[part])
        if before not in {0, group}:
            raise AssertionError(f"part {part}: two writers were given different receipts")
        shared.returned[part] = group


def read_on(storm: Storm, shared: Shared, expected: Any, seed: tuple[int, int]) -> None:
    """Opens the store again and again and compares what it reads; raises at the first difference.

    Told to stop, it reads every column of every part once more and returns.
    """
    rng = random.Random(str(seed))
    dataset = Dataset(storm.location)
    while True:
        last = bool(shared.counts[STOP])
        if last or rng.random() < 0.2:
            dataset = Dataset(storm.location)
        else:
            dataset.refresh()
        parts = [receipt.part for receipt in dataset.receipts]
        _check_seen(dataset, shared)
        for part in parts if last else rng.sample(parts, min(3, len(parts))):
            hashes = expected["array_hashes"][str(part)]
            for name in hashes if last else rng.sample(sorted(hashes), 4):
                if array_hash(dataset.stored(part, name)) != hashes[name]:
                    raise AssertionError(f"part {part}: {name} is torn or half there")
                shared.counts[COLUMNS] += 1
        shared.counts[ROUNDS] += 1
        if parts and shared.counts[ROUNDS] % 20 == 0:  # beside writers at work, with a day of grace
            removed = vacuum(storm.location)
            if removed:
                raise AssertionError(f"vacuum removed {removed}, which is not a day old")
        if shared.counts[ROUNDS] % 50 == 0:
            problems = dataset.verify().problems
            if problems:
                raise AssertionError(f"verify, beside writers at work: {problems}")
        if last:
            return
        time.sleep(0.005)


def _check_seen(dataset: Dataset, shared: Shared) -> None:
    """What was seen before, or returned to a writer before we looked, is there unchanged."""
    groups = {receipt.part: group_number(receipt.group) for receipt in dataset.receipts}
    for part in np.flatnonzero(shared.seen).tolist():
        if groups.get(part) != int(shared.seen[part]):
            raise AssertionError(f"part {part} was seen and is now lost or another one")
    for part, group in groups.items():
        shared.seen[part] = group


def _watch_stages(location: str, stage: Any, slot: int) -> None:
    """Makes this process say what it does, from the calls that it makes of its place."""
    kind: Any = type(open_place(location))
    numbers = {name: number for number, name in enumerate(STAGES)}

    def watched(owner: Any, name: str, before: str, after: str, only: tuple[str, ...] = ()) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if only and STAGES[stage[slot]] not in only:
                return function(*args, **kwargs)
            stage[slot] = numbers[before]
            result = function(*args, **kwargs)
            stage[slot] = numbers[after]
            return result

        setattr(owner, name, call)

    watched(kind, "write_tree", "writing", "written")
    watched(kind, "create", "publishing", "done")
    watched(os, "fsync", "syncing", "syncing", only=("writing",))
    watched(os, "link", "publishing", "linked")


def _meet_before_publishing(location: str, shared: Shared, slot: int) -> None:
    """Lets a writer that is about to publish wait a moment for the other one of the same part, so
    that both try at once."""
    kind: Any = type(open_place(location))
    create, other = kind.create, slot ^ 1

    def call(*args: Any) -> Any:
        shared.stage[slot] = publishing
        end = time.monotonic() + _MEETING_S
        while time.monotonic() < end and not (
            shared.part[other] == shared.part[slot] and shared.stage[other] >= publishing
        ):
            time.sleep(0)
        return create(*args)

    publishing = STAGES.index("publishing")
    kind.create = call


def group_number(group: str) -> int:
    """A number above 0 that stands for the name of a group."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:7], "little") + 1


AIMED = ("writing", "syncing", "written", "publishing", "linked", "done")
AIMED_ON_S3 = ("writing", "written", "publishing", "done")
_TIMES_SLOWER_ON_S3 = 5  # than in a folder, where the time of a part is measured


def run(storm: Storm) -> dict[str, Any]:
    """Runs it and says what happened; `faults` is empty when everything is as it must be."""
    start = time.monotonic()
    faults = Path(storm.scratch, "faults.txt")
    faults.write_text("")
    if not Path(storm.expected).exists():
        _make_expected(storm, faults)
    expected = json.loads(Path(storm.expected).read_bytes())
    shared = Shared(storm.n_parts)
    coordinator = _Coordinator(storm, shared, expected, faults)
    tally: Counter[str] = Counter()
    n_stormed, report = 0, {}
    try:
        coordinator.begin()
        for number in range(storm.n_kills):
            n_written = int((shared.returned != 0).sum())
            late = n_written * storm.n_kills > number * storm.n_parts
            tally[coordinator.kill_one(late=late)] += 1
        n_stormed = int((shared.returned != 0).sum())
        coordinator.resume()
        report = _final(storm, shared, expected)
    except _Ended as ended:
        report = {"faults": [str(ended)]}
    finally:
        coordinator.end()
    return {
        "n_parts": storm.n_parts,
        "kills": dict(sorted(tally.items())),
        "n_kills": sum(tally.values()),
        "n_parts_during_the_storm": n_stormed,
        "reader_columns": int(shared.counts[COLUMNS]),
        "seconds": round(time.monotonic() - start, 1),
        **report,
        "faults": faults.read_text().strip().splitlines() + report.get("faults", []),
    }


class _Ended(Exception):
    """A process of the storm ended otherwise than it should."""


class _Coordinator:
    """The processes of one storm: starts, kills, replaces and finally waits for them."""

    def __init__(self, storm: Storm, shared: Shared, expected: Any, faults: Path) -> None:
        self.storm, self.shared, self.expected, self.faults = storm, shared, expected, faults
        self.rng = random.Random(storm.seed)
        self.children: dict[int, int] = {}
        on_s3 = storm.location.startswith("s3:")
        self.part_s = expected["part_s"] * (_TIMES_SLOWER_ON_S3 if on_s3 else 1)
        self.mean_s = self.part_s / N_WRITERS  # between two kills
        self.aimed = AIMED_ON_S3 if on_s3 else AIMED
        self.n_started = 0

    def begin(self) -> None:
        _wait(_fork(lambda: create_or_open(self.storm.location, MANIFEST), self.faults))
        for slot in range(N_WRITERS + 1):
            self.start(slot)

    def start(self, slot: int) -> None:
        """A fresh process in `slot`: the last slot is the reader's."""
        self.n_started += 1
        seed = (self.storm.seed, self.n_started)
        self.shared.stage[slot] = 0
        body: Callable[[], object]
        if slot == READER:
            body = lambda: read_on(self.storm, self.shared, self.expected, seed)  # noqa: E731
        else:
            body = lambda: write_on(self.storm, self.shared, slot, seed)  # noqa: E731
        self.children[slot] = _fork(body, self.faults)

    def kill_one(self, *, late: bool) -> str:
        """Kills one process at a random moment, says what it was doing, and replaces it.

        Half of the moments are random; the others wait for a stage, because the stages after the
        arrays are written are short. `late`, when the campaign is nearer to its end than the storm,
        waits less.
        """
        while True:
            time.sleep(self.rng.expovariate(4 / self.mean_s if late else 1 / self.mean_s))
            slot = READER if self.rng.random() < 0.1 else self.rng.choice(self.writers())
            if slot != READER and not late and self.rng.random() < 0.5:
                aim = self.rng.choice(self.aimed)
                self.wait_for(slot, STAGES.index(aim))
                if aim in {"writing", "syncing"}:
                    time.sleep(self.rng.random() * 0.005)
            pid = self.children.pop(slot)
            os.kill(pid, signal.SIGKILL)
            _pid, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status):
                stage = "reader" if slot == READER else STAGES[self.shared.stage[slot]]
                self.start(slot)
                return stage
            if status or slot == READER:
                raise _Ended(f"process {slot} ended with status {status} before its kill")

    def writers(self) -> list[int]:
        """Those that are not at the end of their share."""
        left = [slot for slot in self.children if slot != READER]
        if not left:
            raise _Ended(f"all parts are there; give the storm more than {self.storm.n_parts}")
        return left

    def wait_for(self, slot: int, stage: int) -> None:
        end = time.monotonic() + self.part_s
        while self.shared.stage[slot] != stage and time.monotonic() < end:
            time.sleep(2e-5)

    def resume(self) -> None:
        """Lets the writers come to the end, and the reader look at everything once more."""
        for slot in range(N_WRITERS):
            if slot in self.children:
                _wait(self.children.pop(slot))
        self.shared.counts[STOP] = 1
        _wait(self.children.pop(READER))

    def end(self) -> None:
        for pid in self.children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _make_expected(storm: Storm, faults: Path) -> None:
    """Runs the campaign with as many writers and no kills, in a folder, and keeps its hashes."""
    calm = replace(
        storm, variant="spread", location=str(Path(storm.scratch, f"calm-{storm.n_parts}"))
    )
    shared = Shared(storm.n_parts)
    _wait(_fork(lambda: create_or_open(calm.location, MANIFEST), faults))
    start = time.monotonic()
    writers = [
        _fork(lambda slot=slot: write_on(calm, shared, slot, (0, slot)), faults)  # type: ignore[misc]
        for slot in range(N_WRITERS)
    ]
    for pid in writers:
        _wait(pid)
    part_s = (time.monotonic() - start) * N_WRITERS / storm.n_parts
    _wait(_fork(lambda: _keep_expected(calm, storm.expected, part_s), faults))


def _keep_expected(calm: Storm, path: str, part_s: float) -> None:
    dataset = Dataset(calm.location)
    report = dataset.verify()
    assert (report.ok, report.orphans) == (True, ()), report
    body = {
        "content_hash": dataset.content_hash,
        "part_s": part_s,
        "array_hashes": {receipt.part: receipt.array_hashes for receipt in dataset.receipts},
    }
    Path(path).write_text(json.dumps(body))


def _final(storm: Storm, shared: Shared, expected: Any) -> dict[str, Any]:
    """What the storm left, and what vacuum makes of it."""
    faults: list[str] = []

    def must(true: bool, otherwise: str) -> None:
        if not true:
            faults.append(otherwise)

    dataset = Dataset(storm.location)
    must(dataset.content_hash == expected["content_hash"], "the content hash is another one")
    groups = {receipt.part: group_number(receipt.group) for receipt in dataset.receipts}
    for part in range(storm.n_parts):
        for numbers, who in ((shared.seen, "the reader saw"), (shared.returned, "a writer got")):
            number = int(numbers[part])
            must(number in {0, groups.get(part)}, f"part {part}, which {who}, is lost or replaced")
    before = dataset.verify()
    must(before.ok, f"before vacuum: {before.problems[:3]}")
    must(before.n_checked == storm.n_parts, f"{before.n_checked} of {storm.n_parts} parts")
    would = vacuum(storm.location, older_than_s=0, dry_run=True)
    removed = vacuum(storm.location, older_than_s=0)
    must(sorted(would) == sorted(removed), "vacuum did not do what its dry run said")
    must(sorted(removed) == sorted(before.orphans), "vacuum and verify differ on the orphans")
    after = dataset.verify()
    must(after.ok and after.orphans == (), f"after vacuum: {after}")
    place = open_place(storm.location)
    n_groups, n_receipts = len(place.children("parts")), len(place.children("receipts"))
    must((n_groups, n_receipts) == (storm.n_parts,) * 2, f"{n_groups} groups, {n_receipts} files")
    must(set(place.children("")) == {"store.json", "parts", "receipts"}, "a foreign file")
    temporaries = sum(".tmp-" in name for name in removed)
    return {
        "left_groups": len(removed) - temporaries,
        "left_temporary_files": temporaries,
        "faults": faults,
    }


def _fork(body: Callable[[], object], faults: Path) -> int:
    """A child that runs `body` and ends; it dies with its parent. Faults go into the file."""
    pid = os.fork()
    return pid or _child(body, faults)


def _child(body: Callable[[], object], faults: Path) -> NoReturn:
    _die_with_parent()
    status = 1
    try:
        body()
        status = 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        text = traceback.format_exc() if not isinstance(error, StorageError) else ""
        with faults.open("a") as file:
            file.write(f"{type(error).__name__}: {error} {text}\n")
    finally:
        os._exit(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait(pid: int) -> None:
    _pid, status = os.waitpid(pid, 0)
    if status:
        raise _Ended(f"a process of the storm ended with status {status}")


if __name__ == "__main__":
    _die_with_parent()
    sys.stdout.write(json.dumps(run(Storm(**json.loads(sys.argv[1])))) + "\n")
