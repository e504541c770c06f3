"""The closed form against double backpropagation, in every architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt.layers import Form, cheaper_form
from recon_core.attacks.kkt.stationarity import Stationarity
from recon_core.victims.network import Activation, Bias, Conv, Network, Parameters
from tests.recon_core.attacks.kkt import double_backprop

pytestmark = pytest.mark.usefixtures("one_thread")

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
    returned = closed(some.x, some.c, excess=excess)
    assert returned[1] is excess
    torch.testing.assert_close(excess, gradient_x + 2 * some.x.flip(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(_value(returned), value)
    assert torch.equal(returned[2], gradient_c)
    without = closed(some.x, some.c, with_value=False)
    assert without[0] is None
    assert torch.equal(without[1], gradient_x)
    assert torch.equal(without[2], gradient_c)


def _value(returned: tuple[Tensor | None, Tensor, Tensor]) -> Tensor:
    assert returned[0] is not None
    return returned[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conv", [None, Conv(kernel=2, channels=3)], ids=["dense", "conv"])
def test_what_it_is_given_is_not_modified(form: Form, conv: Conv | None) -> None:
    some = case(Network(widths=(7, 5), conv=conv, bias="all"), 3, shared=False)
    given = [some.x, some.c, *some.parameters.tensors()]
    before = [tensor.clone() for tensor in given]
    architecture, alpha = some.network.on(SHAPE, 3), torch.tensor(ALPHAS, dtype=torch.float64)
    classes = torch.tensor(CLASSES)
    closed = Stationarity(
        architecture, some.parameters, n_candidates=M, alpha=alpha, classes=classes, form=form
    )
    closed(some.x, some.c)
    closed(some.x, some.c, excess=torch.ones_like(some.x))
    for tensor, copy in zip(given, before, strict=True):
        assert torch.equal(tensor, copy)
    assert torch.equal(alpha, torch.tensor(ALPHAS, dtype=torch.float64))
    assert torch.equal(classes, torch.tensor(CLASSES))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conv", [None, Conv(kernel=2, channels=3)], ids=["dense", "conv"])
def test_shared_weights_equal_copies_of_them(form: Form, conv: Conv | None) -> None:
    shared = case(Network(widths=(7, 5), conv=conv, bias="all"), 3, shared=True)
    copies = shared.parameters.map(lambda tensor: tensor.expand(Q, *tensor.shape[1:]).clone())
    one = called(shared.closed(form, torch.float64), shared.x, shared.c)
    many = Case(shared.network, 3, copies, shared.x, shared.c, shared.expected)
    assert worst(one, called(many.closed(form, torch.float64), shared.x, shared.c)) < 1e-13


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


def test_without_a_surrogate_the_gradient_is_the_slope_of_the_value() -> None:
    # True of GELU in x and c; with a surrogate d/dx is not the slope of the value.
    some = case(Network(widths=(7, 5), activation="gelu", bias="all"), 3, shared=False)
    closed = some.closed("gram", torch.float64)
    _, gradient_x, gradient_c = called(closed, some.x, some.c)
    generator = torch.Generator().manual_seed(1)
    dx = 1e-5 * torch.randn(some.x.shape, generator=generator, dtype=torch.float64)
    dc = 1e-5 * torch.randn(some.c.shape, generator=generator, dtype=torch.float64)
    up = called(closed, some.x + dx, some.c + dc)[0]
    down = called(closed, some.x - dx, some.c - dc)[0]
    slope = (gradient_x * dx).sum((1, 2)) + (gradient_c * dc).sum(1)
    torch.testing.assert_close((up - down) / 2, slope, rtol=1e-7, atol=0)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_the_gradient_in_c_is_the_slope_of_the_value(activation: Activation) -> None:
    some = case(Network(widths=(7, 5), activation=activation, leak=0.2), 1, shared=False)
    closed = some.closed("gram", torch.float64)
    gradient_c = called(closed, some.x, some.c)[2]
    dc = 1e-3 * torch.randn(some.c.shape, generator=torch.Generator().manual_seed(1)).double()
    change = called(closed, some.x, some.c + dc)[0] - called(closed, some.x, some.c - dc)[0]
    torch.testing.assert_close(change / 2, (gradient_c * dc).sum(1), rtol=1e-9, atol=0)


def test_without_candidates_that_count_the_value_is_the_square_of_theta() -> None:
    for conv, form in itertools.product((None, Conv(kernel=2, channels=3)), FORMS):
        some = case(Network(widths=(7, 5), conv=conv, bias="all"), 1, shared=False)
        closed = some.closed(form, torch.float64)
        value, gradient_x, _ = called(closed, some.x, torch.zeros_like(some.c))
        torch.testing.assert_close(value, some.parameters.squared_norm(), rtol=1e-12, atol=0)
        assert torch.equal(gradient_x, torch.zeros_like(gradient_x))


def test_equal_outputs_go_to_the_lowest_class() -> None:
    network = Network(widths=(7,))
    some = case(network, 3, shared=True)
    flat = some.parameters.like([some.parameters.weights[0], some.parameters.weights[1] * 0])
    tied = Case(network, 3, flat, some.x, some.c, some.expected).closed("gram", torch.float64)
    called(tied, some.x, some.c)
    for place, y in enumerate(CLASSES):
        selected = torch.zeros(3, dtype=torch.float64)
        selected[y], selected[0 if y else 1] = 1, -1
        assert torch.equal(tied.margin.d[0, place], selected)


def test_the_cheaper_form_by_hand() -> None:
    assert cheaper_form(1129, 3072, 1000) == "gram"  # 1.5 * 3072 * 1000 / 4072 = 1131.6
    assert cheaper_form(1132, 3072, 1000) == "direct"
    assert cheaper_form(400, 1000, 1) == "direct"
    assert cheaper_form(749, 1000, 1000) == "gram"


def test_auto_chooses_layer_by_layer() -> None:
    some = case(Network(widths=(40, 3), conv=None), 1, shared=False)
    assert [layer.gram for layer in some.closed("auto", torch.float64).layers] == [  # type: ignore[union-attr]
        True,  # 40 -> 40 with 6 candidates
        False,  # 40 -> 3
        False,  # 3 -> 1
    ]


def test_refuses_what_does_not_fit() -> None:
    some = case(Network(widths=(7,)), 1, shared=False)
    architecture, alpha = some.network.on(SHAPE), torch.ones(2, dtype=torch.float64)
    for n_victims, n_attacks in ((3, 2), (2, 3)):
        victims, steep = some.parameters.rows(slice(n_victims)), torch.ones(n_attacks).double()
        with pytest.raises(ValueError, match=f"{n_attacks} attacks on {n_victims} victims"):
            Stationarity(architecture, victims, n_candidates=M, alpha=steep)
    several = case(Network(widths=(7,)), 3, shared=True)
    with pytest.raises(ValueError, match="n_outputs=3 was given no classes"):
        Stationarity(several.network.on(SHAPE, 3), several.parameters, n_candidates=M, alpha=alpha)
    with pytest.raises(ValueError, match="6 classes for 4 candidates"):
        Stationarity(
            several.network.on(SHAPE, 3),
            several.parameters,
            n_candidates=4,
            alpha=alpha,
            classes=torch.tensor(CLASSES),
        )
    one = case(Network(widths=(7,)), 1, shared=True)
    with pytest.raises(ValueError, match="n_outputs=1 was given classes"):
        Stationarity(
            architecture,
            one.parameters,
            n_candidates=M,
            alpha=alpha,
            classes=torch.tensor(CLASSES),
        )
