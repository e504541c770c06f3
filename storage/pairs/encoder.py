"""The files of a part's Zarr group, encoded in memory by threads.

Casts, zstd and SHA-256 leave the interpreter to other threads, so a part is compressed and hashed
on all cores while those files that are complete are already being written.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore

from storage.files import Content
from storage.pairs.layout import (
    CHUNK_ROWS,
    COLUMNS,
    OFFSETS,
    OUTCOMES,
    TABLES,
    Columns,
    Encoding,
    compress_reconstruction,
    dimension_names,
    dtype_of,
    table_of,
)
from storage.pairs.receipts import array_hash, hash_of_pieces, schema_name
from storage.pairs.shards import LEVEL, crc32c, encode_chunk, shard_names, shard_pieces, shard_rows

_MAX_THREADS = 8
_LARGEST = ("pairs/reconstruction", "targets/image")


class GroupEncoder:
    """The files of a group of `layout.checked_columns`, made by threads while others are being
    written."""

    def __init__(self, columns: Columns, encoding: Encoding) -> None:
        self.written: dict[str, tuple[int, int]] = {}
        self._columns, self._encoding = columns, encoding
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        self._hasher = ThreadPoolExecutor(1)
        self._names = (*_LARGEST, *(name for name in columns if name not in _LARGEST))
        self._chunks = {name: self._encoded(name) for name in self._names}
        # The reconstructions last, so that their hash follows their encoding.
        self._hashes = {name: self._hash(name) for name in reversed(self._names)}

    def __enter__(self) -> GroupEncoder:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._hasher.shutdown(cancel_futures=True)

    def files(self) -> Iterator[tuple[str, Content]]:
        """Every file of the group by its name in it; ValueError if a pair is not finite."""
        for name in self._names:
            encoded = (future.result().encoded for future in self._chunks[name])
            yield from self._shards(name, self._shape(name), encoded)
        scale = self._scale()
        pieces = [scale[at : at + CHUNK_ROWS] for at in range(0, len(scale), CHUNK_ROWS)]
        yield from self._shards("pairs/scale", scale.shape, map(encode_chunk, pieces))
        shapes = {name: self._shape(name) for name in COLUMNS}
        for name, content in metadata_files(shapes, self._encoding).items():
            yield self._noted(name, [content])

    def array_hashes(self) -> dict[str, str]:
        """`receipts.array_hash` of every column; ValueError if a pair is not finite."""
        hashes = {name: future.result() for name, future in self._hashes.items()}
        hashes["pairs/scale"] = array_hash(self._scale())
        return {name: hashes[name] for name in COLUMNS}

    def _encoded(self, name: str) -> list[Future[_Chunk]]:
        rows = self._columns[name]
        encoding = self._encoding if name == "pairs/reconstruction" else None
        return [
            self._pool.submit(_chunk, rows[at : at + CHUNK_ROWS], encoding, at)
            for at in range(0, len(rows), CHUNK_ROWS)
        ]

    def _hash(self, name: str) -> Future[str]:
        stored = (future.result().stored for future in self._chunks[name])
        dtype = dtype_of(name, self._encoding)
        return self._hasher.submit(hash_of_pieces, dtype, self._shape(name), stored)

    def _scale(self) -> npt.NDArray[np.float32]:
        scales = [future.result().scale for future in self._chunks["pairs/reconstruction"]]
        return np.concatenate([np.empty(0, np.float32), *scales])

    def _shape(self, name: str) -> tuple[int, ...]:
        if name == "pairs/scale":
            return self._columns["pairs/target_row"].shape
        return self._columns[name].shape

    def _shards(
        self, name: str, shape: tuple[int, ...], encoded: Iterator[bytes]
    ) -> Iterator[tuple[str, Content]]:
        per_shard = shard_rows(shape[0]) // CHUNK_ROWS
        for shard in shard_names(shape):
            chunks = list(itertools.islice(encoded, per_shard))
            yield self._noted(f"{name}/{shard}", shard_pieces(chunks, shape[0]))

    def _noted(self, name: str, pieces: list[bytes]) -> tuple[str, Content]:
        self.written[name] = (sum(map(len, pieces)), crc32c(pieces))
        return name, pieces


@dataclass(frozen=True)
class _Chunk:
    stored: npt.NDArray[Any]
    scale: npt.NDArray[np.float32]
    encoded: bytes


def _chunk(rows: npt.NDArray[Any], encoding: Encoding | None, first_row: int) -> _Chunk:
    """Of reconstructions, which have an `encoding`, or of other rows as they are."""
    scale = np.empty(0, np.float32)
    if encoding is not None:
        rows, scale = compress_reconstruction(rows, encoding, first_row)
    return _Chunk(rows, scale, encode_chunk(rows))


def metadata_files(shapes: Mapping[str, tuple[int, ...]], encoding: Encoding) -> dict[str, bytes]:
    """The `zarr.json` files of a group, as zarr writes them. They are for other readers."""
    memory: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(memory), zarr_format=3)
    group.attrs.update(
        {
            "schema": schema_name(),
            "outcomes": list(OUTCOMES),
            "encoding": encoding,
            "offset": OFFSETS[encoding],
        }
    )
    tables = {table: group.create_group(table) for table in TABLES}
    for name, shape in shapes.items():
        tables[table_of(name)].create_array(
            name.partition("/")[2],
            shape=shape,
            dtype=dtype_of(name, encoding),
            chunks=(CHUNK_ROWS, *shape[1:]),
            shards=(shard_rows(shape[0]), *shape[1:]),
            compressors=ZstdCodec(level=LEVEL, checksum=True),
            fill_value=0,
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=dimension_names(name),
        )
    return {name: buffer.to_bytes() for name, buffer in memory.items()}
