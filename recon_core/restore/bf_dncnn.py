"""BF-DnCNN (Mohan et al. 2020), the restorer of the image restoration paper, section 4.

DnCNN without a single additive constant: with its running statistics it is homogeneous of degree
one, net(c x) = c net(x) for c > 0. It predicts the corruption. `patch` > 1 is our addition for
CPUs: the network works on patches of pixels, which makes it cheaper by patch^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from recon_core.restore.regression import Regression
from recon_core.strict import Count, Within

MAX_DEPTH = 1000
"""Most layers that are built; a damaged model card could ask for layers without end."""
BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1
GAMMA_STD = math.sqrt(2 / 9 / 64)
GAMMA_CLAMP = 0.025
HALVES = (torch.float16, torch.bfloat16)


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
        with torch.device("meta"):
            net = BFDnCNNNet(depth=self.depth, n_channels=self.n_channels, patch=self.patch)
        net.to_empty(device="cpu")
        net.initialise(torch.Generator().manual_seed(seed))
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
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
