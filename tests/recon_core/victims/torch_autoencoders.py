"""The same autoencoders of torch's own layers, with the tensors of one network of a stack."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recon_core.victims.autoencoder import Autoencoder, FullyConnected, Shape, UNet


def activation(settings: Autoencoder) -> nn.Module:
    if settings.activation == "softplus":
        return nn.Softplus()
    return nn.PReLU() if settings.activation == "prelu" else nn.LeakyReLU(settings.leak)


def fully_connected(settings: FullyConnected, shape: Shape) -> tuple[nn.Module, dict[str, Tensor]]:
    """The network, and its own leaves under our names."""
    d = shape[0] * shape[1] * shape[2]
    linears = [nn.Linear(d, settings.width)]
    linears += [nn.Linear(settings.width, settings.width) for _ in range(settings.depth - 2)]
    linears.append(nn.Linear(settings.width, d))
    layers: list[nn.Module] = [nn.Flatten()]
    names: dict[str, Tensor] = {}
    for i, linear in enumerate(linears):
        layers.append(linear)
        names |= {f"{i}.weight": linear.weight, f"{i}.bias": linear.bias}
        if i < settings.depth - 1:
            layers.append(activation(settings))
            names |= {f"{i}.slope": p for p in layers[-1].parameters()}
    return nn.Sequential(*layers, nn.Unflatten(1, shape)), names


class TorchUNet(nn.Module):
    """As many levels as the settings say."""

    def __init__(self, settings: UNet, shape: Shape) -> None:
        super().__init__()
        self.settings = settings
        c, w = settings.channels, settings.convolutions
        self.down = nn.ModuleList()
        n = shape[0]
        for width in c:
            self.down.append(self.level(n, width, w))
            n = width
        self.up = nn.ModuleDict()
        for level in range(len(c) - 2, -1, -1):
            n_in = c[level + 1] + (c[level] if settings.skips else 0)
            self.up[str(level)] = self.level(n_in, c[level], w)
        self.out = nn.Conv2d(c[0], shape[0], 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")

    def level(self, n_in: int, n_out: int, n_convolutions: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for k in range(n_convolutions):
            layers.append(nn.Conv2d(n_in if k == 0 else n_out, n_out, 3, stride=1, padding=1))
            layers.append(activation(self.settings))
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.down[0](x)]
        for down in list(self.down)[1:]:
            seen.append(down(self.pool(seen[-1])))
        a = seen.pop()
        for level in reversed(range(len(seen))):
            a = self.grow(a)
            if self.settings.skips:
                a = torch.cat([a, seen[level]], dim=1)
            a = self.up[str(level)](a)
        out: Tensor = self.out(a)
        return out

    def names(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        levels = [(f"down.{i}", level) for i, level in enumerate(self.down)]
        levels += [(f"up.{i}", level) for i, level in self.up.items()]
        for name, level in levels:
            for i, part in enumerate(level):
                if isinstance(part, nn.Conv2d):
                    found |= {f"{name}.{i // 2}.weight": part.weight}
                    found |= {f"{name}.{i // 2}.bias": part.bias}
                else:
                    found |= {f"{name}.{i // 2}.slope": p for p in part.parameters()}
        return found | {"out.weight": self.out.weight, "out.bias": self.out.bias}


def torch_autoencoder(
    settings: Autoencoder, shape: Shape, weights: Mapping[str, Tensor], run: int = 0
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A network of torch with the tensors of one of a stack, and its leaves under our names."""
    if isinstance(settings, UNet):
        unet = TorchUNet(settings, shape)
        net: nn.Module = unet
        names = unet.names()
    else:
        net, names = fully_connected(settings, shape)
    assert set(names) == set(weights)
    assert len(names) == len(list(net.parameters()))
    net.to(weights[next(iter(names))].dtype)
    for name, leaf in names.items():
        leaf.data = leaf.data.to(weights[name].dtype)
        leaf.data.copy_(weights[name][run].view_as(leaf))
    return net, names
