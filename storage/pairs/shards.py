"""Shards of the Zarr v3 sharding codec, encoded and decoded without going through zarr.

A shard is one file: inner chunks of 256 rows, each a zstd frame with its checksum, then an index of
(offset, bytes) per chunk and the index's CRC-32C
(https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/). So many small reads cost
no more than their bytes, threads decode side by side, and damage to the metadata cannot turn into
wrong values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs.zstd import Zstd

from storage.files import Content, pieces_of
from storage.pairs.layout import CHUNK_ROWS, SHARD_ROWS

LEVEL = 1
_ABSENT = np.iinfo(np.uint64).max
_CRC_BYTES = 4
_INDEX_ENTRY = np.dtype("<u8")
_MAGIC, _LONGEST_HEADER = b"\x28\xb5\x2f\xfd", 18
_CHUNK_OVERHEAD = 1024

Chunks = npt.NDArray[np.uint64]
"""(chunks, 2): first byte of each inner chunk in its shard, and how many it has."""
ReadRange = Callable[[int, int], bytes]


class ShardError(Exception):
    """The bytes are not a shard as it was written; says in a few words what is wrong."""


def shard_rows(n_rows: int) -> int:
    """Rows per shard: whole chunks, no more than `n_rows` need, at least one, at most 16,384."""
    return min(SHARD_ROWS, CHUNK_ROWS * max(1, math.ceil(n_rows / CHUNK_ROWS)))


def shard_names(shape: Sequence[int], start: int = 0, stop: int | None = None) -> list[str]:
    """Names of the shard files of an array that hold its rows [start, stop), `c.0.0` and so on."""
    stop = shape[0] if stop is None else stop
    rows, trailing = shard_rows(shape[0]), ".0" * (len(shape) - 1)
    last = math.ceil(stop / rows) if stop > start else 0
    return [f"c.{number}{trailing}" for number in range(start // rows, last)]


def encode_chunk(rows: npt.NDArray[np.generic]) -> bytes:
    """One inner chunk of at most 256 rows, filled up with zeros."""
    if len(rows) < CHUNK_ROWS:
        padding = np.zeros((CHUNK_ROWS - len(rows), *rows.shape[1:]), rows.dtype)
        rows = np.concatenate([rows, padding])
    encoded: bytes = Zstd(level=LEVEL, checksum=True).encode(np.ascontiguousarray(rows))
    return encoded


def shard_pieces(chunks: Sequence[bytes], n_rows: int) -> list[bytes]:
    """The shard of an array of `n_rows` rows that holds `chunks`, in pieces to be written one after
    another; further chunks are absent."""
    index = np.full((shard_rows(n_rows) // CHUNK_ROWS, 2), _ABSENT, _INDEX_ENTRY)
    sizes = np.array([len(chunk) for chunk in chunks], _INDEX_ENTRY)
    index[: len(chunks), 0] = np.cumsum(sizes) - sizes
    index[: len(chunks), 1] = sizes
    table = index.tobytes()
    return [*chunks, table, crc32c(table).to_bytes(_CRC_BYTES, "little")]


def read_index(read: ReadRange, size: int, n_rows: int) -> Chunks:
    """Places of the inner chunks in a shard file of `size` bytes of an array of `n_rows` rows;
    ShardError if the index is cut off or damaged, or points outside the file."""
    n_chunks = shard_rows(n_rows) // CHUNK_ROWS
    n_bytes = n_chunks * 2 * _INDEX_ENTRY.itemsize
    tail = read(size - n_bytes - _CRC_BYTES, size) if size >= n_bytes + _CRC_BYTES else b""
    if len(tail) != n_bytes + _CRC_BYTES:
        raise ShardError("it is cut off")
    if crc32c(tail[:n_bytes]) != int.from_bytes(tail[n_bytes:], "little"):
        raise ShardError("the checksum of its index does not match")
    chunks = np.frombuffer(tail[:n_bytes], _INDEX_ENTRY).reshape(n_chunks, 2)
    present = chunks[chunks[:, 0] != _ABSENT]
    if (present.sum(axis=1, dtype=np.uint64) > size - n_bytes - _CRC_BYTES).any():
        raise ShardError("its index points outside the file")
    return chunks


def read_rows(
    read: ReadRange, chunks: Chunks, out: npt.NDArray[np.generic], start: int, n_rows: int
) -> None:
    """Fills `out` with rows [start, start + len(out)) of a shard that has `n_rows` rows; one read
    for all. ShardError if a chunk is absent, damaged, or of another size."""
    stop = start + len(out)
    first, last = start // CHUNK_ROWS, math.ceil(stop / CHUNK_ROWS)
    wanted = chunks[first:last]
    if stop > n_rows or len(wanted) < last - first or (wanted[:, 0] == _ABSENT).any():
        raise ShardError("a chunk is absent")
    begin = int(wanted[:, 0].min())
    content = memoryview(read(begin, int(wanted.sum(axis=1).max())))
    for number, (offset, n_bytes) in enumerate(wanted.tolist(), first):
        encoded = content[offset - begin : offset - begin + n_bytes]
        low, high = number * CHUNK_ROWS, (number + 1) * CHUNK_ROWS
        if start <= low and high <= stop:
            _decode(encoded, out[low - start : high - start])
            continue
        whole = np.empty((CHUNK_ROWS, *out.shape[1:]), out.dtype)
        _decode(encoded, whole)
        inside = slice(max(start, low), min(stop, high))
        out[inside.start - start : inside.stop - start] = whole[
            inside.start - low : inside.stop - low
        ]


def largest_shard(n_rows: int, row_bytes: int) -> int:
    """Bytes that a shard of an array of `n_rows` rows may have, if nothing can be compressed."""
    n_chunks = shard_rows(n_rows) // CHUNK_ROWS
    chunk = CHUNK_ROWS * row_bytes
    per_chunk = chunk + chunk // 256 + _CHUNK_OVERHEAD + 2 * _INDEX_ENTRY.itemsize
    return n_chunks * per_chunk + _CRC_BYTES


def content_size(frame: bytes | memoryview) -> int | None:
    """Size of the content that a zstd frame's header announces (RFC 8878, section 3.1.1.1); None
    if it says nothing, or is no frame."""
    header = bytes(frame[:_LONGEST_HEADER])
    if len(header) < len(_MAGIC) + 2 or not header.startswith(_MAGIC):
        return None
    descriptor = header[4]
    flag, single_segment = descriptor >> 6, bool(descriptor & 32)
    n_bytes = (1 if single_segment else 0, 2, 4, 8)[flag]
    start = 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if n_bytes == 0 or len(header) < start + n_bytes:
        return None
    size = int.from_bytes(header[start : start + n_bytes], "little")
    return size + 256 if flag == 1 else size


def crc32c(content: Content) -> int:
    """CRC-32C (Castagnoli): finds every damage of up to 32 bits in a row, and others but for one in
    2^32."""
    checksum = 0
    for piece in pieces_of(content):
        checksum = google_crc32c.extend(checksum, piece)
    return int(checksum)


def _decode(encoded: memoryview, out: npt.NDArray[np.generic]) -> None:
    if content_size(encoded) != out.nbytes:
        raise ShardError("a chunk is of another size")
    try:
        Zstd().decode(encoded, out.reshape(-1).view(np.uint8))
    except (RuntimeError, ValueError) as error:
        raise ShardError(f"a chunk does not decode: {error}") from error
