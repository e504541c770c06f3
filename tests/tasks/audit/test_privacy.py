"""Noise and epsilon: they go with each other, with Opacus' accountant, and with theory."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from recon_core.victims.noisy_training import poisson_sample
from tasks.audit.recipe import Private, VictimRecipe, epsilon_of, noise_multiplier_of, schedule_of
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
    made = private(epsilon, batch_size=batch_size)
    rate, n_steps = schedule_of(made, 100)
    noise = noise_multiplier_of(made, 100)
    assert made.private is not None
    found = epsilon_of(made.private, noise, rate, n_steps)
    assert 0.98 * epsilon <= found <= epsilon
    assert found == pytest.approx(stepped(noise, rate, n_steps, 1e-5), rel=1e-9)


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
    ("batch_size", "n_images", "expected"),
    [
        (None, 100, (1.0, 60)),
        (100, 100, (1.0, 60)),
        (500, 100, (1.0, 60)),
        (10, 100, (0.1, 600)),
        (33, 100, (0.33, 240)),
        (16, 24, (2 / 3, 120)),
    ],
)
def test_the_schedule_is_that_of_the_training(
    batch_size: int | None, n_images: int, expected: tuple[float, int]
) -> None:
    assert schedule_of(private(8, batch_size=batch_size), n_images) == pytest.approx(expected)


def test_steps_draw_images_at_the_rate_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    from recon_core.victims import noisy_training

    drawn: list[tuple[int, float]] = []

    def watched(n: int, probability: float, generators: Any) -> Any:
        drawn.append((n, probability))
        return poisson_sample(n, probability, generators)

    monkeypatch.setattr(noisy_training, "poisson_sample", watched)
    made = private(8, epochs=3, batch_size=7)
    architecture = made.architecture((1, 8, 8))
    generators = [torch.Generator().manual_seed(k) for k in range(2)]
    start = architecture.initial(generators, dtype=torch.float32)
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(2, 24, 64)).astype(np.float32))
    y = torch.from_numpy(rng.choice([-1.0, 1.0], (2, 24)).astype(np.float32))
    noisy_training.train_with_noise(
        architecture, start, x, y, training=made.training, noise=made.noise(1.0),
        generators=generators,
    )  # fmt: skip
    rate, n_steps = schedule_of(made, 24)
    assert drawn == [(24, pytest.approx(rate))] * n_steps


def test_without_a_promise_there_is_no_noise_and_without_noise_none() -> None:
    assert noise_multiplier_of(recipe(), 8) == 0.0
    assert noise_multiplier_of(recipe(dropout=0.5), 8) == 0.0
    assert epsilon_of(Private(epsilon=1), 0.0, 1.0, 10) == math.inf


def test_a_promise_that_no_noise_keeps_is_refused_with_the_fix() -> None:
    made = private(1e-9, epochs=1000)
    with pytest.raises(ValueError, match=r"no noise makes 1,000 steps private with epsilon=1e-09"):
        noise_multiplier_of(made, 100)
    with pytest.raises(ValueError, match="fewer epochs, or allow a larger epsilon"):
        noise_multiplier_of(made, 100)


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
