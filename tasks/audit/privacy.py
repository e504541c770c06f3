"""Noise and epsilon of DP-SGD, by the accountants of Opacus (Mironov 2017; Gopi et al. 2021)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tasks.audit.recipe import Private, VictimRecipe

ACCOUNTANT = "rdp"
"""Renyi: an upper bound that holds for any number of steps, the whole batch included."""


def noise_multiplier_of(recipe: VictimRecipe, n_images: int) -> float:
    """The noise, in units of the clip, with which a recipe's training on `n_images` is private; 0
    without `recipe.private`. Raises ValueError if no noise is enough, and for views, each of which
    is clipped by itself."""
    if recipe.private is None:
        return 0.0
    if recipe.views > 1:
        raise ValueError(
            f"private with views={recipe.views}: every view is clipped by itself, so that an image "
            "counts several times and epsilon would be more than is said; set views to 1"
        )
    rate, n_steps = schedule_of(recipe, n_images)
    with _quiet():
        from opacus.accountants.utils import get_noise_multiplier

        try:
            found = get_noise_multiplier(
                target_epsilon=recipe.private.epsilon,
                target_delta=recipe.private.delta,
                sample_rate=rate,
                steps=n_steps,
                accountant=ACCOUNTANT,
            )
        except ValueError as error:
            raise ValueError(
                f"no noise makes {n_steps:,} steps private with epsilon="
                f"{recipe.private.epsilon:g}, delta={recipe.private.delta:g} ({error}); train in "
                "fewer epochs, or allow a larger epsilon"
            ) from error
    return float(found)


def epsilon_of(private: Private, noise_multiplier: float, rate: float, n_steps: int) -> float:
    """Epsilon of so many steps with that noise, infinite without."""
    if noise_multiplier == 0:
        return math.inf
    with _quiet():
        from opacus.accountants import create_accountant

        accountant = create_accountant(ACCOUNTANT)
        accountant.history = [(noise_multiplier, rate, n_steps)]
        return float(accountant.get_epsilon(private.delta))


def schedule_of(recipe: VictimRecipe, n_images: int) -> tuple[float, int]:
    """(the share of the images in a step, the number of steps): as `train_with_noise` draws."""
    size = min(recipe.training.batch_size or n_images, n_images)
    return size / n_images, recipe.training.epochs * math.ceil(n_images / size)


@contextmanager
def _quiet() -> Iterator[Any]:
    """Without the library's warnings, which are about its search for the best order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
