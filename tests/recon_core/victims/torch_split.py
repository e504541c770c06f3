"""The same split networks of torch's own layers, with the tensors of one network of a stack."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Tensor, nn

from recon_core.victims.split import LeNet5, SplitMLP, SplitNetwork


def lenet5(
    cut: int, channels: int, side: int, n_classes: int
) -> tuple[nn.Sequential, nn.Sequential]:
    """h and g, for square images."""
    padding = 2 if side == 28 else 0
    last = ((side + 2 * padding - 4) // 2 - 4) // 2
    blocks = [
        [nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.Flatten(), nn.Linear(16 * last * last, 120), nn.ReLU()],
        [nn.Linear(120, 84), nn.ReLU()],
        [nn.Linear(84, n_classes)],
    ]
    return _halves(blocks, cut)


def mlp(settings: SplitMLP, d: int, n_classes: int) -> tuple[nn.Sequential, nn.Sequential]:
    """h and g, for images of d numbers."""
    sizes = [d, *settings.widths]
    blocks: list[list[nn.Module]] = [
        [nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(sizes)
    ]
    blocks[0].insert(0, nn.Flatten())
    return _halves([*blocks, [nn.Linear(sizes[-1], n_classes)]], settings.cut)


def _halves(blocks: list[list[nn.Module]], cut: int) -> tuple[nn.Sequential, nn.Sequential]:
    h, g = itertools.chain(*blocks[:cut]), itertools.chain(*blocks[cut:])
    return nn.Sequential(*h), nn.Sequential(*g)


def torch_split(
    settings: SplitNetwork,
    shape: tuple[int, int, int],
    n_classes: int,
    weights: Mapping[str, Tensor],
    run: int = 0,
) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """h, g, and their leaves under our names."""
    if isinstance(settings, LeNet5):
        h, g = lenet5(settings.cut, shape[0], shape[1], n_classes)
    else:
        h, g = mlp(settings, shape[0] * shape[1] * shape[2], n_classes)
    layers = [layer for part in (h, g) for layer in part.modules() if isinstance(layer, nn.Linear)]
    convolutions = [
        layer for part in (h, g) for layer in part.modules() if isinstance(layer, nn.Conv2d)
    ]
    named = [(f"conv{i}", layer) for i, layer in enumerate(convolutions, start=1)]
    named += [(f"fc{i}", layer) for i, layer in enumerate(layers, start=1)]
    leaves: dict[str, Tensor] = {}
    for name, layer in named:
        leaves |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
    assert set(leaves) == set(weights)
    for name, leaf in leaves.items():
        assert leaf.shape == weights[name].shape[1:]
        leaf.data = weights[name][run].detach().clone()
    return h, g, leaves
