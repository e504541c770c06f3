"""How many digits the closed form keeps near a KKT point, where what is left of theta cancels.

The Gram form's gradients keep as many as double backpropagation's; its value keeps fewer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt.stationarity import Stationarity
from recon_core.victims.network import Conv, Network
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.planted import Planted, planted_gelu, planted_relu

pytestmark = pytest.mark.usefixtures("one_thread")


def relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours.double() - reference).norm() / reference.norm())


def called(closed: Stationarity, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A copy of what a call returns."""
    value, gradient_x, gradient_c = closed(x, c)
    assert value is not None
    return value.clone(), gradient_x.clone(), gradient_c.clone()


Make = Callable[[], Planted]
GELU = Network(widths=(8, 6), activation="gelu", init_std_first=None)
GELU_CONV = Network(
    widths=(6, 5),
    conv=Conv(kernel=2, channels=3),
    bias="all",
    activation="gelu",
    init_std_first=None,
)
PLANTED: dict[str, Make] = {
    "gelu": functools.cache(lambda: planted_gelu(GELU.on((2, 4, 4)), n_images=8)),
    "gelu, conv, biases": functools.cache(
        lambda: planted_gelu(GELU_CONV.on((1, 3, 3)), n_images=8)
    ),
    "relu": lambda: planted_relu(1, n_pairs=10, d=300, norm=6.0),
    "relu, deep, bias": lambda: planted_relu(3, d=300, norm=6.0, bias=True),
    "relu, two outputs": lambda: planted_relu(1, n_pairs=10, d=300, norm=6.0, n_outputs=2),
}


def near(planted: Planted, how_near: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, c and alpha of four attacks at this relative distance, in float32."""
    generator = torch.Generator().manual_seed(0)

    def moved(truth: Tensor) -> Tensor:
        noise = torch.randn(4, *truth.shape[1:], generator=generator, dtype=torch.float64)
        return (truth + how_near * truth.std() * noise).float()

    return moved(planted.x), moved(planted.c), torch.full((4,), 500.0)


def errors_near(planted: Planted, how_near: float) -> dict[str, tuple[float, ...]]:
    """||R||^2 / ||theta||^2, and relative errors of (value, d/dx, d/dc) of every way in float32."""
    x, c, alpha = near(planted, how_near)
    narrow = planted.parameters.map(lambda tensor: tensor.float())
    wide = narrow.map(lambda tensor: tensor.double())
    of: dict[str, Any] = {"alpha": alpha, "classes": planted.classes}
    exact = double_backprop.stationarity(planted.architecture, wide, x.double(), c.double(), **of)
    ways = {"plain": double_backprop.stationarity(planted.architecture, narrow, x, c, **of)}
    for form in ("gram", "direct"):
        ways[form] = called(
            Stationarity(planted.architecture, narrow, n_candidates=x.shape[1], form=form, **of),
            x,
            c,
        )
    errors = {
        way: tuple(relative(a, b) for a, b in zip(found, exact, strict=True))
        for way, found in ways.items()
    }
    return errors | {"residual": (float(exact[0].mean() / wide.squared_norm()[0]),)}


@pytest.mark.parametrize("name", list(PLANTED))
def test_near_a_kkt_point_the_gradients_are_as_good_as_double_backprops(name: str) -> None:
    """And very near it only the direct form knows the value."""
    residuals = []
    for how_near in (0.1, 1e-2, 1e-3, 1e-4):
        errors = errors_near(PLANTED[name](), how_near)
        residuals += errors["residual"]
        for form in ("gram", "direct"):
            for which in (1, 2):
                assert errors[form][which] < 5 * errors["plain"][which] + 1e-6, (how_near, form)
        # R is a difference of terms of the size of theta; how they round differs between machines.
        assert errors["direct"][0] < 5 * errors["plain"][0] + 1e-6 / residuals[-1] ** 0.5, how_near
        # The Gram form's value is a difference of terms of the size of ||theta||^2.
        assert errors["gram"][0] < 2e-6 / residuals[-1] + 1e-6, how_near
    assert residuals[0] > 1e-3
    assert residuals[-1] < 1e-7
    assert errors["direct"][0] < 1e-2
    assert errors["gram"][0] > 20 * errors["direct"][0]
