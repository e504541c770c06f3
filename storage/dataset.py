"""A store of pairs as a whole: the ordered list of its receipts, and what can be asked of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import StorageError, StoreMismatchError
from storage.files import (
    create_file,
    full_device_explained,
    json_bytes,
    sync_folder,
)
from storage.layout import (
    COLUMNS,
    SCHEMA,
    VERSION,
    expand_reconstruction,
    table_of,
)
from storage.parts import PARTS_FOLDER, read_column
from storage.receipts import (
    RECEIPTS_FOLDER,
    Receipt,
    count_images,
    load_receipt,
    receipt_paths,
)
from storage.verify import VerifyReport, verify_store

STORE_FILE = "store.json"
_SHOWN_DIFFERENCES = 3


class Dataset:
    """The store at `root`. Only parts with a receipt are seen, as of opening or `refresh`.

    Raises:
        StorageError: there is no store at `root`.
        StoreMismatchError: it has another schema or a newer version.
        CorruptPartError: a receipt is not as it was written.
    """

    manifest: dict[str, Any]
    receipts: tuple[Receipt, ...]

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = read_manifest(root)
        self._files: dict[tuple[str, int, int], Receipt] = {}
        self.refresh()

    def refresh(self) -> None:
        """Looks for parts that were published since. Reads only receipts that are new files."""
        files: dict[tuple[str, int, int], Receipt] = {}
        for path in receipt_paths(self.root):
            status = path.stat()
            key = (path.name, status.st_ino, status.st_mtime_ns)
            files[key] = self._files.get(key) or load_receipt(path)
        self._files = files
        self.receipts = tuple(files.values())
        self._by_part = {receipt.part: receipt for receipt in self.receipts}

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

        `rows` are contiguous rows of the one table that all `names` are then of.

        Raises:
            ValueError: unknown part or column, or `rows` of several tables.
            CorruptPartError: the stored bytes are not what was written.
        """
        receipt = self.receipt(part)
        if rows is not None and len({table_of(name) for name in names}) > 1:
            raise ValueError(f"rows={rows} of columns of several tables: {', '.join(names)}")
        columns = {name: read_column(self.root, receipt, name, rows) for name in names}
        if "pairs/reconstruction" in columns:
            scale = read_column(self.root, receipt, "pairs/scale", rows)
            columns["pairs/reconstruction"] = expand_reconstruction(
                columns["pairs/reconstruction"], scale
            )
        return columns

    def column(self, name: str) -> npt.NDArray[Any]:
        """One column of all parts, in order. Row references stay local to their parts.

        Raises:
            ValueError: unknown column, or a column of pictures of an empty store.
            CorruptPartError: as `read`.
        """
        pieces = [self.read(receipt.part, [name])[name] for receipt in self.receipts]
        if not pieces:
            if COLUMNS[name].trailing:
                raise ValueError(f"{name} of a store without parts has no shape; generate first")
            return np.empty(0, np.dtype(COLUMNS[name].dtype))
        return np.concatenate(pieces)

    def image_counts(
        self, min_iteration: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Ids of all images that runs were trained on, ascending, and their confident pairs (0 for
        an image that never came back). Only pairs saved at `min_iteration` or later count."""
        counts: dict[int, int] = {}
        for receipt in self.receipts:
            ids, pairs = self._part_counts(receipt, min_iteration)
            for image_id, n_pairs in zip(ids, pairs, strict=True):
                counts[image_id] = counts.get(image_id, 0) + n_pairs
        image_ids = sorted(counts)
        return (
            np.array(image_ids, np.int64),
            np.array([counts[image_id] for image_id in image_ids], np.int64),
        )

    def _part_counts(
        self, receipt: Receipt, min_iteration: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        if min_iteration <= 0:
            return receipt.image_ids, receipt.image_pairs
        needed = ("targets/image_id", "pairs/target_row", "pairs/confident", "pairs/iteration")
        ids, pairs = count_images(self.read(receipt.part, needed), min_iteration=min_iteration)
        return ids.tolist(), pairs.tolist()

    def verify(self) -> VerifyReport:
        """Reads every array of every receipt and compares it with its hash; see `VerifyReport`."""
        return verify_store(self.root)


def create_or_open(root: Path, manifest: dict[str, Any]) -> Dataset:
    """The store at `root` made from `manifest`; created if there is none.

    Raises:
        StoreMismatchError: the store there was made from something else; says what differs.
        StoreFullError: no space for it.
    """
    wanted = json.loads(json_bytes(manifest))
    if not (root / STORE_FILE).exists():
        _make_folders(root)
        if not receipt_paths(root):
            body = {"schema": SCHEMA, "version": VERSION, "manifest": wanted}
            create_file(root / STORE_FILE, json_bytes(body))
            sync_folder(root.parent)
    found = read_manifest(root)
    differences = list(_differences(found, wanted))
    if differences:
        shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
        more = len(differences) - _SHOWN_DIFFERENCES
        raise StoreMismatchError(
            f"{root} was written with other settings: {shown}"
            + (f" and {more} more" if more > 0 else "")
            + "; use those settings again, or another folder"
        )
    return Dataset(root)


def _make_folders(root: Path) -> None:
    try:
        with full_device_explained(root):
            for folder in (root / PARTS_FOLDER, root / RECEIPTS_FOLDER):
                folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make a store at {root} ({error.strerror}); choose another folder"
        ) from error


def read_manifest(root: Path) -> dict[str, Any]:
    """What the store at `root` was made from.

    Raises:
        StorageError: there is none.
        StoreMismatchError: another schema, or a version that this code does not know.
    """
    path = root / STORE_FILE
    if not path.is_file():
        raise StorageError(f"{root} is not a store: it has no {STORE_FILE}; generate one first")
    try:
        store = json.loads(path.read_bytes())
        schema, version, manifest = store["schema"], store["version"], store["manifest"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreMismatchError(
            f"{path} is not the description of a store ({error}); restore it or use another folder"
        ) from error
    if schema != SCHEMA or version != VERSION:
        raise StoreMismatchError(
            f"{root} has schema {schema!r} version {version!r}, this is {SCHEMA!r} version "
            f"{VERSION}; use the release of palimpsest that wrote it, or another folder"
        )
    return dict(manifest)


def _differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """The leaves in which two JSON values differ, as "a.b is 1 there, 2 here"."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*found, *(key for key in wanted if key not in found)]:
            inside = f"{where}.{key}" if where else key
            yield from _differences(found.get(key, _ABSENT), wanted.get(key, _ABSENT), inside)
    elif found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
        yield f"{where} is {_shown(found)} there, {_shown(wanted)} here"


class _Absent:
    def __str__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _shown(value: Any) -> str:
    text = str(value) if value is _ABSENT else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
