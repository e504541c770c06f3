"""The benchmarks of the autoencoder paper, small: what they time is the same on both sides."""

from __future__ import annotations

import pytest
import torch

from benchmarks.autoencoder.speed import load, plain_module
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import FullyConnected, UNet, initial_weights


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
