"""Receipts: the small JSON files that say which parts exist, and what exactly is in them.

A part counts as written when `receipts/part-NNNNNN.json` exists. It is created exclusively and
last, after the arrays are on disk. A receipt carries a hash of every array, a checksum of every
file, a hash of itself (`receipt_sha256`), and, packed, how often each image came back.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from storage.documents import parse_document, seal_of
from storage.errors import CorruptPartError, DocumentError, UnsettledError
from storage.files import json_bytes, reason_of
from storage.object_store import Place
from storage.pairs.image_table import ImageTable, image_table, pack_images, unpack_images
from storage.pairs.layout import (
    OUTCOMES,
    RECEIPT_PATTERN,
    SCHEMA,
    VERSION,
    Columns,
    Encoding,
    receipt_name,
)
from storage.pairs.receipt_check import check_receipt

RECEIPTS_FOLDER = "receipts"
PARTS_FOLDER = "parts"
_SEAL = "receipt_sha256"
_FIX = "restore it, or remove it and generate the part again"


class Provenance(TypedDict):
    """Facts of a receipt that do not follow from the arrays."""

    run_first: int
    fingerprint: str  # hash of the experiment
    plan_hash: str  # hash of which images its runs train on
    source_hash: str  # ImageSet.content_hash
    code_version: str
    torch_version: str
    device: str
    threads: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """One part: where it is, how it came about, what is in it. `array_hashes` maps each column to
    its `array_hash`, `files` the name of each file of the group to its size and CRC-32C. `picture`
    is (c, h, w). `images` is the part's `image_table`, packed."""

    schema: str
    part: int
    group: str
    encoding: Encoding
    picture: tuple[int, int, int]
    run_first: int
    n_runs: int
    n_targets: int
    n_pairs: int
    fingerprint: str
    plan_hash: str
    source_hash: str
    code_version: str
    torch_version: str
    device: str
    threads: int
    seconds: float
    array_hashes: dict[str, str]
    files: dict[str, tuple[int, int]]
    outcomes: dict[str, int]
    images: str

    @property
    def n_rows(self) -> dict[str, int]:
        return {"runs": self.n_runs, "targets": self.n_targets, "pairs": self.n_pairs}

    def image_table(self) -> ImageTable:
        """Record of the part's images; unpacked anew each time. Raises CorruptPartError."""
        try:
            return unpack_images(self.images, self.n_targets)
        except ValueError as error:
            raise CorruptPartError(
                f"the receipt of part {self.part} cannot be read: {error}; {_FIX}"
            ) from error

    def to_json(self) -> bytes:
        body = asdict(self)
        return json_bytes(body | {_SEAL: seal_of(body)})


def schema_name() -> str:
    return f"{SCHEMA}/{VERSION}"


def array_hash(array: npt.NDArray[Any]) -> str:
    """SHA-256 over the dtype, the shape and the C-order little-endian bytes of `array`."""
    return hash_of_pieces(array.dtype, array.shape, [array])


def hash_of_pieces(
    dtype: np.dtype[Any], shape: tuple[int, ...], pieces: Iterable[npt.NDArray[Any]]
) -> str:
    """`array_hash` of an array that comes in pieces along its first axis."""
    little = dtype.newbyteorder("<")
    digest = hashlib.sha256(f"{little.str} {','.join(map(str, shape))}\n".encode())
    for piece in pieces:
        digest.update(np.ascontiguousarray(piece, little).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def make_receipt(
    part: int,
    group: str,
    columns: Columns,
    provenance: Provenance,
    *,
    encoding: Encoding,
    array_hashes: Mapping[str, str],
    files: Mapping[str, tuple[int, int]],
) -> Receipt:
    """The receipt of `columns` (of `layout.checked_columns`) in folder `group`. Raises ValueError
    if `provenance` has missing or unknown keys."""
    expected = set(Provenance.__annotations__)
    if set(provenance) != expected:
        raise ValueError(
            f"provenance: missing {sorted(expected - set(provenance))}, unknown "
            f"{sorted(set(provenance) - expected)}"
        )
    outcome = np.bincount(columns["runs/outcome"], minlength=len(OUTCOMES))
    channels, height, width = columns["targets/image"].shape[1:]
    return Receipt(
        schema=schema_name(),
        part=part,
        group=group,
        encoding=encoding,
        picture=(channels, height, width),
        n_runs=len(columns["runs/run"]),
        n_targets=len(columns["targets/image_id"]),
        n_pairs=len(columns["pairs/target_row"]),
        array_hashes=dict(array_hashes),
        files=dict(sorted(files.items())),
        outcomes={name: int(n) for name, n in zip(OUTCOMES, outcome, strict=True)},
        images=pack_images(image_table(columns)),
        **provenance,
    )


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
    unless it is unsettled: then the receipt may yet appear, and vacuum will know."""
    group = f"part-{part:06d}-{secrets.token_hex(4)}.zarr"
    unsettled = False
    try:
        yield group
    except UnsettledError:
        unsettled = True
        raise
    finally:
        if not unsettled and not is_published(place, part, group):
            place.remove(f"{PARTS_FOLDER}/{group}")


def is_published(place: Place, part: int, group: str) -> bool:
    """True if the receipt of `part` names `group`, also if it cannot be read and nobody can tell.
    Whoever tidies up asks this and not how far it came: an interrupt may hit just after
    publishing."""
    try:
        return load_receipt(place, receipt_path(part)).group == group
    except FileNotFoundError:
        return False
    except CorruptPartError:
        return True


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
    try:
        content = place.read(name)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptPartError(
            f"{place}/{name} cannot be read ({reason_of(error)}); {_FIX}"
        ) from error
    return parse_receipt(content, f"{place}/{name}")


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

    if place.n_parallel == 1:
        yield from map(load, names)
        return
    with ThreadPoolExecutor(place.n_parallel) as pool:
        yield from pool.map(load, names)


def parse_receipt(content: bytes, where: str) -> Receipt:
    """The receipt with this content; `where` it was found is for the messages. Raises as
    `load_receipt`."""
    try:
        body = parse_document(content, where, _FIX)
    except DocumentError as error:
        raise CorruptPartError(str(error)) from error
    schema, seal = body.get("schema"), body.pop(_SEAL, None)
    if schema is None or seal is None:
        missing = "schema" if schema is None else _SEAL
        raise CorruptPartError(f"{where} is not a receipt (it has no {missing}); {_FIX}")
    try:
        intact = seal == seal_of(body)
    except ValueError:  # infinity, which no writer seals
        intact = False
    if not intact:
        raise CorruptPartError(f"{where} was edited after it was written; {_FIX}")
    if schema != schema_name() or set(body) != _FIELDS:
        raise CorruptPartError(
            f"{where} has schema {schema!r} and {len(body)} fields, expected {schema_name()!r} and "
            f"{len(_FIELDS)}; read it with the version of palimpsest that wrote it"
        )
    try:
        check_receipt(body)
    except ValueError as error:
        raise CorruptPartError(
            f"{where} is not a receipt of this schema: {error}; {_FIX}"
        ) from error
    body["picture"] = tuple(body["picture"])
    body["files"] = {name: (size, crc) for name, (size, crc) in body["files"].items()}
    receipt = Receipt(**body)
    if where.rpartition("/")[2] != receipt_name(receipt.part):
        raise CorruptPartError(f"{where} is the receipt of part {receipt.part}; {_FIX}")
    return receipt


def receipt_parts(names: Iterable[str]) -> list[int]:
    """The parts whose receipts are among the file names, ascending."""
    matches = (RECEIPT_PATTERN.fullmatch(name.rpartition("/")[2]) for name in names)
    return sorted(int(match[1]) for match in matches if match)


_FIELDS = {field.name for field in fields(Receipt)}
