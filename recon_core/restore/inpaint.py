"""Generic inpainting, for comparison: both methods know the mask, and nothing of a victim.

DDNM (Wang et al. 2023, "Zero-shot image restoration using denoising diffusion null-space model";
autoencoder paper, section 4) samples a diffusion model whose estimate of the clean image is
corrected at every noise level so that it agrees with what is known, x0 <- A^+ y + (I - A^+ A) x0.
With noise in y (DDNM+, section 3.3) the correction of the known pixels is scaled by lambda <= 1,
the largest with which the noise that enters from y is not more than the level that is stepped to
has. Time travel (section 3.3): a step is undone by noise and taken again. Noise levels
are EDM's sigma (x = x0 + sigma n), where DDPM's posterior of the next level is

    x_s ~ N(a x0 + (1 - a) x_t, s^2 a),     a = 1 - s^2 / t^2,     s < t.

The other method is biharmonic inpainting (Damelin & Hoang 2018) as scikit-image has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from recon_core.restore.edm import EDM, Denoiser
from recon_core.restore.examples import to_network, to_pictures
from recon_core.strict import Count, Strict
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress

Draw = Callable[[], Tensor]
"""Gives standard normal noise for a batch, new at every call."""


def unconditional(edm: EDM, net: nn.Module) -> Denoiser:
    """D(x; sigma) of a network that was trained with a condition of 0. Raises ValueError for an
    `edm` that diffuses residuals: without a condition there are none."""
    if edm.target != "image":
        raise ValueError(
            f"target={edm.target!r} diffuses what a condition lacks; a generic inpainter has no "
            "condition, use target='image'"
        )

    @torch.inference_mode()
    def denoise(x: Tensor, sigma: float) -> Tensor:
        nothing = torch.zeros_like(x, dtype=torch.float32)
        return edm.denoiser(net, nothing)(x, sigma).to(x.dtype)

    return denoise


@dataclass(frozen=True, kw_only=True)
class DDNM(Strict):
    """Inpainting by a diffusion model that knows the mask. Defaults: DDNM's 100 steps, one sample.

    Noise levels fall from `sigma_max` to `sigma_min` and then to 0, spaced with exponent `rho`
    (EDM, equation 5), in units of images in [-1, 1]. Every step is taken `travel_repeat` times (1:
    no time travel). Several samples (`n_samples`) are averaged.
    """

    kind: Literal["ddnm"] = "ddnm"
    n_steps: int = 100
    travel_repeat: Count = 1
    n_samples: Count = 1
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noise_levels()

    def noise_levels(self) -> list[float]:
        """The falling levels, `n_steps` of them and a final 0."""
        schedule = EDM(
            n_steps=self.n_steps, sigma_min=self.sigma_min, sigma_max=self.sigma_max, rho=self.rho
        )
        levels: list[float] = schedule.noise_levels().tolist()
        return levels

    def inpaint(
        self,
        denoiser: Denoiser,
        y: Float[Tensor, "b c h w"],
        mask: Bool[Tensor, "b c h w"],
        *,
        generators: Sequence[torch.Generator],
        sigma: float = 0.0,
        progress: Progress = no_progress,
        batch_size: int = 256,
    ) -> Float[Tensor, "b c h w"]:
        """Images in [0, 1] of which y shows the pixels where `mask` is True.

        `denoiser` takes and gives images in [-1, 1]. `sigma`: standard deviation of the noise in y;
        without it the known pixels come back exactly. Every image has its own CPU generator, so it
        does not depend on the rest of the batch (up to the rounding of the denoiser). Raises
        ValueError if there is not one generator per image or `sigma` is negative.
        """
        if len(generators) != len(y):
            raise ValueError(f"{len(generators)} generators for {len(y)} images; give one each")
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ValueError(f"sigma={sigma} is no standard deviation; use 0 or more")
        x = torch.empty_like(y)
        starts = range(0, len(y), batch_size)
        n = len(starts) * self.n_samples
        for part, start in enumerate(starts):
            rows = slice(start, start + batch_size)
            known = torch.where(mask[rows], to_network(y[rows].double()), 0)
            total, draw = torch.zeros_like(known), _normal(known, generators[rows])
            for done in range(part * self.n_samples, (part + 1) * self.n_samples):
                share = share_of(progress, done / n, (done + 1) / n)
                total += self._sample(
                    denoiser, known, mask[rows], draw=draw, sigma_y=2 * sigma, progress=share
                )
            x[rows] = to_pictures(total / self.n_samples).to(x.dtype)
        return x if sigma > 0 else torch.where(mask, y, x)

    def _sample(
        self,
        denoiser: Denoiser,
        y: Float[Tensor, "b c h w"],
        mask: Bool[Tensor, "b c h w"],
        *,
        draw: Draw,
        sigma_y: float,
        progress: Progress,
    ) -> Float[Tensor, "b c h w"]:
        levels = self.noise_levels()
        x = levels[0] * draw()
        for k, (t, s) in enumerate(pairwise(levels)):
            for repeat in range(self.travel_repeat):
                if repeat:
                    x = x + math.sqrt(t**2 - s**2) * draw()
                x = ancestral_step(denoiser(x, t), x, y, mask, t=t, s=s, sigma_y=sigma_y, draw=draw)
            progress((k + 1) / self.n_steps)
        return x


def ancestral_step(
    x0: Float[Tensor, "b c h w"],
    x: Float[Tensor, "b c h w"],
    y: Float[Tensor, "b c h w"],
    mask: Bool[Tensor, "b c h w"],
    *,
    t: float,
    s: float,
    sigma_y: float,
    draw: Draw,
) -> Float[Tensor, "b c h w"]:
    """Step from x at level t to s < t, with the estimate `x0` corrected by the known pixels of y.

    x0^ = x0 - lambda A^+ (A x0 - y) and x_s ~ N(a x0^ + (1 - a) x, Phi), where for known pixels
    lambda = min(1, s / (sqrt(a) sigma_y)) and Phi = s^2 a - (a lambda sigma_y)^2, so that with
    y's own noise the variance is that of DDPM's posterior (DDNM, section 3.3).
    """
    a = 1 - s**2 / t**2
    lam = min(1.0, s / (math.sqrt(a) * sigma_y)) if sigma_y > 0 else 1.0
    corrected = torch.where(mask, x0 + lam * (y - x0), x0)
    mean = a * corrected + (1 - a) * x
    if s == 0:
        return mean
    std_unknown = s * math.sqrt(a)
    std_known = math.sqrt(max(0.0, std_unknown**2 - (a * lam * sigma_y) ** 2))
    return mean + torch.where(mask, std_known, std_unknown) * draw()


def _normal(like: Tensor, generators: Sequence[torch.Generator]) -> Draw:
    """Draws standard normal noise of the shape of `like`, each image's from its own generator."""
    shape, device = like.shape[1:], like.device

    def draw() -> Tensor:
        noise = torch.empty(len(generators), *shape, dtype=torch.float64)
        for row, generator in zip(noise, generators, strict=True):
            row.normal_(generator=generator)
        return noise.to(device)

    return draw


GREY = 0.5
"""Result of biharmonic inpainting for an image without known pixels."""


def biharmonic(
    y: Float[Tensor, "b c h w"], mask: Bool[Tensor, "b c h w"]
) -> Float[Tensor, "b c h w"]:
    """Images in [0, 1]: the unknown pixels are a biharmonic surface through the known ones, which
    are y, clamped. An image of which nothing is known becomes grey. Raises ValueError if the
    channels of an image have different masks."""
    from skimage.restoration import inpaint_biharmonic

    if not bool((mask == mask[:, :1]).all()):
        raise ValueError(
            "the channels of an image have different masks; biharmonic inpainting needs one mask "
            "for all channels of an image"
        )
    pictures = y.detach().double().cpu().numpy()
    missing = ~mask[:, 0].cpu().numpy()
    inpainted = np.full_like(pictures, GREY)
    for row, (picture, erased) in enumerate(zip(pictures, missing, strict=True)):
        if not erased.all():
            inpainted[row] = inpaint_biharmonic(picture, erased, channel_axis=0)
    return torch.from_numpy(inpainted).to(y).clamp(0, 1)
