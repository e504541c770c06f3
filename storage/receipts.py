"""Receipts: the small JSON files that say which parts exist, and what exactly is in them.

A part counts as written when `receipts/part-NNNNNN.json` exists. It is created exclusively and
last, after the arrays are on disk, so a writer that dies leaves no receipt. A receipt carries a
hash of every array, and one of itself (`receipt_sha256`), so that edits are noticed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from storage.errors import CorruptPartError
from storage.files import create_file, json_bytes
from storage.layout import OUTCOMES, RECEIPT_PATTERN, SCHEMA, VERSION, Columns, receipt_name

RECEIPTS_FOLDER = "receipts"
_SEAL = "receipt_sha256"


class Provenance(TypedDict):
    """What a receipt says that does not follow from the arrays."""

    run_first: int
    fingerprint: str  # hash of the experiment
    plan_hash: str  # hash of which images its runs train on
    source_hash: str  # ImageSet.content_hash
    code_version: str
    device: str
    threads: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """One part: where it is, how it came about, what is in it.

    `array_hashes` maps each column to `array_hash` of it. `image_ids` are the distinct images among
    its targets, ascending, and `image_pairs` how many confident pairs each has here (0 included).
    """

    schema: str
    part: int
    group: str
    run_first: int
    n_runs: int
    n_targets: int
    n_pairs: int
    fingerprint: str
    plan_hash: str
    source_hash: str
    code_version: str
    device: str
    threads: int
    seconds: float
    array_hashes: dict[str, str]
    outcomes: dict[str, int]
    image_ids: tuple[int, ...]
    image_pairs: tuple[int, ...]

    def to_json(self) -> bytes:
        """The file's content, sealed."""
        body = asdict(self)
        return json_bytes(body | {_SEAL: _seal(body)})


def schema_name() -> str:
    """`palimpsest-pairs/1`."""
    return f"{SCHEMA}/{VERSION}"


def array_hash(array: npt.NDArray[Any]) -> str:
    """SHA-256 over the dtype, the shape and the C-order little-endian bytes of `array`."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    header = f"{little.dtype.str} {','.join(map(str, array.shape))}\n"
    digest = hashlib.sha256(header.encode())
    digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def make_receipt(part: int, group: str, stored: Columns, provenance: Provenance) -> Receipt:
    """The receipt of `stored` (as `layout.stored_columns` gives them), lying in folder `group`.

    Raises:
        ValueError: `provenance` has missing or unknown keys.
    """
    expected = set(Provenance.__annotations__)
    if set(provenance) != expected:
        raise ValueError(
            f"provenance: missing {sorted(expected - set(provenance))}, unknown "
            f"{sorted(set(provenance) - expected)}"
        )
    image_ids, image_pairs = count_images(stored)
    outcome = np.bincount(stored["runs/outcome"], minlength=len(OUTCOMES))
    return Receipt(
        schema=schema_name(),
        part=part,
        group=group,
        n_runs=len(stored["runs/run"]),
        n_targets=len(stored["targets/image_id"]),
        n_pairs=len(stored["pairs/target_row"]),
        array_hashes={name: array_hash(array) for name, array in stored.items()},
        outcomes={name: int(n) for name, n in zip(OUTCOMES, outcome, strict=True)},
        image_ids=tuple(image_ids.tolist()),
        image_pairs=tuple(image_pairs.tolist()),
        **provenance,
    )


def count_images(
    columns: Columns, *, min_iteration: int = 0
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Distinct image ids of a part's targets, and how many confident pairs each has.

    Only pairs saved at `min_iteration` or later count. Needs the columns targets/image_id,
    pairs/target_row, pairs/confident and pairs/iteration.
    """
    image_ids, position = np.unique(columns["targets/image_id"], return_inverse=True)
    counted = columns["pairs/confident"] & (columns["pairs/iteration"] >= min_iteration)
    pairs_of = position[columns["pairs/target_row"][counted]]
    return image_ids.astype(np.int64), np.bincount(pairs_of, minlength=len(image_ids))


def publish_receipt(root: Path, receipt: Receipt) -> Receipt:
    """The receipt that stands for this part: `receipt`, or the one somebody else published before.

    Raises:
        CorruptPartError: the one before has other arrays, which one plan cannot give.
    """
    path = root / RECEIPTS_FOLDER / receipt_name(receipt.part)
    if create_file(path, receipt.to_json()):
        return receipt
    return check_same(load_receipt(path), receipt.array_hashes)


def check_same(standing: Receipt, array_hashes: dict[str, str]) -> Receipt:
    """`standing`, if its arrays are those of `array_hashes`; else CorruptPartError."""
    differing = [name for name in array_hashes if standing.array_hashes[name] != array_hashes[name]]
    if differing:
        raise CorruptPartError(
            f"part {standing.part} was written before with other values in {', '.join(differing)} "
            f"(code {standing.code_version} on {standing.device}, {standing.threads} threads); "
            "the run is not deterministic here: use a new store, or the same code and device"
        )
    return standing


def load_receipt(path: Path) -> Receipt:
    """The receipt in the file `path`.

    Raises:
        CorruptPartError: it is not a receipt, was edited, or belongs to another part.
    """
    fix = "restore it, or remove it and generate the part again"
    try:
        body = json.loads(path.read_bytes())
        seal = body.pop(_SEAL)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptPartError(f"{path} is not a receipt ({error}); {fix}") from error
    if seal != _seal(body):
        raise CorruptPartError(f"{path} was edited after it was written; {fix}")
    if body["schema"] != schema_name() or set(body) != {field.name for field in fields(Receipt)}:
        raise CorruptPartError(
            f"{path} has schema {body['schema']!r}, expected {schema_name()!r}; read it with the "
            "version of palimpsest that wrote it"
        )
    receipt = Receipt(
        **body | {"image_ids": tuple(body["image_ids"]), "image_pairs": tuple(body["image_pairs"])}
    )
    if path.name != receipt_name(receipt.part):
        raise CorruptPartError(f"{path} is the receipt of part {receipt.part}; {fix}")
    return receipt


def receipt_paths(root: Path) -> list[Path]:
    """The files in `receipts/` that are named like receipts, by part."""
    found = [
        (int(match[1]), path)
        for path in (root / RECEIPTS_FOLDER).iterdir()
        if (match := RECEIPT_PATTERN.fullmatch(path.name))
    ]
    return [path for _part, path in sorted(found)]


def read_receipts(root: Path) -> tuple[Receipt, ...]:
    """All receipts of the store, ordered by part.

    Raises:
        CorruptPartError: one of them is not as it was written.
    """
    return tuple(load_receipt(path) for path in receipt_paths(root))


def _seal(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
