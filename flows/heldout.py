"""The images that victims are trained on, without those that restorers may know."""

from __future__ import annotations

from pathlib import Path

from flows.recipe import Recipe
from storage.sources.load import ImageSet, Split
from tasks.dataset.heldout import exclude_near_duplicates
from tasks.progress import stage_progress
from tasks.workspace import Workspace


def images_of(recipe: Recipe, split: Split, store: Path) -> ImageSet:
    """The images of one split of the job at `store`.

    Held-out ones come without near copies of training images if the recipe says so; which, is in
    the job's `heldout-excluded.json`, and is not searched again. Raises as `Recipe.images` and
    `exclude_near_duplicates` do.
    """
    images = recipe.images(split)
    if split == "train" or recipe.near_duplicates is None:
        return images
    with stage_progress("Leave out near copies", "part") as advance:
        rest = exclude_near_duplicates(
            images,
            recipe.images("train"),
            threshold=recipe.near_duplicates,
            report=Workspace(store).excluded,
            progress=lambda fraction: advance(100 * fraction, 100),
        )
        advance(100, 100)
    return rest
