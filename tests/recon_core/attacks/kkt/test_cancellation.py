"""How many digits the closed form keeps near a KKT point, where what is left of theta cancels.

The Gram form's gradients keep as many as double backpropagation's; its value keeps fewer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt.layers import Form
from recon_core.attacks.kkt.stationarity import Stationarity
from recon_core.victims.network import Conv, Network
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.planted import Planted, planted_gelu, planted_relu

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS: tuple[Form, ...] = ("gram", "direct", "auto")


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


def near(planted: Planted, how_near: float) -> tuple[Planted, Tensor, Tensor, Tensor]:
    """(the network in float32, x, c, alpha) of four attacks at this relative distance."""
    generator = torch.Generator().manual_seed(0)

    def moved(truth: Tensor) -> Tensor:
        noise = torch.randn(4, *truth.shape[1:], generator=generator, dtype=torch.float64)
        return (truth + how_near * truth.std() * noise).float()

    alpha = torch.full((4,), 500.0)
    return planted, moved(planted.x), moved(planted.c), alpha


def errors_near(planted: Planted, how_near: float) -> dict[str, tuple[float, ...]]:
    """||R||^2 / ||theta||^2, and relative errors of (value, d/dx, d/dc) of every way in float32."""
    _, x, c, alpha = near(planted, how_near)
    narrow = planted.parameters.map(lambda tensor: tensor.float())
    wide = narrow.map(lambda tensor: tensor.double())
    architecture, classes = planted.architecture, planted.classes
    exact = double_backprop.stationarity(
        architecture, wide, x.double(), c.double(), alpha=alpha, classes=classes
    )
    plain = double_backprop.stationarity(architecture, narrow, x, c, alpha=alpha, classes=classes)

    def closed(form: Form) -> tuple[Tensor, Tensor, Tensor]:
        stationarity = Stationarity(
            architecture,
            narrow,
            n_candidates=x.shape[1],
            alpha=alpha,
            classes=classes,
            form=form,
        )
        return called(stationarity, x, c)

    ways = {"plain": plain, "gram": closed("gram"), "direct": closed("direct")}
    errors = {
        way: tuple(relative(a, b) for a, b in zip(found, exact, strict=True))
        for way, found in ways.items()
    }
    return errors | {"residual": (float(exact[0].mean() / wide.squared_norm()[0]),)}


@pytest.mark.parametrize("name", list(PLANTED))
def test_near_a_kkt_point_the_gradients_are_as_good_as_double_backprops(name: str) -> None:
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


@pytest.mark.parametrize("name", list(PLANTED))
def test_very_near_a_kkt_point_only_the_direct_form_knows_the_value(name: str) -> None:
    errors = errors_near(PLANTED[name](), 1e-4)
    assert errors["direct"][0] < 1e-2
    assert errors["gram"][0] > 20 * errors["direct"][0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", list(PLANTED))
def test_at_a_planted_kkt_point_nothing_is_left(name: str, form: Form) -> None:
    planted = PLANTED[name]()
    closed = Stationarity(
        planted.architecture,
        planted.parameters,
        n_candidates=planted.x.shape[1],
        alpha=torch.tensor([2000.0], dtype=torch.float64),
        classes=planted.classes,
        form=form,
    )
    value, gradient_x, gradient_c = called(closed, planted.x, planted.c)
    scale = float(planted.parameters.squared_norm())
    assert abs(float(value)) < 1e-13 * scale
    assert float(gradient_x.abs().max()) < 1e-10 * scale
    assert float(gradient_c.abs().max()) < 1e-10 * scale
    moved = called(closed, 1.1 * planted.x, planted.c)
    assert float(moved[0]) > 1e-4 * scale
