"""Frequency at which restorers see each image's pairs (image restoration paper, section 3)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Any

from recon_core.balance import Curation, occurrences, summarise
from storage.documents import read_document
from storage.errors import DocumentError
from storage.files import write_json
from storage.pairs.dataset import Dataset
from tasks.workspace import Workspace


class NothingToLearnError(Exception):
    """The store has no confident pair, so there is nothing to train a restorer on."""


def curate_pairs(curation: Curation, workspace: Workspace) -> dict[str, Any]:
    """The balance of the train store's pairs over its images, written to `curation.json`.

    The confident pairs of every image are counted and weighed, so that no image dominates; what was
    curated with the same settings from the same pairs is not again. Raises NothingToLearnError if
    no pair is confident.
    """
    dataset = Dataset(workspace.pairs("train"))
    known = _known(curation, dataset, workspace)
    if known is not None:
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


def _known(curation: Curation, dataset: Dataset, workspace: Workspace) -> dict[str, Any] | None:
    """The facts in `curation.json`, if they are of these settings and pairs."""
    if not workspace.curation.is_file():
        return None
    with suppress(DocumentError, KeyError):  # written anew
        facts = read_document(workspace.curation, "remove it")
        settings = facts.pop("curation")
        if (settings, facts["dataset_hash"]) == (asdict(curation), dataset.content_hash):
            return facts
    return None
