"""Rules for a receipt: types, bounds, and the names of files that the schema knows.

A receipt's seal does not say who sealed it. Its numbers decide what is allocated, and its names
what is read or, when stores are merged, written: nothing is believed before `check_receipt`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from storage.pairs.image_table import check_packed
from storage.pairs.layout import (
    CHUNK_ROWS,
    COLUMNS,
    ENCODINGS,
    GROUP_PATTERN,
    MAX_PART,
    MAX_PART_BYTES,
    OUTCOMES,
    SHARD_ROWS,
    TABLES,
    Encoding,
    check_size_of_part,
    dtype_of,
    receipt_name,
    shape_of,
    table_of,
)
from storage.pairs.shards import largest_shard, shard_names

_TEXTS = (
    *("group", "encoding", "fingerprint", "plan_hash", "source_hash", "code_version"),
    *("torch_version", "device", "images"),
)
_COUNTS = {
    "part": MAX_PART,
    "run_first": 2**63 - 1,
    **{f"n_{table}": MAX_PART_BYTES for table in TABLES},
    "threads": 2**31 - 1,
}
_MAX_CRC = 2**32 - 1
_METADATA = dict.fromkeys(
    ["zarr.json", *(f"{name}/zarr.json" for name in (*TABLES, *COLUMNS))], 2**20
)


def check_receipt(body: Mapping[str, Any]) -> None:
    """Compares the fields of a receipt, all there, with the schema: ValueError for a value of
    another type or out of range, or a name that no part of these columns and rows has."""
    for name in _TEXTS:
        if type(body[name]) is not str:
            raise ValueError(f"its {name} is {_shown(body[name])}, expected text")
    for name, most in _COUNTS.items():
        _check_count(f"its {name}", body[name], most)
    seconds = body["seconds"]
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ValueError(f"its seconds are {_shown(seconds)}, expected a number of 0 or more")
    if body["encoding"] not in ENCODINGS:
        raise ValueError(
            f"its encoding is {_shown(body['encoding'])}, expected one of {', '.join(ENCODINGS)}"
        )
    _check_group(body["part"], body["group"])
    rows = {table: body[f"n_{table}"] for table in TABLES}
    picture = _picture(body["picture"])
    check_size_of_part(rows, picture)
    _check_outcomes(body["outcomes"], body["n_runs"])
    _check_hashes(body["array_hashes"])
    _check_files(body["files"], rows, picture, body["encoding"])
    check_packed(body["images"], body["n_targets"])


def _check_count(what: str, value: Any, most: int) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {_shown(value)}, expected a whole number from 0 to {most:,}")


def _check_group(part: int, group: str) -> None:
    if not GROUP_PATTERN.fullmatch(group) or not group.startswith(
        f"{receipt_name(part).removesuffix('.json')}-"
    ):
        raise ValueError(
            f"its group is {_shown(group)}, expected part-{part:06d}- and eight hexadecimal digits "
            "and .zarr"
        )


def _picture(found: Any) -> tuple[int, ...]:
    if type(found) is not list or len(found) != 3:
        raise ValueError(f"its picture is {_shown(found)}, expected channels, height and width")
    for size in found:
        _check_count("a size of its picture", size, MAX_PART_BYTES)
    return tuple(found)


def _check_outcomes(found: Any, n_runs: int) -> None:
    if type(found) is not dict or not set(found) <= set(OUTCOMES):
        raise ValueError(
            f"its outcomes are {_shown(found)}, expected numbers of {', '.join(OUTCOMES)}"
        )
    for name, n in found.items():
        _check_count(f"its number of runs that are {name}", n, n_runs)


def _check_hashes(found: Any) -> None:
    if type(found) is not dict or found.keys() != COLUMNS.keys():
        wrong = found.keys() ^ COLUMNS.keys() if type(found) is dict else {_shown(found)}
        raise ValueError(
            f"its array_hashes lack or have too much: {_shown(', '.join(sorted(map(str, wrong))))}"
        )
    for name, digest in found.items():
        if type(digest) is not str:
            raise ValueError(f"its hash of {name} is {_shown(digest)}, expected text")


def _check_files(
    found: Any, rows: Mapping[str, int], picture: tuple[int, ...], encoding: Encoding
) -> None:
    if type(found) is not dict:
        raise ValueError(f"its files are {_shown(found)}, expected an object")
    n_shards = sum(-(-rows[table_of(name)] // SHARD_ROWS) for name in COLUMNS)
    if n_shards > len(found):
        raise ValueError(f"it has {len(found)} files, too few for its rows: {n_shards:,} shards")
    needed: dict[str, int] = {}
    for table, n_rows in rows.items():
        n_chunks = -(-n_rows // CHUNK_ROWS)
        needed |= _shards_of(table, n_chunks * CHUNK_ROWS, picture, encoding)
    if missing := needed.keys() - found.keys():
        raise ValueError(f"its files lack {_shown(min(missing))}")
    limits = needed | _METADATA
    for name, facts in found.items():
        limit = limits.get(name)
        if limit is None:
            raise ValueError(f"its files have {_shown(name)}, which no part has")
        if type(facts) is not list or len(facts) != 2:
            raise ValueError(f"its file {name} is {_shown(facts)}, expected bytes and checksum")
        size, checksum = facts
        if type(size) is not int or not 0 <= size <= limit:
            _check_count(f"the size of its file {name}", size, limit)
        if type(checksum) is not int or not 0 <= checksum <= _MAX_CRC:
            _check_count(f"the checksum of its file {name}", checksum, _MAX_CRC)


@functools.lru_cache(maxsize=1024)
def _shards_of(
    table: str, n_rows: int, picture: tuple[int, ...], encoding: Encoding
) -> dict[str, int]:
    """The shard files of the columns of a table of `n_rows` rows, which is whole chunks, and the
    most bytes that each may have; not to be changed."""
    limits: dict[str, int] = {}
    for name in COLUMNS:
        if table_of(name) == table:
            shape = shape_of(name, n_rows, picture)
            row = math.prod(shape[1:]) * dtype_of(name, encoding).itemsize
            shards = [f"{name}/{shard}" for shard in shard_names(shape)]
            limits |= dict.fromkeys(shards, largest_shard(n_rows, row))
    return limits


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
