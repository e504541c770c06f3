"""Writing and reading one part: an immutable Zarr v3 group, made visible by its receipt.

The arrays are encoded and hashed in memory; their files go to `parts/part-000012-<random>.zarr` and
are synced; then the receipt, by exclusive atomic create. A writer that is killed, or second, leaves
a group that no receipt names (an orphan). The receipt has a checksum of every file: a bit flip in
unused bits, and a missing shard, read back silently in zarr.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import CorruptPartError
from storage.object_store import Location, Place, open_place
from storage.pairs.encoder import GroupEncoder
from storage.pairs.layout import (
    COLUMNS,
    MAX_PART,
    Columns,
    Encoding,
    checked_columns,
    dtype_of,
    limit_of,
    shape_of,
    table_of,
)
from storage.pairs.receipts import (
    PARTS_FOLDER,
    Provenance,
    Receipt,
    check_same,
    load_receipt,
    make_receipt,
    new_group,
    publish_receipt,
    receipt_path,
)
from storage.pairs.shards import (
    Chunks,
    ReadRange,
    ShardError,
    crc32c,
    read_index,
    read_rows,
    shard_names,
    shard_rows,
)
from storage.pairs.store_file import read_store_file

_OPEN_INDEXES = 8192


def write_part(
    root: Location | Place, part: int, columns: Columns, *, provenance: Provenance
) -> Receipt:
    """Writes part number `part` of the store at `root` and returns the receipt that stands for it.

    `columns` has the names of `layout.GIVEN_COLUMNS`. Writing a part that exists with the same
    values changes nothing and returns its receipt. Raises ValueError if the columns do not fit the
    schema, StorageError without a store at `root`, CorruptPartError if the part exists with other
    values, StoreFullError before any receipt, and UnsettledError if S3 did not answer: writing it
    again settles it.
    """
    if not 0 <= part <= MAX_PART:
        raise ValueError(f"part={part}; expected 0 to {MAX_PART}")
    place = open_place(root)
    encoding = read_store_file(place).encoding
    checked = checked_columns(columns)
    try:
        return check_same(load_receipt(place, receipt_path(part)), _hashes(checked, encoding))
    except FileNotFoundError:
        pass  # the part is to be written
    with new_group(place, part) as group:
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


def _hashes(checked: Columns, encoding: Encoding) -> dict[str, str]:
    with GroupEncoder(checked, encoding) as encoder:
        return encoder.array_hashes()


def read_column(
    place: Place,
    receipt: Receipt,
    name: str,
    rows: slice | None = None,
    *,
    whole_files: bool = False,
) -> npt.NDArray[Any]:
    """Column `name` of a part as stored, all rows or the contiguous `rows`. Threads may share it.

    Every chunk has a checksum, but another part's file in the place of one of this part has right
    ones, too. With `whole_files` a file is first compared, once, with its checksum in the receipt.
    Raises ValueError for an unknown column or `rows` with a step, CorruptPartError for bytes that
    are missing, do not decode, or do not match their checksums.
    """
    n_rows = rows_of(receipt, name)
    start, stop, step = (rows or slice(None)).indices(n_rows)
    if step != 1:
        raise ValueError(f"rows={rows} has step {step}; read contiguous rows and thin them out")
    shape = shape_of(name, n_rows, receipt.picture)
    out = np.empty((max(0, stop - start), *shape[1:]), dtype_of(name, receipt.encoding))
    per_shard = shard_rows(n_rows)
    for shard, file in enumerate(shard_names(shape, start, stop), start // per_shard):
        first = shard * per_shard
        low, high = max(start, first), min(stop, first + per_shard)
        path = f"{PARTS_FOLDER}/{receipt.group}/{name}/{file}"
        try:
            size, checksum = receipt.files[f"{name}/{file}"]
            chunks = _index(place, path, size, n_rows, checksum if whole_files else None)
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
    limit = limit_of(name, receipt.n_rows)
    if limit is not None and out.size and not 0 <= out.min() <= out.max() < limit:
        raise CorruptPartError(
            f"part {receipt.part} of {place}: {name} goes from {out.min()} to {out.max()}, "
            f"expected 0 to {limit - 1}; run verify, then remove the part's receipt and generate "
            "it again"
        )
    return out


def files_of(receipt: Receipt, name: str) -> list[str]:
    """The shard files of column `name`, by their names in the part's group."""
    n_rows = rows_of(receipt, name)
    return [f"{name}/{shard}" for shard in shard_names(shape_of(name, n_rows, receipt.picture))]


def decode_column(receipt: Receipt, name: str, contents: Sequence[bytes]) -> npt.NDArray[Any]:
    """Column `name` as stored, from the contents of `files_of`; ShardError if they do not
    decode."""
    n_rows = rows_of(receipt, name)
    shape = shape_of(name, n_rows, receipt.picture)
    out = np.empty(shape, dtype_of(name, receipt.encoding))
    per_shard = shard_rows(n_rows)
    for number, content in enumerate(contents):
        rows = out[number * per_shard : (number + 1) * per_shard]
        read = _reader(content)
        read_rows(read, read_index(read, len(content), n_rows), rows, 0, len(rows))
    return out


def _reader(content: bytes) -> ReadRange:
    return lambda start, stop: content[start:stop]


def rows_of(receipt: Receipt, name: str) -> int:
    """Number of rows of column `name` in this part; ValueError for an unknown name."""
    if name not in COLUMNS:
        raise ValueError(f"unknown column {name!r}; there are {', '.join(COLUMNS)}")
    return receipt.n_rows[table_of(name)]


@functools.lru_cache(maxsize=_OPEN_INDEXES)
def _index(place: Place, path: str, size: int, n_rows: int, checksum: int | None) -> Chunks:
    """Parts are immutable, so an index that was read stays valid, and so does a file that had the
    `checksum` that it is to have (None: any)."""
    read: ReadRange = functools.partial(place.read_range, path)
    if checksum is not None:
        content = place.read(path, size)
        if len(content) != size or crc32c(content) != checksum:
            raise ShardError("it is not the file that was written (its checksum differs)")
        read = _reader(content)
    return read_index(read, size, n_rows)
