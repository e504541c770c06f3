"""Receipts: the small JSON files that say which parts exist, and what exactly is in them.

A part counts as written when `receipts/part-NNNNNN.json` exists. It is created exclusively and
last, after the arrays are on disk, so a writer that dies leaves no receipt. A receipt carries a
hash of every array, a checksum of every file, and a hash of itself (`receipt_sha256`), so that
edits are noticed. How often each image came back is in it, too, packed: planning and balancing
60 million pairs must not have to open their arrays.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from numcodecs.zstd import Zstd

from storage.errors import CorruptPartError
from storage.files import json_bytes
from storage.layout import (
    OUTCOMES,
    RECEIPT_PATTERN,
    SCHEMA,
    VERSION,
    Columns,
    Encoding,
    receipt_name,
)
from storage.places import Place

RECEIPTS_FOLDER = "receipts"
PARTS_FOLDER = "parts"
_SEAL = "receipt_sha256"
_FIX = "restore it, or remove it and generate the part again"


class Provenance(TypedDict):
    """What a receipt says that does not follow from the arrays."""

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
    """One part: where it is, how it came about, what is in it.

    `array_hashes` maps each column to its `array_hash`, `files` the name of each file of the group
    to its size and CRC-32C. `picture` is (c, h, w). `images` is the part's `image_table`, packed.
    """

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

    def image_table(self) -> ImageTable:
        """How the part's images fared; unpacked anew each time."""
        return unpack_images(self.images)

    def to_json(self) -> bytes:
        """The file's content, sealed."""
        body = asdict(self)
        return json_bytes(body | {_SEAL: _seal(body)})


def schema_name() -> str:
    """`palimpsest-pairs/1`."""
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
    """The receipt of `columns` (as `layout.checked_columns` gives them), lying in folder `group`.

    Raises:
        ValueError: `provenance` has missing or unknown keys.
    """
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


@dataclass(frozen=True, eq=False)
class ImageTable:
    """How the distinct images among a part's targets fared, int64 (n,) each, ids ascending.

    `n_runs`: runs that trained on the image; `n_back`: those of them in which a confident pair of
    it came back; `n_pairs`: confident pairs.
    """

    image_ids: npt.NDArray[np.int64]
    n_runs: npt.NDArray[np.int64]
    n_back: npt.NDArray[np.int64]
    n_pairs: npt.NDArray[np.int64]


def image_table(columns: Columns) -> ImageTable:
    """How a part's images fared.

    Needs the columns targets/image_id, targets/run_row, pairs/target_row, pairs/confident.
    """
    image_ids, position = np.unique(columns["targets/image_id"], return_inverse=True)
    confident = columns["pairs/target_row"][columns["pairs/confident"]]
    target_pairs = np.bincount(confident, minlength=len(position))
    n_images = len(image_ids)
    of_run = columns["targets/run_row"].astype(np.int64) * n_images + position
    trained, back = np.unique(of_run), np.unique(of_run[target_pairs > 0])
    return ImageTable(
        image_ids=image_ids.astype(np.int64),
        n_runs=np.bincount(trained % max(1, n_images), minlength=n_images),
        n_back=np.bincount(back % max(1, n_images), minlength=n_images),
        n_pairs=np.bincount(position[confident], minlength=n_images),
    )


def pack_images(table: ImageTable) -> str:
    """A table of images as text: base64 of zstd of four rows of little-endian int32, the first the
    differences of the ids (from 0)."""
    ids = np.diff(table.image_ids, prepend=0)
    rows = np.stack([ids, table.n_runs, table.n_back, table.n_pairs]).astype("<i4")
    return base64.b64encode(Zstd(level=1, checksum=True).encode(rows)).decode()


def unpack_images(packed: str) -> ImageTable:
    """The inverse of `pack_images`."""
    rows = np.frombuffer(Zstd().decode(base64.b64decode(packed)), "<i4").reshape(4, -1)
    ids, n_runs, n_back, n_pairs = rows.astype(np.int64)
    return ImageTable(np.cumsum(ids), n_runs, n_back, n_pairs)


def count_pairs(columns: Columns, *, min_iteration: int) -> npt.NDArray[np.int64]:
    """Confident pairs, saved at `min_iteration` or later, of each distinct image of the targets.

    Needs the columns targets/image_id, pairs/target_row, pairs/confident and pairs/iteration.
    """
    image_ids, position = np.unique(columns["targets/image_id"], return_inverse=True)
    counted = columns["pairs/confident"] & (columns["pairs/iteration"] >= min_iteration)
    return np.bincount(position[columns["pairs/target_row"][counted]], minlength=len(image_ids))


def publish_receipt(place: Place, receipt: Receipt) -> Receipt:
    """The receipt that stands for this part: `receipt`, or the one somebody else published before.

    Raises:
        CorruptPartError: the one before has other arrays, which one plan cannot give.
    """
    name = receipt_path(receipt.part)
    if place.create(name, receipt.to_json()):
        return receipt
    return check_same(load_receipt(place, name), receipt.array_hashes)


def is_published(place: Place, part: int, group: str) -> bool:
    """Whether the receipt of `part` names `group`, also if it cannot be read and nobody can tell.

    Whoever tidies up asks this and not how far it came: an interrupt may hit just after publishing.
    """
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
    """Where the receipt of a part is in its store."""
    return f"{RECEIPTS_FOLDER}/{receipt_name(part)}"


def load_receipt(place: Place, name: str) -> Receipt:
    """The receipt in the file `name` of the store at `place`; FileNotFoundError if there is none.

    Raises:
        CorruptPartError: it cannot be read, is not a receipt, was edited, or belongs to another
            part.
    """
    try:
        content = place.read(name)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CorruptPartError(f"{place}/{name} cannot be read ({reason}); {_FIX}") from error
    return parse_receipt(content, f"{place}/{name}")


def load_receipts(place: Place, names: Sequence[str]) -> Iterator[Receipt]:
    """The receipts in the files `names`, which were listed; in order.

    Raises:
        CorruptPartError: as `load_receipt`, or a file is not there after all.
    """

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
    """The receipt with this content; `where` it was found is for the messages.

    Raises:
        CorruptPartError: as `load_receipt`.
    """
    try:
        body = json.loads(content)
        seal, schema = body.pop(_SEAL), body["schema"]
        intact = seal == _seal(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptPartError(f"{where} is not a receipt ({error}); {_FIX}") from error
    if not intact:
        raise CorruptPartError(f"{where} was edited after it was written; {_FIX}")
    if schema != schema_name() or set(body) != _FIELDS:
        raise CorruptPartError(
            f"{where} has schema {schema!r}"
            + (" in a form of before the first release" if schema == schema_name() else "")
            + f", expected {schema_name()!r}; read it with the version of palimpsest that wrote it"
        )
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


def _seal(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


_FIELDS = {field.name for field in fields(Receipt)}
