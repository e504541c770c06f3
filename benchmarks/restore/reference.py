"""Both restorers as one would write them from the papers: plain modules, channels first, eager.

`ReferenceUNet` is DDPM++ (Karras et al. 2022, table 7) and `ReferenceDnCNN` is BF-DnCNN (Mohan et
al. 2020). They carry the names of our parameters, so that `load_state_dict` takes ours, and share
no code with them: attention is a softmax of products, the bias-free normalisation divides as the
paper says it, Adam is torch's loop over the parameters and the average is taken tensor by tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recon_core.restore import BFDnCNN, Examples, PaperRestorer, Training
from recon_core.restore.edm import EDM
from recon_core.restore.regression import BATCH_NORM_EPS, BATCH_NORM_MOMENTUM
from recon_core.restore.unet import UNET_SIZES, UNetSize
from recon_core.types import N_AUGMENT


class ReferenceAttention(nn.Module):
    """softmax(q k / sqrt(C)) v over all positions, one head."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.norm = norm_layer(n_channels)
        self.qkv = nn.Conv2d(n_channels, 3 * n_channels, 1)
        self.proj = nn.Conv2d(n_channels, n_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, 3, c, h * w).unbind(1)
        weights = torch.softmax(torch.einsum("ncq,nck->nqk", q, k) / math.sqrt(c), dim=2)
        return cast(Tensor, self.proj(torch.einsum("nqk,nck->ncq", weights, v).view(n, c, h, w)))


class ReferenceBlock(nn.Module):
    """norm, SiLU, convolution, embedding; norm, SiLU, dropout, convolution; sum; attention."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        n_embed: int,
        *,
        attend: bool,
        resample: str,
        dropout: float,
    ) -> None:
        super().__init__()
        self.resample, self.dropout = resample, dropout
        self.norm_0, self.norm_1 = norm_layer(n_in), norm_layer(n_out)
        self.conv_0 = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.conv_1 = nn.Conv2d(n_out, n_out, 3, padding=1)
        self.affine = nn.Linear(n_embed, n_out)
        self.skip = nn.Conv2d(n_in, n_out, 1) if n_in != n_out or resample else None
        self.attention = ReferenceAttention(n_out) if attend else None

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        hidden = self.conv_0(self.resized(F.silu(self.norm_0(x))))
        hidden = hidden + self.affine(embedding).view(*hidden.shape[:2], 1, 1)
        hidden = F.dropout(F.silu(self.norm_1(hidden)), self.dropout, self.training)
        x = self.resized(x) if self.skip is None else self.skip(self.resized(x))
        x = (x + self.conv_1(hidden)) / math.sqrt(2)
        return x if self.attention is None else (x + self.attention(x)) / math.sqrt(2)

    def resized(self, x: Tensor) -> Tensor:
        """x at half or double the resolution, or as it is."""
        if self.resample == "down":
            return F.avg_pool2d(x, 2)
        if self.resample == "up":
            return F.interpolate(x, scale_factor=2.0, mode="nearest")
        return x


class ReferenceUNet(nn.Module):
    """F(x; c_noise, labels) of `size`."""

    def __init__(self, size: UNetSize, resolution: int) -> None:
        super().__init__()
        self.size = size
        width, patch = size.n_channels, size.patch
        n_levels, n_embed = len(size.channel_mult), 4 * width
        self.embed_labels = nn.Linear(N_AUGMENT, width, bias=False)
        self.embed_0, self.embed_1 = nn.Linear(width, n_embed), nn.Linear(n_embed, n_embed)
        self.conv_in = nn.Conv2d(6 * patch**2, width, 3, padding=1)

        def block(n_in: int, n_out: int, attend: bool, resample: str = "") -> ReferenceBlock:
            return ReferenceBlock(
                n_in, n_out, n_embed, attend=attend, resample=resample, dropout=size.dropout
            )

        def attends(level: int) -> bool:
            return resolution // patch // 2**level in size.attention_at

        widths = [width * factor for factor in size.channel_mult]
        encoder, skips, now = [], [width], width
        for level, out in enumerate(widths):
            if level:
                encoder.append(block(now, now, False, "down"))
                skips.append(now)
            for _ in range(size.n_blocks):
                encoder.append(block(now, out, attends(level)))
                skips.append(now := out)
        middle = [block(now, now, True), block(now, now, False)]
        decoder = []
        for level in reversed(range(n_levels)):
            if level < n_levels - 1:
                decoder.append(block(now, now, False, "up"))
            for index in range(size.n_blocks + 1):
                attend = attends(level) and index == size.n_blocks
                decoder.append(block(now + skips.pop(), widths[level], attend))
                now = widths[level]
        self.encoder, self.middle = nn.ModuleList(encoder), nn.ModuleList(middle)
        self.decoder = nn.ModuleList(decoder)
        self.norm_out = norm_layer(now)
        self.conv_out = nn.Conv2d(now, 3 * patch**2, 3, padding=1)

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        half = self.size.n_channels // 2
        frequency = 10_000 ** -(torch.arange(half, device=x.device) / (half - 1))
        phase = c_noise[:, None] * frequency
        embedding = torch.cat([phase.sin(), phase.cos()], 1).to(x.dtype) + self.embed_labels(labels)
        embedding = F.silu(self.embed_1(F.silu(self.embed_0(embedding))))
        x = self.conv_in(F.pixel_unshuffle(x, self.size.patch))
        skips = [x]
        for block in self.encoder:
            skips.append(x := block(x, embedding))
        for block in self.middle:
            x = block(x, embedding)
        for block in self.decoder:
            if cast(ReferenceBlock, block).resample != "up":
                x = torch.cat([x, skips.pop()], 1)
            x = block(x, embedding)
        return F.pixel_shuffle(self.conv_out(F.silu(self.norm_out(x))), self.size.patch)


def norm_layer(n_channels: int) -> nn.GroupNorm:
    """At most 32 groups of at least 4 channels."""
    return nn.GroupNorm(min(32, n_channels // 4), n_channels, eps=1e-6)


class ReferenceNorm(nn.Module):
    """Batch normalisation that divides by the deviation and adds nothing."""

    running_var: Tensor

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(n_channels))
        self.register_buffer("running_var", torch.ones(n_channels))

    def forward(self, y: Tensor) -> Tensor:
        var = self.running_var
        if self.training:
            var = y.transpose(0, 1).flatten(1).var(dim=1)
            old = (1 - BATCH_NORM_MOMENTUM) * self.running_var
            self.running_var = old + BATCH_NORM_MOMENTUM * var.detach()
        y = y / (var.sqrt() + BATCH_NORM_EPS).view(1, -1, 1, 1)
        return self.gamma.view(1, -1, 1, 1) * y


class ReferenceDnCNN(nn.Module):
    """x - r(x), convolution by convolution."""

    def __init__(self, depth: int, n_channels: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        n_pixel = 3 * patch**2

        def convolution(n_in: int, n_out: int) -> nn.Conv2d:
            return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)

        self.first = convolution(n_pixel, n_channels)
        inner = [convolution(n_channels, n_channels) for _ in range(depth - 2)]
        self.convolutions = nn.ModuleList(inner)
        self.norms = nn.ModuleList(ReferenceNorm(n_channels) for _ in inner)
        self.last = convolution(n_channels, n_pixel)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(F.pixel_unshuffle(x, self.patch)))
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            hidden = F.relu(norm(convolution(hidden)))
        return x - F.pixel_shuffle(self.last(hidden), self.patch)


def reference_net(restorer: PaperRestorer, state: dict[str, Tensor]) -> nn.Module:
    """The reference's network of `restorer`'s size with our weights, channels first."""
    net: nn.Module
    if isinstance(restorer, EDM):
        net = ReferenceUNet(UNET_SIZES[restorer.size], restorer.resolution)
    else:
        net = ReferenceDnCNN(restorer.depth, restorer.n_channels, restorer.patch)
    net.load_state_dict(state)
    return net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]


def reference_loss(restorer: PaperRestorer, net: nn.Module, batch: Examples, seed: int) -> Tensor:
    """The loss of either restorer, its noise drawn as ours draws it."""
    if isinstance(restorer, BFDnCNN):
        return F.mse_loss(net(batch.condition), batch.target)
    draw = torch.Generator().manual_seed(seed)
    sigma = torch.exp(restorer.P_mean + restorer.P_std * torch.randn(len(batch), generator=draw))
    sigma = sigma.view(-1, 1, 1, 1)
    x = batch.target + sigma * torch.randn(batch.target.shape, generator=draw)
    D_x = reference_denoise(
        restorer, net, x, sigma, condition=batch.condition, labels=batch.augment
    )
    data = restorer.sigma_data
    weight = (sigma**2 + data**2) / (sigma * data) ** 2
    error: Tensor = weight * (D_x - batch.target) ** 2
    return error.sum() / len(batch)


def reference_denoise(
    edm: EDM, net: nn.Module, x: Tensor, sigma: Tensor, *, condition: Tensor, labels: Tensor
) -> Tensor:
    """D(x; sigma) of EDM's equation 7."""
    data = edm.sigma_data
    deviation = torch.sqrt(sigma**2 + data**2)
    inputs = torch.cat([x / deviation, condition / data], 1)
    F_x: Tensor = net(inputs, torch.log(sigma).flatten() / 4, labels)
    return data**2 / deviation**2 * x + sigma * data / deviation * F_x


@torch.no_grad()
def reference_restore(
    restorer: PaperRestorer, net: nn.Module, pictures: Tensor, noise: Tensor
) -> Tensor:
    """One restoration of each picture; EDM starts from `noise`, in float64, and clips nothing."""
    net.eval()
    condition = 2 * pictures - 1
    if isinstance(restorer, BFDnCNN):
        restored: Tensor = net(condition)
        return ((restored + 1) / 2).clamp(0, 1)
    edm, n = restorer, restorer.n_steps
    high, low = edm.sigma_max ** (1 / edm.rho), edm.sigma_min ** (1 / edm.rho)
    sigmas = [(high + i / (n - 1) * (low - high)) ** edm.rho for i in range(n)]
    labels = torch.zeros(len(pictures), N_AUGMENT)

    def slope(x: Tensor, sigma: float) -> Tensor:
        level = torch.full((len(x), 1, 1, 1), sigma)
        D_x = reference_denoise(edm, net, x.float(), level, condition=condition, labels=labels)
        derivative: Tensor = (x - D_x.double()) / sigma
        return derivative

    x: Tensor = sigmas[0] * noise.double()
    for now, after in zip(sigmas, [*sigmas[1:], 0.0], strict=True):
        first = slope(x, now)
        there = x + (after - now) * first
        if after:
            there = x + (after - now) * (first + slope(there, after)) / 2
        x = there
    return (x.float() + 1) / 2


@dataclass
class ReferenceFit:
    """A training step by step: loss, backward, Adam, the average."""

    restorer: PaperRestorer
    training: Training
    net: nn.Module
    ema: nn.Module
    step: int = 0

    def __post_init__(self) -> None:
        self.optimiser = torch.optim.Adam(
            self.net.parameters(), lr=self.training.lr, foreach=False, fused=False
        )

    def update(self, batch: Examples, seed: int) -> float:
        """One step; `seed` draws the noise."""
        self.net.train()
        for group in self.optimiser.param_groups:
            group["lr"] = self.training.learning_rate(self.step)
        self.optimiser.zero_grad()
        loss = reference_loss(self.restorer, self.net, batch, seed)
        loss.backward()
        self.optimiser.step()
        beta = self.training.ema_beta(self.step)
        with torch.no_grad():
            new = self.net.state_dict()
            for name, average in self.ema.state_dict().items():
                average.copy_(beta * average + (1 - beta) * new[name])
        self.step += 1
        return loss.item()
