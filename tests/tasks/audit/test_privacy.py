"""Noise and epsilon: they go with each other, with Opacus' accountant, and with theory."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import optimize, stats

from recon_core.victims.noisy_training import poisson_sample
from tasks.audit.recipe import Private, VictimRecipe, noise_multiplier_of
from tests.tasks.audit.small import audit, defence, images_of, plan_of, recipe


def private(epsilon: float, *, epochs: int = 60, batch_size: int | None = None) -> VictimRecipe:
    made = recipe(private=Private(epsilon=epsilon))
    training = replace(made.training, epochs=epochs, batch_size=batch_size)
    return replace(made, n_images=100, training=training)


def stepped(noise: float, rate: float, n_steps: int, delta: float) -> float:
    """Epsilon by Opacus, which is told of one step after another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        for _ in range(n_steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
        return float(accountant.get_epsilon(delta))


def exact(noise: float, n_steps: int, delta: float) -> float:
    """Epsilon of steps of the whole batch, exactly (Balle and Wang 2018, theorem 8)."""
    mu = math.sqrt(n_steps) / noise

    def excess(epsilon: float) -> float:
        spent = stats.norm.cdf(mu / 2 - epsilon / mu)
        rest = math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
        return float(spent - rest - delta)

    return float(optimize.brentq(excess, 0, 500))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 10, 33])
@pytest.mark.parametrize("epsilon", [1.0, 8.0, 50.0])
def test_noise_keeps_to_the_epsilon_that_is_asked_for(
    epsilon: float, batch_size: int | None
) -> None:
    size = batch_size or 100
    noise = noise_multiplier_of(private(epsilon, batch_size=batch_size), 100)
    found = stepped(noise, size / 100, 60 * math.ceil(100 / size), 1e-5)
    assert 0.98 * epsilon <= found <= epsilon


@pytest.mark.parametrize("epsilon", [1.0, 8.0, 50.0])
def test_what_is_said_of_whole_batches_is_more_than_the_exact_epsilon(epsilon: float) -> None:
    made = private(epsilon)
    noise = noise_multiplier_of(made, 100)
    assert 0.6 * epsilon < exact(noise, 60, 1e-5) < epsilon


def test_noise_grows_with_the_steps_and_falls_with_epsilon_and_delta() -> None:
    by_steps = [noise_multiplier_of(private(8, epochs=n), 100) for n in (1, 10, 100, 1000)]
    assert by_steps == sorted(set(by_steps))
    assert by_steps[3] / by_steps[1] == pytest.approx(10, rel=0.02)  # the root of the steps
    by_epsilon = [noise_multiplier_of(private(e), 100) for e in (50, 8, 1)]
    assert by_epsilon == sorted(set(by_epsilon))
    loose = private(8)
    loose = replace(loose, private=Private(epsilon=8, delta=1e-3))
    assert noise_multiplier_of(loose, 100) < noise_multiplier_of(private(8), 100)
    sampled = noise_multiplier_of(private(8, batch_size=10), 100)
    whole = noise_multiplier_of(private(8, epochs=600), 100)  # as many steps, of all images
    assert sampled < whole / 3
    wide = replace(private(8), private=Private(epsilon=8, clip=0.1))
    assert noise_multiplier_of(wide, 100) == noise_multiplier_of(private(8), 100)  # in clips


@pytest.mark.parametrize(
    ("batch_size", "rate", "n_steps"), [(None, 1.0, 3), (500, 1.0, 3), (7, 7 / 24, 12)]
)
def test_noise_is_of_the_rate_and_steps_of_the_training(
    monkeypatch: pytest.MonkeyPatch, batch_size: int | None, rate: float, n_steps: int
) -> None:
    from opacus.accountants import utils

    from recon_core.victims import noisy_training

    drawn: list[tuple[int, float]] = []
    asked: dict[str, Any] = {}

    def watched(n: int, probability: float, generators: Any) -> Any:
        drawn.append((n, probability))
        return poisson_sample(n, probability, generators)

    monkeypatch.setattr(noisy_training, "poisson_sample", watched)
    monkeypatch.setattr(utils, "get_noise_multiplier", lambda **given: asked.update(given) or 1.0)
    made = private(8, epochs=3, batch_size=batch_size)
    assert noise_multiplier_of(made, 24) == 1.0
    assert (asked["sample_rate"], asked["steps"]) == (pytest.approx(rate), n_steps)
    architecture, generators = made.architecture((1, 8, 8)), [torch.Generator()] * 2
    start = architecture.initial(generators, dtype=torch.float32)
    x, y = torch.ones(2, 24, 64), torch.ones(2, 24)
    noisy_training.train_with_noise(
        architecture, start, x, y, training=made.training, noise=made.noise(1.0),
        generators=generators,
    )  # fmt: skip
    assert drawn == [(24, pytest.approx(rate))] * (n_steps if batch_size == 7 else 0)


def test_without_a_promise_there_is_no_noise_and_one_that_none_keeps_is_refused() -> None:
    assert noise_multiplier_of(recipe(), 8) == 0.0
    assert noise_multiplier_of(recipe(dropout=0.5), 8) == 0.0
    with pytest.raises(ValueError, match="fewer epochs, or allow a larger epsilon"):
        noise_multiplier_of(private(1e-9, epochs=1000), 100)


def test_views_of_a_private_recipe_are_refused_and_not_miscounted(tmp_path: Path) -> None:
    made = replace(private(8), views=2)
    with pytest.raises(ValueError, match="every view is clipped by itself"):
        noise_multiplier_of(made, 100)
    own = audit(
        recipe=replace(private(8), n_images=8), defences=(defence("views", set={"views": 2}),)
    )
    plan = plan_of(own, tmp_path, images_of(60))
    assert plan.jobs[0].noise_multiplier == noise_multiplier_of(own.recipe, 8) > 0
    assert "set views to 1" in plan.refused[1]
