"""The closed form against double backpropagation, its activations against autograd, and how many
digits it keeps near a KKT point, where what is left of theta cancels.

The Gram form's gradients keep as many as double backpropagation's; its value keeps fewer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.attacks.kkt.stationarity import Form, Stationarity, Surrogate
from recon_core.victims.network import Activation, Bias, Conv, Network, Parameters
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.planted import Planted, planted_gelu, planted_relu
from tests.recon_core.drawing import refuses

Q, M = 3, 6
FORMS: tuple[Form, ...] = ("gram", "direct", "auto")
DEPTHS = [(7,), (7, 5), (7, 5, 6)]
ALPHAS = (2.0, 20.0, 7.0)
CLASSES = (2, 0, 1, 2, 0, 1)


@dataclass(frozen=True)
class Case:
    """Q attacks; what double backpropagation says of them, in float64."""

    network: Network
    n_outputs: int
    parameters: Parameters
    x: Tensor
    c: Tensor
    expected: tuple[Tensor, Tensor, Tensor]

    @property
    def classes(self) -> Tensor | None:
        return torch.tensor(CLASSES) if self.n_outputs > 1 else None

    def closed(self, form: Form, dtype: torch.dtype) -> Stationarity:
        return Stationarity(
            self.network.on(SHAPE, self.n_outputs),
            self.parameters.map(lambda tensor: tensor.to(dtype)),
            n_candidates=M,
            alpha=torch.tensor(ALPHAS, dtype=dtype),
            classes=self.classes,
            form=form,
        )


SHAPE = (2, 4, 5)


def case(network: Network, n_outputs: int, *, shared: bool, seed: int = 0) -> Case:
    """Weights and inputs that are float32 numbers, so that both dtypes see the same."""
    generator = torch.Generator().manual_seed(seed)
    architecture = network.on(SHAPE, n_outputs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    one = architecture.initial([generator], dtype=torch.float64)
    n_runs = 1 if shared else Q
    parameters = one.map(
        lambda t: normal(n_runs, *t.shape[1:]) * (t.shape[2] ** -0.5 if t.dim() > 2 else 0.3)
    ).map(lambda t: t.float().double())
    x, c = normal(Q, M, architecture.d), normal(Q, M)
    expected = double_backprop.stationarity(
        architecture,
        parameters,
        x,
        c,
        alpha=torch.tensor(ALPHAS),
        classes=torch.tensor(CLASSES) if n_outputs > 1 else None,
    )
    return Case(network, n_outputs, parameters, x, c, expected)


def relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours.double() - reference).norm() / reference.norm())


def worst(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(relative(mine, truth) for mine, truth in zip(ours, expected, strict=True))


def called(closed: Stationarity, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A copy of what a call returns."""
    value, gradient_x, gradient_c = closed(x, c)
    assert value is not None
    return value.clone(), gradient_x.clone(), gradient_c.clone()


def cases(activation: Activation, bias: Bias, conv: Conv | None, n_outputs: int) -> Iterator[Case]:
    for widths, shared in ((DEPTHS[0], False), (DEPTHS[1], True), (DEPTHS[2], False)):
        network = Network(widths=widths, conv=conv, bias=bias, activation=activation, leak=0.2)
        yield case(network, n_outputs, shared=shared)


@pytest.mark.parametrize("n_outputs", [1, 3], ids=["one output", "three outputs"])
@pytest.mark.parametrize("conv", [None, Conv(kernel=3, channels=4)], ids=["dense", "conv"])
@pytest.mark.parametrize("bias", ["none", "first", "all"])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu"])
def test_equals_double_backprop(
    activation: Activation, bias: Bias, conv: Conv | None, n_outputs: int
) -> None:
    for some in cases(activation, bias, conv, n_outputs):
        for form in FORMS:
            exact = called(some.closed(form, torch.float64), some.x, some.c)
            assert worst(exact, some.expected) < 1e-10, (some.network, form)
            if form == "auto":
                continue
            narrow = called(some.closed(form, torch.float32), some.x.float(), some.c.float())
            assert {tensor.dtype for tensor in narrow} == {torch.float32}
            assert worst(narrow, some.expected) < 1e-5, (some.network, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conv", [None, Conv(kernel=2, channels=3)], ids=["dense", "conv"])
@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_a_call_leaves_nothing_behind(
    form: Form, conv: Conv | None, bias: Bias, n_outputs: int
) -> None:
    network = Network(widths=(7, 5), conv=conv, bias=bias, activation="leaky_relu", leak=0.2)
    some = case(network, n_outputs, shared=False)
    closed = some.closed(form, torch.float64)
    first = called(closed, some.x, some.c)
    called(closed, 3 * some.x.flip(1), -some.c)
    again = called(closed, some.x, some.c)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    for buffer in _buffers(closed):
        buffer.fill_(torch.nan)
    for one, other in zip(first, called(closed, some.x, some.c), strict=True):
        assert torch.equal(one, other), "memory that was not written to was read"


def _buffers(closed: Stationarity) -> Iterator[Tensor]:
    yield from (*closed.a, *closed.slope, *closed.back, *closed.adjoint, *closed.products)
    yield from (closed.gradient_x, closed.gradient_c, closed.row, closed.minus_c)
    for layer in closed.layers:
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and name not in ("weight", "bias", "theta_square"):
                yield value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conv", [None, Conv(kernel=2, channels=3)], ids=["dense", "conv"])
def test_the_excess_is_added_in_place_and_the_value_is_optional(
    form: Form, conv: Conv | None
) -> None:
    some = case(Network(widths=(7, 5), conv=conv, bias="first"), 1, shared=True)
    closed = some.closed(form, torch.float64)
    value, gradient_x, gradient_c = called(closed, some.x, some.c)
    excess = some.x.flip(0).clone()
    again, *returned = closed(some.x, some.c, excess=excess)
    assert again is not None
    assert torch.equal(again, value)
    assert returned[0] is excess
    torch.testing.assert_close(excess, gradient_x + 2 * some.x.flip(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(returned[1], gradient_c)
    without = closed(some.x, some.c, with_value=False)
    assert without[0] is None
    assert torch.equal(without[1], gradient_x)
    assert torch.equal(without[2], gradient_c)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conv", [None, Conv(kernel=2, channels=3)], ids=["dense", "conv"])
def test_a_broken_attack_does_not_disturb_the_others(form: Form, conv: Conv | None) -> None:
    some = case(Network(widths=(7, 5), conv=conv, bias="first"), 1, shared=True)
    closed = some.closed(form, torch.float64)
    calm = called(closed, some.x, some.c)
    x = some.x.clone()
    x[1] *= torch.inf
    wild = called(closed, x, some.c)
    assert not bool(wild[0][1].isfinite())
    for tame, hurt in zip(calm, wild, strict=True):
        assert torch.equal(tame[[0, 2]], hurt[[0, 2]])


def test_auto_chooses_layer_by_layer() -> None:
    some = case(Network(widths=(40, 3), conv=None), 1, shared=False)
    assert [layer.gram for layer in some.closed("auto", torch.float64).layers] == [  # type: ignore[union-attr]
        True,  # 40 -> 40 with 6 candidates
        False,  # 40 -> 3
        False,  # 3 -> 1
    ]


def test_refuses_what_does_not_fit() -> None:
    one, several = (case(Network(widths=(7,)), n, shared=False) for n in (1, 3))

    def fitted(some: Case, n_victims: int, n_attacks: int, m: int, classes: Tensor | None) -> None:
        Stationarity(
            some.network.on(SHAPE, some.n_outputs),
            some.parameters.rows(slice(n_victims)),
            n_candidates=m,
            alpha=torch.ones(n_attacks).double(),
            classes=classes,
        )

    for n_victims, n_attacks in ((3, 2), (2, 3)):
        refuses(f"{n_attacks} attacks on {n_victims}", fitted, one, n_victims, n_attacks, M, None)
    refuses("n_outputs=3 was given no classes", fitted, several, 1, 2, M, None)
    refuses("6 classes for 4 candidates", fitted, several, 1, 2, 4, torch.tensor(CLASSES))
    refuses("n_outputs=1 was given classes", fitted, one, 1, 2, M, torch.tensor(CLASSES))


STEEPNESS = torch.tensor([2.0, 20.0, 300.0], dtype=torch.float64)
LEAK = 0.2
ACTIVATIONS: list[Activation] = ["relu", "leaky_relu", "gelu"]


def surrogate(activation: Activation, alpha: Tensor, leak: float = LEAK) -> Surrogate:
    return Surrogate(Network(widths=(3,), activation=activation, leak=leak), alpha)


def arguments() -> Tensor:
    """(3, 4, 50) from far below the kink to far above it, 0 included."""
    z = torch.randn(3, 4, 49, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([z, torch.zeros(3, 4, 1, dtype=torch.float64)], 2)


def parts(of: Surrogate, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f, s and s', each in memory that held NaN."""
    f, s = torch.full_like(z, torch.nan), torch.full_like(z, torch.nan)
    of.activate_(z, f)
    of.slope_(z, s)
    curvature = torch.ones_like(z)
    of.times_curvature_(curvature, z, s)
    return f, s, curvature


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_formulas(activation: Activation) -> None:
    z = arguments().requires_grad_()
    leak = LEAK if activation == "leaky_relu" else 0.0
    if activation == "gelu":
        value = F.gelu(z)
        (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    else:
        value = torch.where(z > 0, z, leak * z)
        slope = leak + (1 - leak) * torch.sigmoid(STEEPNESS[:, None, None] * z)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    ours = parts(surrogate(activation, STEEPNESS), z.detach())
    for mine, truth in zip(ours, (value, slope, curvature), strict=True):
        torch.testing.assert_close(mine, truth.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_steep_surrogate_is_the_step(dtype: torch.dtype) -> None:
    z = torch.tensor([-1e4, -1.0, -0.01, 0.0, 0.01, 1.0, 1e4], dtype=dtype)[None, None]
    for activation, low in (("relu", 0.0), ("leaky_relu", LEAK)):
        steep = surrogate(activation, torch.tensor([1e6], dtype=dtype))  # type: ignore[arg-type]
        _, slope, curvature = parts(steep, z)
        expected = [low] * 3 + [low + (1 - low) / 2] + [1.0] * 3
        torch.testing.assert_close(slope.flatten(), torch.tensor(expected, dtype=dtype))
        assert bool((curvature.flatten()[[0, 1, 2, 4, 5, 6]] == 0).all())
        torch.testing.assert_close(curvature.flatten()[3], (1 - low) * z.new_tensor(1e6 / 4))


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
