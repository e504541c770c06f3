"""Receipts: the small JSON files that say which parts exist, and what exactly is in them.

A part counts as written when `receipts/part-NNNNNN.json` exists. It is created exclusively and
last, after the arrays are on disk. A receipt carries a hash of every array, a checksum of every
file, a hash of itself (`receipt_sha256`), and, packed, how often each image came back: planning and
balancing 60 million pairs must not have to open their arrays.

A receipt's seal does not say who sealed it. Its numbers decide what is allocated, and its names
what is read or, when stores are merged, written: `Receipt` refuses what no part has.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
import pydantic
from numcodecs.zstd import Zstd

from storage.documents import STRICT, model_of, read_sealed, seal_of
from storage.errors import CorruptPartError, UnsettledError
from storage.files import json_bytes
from storage.object_store import Place
from storage.pairs.layout import (
    CHUNK_ROWS,
    COLUMNS,
    GROUP_PATTERN,
    MAX_IMAGE_ID,
    MAX_PART,
    MAX_PART_BYTES,
    OUTCOMES,
    RECEIPT_PATTERN,
    SHARD_ROWS,
    TABLES,
    Columns,
    Encoding,
    check_size_of_part,
    dtype_of,
    receipt_name,
    schema_name,
    shape_of,
    table_of,
)
from storage.pairs.shards import content_size, largest_shard, shard_names

RECEIPTS_FOLDER = "receipts"
PARTS_FOLDER = "parts"
_SEAL = "receipt_sha256"
_FIX = "restore it, or remove it and generate the part again"
_ROW_BYTES = 16
_HEADER_CHARS = 32
"""Of base64: more than the header of a zstd frame."""
_METADATA = dict.fromkeys(
    ["zarr.json", *(f"{name}/zarr.json" for name in (*TABLES, *COLUMNS))], 2**20
)
"""The most bytes of the files that are no shards."""

Rows = Annotated[int, pydantic.Field(ge=0, le=MAX_PART_BYTES)]
Pair = Annotated[
    tuple[Rows, Annotated[int, pydantic.Field(ge=0, lt=2**32)]], pydantic.Strict(False)
]
Picture = Annotated[tuple[Rows, Rows, Rows], pydantic.Strict(False)]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class Provenance:
    """Facts of a receipt that do not follow from the arrays."""

    run_first: Annotated[int, pydantic.Field(ge=0, lt=2**63)]
    fingerprint: str  # hash of the experiment
    plan_hash: str  # hash of which images its runs train on
    source_hash: str  # ImageSet.content_hash
    code_version: str
    torch_version: str
    device: str
    threads: Annotated[int, pydantic.Field(ge=0, lt=2**31)]
    seconds: Annotated[float, pydantic.Field(ge=0), pydantic.AllowInfNan(False)]


@dataclass(frozen=True, eq=False)
class ImageTable:
    """Record of the distinct images among a part's targets, int64 (n,) each, ids ascending.
    `n_runs`: runs that trained on the image; `n_back`: those of them in which a confident pair of
    it came back; `n_pairs`: confident pairs."""

    image_ids: npt.NDArray[np.int64]
    n_runs: npt.NDArray[np.int64]
    n_back: npt.NDArray[np.int64]
    n_pairs: npt.NDArray[np.int64]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class Receipt(Provenance):
    """One part: where it is, how it came about, what is in it. `array_hashes` maps each column to
    its `array_hash`, `files` the name of each file of the group to its size and CRC-32C. `picture`
    is (c, h, w). `images`: see `pack_images`. Raises pydantic's ValidationError
    for a value of another type or out of range, or a name that no part of these columns and rows
    has."""

    schema: str
    part: Annotated[int, pydantic.Field(ge=0, le=MAX_PART)]
    group: str
    encoding: Encoding
    picture: Picture
    n_runs: Rows
    n_targets: Rows
    n_pairs: Rows
    array_hashes: dict[str, str]
    files: dict[str, Pair]
    outcomes: dict[str, Rows]
    images: str

    @pydantic.model_validator(mode="after")
    def _is_of_a_part(self) -> Self:
        start = receipt_name(self.part).removesuffix(".json")
        if not GROUP_PATTERN.fullmatch(self.group) or not self.group.startswith(f"{start}-"):
            raise ValueError(
                f"group is {self.group[:80]!r}, expected {start}- and eight hexadecimal digits and "
                ".zarr"
            )
        check_size_of_part(self.n_rows, self.picture)
        most = max(self.outcomes.values(), default=0)
        if not set(self.outcomes) <= set(OUTCOMES) or most > self.n_runs:
            raise ValueError(
                f"outcomes are {str(self.outcomes)[:80]}, expected how many of {self.n_runs} runs "
                f"are {', '.join(OUTCOMES)}"
            )
        if wrong := self.array_hashes.keys() ^ COLUMNS.keys():
            raise ValueError(f"array_hashes lack or have too much: {', '.join(sorted(wrong))[:80]}")
        _n_images(base64.b64decode(self.images[:_HEADER_CHARS], validate=True), self.n_targets)
        n_shards = sum(-(-self.n_rows[table_of(name)] // SHARD_ROWS) for name in COLUMNS)
        if n_shards > len(self.files):
            raise ValueError(f"{len(self.files)} files, too few for its rows: {n_shards:,} shards")
        limits = dict(_METADATA)
        for table, n_rows in self.n_rows.items():
            whole = -(-n_rows // CHUNK_ROWS) * CHUNK_ROWS
            limits |= _shards_of(table, whole, self.picture, self.encoding)
        if missing := limits.keys() - _METADATA.keys() - self.files.keys():
            raise ValueError(f"files lack {min(missing)!r}")
        for name, (size, _checksum) in self.files.items():
            if name not in limits:
                raise ValueError(f"files have {name[:80]!r}, which no part has")
            if size > limits[name]:
                raise ValueError(f"file {name} has {size} bytes, expected at most {limits[name]}")
        return self

    @property
    def n_rows(self) -> dict[str, int]:
        return {"runs": self.n_runs, "targets": self.n_targets, "pairs": self.n_pairs}

    def image_table(self) -> ImageTable:
        """The inverse of `pack_images`, unpacked anew each time. Raises CorruptPartError if
        `images` is no table of at most `n_targets` images."""
        try:
            frame = base64.b64decode(self.images, validate=True)
            rows = np.zeros((4, _n_images(frame, self.n_targets)), "<i4")
            Zstd().decode(frame, rows.reshape(-1).view(np.uint8))
            ids, *counts = rows.astype(np.int64)
            np.cumsum(ids, out=ids)
            least, largest = rows.min(initial=0), ids.max(initial=0)
            if least < 0 or (rows[0, 1:] == 0).any() or largest > MAX_IMAGE_ID:
                raise ValueError(f"its images are not 0 to {MAX_IMAGE_ID} at most, ascending")
        except (ValueError, RuntimeError) as error:
            raise CorruptPartError(
                f"the receipt of part {self.part} cannot be read: {error}; {_FIX}"
            ) from error
        return ImageTable(ids, *counts)

    def to_json(self) -> bytes:
        body = asdict(self)
        return json_bytes({"schema": self.schema} | body | {_SEAL: seal_of(body)})


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


def array_hash(array: npt.NDArray[Any]) -> str:
    """SHA-256 over the dtype, the shape and the C-order little-endian bytes of `array`."""
    little = array.dtype.newbyteorder("<")
    digest = hashlib.sha256(f"{little.str} {','.join(map(str, array.shape))}\n".encode())
    digest.update(np.ascontiguousarray(array, little).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def publish_receipt(place: Place, receipt: Receipt) -> Receipt:
    """The receipt that stands for this part: `receipt`, or the one somebody else published before;
    CorruptPartError if that has other arrays, which one plan cannot give."""
    name = receipt_path(receipt.part)
    if place.create(name, receipt.to_json()):
        return receipt
    return check_same(load_receipt(place, name), receipt.array_hashes)


@contextlib.contextmanager
def new_group(place: Place, part: int) -> Iterator[str]:
    """A name for the group of a part that is written here and then published; removed if it is not,
    unless it is unsettled: then the receipt may yet appear, and vacuum will know. The receipt and
    not how far the writer came decides, as an interrupt may hit just after publishing."""
    group = f"part-{part:06d}-{secrets.token_hex(4)}.zarr"
    kept = False
    try:
        yield group
    except UnsettledError:
        kept = True
        raise
    finally:
        try:
            kept = kept or load_receipt(place, receipt_path(part)).group == group
        except FileNotFoundError:
            kept = False
        except CorruptPartError:  # nobody can tell
            kept = True
        if not kept:
            place.remove(f"{PARTS_FOLDER}/{group}")


def check_same(standing: Receipt, array_hashes: dict[str, str]) -> Receipt:
    """`standing`, if its arrays are those of `array_hashes`; else CorruptPartError."""
    differing = [name for name in array_hashes if standing.array_hashes[name] != array_hashes[name]]
    if differing:
        raise CorruptPartError(
            f"part {standing.part} was written before with other values in {', '.join(differing)} "
            f"(code {standing.code_version}, torch {standing.torch_version} on {standing.device}, "
            f"{standing.threads} threads); the run is not deterministic here: use a new "
            "store, or the same code and device"
        )
    return standing


def receipt_path(part: int) -> str:
    return f"{RECEIPTS_FOLDER}/{receipt_name(part)}"


def load_receipt(place: Place, name: str) -> Receipt:
    """The receipt in the file `name` of the store at `place`. Raises FileNotFoundError, or
    CorruptPartError if it cannot be read, is not a receipt, was edited, or belongs to another
    part."""
    body, where = read_sealed(place, name, _SEAL, _FIX), f"{place}/{name}"
    if body["schema"] != schema_name():
        raise CorruptPartError(
            f"{where} has schema {body['schema']!r}, expected {schema_name()!r}; read it with the "
            "version of palimpsest that wrote it"
        )
    receipt = model_of(Receipt, body, where, _FIX)
    if where.rpartition("/")[2] != receipt_name(receipt.part):
        raise CorruptPartError(f"{where} is the receipt of part {receipt.part}; {_FIX}")
    return receipt


def load_receipts(place: Place, names: Sequence[str]) -> Iterator[Receipt]:
    """The receipts in the files `names`, which were listed; in order. Raises CorruptPartError as
    `load_receipt`, or if a file is not there after all."""

    def load(name: str) -> Receipt:
        try:
            return load_receipt(place, name)
        except FileNotFoundError as error:
            raise CorruptPartError(
                f"{place}/{name} is listed and cannot be found: a dangling link, or somebody has "
                f"just removed it; look again, or {_FIX}"
            ) from error

    with ThreadPoolExecutor(place.n_parallel) as pool:
        yield from pool.map(load, names)


def receipt_parts(names: Iterable[str]) -> list[int]:
    """The parts whose receipts are among the file names, ascending."""
    matches = (RECEIPT_PATTERN.fullmatch(name.rpartition("/")[2]) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def pack_images(columns: Columns) -> str:
    """The `ImageTable` of a part, from targets/image_id, targets/run_row, pairs/target_row and
    pairs/confident, as text: base64 of zstd of four rows of little-endian int32, the first the
    differences of the ids (from 0)."""
    image_ids, position = np.unique(columns["targets/image_id"], return_inverse=True)
    confident = columns["pairs/target_row"][columns["pairs/confident"]]
    target_pairs = np.bincount(confident, minlength=len(position))
    n_images = len(image_ids)
    of_run = columns["targets/run_row"].astype(np.int64) * n_images + position
    trained, back = np.unique(of_run), np.unique(of_run[target_pairs > 0])
    rows: list[npt.NDArray[Any]] = [
        np.diff(image_ids.astype(np.int64), prepend=0),
        np.bincount(trained % max(1, n_images), minlength=n_images),
        np.bincount(back % max(1, n_images), minlength=n_images),
        np.bincount(position[confident], minlength=n_images),
    ]
    content = Zstd(level=1, checksum=True).encode(np.stack(rows).astype("<i4"))
    return base64.b64encode(content).decode()


def _n_images(frame: bytes, n_targets: int) -> int:
    size = content_size(frame)
    if size is None or size % _ROW_BYTES or size > _ROW_BYTES * n_targets:
        shown = "an unknown number of" if size is None else f"{size:,}"
        raise ValueError(
            f"its images are {shown} bytes, expected {_ROW_BYTES} for each image among "
            f"{n_targets:,} targets"
        )
    return size // _ROW_BYTES
