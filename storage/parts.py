"""Writing and reading one part: an immutable Zarr v3 group, made visible by its receipt.

Order of a write: arrays into `parts/part-000012-<random>.zarr`, fsync of every file and folder,
then the receipt by exclusive atomic create. Killed before that, it leaves a group that no receipt
names (an orphan); two writers of one part leave one receipt and one orphan. Shards are as large as
the part needs, 16,384 rows at most; inner chunks of 256 rows are zstd frames with a checksum,
because a bit flip in an unchecksummed chunk, and a missing shard, read back silently in zarr.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import ZstdCodec

from storage.errors import CorruptPartError, StorageError
from storage.files import full_device_explained, sync_folder, sync_tree
from storage.layout import (
    CHUNK_ROWS,
    COLUMNS,
    OUTCOMES,
    SHARD_ROWS,
    TABLES,
    Columns,
    receipt_name,
    stored_columns,
    table_of,
)
from storage.receipts import (
    RECEIPTS_FOLDER,
    Provenance,
    Receipt,
    array_hash,
    check_same,
    load_receipt,
    make_receipt,
    publish_receipt,
    schema_name,
)

PARTS_FOLDER = "parts"


def write_part(root: Path, part: int, columns: Columns, *, provenance: Provenance) -> Receipt:
    """Writes part number `part` of the store at `root` and returns the receipt that stands for it.

    `columns` has every name of `layout.GIVEN_COLUMNS`; "pairs/reconstruction" is the raw float32.
    Writing a part that exists with the same values changes nothing and returns its receipt.

    Raises:
        ValueError: the columns do not fit the schema.
        StorageError: there is no store at `root`.
        CorruptPartError: the part exists with other values.
        StoreFullError: the device is full. No receipt was published; what was there is unharmed.
    """
    if part < 0:
        raise ValueError(f"part={part}; expected 0 or more")
    if not (root / RECEIPTS_FOLDER).is_dir():
        raise StorageError(f"{root} is not a store; create it with dataset.create_or_open first")
    stored = stored_columns(columns)
    standing = root / RECEIPTS_FOLDER / receipt_name(part)
    if standing.exists():
        hashes = {name: array_hash(array) for name, array in stored.items()}
        return check_same(load_receipt(standing), hashes)
    group = root / PARTS_FOLDER / f"part-{part:06d}-{secrets.token_hex(4)}.zarr"
    try:
        with full_device_explained(group):
            write_group(group, stored)
            sync_tree(group)
            sync_folder(group.parent)
        return publish_receipt(root, make_receipt(part, group.name, stored, provenance))
    finally:
        if not _names_group(standing, group.name):
            shutil.rmtree(group, ignore_errors=True)


def _names_group(receipt: Path, group: str) -> bool:
    """Asked of the file and not of how far we came: an interrupt may hit just after publishing."""
    return receipt.exists() and json.loads(receipt.read_bytes()).get("group") == group


def write_group(group: Path, stored: Columns) -> None:
    """A new Zarr v3 group at `group` with the arrays `stored`, not yet synced."""
    file = zarr.open_group(str(group), mode="w-", zarr_format=3)
    file.attrs["schema"] = schema_name()
    file.attrs["outcomes"] = list(OUTCOMES)
    tables = {table: file.create_group(table) for table in TABLES}
    for name, values in stored.items():
        array = tables[table_of(name)].create_array(
            name.partition("/")[2],
            shape=values.shape,
            dtype=values.dtype,
            chunks=(CHUNK_ROWS, *values.shape[1:]),
            shards=(shard_rows(len(values)), *values.shape[1:]),
            compressors=ZstdCodec(level=1, checksum=True),
            fill_value=0,
            chunk_key_encoding={"name": "default", "separator": "."},
            config={"write_empty_chunks": True},
        )
        if values.size:
            array[...] = values


def shard_rows(n_rows: int) -> int:
    """Rows per shard: whole chunks, no more than `n_rows` need, at least one, at most 16,384."""
    return min(SHARD_ROWS, CHUNK_ROWS * max(1, math.ceil(n_rows / CHUNK_ROWS)))


def read_column(
    root: Path, receipt: Receipt, name: str, rows: slice | None = None
) -> npt.NDArray[Any]:
    """Column `name` of a part as stored, all rows or the contiguous `rows`.

    Raises:
        CorruptPartError: bytes are missing, do not decode, or do not match their checksums.
    """
    n_rows = rows_of(receipt, name)
    start, stop, step = (rows or slice(None)).indices(n_rows)
    if step != 1:
        raise ValueError(f"rows={rows} has step {step}; read contiguous rows and thin them out")
    group = root / PARTS_FOLDER / receipt.group
    fix = "run verify, then remove its receipt and generate it again"
    try:
        array = _open_array(group, name)
        expected = (n_rows, np.dtype(COLUMNS[name].dtype))
        if (array.shape[0], array.dtype) != expected:
            raise CorruptPartError(
                f"part {receipt.part}: {name} has {array.shape[0]} rows of {array.dtype}, its "
                f"receipt says {n_rows} of {expected[1]}; {fix}"
            )
        missing = [
            shard for shard in _shards(group, name, array, start, stop) if not shard.is_file()
        ]
        if missing:
            raise CorruptPartError(f"part {receipt.part}: {missing[0]} is missing; {fix}")
        return np.asarray(array[start : max(start, stop)])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptPartError(
            f"part {receipt.part}: {name} cannot be read from {group} ({reason}); {fix}"
        ) from error


def rows_of(receipt: Receipt, name: str) -> int:
    """How many rows column `name` has in this part; ValueError for an unknown name."""
    if name not in COLUMNS:
        raise ValueError(f"unknown column {name!r}; there are {', '.join(COLUMNS)}")
    return {"runs": receipt.n_runs, "targets": receipt.n_targets, "pairs": receipt.n_pairs}[
        table_of(name)
    ]


def expected_files(group: Path, receipt: Receipt) -> set[Path]:
    """Every file that belongs to the part's group; opens its metadata, so it may raise as zarr."""
    files = {group / "zarr.json"} | {group / table / "zarr.json" for table in TABLES}
    for name in COLUMNS:
        array = _open_array(group, name)
        files.add(group / name / "zarr.json")
        files.update(_shards(group, name, array, 0, rows_of(receipt, name)))
    return files


def forget_open_arrays() -> None:
    """Makes the next read open the arrays' metadata anew, as `verify` must."""
    _open_array.cache_clear()


@lru_cache(maxsize=512)
def _open_array(group: Path, name: str) -> zarr.Array[Any]:
    """Parts are immutable, so an opened array stays valid; only its small metadata is kept."""
    return zarr.open_array(str(group / name), mode="r", zarr_format=3)


def _shards(
    group: Path, name: str, array: zarr.Array[Any], start: int, stop: int
) -> Iterator[Path]:
    """The shard files that hold rows [start, stop); zarr reads a missing one as zeros."""
    assert array.shards is not None
    rows = array.shards[0]
    trailing = ".0" * (array.ndim - 1)
    for number in range(start // rows, math.ceil(stop / rows) if stop > start else 0):
        yield group / name / f"c.{number}{trailing}"
