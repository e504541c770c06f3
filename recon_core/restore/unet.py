"""DDPM++: the U-Net of Song et al. 2021 in the configuration of Karras et al. 2022 (EDM, table 7).

Every sum is scaled by sqrt(1/2). `paper` is the published size (55.7 million parameters with a
condition). The smaller ones are ours, for CPUs, with 3.0 (`small`), 1.3 (`mini`) and 0.2 million
(`tiny`): they work on 2x2 patches of pixels. `CompactUNet` is a network for minutes of a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

SKIP_SCALE = math.sqrt(0.5)
GROUP_NORM_EPS = 1e-6
MAX_POSITIONS = 10_000

Resample = Literal["none", "up", "down"]


@dataclass(frozen=True, kw_only=True)
class UNetSize:
    """The hyperparameters of a DDPM++; the defaults are those of EDM for CIFAR-10. `attention_at`:
    the resolutions (feature-map sides) with self-attention. `patch`: side of the pixel patches."""

    n_channels: int = 128
    channel_mult: tuple[int, ...] = (2, 2, 2)
    n_blocks: int = 4
    attention_at: tuple[int, ...] = (16,)
    dropout: float = 0.13
    patch: int = 1


UNetSizeName = Literal["paper", "small", "mini", "tiny"]

UNET_SIZES: dict[UNetSizeName, UNetSize] = {
    "paper": UNetSize(),
    "small": UNetSize(
        n_channels=64, channel_mult=(1, 2), n_blocks=1, attention_at=(8,), dropout=0.0, patch=2
    ),
    "mini": UNetSize(
        n_channels=32, channel_mult=(1, 2, 2), n_blocks=1, attention_at=(8,), dropout=0.05, patch=2
    ),
    "tiny": UNetSize(
        n_channels=16, channel_mult=(1, 1, 2), n_blocks=1, attention_at=(), dropout=0.0, patch=2
    ),
}


class UNet(nn.Module):
    """F(x; c_noise, labels): (n, in_channels, h, w) -> (n, out_channels, h, w). `n_labels`
    conditioning labels enter the embedding through a linear map without bias. The parameters are
    uninitialised until `initialise` is called."""

    def __init__(
        self,
        size: UNetSize,
        *,
        in_channels: int,
        out_channels: int,
        n_labels: int,
        resolution: int = 32,
    ) -> None:
        super().__init__()
        n_levels = len(size.channel_mult)
        if resolution % (size.patch * 2 ** (n_levels - 1)):
            raise ValueError(
                f"resolution={resolution} cannot be halved {n_levels - 1} times after patches of "
                f"{size.patch}; use a multiple of {size.patch * 2 ** (n_levels - 1)}"
            )
        self.size = size
        width = size.n_channels
        n_embed = 4 * width
        self.embed_labels = nn.Linear(n_labels, width, bias=False) if n_labels else None
        self.embed_0 = nn.Linear(width, n_embed)
        self.embed_1 = nn.Linear(n_embed, n_embed)

        def block(n_in: int, n_out: int, *, attend: bool, resample: Resample = "none") -> Block:
            return Block(
                n_in, n_out, n_embed, attend=attend, resample=resample, dropout=size.dropout
            )

        sides = [resolution // size.patch // 2**level for level in range(n_levels)]
        widths = [width * mult for mult in size.channel_mult]
        self.conv_in = nn.Conv2d(in_channels * size.patch**2, width, 3, padding=1)
        encoder: list[Block] = []
        skips = [width]
        n_now = width
        for level, (side, n_out) in enumerate(zip(sides, widths, strict=True)):
            if level > 0:
                encoder.append(block(n_now, n_now, attend=False, resample="down"))
                skips.append(n_now)
            for _ in range(size.n_blocks):
                encoder.append(block(n_now, n_out, attend=side in size.attention_at))
                n_now = n_out
                skips.append(n_now)
        self.encoder = nn.ModuleList(encoder)
        self.middle = nn.ModuleList(
            [block(n_now, n_now, attend=True), block(n_now, n_now, attend=False)]
        )
        decoder: list[Block] = []
        self.joins: list[bool] = []  # whether a decoder block first takes a skip connection
        for level, (side, n_out) in reversed(list(enumerate(zip(sides, widths, strict=True)))):
            if level < n_levels - 1:
                decoder.append(block(n_now, n_now, attend=False, resample="up"))
                self.joins.append(False)
            for index in range(size.n_blocks + 1):
                attend = index == size.n_blocks and side in size.attention_at
                decoder.append(block(n_now + skips.pop(), n_out, attend=attend))
                self.joins.append(True)
                n_now = n_out
        self.decoder = nn.ModuleList(decoder)
        self.norm_out = _group_norm(n_now)
        self.conv_out = nn.Conv2d(n_now, out_channels * size.patch**2, 3, padding=1)

    def initialise(self, generator: torch.Generator) -> None:
        """Xavier-uniform weights, zero biases; the last layer of every branch almost zero."""
        near_zero = {id(self.conv_out)}
        attention = set()
        for module in self.modules():
            if isinstance(module, Block):
                near_zero.add(id(module.conv_1))
                if module.attention is not None:
                    near_zero.add(id(module.attention.proj))
                    attention.add(id(module.attention.qkv))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                scale = 1e-5 if id(module) in near_zero else 1.0
                scale = math.sqrt(0.2) if id(module) in attention else scale
                nn.init.xavier_uniform_(module.weight, generator=generator)
                with torch.no_grad():
                    module.weight.mul_(scale)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.GroupNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(
        self,
        x: Float[Tensor, "n c h w"],
        c_noise: Float[Tensor, " n"],
        labels: Float[Tensor, "n k"],
    ) -> Float[Tensor, "n d h w"]:
        embedding = position_embedding(c_noise, self.size.n_channels)
        if self.embed_labels is not None:
            embedding = embedding + self.embed_labels(labels)
        embedding = functional.silu(self.embed_0(embedding))
        embedding = functional.silu(self.embed_1(embedding))

        x = self.conv_in(functional.pixel_unshuffle(x, self.size.patch))
        skips = [x]
        for block in self.encoder:
            x = block(x, embedding)
            skips.append(x)
        for block in self.middle:
            x = block(x, embedding)
        for block, joins in zip(self.decoder, self.joins, strict=True):
            x = block(torch.cat([x, skips.pop()], dim=1) if joins else x, embedding)
        x = self.conv_out(functional.silu(self.norm_out(x)))
        return functional.pixel_shuffle(x, self.size.patch)


class Block(nn.Module):
    """One residual block, optionally followed by self-attention (EDM, figure 7 of app. F.3)."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        n_embed: int,
        *,
        attend: bool,
        resample: Resample,
        dropout: float,
    ) -> None:
        super().__init__()
        self.resample = resample
        self.norm_0 = _group_norm(n_in)
        self.conv_0 = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.affine = nn.Linear(n_embed, n_out)
        self.norm_1 = _group_norm(n_out)
        self.dropout = nn.Dropout(dropout)
        self.conv_1 = nn.Conv2d(n_out, n_out, 3, padding=1)
        changes = n_in != n_out or resample != "none"
        self.skip = nn.Conv2d(n_in, n_out, 1) if changes else None
        self.attention = SelfAttention(n_out) if attend else None

    def forward(
        self, x: Float[Tensor, "n c h w"], embedding: Float[Tensor, "n e"]
    ) -> Float[Tensor, "n d hh ww"]:
        branch = self._resampled(functional.silu(self.norm_0(x)))
        branch = self.conv_0(branch) + self.affine(embedding)[:, :, None, None]
        branch = self.conv_1(self.dropout(functional.silu(self.norm_1(branch))))
        x = self._resampled(x) if self.skip is None else self.skip(self._resampled(x))
        x = (x + branch) * SKIP_SCALE
        return x if self.attention is None else (x + self.attention(x)) * SKIP_SCALE

    def _resampled(self, x: Tensor) -> Tensor:
        if self.resample == "down":
            return functional.avg_pool2d(x, 2)
        if self.resample == "up":
            return functional.interpolate(x, scale_factor=2, mode="nearest")
        return x


class SelfAttention(nn.Module):
    """One head of self-attention over all positions; returns the branch, without the sum."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.norm = _group_norm(n_channels)
        self.qkv = nn.Conv2d(n_channels, 3 * n_channels, 1)
        self.proj = nn.Conv2d(n_channels, n_channels, 1)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        n, c, h, w = x.shape
        qkv = self.qkv(self.norm(x)).permute(0, 2, 3, 1).reshape(n, 1, h * w, 3 * c)
        q, k, v = qkv.chunk(3, dim=3)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.proj(mixed.view(n, h, w, c).permute(0, 3, 1, 2))
        return projected


def position_embedding(position: Float[Tensor, " n"], n_channels: int) -> Float[Tensor, "n c"]:
    """[sin, cos](position * 10000^(-i / (C/2 - 1))) for i = 0 .. C/2 - 1."""
    half = n_channels // 2
    index = torch.arange(half, dtype=torch.float32, device=position.device)
    frequency = MAX_POSITIONS ** -(index / (half - 1))
    phase = torch.outer(position.float(), frequency)
    return torch.cat([phase.sin(), phase.cos()], dim=1)


def built(make: Callable[[], Any], *, seed: int) -> Any:
    """A freshly initialised network, on the CPU; the same seed gives the same weights."""
    with torch.device("meta"):
        net = make()
    net.to_empty(device="cpu")
    net.initialise(torch.Generator().manual_seed(seed))
    return net.to(memory_format=torch.channels_last)


class CompactUNet(nn.Module):
    """A small U-Net: a residual block for every level on the way down and on the way up, sums for
    skips, and a path through the mean over all positions. It works on patches of pixels, and sees
    the level of noise as one more channel."""

    def __init__(self, n_in: int, n_out: int, widths: tuple[int, ...], patch: int) -> None:
        super().__init__()
        self.patch = patch
        pairs = list(pairwise(widths))
        self.first = nn.Conv2d((n_in + 1) * patch**2, widths[0], 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(nn.Conv2d(b, a, 1) for a, b in pairs)
        self.descent, self.ascent = (nn.ModuleList(map(Residual, widths)) for _ in range(2))
        self.mean = nn.Sequential(nn.Linear(widths[-1], widths[-1]), nn.SiLU(),
                                  nn.Linear(widths[-1], widths[-1]))  # fmt: skip
        self.last = nn.Conv2d(widths[0], n_out * patch**2, 3, padding=1)

    def forward(
        self, x: Float[Tensor, "n c h w"], noise: Float[Tensor, " n"], _labels: Tensor
    ) -> Float[Tensor, "n o h w"]:
        h, w = x.shape[2:]
        unit = self.patch * 2 ** len(self.down)
        x = torch.cat([x, noise[:, None, None, None].expand(-1, 1, h, w)], 1)
        x = functional.pad(x, (0, -w % unit, 0, -h % unit), mode="replicate")
        x, kept = self.first(functional.pixel_unshuffle(x, self.patch)), []
        for level, block in enumerate(self.descent):
            x = block(x if level == 0 else self.down[level - 1](x))
            kept.append(x)
        x = x + self.mean(x.mean((2, 3)))[:, :, None, None]
        for level in reversed(range(len(kept))):
            if level < len(kept) - 1:
                x = kept[level] + functional.interpolate(self.up[level](x), scale_factor=2)
            x = self.ascent[level](x)
        answer: Tensor = functional.pixel_shuffle(self.last(functional.silu(x)), self.patch)
        return answer[:, :, :h, :w]

    def initialise(self, generator: torch.Generator) -> None:
        """As torch does, from a generator."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_uniform_(module.weight, math.sqrt(5), generator=generator)
                if module.bias is not None:
                    bound = module.weight[0].numel() ** -0.5
                    nn.init.uniform_(module.bias, -bound, bound, generator=generator)


class Residual(nn.Module):
    """x plus two convolutions behind norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(functional.silu(norm(y)))
        return x + y


class UncastGroupNorm(nn.GroupNorm):
    """A group norm in its weights' dtype, also where autocast on a CPU would take bfloat16, as
    CUDA's does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def _group_norm(n_channels: int) -> nn.GroupNorm:
    """At most 32 groups of at least 4 channels."""
    n_groups = min(32, n_channels // 4)
    return UncastGroupNorm(n_groups, n_channels, eps=GROUP_NORM_EPS)
