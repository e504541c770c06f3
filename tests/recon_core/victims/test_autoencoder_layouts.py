"""Autoencoders in float32 on a CPU go another way, through oneDNN: the numbers are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recon_core import cuda_graphs
from recon_core.types import seeded_generator
from recon_core.victims import autoencoder
from recon_core.victims.autoencoder import (
    Autoencoder,
    FullyConnected,
    UNet,
    Weights,
    initial_weights,
)
from recon_core.victims.autoencoder_training import AutoencoderTraining, train_autoencoders

NETWORKS = (
    FullyConnected(depth=3, width=24),
    FullyConnected(depth=4, width=16, activation="prelu"),
    UNet(channels=(4, 8, 6)),
    UNet(channels=(4, 6), convolutions=1, skips=False, activation="softplus"),
    UNet(channels=(4, 6), activation="prelu"),
)
SHAPE = (3, 8, 8)


def started(network: Autoencoder, n_runs: int, dtype: torch.dtype) -> Weights:
    generators = [seeded_generator(0, run, "victim") for run in range(n_runs)]
    return initial_weights(network.on(SHAPE), generators, dtype=dtype)


def images(n_runs: int, n_images: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n_runs, n_images, *SHAPE, generator=generator, dtype=torch.float64)


def gradients(network: Autoencoder, weights: Weights, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = {name: t.clone().requires_grad_() for name, t in weights.items()}
    y = network.on(SHAPE).forward(leaves, x)
    found = torch.autograd.grad((y - x).square().sum(), list(leaves.values()))
    return y.detach(), list(found)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("n_runs", [1, 3])
@pytest.mark.parametrize("n_images", [1, 20])
def test_float32_is_float64_to_rounding(network: Autoencoder, n_runs: int, n_images: int) -> None:
    x = images(n_runs, n_images)
    exact = gradients(network, started(network, n_runs, torch.float64), x)
    found = gradients(network, started(network, n_runs, torch.float32), x.float())
    assert apart(found[0], exact[0]) < 1e-6
    for a, b in zip(found[1], exact[1], strict=True):
        assert apart(a, b) < 1e-4


@pytest.mark.parametrize("n_runs", [1, 3])
def test_parts_of_a_unet_are_the_whole(n_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = UNet(channels=(4, 6))
    weights, x = started(network, n_runs, torch.float64), images(n_runs, 7)
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


def test_rates_reach_adam_and_batches_are_copied_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA graphs: a step is made once per size of batch, and sees what is overwritten."""
    made: list[int] = []
    real = cuda_graphs.repeated

    def counted(step, device, *, graphs):  # type: ignore[no-untyped-def]
        made.append(1)
        assert graphs
        return real(step, device, graphs=graphs)

    monkeypatch.setattr(cuda_graphs, "repeated", counted)
    network = FullyConnected(depth=2, width=8)
    settings = AutoencoderTraining(
        epochs=6, lr=1e-2, lr_end=1e-4, hold=0.0, batch_size=4, levels=(1e-30,)
    )
    x = images(1, 10)
    orders = [torch.randperm(10, generator=torch.Generator().manual_seed(e)) for e in range(6)]
    (trained,) = train_autoencoders(
        network.on(SHAPE),
        started(network, 1, torch.float64),
        x,
        training=settings,
        shuffle=lambda _run, epoch: orders[epoch],
    )
    assert len(made) == 2  # batches of four, and of the two that are left
    weights = {n: t.requires_grad_() for n, t in started(network, 1, torch.float64).items()}
    adam = torch.optim.Adam(weights.values(), betas=(0.9, settings.beta_2))
    for epoch in range(6):
        for group in adam.param_groups:
            group["lr"] = settings.rate(epoch)
        for rows in orders[epoch].split(4):
            adam.zero_grad()
            batch = x[:, rows]
            (network.on(SHAPE).forward(weights, batch) - batch).square().mean().backward()
            adam.step()
    for name, tensor in trained.last.weights.items():
        assert apart(tensor, weights[name].detach()) < 1e-9
