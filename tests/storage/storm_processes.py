"""What the processes of a storm do: the writers of a campaign, and a reader that trusts nobody.

The columns of part p are a pure function of p, so what every part must hold is known beforehand.
What a process must remember beyond its death (what it was doing, which parts it saw) is in memory
that it shares with the coordinator, `tests.storage.storm_coordinator`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import time
from typing import Any

import numpy as np

from storage.object_store import open_place
from storage.pairs.dataset import Dataset
from storage.pairs.parts import write_part
from storage.pairs.receipts import array_hash
from storage.pairs.verify import vacuum
from tests.storage.stores import columns, provenance
from tests.storage.storm import N_WRITERS, STAGES, Storm

SHAPE = {"n_runs": 2, "n_images": 40, "n_pairs": 300, "size": 12}
STOP, OPENS, COLUMNS, ROUNDS = range(4)
"""Places in `Shared.counts`."""

_MEETING_S = 0.05


class Shared:
    """Memory of the coordinator and all its children, which no kill of a child can take."""

    def __init__(self, n_parts: int) -> None:
        def numbers(n: int, dtype: Any) -> Any:
            return np.frombuffer(mmap.mmap(-1, n * np.dtype(dtype).itemsize), dtype)

        self.stage = numbers(N_WRITERS + 1, np.uint8)
        self.part = numbers(N_WRITERS, np.int64)
        self.counts = numbers(4, np.int64)
        self.seen = numbers(n_parts, np.uint64)
        self.returned = numbers(n_parts, np.uint64)


def part_columns(part: int) -> dict[str, Any]:
    """The campaign: what part number `part` holds, and nothing else decides."""
    return columns(seed=part, **SHAPE)


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
        receipt = write_part(storm.location, part, part_columns(part), provenance=provenance())
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
        shared.counts[OPENS] += 1
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
