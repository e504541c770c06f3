"""Curate: decide how often each image's pairs are shown to a restorer, and write it down."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.presets import Recipe
from flows.settings import resolve, to_json
from recon_core.balance import occurrences, summarise
from storage.dataset import Dataset
from storage.files import write_json
from tasks.artifacts import leave_facts
from tasks.orchestration import flow
from tasks.workspace import Workspace


class NothingToLearnError(Exception):
    """The store has no confident pair, so there is nothing to train a restorer on."""


@flow(name="curate", flow_run_name="{store}")
def curate(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Balance the pairs of the train store (paper 001, section 3).

    1. Count the confident pairs of every image. 2. Weigh them, so that no image dominates.
    3. Write the curation beside the store. Raises NothingToLearnError if no pair is confident.
    """
    recipe = resolve(recipe, settings)
    workspace = Workspace(store, recipe.pairs_at)
    dataset = Dataset(workspace.pairs("train"))
    with workspace.timed("curate"):
        z = occurrences(*dataset.image_counts(recipe.curation.min_iteration))
        balance = summarise(z, recipe.curation)
    if balance.n_pairs == 0:
        raise NothingToLearnError(
            f"{dataset.root} has {dataset.n_pairs} pairs but none that is confident and saved at "
            f"iteration {recipe.curation.min_iteration} or later; use smaller victims "
            "(--set sampling.images_per_run=10), more epochs or more iterations"
        )
    facts = {**asdict(balance), "dataset_hash": dataset.content_hash}
    write_json(workspace.curation, {"curation": asdict(recipe.curation), **facts})
    write_json(workspace.recipe, to_json(recipe))
    leave_facts("curation", facts, "How the pairs are balanced over the images")
    return facts
