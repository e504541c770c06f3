"""Autoencoders: torch's own layers, first weights, float32 by oneDNN, what is refused."""

from __future__ import annotations

import math
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor, nn

from recon_core.victims import autoencoder
from recon_core.victims.autoencoder import (
    Activation,
    Autoencoder,
    FullyConnected,
    UNet,
    Weights,
    initial_weights,
    n_parameters,
    single,
)
from tests.recon_core.drawing import generator, refuses
from tests.recon_core.victims.torch_nets import leaves_of, torch_autoencoder

SHAPE = (3, 8, 8)
R = 3
NETWORKS: dict[str, Autoencoder] = {
    **{
        f"fc-{activation}": FullyConnected(depth=4, width=20, activation=activation, leak=0.05)
        for activation in get_args(Activation)
    },
    **{
        f"unet-{activation}": UNet(channels=(4, 6, 8), activation=activation, leak=0.05)
        for activation in get_args(Activation)
    },
    "unet without skips": UNet(channels=(4, 6), convolutions=1, skips=False, activation="prelu"),
    "unet of one level": UNet(channels=(5,), convolutions=3),
}


def stack(settings: Autoencoder, dtype: torch.dtype = torch.float64, n_runs: int = R) -> Weights:
    """Initial weights of networks; slopes of PReLUs are made to differ."""
    generators = [generator(i) for i in range(n_runs)]
    weights = initial_weights(settings.on(SHAPE), generators, dtype=dtype)
    slopes = [name for name in weights if name.endswith(".slope")]
    apart = torch.linspace(-0.3, 0.6, n_runs * max(1, len(slopes)), dtype=dtype)
    for i, name in enumerate(slopes):
        weights[name] = apart[i :: len(slopes)]
    return weights


def images(n: int = 5, n_runs: int = R) -> Tensor:
    return torch.rand(n_runs, n, *SHAPE, generator=generator(7), dtype=torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_that_of_torchs_layers(name: str) -> None:
    model, weights, x = NETWORKS[name].on(SHAPE), stack(NETWORKS[name]), images()
    together = model.forward(weights, x)
    for r in range(R):
        leaves = leaves_of(weights, r)
        theirs = torch_autoencoder(NETWORKS[name], leaves, x[r]).detach()
        torch.testing.assert_close(together[r], theirs, rtol=1e-12, atol=1e-13)
        assert n_parameters(model) == sum(leaf.numel() for leaf in leaves.values())


@pytest.mark.parametrize(
    "settings",
    [
        FullyConnected(depth=3, width=300, activation="prelu"),
        UNet(channels=(16, 32), activation="prelu"),
    ],
)
def test_first_weights_are_those_of_torchs_layers(settings: Autoencoder) -> None:
    model = settings.on(SHAPE)
    shapes = model.tensor_shapes
    weights = initial_weights(model, [generator(0)], dtype=torch.float32)
    for name, shape in shapes.items():
        value = weights[name][0]
        assert value.shape == shape
        if name.endswith(".slope"):
            assert value == nn.PReLU().weight[0].item() == 0.25
            continue
        bound = 1 / math.sqrt(math.prod(shapes[name.replace("bias", "weight")][1:]))
        assert float(value.abs().max()) <= bound
        if value.numel() > 1000:
            assert float(value.abs().max()) > 0.98 * bound
            assert float(value.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
            assert abs(float(value.mean())) < 0.05 * bound


def test_first_weights_follow_from_their_own_generator() -> None:
    model = FullyConnected(depth=2, width=6).on(SHAPE)
    together = initial_weights(model, [generator(i) for i in (4, 5)], dtype=torch.float32)
    alone = initial_weights(model, [generator(5)], dtype=torch.float32)
    double = initial_weights(model, [generator(5)], dtype=torch.float64)
    for name, tensor in together.items():
        assert torch.equal(tensor[1:], alone[name])
        assert torch.equal(double[name].float(), alone[name])
        assert not torch.equal(tensor[0], tensor[1])


def test_a_state_dict_becomes_a_stack_of_one() -> None:
    settings = NETWORKS["unet-prelu"]
    model, weights, x = settings.on(SHAPE), stack(settings), images()
    state = {name: tensor[1] for name, tensor in reversed(weights.items())}
    one = single(model, state)
    assert list(one) == list(model.tensor_shapes)
    torch.testing.assert_close(model.forward(one, x[1:2])[0], model.forward(weights, x)[1])
    theirs = {n: t.reshape(1) if n.endswith("slope") else t for n, t in state.items()}
    assert all(torch.equal(t, one[n]) for n, t in single(model, theirs).items())


def test_kaimings_start_keeps_a_signal_through_twenty_layers_where_torchs_loses_it() -> None:
    def powers(init: Literal["torch", "kaiming"]) -> list[float]:
        settings = FullyConnected(depth=20, width=400, leak=0.0, init=init)
        model = settings.on((3, 8, 8))
        weights = initial_weights(model, [generator(0)], dtype=torch.float64)
        a = torch.randn(64, 192, generator=generator(1), dtype=torch.float64)
        found = []
        for i in range(20):
            a = a.relu() @ weights[f"{i}.weight"][0].T + weights[f"{i}.bias"][0]
            found.append(float(a.square().mean()))
        return found

    kept = powers("kaiming")
    assert all(0.2 < power < 3 for power in kept)  # of 1, and the noise of 20 random layers
    assert powers("torch")[-1] < 0.02

    model = FullyConnected(depth=3, width=5, init="kaiming").on((1, 2, 2))
    one = initial_weights(model, [torch.Generator()], dtype=torch.float32)
    assert all(bool((t == 0).all()) for name, t in one.items() if name.endswith("bias"))
    bound = math.sqrt(6 / 5)
    assert 0.8 * bound < float(one["1.weight"].abs().max()) <= bound


def test_weights_of_another_network_are_refused() -> None:
    model = FullyConnected(depth=2, width=6, activation="prelu").on(SHAPE)
    state = {name: torch.zeros(shape) for name, shape in model.tensor_shapes.items()}
    less = {n: t for n, t in state.items() if n != "1.bias"}
    refuses(r"missing \['1.bias'\], unknown \[\]", single, model, less)
    for message, name, shape in (
        (r"missing \[\], unknown \['2.weight'\]", "2.weight", (2,)),
        (r"0.weight is \(7, 192\), the network has \(6, 192\)", "0.weight", (7, 192)),
        (r"0.slope is \(6,\), the network has \(\)", "0.slope", (6,)),
    ):
        refuses(message, single, model, {**state, name: torch.zeros(shape)})


def test_images_that_cannot_be_halved_are_refused() -> None:
    refuses(r"10x8 cannot be halved 2 times.*multiples of 4", UNet().on, (3, 10, 8))
    refuses(r"8x10 cannot be halved 2 times", UNet().on, (3, 8, 10))
    UNet(channels=(4,)).on((3, 9, 7))


LAID_OUT = (
    FullyConnected(depth=3, width=24),
    FullyConnected(depth=4, width=16, activation="prelu"),
    UNet(channels=(4, 8, 6)),
    UNet(channels=(4, 6), convolutions=1, skips=False, activation="softplus"),
    UNet(channels=(4, 6), activation="prelu"),
)


def gradients(network: Autoencoder, weights: Weights, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = {name: t.clone().requires_grad_() for name, t in weights.items()}
    y = network.on(SHAPE).forward(leaves, x)
    found = torch.autograd.grad((y - x).square().sum(), list(leaves.values()))
    return y.detach(), list(found)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("network", LAID_OUT, ids=str)
@pytest.mark.parametrize("n_runs", [1, 3])
@pytest.mark.parametrize("n_images", [1, 20])
def test_float32_is_float64_to_rounding(network: Autoencoder, n_runs: int, n_images: int) -> None:
    x, weights = images(n_images, n_runs), stack(network, torch.float32, n_runs)
    exact = gradients(network, {name: t.double() for name, t in weights.items()}, x)
    found = gradients(network, weights, x.float())
    assert apart(found[0], exact[0]) < 1e-6
    for a, b in zip(found[1], exact[1], strict=True):
        assert apart(a, b) < 1e-4


@pytest.mark.parametrize("n_runs", [1, 3])
def test_parts_of_a_unet_are_the_whole(n_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = UNet(channels=(4, 6))
    weights, x = stack(network, n_runs=n_runs), images(7, n_runs)
    whole = gradients(network, weights, x)
    monkeypatch.setattr(autoencoder, "PIXELS_AT_ONCE", 3 * 64)
    sizes: list[int] = []
    at_once = autoencoder.UNetModel._at_once

    def seen(model: autoencoder.UNetModel, weights: Weights, x: Tensor) -> Tensor:
        sizes.append(x.shape[1])
        return at_once(model, weights, x)

    monkeypatch.setattr(autoencoder.UNetModel, "_at_once", seen)
    parts = gradients(network, weights, x)
    assert sizes == [3, 3, 1]
    assert apart(parts[0], whole[0]) < 1e-14
    for a, b in zip(parts[1], whole[1], strict=True):
        assert apart(a, b) < 1e-12
