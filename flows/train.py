"""Train: each restorer of the recipe on the balanced stream of pairs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from flows.naming import unknown_name
from flows.recipe import Recipe
from flows.settings import resolve, to_json
from storage.files import write_json
from storage.pairs.dataset import Dataset
from tasks.artifacts import publish_facts
from tasks.dataset.curate import curate_pairs
from tasks.devices import Device, resolve_device
from tasks.orchestration import flow, task
from tasks.progress import Advance, stage_progress
from tasks.training.train import train_restorer
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


train_one = task(name="train restorer")(train_restorer)


@flow(name="train", flow_run_name="{store}")
def train(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    only: str | None = None,
    settings: dict[str, Any] | None = None,
    device: Device = "auto",
) -> dict[str, Any]:
    """Train the recipe's restorers, or the one called `only`; finished ones are not repeated.

    1. Make sure the pairs are curated. 2. Train one restorer after the other, each on the whole
    machine. 3. Say what was learned. Raises ValueError for an unknown restorer.

    Args:
        recipe: A preset's name, such as `demo`, or a whole recipe.
        store: The job's folder.
        only: The one restorer to train, by its name in the recipe.
        settings: Single settings by dotted name, as `--set` takes them.
        device: Where to train: `auto`, `cpu` or `cuda`.
    """
    recipe = resolve(recipe, settings)
    workspace = Workspace(store, recipe.pairs_at)
    if only is not None and only not in recipe.restorers:
        raise ValueError(unknown_name("restorer", only, recipe.restorers))
    curate(recipe, store)
    dataset = Dataset(workspace.pairs("train"))
    images = recipe.images("train")
    cards = {}
    for name, plan in recipe.restorers.items():
        if only in (None, name):
            with (
                workspace.timed(f"train {name}"),
                stage_progress(f"Train {name}", "step") as advance,
            ):
                cards[name] = train_one(
                    plan.restorer,
                    plan.training,
                    dataset=dataset,
                    curation=recipe.curation,
                    images_for_noise=images.images,
                    out=workspace.restorer(name),
                    device=resolve_device(device),
                    validation=plan.validation,
                    on_work=partial(_advance, advance, plan.training.n_steps),
                )
            publish_facts(f"restorer-{name.replace('_', '-')}", cards[name], f"Restorer {name}")
    write_json(workspace.recipe, to_json(recipe))
    return cards


def _advance(advance: Advance, n_steps: int, done: int, share: float, note: str) -> None:
    advance(done, n_steps, note, share=share)
