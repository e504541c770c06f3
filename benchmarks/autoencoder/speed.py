"""Autoencoder paper: recovery of a batch beside one image at a time, and training beside a plain
loop.

    python -m benchmarks.autoencoder.speed [--quick] [--json FILE]

Recovery: 50 images, each degraded by the six masks, by the paper's method with a number of
iterations that is the same for all; batched they go through f together. Weights are random: what f
costs does not depend on them. Training: the networks side by side, one thread each, as a campaign
trains them, beside a torch.nn.Module with torch.optim.Adam, one network after another, all threads
on each. Either side of a comparison has to give the same result, or nothing is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.record import Measurement, batched, check_agreement, compared, main
from recon_core.attacks.plug_and_play import Degraded, UnknownMask
from recon_core.degradation import MASKS, degrade, mask_pattern
from recon_core.threads import side_by_side
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import (
    Autoencoder,
    FullyConnected,
    Model,
    UNet,
    Weights,
    initial_weights,
)
from recon_core.victims.autoencoder_training import AutoencoderTraining, train_autoencoders

SHAPE = (3, 32, 32)
CPU = torch.device("cpu")
N_IMAGES = 50


def plain_module(network: Autoencoder, shape: tuple[int, int, int]) -> nn.Module:
    """Leaky ReLU alone, a U-Net without skips; ValueError for another network."""
    if network.activation != "leaky_relu" or (isinstance(network, UNet) and network.skips):
        raise ValueError(f"{network} is not one that the reference has")
    n_inputs = shape[0] * shape[1] * shape[2]
    layers: list[nn.Module] = []
    if isinstance(network, FullyConnected):
        sizes = [n_inputs, *[network.width] * (network.depth - 1), n_inputs]
        for fan_in, fan_out in itertools.pairwise(sizes):
            layers += [nn.LeakyReLU(network.leak)] if layers else []
            layers.append(nn.Linear(fan_in, fan_out))
        return nn.Sequential(nn.Flatten(), *layers, nn.Unflatten(1, shape))
    n, n_levels = shape[0], len(network.channels)
    down, up = range(n_levels), reversed(range(n_levels - 1))
    for between, levels in ((nn.MaxPool2d(2), down), (nn.Upsample(scale_factor=2), up)):
        for level in levels:
            layers += [between] if layers else []
            for _ in range(network.convolutions):
                layers.append(nn.Conv2d(n, network.channels[level], 3, padding=1))
                layers.append(nn.LeakyReLU(network.leak))
                n = network.channels[level]
    return nn.Sequential(*layers, nn.Conv2d(n, shape[0], 3, padding=1))


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


CASES: dict[str, Autoencoder] = {
    "FC-10, width 512": FullyConnected(width=512),
    "U-Net 16-32-64-256": UNet(channels=(16, 32, 64, 256), convolutions=1, skips=False),
}


def weights_of(model: Model, n_networks: int) -> list[Weights]:
    """Untrained networks, R = 1 each."""
    return [
        initial_weights(model, [seeded_generator(0, run, "victim")], dtype=torch.float32)
        for run in range(n_networks)
    ]


def images_of(n_networks: int) -> Tensor:
    """Training images of the networks."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n_networks, N_IMAGES, *SHAPE, generator=generator)


def recovery(case: str, repeats: int, *, n_alternations: int, one_in: int) -> Measurement:
    """Seconds per degraded image; one by one only every so many-th is recovered."""
    method = UnknownMask(
        n_alternations=n_alternations,
        stop_times=n_alternations + 1,
        start="random" if isinstance(CASES[case], FullyConnected) else "nothing",
    )
    model, (images,) = CASES[case].on(SHAPE), images_of(1)
    (weights,) = weights_of(model, 1)
    masks = [
        mask_pattern(name, *SHAPE[1:], generator=seeded_generator(0, k, "mask"))
        for k, name in enumerate(MASKS)
    ]
    y = torch.cat([degrade(images, mask) for mask in masks])

    @torch.no_grad()
    def f(x: Tensor) -> Tensor:
        return model.forward(weights, x.unsqueeze(0))[0]

    def recovered(rows: range) -> tuple[Tensor, Tensor]:
        generators = tuple(seeded_generator(0, row, "start") for row in rows)
        found = method.recover(f, Degraded(y=y[list(rows)], generators=generators))
        return torch.cat([found.x.flatten(1), found.mask.flatten(1)], 1), found.n_applied

    return batched(
        "autoencoder",
        lambda n_steps: (
            f"recovery of a degraded image, {case}, {N_IMAGES} images x {len(MASKS)} masks, "
            f"{n_steps} evaluations of f each, float32, {torch.get_num_threads()} threads"
        ),
        recovered,
        n=len(y),
        one_in=one_in,
        n_checked=6,
        repeats=repeats,
    )


def training(
    case: str, n_networks: int, repeats: int, *, n_epochs: int, fused: bool
) -> Measurement:
    """Seconds per epoch of all networks."""
    settings = AutoencoderTraining(epochs=n_epochs, levels=(1e-30,))
    model, x = CASES[case].on(SHAPE), images_of(n_networks)
    starts = weights_of(model, n_networks)

    def ours(run: int, settings: AutoencoderTraining) -> Weights:
        (trained,) = train_autoencoders(model, starts[run], x[run : run + 1], training=settings)
        return trained.last.weights

    def theirs(run: int, settings: AutoencoderTraining) -> torch.nn.Module:
        module = plain_module(CASES[case], SHAPE)
        load(module, starts[run])
        plain_train(module, x[run], settings, fused=fused)
        return module

    few = AutoencoderTraining(epochs=3, levels=(1e-30,))
    trained, plain = ours(0, few), theirs(0, few)
    with torch.no_grad():
        check_agreement(model.forward(trained, x[:1])[0], plain(x[0]))
    adam = "torch.optim.Adam(fused=True)" if fused else "torch.optim.Adam"
    networks = f"{n_networks} networks" if n_networks > 1 else "1 network"
    return compared(
        "autoencoder",
        f"training epoch, {case}, {networks}, {N_IMAGES} images each, float32, "
        f"{torch.get_num_threads()} threads",
        ours=lambda: side_by_side([partial(ours, run, settings) for run in range(n_networks)], CPU),
        reference=f"torch.nn.Module and {adam}, one network after another",
        theirs=lambda: [theirs(run, settings) for run in range(n_networks)],
        repeats=repeats,
        per_call=n_epochs,
    )


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds per recovered image and per training epoch."""
    repeats = 2 if quick else 7
    for case in CASES:
        yield recovery(case, repeats, n_alternations=1 if quick else 2, one_in=50 if quick else 10)
    for case in CASES:
        for n_networks in (1, 2):
            for fused in (False, True):
                yield training(case, n_networks, repeats, n_epochs=5 if quick else 30, fused=fused)


if __name__ == "__main__":
    main(measure)
