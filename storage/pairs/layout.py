"""The schema of a store of pairs: its columns, their types and shapes, and its `store.json`.

    store.json                     schema, version, manifest (what the store was made from), seal
    receipts/part-000012.json      published last; a part exists when its receipt does
    parts/part-000012-<random>.zarr/{runs,targets,pairs}/<column>

Row references (`run_row`, `target_row`) are local to the part. See docs/dataset.md.

Reconstructions, nine tenths of the bytes, are stored in one of three encodings, chosen per store:
x = (stored - offset) * scale.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import pydantic

from storage.documents import STRICT, model_of, read_sealed, seal_of
from storage.errors import StorageError, StoreMismatchError
from storage.object_store import Place

SCHEMA = "palimpsest-pairs"
VERSION = 1

OUTCOMES = ("ok", "unfitted", "nonfinite", "stopped")

TABLES = ("runs", "targets", "pairs")
PICTURE = ("c", "h", "w")
CHUNK_ROWS = 256
SHARD_ROWS = 16384

MAX_PART = 999_999
MAX_PART_BYTES = 2**34
"""The arrays of one part, whole chunks of them: a writer has all of them in memory."""
MAX_IMAGE_ID = 2**26 - 1
"""Images are counted in arrays of this length."""

STORE_FILE = "store.json"
MIXTURE = "mixture"
"""Name in the manifest of a store of several experiments: the manifests of each."""
SEAL = "store_sha256"
_FIX = "restore it, or use another folder"

Columns = Mapping[str, npt.NDArray[Any]]

OnPart = Callable[[int, int], None]
"""Called with the parts that are done and all parts."""

Encoding = Literal["float16", "float32", "uint8"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
RECONSTRUCTION_DTYPES: dict[Encoding, str] = {"float16": "<f2", "float32": "<f4", "uint8": "|u1"}
OFFSETS: dict[Encoding, int] = {"float16": 0, "float32": 0, "uint8": 128}
_UINT8_STEPS = 127
_ROWS_AT_ONCE, _THREADS = 64, 8


class Column(NamedTuple):
    """One array of a part: `dtype` on disk and the trailing shape, letters being free sizes."""

    dtype: str
    trailing: tuple[str | int, ...] = ()


COLUMNS: dict[str, Column] = {
    "runs/run": Column("<i8"),
    "runs/outcome": Column("|u1"),
    "runs/mean_image": Column("<f4", PICTURE),
    "runs/train_loss": Column("<f4"),
    "runs/train_accuracy": Column("<f4"),
    "runs/margin_min": Column("<f4"),
    "runs/attack_loss": Column("<f4"),
    "runs/kkt_residual": Column("<f4"),
    "runs/residual_relu": Column("<f4"),
    "runs/n_iterations": Column("<f4"),
    "runs/lr": Column("<f4"),
    "runs/lam_lr": Column("<f4"),
    "runs/sigma": Column("<f4"),
    "runs/lam_min": Column("<f4"),
    "runs/alpha": Column("<f4"),
    "targets/image": Column("|u1", PICTURE),
    "targets/image_id": Column("<i4"),
    "targets/label": Column("<i2"),
    "targets/run_row": Column("<i4"),
    "targets/augment": Column("<f4", (9,)),
    "targets/margin": Column("<f4"),
    "pairs/reconstruction": Column("<f2", PICTURE),
    "pairs/scale": Column("<f4"),
    "pairs/target_row": Column("<i4"),
    "pairs/run_row": Column("<i4"),
    "pairs/candidate": Column("<i4"),
    "pairs/iteration": Column("<i4"),
    "pairs/ssim_best": Column("<f4"),
    "pairs/ssim_second": Column("<f4"),
    "pairs/confident": Column("|b1"),
}

DIMENSIONS = {"runs": "run", "targets": "target", "pairs": "pair"}
_TRAILING_DIMENSIONS = {3: ("channel", "y", "x"), 1: ("parameter",), 0: ()}

GIVEN_COLUMNS = tuple(name for name in COLUMNS if name != "pairs/scale")
"""What a writer hands over: `pairs/reconstruction` as float32, from which the scale follows."""

_REFERENCES = {"targets/run_row": "runs", "pairs/run_row": "runs", "pairs/target_row": "targets"}
CHECKED_COLUMNS = (*_REFERENCES, "runs/run", "runs/outcome", "targets/image_id")


def schema_name() -> str:
    return f"{SCHEMA}/{VERSION}"


def table_of(name: str) -> str:
    """`pairs` of `pairs/iteration`."""
    return name.partition("/")[0]


def dtype_of(name: str, encoding: Encoding) -> np.dtype[Any]:
    if name == "pairs/reconstruction":
        return np.dtype(RECONSTRUCTION_DTYPES[encoding])
    return np.dtype(COLUMNS[name].dtype)


def shape_of(name: str, n_rows: int, picture: tuple[int, ...]) -> tuple[int, ...]:
    trailing = COLUMNS[name].trailing
    if trailing == PICTURE:
        return (n_rows, *picture)
    return (n_rows, *(size for size in trailing if isinstance(size, int)))


def dimension_names(name: str) -> tuple[str, ...]:
    return (DIMENSIONS[table_of(name)], *_TRAILING_DIMENSIONS[len(COLUMNS[name].trailing)])


def receipt_name(part: int) -> str:
    return f"part-{part:06d}.json"


RECEIPT_PATTERN = re.compile(r"part-(\d{6,})\.json", re.ASCII)
GROUP_PATTERN = re.compile(r"part-(\d{6,})-[0-9a-f]{8}\.zarr", re.ASCII)


def check_size_of_part(n_rows: Mapping[str, int], picture: tuple[int, ...]) -> None:
    """Raises ValueError if a part with so many rows in each of `TABLES` and pictures (c, h, w)
    takes more than `MAX_PART_BYTES`, all columns counted, the reconstructions as float32."""
    n_bytes = sum(
        -(-n_rows[table] // CHUNK_ROWS) * CHUNK_ROWS * row
        for table, row in _row_bytes(picture).items()
    )
    if n_bytes > MAX_PART_BYTES:
        raise ValueError(
            f"{', '.join(f'{n_rows[table]} {table}' for table in TABLES)} with pictures of "
            f"{' x '.join(map(str, picture))} take {n_bytes:,} bytes; expected at most "
            f"{MAX_PART_BYTES:,} in one part"
        )


@functools.lru_cache(maxsize=64)
def _row_bytes(picture: tuple[int, ...]) -> dict[str, int]:
    sizes = dict.fromkeys(TABLES, 0)
    for name in COLUMNS:
        row = math.prod(shape_of(name, 1, picture)) * dtype_of(name, "float32").itemsize
        sizes[table_of(name)] += row
    return sizes


def compress_reconstruction(
    x: npt.NDArray[np.float32], encoding: Encoding = "float16"
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """`x` (p, c, h, w) as stored (p, c, h, w), and the scale (p,) that belongs to it.

    float16: x / max|x|, back within scale * 2^-12. uint8: round(127 x / max|x|) + 128, back within
    scale / 2. float32: x itself, scale 1. A pair that is 0 everywhere comes back as 0. Raises
    ValueError if a value is not finite.
    """
    stored = np.empty(x.shape, RECONSTRUCTION_DTYPES[encoding])
    scale = np.ones(len(x), np.float32)

    def compress(start: int) -> None:
        rows = slice(start, start + _ROWS_AT_ONCE)
        piece = x[rows]
        peak = np.maximum(
            piece.max(axis=(1, 2, 3), initial=0), -piece.min(axis=(1, 2, 3), initial=0)
        )
        if not np.isfinite(peak).all():  # NaN and infinity are the maximum of their row
            raise ValueError(
                "pairs/reconstruction has NaN or infinity in row "
                f"{start + int(np.argmin(np.isfinite(peak)))}; leave out the pairs of runs that "
                "diverged"
            )
        if encoding == "float32":
            stored[rows] = piece
            return
        scale[rows] = np.where(peak == 0, 1, peak)
        scaled = piece / scale[rows, None, None, None]
        if encoding == "uint8":
            np.rint(scaled * _UINT8_STEPS, out=scaled)
            scaled += OFFSETS["uint8"]
            scale[rows] /= _UINT8_STEPS
        stored[rows] = scaled

    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(compress, range(0, len(x), _ROWS_AT_ONCE)):
            pass
    return stored, scale


def expand_reconstruction(
    stored: npt.NDArray[Any], scale: npt.NDArray[np.float32], encoding: Encoding = "float16"
) -> npt.NDArray[np.float32]:
    """The inverse of `compress_reconstruction`, float32 (p, c, h, w)."""
    expanded: npt.NDArray[np.float32] = stored.astype(np.float32)
    if OFFSETS[encoding]:
        expanded -= OFFSETS[encoding]
    if encoding != "float32":
        expanded *= scale[:, None, None, None]
    return expanded


def stored_columns(columns: Columns, encoding: Encoding = "float16") -> dict[str, npt.NDArray[Any]]:
    """`columns` as a part is made of them, with the scale of its reconstructions. Raises ValueError
    if a column is missing, unknown, of a wrong type, shape or length, not finite where it has to
    be, or refers to a row that does not exist."""
    missing = set(GIVEN_COLUMNS) - set(columns)
    unknown = set(columns) - set(GIVEN_COLUMNS)
    if unknown or missing:
        raise ValueError(
            f"columns of a part: missing {sorted(missing)}, unknown {sorted(unknown)}; give all of "
            "layout.GIVEN_COLUMNS"
        )
    sizes: dict[str, int] = {}
    for name in GIVEN_COLUMNS:
        shape, expected = columns[name].shape, (table_of(name), *COLUMNS[name].trailing)
        if len(shape) != len(expected):
            raise ValueError(f"{name} has shape {shape}; expected {expected}")
        for letter, size in zip(expected, shape, strict=True):
            known = letter if isinstance(letter, int) else sizes.setdefault(letter, size)
            if size != known:
                raise ValueError(
                    f"{name} has shape {shape}; expected {expected} with {letter}={known}, as in "
                    "the columns before it"
                )
    check_size_of_part(sizes, tuple(sizes[letter] for letter in PICTURE))
    cast = {name: _cast(name, columns[name]) for name in GIVEN_COLUMNS}
    check_values(cast, sizes)
    x = cast["pairs/reconstruction"]
    cast["pairs/reconstruction"], cast["pairs/scale"] = compress_reconstruction(x, encoding)
    return {name: np.ascontiguousarray(cast[name]) for name in COLUMNS}


def _cast(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`array` in the dtype on disk, if that loses nothing but floating-point precision."""
    if name == "pairs/reconstruction":
        return np.asarray(array, np.float32)
    dtype = np.dtype(COLUMNS[name].dtype)
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in {"f": "f", "i": "iu", "u": "iu", "b": "b"}[dtype.kind]:
        raise ValueError(f"{name} has dtype {array.dtype}; expected {dtype}")
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(
                f"{name} has values from {array.min()} to {array.max()}; {dtype} holds "
                f"{limits.min} to {limits.max}"
            )
    return array.astype(dtype)


def check_range(name: str, values: npt.NDArray[Any], n_rows: Mapping[str, int]) -> None:
    """Raises ValueError if values of a column that are used as row numbers or indices are not, in a
    part with so many rows in each of `TABLES`; measured values may be anything."""
    limit = {"runs/outcome": len(OUTCOMES), "targets/image_id": MAX_IMAGE_ID + 1}.get(name)
    if name in _REFERENCES:
        limit = n_rows[_REFERENCES[name]]
    if limit is not None and values.size and not 0 <= values.min() <= values.max() < limit:
        raise ValueError(
            f"{name} goes from {values.min()} to {values.max()}, expected 0 or more and less than "
            f"{limit}"
        )


def check_values(cast: Columns, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if columns in the dtypes on disk refer to rows that are not there, or
    contradict each other. Needs those of `CHECKED_COLUMNS`; `sizes` are the rows of each table."""
    for name in CHECKED_COLUMNS:
        check_range(name, cast[name], sizes)
    owner = cast["targets/run_row"][cast["pairs/target_row"]]
    if not np.array_equal(owner, cast["pairs/run_row"]):
        row = int(np.argmax(owner != cast["pairs/run_row"]))
        raise ValueError(
            f"pairs row {row} is of run row {cast['pairs/run_row'][row]} but its target is of run "
            f"row {owner[row]}; a pair's target belongs to its own run"
        )
    if len(np.unique(cast["runs/run"])) != sizes["runs"]:
        raise ValueError("runs/run has a run number twice; give each run once")


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class StoreFile:
    """The `store.json` of a store but for its seal."""

    schema: str
    version: int
    encoding: Encoding
    manifest: dict[str, Any]


def read_store_file(place: Place) -> tuple[Encoding, dict[str, Any]]:
    """Encoding and manifest in the `store.json` of the store at `place`. Raises StorageError if
    there is none, CorruptPartError if it cannot be read or is not what was written,
    StoreMismatchError for another schema or version."""
    try:
        body = read_sealed(place, STORE_FILE, SEAL, _FIX)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(
            f"{place} is not a store: it has no {STORE_FILE}; generate one first"
        ) from error
    if (body["schema"], body.get("version")) != (SCHEMA, VERSION):
        raise StoreMismatchError(
            f"{place}/{STORE_FILE} has schema {body['schema']!r} version {body.get('version')!r}, "
            f"this is {SCHEMA!r} version {VERSION}; use the release of palimpsest that wrote it, "
            "or another folder"
        )
    found = model_of(StoreFile, body, f"{place}/{STORE_FILE}", _FIX)
    return found.encoding, found.manifest


def fits(manifest: Mapping[str, Any], fingerprint: str) -> bool | None:
    """True if a receipt with this fingerprint is of a store with this manifest, or of one of those
    that it mixes; None if it cannot be told, because its writer's fingerprints are no SHA-256."""
    if not re.fullmatch("[0-9a-f]{64}", fingerprint):
        return None
    return any(fingerprint == seal_of(one) for one in mixed(manifest))


def mixed(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The manifests of a store's experiments: of a mixture several, otherwise its own."""
    several = manifest.get(MIXTURE)
    return list(several) if isinstance(several, list) else [manifest]
