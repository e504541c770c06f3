"""What is wrong with a store, and what killed writers left in it.

Verifying trusts nothing but the receipts' own hashes: every array is read and hashed, every count
recomputed, every file explained. It works on a store whose receipts are damaged, which `Dataset`
refuses to open.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import CorruptPartError
from storage.files import TEMPORARY_PREFIX
from storage.layout import COLUMNS, GROUP_PATTERN, OUTCOMES, RECEIPT_PATTERN
from storage.parts import PARTS_FOLDER, expected_files, forget_open_arrays, read_column
from storage.receipts import (
    RECEIPTS_FOLDER,
    Receipt,
    array_hash,
    count_images,
    load_receipt,
    receipt_paths,
)


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What `verify_store` found.

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


def verify_store(root: Path) -> VerifyReport:
    """Checks everything in the store at `root`; says what is wrong instead of raising it."""
    forget_open_arrays()
    problems: list[str] = []
    receipts: list[Receipt] = []
    for path in receipt_paths(root):
        try:
            receipts.append(load_receipt(path))
        except CorruptPartError as error:
            problems.append(str(error))
    for receipt in receipts:
        problems.extend(_part_problems(root, receipt))
    parts = {receipt.part for receipt in receipts}
    foreign, orphans = _strangers(root, {receipt.group for receipt in receipts})
    return VerifyReport(
        problems=(*problems, *foreign),
        orphans=orphans,
        gaps=tuple(sorted(set(range(max(parts, default=-1) + 1)) - parts)),
        n_checked=len(receipts),
    )


def vacuum(root: Path, *, older_than_s: float = 86400.0) -> tuple[str, ...]:
    """Removes what no receipt names and nobody touched for `older_than_s` seconds; says what.

    A writer that is alive has touched its files recently. Refuses with CorruptPartError when a
    receipt cannot be read, because the part it names would look like an orphan.
    """
    groups = {load_receipt(path).group for path in receipt_paths(root)}
    removed = []
    for orphan in _strangers(root, groups)[1]:
        path = root / orphan
        newest = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
        if time.time() - newest < older_than_s:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        removed.append(orphan)
    return tuple(removed)


def _part_problems(root: Path, receipt: Receipt) -> Iterator[str]:
    """What is wrong with the arrays of one part."""
    group = root / PARTS_FOLDER / receipt.group
    if not group.is_dir():
        yield f"part {receipt.part}: {group} is missing; remove its receipt and generate it again"
        return
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, expected in receipt.array_hashes.items():
        try:
            columns[name] = read_column(root, receipt, name)
        except CorruptPartError as error:
            yield str(error)
            continue
        if array_hash(columns[name]) != expected:
            yield (
                f"part {receipt.part}: {name} is not what was written (hash differs); remove its "
                "receipt and generate it again"
            )
    if len(columns) < len(COLUMNS):
        return
    image_ids, image_pairs = count_images(columns)
    outcomes = np.bincount(columns["runs/outcome"], minlength=len(OUTCOMES)).tolist()
    if (
        tuple(image_ids.tolist()) != receipt.image_ids
        or tuple(image_pairs.tolist()) != receipt.image_pairs
        or outcomes != list(receipt.outcomes.values())
    ):
        yield f"part {receipt.part}: the counts in its receipt are not those of its arrays"
    present = {path for path in group.rglob("*") if path.is_file()}
    for path in sorted(present - expected_files(group, receipt)):
        yield f"part {receipt.part}: {path} does not belong there; remove it"


def _strangers(root: Path, groups: set[str]) -> tuple[list[str], tuple[str, ...]]:
    """Files in the store's folders that nothing explains, and leftovers of killed writers."""
    foreign: list[str] = []
    orphans: list[str] = []
    for folder, pattern in ((PARTS_FOLDER, GROUP_PATTERN), (RECEIPTS_FOLDER, RECEIPT_PATTERN)):
        for path in sorted((root / folder).iterdir()):
            if path.name.startswith(TEMPORARY_PREFIX):
                orphans.append(str(path.relative_to(root)))
            elif not pattern.fullmatch(path.name):
                foreign.append(f"{path} does not belong to a store; remove it")
            elif folder == PARTS_FOLDER and path.name not in groups:
                orphans.append(str(path.relative_to(root)))
    return foreign, tuple(orphans)
