"""The autoencoder paper's autoencoders and their training as everybody would write them with
torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from recon_core.victims.autoencoder import Autoencoder, FullyConnected, UNet
from recon_core.victims.autoencoder_training import AutoencoderTraining


def plain_module(network: Autoencoder, shape: tuple[int, int, int]) -> nn.Module:
    """Leaky ReLU alone, a U-Net without skips; ValueError for another network."""
    if network.activation != "leaky_relu" or (isinstance(network, UNet) and network.skips):
        raise ValueError(f"{network} is not one that the reference has")
    n_inputs = shape[0] * shape[1] * shape[2]
    if isinstance(network, FullyConnected):
        return nn.Sequential(nn.Flatten(), *_dense(network, n_inputs), nn.Unflatten(1, shape))
    return nn.Sequential(*_convolutions(network, shape[0]))


def load(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Weights of one network (R = 1), in the order of its layers."""
    for parameter, tensor in zip(module.parameters(), weights.values(), strict=True):
        parameter.data.copy_(tensor[0])


def plain_train(
    module: nn.Module, x: Tensor, training: AutoencoderTraining, *, fused: bool
) -> None:
    """Every epoch a step on all images; its loss is looked at as often as ours."""
    betas = (0.9, training.beta_2)
    optimiser = torch.optim.Adam(module.parameters(), betas=betas, fused=fused or None)
    for epoch in range(training.epochs):
        for group in optimiser.param_groups:
            group["lr"] = training.rate(epoch)
        loss = nn.functional.mse_loss(module(x), x)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if epoch % training.check_every == 0:
            loss.item()


def _dense(network: FullyConnected, n_inputs: int) -> Iterator[nn.Module]:
    sizes = [n_inputs, *[network.width] * (network.depth - 1), n_inputs]
    for i in range(network.depth):
        if i:
            yield nn.LeakyReLU(network.leak)
        yield nn.Linear(sizes[i], sizes[i + 1])


def _convolutions(network: UNet, n_channels: int) -> Iterator[nn.Module]:
    n, n_levels = n_channels, len(network.channels)
    down, up = range(n_levels), reversed(range(n_levels - 1))
    for between, levels in ((nn.MaxPool2d(2), down), (nn.Upsample(scale_factor=2), up)):
        for level in levels:
            if n != n_channels:
                yield between
            for _ in range(network.convolutions):
                yield nn.Conv2d(n, network.channels[level], 3, padding=1)
                yield nn.LeakyReLU(network.leak)
                n = network.channels[level]
    yield nn.Conv2d(n, n_channels, 3, padding=1)
