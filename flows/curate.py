"""Curate: decide how often each image's pairs are shown to a restorer, and write it down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.recipe import Recipe
from flows.settings import resolve, to_json
from storage.files import write_json
from tasks.artifacts import publish_facts
from tasks.dataset.curate import curate_pairs
from tasks.orchestration import flow
from tasks.progress import stage_progress
from tasks.workspace import Workspace


@flow(name="curate", flow_run_name="{store}")
def curate(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Balance the pairs of the train store (image restoration paper, section 3).

    1. Count the confident pairs of every image. 2. Weigh them, so that no image dominates.
    3. Write the curation beside the store. Raises NothingToLearnError if no pair is confident.

    Args:
        recipe: A preset's name, such as `demo`, or a whole recipe.
        store: The job's folder.
        settings: Single settings by dotted name, as `--set` takes them.
    """
    recipe = resolve(recipe, settings)
    workspace = Workspace(store, recipe.pairs_at)
    with stage_progress("Curate", "step"):
        facts = curate_pairs(recipe.curation, workspace)
    write_json(workspace.recipe, to_json(recipe))
    publish_facts("curation", facts, "How the pairs are balanced over the images")
    return facts
