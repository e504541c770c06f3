"""Autoencoders as victims: stacks, torch's own layers, first weights, what is refused."""

from __future__ import annotations

import math
from typing import Literal, get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

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
from tests.recon_core.victims.torch_autoencoders import torch_autoencoder

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


def stack(settings: Autoencoder, dtype: torch.dtype = torch.float64) -> Weights:
    """Initial weights of R networks; slopes of PReLUs are made to differ."""
    generators = [torch.Generator().manual_seed(i) for i in range(R)]
    weights = initial_weights(settings.on(SHAPE), generators, dtype=dtype)
    slopes = [name for name in weights if name.endswith(".slope")]
    for i, name in enumerate(slopes):
        weights[name] = torch.linspace(-0.3, 0.6, R * len(slopes), dtype=dtype)[i :: len(slopes)]
    return weights


def images(n: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(R, n, *SHAPE, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_stack_is_its_networks(name: str) -> None:
    model, weights, x = NETWORKS[name].on(SHAPE), stack(NETWORKS[name]), images()
    together = model.forward(weights, x)
    assert together.shape == x.shape
    for r in range(R):
        one = {n: t[r : r + 1] for n, t in weights.items()}
        torch.testing.assert_close(model.forward(one, x[r : r + 1])[0], together[r])
    assert float((together[0] - together[1]).abs().max()) > 0.01


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_that_of_torchs_layers(name: str) -> None:
    model, weights, x = NETWORKS[name].on(SHAPE), stack(NETWORKS[name]), images()
    together = model.forward(weights, x)
    for r in range(R):
        net, leaves = torch_autoencoder(NETWORKS[name], SHAPE, weights, r)
        with torch.no_grad():
            torch.testing.assert_close(together[r], net(x[r]), rtol=1e-12, atol=1e-13)
        assert n_parameters(model) == sum(leaf.numel() for leaf in leaves.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_of_a_batch_do_not_see_each_other(name: str) -> None:
    model, weights, x = NETWORKS[name].on(SHAPE), stack(NETWORKS[name]), images()
    before = model.forward(weights, x)
    changed = x.clone()
    changed[:, 0] = 1 - x[:, 0]
    after = model.forward(weights, changed)
    torch.testing.assert_close(after[:, 1:], before[:, 1:])
    assert not torch.allclose(after[:, 0], before[:, 0])


def test_tensors_are_those_that_are_documented() -> None:
    fc = FullyConnected(depth=3, width=5, activation="prelu").on((1, 2, 2)).tensor_shapes
    assert fc == {
        "0.weight": (5, 4), "0.bias": (5,), "0.slope": (),
        "1.weight": (5, 5), "1.bias": (5,), "1.slope": (),
        "2.weight": (4, 5), "2.bias": (4,),
    }  # fmt: skip
    unet = UNet(channels=(4, 6), convolutions=2).on((3, 4, 4)).tensor_shapes
    assert {n: s for n, s in unet.items() if n.endswith("weight")} == {
        "down.0.0.weight": (4, 3, 3, 3),
        "down.0.1.weight": (4, 4, 3, 3),
        "down.1.0.weight": (6, 4, 3, 3),
        "down.1.1.weight": (6, 6, 3, 3),
        "up.0.0.weight": (4, 10, 3, 3),
        "up.0.1.weight": (4, 4, 3, 3),
        "out.weight": (3, 4, 3, 3),
    }


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
    weights = initial_weights(model, [torch.Generator().manual_seed(0)], dtype=torch.float32)
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear, conv = nn.Linear(192, 300), nn.Conv2d(3, 16, 3)
    for theirs, name in [(linear, "0"), (conv, "down.0.0")]:
        if f"{name}.weight" in weights:
            spread = float(theirs.state_dict()["weight"].std())
            assert float(weights[f"{name}.weight"].std()) == pytest.approx(spread, rel=0.1)


def test_first_weights_follow_from_their_own_generator() -> None:
    model = FullyConnected(depth=2, width=6).on(SHAPE)
    together = initial_weights(
        model, [torch.Generator().manual_seed(i) for i in (4, 5)], dtype=torch.float32
    )
    alone = initial_weights(model, [torch.Generator().manual_seed(5)], dtype=torch.float32)
    double = initial_weights(model, [torch.Generator().manual_seed(5)], dtype=torch.float64)
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


def test_kaimings_start_keeps_a_signal_through_twenty_layers_where_torchs_loses_it() -> None:
    def powers(init: Literal["torch", "kaiming"]) -> list[float]:
        settings = FullyConnected(depth=20, width=400, leak=0.0, init=init)
        model = settings.on((3, 8, 8))
        weights = initial_weights(model, [torch.Generator().manual_seed(0)], dtype=torch.float64)
        a = torch.randn(64, 192, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
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


def test_a_slope_may_have_the_shape_of_torchs_prelu() -> None:
    model = FullyConnected(depth=2, width=6, activation="prelu").on(SHAPE)
    state = {name: torch.rand(shape) for name, shape in model.tensor_shapes.items()}
    one = single(model, {**state, "0.slope": state["0.slope"].reshape(1)})
    assert one["0.slope"].shape == (1,)  # R = 1 and nothing more
    assert torch.equal(one["0.slope"][0], state["0.slope"])


def test_weights_of_another_network_are_refused() -> None:
    model = FullyConnected(depth=2, width=6, activation="prelu").on(SHAPE)
    state = {name: torch.zeros(shape) for name, shape in model.tensor_shapes.items()}
    with pytest.raises(ValueError, match=r"missing \['1.bias'\], unknown \[\]"):
        single(model, {n: t for n, t in state.items() if n != "1.bias"})
    with pytest.raises(ValueError, match=r"missing \[\], unknown \['2.weight'\]"):
        single(model, {**state, "2.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"0.weight is \(7, 192\), the network has \(6, 192\)"):
        single(model, {**state, "0.weight": torch.zeros(7, 192)})
    with pytest.raises(ValueError, match=r"0.slope is \(6,\), the network has \(\)"):
        single(model, {**state, "0.slope": torch.zeros(6)})


def test_settings_that_make_no_network_are_refused() -> None:
    with pytest.raises(ValueError, match="depth=1 must be at least 2"):
        FullyConnected(depth=1)
    with pytest.raises(ValueError, match="width=0 must be at least 1"):
        FullyConnected(width=0)
    with pytest.raises(ValueError, match=r"channels=\(\) must name"):
        UNet(channels=())
    with pytest.raises(ValueError, match=r"channels=\(4, 0\)"):
        UNet(channels=(4, 0))
    with pytest.raises(ValueError, match="convolutions=0 must be at least 1"):
        UNet(convolutions=0)
    for leak in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"leak=.* outside \[0, 1\)"):
            UNet(leak=leak)
    with pytest.raises(ValueError, match=r"10x8 cannot be halved 2 times.*multiples of 4"):
        UNet().on((3, 10, 8))
    with pytest.raises(ValueError, match=r"8x10 cannot be halved 2 times"):
        UNet().on((3, 8, 10))
    UNet(channels=(4,)).on((3, 9, 7))


def test_settings_come_from_a_recipe_and_nothing_else_does() -> None:
    adapter: TypeAdapter[Autoencoder] = TypeAdapter(Autoencoder)
    given = {"kind": "unet", "channels": [4, 8], "activation": "prelu"}
    assert adapter.validate_python(given) == UNet(channels=(4, 8), activation="prelu")
    for wrong in ({"kind": "unet", "width": 4}, {"kind": "fc", "activation": "relu"}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
