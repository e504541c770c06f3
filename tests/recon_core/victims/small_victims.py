"""Three tiny victims with different images, to train in the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.types import seeded_generator
from recon_core.victims.network import Architecture, Network, Parameters
from recon_core.victims.noisy_training import Noise, train_with_noise
from recon_core.victims.training import Trained, Training, train

R, N, SHAPE = 3, 8, (1, 4, 5)
GD = Optimiser(rule="gd", lr=0.1, momentum=0.5)
ADAM = Optimiser(rule="adam", lr=0.01)


def architecture(n_outputs: int = 1, **settings: object) -> Architecture:
    network = Network(widths=(7, 5), init_std_first=0.3, init_rest="torch")
    return replace(network, **settings).on(SHAPE, n_outputs)  # type: ignore[arg-type]


def victims(arch: Architecture, dtype: torch.dtype = torch.float64) -> Parameters:
    return arch.initial([seeded_generator(0, run, "victim") for run in range(R)], dtype=dtype)


def order() -> list[torch.Generator]:
    return [seeded_generator(0, run, "minibatches") for run in range(R)]


def data(n_outputs: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Images and labels of R runs; one blob per label, well apart."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(R, N, 20, generator=generator) / 4
    if n_outputs > 1:
        y = (torch.arange(N) % n_outputs).expand(R, N)
        return x.scatter_add(2, y[..., None], torch.ones(R, N, 1)).to(dtype), y
    y = torch.tensor([-1.0, 1.0]).repeat(N // 2).expand(R, N)
    x[..., 0] += y
    return x.to(dtype), y.to(dtype)


def trained(
    arch: Architecture,
    training: Training,
    noise: Noise | None = None,
    *,
    parameters: Parameters | None = None,
    given: tuple[Tensor, Tensor] | None = None,
    **more: Any,
) -> Trained:
    """The victims, on `data`, by either way of training."""
    weights = victims(arch) if parameters is None else parameters
    x, y = data(arch.n_outputs, weights.weights[0].dtype) if given is None else given
    how: dict[str, Any] = {"training": training, "generators": order()[: len(x)]} | more
    if noise is None:
        return train(arch, weights, x, y, **how)
    return train_with_noise(arch, weights, x, y, noise=noise, **how)


def wild(parameters: Parameters, run: int = 1) -> Parameters:
    """One victim that overflows at once."""
    copy = parameters.map(lambda tensor: tensor.clone())
    for w in copy.weights:
        w[run] *= 1e30 if w.dtype == torch.float32 else 1e250
    return copy


def assert_same(one: Trained, other: Trained) -> None:
    """Bit for bit, but for which NaN a NaN is."""
    pairs = list(zip(one.parameters.tensors(), other.parameters.tensors(), strict=True))
    for name in ("loss", "accuracy", "margins", "margin_min", "epochs_done", "diverged"):
        pairs.append((getattr(one, name), getattr(other, name)))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_close(ours: Parameters, theirs: Parameters, tolerance: float) -> None:
    for mine, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance / 100)


def of(trained: Trained, run: int) -> Parameters:
    """One victim of a stack."""
    return trained.parameters.rows(slice(run, run + 1))
