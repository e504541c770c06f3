"""The attack's settings: what is drawn for every attack, where it starts, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from recon_core.attacks.kkt.objective import (
    SETTINGS,
    Condition,
    KKTAttack,
    Search,
    settings_of,
    starting_points,
)
from recon_core.optimisers import Optimiser

Q = 3


def generators(n: int = Q, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 * seed + i) for i in range(n)]


ALL = ("lr", "lam_lr", "sigma", "lam_min", "alpha")
RANGES = {
    "lr": (1e-5, 1.0),
    "lam_lr": (1e-3, 10.0),
    "sigma": (1e-6, 0.1),
    "lam_min": (0.01, 0.5),
    "alpha": (10.0, 500.0),
}


def test_without_a_search_every_attack_has_the_attacks_numbers() -> None:
    attack = KKTAttack(
        optimiser=Optimiser(rule="gd", lr=0.25), sigma=0.125, lam_min=0.375, alpha=33.0
    )
    some = generators()
    states = [generator.get_state() for generator in some]
    each = settings_of(attack, some)
    assert len(each) == Q
    for name, value in zip(SETTINGS, (0.25, 0.25, 0.125, 0.375, 33.0), strict=True):
        assert getattr(each, name).tolist() == [value] * Q
    for generator, state in zip(some, states, strict=True):
        assert torch.equal(generator.get_state(), state), "nothing was to be drawn"
    apart = settings_of(dataclasses.replace(attack, lam_lr=1e-4), generators())
    assert apart.lr.tolist() == [0.25] * Q
    assert apart.lam_lr.tolist() == [1e-4] * Q


def test_a_search_draws_within_its_ranges_and_by_its_laws() -> None:
    n = 600
    each = settings_of(KKTAttack(search=Search(**RANGES)), generators(n))
    for name, (low, high) in RANGES.items():
        drawn = getattr(each, name)
        assert low <= float(drawn.min())
        assert float(drawn.max()) <= high
        place = (drawn - low) / (high - low)
        if name not in ("lam_min", "alpha"):
            place = (drawn / low).log() / math.log(high / low)
        # Distance of Kolmogorov to the uniform law: above 1.95 / sqrt(n) once in a thousand.
        ranks = torch.arange(1, n + 1, dtype=torch.float64) / n
        assert float((place.sort().values - ranks).abs().max()) < 1.95 / n**0.5, name
    drawn = torch.stack([getattr(each, name) for name in ALL])
    off_diagonal = drawn.log().corrcoef() - torch.eye(5)
    assert float(off_diagonal.abs().max()) < 0.2, "one number was drawn for several settings"


def test_a_search_depends_on_the_generator_alone() -> None:
    attack = KKTAttack(search=Search())
    one, same, other = (settings_of(attack, generators(seed=s)) for s in (0, 0, 1))
    for name in SETTINGS:
        assert torch.equal(getattr(one, name), getattr(same, name))
        assert not bool((getattr(one, name) == getattr(other, name)).any())
    alone = settings_of(attack, [generators()[2]])
    assert float(alone.alpha) == float(one.alpha[2])


@pytest.mark.parametrize("name", ALL)
def test_a_range_left_out_leaves_the_attacks_number_and_the_other_draws(name: str) -> None:
    full = settings_of(KKTAttack(search=Search(**RANGES)), generators())
    ranges: dict[str, Any] = {**RANGES, name: None}
    attack = KKTAttack(search=Search(**ranges), lam_lr=0.7)
    some = settings_of(attack, generators())
    fixed = {"lr": 1.0, "lam_lr": 0.7, "sigma": 1e-3, "lam_min": 0.5, "alpha": 20.0}[name]
    assert getattr(some, name).tolist() == [fixed] * Q
    for other in set(ALL) - {name}:
        assert torch.equal(getattr(some, other), getattr(full, other))


def test_lam_moves_at_the_rate_of_x_unless_told_otherwise() -> None:
    searched = settings_of(KKTAttack(search=Search()), generators())
    assert torch.equal(searched.lam_lr, searched.lr)
    fixed = settings_of(KKTAttack(search=Search(), lam_lr=0.5), generators())
    assert fixed.lam_lr.tolist() == [0.5] * Q
    assert torch.equal(fixed.lr, searched.lr)
    drawn = settings_of(KKTAttack(search=Search(lam_lr=(0.01, 0.02))), generators())
    assert bool(((drawn.lam_lr >= 0.01) & (drawn.lam_lr <= 0.02)).all())


@pytest.mark.parametrize("condition", ["binary", "multiclass", "regression"])
def test_attacks_start_from_noise_of_their_own(condition: Condition) -> None:
    attack = KKTAttack(condition=condition, n_candidates=1000)
    each = settings_of(attack, generators())
    each.sigma.copy_(torch.tensor([1e-3, 0.1, 1.0]))
    x, lam = starting_points(attack, each, 20, generators())
    assert x.shape == (Q, 1000, 20)
    torch.testing.assert_close(x.std((1, 2)), each.sigma.float(), rtol=0.03, atol=0)
    assert bool((x.mean((1, 2)).abs() < 0.03 * each.sigma).all())
    if condition == "regression":
        torch.testing.assert_close(lam.std(1), torch.ones(Q), rtol=0.1, atol=0)
        assert bool((lam.mean(1).abs() < 0.15).all())
    else:
        assert 0 <= float(lam.min()) < 0.01
        assert 0.99 < float(lam.max()) < 1
        torch.testing.assert_close(lam.mean(1), torch.full((Q,), 0.5), rtol=0.06, atol=0)
    (alone,), _ = starting_points(attack, each.rows(torch.tensor([1])), 20, [generators()[1]])
    assert torch.equal(alone, x[1])
    assert not torch.equal(x[0] / 1e-3, x[2])
