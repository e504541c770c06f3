"""Restorers that answer with one picture: the loss and the pass that they share, and a U-Net.

A regression learns the mean of the images that a reconstruction may come from, which is as sharp as
what is sure. `RegressionUNet` has EDM's network and none of its noise: what a diffusion model of
the same size and training adds to it is the samples' worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.nn import functional

from recon_core.metrics import ssim_pairs
from recon_core.restore.examples import Examples, to_network, to_pictures
from recon_core.restore.unet import UNET_SIZES, UNet, UNetSizeName
from recon_core.strict import Share, Strict
from recon_core.types import Progress, no_progress


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

        Nothing is drawn from `generator`; it is there because every restorer's loss may. With
        `total`, `batch` is a part of a batch of that many examples and the result its share of the
        whole batch's loss, but statistics of a normalisation over batches are those of the part.
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
        """A freshly initialised network, on the CPU, which answers what it is given; the same seed
        gives the same weights."""
        with torch.device("meta"):
            unet = UNet(
                UNET_SIZES[self.size],
                in_channels=3,
                out_channels=3,
                n_labels=0,
                resolution=self.resolution,
            )
        unet.to_empty(device="cpu")
        unet.initialise(torch.Generator().manual_seed(seed))
        unet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return _Lacking(unet)


class _Lacking(nn.Module):
    """x + F(x), without a noise level and labels."""

    def __init__(self, unet: UNet) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, x: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 h w"]:
        lacking: Tensor = self.unet(x, x.new_zeros(len(x)), x.new_zeros(len(x), 0))
        return x + lacking
