"""What restorers learn from and are tested on: how often they see each image's pairs (image
restoration paper, section 3), and held-out images without near copies of training images, which
restorers would restore from memory (the paper uses ciFAIR-10 for that)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from recon_core.balance import Curation, occurrences, summarise
from recon_core.duplicates import THRESHOLD, near_duplicates
from recon_core.types import Progress, no_progress
from storage.documents import read_document
from storage.errors import DocumentError
from storage.files import write_json
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.workspace import Workspace

CRITERION = "the smaller of the correlations of pixels and of details, mirrored or not"


class NothingToLearnError(Exception):
    """The store has no confident pair, so there is nothing to train a restorer on."""


def curate_pairs(curation: Curation, workspace: Workspace) -> dict[str, Any]:
    """Balance the train store's pairs over its images, and write `curation.json`.

    The confident pairs of every image are counted and weighed, so that no image dominates. A file
    that was made with the same settings from the same pairs is not made again. Raises
    NothingToLearnError if no pair is confident.
    """
    dataset = Dataset(workspace.pairs("train"))
    if workspace.curation.is_file():
        with suppress(DocumentError, KeyError):  # written anew
            known = read_document(workspace.curation, "remove it")
            settings = known.pop("curation")
            if (settings, known["dataset_hash"]) == (asdict(curation), dataset.content_hash):
                return known
    with workspace.timed("curate"):
        z = occurrences(*dataset.image_counts(curation.min_iteration))
        balance = summarise(z, curation)
    if balance.n_pairs == 0:
        raise NothingToLearnError(
            f"{dataset.root} has {dataset.n_pairs} pairs but none that is confident and saved at "
            f"iteration {curation.min_iteration} or later; use smaller victims "
            "(--set sampling.images_per_run=10), more epochs or more iterations"
        )
    facts = {**asdict(balance), "dataset_hash": dataset.content_hash}
    write_json(workspace.curation, {"curation": asdict(curation), **facts})
    return facts


def exclude_near_duplicates(
    heldout: ImageSet,
    train: ImageSet,
    *,
    threshold: float = THRESHOLD,
    report: Path,
    progress: Progress = no_progress,
) -> ImageSet:
    """`heldout` without the images that are near copies of images in `train`.

    The file `report`, `heldout-excluded.json`, lists them: its `rows` have the `image_id` (row in
    `heldout`), the `nearest` (row in `train`) and the `correlation` of each. If it is there and
    about the same images, threshold and criterion, nothing is searched. The search takes 100
    seconds of one core for 5,000 images against 50,000. Raises ValueError if the images have
    different sizes, the threshold is not in [0, 1), or every image is a near copy.
    """
    question = {
        "threshold": threshold,
        "criterion": CRITERION,
        "source_hash": heldout.content_hash,
        "train_hash": train.content_hash,
    }
    rows: list[int] | None = None
    with suppress(FileNotFoundError, AttributeError, KeyError, TypeError, ValueError):
        known = read_document(report, "remove it")
        if {name: known.get(name) for name in question} == question:
            rows = [int(row["image_id"]) for row in known["rows"]]
    if rows is None:
        images, others = (torch.from_numpy(these.images) for these in (heldout, train))
        found = near_duplicates(images, others, threshold=threshold, progress=progress)
        rows = found.rows.tolist()
        columns = zip(rows, found.nearest.tolist(), found.correlation.tolist(), strict=True)
        listed = [
            {"image_id": row, "nearest": nearest, "correlation": round(correlation, 6)}
            for row, nearest, correlation in columns
        ]
        report.parent.mkdir(parents=True, exist_ok=True)
        write_json(report, question | {"n": len(rows), "rows": listed})
    return heldout.without(
        rows, because=f"they are near copies of training images (correlation above {threshold:g})"
    )
