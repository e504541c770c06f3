"""Training in the span of the images equals direct training, and does what it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.types import seeded_generator
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Conv, Network, Parameters
from recon_core.victims.span import Span, uses_span
from recon_core.victims.training import Trained, Training, train
from tests.recon_core.victims.torch_nets import torch_trained

R, N, SHAPE = 3, 8, (1, 6, 8)
GD = Optimiser(rule="gd", lr=0.1)
DIRECT = Training(epochs=300, optimiser=GD)

CASES = {
    "gd": DIRECT,
    "momentum": replace(DIRECT, optimiser=Optimiser(rule="gd", lr=0.03, momentum=0.9)),
    "weight decay": replace(DIRECT, weight_decay=0.01),
    "momentum and weight decay": replace(
        DIRECT, optimiser=Optimiser(rule="gd", lr=0.03, momentum=0.9), weight_decay=0.01
    ),
    "regression": replace(DIRECT, loss=Loss(kind="mse"), weight_decay=1e-3),
    "minibatches": replace(DIRECT, epochs=100, batch_size=3),
    "minibatches, momentum and weight decay": replace(
        DIRECT,
        epochs=100,
        batch_size=4,
        optimiser=Optimiser(rule="gd", lr=0.03, momentum=0.9),
        weight_decay=0.01,
    ),
}


def architecture(bias: str = "none", activation: str = "relu") -> Architecture:
    network = Network(
        widths=(7, 5),
        bias=bias,  # type: ignore[arg-type]
        activation=activation,  # type: ignore[arg-type]
        init_std_first=0.3,
        init_rest="torch",
    )
    return network.on(SHAPE)


def victims(arch: Architecture, dtype: torch.dtype = torch.float64) -> Parameters:
    return arch.initial([seeded_generator(0, run, "victim") for run in range(R)], dtype=dtype)


def order() -> list[torch.Generator]:
    return [seeded_generator(0, run, "minibatches") for run in range(R)]


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.tensor([-1.0, 1.0]).repeat(N // 2).expand(R, N)
    x = torch.randn(R, N, 48, generator=generator) / 4
    x[..., 0] += y
    return x.to(dtype), y.to(dtype)


def trained(arch: Architecture, training: Training, dtype: torch.dtype = torch.float64) -> Trained:
    x, y = data(dtype)
    return train(arch, victims(arch, dtype), x, y, training=training, generators=order())


@pytest.mark.parametrize("bias", ["none", "first", "all"])
@pytest.mark.parametrize("case", CASES)
def test_equals_direct_training(case: str, bias: str) -> None:
    arch = architecture(bias)
    direct = trained(arch, CASES[case])
    in_span = trained(arch, replace(CASES[case], span=True))
    start = victims(arch).tensors()
    pairs = zip(in_span.parameters.tensors(), direct.parameters.tensors(), start, strict=True)
    for ours, theirs, before in pairs:
        assert (theirs - before).abs().max() > 0.01
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(in_span.margins, direct.margins, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ["leaky_relu", "gelu"])
def test_equals_torch(activation: str) -> None:
    arch, training = architecture("all", activation), CASES["momentum and weight decay"]
    x, y = data()
    theirs = torch_trained(arch, victims(arch), x, y, replace(training, epochs=60), order())
    ours = trained(arch, replace(training, epochs=60, span=True)).parameters
    for mine, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def test_equals_direct_training_in_float32() -> None:
    arch = architecture("all")
    direct, ours = (
        trained(arch, replace(CASES["weight decay"], epochs=100, span=span), torch.float32)
        for span in (False, True)
    )
    for mine, theirs in zip(ours.parameters.tensors(), direct.parameters.tensors(), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_reports_the_margins_of_the_weights_it_returns() -> None:
    arch = architecture("first")
    ours = trained(arch, replace(DIRECT, span=True, weight_decay=0.01))
    x, y = data()
    phi = arch.forward(ours.parameters, x).output
    torch.testing.assert_close(ours.margins, y * phi.squeeze(2), rtol=1e-10, atol=1e-12)


def test_a_victim_that_ends_leaves_its_weights() -> None:
    """Compaction takes rows of everything, the images' inner products included."""
    arch = architecture("all")
    losses = trained(arch, replace(DIRECT, epochs=60)).loss
    stop = replace(DIRECT, epochs=60, stop_every=5, stop_loss=float(losses.max()) * 1.001)
    direct, ours = (trained(arch, replace(stop, span=span)) for span in (False, True))
    assert ours.epochs_done.tolist() == direct.epochs_done.tolist()
    assert len(set(ours.epochs_done.tolist())) > 1
    for mine, theirs in zip(ours.parameters.tensors(), direct.parameters.tensors(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_coordinates_make_the_layer() -> None:
    x, _ = data()
    weight = victims(architecture()).weights[0]
    span = Span(weight, x)
    coordinates, scale = span.start()
    assert torch.equal(span.layer(coordinates, scale), weight)
    generator = torch.Generator().manual_seed(3)
    coordinates = torch.randn(coordinates.shape, generator=generator, dtype=torch.float64)
    layer = span.layer(coordinates, 0.5 * scale)
    expected = 0.5 * weight + torch.einsum("rnh,rnd->rhd", coordinates, x)
    torch.testing.assert_close(layer, expected)
    products, start = span.inputs()
    z = 0.5 * start + products @ coordinates
    torch.testing.assert_close(z, x @ layer.mT, rtol=1e-12, atol=1e-12)


def test_the_switch() -> None:
    arch = architecture()
    adadelta, adam = Optimiser(), Optimiser(rule="adam")
    conv = Network(widths=(5,), conv=Conv(kernel=2, channels=2)).on(SHAPE)
    assert uses_span("auto", arch, GD, 47)
    assert not uses_span("auto", arch, GD, 48), "not cheaper with as many images as pixels"
    assert uses_span(True, arch, GD, 1000)
    for optimiser in (adadelta, adam):
        assert not uses_span("auto", arch, optimiser, 8)
        with pytest.raises(ValueError, match=f"span=True cannot be done: {optimiser.rule} moves"):
            uses_span(True, arch, optimiser, 8)
    assert not uses_span("auto", conv, GD, 8)
    with pytest.raises(ValueError, match="the first layer is a convolution"):
        uses_span(True, conv, GD, 8)
    assert not uses_span(False, arch, GD, 8)


def test_auto_is_the_span_where_it_can_be() -> None:
    arch = architecture()
    short = replace(DIRECT, epochs=20)
    auto, ours = (trained(arch, replace(short, span=span)) for span in ("auto", True))  # type: ignore[arg-type]
    assert torch.equal(auto.loss, ours.loss)
    with pytest.raises(ValueError, match=r"span=True with optimiser\.rule='adadelta'"):
        Training(span=True)
    trained(arch, Training(epochs=2, span="auto"))
