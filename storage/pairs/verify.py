"""Check of a store, and of what killed writers left in it.

Every file is compared with its checksum, every array decoded and hashed, every count recomputed,
every file explained, also in a store whose receipts are damaged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import CorruptPartError
from storage.files import TEMPORARY_PREFIX, FileInfo, reason_of
from storage.object_store import Location, Place, open_place
from storage.pairs.layout import (
    CHECKED_COLUMNS,
    COLUMNS,
    GROUP_PATTERN,
    OUTCOMES,
    RECEIPT_PATTERN,
    STORE_FILE,
    OnPart,
    check_values,
    fits,
    read_store_file,
    receipt_name,
)
from storage.pairs.parts import decode_column, files_of
from storage.pairs.receipts import (
    PARTS_FOLDER,
    RECEIPTS_FOLDER,
    Receipt,
    array_hash,
    load_receipts,
    pack_images,
    receipt_parts,
    receipt_path,
)
from storage.pairs.shards import ShardError, crc32c

_MAX_PARTS = 4
GRACE_SECONDS = 86400.0
"""A group younger than this may belong to a writer that is alive."""

_COUNTED = (*CHECKED_COLUMNS, "pairs/confident")
"""Columns that the counts in a receipt follow from; the others are let go when they are checked."""

_FIX = "remove its receipt and generate it again"


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Findings of `verify_store`.

    `ok` when every receipt's arrays are there and are what was written. `orphans` (what killed
    writers left behind, or live ones are writing) and `gaps` (part numbers without receipt below
    the last) are not faults: generating again fills the gaps, and orphans may be removed.
    """

    problems: tuple[str, ...]
    orphans: tuple[str, ...]
    gaps: tuple[int, ...]
    n_checked: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_store(
    root: Location | Place, *, on_part: OnPart = lambda _done, _n: None
) -> VerifyReport:
    """Checks everything in the store at `root`; says what is wrong instead of raising it. Raises
    StorageError if there is no store at `root`, or it has another schema."""
    place = open_place(root)
    problems: list[str] = []
    store = None
    try:
        store = read_store_file(place)
    except CorruptPartError as error:
        problems.append(str(error))
    receipts: list[Receipt] = []
    parts = receipt_parts(place.children(RECEIPTS_FOLDER))
    for part in parts:
        try:
            receipts.extend(load_receipts(place, [receipt_path(part)]))
        except CorruptPartError as error:
            problems.append(str(error))
    if store is not None:
        encoding, manifest = store
        problems += [
            f"part {r.part} is in encoding {r.encoding}, the store in {encoding}; restore "
            f"{STORE_FILE}, or remove the part's receipt and generate it again"
            for r in receipts
            if r.encoding != encoding
        ]
        others = [r.part for r in receipts if fits(manifest, r.fingerprint) is False]
        if others:
            were = f"{len(others):,} parts were" if len(others) > 1 else f"part {others[0]} was"
            problems.append(
                f"{place}/{STORE_FILE} has not the settings that {were} made with (the fingerprint "
                f"of part {others[0]} is of another manifest); restore it, or remove those "
                "receipts and generate the parts again"
            )
    with ThreadPoolExecutor(min(_MAX_PARTS, len(os.sched_getaffinity(0)))) as pool:
        found = pool.map(lambda receipt: list(_part_problems(place, receipt)), receipts)
        for done, of_part in enumerate(found, 1):
            problems.extend(of_part)
            on_part(done, len(receipts))
    foreign, orphans = _strangers(place, {receipt.group for receipt in receipts})
    named = {receipt.part for receipt in receipts}
    return VerifyReport(
        problems=(*problems, *foreign),
        orphans=tuple(orphans),
        gaps=tuple(sorted(set(range(max(named, default=-1) + 1)) - set(parts))),
        n_checked=len(receipts),
    )


def vacuum(
    root: Location | Place,
    *,
    older_than_s: float = GRACE_SECONDS,
    dry_run: bool = False,
    without_receipts: bool = False,
) -> tuple[str, ...]:
    """Removes what no receipt names and nobody touched for `older_than_s` seconds; says what.

    A writer that is alive has touched its files recently. With `dry_run` nothing is removed. Raises
    CorruptPartError if a receipt cannot be read, since the part it names would look like an orphan,
    or if there is none at all, unless `without_receipts`; StorageError if there is no store at
    `root`.
    """
    place = open_place(root)
    read_store_file(place)
    parts = receipt_parts(place.children(RECEIPTS_FOLDER))
    names = [receipt_path(part) for part in parts]
    groups = {receipt.group for receipt in load_receipts(place, names)}
    n_groups = len(place.children(PARTS_FOLDER))
    if not groups and n_groups and not (dry_run or without_receipts):
        raise CorruptPartError(
            f"{place} has {n_groups} parts and no receipt, so all of it would be removed; restore "
            f"{RECEIPTS_FOLDER}/, or say --without-receipts if nothing was ever finished there"
        )
    removed = []
    for orphan in _strangers(place, groups)[1]:
        try:
            times = [info.modified for info in orphan_files(place, orphan)]
            touched = max(times) if times else place.modified(orphan)
        except FileNotFoundError:  # its writer has just finished with it
            continue
        if time.time() - touched < older_than_s:
            continue
        if not dry_run:
            place.remove(orphan)
        removed.append(orphan)
    return tuple(removed)


def orphan_files(place: Place, orphan: str) -> list[FileInfo]:
    """The files of an orphan, which is a folder or a file."""
    folder = orphan.rpartition("/")[0]
    inside = place.files(orphan)
    return inside or [info for info in place.files(folder) if info.name == orphan]


def _part_problems(place: Place, receipt: Receipt) -> Iterator[str]:
    what, group = f"part {receipt.part}", f"{PARTS_FOLDER}/{receipt.group}"
    present = {info.name for info in place.files(group)}
    if not present:
        yield f"{what}: {place}/{group} is missing; {_FIX}"
        return
    for path in sorted(present - {f"{group}/{name}" for name in receipt.files}):
        yield f"{what}: {place}/{path} does not belong there; remove it"
    problems: list[str] = []

    def content_of(file: str) -> bytes | None:
        """The file's content; None, and a problem, if it is not what was written."""
        size, checksum = receipt.files[file]
        try:
            content = place.read(f"{group}/{file}", size)
            if len(content) == size and crc32c(content) == checksum:
                return content
            damaged = "is damaged (its checksum differs)"
            problem = damaged if len(content) == size else f"has {len(content)} bytes, not {size}"
        except FileNotFoundError:
            problem = "is missing"
        except OSError as error:
            problem = f"cannot be read ({reason_of(error)})"
        problems.append(f"{what}: {place}/{group}/{file} {problem}; {_FIX}")
        return None

    columns: dict[str, npt.NDArray[Any]] = {}
    others = set(receipt.files)
    for name in COLUMNS:
        files = files_of(receipt, name)
        others -= set(files)
        contents = [content for file in files if (content := content_of(file)) is not None]
        if len(contents) < len(files):
            continue
        try:
            column = decode_column(receipt, name, contents)
        except ShardError as error:
            problems.append(f"{what}: {name} does not decode: {error}; {_FIX}")
            continue
        if array_hash(column) != receipt.array_hashes[name]:
            problems.append(f"{what}: {name} is not what was written (hash differs); {_FIX}")
        elif name in _COUNTED:
            columns[name] = column
    n_problems = len(problems)
    for file in sorted(others):
        content_of(file)
    yield from problems
    if n_problems:
        return
    try:
        check_values(columns, receipt.n_rows)
    except ValueError as error:
        yield f"{what}: {error}; {_FIX}"
        return
    counts = np.bincount(columns["runs/outcome"], minlength=len(OUTCOMES)).tolist()
    outcomes = [receipt.outcomes.get(name, 0) for name in OUTCOMES]
    if pack_images(columns) != receipt.images or counts != outcomes:
        yield f"{what}: the counts in its receipt are not those of its arrays; {_FIX}"


def _strangers(place: Place, groups: set[str]) -> tuple[list[str], list[str]]:
    foreign: list[str] = []
    orphans: list[str] = []
    for folder, pattern in ((PARTS_FOLDER, GROUP_PATTERN), (RECEIPTS_FOLDER, RECEIPT_PATTERN)):
        for name in place.children(folder):
            path = f"{folder}/{name}"
            match = pattern.fullmatch(name)
            if name.startswith(TEMPORARY_PREFIX):
                orphans.append(path)
            elif not match or (folder == RECEIPTS_FOLDER and name != receipt_name(int(match[1]))):
                foreign.append(f"{place}/{path} does not belong to a store; remove it")
            elif folder == PARTS_FOLDER and name not in groups:
                orphans.append(path)
    return foreign, orphans
