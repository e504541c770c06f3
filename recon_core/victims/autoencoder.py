"""Autoencoders that get attacked: fully connected ones and U-Nets; R of them stacked.

Autoencoder paper, appendix C, whose drawings give neither widths nor channels: those are settings
here. One departure: the last layer is linear, so that a pixel of exactly 0 or 1 is as easy to fit
as any other.

`FullyConnected` and `UNet` are settings; `.on(shape)` is the network on images of one shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recon_core.strict import Count, Strict, Within

Shape = tuple[int, int, int]
Activation = Literal["leaky_relu", "prelu", "softplus"]
Weights = dict[str, Tensor]
PRELU_START = 0.25
"""The slope that a PReLU starts from (He et al. 2015)."""
ROWS_FOR_ONEDNN = 16
"""Images from which on oneDNN's dense layers are faster than MKL's (2 to 3 times for 50 images and
more, on one core of an AMD processor with AVX-512)."""
PIXELS_AT_ONCE = 64 << 10
"""Pixels of a network's images that go through a U-Net together on a CPU, while its activations are
in the cache (300 images of 32x32 in 0.24 s, all at once in 0.36 s)."""


@dataclass(frozen=True, kw_only=True)
class FullyConnected(Strict):
    """Dense layers, `depth`, with biases, hidden ones `width` wide (autoencoder paper, figure C.1).

    `init`: "torch" is what torch's own layers start from, uniform in +-1/sqrt(fan in): a layer with
    ReLUs then passes on a sixth of a signal's power, and 20 of them hardly learn. "kaiming" is He's
    for ReLUs, uniform in +-sqrt(6 / fan in), with biases of 0.
    """

    kind: Literal["fc"] = "fc"
    depth: Annotated[int, Within("[2, inf)", fix="the autoencoder paper has 10 and 20")] = 10
    width: Count = 1024
    activation: Activation = "leaky_relu"
    leak: Annotated[float, Within("[0, 1)", fix="torch's default is 0.01")] = 0.01
    init: Literal["torch", "kaiming"] = "torch"

    def on(self, shape: Shape) -> FullyConnectedModel:
        return FullyConnectedModel(self, shape)


@dataclass(frozen=True, kw_only=True)
class UNet(Strict):
    """A U-Net of 3x3 convolutions (autoencoder paper, figure C.2; Ronneberger et al. 2015).

    One level per entry of `channels`, each of `convolutions`, from the image's resolution
    downwards: a 2x2 maximum on the way down, nearest neighbours on the way up. `skips`: the way up
    also sees what the way down had at its resolution.
    """

    kind: Literal["unet"] = "unet"
    channels: tuple[int, ...] = (64, 128, 256)
    convolutions: Count = 2
    skips: bool = True
    activation: Activation = "leaky_relu"
    leak: Annotated[float, Within("[0, 1)", fix="torch's default is 0.01")] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.channels or min(self.channels) < 1:
            raise ValueError(
                f"channels={self.channels} must name at least one level, each 1 or more"
            )

    def on(self, shape: Shape) -> UNetModel:
        """This network for images (c, h, w); ValueError if they cannot be halved often enough."""
        return UNetModel(self, shape)


Autoencoder = FullyConnected | UNet


@dataclass(frozen=True)
class FullyConnectedModel:
    """f(x) = W_L a(W_{L-1} ... a(W_1 x + b_1) ...) + b_L; tensors `0.weight`, `0.bias`, `0.slope`,
    `1.weight`, ..., where only PReLUs have slopes."""

    network: FullyConnected
    shape: Shape

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        network, d = self.network, math.prod(self.shape)
        sizes = [d, *[network.width] * (network.depth - 1), d]
        shapes: dict[str, tuple[int, ...]] = {}
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            shapes |= {f"{i}.weight": (fan_out, fan_in), f"{i}.bias": (fan_out,)}
            if network.activation == "prelu" and i < network.depth - 1:
                shapes[f"{i}.slope"] = ()
        return shapes

    def forward(
        self, weights: Mapping[str, Tensor], x: Float[Tensor, "r n c h w"]
    ) -> Float[Tensor, "r n c h w"]:
        a = x.flatten(2)
        for i in range(self.network.depth):
            if i:
                a = activate(self.network, a, weights.get(f"{i - 1}.slope"))
            weight, bias = weights[f"{i}.weight"], weights[f"{i}.bias"]
            if has_onednn(a) and a.shape[1] >= ROWS_FOR_ONEDNN:
                rows = zip(a, weight, bias, strict=True)
                own = [F.linear(one.to_mkldnn(), w, b).to_dense() for one, w, b in rows]
                a = own[0].unsqueeze(0) if len(own) == 1 else torch.stack(own)
            else:
                a = torch.baddbmm(bias.unsqueeze(1), a, weight.mT)
        return a.view_as(x)


@dataclass(frozen=True)
class UNetModel:
    """Convolutions `down.LEVEL.NUMBER`, `up.LEVEL.NUMBER` and `out`, with `.weight`, `.bias`, and
    `.slope` of PReLUs. R networks are one grouped convolution."""

    network: UNet
    shape: Shape

    def __post_init__(self) -> None:
        halved = 2 ** (len(self.network.channels) - 1)
        if any(side % halved for side in self.shape[1:]):
            raise ValueError(
                f"images of {self.shape[1]}x{self.shape[2]} cannot be halved "
                f"{len(self.network.channels) - 1} times; give channels fewer levels, or pictures "
                f"whose sides are multiples of {halved}"
            )

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, n_in, n_out in self._convolutions():
            shapes |= {f"{name}.weight": (n_out, n_in, 3, 3), f"{name}.bias": (n_out,)}
            if self.network.activation == "prelu" and name != "out":
                shapes[f"{name}.slope"] = ()
        return shapes

    def _convolutions(self) -> Iterator[tuple[str, int, int]]:
        network, n = self.network, self.shape[0]
        levels = range(len(network.channels))
        for level in levels:
            for k in range(network.convolutions):
                yield f"down.{level}.{k}", n, network.channels[level]
                n = network.channels[level]
        for level in reversed(levels[:-1]):
            n += network.channels[level] if network.skips else 0
            for k in range(network.convolutions):
                yield f"up.{level}.{k}", n, network.channels[level]
                n = network.channels[level]
        yield "out", n, self.shape[0]

    def forward(
        self, weights: Mapping[str, Tensor], x: Float[Tensor, "r n c h w"]
    ) -> Float[Tensor, "r n c h w"]:
        if x.device.type != "cpu":
            return self._at_once(weights, x)
        n_rows = max(1, PIXELS_AT_ONCE // math.prod(self.shape[1:]))
        parts = [self._at_once(weights, part) for part in x.split(n_rows, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _at_once(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        n_levels = len(self.network.channels)
        a = _laid_out(x.transpose(0, 1).flatten(1, 2))
        kept: list[Tensor] = []
        for level in range(n_levels):
            if level:
                kept.append(a)
                a = F.max_pool2d(a, 2)
            a = self._level(weights, f"down.{level}", a)
        for level in reversed(range(n_levels - 1)):
            a = F.interpolate(a, scale_factor=2, mode="nearest")
            if self.network.skips:
                pair = [t.unflatten(1, (len(x), -1)) for t in (a, kept[level])]
                a = _laid_out(torch.cat(pair, dim=2).flatten(1, 2))
            a = self._level(weights, f"up.{level}", a)
        images: Tensor = _convolve(weights, "out", a).contiguous().unflatten(1, (len(x), -1))
        return images.transpose(0, 1)

    def _level(self, weights: Mapping[str, Tensor], name: str, a: Tensor) -> Tensor:
        for k in range(self.network.convolutions):
            z = _convolve(weights, f"{name}.{k}", a)
            slope = weights.get(f"{name}.{k}.slope")
            if slope is not None:  # one per network, for all its channels
                channels = z.shape[1] // len(slope)
                slope = slope.repeat_interleave(channels).view(1, -1, 1, 1)
            a = activate(self.network, z, slope)
        return a


Model = FullyConnectedModel | UNetModel


def activate(network: Autoencoder, z: Tensor, slope: Tensor | None) -> Tensor:
    """The activation; of a PReLU, `slope` is one number per network, or what z can be multiplied
    with."""
    if network.activation == "softplus":
        return F.softplus(z)
    if network.activation == "leaky_relu":
        return F.leaky_relu(z, network.leak)
    assert slope is not None
    by_network = slope.view(-1, *[1] * (z.dim() - 1)) if slope.dim() == 1 else slope
    return torch.where(z > 0, z, by_network * z)


def initial_weights(
    model: Model, generators: Sequence[torch.Generator], *, dtype: torch.dtype
) -> Weights:
    """Starts of R trainings, one generator each: uniform in +-1/sqrt(fan in), or as a fully
    connected network's `init` says; PReLUs at .25. Drawn on the CPU in float32, layer by layer."""
    kaiming = isinstance(model, FullyConnectedModel) and model.network.init == "kaiming"
    networks = []
    for generator in generators:
        weights: Weights = {}
        fan_in = 1
        for name, shape in model.tensor_shapes.items():
            if name.endswith(".slope"):
                weights[name] = torch.tensor(PRELU_START)
                continue
            if name.endswith(".weight"):
                fan_in = math.prod(shape[1:])
            weights[name] = (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(fan_in)
            if kaiming:
                weights[name] *= math.sqrt(6) if name.endswith(".weight") else 0.0
        networks.append(weights)
    return stacked(networks, dtype)


def stacked(networks: Sequence[Weights], dtype: torch.dtype) -> Weights:
    """The weights of one network each as those of R."""
    return {name: torch.stack([w[name] for w in networks]).to(dtype) for name in networks[0]}


def single(model: Model, state: Mapping[str, Tensor]) -> Weights:
    """The weights (R = 1) of a state dict; ValueError if it is of another network. A PReLU's slope
    may be of shape (), as ours, or (1,), as torch's."""
    shapes = model.tensor_shapes
    ours = {n: t.reshape(()) for n, t in state.items() if n.endswith(".slope") and t.numel() == 1}
    state = {**state, **ours}
    wrong = [n for n in shapes if n in state and tuple(state[n].shape) != shapes[n]]
    missing, unknown = sorted(set(shapes) - set(state)), sorted(set(state) - set(shapes))
    if missing or unknown:
        raise ValueError(
            f"these are not the weights of {model}: missing {missing[:3]}, unknown {unknown[:3]}"
        )
    if wrong:
        raise ValueError(
            f"{wrong[0]} is {tuple(state[wrong[0]].shape)}, the network has {shapes[wrong[0]]}"
        )
    return {name: state[name].unsqueeze(0) for name in shapes}


def n_parameters(model: Model) -> int:
    return sum(math.prod(shape) for shape in model.tensor_shapes.values())


def _laid_out(a: Float[Tensor, "n k h w"]) -> Float[Tensor, "n k h w"]:
    """The same numbers, for oneDNN channels last: its convolutions are then twice as fast, and the
    layers between them keep that."""
    return a.contiguous(memory_format=torch.channels_last) if has_onednn(a) else a


def has_onednn(x: Tensor) -> bool:
    """True if oneDNN computes with this: float32 on a CPU."""
    return (
        x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )


def _convolve(weights: Mapping[str, Tensor], name: str, a: Tensor) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return F.conv2d(a, weight.flatten(0, 1), bias.flatten(), padding=1, groups=len(weight))
