"""The schema of a store of pairs: which columns there are, with which types and shapes.

    store.json                     schema, version, manifest (what the store was made from)
    receipts/part-000012.json      published last; a part exists when its receipt does
    parts/part-000012-<random>.zarr/{runs,targets,pairs}/<column>

Row references (`run_row`, `target_row`) are local to the part. See docs/dataset.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SCHEMA = "palimpsest-pairs"
VERSION = 1

OUTCOMES = ("ok", "unfitted", "nonfinite")
"""What `runs/outcome` indexes."""

TABLES = ("runs", "targets", "pairs")
PICTURE = ("c", "h", "w")
CHUNK_ROWS = 256
SHARD_ROWS = 16384

Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Column:
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
    "targets/image": Column("|u1", PICTURE),
    "targets/image_id": Column("<i4"),
    "targets/label": Column("<i2"),
    "targets/run_row": Column("<i4"),
    "targets/augment": Column("<f4", (9,)),
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

GIVEN_COLUMNS = tuple(name for name in COLUMNS if name != "pairs/scale")
"""What a writer hands over: `pairs/reconstruction` as float32, from which the scale follows."""

_REFERENCES = {
    "targets/run_row": "runs",
    "pairs/run_row": "runs",
    "pairs/target_row": "targets",
}


def table_of(name: str) -> str:
    """`pairs` of `pairs/iteration`."""
    return name.partition("/")[0]


def receipt_name(part: int) -> str:
    """File name of a part's receipt."""
    return f"part-{part:06d}.json"


RECEIPT_PATTERN = re.compile(r"part-(\d{6,})\.json")
GROUP_PATTERN = re.compile(r"part-(\d{6,})-[0-9a-f]{8}\.zarr")


def compress_reconstruction(
    x: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float32]]:
    """`x` (p, c, h, w) as float16 (p, c, h, w) in [-1, 1] and a float32 scale (p,), max |x|.

    A pair that is 0 everywhere gets scale 1. `x` comes back within scale * 2^-12.
    """
    scale = np.abs(x).max(axis=(1, 2, 3), initial=0).astype(np.float32)
    scale[scale == 0] = 1
    return (x / scale[:, None, None, None]).astype(np.float16), scale


def expand_reconstruction(
    stored: npt.NDArray[np.float16], scale: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """The inverse of `compress_reconstruction`, float32 (p, c, h, w)."""
    expanded: npt.NDArray[np.float32] = stored.astype(np.float32)
    expanded *= scale[:, None, None, None]
    return expanded


def stored_columns(columns: Columns) -> dict[str, npt.NDArray[Any]]:
    """`columns` checked, cast to the dtypes on disk, the scale of the reconstructions added.

    Raises:
        ValueError: a column is missing, unknown, of a wrong type, shape or length, not finite where
            it must be, or refers to a row that does not exist.
    """
    unknown, missing = set(columns) - set(GIVEN_COLUMNS), set(GIVEN_COLUMNS) - set(columns)
    if unknown or missing:
        raise ValueError(
            f"columns of a part: missing {sorted(missing)}, unknown {sorted(unknown)}; give "
            "exactly layout.GIVEN_COLUMNS"
        )
    sizes: dict[str, int] = {}
    for name in GIVEN_COLUMNS:
        _check_shape(name, columns[name], sizes)
    reconstruction = np.asarray(columns["pairs/reconstruction"], np.float32)
    finite = np.isfinite(reconstruction).all(axis=(1, 2, 3))
    if not finite.all():
        raise ValueError(
            f"pairs/reconstruction has NaN or infinity in row {int(np.argmin(finite))} and "
            f"{int((~finite).sum())} rows in all; leave out the pairs of runs that diverged"
        )
    compressed, scale = compress_reconstruction(reconstruction)
    cast = {
        name: compressed if name == "pairs/reconstruction" else _cast(name, columns[name])
        for name in GIVEN_COLUMNS
    }
    cast["pairs/scale"] = scale
    _check_values(cast, sizes)
    return {name: np.ascontiguousarray(cast[name]) for name in COLUMNS}


def _check_shape(name: str, array: npt.NDArray[Any], sizes: dict[str, int]) -> None:
    """Compares `array` with the schema and with `sizes`, which it extends by what it learns."""
    expected = (table_of(name), *COLUMNS[name].trailing)
    if array.ndim != len(expected):
        raise ValueError(f"{name} has shape {array.shape}; expected {expected}")
    for letter, size in zip(expected, array.shape, strict=True):
        known = letter if isinstance(letter, int) else sizes.setdefault(letter, size)
        if size != known:
            raise ValueError(
                f"{name} has shape {array.shape}; expected {expected} with {letter}={known}, as in "
                "the columns before it"
            )


def _cast(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`array` in the dtype on disk, if that loses nothing but floating-point precision."""
    dtype = np.dtype(COLUMNS[name].dtype)
    if array.dtype == dtype:
        return array
    kinds = {"f": "f", "i": "iu", "u": "iu", "b": "b"}[dtype.kind]
    if array.dtype.kind not in kinds:
        raise ValueError(f"{name} has dtype {array.dtype}; expected {dtype}")
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(
                f"{name} has values from {array.min()} to {array.max()}; {dtype} holds "
                f"{limits.min} to {limits.max}"
            )
    return array.astype(dtype)


def _check_values(cast: Columns, sizes: Mapping[str, int]) -> None:
    for name, table in _REFERENCES.items():
        rows, n_rows = cast[name], sizes[table]
        if rows.size and (rows.min() < 0 or rows.max() >= n_rows):
            raise ValueError(
                f"{name} refers to rows {rows.min()} to {rows.max()} but {table} has {n_rows} rows;"
                " rows are counted within the part"
            )
    owner = cast["targets/run_row"][cast["pairs/target_row"]]
    if not np.array_equal(owner, cast["pairs/run_row"]):
        row = int(np.argmax(owner != cast["pairs/run_row"]))
        raise ValueError(
            f"pairs row {row} is of run row {cast['pairs/run_row'][row]} but its target is of run "
            f"row {owner[row]}; a pair's target belongs to its own run"
        )
    if sizes["runs"] and cast["runs/outcome"].max() >= len(OUTCOMES):
        raise ValueError(
            f"runs/outcome has {cast['runs/outcome'].max()}; expected an index into {OUTCOMES}"
        )
    if len(np.unique(cast["runs/run"])) != sizes["runs"]:
        raise ValueError("runs/run has a run number twice; give each run once")
