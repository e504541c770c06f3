"""A store of pairs as a whole: the ordered list of its receipts, and what can be asked of it."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.documents import seal_of
from storage.errors import StoreMismatchError, listed
from storage.files import json_bytes
from storage.object_store import Location, Place, open_place
from storage.pairs import layout
from storage.pairs.layout import CHUNK_ROWS, COLUMNS, Encoding
from storage.pairs.parts import read_column
from storage.pairs.receipts import (
    PARTS_FOLDER,
    RECEIPTS_FOLDER,
    Receipt,
    load_receipts,
    receipt_parts,
)
from storage.pairs.verify import VerifyReport, verify_store


class Dataset:
    """The store at `root`, a folder or "s3://bucket/prefix": the parts with a receipt at opening or
    `refresh`. Raises StorageError if there is none, StoreMismatchError if it has another schema or
    a newer version, CorruptPartError if a receipt is not as it was written."""

    manifest: dict[str, Any]
    encoding: Encoding
    receipts: tuple[Receipt, ...]

    def __init__(self, root: Location | Place) -> None:
        self.place: Place = open_place(root)
        self.encoding, self.manifest = layout.read_store_file(self.place)
        self._files: dict[tuple[str, str], Receipt] = {}
        self._only: frozenset[int] | None = None
        self._whole_files = False
        self.refresh()

    @property
    def root(self) -> str:
        return str(self.place)

    def __len__(self) -> int:
        return self.n_pairs

    def __bool__(self) -> bool:
        return True  # a store without pairs is a store

    def __repr__(self) -> str:
        counts = f"{self.n_pairs:,} pairs, {self.n_targets:,} targets, {self.n_runs:,} runs"
        return f"<Dataset {self.root}: {counts}, {len(self.receipts):,} parts>"

    def refresh(self) -> None:
        """Looks for parts that were published since. Reads only receipts that are new files."""
        infos = {info.name: info.version for info in self.place.files(RECEIPTS_FOLDER)}
        found = [
            f"{RECEIPTS_FOLDER}/{layout.receipt_name(part)}"
            for part in receipt_parts(infos)
            if self._only is None or part in self._only
        ]
        keys = [(name, infos[name]) for name in found]
        new = [key for key in keys if key not in self._files]
        loaded = load_receipts(self.place, [name for name, _version in new])
        known = self._files | dict(zip(new, loaded, strict=True))
        self._list({key: known[key] for key in keys})

    def _list(self, files: dict[tuple[str, str], Receipt]) -> None:
        self._files, self.receipts = files, tuple(files.values())
        self._by_part = {receipt.part: receipt for receipt in self.receipts}

    def subset(self, parts: Iterable[int]) -> Dataset:
        """The same store as if it had `parts` alone; a `refresh` brings no other. ValueError for a
        part without a receipt."""
        chosen = frozenset(self.receipt(part).part for part in parts)
        restricted = copy.copy(self)
        restricted._only = chosen
        restricted._list({key: r for key, r in self._files.items() if r.part in chosen})
        return restricted

    def with_whole_files(self) -> Dataset:
        """The same store, whose reads compare every file with its checksum before they first use
        it, so that a file that stands in another one's place is noticed, for the price of reading
        each once more."""
        checking = copy.copy(self)
        checking._whole_files = True
        return checking

    def without(self, parts: Iterable[int]) -> Dataset:
        """The `subset` of all present parts but `parts`."""
        left_out = frozenset(parts)
        return self.subset(r.part for r in self.receipts if r.part not in left_out)

    @property
    def n_runs(self) -> int:
        return sum(receipt.n_runs for receipt in self.receipts)

    @property
    def n_targets(self) -> int:
        return sum(receipt.n_targets for receipt in self.receipts)

    @property
    def n_pairs(self) -> int:
        return sum(receipt.n_pairs for receipt in self.receipts)

    @property
    def content_hash(self) -> str:
        """SHA-256 over the ordered part numbers and array hashes: what the pairs are, not when,
        where or how fast they were made."""
        listing = [[r.part, sorted(r.array_hashes.items())] for r in self.receipts]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()

    def receipt(self, part: int) -> Receipt:
        """The receipt of `part`; ValueError if it has none."""
        if part not in self._by_part:
            raise ValueError(
                f"part={part} has no receipt in {self.root}; there are {len(self.receipts)} parts"
            )
        return self._by_part[part]

    def read(
        self, part: int, names: Sequence[str], rows: slice | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Columns of one part. "pairs/reconstruction" comes as float32 in its original scale.

        `rows` are contiguous rows of the one table that all `names` are then of. Raises ValueError
        for an unknown part or column or `rows` of several tables, CorruptPartError if the stored
        bytes are not what was written.
        """
        if rows is not None and len({layout.table_of(name) for name in names}) > 1:
            raise ValueError(f"rows={rows} of columns of several tables: {', '.join(names)}")
        columns = {name: self.stored(part, name, rows) for name in names}
        if "pairs/reconstruction" in columns:
            scale = self.stored(part, "pairs/scale", rows)
            columns["pairs/reconstruction"] = self.expand(columns["pairs/reconstruction"], scale)
        return columns

    def stored(self, part: int, name: str, rows: slice | None = None) -> npt.NDArray[Any]:
        """A column of one part in the type it has on disk, all rows or contiguous `rows`; raises as
        `read`."""
        receipt = self.receipt(part)
        return read_column(self.place, receipt, name, rows, whole_files=self._whole_files)

    def expand(
        self, stored: npt.NDArray[Any], scale: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        return layout.expand_reconstruction(stored, scale, self.encoding)

    def take(self, names: Sequence[str], rows: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Columns of chosen pairs, counted over the whole store, in the order asked for.

        Columns of targets and runs come as those of each pair's own. Every inner chunk that holds a
        chosen row is read once, whole: sort many rows, or use `storage.pairs.stream`. Raises
        ValueError for an unknown column or a row outside the store, CorruptPartError as `read`.
        """
        chosen = np.asarray(rows, np.int64)
        if chosen.ndim != 1 or (
            len(chosen) and not 0 <= chosen.min() <= chosen.max() < self.n_pairs
        ):
            raise ValueError(
                f"rows have shape {chosen.shape} and go from {chosen.min(initial=0)} to "
                f"{chosen.max(initial=0)}; expected a list of rows below {self.n_pairs}"
            )
        sizes = [receipt.n_pairs for receipt in self.receipts]
        firsts = np.cumsum([0, *sizes])
        index = np.searchsorted(firsts, chosen, side="right") - 1
        taken: dict[str, npt.NDArray[Any]] = {}
        for number in np.unique(index):
            places = np.flatnonzero(index == number)
            part = self.receipts[number].part
            of_table = {"pairs": chosen[places] - firsts[number]}
            for table, reference in (("targets", "pairs/target_row"), ("runs", "pairs/run_row")):
                own = self._scattered(part, reference, of_table["pairs"])
                of_table[table] = own.astype(np.int64)
            for name in names:
                values = self._scattered(part, name, of_table[layout.table_of(name)])
                if name == "pairs/reconstruction":
                    scale = self._scattered(part, "pairs/scale", of_table["pairs"])
                    values = self.expand(values, scale)
                if name not in taken:
                    taken[name] = np.empty((len(chosen), *values.shape[1:]), values.dtype)
                taken[name][places] = values
        for name in set(names) - set(taken):
            taken[name] = self._empty(name)
        return {name: taken[name] for name in names}

    def _scattered(self, part: int, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Rows of one column in any order; neighbouring chunks that are needed are read at once."""
        chunks, position = np.unique(rows // CHUNK_ROWS, return_inverse=True)
        breaks = np.flatnonzero(np.diff(chunks) > 1) + 1
        slices = [
            slice(int(run[0]) * CHUNK_ROWS, int(run[-1] + 1) * CHUNK_ROWS)
            for run in np.split(chunks, breaks)
        ]
        with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)), self.place.n_parallel)) as pool:
            pieces = list(pool.map(lambda piece: self.stored(part, name, piece), slices))
        read: npt.NDArray[Any] = np.concatenate(pieces)
        chosen: npt.NDArray[Any] = read[position * CHUNK_ROWS + rows % CHUNK_ROWS]
        return chosen

    def column(self, name: str) -> npt.NDArray[Any]:
        """One column of all parts, in order. Row references stay local to their parts. Raises
        ValueError for an unknown column or pictures of an empty store, CorruptPartError as
        `read`."""
        pieces = [self.read(receipt.part, [name])[name] for receipt in self.receipts]
        return np.concatenate(pieces) if pieces else self._empty(name)

    def _empty(self, name: str) -> npt.NDArray[Any]:
        if name not in COLUMNS:
            raise ValueError(f"unknown column {name!r}; there are {', '.join(COLUMNS)}")
        if COLUMNS[name].trailing:
            raise ValueError(f"{name} of a store without parts has no shape; generate first")
        return np.empty(0, layout.dtype_of(name, self.encoding))

    def image_counts(
        self, min_iteration: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Ids of all images that runs were trained on, ascending, and their confident pairs (0 for
        an image that never came back). Only pairs saved at `min_iteration` or later count."""
        counts = np.full(0, -1, np.int64)
        for receipt in self.receipts:
            table = receipt.image_table()
            ids, pairs = table.image_ids, table.n_pairs
            if min_iteration > 0:
                needed = ("targets/image_id", "pairs/target_row", "pairs/confident")
                columns = self.read(receipt.part, (*needed, "pairs/iteration"))
                confident = columns["pairs/confident"]
                counted = confident & (columns["pairs/iteration"] >= min_iteration)
                position = np.searchsorted(ids, columns["targets/image_id"])
                rows = columns["pairs/target_row"][counted]
                pairs = np.bincount(position[rows], minlength=len(ids))
            if len(ids) and ids[-1] >= len(counts):
                grown = np.full(int(ids[-1]) + 1, -1, np.int64)
                grown[: len(counts)] = counts
                counts = grown
            known = counts[ids]
            counts[ids] = np.maximum(known, 0, out=known) + pairs
        image_ids = np.flatnonzero(counts >= 0)
        return image_ids, counts[image_ids]

    def verify(self) -> VerifyReport:
        """Reads every array of every receipt and compares it with its hash; see `VerifyReport`."""
        return verify_store(self.place)


def create_or_open(
    root: Location | Place, manifest: dict[str, Any], *, encoding: Encoding = "float16"
) -> Dataset:
    """The store at `root` made from `manifest`; created if there is none. Raises ValueError for an
    unknown `encoding`, StoreMismatchError if the store there was made from something else,
    StoreFullError without space for it."""
    if encoding not in layout.ENCODINGS:
        raise ValueError(f"encoding={encoding!r}; expected one of {', '.join(layout.ENCODINGS)}")
    place = open_place(root)
    wanted = json.loads(json_bytes(manifest))
    if not is_store(place):
        place.make_folders([PARTS_FOLDER, RECEIPTS_FOLDER])
        if not receipt_parts(place.children(RECEIPTS_FOLDER)):
            body = asdict(layout.StoreFile(layout.SCHEMA, layout.VERSION, encoding, wanted))
            sealed = body | {layout.SEAL: seal_of(body)}
            place.create(layout.STORE_FILE, json_bytes(sealed))
    found_encoding, found = layout.read_store_file(place)
    differences = manifest_differences(
        found | {"encoding": found_encoding}, wanted | {"encoding": encoding}
    )
    if differences:
        raise StoreMismatchError(
            f"{place} was written with other settings: {listed(differences, 3, between='; ')}; use "
            "those settings again, or another folder"
        )
    return Dataset(root)


def is_store(root: Location | Place) -> bool:
    """True if there is a store at `root`, of whatever version."""
    try:
        open_place(root).modified(layout.STORE_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def manifest_differences(found: Any, wanted: Any, *, where: str = "") -> list[str]:
    """The leaves in which two JSON values differ, each as "a.b is 1 there, 2 here"."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        differences: list[str] = []
        for key in [*found, *(key for key in wanted if key not in found)]:
            inside = f"{where}.{key}" if where else key
            sides = found.get(key, _ABSENT), wanted.get(key, _ABSENT)
            differences += manifest_differences(*sides, where=inside)
        return differences
    if found == wanted and isinstance(found, bool) == isinstance(wanted, bool):
        return []
    return [f"{where} is {_shown(found)} there, {_shown(wanted)} here"]


_ABSENT = object()


def _shown(value: Any) -> str:
    text = "absent" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
