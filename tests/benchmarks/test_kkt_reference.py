"""The reference the engine is held to, against a smooth network and a formula written out.

The derivative that replaces ReLU's belongs to no function. But at any x0 the objective equals that
of a smooth network with the activation relu(z0) + softplus(z) - softplus(z0), z0 being the
pre-activations at x0: same values there, and sigma(alpha z) as its true derivative.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kkt.reference import (
    ReferenceAttack,
    ReferenceNet,
    balanced_signs,
    objective,
)

SHAPE = (2, 3, 4)
D = 24
M = 6
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


def gradients(
    net: ReferenceNet, x: Tensor, lam: Tensor, y: Tensor | None, attack: ReferenceAttack
) -> tuple[Tensor, Tensor]:
    x, lam = x.clone().requires_grad_(), lam.clone().requires_grad_()
    return torch.autograd.grad(objective(net, x, lam, y, attack), (x, lam))


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
    expected = objective(smooth, x, lam, y, attack)
    torch.testing.assert_close(objective(net, x, lam, y, attack), expected, rtol=1e-12, atol=0)
    true = gradients(smooth, x, lam, y, attack)
    torch.testing.assert_close(gradients(net, x, lam, y, attack), true, rtol=1e-9, atol=1e-12)


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
