"""The attack's settings and objective: draws, starts, penalties, scales, planted solutions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import (
    SETTINGS,
    Condition,
    KKTAttack,
    Objective,
    Search,
    Settings,
    relative_residual,
    settings_of,
    starting_points,
)
from recon_core.optimisers import Optimiser
from recon_core.victims.network import Architecture, Parameters
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.planted import PLANTED, STEEP, plant
from tests.recon_core.attacks.kkt.small_attacks import M, architecture, different
from tests.recon_core.attacks.kkt.small_attacks import problem as small_problem
from tests.recon_core.drawing import generators, refuses

ATTACK = KKTAttack(n_candidates=M)


def settings() -> Settings:
    """Every attack with an alpha and a lam_min of its own."""
    return different(ATTACK)


def network(n_outputs: int = 1) -> Architecture:
    return architecture("multiclass" if n_outputs == 3 else "binary")


def problem(n_outputs: int = 1) -> tuple[Parameters, Tensor, Tensor]:
    """Weights, candidates (some outside [-1, 1]) and multipliers (some below lam_min)."""
    parameters, x, lam = small_problem(network(n_outputs))
    return parameters, x / 0.3, lam


def penalties(x: Tensor, lam: Tensor, lam_min: Tensor, *, of_lam: bool) -> Tensor:
    """Written as the image restoration paper does, with relu."""
    loss = (x - 1).relu().square().sum((1, 2)) + (-1 - x).relu().square().sum((1, 2))
    return loss + of_lam * 5 * (lam_min[:, None] - lam).relu().square().sum(1)


@pytest.mark.parametrize("lam_scale", ["candidates", "none"])
@pytest.mark.parametrize(
    ("condition", "n_outputs"), [("binary", 1), ("multiclass", 3), ("regression", 1)]
)
def test_equals_the_definition(
    condition: Condition, n_outputs: int, lam_scale: Literal["candidates", "none"]
) -> None:
    attack = KKTAttack(condition=condition, n_candidates=M, lam_scale=lam_scale)
    each, (parameters, x, lam) = settings(), problem(n_outputs)
    if condition == "regression":
        lam = lam - 0.5
    y = torch.tensor([-1.0] * 3 + [1.0] * 3) if condition == "binary" else torch.ones(M)
    per_lam = y.double() / (M if lam_scale == "candidates" else 1)
    value, by_x, by_c = double_backprop.stationarity(
        network(n_outputs),
        parameters,
        x,
        lam * per_lam,
        alpha=each.alpha,
        classes=torch.tensor([0, 0, 1, 1, 2, 2]) if condition == "multiclass" else None,
    )
    x_leaf, lam_leaf = x.clone().requires_grad_(), lam.clone().requires_grad_()
    extra = penalties(x_leaf, lam_leaf, each.lam_min, of_lam=condition != "regression")
    extra.sum().backward()
    assert x_leaf.grad is not None
    assert bool(x_leaf.grad.any()), "the penalty of x must take part"
    extra_lam = torch.zeros_like(lam) if lam_leaf.grad is None else lam_leaf.grad
    assert bool(extra_lam.any()) == (condition != "regression")
    expected = (value + extra.detach(), by_x + x_leaf.grad, by_c * per_lam + extra_lam)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        objective = Objective(
            network(n_outputs),
            parameters.map(lambda t: t.to(dtype)),  # noqa: B023
            attack=attack,
            settings=each,
        )
        for ours, truth in zip(objective(x.to(dtype), lam.to(dtype)), expected, strict=True):
            assert ours is not None
            assert ours.dtype == dtype
            assert float((ours.double() - truth).norm() / truth.norm()) < tolerance


def test_labels_are_balanced() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    assert KKTAttack(n_candidates=4).signs(like).tolist() == [-1, -1, 1, 1]
    assert KKTAttack(condition="regression", n_candidates=3).signs(like).tolist() == [1, 1, 1]
    several = KKTAttack(condition="multiclass", n_candidates=6)
    assert several.signs(like).tolist() == [1] * 6
    cpu = torch.device("cpu")
    for n_candidates, n_outputs in ((6, 3), (7, 3), (400, 10), (5, 5), (11, 4)):
        attack = KKTAttack(condition="multiclass", n_candidates=n_candidates)
        classes = attack.classes(n_outputs, cpu)
        assert classes is not None
        counts = classes.bincount(minlength=n_outputs)
        assert len(counts) == n_outputs
        assert int(counts.max()) - int(counts.min()) <= 1
        assert torch.equal(classes, classes.sort().values)
    assert KKTAttack().classes(1, cpu) is None
    assert KKTAttack(condition="regression").classes(1, cpu) is None


@pytest.mark.parametrize("name", list(PLANTED))
def test_a_planted_kkt_point_has_no_residual(name: str) -> None:
    planted, attack, lam = plant(name, alpha=STEEP)
    each = settings_of(attack, generators(1))
    assert bool((lam > attack.lam_min).all())

    def residual(x: Tensor, multipliers: Tensor) -> float:
        found = relative_residual(
            planted.architecture,
            planted.parameters,
            x,
            multipliers,
            attack=attack,
            settings=each,
        )
        return float(found)

    assert abs(residual(planted.x, lam)) < 1e-14
    objective = Objective(planted.architecture, planted.parameters, attack=attack, settings=each)
    assert bool((planted.x.abs() < 1).all())
    for tensor in objective(planted.x, lam):
        assert tensor is not None
        assert float(tensor.abs().max()) < 1e-12
    assert residual(1.1 * planted.x, lam) > 1e-4
    assert residual(planted.x, 1.1 * lam) > 1e-4
    idle = torch.where(planted.active, lam, 3 * lam)
    assert abs(residual(planted.x, idle)) < 1e-14
    assert residual(planted.x.flip(1), lam) > 1e-4, "another label"


def test_the_residual_is_relative_and_each_attacks_own() -> None:
    parameters, x, lam = problem()
    attack, each = ATTACK, settings()
    of = network()
    signs = attack.signs(lam) / M
    value = double_backprop.stationarity(of, parameters, x, lam * signs, alpha=each.alpha)[0]
    expected = value / parameters.squared_norm()
    found = relative_residual(of, parameters, x, lam, attack=attack, settings=each)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    narrow = relative_residual(
        of,
        parameters.map(lambda t: t.float()),
        x.float(),
        lam.float(),
        attack=attack,
        settings=each,
    )
    assert narrow.dtype == torch.float64
    torch.testing.assert_close(narrow, expected, rtol=1e-5, atol=0)
    one = parameters.rows(slice(1, 2))
    shared = relative_residual(of, one, x, lam, attack=attack, settings=each)
    torch.testing.assert_close(shared[1], expected[1], rtol=1e-12, atol=0)
    assert float((shared[0] - expected[0]).abs()) > 1e-3


def test_condition_and_outputs_must_go_together() -> None:
    cpu = torch.device("cpu")
    for condition in ("binary", "regression"):
        refuses(f"condition='{condition}' on a", KKTAttack(condition=condition).classes, 3, cpu)
    refuses("condition='multiclass' on a", KKTAttack(condition="multiclass").classes, 1, cpu)
    few = KKTAttack(condition="multiclass", n_candidates=4)
    refuses(r"n_candidates=4 is less than one per class of 5.* 10 or", few.classes, 5, cpu)
    with pytest.raises(ValueError, match="condition='binary' on a network with 3 outputs"):
        Objective(
            network(3),
            problem(3)[0],
            attack=ATTACK,
            settings=settings(),
        )


Q = 3


def own_generators(n: int = Q, seed: int = 0) -> list[torch.Generator]:
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
    some = own_generators()
    states = [generator.get_state() for generator in some]
    each = settings_of(attack, some)
    assert len(each) == Q
    for name, value in zip(SETTINGS, (0.25, 0.25, 0.125, 0.375, 33.0), strict=True):
        assert getattr(each, name).tolist() == [value] * Q
    for generator, state in zip(some, states, strict=True):
        assert torch.equal(generator.get_state(), state), "nothing was to be drawn"
    apart = settings_of(dataclasses.replace(attack, lam_lr=1e-4), own_generators())
    assert apart.lr.tolist() == [0.25] * Q
    assert apart.lam_lr.tolist() == [1e-4] * Q


def test_a_search_draws_within_its_ranges_and_by_its_laws() -> None:
    n = 600
    each = settings_of(KKTAttack(search=Search(**RANGES)), own_generators(n))
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


@pytest.mark.parametrize("name", ALL)
def test_a_range_left_out_leaves_the_attacks_number_and_the_other_draws(name: str) -> None:
    full = settings_of(KKTAttack(search=Search(**RANGES)), own_generators())
    ranges: dict[str, Any] = {**RANGES, name: None}
    attack = KKTAttack(search=Search(**ranges), lam_lr=0.7)
    some = settings_of(attack, own_generators())
    fixed = {"lr": 1.0, "lam_lr": 0.7, "sigma": 1e-3, "lam_min": 0.5, "alpha": 20.0}[name]
    assert getattr(some, name).tolist() == [fixed] * Q
    for other in set(ALL) - {name}:
        assert torch.equal(getattr(some, other), getattr(full, other))


def test_lam_moves_at_the_rate_of_x_unless_told_otherwise() -> None:
    searched = settings_of(KKTAttack(search=Search()), own_generators())
    assert torch.equal(searched.lam_lr, searched.lr)
    fixed = settings_of(KKTAttack(search=Search(), lam_lr=0.5), own_generators())
    assert fixed.lam_lr.tolist() == [0.5] * Q
    assert torch.equal(fixed.lr, searched.lr)
    drawn = settings_of(KKTAttack(search=Search(lam_lr=(0.01, 0.02))), own_generators())
    assert bool(((drawn.lam_lr >= 0.01) & (drawn.lam_lr <= 0.02)).all())


@pytest.mark.parametrize("condition", ["binary", "multiclass", "regression"])
def test_attacks_start_from_noise_of_their_own(condition: Condition) -> None:
    attack = KKTAttack(condition=condition, n_candidates=1000)
    each = settings_of(attack, own_generators())
    each.sigma.copy_(torch.tensor([1e-3, 0.1, 1.0]))
    x, lam = starting_points(attack, each, 20, own_generators())
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
    (alone,), _ = starting_points(attack, each.rows(torch.tensor([1])), 20, [own_generators()[1]])
    assert torch.equal(alone, x[1])
    assert not torch.equal(x[0] / 1e-3, x[2])
