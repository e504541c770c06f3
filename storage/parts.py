"""Writing and reading one part: an immutable Zarr v3 group, made visible by its receipt.

Order of a write: the arrays are encoded and hashed in memory; their files go to
`parts/part-000012-<random>.zarr` and are synced; then the receipt, by exclusive atomic create.
Killed before that, it leaves a group that no receipt names (an orphan); two writers of one part
leave one receipt and one orphan. The receipt has a checksum of every file, because a bit flip in a
file's unused bits, and a missing shard, read back silently in zarr.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.encoder import GroupEncoder
from storage.errors import CorruptPartError, StorageError, StoreMismatchError, UnsettledError
from storage.layout import (
    COLUMNS,
    ENCODINGS,
    LATER_COLUMNS,
    SCHEMA,
    VERSION,
    Columns,
    Encoding,
    checked_columns,
    dtype_of,
    shape_of,
    table_of,
)
from storage.places import Location, Place, open_place
from storage.receipts import (
    PARTS_FOLDER,
    Provenance,
    Receipt,
    check_same,
    is_published,
    load_receipt,
    make_receipt,
    publish_receipt,
    receipt_path,
)
from storage.shards import (
    Chunks,
    ShardError,
    read_index,
    read_rows,
    shard_names,
    shard_rows,
)

STORE_FILE = "store.json"
_OPEN_INDEXES = 8192


def write_part(
    root: Location | Place, part: int, columns: Columns, *, provenance: Provenance
) -> Receipt:
    """Writes part number `part` of the store at `root` and returns the receipt that stands for it.

    `columns` has every name of `layout.GIVEN_COLUMNS` and may have those of `LATER_COLUMNS`;
    "pairs/reconstruction" is the raw float32.
    Writing a part that exists with the same values changes nothing and returns its receipt.

    Raises:
        ValueError: the columns do not fit the schema.
        StorageError: there is no store at `root`.
        CorruptPartError: the part exists with other values.
        StoreFullError: the device is full. No receipt was published; what was there is unharmed.
        UnsettledError: S3 did not answer; the part may be there. Writing it again settles it.
    """
    if part < 0:
        raise ValueError(f"part={part}; expected 0 or more")
    place = open_place(root)
    encoding: Encoding = read_store_file(place)["encoding"]
    checked = checked_columns(columns)
    try:
        return check_same(load_receipt(place, receipt_path(part)), _hashes(checked, encoding))
    except FileNotFoundError:
        pass  # the part is to be written
    group = f"part-{part:06d}-{secrets.token_hex(4)}.zarr"
    unsettled = False
    try:
        with GroupEncoder(checked, encoding) as encoder:
            folder = f"{PARTS_FOLDER}/{group}"
            place.write_tree((f"{folder}/{name}", content) for name, content in encoder.files())
            receipt = make_receipt(
                part,
                group,
                checked,
                provenance,
                encoding=encoding,
                array_hashes=encoder.array_hashes(),
                files=encoder.written,
            )
        return publish_receipt(place, receipt)
    except UnsettledError:
        unsettled = True  # the receipt may yet appear: vacuum will know
        raise
    finally:
        if not unsettled and not is_published(place, part, group):
            place.remove(f"{PARTS_FOLDER}/{group}")


def _hashes(checked: Columns, encoding: Encoding) -> dict[str, str]:
    with GroupEncoder(checked, encoding) as encoder:
        return encoder.array_hashes()


def read_store_file(place: Place) -> dict[str, Any]:
    """`store.json` of the store at `place`: its `manifest` and its `encoding`.

    Raises:
        StorageError: there is none.
        StoreMismatchError: another schema, or a version that this code does not know.
    """
    try:
        content = place.read(STORE_FILE)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(
            f"{place} is not a store: it has no {STORE_FILE}; generate one first"
        ) from error
    try:
        store = dict(json.loads(content))
        schema, version = store["schema"], store["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreMismatchError(
            f"{place}/{STORE_FILE} is not the description of a store ({error}); restore it or use "
            "another folder"
        ) from error
    if schema != SCHEMA or version != VERSION:
        raise StoreMismatchError(
            f"{place} has schema {schema!r} version {version!r}, this is {SCHEMA!r} version "
            f"{VERSION}; use the release of palimpsest that wrote it, or another folder"
        )
    if store.get("encoding") not in ENCODINGS or not isinstance(store.get("manifest"), dict):
        raise StoreMismatchError(
            f"{place}/{STORE_FILE} has encoding {store.get('encoding')!r}, expected one of "
            f"{', '.join(ENCODINGS)}, and a manifest; restore it or use another folder"
        )
    return store


def read_column(
    place: Place, receipt: Receipt, name: str, rows: slice | None = None
) -> npt.NDArray[Any]:
    """Column `name` of a part as stored, all rows or the contiguous `rows`. Threads may share it.
    A later column that the part lacks is all NaN.

    Raises:
        ValueError: unknown column, or `rows` with a step.
        CorruptPartError: bytes are missing, do not decode, or do not match their checksums.
    """
    n_rows = rows_of(receipt, name)
    start, stop, step = (rows or slice(None)).indices(n_rows)
    if step != 1:
        raise ValueError(f"rows={rows} has step {step}; read contiguous rows and thin them out")
    shape = shape_of(name, n_rows, receipt.picture)
    out = np.empty((max(0, stop - start), *shape[1:]), dtype_of(name, receipt.encoding))
    if name in LATER_COLUMNS and name not in receipt.array_hashes:
        out.fill(np.nan)
        return out
    per_shard = shard_rows(n_rows)
    for shard, file in enumerate(shard_names(shape, start, stop), start // per_shard):
        first = shard * per_shard
        low, high = max(start, first), min(stop, first + per_shard)
        path = f"{PARTS_FOLDER}/{receipt.group}/{name}/{file}"
        try:
            chunks = _index(place, path, receipt.files[f"{name}/{file}"][0], n_rows)
            read_rows(
                functools.partial(place.read_range, path),
                chunks,
                out[low - start : high - start],
                low - first,
                min(per_shard, n_rows - first),
            )
        except (OSError, ShardError) as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged: {error}"
            raise CorruptPartError(
                f"part {receipt.part}: {place}/{path} {what}; run verify, then remove the part's "
                "receipt and generate it again"
            ) from error
    return out


def columns_of(receipt: Receipt) -> list[str]:
    """The columns that a part has."""
    return [name for name in COLUMNS if name in receipt.array_hashes or name not in LATER_COLUMNS]


def files_of(receipt: Receipt, name: str) -> list[str]:
    """The shard files of column `name`, by their names in the part's group."""
    n_rows = rows_of(receipt, name)
    return [f"{name}/{shard}" for shard in shard_names(shape_of(name, n_rows, receipt.picture))]


def decode_column(receipt: Receipt, name: str, contents: Sequence[bytes]) -> npt.NDArray[Any]:
    """Column `name` as stored, from the contents of `files_of`.

    Raises:
        ShardError: they do not decode.
    """
    n_rows = rows_of(receipt, name)
    shape = shape_of(name, n_rows, receipt.picture)
    out = np.empty(shape, dtype_of(name, receipt.encoding))
    per_shard = shard_rows(n_rows)
    for number, content in enumerate(contents):
        rows = out[number * per_shard : (number + 1) * per_shard]
        read = functools.partial(_bytes_between, content)
        read_rows(read, read_index(read, len(content), n_rows), rows, 0, len(rows))
    return out


def _bytes_between(content: bytes, start: int, stop: int) -> bytes:
    return content[start:stop]


def rows_of(receipt: Receipt, name: str) -> int:
    """How many rows column `name` has in this part; ValueError for an unknown name."""
    if name not in COLUMNS:
        raise ValueError(f"unknown column {name!r}; there are {', '.join(COLUMNS)}")
    return {"runs": receipt.n_runs, "targets": receipt.n_targets, "pairs": receipt.n_pairs}[
        table_of(name)
    ]


@functools.lru_cache(maxsize=_OPEN_INDEXES)
def _index(place: Place, path: str, size: int, n_rows: int) -> Chunks:
    """Parts are immutable, so an index that was read stays valid."""
    return read_index(functools.partial(place.read_range, path), size, n_rows)
