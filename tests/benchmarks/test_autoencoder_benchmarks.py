"""The benchmarks of the autoencoder paper, small: what they time is the same on both sides."""

from __future__ import annotations

import pytest
import torch

from benchmarks.autoencoder import speed as autoencoder
from benchmarks.autoencoder.speed import load, plain_module
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import FullyConnected, UNet, initial_weights

SMALL = (
    autoencoder.Case("small FC", FullyConnected(depth=3, width=16)),
    autoencoder.Case("small U-Net", UNet(channels=(4, 6, 8), convolutions=1, skips=False)),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoencoder, "CASES", SMALL)
    monkeypatch.setattr(autoencoder, "SHAPE", (3, 8, 8))
    monkeypatch.setattr(autoencoder, "N_IMAGES", 3)


@pytest.mark.parametrize(
    "network",
    [
        FullyConnected(depth=4, width=16),
        UNet(channels=(4, 8, 6), convolutions=1, skips=False),
        UNet(channels=(8, 8, 4), convolutions=2, skips=False),
        UNet(channels=(5,), skips=False),
    ],
    ids=str,
)
def test_the_reference_is_the_same_network(network: FullyConnected | UNet) -> None:
    model = network.on((3, 8, 8))
    weights = initial_weights(model, [seeded_generator(0, 0, "victim")], dtype=torch.float64)
    module = plain_module(network, (3, 8, 8)).double()
    load(module, weights)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(module(x), model.forward(weights, x.unsqueeze(0))[0])


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_every_case_is_measured() -> None:
    lines = list(autoencoder.measure(True))
    assert len(lines) == 2 + 2 * 2 * 2
    assert all(line.unit == "s" and line.ratio is not None for line in lines)
    assert "3 images x 6 masks, 40 evaluations of f each" in lines[0].case
    assert {line.reference for line in lines[:2]} == {autoencoder.ONE_BY_ONE}
    assert sum("2 networks" in line.case for line in lines) == 4
    assert sum("fused" in str(line.reference) for line in lines) == 4
