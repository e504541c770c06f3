"""Pairs as tar files that WebDataset streams: four files per pair, the same name, then their kind.

    pairs-000000.tar
        000012-00000345.original.png          the training image
        000012-00000345.picture.png           its reconstruction, scaled to fit [0, 1]
        000012-00000345.reconstruction.npy    the raw one, float32 (c, h, w)
        000012-00000345.json                  every number

Names are part and row in the store, so they sort as the store does. Owner, time and mode of every
entry are fixed: the same pairs give the same bytes.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from storage.export.rows import Pairs, png

ROWS_PER_FILE = 10_000
_FLOAT32_DIGITS = 9


def write_tars(
    folder: Path, batches: Iterable[Pairs], *, rows_per_file: int = ROWS_PER_FILE
) -> dict[str, int]:
    """Writes `pairs-000000.tar` and so on into `folder`; their names and numbers of pairs."""
    written: dict[str, int] = {}
    tar: tarfile.TarFile | None = None
    name, n_rows = "", 0
    try:
        for key, files in _entries(batches):
            if tar is None or n_rows == rows_per_file:
                if tar is not None:
                    tar.close()
                name, n_rows = f"pairs-{len(written):06d}.tar", 0
                tar = tarfile.open(folder / name, "x", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
            for kind, content in files.items():
                entry = tarfile.TarInfo(f"{key}.{kind}")
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
            n_rows += 1
            written[name] = n_rows
    finally:
        if tar is not None:
            tar.close()
    return written


def _entries(batches: Iterable[Pairs]) -> Iterator[tuple[str, dict[str, bytes]]]:
    for pairs in batches:
        x = pairs.raw()
        for i in range(len(pairs)):
            numbers = {name: _plain(values[i]) for name, values in pairs.numbers.items()}
            yield (
                f"{numbers['part']:06d}-{numbers['row']:08d}",
                {
                    "original.png": png(pairs.original[i]),
                    "picture.png": png(pairs.picture[i]),
                    "reconstruction.npy": _npy(x[i]),
                    "json": json.dumps(numbers, allow_nan=False).encode(),
                },
            )


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
    return content.getvalue()


def _plain(value: Any) -> Any:
    """A number, list or string for JSON; null where it is not finite, as JSON has no NaN."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, np.floating):
        short = float(f"{value:.{_FLOAT32_DIGITS}g}")  # the digits that tell float32 apart
        return short if math.isfinite(short) else None
    return value.item()
