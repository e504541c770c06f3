"""Shards against zarr, in both directions, and against damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr
from zarr.codecs import ZstdCodec

from storage.pairs.layout import CHUNK_ROWS, COLUMNS, SHARD_ROWS, dimension_names
from storage.pairs.parts import files_of
from storage.pairs.shards import (
    ShardError,
    encode_chunk,
    read_index,
    read_rows,
    shard_names,
    shard_pieces,
    shard_rows,
)
from tests.storage.stores import columns, store


def encoded(array: np.ndarray[Any, Any]) -> list[bytes]:
    chunks = [encode_chunk(array[at : at + CHUNK_ROWS]) for at in range(0, len(array), CHUNK_ROWS)]
    per_shard = shard_rows(len(array)) // CHUNK_ROWS
    return [
        b"".join(shard_pieces(chunks[at : at + per_shard], len(array)))
        for at in range(0, len(chunks), per_shard)
    ]


def decoded(content: bytes, like: np.ndarray[Any, Any], start: int, stop: int, n: int = 0) -> Any:
    """Rows [start, stop) of a shard like `like`, of an array of `n` rows (0: it is the whole)."""
    out = np.empty((stop - start, *like.shape[1:]), like.dtype)

    def read(first: int, last: int) -> bytes:
        return content[first:last]

    read_rows(read, read_index(read, len(content), n or len(like)), out, start, len(like))
    return out


def zarr_array(path: Path, array: np.ndarray[Any, Any]) -> zarr.Array[Any]:
    created = zarr.create_array(
        str(path),
        shape=array.shape,
        dtype=array.dtype,
        chunks=(CHUNK_ROWS, *array.shape[1:]),
        shards=(shard_rows(len(array)), *array.shape[1:]),
        compressors=ZstdCodec(level=1, checksum=True),
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": "."},
        config={"write_empty_chunks": True},
    )
    created[...] = array
    return created


@pytest.mark.parametrize("n_rows", [1, 255, 256, 257, 1000, SHARD_ROWS, SHARD_ROWS + 1])
@pytest.mark.parametrize("dtype", ["<i4", "<f2", "|b1"])
def test_zarr_reads_what_is_written_here_and_the_other_way_round(
    tmp_path: Path, n_rows: int, dtype: str
):
    rng = np.random.default_rng(n_rows)
    array = rng.integers(0, 2 if dtype == "|b1" else 9999, (n_rows, 2)).astype(dtype)
    theirs = zarr_array(tmp_path / "a", array)
    names = shard_names(array.shape)
    assert names == sorted(path.name for path in (tmp_path / "a").glob("c.*"))
    for name, at in zip(names, range(0, n_rows, SHARD_ROWS), strict=True):
        content = (tmp_path / "a" / name).read_bytes()
        rows = array[at : at + SHARD_ROWS]
        np.testing.assert_array_equal(decoded(content, rows, 0, len(rows), n_rows), rows)
    for name, content in zip(names, encoded(array), strict=True):
        (tmp_path / "a" / name).write_bytes(content)
    np.testing.assert_array_equal(theirs[...], array)


def test_every_flip_of_a_byte_raises_or_changes_nothing():
    """All bytes of a small shard, in eight ways each: headers, frames, checksums, index."""
    array = np.random.default_rng(0).integers(0, 50, (300, 1)).astype(np.int32)
    (content,) = encoded(array)
    n_silent = 0
    for at in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[at] ^= 1 << bit
            try:
                read = decoded(bytes(damaged), array, 0, len(array))
            except ShardError:
                continue
            np.testing.assert_array_equal(read, array)
            n_silent += 1
    assert n_silent < 0.02 * 8 * len(content)  # bits that zstd does not use


@pytest.mark.parametrize("keep", [0, 1, 19, 20, 400, -1])
def test_a_shard_that_is_cut_off_is_refused(keep: int):
    array = np.random.default_rng(0).integers(0, 50, (300, 1)).astype(np.int32)
    (content,) = encoded(array)
    with pytest.raises(ShardError):
        decoded(content[:keep], array, 0, len(array))


def test_a_shard_of_another_array_is_refused():
    array = np.zeros((300, 4), np.float32)
    (content,) = encoded(array[:, :2])
    with pytest.raises(ShardError, match="another size"):
        decoded(content, array, 0, 300)
    (fewer,) = encoded(array[:200])
    with pytest.raises(ShardError):
        decoded(fewer, array, 0, 300)


def test_zarr_writes_the_same_metadata_and_reads_every_column(tmp_path: Path):
    dataset = store(tmp_path / "s", 1, n_runs=3, n_images=40, n_pairs=130)
    (receipt,) = dataset.receipts
    group = tmp_path / "s/parts" / receipt.group
    opened = zarr.open_group(str(group), mode="r", zarr_format=3)
    assert opened.attrs["offset"] == 0
    for name in COLUMNS:
        theirs = opened[name]
        assert isinstance(theirs, zarr.Array)
        np.testing.assert_array_equal(theirs[...], dataset.stored(0, name))
        assert theirs.metadata.dimension_names == dimension_names(name)
        assert sorted(files_of(receipt, name)) == sorted(
            path.relative_to(group).as_posix() for path in (group / name).glob("c.*")
        )


def test_xarray_opens_the_tables_of_a_part(tmp_path: Path):
    dataset = store(tmp_path / "s", 1)
    group = tmp_path / "s/parts" / dataset.receipts[0].group
    pairs = xarray.open_zarr(group / "pairs", consolidated=False)
    assert dict(pairs.sizes) == {"pair": 14, "channel": 3, "y": 4, "x": 4}
    np.testing.assert_array_equal(
        pairs["reconstruction"] * pairs["scale"],
        dataset.read(0, ["pairs/reconstruction"])["pairs/reconstruction"],
    )
    targets = xarray.open_zarr(group / "targets", consolidated=False)
    matched = targets["image_id"].isel(target=pairs["target_row"])
    assert matched.dims == ("pair",)
    np.testing.assert_array_equal(matched, columns(seed=0)["targets/image_id"][pairs["target_row"]])
    runs = xarray.open_zarr(group / "runs", consolidated=False)
    assert runs["mean_image"].sel(run=1).shape == (3, 4, 4)
