"""Architectures and losses against torch's own; initial weights, weights of others, names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.types import seeded_generator
from recon_core.victims.losses import Loss
from recon_core.victims.network import (
    Architecture,
    Bias,
    Conv,
    Network,
    gelu_curvature,
    gelu_slope,
    parse_architecture,
)
from tests.recon_core.drawing import refuses
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


kinds = pytest.mark.parametrize(("bias", "activation", "conv"), KINDS, ids=names)


@kinds
def test_a_network_is_torchs(bias: str, activation: str, conv: Conv | None) -> None:
    """Its outputs, cut at any layer too, its weights there and back, and what it says of itself."""
    arch, x = architecture(bias, activation, conv, 3), images()
    parameters = arch.initial(generators(), dtype=torch.float64)
    passed = arch.forward(parameters, x)
    for run in range(R):
        net = torch_net(arch, parameters, run)
        theirs = net(x[run]).detach()
        torch.testing.assert_close(passed.output[run], theirs, rtol=1e-12, atol=1e-13)
    for layer in range(1, arch.n_layers):
        features = arch.features(parameters, x, layer)
        assert torch.equal(features, arch.activate(passed.pre[layer - 1]))
        assert torch.equal(arch.classify(parameters, features, layer), passed.output)
    state = net.state_dict()
    for given in (state, dict(sorted(state.items())), arch.to_state_dict(parameters, run)):
        one = arch.from_state_dict(given)
        for mine, stacked in zip(one.tensors(), parameters.tensors(), strict=True):
            assert torch.equal(mine[0], stacked[run])
    assert arch.n_parameters == sum(leaf.numel() for leaf in net.parameters())
    assert arch.n_layers == len(parameters.weights)
    assert [tuple(w.shape[:0:-1]) for w in parameters.weights] == list(arch.layer_sizes)
    other = arch.forward(parameters.map(lambda tensor: 2 * tensor), x).output
    homogeneous = torch.allclose(other, 2.0**arch.n_layers * passed.output, rtol=1e-10)
    assert homogeneous == arch.homogeneous


@kinds
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


def test_patches_and_fold_are_adjoint() -> None:
    arch = architecture(conv=CONVS[1])
    x = images()
    patches = arch.patches(x)
    assert patches.shape == (R, N, 2 * 3 * 3, arch.n_positions)
    p = torch.randn(patches.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close((patches * p).sum(), (x * arch.fold(p)).sum())


def test_gelus_derivatives() -> None:
    z = torch.linspace(-5, 5, 41, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.nn.functional.gelu(z).sum(), z, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    torch.testing.assert_close(gelu_slope(z.detach()), slope.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gelu_curvature(z.detach()), curvature, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "stds"),
    [
        ({}, (1e-4, math.sqrt(2 / 200), math.sqrt(2 / 300))),
        (
            {"activation": "leaky_relu", "leak": 0.5, "init_std_first": None},
            tuple(math.sqrt(2 / 1.25 / n) for n in (300, 200, 300)),
        ),
        (
            {"init_rest": "torch", "init_std_first": None},
            tuple(1 / math.sqrt(3 * n) for n in (300, 200, 300)),
        ),
    ],
    ids=["paper", "leaky", "torch"],
)
@pytest.mark.parametrize("bias", BIASES)
def test_initial_weights_have_the_stated_scales(
    bias: Bias, settings: dict[str, Any], stds: tuple[float, ...]
) -> None:
    arch = Network(widths=(200, 300), bias=bias, **settings).on((3, 10, 10))
    parameters = arch.initial(generators(1), dtype=torch.float32)
    assert [w.shape for w in parameters.weights] == [(1, 200, 300), (1, 300, 200), (1, 1, 300)]
    for layer, std in enumerate(stds):
        w, b = parameters.weights[layer], parameters.biases[layer]
        assert float(w.std()) == pytest.approx(std, rel=4 / math.sqrt(w.numel()))
        assert (b is not None) == arch.has_bias(layer)
        if "init_rest" in settings:  # uniform
            for tensor in (w, b):
                assert tensor is None or float(tensor.abs().max()) <= math.sqrt(3) * std
        elif b is not None and settings == {} and layer == 0:
            assert float(b.std()) == pytest.approx(std, rel=0.3)
        else:
            assert b is None or not bool(b.any())


def test_initial_weights_do_not_depend_on_the_batch_or_the_dtype() -> None:
    arch = architecture("all")
    alone = arch.initial([seeded_generator(0, 2, "victim")], dtype=torch.float64)
    together = arch.initial(generators(), dtype=torch.float32)
    for single, stack in zip(alone.tensors(), together.tensors(), strict=True):
        assert torch.equal(single[0].float(), stack[2])


def test_refuses_weights_of_another_network() -> None:
    arch = architecture("all")
    state = arch.to_state_dict(arch.initial(generators(1), dtype=torch.float32))
    del state["1.bias"]
    refuses(r"'0.weight': \(7, 60\).*in this order, \[\(7, 60\)", arch.from_state_dict, state)


def test_architectures_by_name() -> None:
    arch = parse_architecture("mlp:3072-1000-1000-1")
    assert arch == Network().on((3, 32, 32))
    arch = parse_architecture("conv:3x32:784-100-10", bias="first", activation="gelu")
    expected = Network(widths=(100,), conv=Conv(), bias="first", activation="gelu")
    assert arch == expected.on((1, 28, 28), 10)
    assert parse_architecture("mlp:10-5-2", (1, 2, 5)).shape == (1, 2, 5)
    assert parse_architecture("mlp:10-5-2").shape == (1, 1, 10)


@pytest.mark.parametrize(
    "text", ["mlp:3072", "mlp:3072-1", "conv:3:3072-10-1", "3072-10-1", "mlp:a-b-c"]
)
def test_refuses_names(text: str) -> None:
    refuses("is not of the form mlp:3072-1000-1000-1", parse_architecture, text)
    refuses(r"has 3072 inputs, but images of", parse_architecture, "mlp:3072-10-1", (1, 28, 28))


def test_refuses_impossible_kernels_and_outputs() -> None:
    refuses("kernel=0 must be at least 1", Conv, kernel=0, channels=4)
    refuses("kernel=6 does not fit in images of 5x6", Network(conv=Conv(kernel=6)).on, SHAPE)
    refuses("n_outputs=0", Network().on, SHAPE, 0)


M, C = 6, 4
Torchs = Callable[[Tensor, Tensor], Tensor]

BINARY: dict[str, tuple[Loss, Torchs]] = {
    "bce": (Loss(), lambda phi, y: F.binary_cross_entropy_with_logits(phi, (y + 1) / 2)),
    "mse": (Loss(kind="mse"), F.mse_loss),
    "power 2.5": (Loss(kind="power"), lambda phi, y: (phi - y).abs().pow(2.5).mean()),
    "power 4": (Loss(kind="power", power=4.0), lambda phi, y: (phi - y).pow(4).mean()),
    "huber 1": (Loss(kind="huber"), F.huber_loss),
    "huber .3": (
        Loss(kind="huber", delta=0.3),
        lambda phi, y: F.huber_loss(phi, y, delta=0.3),
    ),
}
CE = Loss(kind="ce")


def binary() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    phi = 2 * torch.randn(R, M, 1, generator=generator, dtype=torch.float64)
    return phi, torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(M // 2).expand(R, M)


def classes() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    phi = 2 * torch.randn(R, M, C, generator=generator, dtype=torch.float64)
    return phi, torch.randint(C, (R, M), generator=generator)


@pytest.mark.parametrize("name", [*BINARY, "ce"])
def test_value_and_gradient_equal_torchs(name: str) -> None:
    loss, theirs = (CE, F.cross_entropy) if name == "ce" else BINARY[name]
    phi, y = classes() if name == "ce" else binary()
    phi.requires_grad_()
    outputs = phi if name == "ce" else phi[..., 0]
    expected = torch.stack([theirs(outputs[run], y[run]) for run in range(R)])
    (gradient,) = torch.autograd.grad(expected.sum(), phi)
    torch.testing.assert_close(loss.value(phi, y), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(loss.gradient(phi.detach(), y), gradient, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [-2000.0, -80.0, -21.0, 60.0, 80.0, 2000.0])
def test_exact_where_outputs_are_large(margin: float, dtype: torch.dtype) -> None:
    """log(1 + e^-m) is e^-m for large m and -m for small; its derivative -e^-m and -1."""
    value = math.exp(-margin) if margin > 0 else math.log1p(math.exp(margin)) - margin
    slope = math.exp(-margin) if margin > 0 else 1.0
    tiny = float(torch.finfo(dtype).tiny)
    for y in (-1.0, 1.0):
        phi, labels = torch.tensor([[[y * margin]]], dtype=dtype), torch.tensor([[y]], dtype=dtype)
        rounding = 1e-5 if dtype == torch.float32 else 1e-13
        assert float(Loss().value(phi, labels)) == pytest.approx(value, rel=rounding, abs=tiny)
        gradient = float(Loss().gradient(phi, labels))
        assert gradient == pytest.approx(-y * slope, rel=1e-5, abs=tiny)
    # Three classes: the own one ahead of two others by the same margin, so twice as much is left.
    phi = torch.tensor([[[margin, 0.0, 0.0]]], dtype=dtype)
    labels = torch.tensor([[0]])
    twice = 2 * value if margin > 0 else value + math.log(2)
    assert float(CE.value(phi, labels)) == pytest.approx(twice, rel=1e-5, abs=tiny)
    gradient = CE.gradient(phi, labels).flatten().tolist()
    half = slope if margin > 0 else 0.5
    assert gradient == pytest.approx([-2 * half, half, half], rel=1e-5, abs=tiny)
    assert sum(gradient) == pytest.approx(0, abs=1e-7 * half)


def test_margins() -> None:
    phi = torch.tensor([[[1.0, 5.0, 2.0], [1.0, 5.0, 2.0], [7.0, 7.0, 0.0]]])
    assert CE.margins(phi, torch.tensor([[1, 2, 0]])).tolist() == [[3.0, -3.0, 0.0]]
    y = torch.tensor([[1.0, -1.0, -1.0]])
    assert Loss().margins(phi[..., :1], y).tolist() == [[1.0, -1.0, -7.0]]


@pytest.mark.parametrize(
    ("loss", "y", "n_outputs", "message"),
    [
        (Loss(), [0.0, 1.0], 1, r"labels are \[0.0, 1.0\]"),
        (Loss(), [-1, 1], 1, r"torch.int64\); 'bce' needs -1 and \+1"),
        (Loss(), [-1.0, 1.0], 2, "loss 'bce' on 2 outputs"),
        (Loss(kind="huber"), list(range(10)), 1, r"labels are \[0, 1, 2, 3, 4, 5, 6, 7\] and more"),
        (CE, [0, 1], 1, "loss 'ce' on 1 outputs"),
        (CE, [0, 3], 3, "integer classes from 0 to 2"),
        (CE, [-1, 1], 3, r"labels are \[-1, 1\]"),
        (CE, [0.0, 1.0], 3, "torch.float32"),
    ],
)
def test_refuses_labels(loss: Loss, y: list[float], n_outputs: int, message: str) -> None:
    refuses(message, loss.check, torch.tensor([y]), n_outputs)
