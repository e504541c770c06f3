"""A recipe with another number of runs per part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flows.recipe import Recipe
from storage.sources.load import Split
from tasks.cluster.batching import batched
from tasks.cluster.workers import Workers
from tasks.workspace import Workspace


def with_batch(recipe: Recipe, store: Path, split: Split, batch: str, workers: Workers) -> Recipe:
    """Set the runs per part of a recipe to `batch`: a number, or `auto` (`tasks.cluster.batching`).

    Raises:
        ValueError: it is neither, or there is no such number; the message has the fix.
    """
    campaign = recipe.campaign(split)
    sampling = batched(
        campaign.sampling,
        batch,
        experiment=campaign.experiment,
        shape=lambda: _shape(recipe, split),
        workers=workers,
        store=Workspace(store, recipe.pairs_at).pairs(split),
    )
    if split == "train":
        return replace(recipe, sampling=sampling)
    return replace(recipe, heldout=sampling)


def _shape(recipe: Recipe, split: Split) -> tuple[int, int, int]:
    c, h, w = recipe.images(split).images.shape[1:]
    return c, h, w
