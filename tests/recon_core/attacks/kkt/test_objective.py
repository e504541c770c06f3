"""The attack's objective: penalties, scales and signs, and planted solutions."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import (
    Condition,
    KKTAttack,
    Objective,
    Settings,
    relative_residual,
    settings_of,
)
from recon_core.victims.network import Network, Parameters
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.planted import STEEP, Planted, planted_relu
from tests.recon_core.drawing import generators

pytestmark = pytest.mark.usefixtures("one_thread")

Q, M, SHAPE = 3, 6, (1, 3, 4)
NETWORK = Network(widths=(7, 5), bias="first")


def settings() -> Settings:
    """Every attack with an alpha and a lam_min of its own."""
    same = torch.ones(Q, dtype=torch.float64)
    lam_min = torch.tensor([0.5, 0.1, 0.3], dtype=torch.float64)
    alpha = torch.tensor([2.0, 20.0, 7.0], dtype=torch.float64)
    return Settings(lr=same, lam_lr=same, sigma=same, lam_min=lam_min, alpha=alpha)


def problem(n_outputs: int = 1) -> tuple[Parameters, Tensor, Tensor]:
    """Weights, candidates (some outside [-1, 1]) and multipliers (some below lam_min)."""
    generator = torch.Generator().manual_seed(0)
    architecture = NETWORK.on(SHAPE, n_outputs)
    skeleton = architecture.initial(generators(Q), dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    parameters = skeleton.map(lambda t: normal(*t.shape) / t.shape[-1] ** 0.5)
    return parameters, normal(Q, M, architecture.d), torch.rand(Q, M, generator=generator).double()


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
        NETWORK.on(SHAPE, n_outputs),
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
            NETWORK.on(SHAPE, n_outputs),
            parameters.map(lambda t: t.to(dtype)),  # noqa: B023
            attack=attack,
            settings=each,
        )
        for ours, truth in zip(objective(x.to(dtype), lam.to(dtype)), expected, strict=True):
            assert ours is not None
            assert ours.dtype == dtype
            assert float((ours.double() - truth).norm() / truth.norm()) < tolerance


def test_the_value_is_optional_and_nothing_is_modified() -> None:
    parameters, x, lam = problem()
    given = (x, lam, *parameters.tensors())
    before = [tensor.clone() for tensor in given]
    objective = Objective(
        NETWORK.on(SHAPE), parameters, attack=KKTAttack(n_candidates=M), settings=settings()
    )
    with_value = [tensor.clone() for tensor in objective(x, lam) if tensor is not None]
    without = objective(x, lam, with_value=False)
    assert without[0] is None
    assert torch.equal(without[1], with_value[1])
    assert torch.equal(without[2], with_value[2])
    for tensor, copy in zip(given, before, strict=True):
        assert torch.equal(tensor, copy)


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


PLANTED = {
    "one hidden": {"n_hidden": 1, "n_pairs": 2, "d": 12, "norm": 1.4},
    "two hidden": {"n_hidden": 2},
    "three hidden": {"n_hidden": 3},
    "first-layer bias": {"n_hidden": 1, "bias": True},
    "deep with bias": {"n_hidden": 3, "bias": True},
    "two outputs": {"n_hidden": 1, "n_pairs": 2, "d": 12, "norm": 1.4, "n_outputs": 2},
    "deep, two outputs": {"n_hidden": 3, "n_outputs": 2},
    "convolution": {"n_hidden": 1, "conv": True},
    "convolution with bias": {"n_hidden": 2, "conv": True, "bias": True, "norm": 2.05},
    "convolution, two outputs": {"n_hidden": 2, "conv": True, "n_outputs": 2},
}


def plant(name: str) -> tuple[Planted, KKTAttack, Tensor]:
    """(network and images, an attack for them, its multipliers)."""
    planted = planted_relu(**{"d": 6, **PLANTED[name]})  # type: ignore[arg-type]
    condition: Condition = "binary" if planted.classes is None else "multiclass"
    attack = KKTAttack(
        condition=condition,
        n_candidates=planted.x.shape[1],
        lam_scale="none",
        alpha=STEEP,
        lam_min=0.1,
    )
    lam = planted.c * attack.signs(planted.c)
    return planted, attack, lam


@pytest.mark.parametrize("name", list(PLANTED))
def test_a_planted_kkt_point_has_no_residual(name: str) -> None:
    planted, attack, lam = plant(name)
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
    attack, each = KKTAttack(n_candidates=M), settings()
    architecture = NETWORK.on(SHAPE)
    signs = attack.signs(lam) / M
    value = double_backprop.stationarity(
        architecture, parameters, x, lam * signs, alpha=each.alpha
    )[0]
    expected = value / parameters.squared_norm()
    found = relative_residual(architecture, parameters, x, lam, attack=attack, settings=each)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    narrow = relative_residual(
        architecture,
        parameters.map(lambda t: t.float()),
        x.float(),
        lam.float(),
        attack=attack,
        settings=each,
    )
    assert narrow.dtype == torch.float64
    torch.testing.assert_close(narrow, expected, rtol=1e-5, atol=0)
    one = parameters.rows(slice(1, 2))
    shared = relative_residual(architecture, one, x, lam, attack=attack, settings=each)
    torch.testing.assert_close(shared[1], expected[1], rtol=1e-12, atol=0)
    assert float((shared[0] - expected[0]).abs()) > 1e-3


def test_condition_and_outputs_must_go_together() -> None:
    cpu = torch.device("cpu")
    for condition in ("binary", "regression"):
        with pytest.raises(ValueError, match=f"condition='{condition}' on a network with 3 output"):
            KKTAttack(condition=condition).classes(3, cpu)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="condition='multiclass' on a network with 1 outputs"):
        KKTAttack(condition="multiclass").classes(1, cpu)
    few = KKTAttack(condition="multiclass", n_candidates=4)
    with pytest.raises(ValueError, match=r"n_candidates=4 is less than one per class of 5.* 10 or"):
        few.classes(5, cpu)
    with pytest.raises(ValueError, match="condition='binary' on a network with 3 outputs"):
        Objective(
            NETWORK.on(SHAPE, 3),
            problem(3)[0],
            attack=KKTAttack(n_candidates=M),
            settings=settings(),
        )
