"""Pairs as Parquet files, which pyarrow, pandas, DuckDB and Hugging Face's tools read; and the
README of a Hugging Face dataset folder: what it is, how it was made, how to load it.

Images are PNG files in structs {bytes, path}. The raw reconstruction is a fixed-size list of the
stored numbers, c * h * w in that order; times the column `scale` it is what the store gives. NaN is
null. zstd, row groups of a thousand pairs. Needs pyarrow, which only the extra `export` installs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from storage.errors import StorageError
from storage.export.rows import NUMBERS, Pairs, Selection, in_files, png
from storage.pairs.dataset import Dataset
from storage.pairs.layout import mixed

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_FILE = 40_000
PICTURES = ("original", "picture")

_SIZES = [(10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"),
          (10**7, "1M<n<10M"), (10**8, "10M<n<100M"), (10**9, "100M<n<1B")]  # fmt: skip
_PICTURE_COLUMNS = {
    "original": "the image that the victim was trained on, augmentation included (PNG)",
    "picture": "its reconstruction, scaled and shifted by the run's mean image to fit [0, 1] (PNG)",
    "reconstruction": "the raw reconstruction in C order, divided by `scale`",
}


@dataclass
class Written:
    """Pairs per file, bytes of the tables in memory, and the columns as `datasets.Features` writes
    them."""

    files: dict[str, int] = field(default_factory=dict)
    n_table_bytes: int = 0
    features: dict[str, dict[str, Any]] = field(default_factory=dict)

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
    pyarrow, written = import_pyarrow(), Written()
    for name, pieces in in_files(batches, rows_per_file, "parquet"):
        first = _table(next(pieces))
        with pyarrow.parquet.ParquetWriter(
            folder / name, first.schema, compression="zstd", write_page_checksum=True
        ) as writer:
            for table in itertools.chain([first], map(_table, pieces)):
                writer.write_table(table)
                written.files[name] = written.files.get(name, 0) + table.num_rows
                written.n_table_bytes += table.nbytes
        about = json.loads(first.schema.metadata[b"huggingface"])
        written.features = about["info"]["features"]
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


def _table(pairs: Pairs) -> pyarrow.Table:
    pyarrow = import_pyarrow()
    columns: dict[str, Any] = {}
    for name, images in (("original", pairs.original), ("picture", pairs.picture)):
        files = pyarrow.array([png(image) for image in images], pyarrow.binary())
        paths = pyarrow.array([f"{key}.{name}.png" for key in pairs.keys], pyarrow.string())
        columns[name] = pyarrow.StructArray.from_arrays([files, paths], names=["bytes", "path"])
    columns["reconstruction"] = _lists(pairs.reconstruction)
    for name, values in pairs.numbers.items():
        if values.ndim > 1:
            columns[name] = _lists(values)
        else:
            dtype = NUMBERS[name][0]
            array = pyarrow.array(  # NaN becomes null
                values.tolist() if dtype == "string" else values,
                pyarrow.type_for_alias(dtype),
                from_pandas=True,
            )
            columns[name] = array
    table = pyarrow.table(columns)
    features: dict[str, dict[str, Any]] = {}
    for column in table.schema:
        name, arrow = column.name, column.type
        if name in PICTURES:
            features[name] = {"_type": "Image"}
        elif hasattr(arrow, "list_size"):  # `Sequence` is what old and new releases read
            value = {"dtype": _dtype_name(arrow.value_type), "_type": "Value"}
            features[name] = {"feature": value, "length": arrow.list_size, "_type": "Sequence"}
        else:
            features[name] = {"dtype": _dtype_name(arrow), "_type": "Value"}
    shape = ",".join(map(str, pairs.reconstruction.shape[1:]))
    return table.replace_schema_metadata(
        {
            "huggingface": json.dumps({"info": {"features": features}}),
            "reconstruction_shape": shape,
        }
    )


def _lists(values: npt.NDArray[Any]) -> Any:
    pyarrow = import_pyarrow()
    flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
    return pyarrow.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))


def _dtype_name(arrow: Any) -> str:
    return {"halffloat": "float16", "float": "float32"}.get(str(arrow), str(arrow))


def dataset_card(
    dataset: Dataset,
    selection: Selection,
    written: Written,
    *,
    attacks: dict[str, int],
    n_images: int,
    n_file_bytes: int,
) -> str:
    """The README of an exported selection, its header in YAML first; `attacks`: how many of the
    store's parts each kind made."""
    features, columns = [], _PICTURE_COLUMNS | {name: text for name, (_t, text) in NUMBERS.items()}
    types: dict[str, str] = {}
    for name, feature in written.features.items():
        features.append(f"  - name: {name}")
        if "length" in feature:
            dtype, length = feature["feature"]["dtype"], feature["length"]
            features += [f"    sequence: {dtype}", f"    length: {length}"]
            types[name] = f"{dtype} x {length}"
        else:
            types[name] = feature.get("dtype", "image")
            features.append(f"    dtype: {types[name]}")
    selected = "confident pairs" if selection.confident_only else "all pairs"
    if selection.min_iteration:
        selected += f" saved at iteration {selection.min_iteration:,} or later"
    if selection.limit is not None:
        selected += f", the first {selection.limit:,}"
    kinds = ", ".join(f"{name} ({n:,} parts)" for name, n in attacks.items())
    several = len(mixed(dataset.manifest))
    if several > 1:
        kinds += f"; `part` modulo {several} counts the experiments of `mixture` below"
    table = [
        f"| `{name}` | {types.get(name, '')} | {meaning} |" for name, meaning in columns.items()
    ]
    return _CARD.format(
        size=next((name for limit, name in _SIZES if written.n_pairs < limit), "n>1B"),
        features="\n".join(features),
        written=written,
        dataset=dataset,
        n_images=n_images,
        n_file_bytes=n_file_bytes,
        selected=selected,
        attacks=f"| attacks | {kinds} |\n" if attacks else "",
        shape=", ".join(map(str, dataset.receipts[0].picture)),
        table="\n".join(table),
        manifest=json.dumps(dataset.manifest, indent=1, ensure_ascii=False),
    )


_CARD = """---
license: other  # yours to decide: what the licence of the original images allows
pretty_name: Reconstructions of training images
task_categories:
- image-to-image
tags:
- training-data-reconstruction
- privacy
- palimpsest
size_categories:
- {size}
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
dataset_info:
  features:
{features}
  splits:
  - name: train
    num_bytes: {written.n_table_bytes}
    num_examples: {written.n_pairs}
  download_size: {n_file_bytes}
  dataset_size: {written.n_table_bytes}
---

# Reconstructions of training images

{written.n_pairs:,} pairs of an image that a small network was trained on and what an attack on \
the network's weights reconstructed of it; {n_images:,} different images. They are \
examples to learn from how such reconstructions are degraded, and how to undo it.

| | |
|---|---|
| pairs here | {written.n_pairs:,} |
| different images here | {n_images:,} |
| selected | {selected} |
| pairs in the store | {dataset.n_pairs:,}, of {dataset.n_runs:,} runs |
{attacks}| image shape | {shape} |
| hash of the store | `{dataset.content_hash}` |

## Loading

```python
import numpy as np
from datasets import load_dataset

pairs = load_dataset("path/to/this/folder", split="train")  # or its name on the Hub
original, picture = pairs[0]["original"], pairs[0]["picture"]  # PIL images
raw = np.array(pairs[0]["reconstruction"], "f4").reshape({shape}) * pairs[0]["scale"]
```

`raw` is in the victim's input space: image in [0, 1] minus the mean image of its run, at \
an arbitrary scale.

An image occurs in many pairs, and in some far more often than in others: balance by \
`image_id` before training, and split by `image_id`, never by row.

## Columns

| column | type | meaning |
|---|---|---|
{table}

## How it was made

Each run trained a network, the victim, on a few of the images; an attack then looked for \
images from which the weights could have come, starting from noise. Each of its \
candidates was paired with the most similar training image of the run. Confident pairs \
are those whose candidate, at some saved iteration of the attack, had an SSIM above 0.4 \
with that image and at least 0.05 more than with any other. The settings, in full:

<details><summary>manifest of the store</summary>

```json
{manifest}
```

</details>

The same settings give the same store, with the hash above. Written by \
`palimpsest dataset export`.

## Responsible use

The originals are real images of the source data set, and the reconstructions show what \
they show: the licence and the privacy of the source apply to both. Do not publish pairs \
of pictures of people who have not agreed to it. Use them to measure and to close leaks \
of models that you own or are allowed to test.
"""
