"""The reference the engine is held to, against finite differences and formulas written out.

The derivative that replaces ReLU's belongs to no function, so its objective cannot be differenced
as it stands. But at any x0 the objective equals that of a smooth network with the activation
relu(z0) + softplus(z) - softplus(z0), z0 being the pre-activations at x0: same values there, and
sigma(alpha z) as its true derivative. That one can.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kkt.reference import (
    Reconstruction,
    ReferenceAttack,
    ReferenceNet,
    balanced_signs,
    data_loss,
    objective,
    train,
)

SHAPE = (2, 3, 4)
D = 24
M = 6
SAVE_AT = (1, 3, 8)
NETS: dict[str, dict[str, Any]] = {
    "mlp": {"widths": (7, 5)},
    "one hidden layer, bias": {"widths": (6,), "bias": "first"},
    "deep, all biases": {"widths": (6, 5, 4), "bias": "all"},
    "conv": {"widths": (5,), "conv": (2, 3), "bias": "first"},
}
ATTACKS = {
    "binary": ReferenceAttack(alpha=3.0, lam_min=0.6),
    "multiclass": ReferenceAttack(condition="multiclass", alpha=3.0, lam_scale="none"),
    "regression": ReferenceAttack(condition="regression", alpha=3.0),
}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(
    net_options: dict[str, Any], attack: ReferenceAttack, **more: Any
) -> tuple[ReferenceNet, Tensor, Tensor, Tensor | None]:
    """A random network and a starting point with some pixels and multipliers out of range."""
    multiclass = attack.condition == "multiclass"
    net = ReferenceNet(SHAPE, n_outputs=3 if multiclass else 1, **net_options, **more).double()
    for i, parameter in enumerate(net.parameters()):
        parameter.data = numbers(*parameter.shape, seed=i) * 0.5
    y = {"binary": balanced_signs(M, torch.float64), "multiclass": torch.arange(M) % 3}
    return net, numbers(M, D, seed=50) * 0.7, numbers(M, seed=51), y.get(attack.condition)


def central_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float) -> Tensor:
    gradient = torch.empty_like(at)
    for i in range(at.numel()):
        shift = torch.zeros(at.numel(), dtype=at.dtype)
        shift[i] = step
        shift = shift.view_as(at)
        rise = function(at + shift) - function(at - shift)
        gradient.view(-1)[i] = rise.detach() / (2 * step)
    return gradient


def gradients(
    net: ReferenceNet, x: Tensor, lam: Tensor, y: Tensor | None, attack: ReferenceAttack
) -> tuple[Tensor, Tensor]:
    x, lam = x.clone().requires_grad_(), lam.clone().requires_grad_()
    return torch.autograd.grad(objective(net, x, lam, y, attack), (x, lam))


def assert_is_the_gradient(
    found: tuple[Tensor, Tensor], value: Callable[[Tensor, Tensor], Tensor], x: Tensor, lam: Tensor
) -> None:
    expected = (
        central_differences(lambda v: value(v, lam), x, 1e-5),
        central_differences(lambda v: value(x, v), lam, 1e-5),
    )
    for gradient, difference in zip(found, expected, strict=True):
        assert torch.allclose(
            gradient, difference, rtol=1e-6, atol=1e-7 * float(difference.abs().max())
        )


class AnchoredNet(ReferenceNet):
    """The smooth network that agrees with the surrogate's at the pre-activations of the anchor."""

    def at(self, x: Tensor) -> AnchoredNet:
        self.anchors: list[Tensor] = []
        self.recording = True
        with torch.no_grad():
            self(x)
        self.recording = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.left = iter(self.anchors)
        return super().forward(x)

    def _activate(self, z: Tensor) -> Tensor:
        if self.recording:
            self.anchors.append(z.detach())
            return torch.where(z > 0, z, self.leak * z)
        z0, alpha = next(self.left), self.alpha
        assert alpha is not None
        zero = torch.zeros((), dtype=z.dtype)
        smooth = (torch.logaddexp(alpha * z, zero) - torch.logaddexp(alpha * z0, zero)) / alpha
        return (
            torch.where(z0 > 0, z0, self.leak * z0)
            + self.leak * (z - z0)
            + (1 - self.leak) * smooth
        )


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("condition", ATTACKS)
@pytest.mark.parametrize("name", NETS)
def test_the_replaced_derivative_is_that_of_the_anchored_smooth_network(
    name: str, condition: str, activation: str
) -> None:
    attack = ATTACKS[condition]
    net, x, lam, y = problem(NETS[name], attack, activation=activation, leak=0.2)
    options = NETS[name] | {"activation": activation, "leak": 0.2}
    smooth = AnchoredNet(SHAPE, n_outputs=3 if condition == "multiclass" else 1, **options)
    smooth.double().load_state_dict(net.state_dict())
    smooth.at(x)

    def value(a: Tensor, b: Tensor) -> Tensor:
        return objective(smooth, a, b, y, attack)

    assert torch.isclose(objective(net, x, lam, y, attack), value(x, lam), rtol=1e-12)
    assert_is_the_gradient(gradients(net, x, lam, y, attack), value, x, lam)


def test_the_objective_is_its_formula() -> None:
    """One hidden layer, everything written out: d phi / d W = (w2 * sigma(alpha z)) x^T."""
    attack = ATTACKS["binary"]
    net, x, lam, y = problem({"widths": (6,)}, attack)
    assert y is not None
    w1, w2 = (p.detach() for p in net.parameters())
    z = x @ w1.T
    c = lam * y / M
    residual_1 = w1 - torch.einsum("i,ih,id->hd", c, w2 * torch.sigmoid(3.0 * z), x)
    residual_2 = w2 - (c[:, None] * z.clamp(min=0)).sum(0)
    outside = (x.abs() - 1).clamp(min=0).square().sum()
    below = 5 * (0.6 - lam).clamp(min=0).square().sum()
    expected = residual_1.square().sum() + residual_2.square().sum() + outside + below
    assert outside > 0
    assert below > 0
    assert torch.isclose(objective(net, x, lam, y, attack), expected, rtol=1e-12)
    undivided = objective(net, x, lam / M, y, replace(attack, lam_scale="none"))
    penalty = 5 * (0.6 - lam / M).clamp(min=0).square().sum()
    assert torch.isclose(undivided, expected - below + penalty, rtol=1e-12)


@pytest.mark.parametrize("optimiser", ["adadelta", "sgd"])
@pytest.mark.parametrize("condition", ATTACKS)
def test_lean_and_full_walk_the_same_way(condition: str, optimiser: str) -> None:
    attack = replace(ATTACKS[condition], optimiser=optimiser, lr=0.01, momentum=0.9)
    net, x, lam, y = problem(NETS["conv"], attack)
    full = Reconstruction(net, x, lam, y, attack)
    lean = Reconstruction(net, x, lam, y, replace(attack, lean=True))
    saved = full.run(SAVE_AT)
    assert saved.shape == (len(SAVE_AT), M, D)
    assert torch.equal(saved, lean.run(SAVE_AT))
    assert torch.equal(full.lam, lean.lam)
    assert not torch.equal(saved[0], saved[1])


def test_a_condition_without_its_labels_is_refused() -> None:
    net, x, lam, y = problem(NETS["mlp"], ATTACKS["binary"])
    with pytest.raises(ValueError, match="condition='binary' and y=None"):
        objective(net, x, lam, None, ATTACKS["binary"])
    with pytest.raises(ValueError, match="only regression has no y"):
        objective(net, x, lam, y, ATTACKS["regression"])


def test_weights_are_loaded_in_order_and_a_wrong_shape_is_named() -> None:
    net, x, *_ = problem(NETS["conv"], ATTACKS["binary"])
    other, *_ = problem(NETS["conv"], ATTACKS["binary"])
    for parameter in other.parameters():
        parameter.data += 1
    state = {f"any {i}": p for i, p in enumerate(other.parameters())}
    assert not torch.equal(net(x), other(x))
    assert torch.equal(net.load(state)(x), other(x))
    state["any 0"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"any 0 has shape \(3, 3\), this network needs \(3, 2"):
        net.load(state)


TARGETS = {
    "bce": torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0]).double(),
    "ce": torch.tensor([0, 2, 1, 1, 0, 2]),
    "mse": torch.linspace(-2, 2, M).double(),
    "abs": torch.linspace(-2, 2, M).double(),
    "huber": torch.linspace(-2, 2, M).double(),
}


def test_the_training_losses_are_their_formulas() -> None:
    phi = numbers(M, seed=61)
    r = phi - TARGETS["mse"]
    sign = 2 * TARGETS["bce"] - 1
    huber = torch.where(r.abs() < 0.8, r.square() / 2, 0.8 * (r.abs() - 0.4))
    scores = numbers(M, 3, seed=62)
    own = scores[torch.arange(M), TARGETS["ce"]]
    expected = {
        "bce": torch.log(1 + torch.exp(-sign * phi)),
        "mse": r.square(),
        "abs": r.abs() ** 2.5,
        "huber": huber,
        "ce": torch.log(scores.exp().sum(1)) - own,
    }
    assert (r.abs() > 0.8).any()
    assert (r.abs() < 0.8).any()
    for loss, values in expected.items():
        output = scores if loss == "ce" else phi[:, None]
        found = data_loss(output, TARGETS[loss], loss, delta=0.8)  # type: ignore[arg-type]
        assert torch.isclose(found, values.mean(), rtol=1e-12), loss


@pytest.mark.parametrize("loss", TARGETS)
def test_a_step_of_training_follows_the_loss_and_the_weight_decay(loss: Any) -> None:
    attack = ATTACKS["multiclass" if loss == "ce" else "binary"]
    net, x, *_ = problem(NETS["conv"], attack, activation="gelu")
    first = next(net.parameters())
    before = first.detach().clone()
    rows = torch.tensor([1, 4, 5])

    def value(weight: Tensor) -> Tensor:
        first.data = weight
        with torch.no_grad():
            return data_loss(net(x[rows]), TARGETS[loss][rows], loss) + 0.15 * weight.square().sum()

    expected = central_differences(value, before, 1e-5)
    first.data = before.clone()
    train(
        net, x, TARGETS[loss], loss=loss, optimiser="sgd", lr=0.1, weight_decay=0.3, batches=[rows]
    )
    assert torch.allclose((before - first) / 0.1, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("optimiser", "lr"), [("sgd", 0.1), ("adadelta", 1.0), ("adam", 0.01)])
def test_training_fits_and_forgets_the_replaced_derivative(optimiser: Any, lr: float) -> None:
    net, x, *_ = problem(NETS["conv"], ATTACKS["binary"])
    net.alpha = 3.0
    loss_before = data_loss(net(x), TARGETS["bce"], "bce")
    rows = itertools.repeat(slice(None), 200)
    train(net, x, TARGETS["bce"], loss="bce", optimiser=optimiser, lr=lr, batches=rows)
    assert data_loss(net(x), TARGETS["bce"], "bce") < 0.1 * loss_before
    assert net.alpha is None
