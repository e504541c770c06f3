"""Restorers that answer with one picture: their shared loss and inference, and two networks.

A regression learns the mean of the images that a reconstruction may come from, which is blurred
where these differ. `RegressionUNet` has EDM's network without noise: what a diffusion model of the
same size and training adds to it is the value of sampling.

BF-DnCNN (Mohan et al. 2020) is the restorer of the image restoration paper, section 4: DnCNN
without a single additive constant. With its running statistics it is homogeneous of degree one,
net(c x) = c net(x) for c > 0. It predicts the corruption. `patch` > 1 is our addition for CPUs: the
network works on patches of pixels, which makes it cheaper by patch^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.nn import functional

from recon_core.metrics import ssim_pairs
from recon_core.restore.examples import Examples, to_network, to_pictures
from recon_core.restore.unet import UNET_SIZES, UNet, UNetSizeName, built
from recon_core.strict import Count, Share, Strict, Within
from recon_core.types import Progress, no_progress

MAX_DEPTH = 1000
"""Most layers of a network, so that a damaged model card cannot ask for more."""
BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1
GAMMA_STD = math.sqrt(2 / 9 / 64)
GAMMA_CLAMP = 0.025
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Regression(Strict):
    """The settings that regressions share. `loss_terms`: "mse" is the mean squared error;
    "mse+ssim" adds `ssim_weight` * (1 - SSIM), ours, since the mean squared error alone blurs.
    `strength`: see `EDM`. `mirrored`: the answer is the mean of the network's to the picture and,
    mirrored back, to its mirror image (Lim et al. 2017, section 3.4, of eight symmetries)."""

    loss_terms: Literal["mse", "mse+ssim"] = "mse"
    ssim_weight: float = 0.1
    strength: Share = 1.0
    mirrored: bool = False

    def loss(
        self,
        net: nn.Module,
        batch: Examples,
        *,
        generator: torch.Generator,
        first: int = 0,
        total: int | None = None,
    ) -> Tensor:
        """Mean squared error in [-1, 1] units, plus the SSIM term if asked for (scalar).

        `generator` is unused; other restorers' losses draw from it. With `total`, `batch` is a part
        of a batch of that many examples and the result its share of the whole batch's loss, except
        that batch normalisation uses the statistics of the part.
        """
        del generator, first
        output = net(batch.condition.contiguous(memory_format=torch.channels_last))
        loss = functional.mse_loss(output, batch.target)
        if self.loss_terms == "mse+ssim":
            pictures, targets = (output + 1) / 2, (batch.target + 1) / 2
            loss = loss + self.ssim_weight * (1 - ssim_pairs(pictures, targets).mean())
        return loss if total is None else loss * (len(batch) / total)

    @torch.inference_mode()
    def restore(
        self,
        net: nn.Module,
        condition: Float32[Tensor, "n 3 h w"],
        *,
        n_samples: int,
        seeds: Int64[Tensor, " n"],
        progress: Progress = no_progress,
        batch_size: int = 256,
    ) -> Float32[Tensor, "1 n 3 h w"]:
        """The one restoration of each picture, in [0, 1].

        The network is deterministic: `seeds` and `n_samples` are ignored, and there is always
        one sample.
        """
        del n_samples, seeds
        net.eval()
        restored = torch.empty_like(condition)
        for start in range(0, len(condition), batch_size):
            part = slice(start, start + batch_size)
            restored[part] = to_pictures(self._answer(net, to_network(condition[part])))
            progress(min(1.0, (start + batch_size) / len(condition)))
        return condition.lerp(restored, self.strength).unsqueeze(0)

    def _answer(self, net: nn.Module, inputs: Float32[Tensor, "n 3 h w"]) -> Tensor:
        answer: Tensor = net(inputs.contiguous(memory_format=torch.channels_last))
        if not self.mirrored:
            return answer
        mirrored = inputs.flip(-1).contiguous(memory_format=torch.channels_last)
        return torch.lerp(answer, net(mirrored).flip(-1), 0.5)


@dataclass(frozen=True, kw_only=True)
class RegressionUNet(Regression):
    """The U-Net of EDM as a regression: it answers the reconstruction plus what that lacks."""

    kind: Literal["unet"] = "unet"
    size: UNetSizeName = "paper"
    resolution: int = 32

    def build(self, *, seed: int) -> nn.Module:
        """A freshly initialised network, on the CPU, which at first answers its input; the same
        seed gives the same weights."""
        make = partial(UNet, UNET_SIZES[self.size], in_channels=3, out_channels=3, n_labels=0,
                       resolution=self.resolution)  # fmt: skip
        return _Lacking(built(make, seed=seed))


class _Lacking(nn.Module):
    """x + F(x), without a noise level or labels."""

    def __init__(self, unet: UNet) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, x: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 h w"]:
        lacking: Tensor = self.unet(x, x.new_zeros(len(x)), x.new_zeros(len(x), 0))
        return x + lacking


@dataclass(frozen=True, kw_only=True)
class BFDnCNN(Regression):
    """The bias-free convolutional restorer. Defaults are those of Mohan et al. 2020; the paper's
    loss is "mse"."""

    kind: Literal["bf_dncnn"] = "bf_dncnn"
    depth: Annotated[int, Within(f"[2, {MAX_DEPTH}]")] = 20
    n_channels: Count = 64
    patch: Count = 1

    def build(self, *, seed: int) -> nn.Module:
        """A freshly initialised network, on the CPU; the same seed gives the same weights."""
        make = partial(BFDnCNNNet, depth=self.depth, n_channels=self.n_channels, patch=self.patch)
        net: nn.Module = built(make, seed=seed)
        return net


class BFDnCNNNet(nn.Module):
    """x - r(x) for an r of `depth` bias-free 3x3 convolutions (n 3 h w to the same), uninitialised
    until `initialise` is called."""

    def __init__(self, *, depth: int, n_channels: int, patch: int = 1) -> None:
        super().__init__()
        self.patch = patch
        n_pixel = 3 * patch**2

        def convolution(n_in: int, n_out: int) -> nn.Conv2d:
            return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)

        self.first = convolution(n_pixel, n_channels)
        self.convolutions = nn.ModuleList(
            [convolution(n_channels, n_channels) for _ in range(depth - 2)]
        )
        self.norms = nn.ModuleList([BiasFreeBatchNorm(n_channels) for _ in range(depth - 2)])
        self.last = convolution(n_channels, n_pixel)

    def initialise(self, generator: torch.Generator) -> None:
        """Kaiming-normal (fan in) weights; gamma ~ N(0, 2/9/64) clamped to +-.025."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, generator=generator)
            elif isinstance(module, BiasFreeBatchNorm):
                module.initialise(generator)

    def forward(self, x: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 h w"]:
        hidden = functional.relu(self.first(functional.pixel_unshuffle(x, self.patch)))
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            hidden = functional.relu(norm(convolution(hidden)))
        return x - functional.pixel_shuffle(self.last(hidden), self.patch)


class _Variance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        mean = y.mean(dim=(0, 2, 3), keepdim=True)
        ctx.n = y.numel() // y.shape[1]
        ctx.save_for_backward(y, mean)
        total: Tensor = (y - mean).square_().sum(dim=(0, 2, 3))
        var: Tensor = total / (ctx.n - 1)
        return var

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y, mean = ctx.saved_tensors
        slope: Tensor = (2 * gradient / (ctx.n - 1))[:, None, None]
        deviation: Tensor = y - mean
        return deviation.mul_(slope)


def variance(y: Float[Tensor, "n c h w"]) -> Float[Tensor, " c"]:
    """Unbiased, over batch and positions; in two passes, where torch's own takes ten times as long
    in channels-last order."""
    result: Tensor = _Variance.apply(y)  # type: ignore[no-untyped-call]
    return result


class BiasFreeBatchNorm(nn.Module):
    """gamma y / (sqrt(var) + eps), with the unbiased variance over batch and positions."""

    running_var: Tensor

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(n_channels))
        self.register_buffer("running_var", torch.empty(n_channels))

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.ones_(self.running_var)
        nn.init.normal_(self.gamma, 0.0, GAMMA_STD, generator=generator)
        with torch.no_grad():
            self.gamma.clamp_(-GAMMA_CLAMP, GAMMA_CLAMP)

    def forward(self, y: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        if self.training:
            var = variance(y.float() if y.dtype in HALVES else y)
            with torch.no_grad():
                self.running_var.lerp_(var, BATCH_NORM_MOMENTUM)
        else:
            var = self.running_var
        factor = self.gamma / (var.sqrt() + BATCH_NORM_EPS)
        return y * factor[:, None, None]
