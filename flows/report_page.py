"""The page of a job's finished evaluation, with what the job knows beyond the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.recipe import Recipe
from flows.settings import command, portable, to_json
from storage.checkpoints import read_meta
from storage.errors import StorageError
from storage.pairs.dataset import Dataset, is_store
from tasks.campaign.plan import made_with
from tasks.report.page import write_report
from tasks.training.loop import MODEL
from tasks.workspace import Workspace

SHOWN_VERSIONS = ("palimpsest", "torch", "numpy", "zarr", "dask", "prefect", "scikit-image", "piq")


def report_of_job(recipe: Recipe, store: Path) -> Path:
    """The report of the job at `store`, written from its evaluation; needs nothing else.

    Raises StorageError if there is no evaluation yet.
    """
    workspace = Workspace(store, recipe.pairs_at)
    if not (workspace.evaluation / "evaluation.json").is_file():
        raise StorageError(
            f"{workspace.evaluation} has no evaluation.json; run: palimpsest evaluate "
            f"--store {store}"
        )
    return write_report(workspace.evaluation, context(recipe, workspace))


def context(recipe: Recipe, workspace: Workspace) -> dict[str, Any]:
    """Everything the page says beyond the scores."""
    train_store = workspace.pairs("train")
    pairs: dict[str, Any] = {}
    if is_store(train_store):
        dataset = Dataset(train_store)
        pairs = {
            "n_runs": dataset.n_runs,
            "n_pairs": dataset.n_pairs,
            "n_targets": dataset.n_targets,
            "content_hash": dataset.content_hash,
        }
    cards = {
        name: card
        for name in recipe.restorers
        if (card := read_meta(workspace.restorer(name), MODEL)) is not None
    }
    return {
        "recipe": portable(to_json(recipe)),
        "seeds": {
            "victims of the restorers": recipe.campaign("train").root_seed,
            "held-out victims": recipe.campaign("heldout").root_seed,
            "curation": recipe.curation.seed,
            "decoys": recipe.evaluation.decoy_seed,
        },
        "stages": [{"name": k, "seconds": v} for k, v in workspace.timings.items()],
        "pairs": pairs,
        "restorers": cards,
        "command": portable(command(recipe, workspace.root)),
        **made_with(SHOWN_VERSIONS),
    }
