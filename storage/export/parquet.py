"""Pairs as Parquet files, which pyarrow, pandas, DuckDB and Hugging Face's tools read.

Images are PNG files in structs {bytes, path}. The raw reconstruction is a fixed-size list of the
stored numbers, c * h * w in that order; times the column `scale` it is what the store gives. NaN is
null. zstd, row groups of a thousand pairs. Needs pyarrow, which only the extra `export` installs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from storage.errors import StorageError
from storage.export.rows import NUMBERS, Pairs, png

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_FILE = 40_000
ROW_GROUP = 1000
PICTURES = ("original", "picture")


@dataclass
class Written:
    """Pairs per file, bytes of the tables in memory, and the columns' types; `lengths` of those
    that are lists."""

    files: dict[str, int] = field(default_factory=dict)
    n_table_bytes: int = 0
    dtypes: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    @property
    def n_pairs(self) -> int:
        return sum(self.files.values())


def import_pyarrow() -> Any:
    """pyarrow; StorageError that says how to install it if it is absent."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise StorageError(
            "writing Parquet needs pyarrow, which is not installed; run: "
            "pip install '.[export]' (or export --format webdataset, which needs nothing)"
        ) from error
    return pyarrow


def write_parquet(
    folder: Path, batches: Iterable[Pairs], *, rows_per_file: int = ROWS_PER_FILE
) -> Written:
    """Writes `pairs-000000.parquet` and so on into `folder`; StorageError without pyarrow."""
    pyarrow = import_pyarrow()
    written = Written()
    writer: Any = None
    name = ""
    try:
        for table in _row_groups(batches, rows_per_file):
            if writer is None or written.files[name] == rows_per_file:
                if writer is not None:
                    writer.close()
                name = f"pairs-{len(written.files):06d}.parquet"
                written.files[name] = 0
                writer = pyarrow.parquet.ParquetWriter(
                    folder / name, table.schema, compression="zstd", write_page_checksum=True
                )
            writer.write_table(table, row_group_size=ROW_GROUP)
            written.files[name] += table.num_rows
            written.n_table_bytes += table.nbytes
            _note_types(written, table.schema)
    finally:
        if writer is not None:
            writer.close()
    return written


def write_hugging_face(
    folder: Path, batches: Iterable[Pairs], *, rows_per_file: int = ROWS_PER_FILE
) -> Written:
    """Writes the data of a Hugging Face dataset folder, `data/train-00000-of-00003.parquet` etc."""
    data = folder / "data"
    data.mkdir()
    written = write_parquet(data, batches, rows_per_file=rows_per_file)
    files = {}
    for i, (name, n_rows) in enumerate(written.files.items()):
        final = f"data/train-{i:05d}-of-{len(written.files):05d}.parquet"
        (data / name).rename(folder / final)
        files[final] = n_rows
    written.files = files
    return written


def _row_groups(batches: Iterable[Pairs], rows_per_file: int) -> Iterator[pyarrow.Table]:
    pyarrow = import_pyarrow()
    held: Any = None
    n_in_file = 0
    for pairs in batches:
        table = _table(pairs)
        held = table if held is None else pyarrow.concat_tables([held, table])
        while held.num_rows >= (size := min(ROW_GROUP, rows_per_file - n_in_file)):
            yield held.slice(0, size).combine_chunks()
            held = held.slice(size)
            n_in_file = (n_in_file + size) % rows_per_file
    if held is not None and held.num_rows:
        yield held.combine_chunks()


def _table(pairs: Pairs) -> pyarrow.Table:
    pyarrow = import_pyarrow()
    keys = [
        f"{part:06d}-{row:08d}"
        for part, row in zip(pairs.numbers["part"], pairs.numbers["row"], strict=True)
    ]
    columns = {
        "original": _pictures(pairs.original, [f"{key}.original.png" for key in keys]),
        "picture": _pictures(pairs.picture, [f"{key}.picture.png" for key in keys]),
        "reconstruction": _lists(pairs.reconstruction),
    }
    for name, values in pairs.numbers.items():
        if values.ndim > 1:
            columns[name] = _lists(values)
        else:
            dtype = NUMBERS[name][0]
            given = values.tolist() if dtype == "string" else values
            of_type = pyarrow.type_for_alias(dtype)
            columns[name] = pyarrow.array(given, of_type, from_pandas=True)  # NaN becomes null
    table = pyarrow.table(columns)
    features = {name: _feature(table.schema.field(name).type, name) for name in columns}
    shape = ",".join(map(str, pairs.reconstruction.shape[1:]))
    return table.replace_schema_metadata(
        {
            "huggingface": json.dumps({"info": {"features": features}}),
            "reconstruction_shape": shape,
        }
    )


def _pictures(images: npt.NDArray[np.uint8], names: list[str]) -> Any:
    pyarrow = import_pyarrow()
    files = pyarrow.array([png(image) for image in images], pyarrow.binary())
    return pyarrow.StructArray.from_arrays(
        [files, pyarrow.array(names, pyarrow.string())], names=["bytes", "path"]
    )


def _lists(values: npt.NDArray[Any]) -> Any:
    pyarrow = import_pyarrow()
    flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
    return pyarrow.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))


def _feature(arrow: Any, name: str) -> dict[str, Any]:
    """The column as `datasets.Features` writes it; `Sequence` is what old and new releases read."""
    if name in PICTURES:
        return {"_type": "Image"}
    if hasattr(arrow, "list_size"):
        value = {"dtype": _dtype_name(arrow.value_type), "_type": "Value"}
        return {"feature": value, "length": arrow.list_size, "_type": "Sequence"}
    return {"dtype": _dtype_name(arrow), "_type": "Value"}


def _dtype_name(arrow: Any) -> str:
    return {"halffloat": "float16", "float": "float32"}.get(str(arrow), str(arrow))


def _note_types(written: Written, schema: Any) -> None:
    for column in schema:
        if column.name in PICTURES:
            written.dtypes[column.name] = "image"
        elif hasattr(column.type, "list_size"):
            written.dtypes[column.name] = _dtype_name(column.type.value_type)
            written.lengths[column.name] = column.type.list_size
        else:
            written.dtypes[column.name] = _dtype_name(column.type)
