"""A store of pairs as a folder for other tools: WebDataset tars, Parquet, Hugging Face.

The pictures are those of the image restoration paper, section 5.1: each raw reconstruction scaled
as far as it stays in [0, 1] around the mean image of its run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from recon_core.experiments import KKT
from recon_core.matching import fit_to_range
from storage.export.parquet import (
    Written,
    dataset_card,
    import_pyarrow,
    write_hugging_face,
    write_parquet,
)
from storage.export.rows import Pairs, Selection, selected_pairs, write_tars
from storage.files import check_replaceable, text_bytes, whole_folder, write_description, write_file
from storage.pairs.dataset import Dataset
from storage.pairs.layout import OnPart
from storage.pairs.statistics import attacks_of

Format = Literal["webdataset", "parquet", "huggingface"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Summary of an export: pairs, different images, and the size of every file by its name."""

    folder: Path
    n_pairs: int
    n_images: int
    files: dict[str, int]


def export_pairs(
    dataset: Dataset,
    folder: Path,
    format: Format,
    *,
    selection: Selection | None = None,
    rows_per_file: int | None = None,
    fresh: bool = False,
    on_part: OnPart = lambda _done, _n: None,
) -> ExportReport:
    """Write the selected pairs to `folder`, whole or not at all; the same input, the same bytes.

    An earlier export there is replaced if `fresh`.

    Raises:
        ValueError: a setting is out of range, `folder` is taken, or no pair is selected.
        StorageError: pyarrow is missing, or another process exports to the same folder.
        CorruptPartError: the store's bytes are not what was written.
        StoreFullError: the device is full; nothing was exported.
    """
    if format not in FORMATS:
        raise ValueError(f"--format {format} is not one of {', '.join(FORMATS)}")
    if rows_per_file is not None and rows_per_file < 1:
        raise ValueError(f"--rows-per-file {rows_per_file} must be at least 1")
    check_replaceable(folder, fresh=fresh)
    if format != "webdataset":
        import_pyarrow()  # said before anything is written
    selection = selection or Selection()
    images: set[int] = set()

    def counted(batches: Iterable[Pairs]) -> Iterator[Pairs]:
        for pairs in batches:
            images.update(pairs.numbers["image_id"].tolist())
            yield pairs

    pairs = counted(selected_pairs(dataset, selection, render=rendered, on_part=on_part))
    with whole_folder(folder, fresh=fresh) as staging:
        n = {} if rows_per_file is None else {"rows_per_file": rows_per_file}
        if format == "webdataset":
            files = Written(files=write_tars(staging, pairs, **n))
        else:
            write = write_parquet if format == "parquet" else write_hugging_face
            files = write(staging, pairs, **n)
        n_pairs = sum(files.files.values())
        if n_pairs == 0:
            raise ValueError(
                f"no pair of {dataset.root} is selected (confident_only="
                f"{selection.confident_only}, min_iteration={selection.min_iteration}, of "
                f"{dataset.n_pairs} pairs); export --all, or lower --min-iteration"
            )
        attacks = attacks_of(dataset, by_kind={KKT.family})
        sizes = {name: (staging / name).stat().st_size for name in files.files}
        if format == "huggingface":
            card = dataset_card(
                dataset,
                selection,
                files,
                attacks=attacks,
                n_images=len(images),
                n_file_bytes=sum(sizes.values()),
            )
            write_file(staging / "README.md", text_bytes(card))
        write_description(
            staging,
            {
                "format": format,
                "store": {"hash": dataset.content_hash, "manifest": dataset.manifest},
                "attacks": attacks,
                "selection": asdict(selection),
                "n_pairs": n_pairs,
                "n_images": len(images),
                "reconstruction_shape": list(dataset.receipts[0].picture),
                "files": files.files,
            },
        )
    return ExportReport(folder=folder, n_pairs=n_pairs, n_images=len(images), files=sizes)


def rendered(x: npt.NDArray[np.float32], mean: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Raw reconstructions as uint8 pictures around the means of their runs."""
    pictures = fit_to_range(torch.from_numpy(x), torch.from_numpy(mean))
    return np.asarray((pictures * 255).round_().to(torch.uint8).numpy())
