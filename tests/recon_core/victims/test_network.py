"""Every architecture against torch's own layers; initial weights, weights of others, names."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from recon_core.types import seeded_generator
from recon_core.victims.losses import Loss
from recon_core.victims.network import (
    Architecture,
    Conv,
    Network,
    gelu_curvature,
    gelu_slope,
    image_shape,
    parse_architecture,
)
from tests.recon_core.victims.torch_nets import torch_gradients, torch_net

R, N, SHAPE = 3, 4, (2, 5, 6)
BIASES = ("none", "first", "all")
ACTIVATIONS = ("relu", "leaky_relu", "gelu")
CONVS = (None, Conv(kernel=3, channels=3))
KINDS = list(itertools.product(BIASES, ACTIVATIONS, CONVS))


def names(value: object) -> str:
    return "dense" if value is None else "conv" if isinstance(value, Conv) else str(value)


def architecture(
    bias: str = "none", activation: str = "relu", conv: Conv | None = None, n_outputs: int = 1
) -> Architecture:
    network = Network(
        widths=(7, 5),
        bias=bias,  # type: ignore[arg-type]
        activation=activation,  # type: ignore[arg-type]
        leak=0.1,
        conv=conv,
        init_std_first=0.3,
        init_rest="torch",
    )
    return network.on(SHAPE, n_outputs)


def generators(n: int = R) -> list[torch.Generator]:
    return [seeded_generator(0, run, "victim") for run in range(n)]


def images(n: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(R, n, math.prod(SHAPE), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("bias", "activation", "conv"), KINDS, ids=names)
def test_outputs_equal_torchs(bias: str, activation: str, conv: Conv | None) -> None:
    arch, x = architecture(bias, activation, conv, 3), images()
    parameters = arch.initial(generators(), dtype=torch.float64)
    output = arch.forward(parameters, x).output
    for run in range(R):
        net = torch_net(arch, parameters, run)
        torch.testing.assert_close(output[run], net(x[run]).detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("bias", "activation", "conv"), KINDS, ids=names)
def test_gradients_equal_autograd(bias: str, activation: str, conv: Conv | None) -> None:
    arch, x = architecture(bias, activation, conv), images()
    parameters = arch.initial(generators(), dtype=torch.float64)
    y = torch.ones(R, N, dtype=torch.float64)
    passed = arch.forward(parameters, x)
    ours = arch.backward(parameters, passed, Loss(kind="mse").gradient(passed.output, y))
    theirs = torch_gradients(arch, parameters, x, y, Loss(kind="mse"))
    for mine, expected in zip(ours.tensors(), theirs, strict=True):
        assert expected.abs().max() > 1e-6
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("bias", "activation", "conv"), KINDS, ids=names)
def test_says_what_it_is(bias: str, activation: str, conv: Conv | None) -> None:
    arch = architecture(bias, activation, conv, 3)
    parameters = arch.initial(generators(1), dtype=torch.float64)
    assert arch.n_parameters == sum(tensor[0].numel() for tensor in parameters.tensors())
    assert arch.n_layers == len(parameters.weights)
    assert [tuple(w.shape[:0:-1]) for w in parameters.weights] == list(arch.layer_sizes)
    x = images()[:1]
    one = arch.forward(parameters, x).output
    other = arch.forward(parameters.map(lambda tensor: 2 * tensor), x).output
    homogeneous = torch.allclose(other, 2.0**arch.n_layers * one, rtol=1e-10)
    assert homogeneous == arch.homogeneous


def test_patches_and_fold_are_adjoint() -> None:
    arch = architecture(conv=CONVS[1])
    x = images()
    patches = arch.patches(x)
    assert patches.shape == (R, N, 2 * 3 * 3, arch.n_positions)
    p = torch.randn(patches.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close((patches * p).sum(), (x * arch.fold(p)).sum())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_are_derivatives(activation: str) -> None:
    arch = architecture(activation=activation)
    z = torch.tensor([-3.0, -0.5, 0.0, 0.25, 4.0], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(arch.activate(z).sum(), z)
    torch.testing.assert_close(arch.slope(z.detach()), expected, rtol=1e-12, atol=1e-14)


def test_gelus_derivatives() -> None:
    z = torch.linspace(-5, 5, 41, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.nn.functional.gelu(z).sum(), z, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    torch.testing.assert_close(gelu_slope(z.detach()), slope.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gelu_curvature(z.detach()), curvature, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("bias", BIASES)
def test_initial_weights_have_the_papers_scales(bias: str) -> None:
    network = Network(widths=(200, 300), bias=bias)  # type: ignore[arg-type]
    arch = network.on((3, 10, 10))
    parameters = arch.initial(generators(1), dtype=torch.float32)
    assert [tuple(w.shape) for w in parameters.weights] == [
        (1, 200, 300),
        (1, 300, 200),
        (1, 1, 300),
    ]
    stds = (1e-4, math.sqrt(2 / 200), math.sqrt(2 / 300))
    for w, std in zip(parameters.weights, stds, strict=True):
        assert float(w.std()) == pytest.approx(std, rel=4 / math.sqrt(w.numel()))
    first, *rest = parameters.biases
    assert (first is None) == (bias == "none")
    if first is not None:
        assert float(first.std()) == pytest.approx(1e-4, rel=0.3)
    assert all((b is None) == (bias != "all") for b in rest)
    assert all(not bool(b.any()) for b in rest if b is not None)


def test_initial_weights_like_torchs() -> None:
    network = Network(widths=(200,), bias="all", init_rest="torch", init_std_first=None)
    parameters = network.on((3, 10, 10)).initial(generators(1), dtype=torch.float32)
    for tensor, fan_in in zip(parameters.tensors(), (300, 300, 200, 200), strict=True):
        bound = 1 / math.sqrt(fan_in)
        assert float(tensor.abs().max()) <= bound
        if tensor.numel() > 1:
            assert float(tensor.abs().max()) > 0.9 * bound
            assert float(tensor.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_leaky_relu_starts_smaller() -> None:
    network = Network(widths=(200, 300), activation="leaky_relu", leak=0.5)
    w = network.on((1, 10, 10)).initial(generators(1), dtype=torch.float32).weights[1]
    assert float(w.std()) == pytest.approx(math.sqrt(2 / 1.25 / 200), rel=0.02)


def test_initial_weights_do_not_depend_on_the_batch_or_the_dtype() -> None:
    arch = architecture("all")
    alone = arch.initial([seeded_generator(0, 2, "victim")], dtype=torch.float64)
    together = arch.initial(generators(), dtype=torch.float32)
    for single, stack in zip(alone.tensors(), together.tensors(), strict=True):
        assert torch.equal(single[0].float(), stack[2])


@pytest.mark.parametrize(("bias", "activation", "conv"), KINDS, ids=names)
def test_weights_come_from_torchs_networks_and_go_back(
    bias: str, activation: str, conv: Conv | None
) -> None:
    arch = architecture(bias, activation, conv, 3)
    parameters = arch.initial(generators(), dtype=torch.float64)
    state = torch_net(arch, parameters, run=1).state_dict()
    shuffled = dict(sorted(state.items()))
    for given in (state, shuffled, arch.to_state_dict(parameters, run=1)):
        for mine, theirs in zip(
            arch.from_state_dict(given).tensors(), parameters.tensors(), strict=True
        ):
            assert torch.equal(mine[0], theirs[1])


def test_refuses_weights_of_another_network() -> None:
    arch = architecture("all")
    state = arch.to_state_dict(arch.initial(generators(1), dtype=torch.float32))
    del state["1.bias"]
    with pytest.raises(
        ValueError, match=r"'0.weight': \(7, 60\).*needs, in this order, \[\(7, 60\)"
    ):
        arch.from_state_dict(state)


def test_rows_norms_and_finiteness() -> None:
    parameters = architecture("all").initial(generators(), dtype=torch.float32)
    assert parameters.n_runs == R
    rows = parameters.rows(torch.tensor([2, 0]))
    assert torch.equal(rows.weights[1][0], parameters.weights[1][2])
    norms = [sum(float(t[run].square().sum()) for t in parameters.tensors()) for run in range(R)]
    assert parameters.squared_norm().tolist() == pytest.approx(norms, rel=1e-6)
    parameters.tensors()[1][1, 0] = torch.nan
    assert parameters.isfinite().tolist() == [True, False, True]


def test_architectures_by_name() -> None:
    arch = parse_architecture("mlp:3072-1000-1000-1")
    assert arch == Network().on((3, 32, 32))
    arch = parse_architecture("conv:3x32:784-100-10", bias="first", activation="gelu")
    expected = Network(widths=(100,), conv=Conv(), bias="first", activation="gelu")
    assert arch == expected.on((1, 28, 28), 10)
    assert parse_architecture("mlp:10-5-2", (1, 2, 5)).shape == (1, 2, 5)
    assert [image_shape(d) for d in (3072, 784, 10)] == [(3, 32, 32), (1, 28, 28), (1, 1, 10)]


@pytest.mark.parametrize(
    "text", ["mlp:3072", "mlp:3072-1", "conv:3:3072-10-1", "3072-10-1", "mlp:a-b-c"]
)
def test_refuses_names(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form mlp:3072-1000-1000-1"):
        parse_architecture(text)


def test_refuses_a_name_that_does_not_fit_the_images() -> None:
    with pytest.raises(ValueError, match=r"has 3072 inputs, but images of \(1, 28, 28\) have 784"):
        parse_architecture("mlp:3072-10-1", (1, 28, 28))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": ()}, r"widths=\(\)"),
        ({"widths": (5, 0)}, r"widths=\(5, 0\)"),
        ({"init_std_first": 0.0}, "init_std_first=0.0"),
        ({"leak": 1.0}, "leak=1.0"),
    ],
)
def test_refuses(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network(**settings)  # type: ignore[arg-type]


def test_refuses_impossible_kernels_and_outputs() -> None:
    with pytest.raises(ValueError, match="kernel=0 must be at least 1"):
        Conv(kernel=0, channels=4)
    with pytest.raises(ValueError, match="kernel=6 does not fit in images of 5x6"):
        Network(conv=Conv(kernel=6)).on(SHAPE)
    with pytest.raises(ValueError, match="n_outputs=0"):
        Network().on(SHAPE, 0)
