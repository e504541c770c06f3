"""Training in the span of the images ends as any other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recon_core.optimisers import Optimiser
from recon_core.victims.backprop import uses_span
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Conv, Network
from recon_core.victims.training import Trained, Training, train
from tests.recon_core.victims.small_victims import (
    SHAPE,
    architecture,
    assert_close,
    data,
    order,
    victims,
)

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


def trained(arch: Architecture, training: Training, dtype: torch.dtype = torch.float64) -> Trained:
    x, y = data(dtype=dtype)
    return train(arch, victims(arch, dtype), x, y, training=training, generators=order())


@pytest.mark.parametrize("bias", ["none", "first", "all"])
@pytest.mark.parametrize("case", CASES)
def test_equals_direct_training(case: str, bias: str) -> None:
    arch = architecture(bias=bias)
    direct = trained(arch, CASES[case])
    in_span = trained(arch, replace(CASES[case], span=True))
    for theirs, before in zip(direct.parameters.tensors(), victims(arch).tensors(), strict=True):
        assert (theirs - before).abs().max() > 0.01
    assert_close(in_span.parameters, direct.parameters, 1e-10)
    torch.testing.assert_close(in_span.margins, direct.margins, rtol=1e-10, atol=1e-12)


def test_a_victim_that_ends_leaves_its_weights() -> None:
    """Compaction takes rows of everything, the images' inner products included."""
    arch = architecture(bias="all")
    losses = trained(arch, replace(DIRECT, epochs=60)).loss
    stop = replace(DIRECT, epochs=60, stop_every=5, stop_loss=float(losses.max()) * 1.001)
    direct, ours = (trained(arch, replace(stop, span=span)) for span in (False, True))
    assert ours.epochs_done.tolist() == direct.epochs_done.tolist()
    assert len(set(ours.epochs_done.tolist())) > 1
    assert_close(ours.parameters, direct.parameters, 1e-10)


def test_the_switch() -> None:
    arch = architecture()
    adadelta, adam = Optimiser(), Optimiser(rule="adam")
    conv = Network(widths=(5,), conv=Conv(kernel=2, channels=2)).on(SHAPE)
    assert uses_span("auto", arch, GD, 19)
    assert not uses_span("auto", arch, GD, 20), "not cheaper with as many images as pixels"
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
