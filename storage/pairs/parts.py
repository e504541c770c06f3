"""Writing and reading one part: an immutable Zarr v3 group, made visible by its receipt.

The arrays are encoded and hashed in memory; their files go to `parts/part-000012-<random>.zarr` and
are synced; then the receipt, by exclusive atomic create. Casts, zstd and SHA-256 leave the
interpreter to other threads, so a part is compressed on all cores while files that are complete are
being written. A writer that is killed, or second, leaves a group that no receipt names (an orphan).
The receipt has a checksum of every file: a bit flip in unused bits, and a missing shard, read back
silently in zarr.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore

from storage.errors import CorruptPartError
from storage.files import Content
from storage.object_store import Location, Place, open_place
from storage.pairs import layout, shards
from storage.pairs.layout import CHUNK_ROWS, COLUMNS, Columns, Encoding
from storage.pairs.receipts import (
    PARTS_FOLDER,
    Provenance,
    Receipt,
    array_hash,
    check_same,
    load_receipt,
    new_group,
    pack_images,
    publish_receipt,
    receipt_path,
)
from storage.pairs.shards import Chunks, ReadRange, ShardError

_MAX_THREADS = 8
_FIX = "run verify, then remove the part's receipt and generate it again"
_LARGEST = ("pairs/reconstruction", "targets/image")


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
    if not 0 <= part <= layout.MAX_PART:
        raise ValueError(f"part={part}; expected 0 to {layout.MAX_PART}")
    place = open_place(root)
    encoding, _manifest = layout.read_store_file(place)
    stored = layout.stored_columns(columns, encoding)
    try:
        present = load_receipt(place, receipt_path(part))
    except FileNotFoundError:
        present = None
    with _GroupEncoder(stored) as encoder:
        if present is not None:
            return check_same(present, encoder.array_hashes())
        with new_group(place, part) as group:
            folder = f"{PARTS_FOLDER}/{group}"
            files = encoder.files(encoding)
            place.write_tree((f"{folder}/{name}", content) for name, content in files)
            outcomes = np.bincount(stored["runs/outcome"], minlength=len(layout.OUTCOMES))
            channels, height, width = stored["targets/image"].shape[1:]
            receipt = Receipt(
                schema=layout.schema_name(),
                part=part,
                group=group,
                encoding=encoding,
                picture=(channels, height, width),
                n_runs=len(stored["runs/run"]),
                n_targets=len(stored["targets/image_id"]),
                n_pairs=len(stored["pairs/target_row"]),
                array_hashes=encoder.array_hashes(),
                files=dict(sorted(encoder.written.items())),
                outcomes=dict(zip(layout.OUTCOMES, outcomes.tolist(), strict=True)),
                images=pack_images(stored),
                **asdict(provenance),
            )
            return publish_receipt(place, receipt)


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
    shape = layout.shape_of(name, n_rows, receipt.picture)
    out = np.empty((max(0, stop - start), *shape[1:]), layout.dtype_of(name, receipt.encoding))
    per_shard = shards.shard_rows(n_rows)
    for shard, file in enumerate(shards.shard_names(shape, start, stop), start // per_shard):
        first = shard * per_shard
        low, high = max(start, first), min(stop, first + per_shard)
        path = f"{PARTS_FOLDER}/{receipt.group}/{name}/{file}"
        try:
            size, checksum = receipt.files[f"{name}/{file}"]
            chunks = _index(place, path, size, n_rows, checksum if whole_files else None)
            shards.read_rows(
                functools.partial(place.read_range, path),
                chunks,
                out[low - start : high - start],
                low - first,
                min(per_shard, n_rows - first),
            )
        except (OSError, ShardError) as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged: {error}"
            raise CorruptPartError(f"part {receipt.part}: {place}/{path} {what}; {_FIX}") from error
    try:
        layout.check_range(name, out, receipt.n_rows)
    except ValueError as error:
        raise CorruptPartError(f"part {receipt.part} of {place}: {error}; {_FIX}") from error
    return out


def files_of(receipt: Receipt, name: str) -> list[str]:
    """The shard files of column `name`, by their names in the part's group."""
    n_rows = rows_of(receipt, name)
    shape = layout.shape_of(name, n_rows, receipt.picture)
    return [f"{name}/{shard}" for shard in shards.shard_names(shape)]


def decode_column(receipt: Receipt, name: str, contents: Sequence[bytes]) -> npt.NDArray[Any]:
    """Column `name` as stored, from the contents of `files_of`; ShardError if they do not
    decode."""
    n_rows = rows_of(receipt, name)
    shape = layout.shape_of(name, n_rows, receipt.picture)
    out = np.empty(shape, layout.dtype_of(name, receipt.encoding))
    per_shard = shards.shard_rows(n_rows)
    for number, content in enumerate(contents):
        rows = out[number * per_shard : (number + 1) * per_shard]
        read = functools.partial(_slice, content)
        shards.read_rows(read, shards.read_index(read, len(content), n_rows), rows, 0, len(rows))
    return out


def rows_of(receipt: Receipt, name: str) -> int:
    """Number of rows of column `name` in this part; ValueError for an unknown name."""
    if name not in COLUMNS:
        raise ValueError(f"unknown column {name!r}; there are {', '.join(COLUMNS)}")
    return receipt.n_rows[layout.table_of(name)]


@functools.lru_cache(maxsize=8192)
def _index(place: Place, path: str, size: int, n_rows: int, checksum: int | None) -> Chunks:
    """Parts are immutable, so an index that was read stays valid, and so does a file that had the
    `checksum` that it is to have (None: any)."""
    read: ReadRange = functools.partial(place.read_range, path)
    if checksum is not None:
        content = place.read(path, size)
        if len(content) != size or shards.crc32c(content) != checksum:
            raise ShardError("it is not the file that was written (its checksum differs)")
        read = functools.partial(_slice, content)
    return shards.read_index(read, size, n_rows)


def _slice(content: bytes, start: int, stop: int) -> bytes:
    return content[start:stop]


class _GroupEncoder:
    """The files of a group of `layout.stored_columns`, made by threads while others are being
    written."""

    def __init__(self, columns: Columns) -> None:
        self.written: dict[str, tuple[int, int]] = {}
        self._columns = columns
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        self._hasher = ThreadPoolExecutor(1)
        names = (*_LARGEST, *(name for name in columns if name not in _LARGEST))
        self._chunks = {
            name: [
                self._pool.submit(shards.encode_chunk, columns[name][at : at + CHUNK_ROWS])
                for at in range(0, len(columns[name]), CHUNK_ROWS)
            ]
            for name in names
        }
        self._hashes = {name: self._hasher.submit(array_hash, columns[name]) for name in names}

    def __enter__(self) -> _GroupEncoder:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._hasher.shutdown(cancel_futures=True)

    def array_hashes(self) -> dict[str, str]:
        return {name: self._hashes[name].result() for name in COLUMNS}

    def files(self, encoding: Encoding) -> Iterator[tuple[str, Content]]:
        """Every file of the group by its name in it: the shards, then the `zarr.json` files as zarr
        writes them, which are for other readers."""
        memory: dict[str, Any] = {}
        group = zarr.create_group(MemoryStore(memory), zarr_format=3)
        group.attrs.update(
            {
                "schema": layout.schema_name(),
                "outcomes": list(layout.OUTCOMES),
                "encoding": encoding,
                "offset": layout.OFFSETS[encoding],
            }
        )
        tables = {table: group.create_group(table) for table in layout.TABLES}
        for name, futures in self._chunks.items():
            shape, n_rows = self._columns[name].shape, len(self._columns[name])
            per_shard = shards.shard_rows(n_rows)
            encoded = (future.result() for future in futures)
            for shard in shards.shard_names(shape):
                chunks = list(itertools.islice(encoded, per_shard // CHUNK_ROWS))
                yield self._noted(f"{name}/{shard}", shards.shard_pieces(chunks, n_rows))
            tables[layout.table_of(name)].create_array(
                name.partition("/")[2],
                shape=shape,
                dtype=self._columns[name].dtype,
                chunks=(CHUNK_ROWS, *shape[1:]),
                shards=(per_shard, *shape[1:]),
                compressors=ZstdCodec(level=shards.LEVEL, checksum=True),
                fill_value=0,
                chunk_key_encoding={"name": "default", "separator": "."},
                dimension_names=layout.dimension_names(name),
            )
        for name, buffer in memory.items():
            yield self._noted(name, [buffer.to_bytes()])

    def _noted(self, name: str, pieces: list[bytes]) -> tuple[str, Content]:
        self.written[name] = (sum(map(len, pieces)), shards.crc32c(pieces))
        return name, pieces
