"""EDM (Karras et al. 2022), the diffusion restorer of the image restoration paper, section 3.

The network F is preconditioned into a denoiser D (EDM, equation 7), trained on the weighted
denoising loss (equations 2 and 8, table 1) and sampled by Heun's method (algorithm 1) with the
state in float64. The condition is the reconstruction in three further input channels, scaled by 1 /
sigma_data at every noise level, which the paper leaves open. `target` "residual" is our departure
for short trainings: the diffused picture is the image minus the condition. An untrained network
then answers the condition on average, whereas one that diffuses images must first learn to copy it.

If images are known to lie near a plane, sampling can stay near it at every step (`Constraint`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor, nn

from recon_core.restore.examples import Examples, to_network
from recon_core.restore.unet import UNET_SIZES, UNet, UNetSizeName, built
from recon_core.strict import Share, Strict, Within
from recon_core.threads import share_of
from recon_core.types import N_AUGMENT, Progress, no_progress

Denoiser = Callable[[Tensor, float], Tensor]
"""D(x; sigma): the expected clean image, for a batch x that has one noise level."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Knowledge that images lie near a plane: `nearest` projects pictures on it (P, affine, nothing
    clipped), `tolerance` tau is the standard deviation of an image's distance from it, per pixel.

    Wherever the sampler asks for the estimate D of the image, in noise of level sigma, it gets

        P D + (1 - lambda) (D - P D),    lambda = sigma^2 / (sigma^2 + tau^2).

    Source: DDNM (Wang et al. 2023, section 3.2) with A = I - P, of which y is known; for tau = 0 it
    is DDNM itself, lambda = 1. Derivation: for x = x0 + sigma n and y = A x0 + tau n', if the error
    of D is white with variance r^2 (as in Song et al. 2023, PiGDM), the expected x0 is D - r^2 /
    (r^2 + tau^2) (A D - y); r = sigma if the prior is wide beside tau. So D remains the denoiser of
    a distribution, of images given y, and any sampler may use it. Departure: DDNM+ (section 3.3)
    has lambda = min(1, sigma / tau), up to the step's factor, which leaves room for the noise that
    its own sampler adds. Heun's adds none and would end tau / e from the plane. Like DDNM this is
    not exact where the parts in and off the plane are correlated given x.
    """

    nearest: Callable[[Tensor], Tensor]
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance={self.tolerance} is no standard deviation; use 0 or more")

    def on(self, denoise: Denoiser, condition: Tensor | float = 0.0) -> Denoiser:
        """The denoiser with its estimates corrected, for values in [-1, 1], of images less
        `condition`; `nearest` is given float32 pictures, around [0, 1]."""
        tau = 2 * self.tolerance

        def corrected(x: Tensor, sigma: float) -> Tensor:
            image = denoise(x, sigma) + condition
            inside = to_network(self.nearest(((image + 1) / 2).float())).to(image.dtype)
            kept = tau**2 / (sigma**2 + tau**2) if tau > 0 else 0.0
            return inside + kept * (image - inside) - condition

        return corrected


@dataclass(frozen=True, kw_only=True)
class EDM(Strict):
    """The diffusion restorer. Defaults are EDM's for CIFAR-10, which the paper kept. In training
    ln sigma ~ N(P_mean, P_std^2). Sampling takes `n_steps` Heun steps from sigma_max to sigma_min
    with exponent rho, of two network evaluations each, the last of one. `strength`: how far a
    restoration goes from the picture (0) to the network's answer (1), which validation can fit."""

    kind: Literal["edm"] = "edm"
    size: UNetSizeName = "paper"
    resolution: int = 32
    target: Literal["image", "residual"] = "image"
    sigma_data: float = 0.5
    P_mean: float = -1.2
    P_std: float = 1.2
    n_steps: Annotated[int, Within("[2, inf)")] = 18
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    strength: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size not in UNET_SIZES:
            raise ValueError(f"size={self.size!r} is unknown; choose one of {list(UNET_SIZES)}")
        if not 0 < self.sigma_min < self.sigma_max:
            raise ValueError(
                f"sigma_min={self.sigma_min} must be above 0 and below sigma_max={self.sigma_max}"
            )

    def build(self, *, seed: int) -> nn.Module:
        """A freshly initialised network F, on the CPU; the same seed gives the same weights."""
        make = partial(UNet, UNET_SIZES[self.size], in_channels=6, out_channels=3,
                       n_labels=N_AUGMENT, resolution=self.resolution)  # fmt: skip
        net: nn.Module = built(make, seed=seed)
        return net

    def loss(
        self,
        net: nn.Module,
        batch: Examples,
        *,
        generator: torch.Generator,
        first: int = 0,
        total: int | None = None,
    ) -> Tensor:
        """E_sigma,noise[ weight(sigma) ||D(y + n; sigma) - y||^2 ], summed over pixels (scalar).

        y is the target image, or what the condition lacks of it (`target` "residual").
        weight(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 makes the effective weight
        on F's error 1 at every noise level.

        With `total`, `batch` is examples `first` and on of a batch of that many: noise is drawn for
        all of them and the result is their share of the whole batch's loss.
        """
        y = batch.target - batch.condition if self.target == "residual" else batch.target
        total = len(y) if total is None else total
        rows, source = slice(first, first + len(y)), generator.device
        normal = torch.randn(total, 1, 1, 1, generator=generator, device=source)[rows]
        sigma = (self.P_std * normal.to(y.device) + self.P_mean).exp()
        weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
        white = torch.randn(total, *y.shape[1:], generator=generator, device=source)[rows]
        noise = sigma * white.to(y.device)
        D_x = self.denoise(net, y + noise, sigma, batch.condition, batch.augment)
        error: Tensor = weight * (D_x - y) ** 2
        return error.sum() / total

    def denoise(
        self,
        net: nn.Module,
        x: Float32[Tensor, "n 3 h w"],
        sigma: Float32[Tensor, "n 1 1 1"],
        condition: Float32[Tensor, "n 3 h w"],
        labels: Float32[Tensor, "n 9"],
    ) -> Float32[Tensor, "n 3 h w"]:
        """D(x; sigma) = c_skip x + c_out F(c_in x, condition; c_noise, labels) (equation 7)."""
        c_skip, c_out, c_in, c_noise = self.preconditioning(sigma)
        inputs = torch.cat([c_in * x, condition / self.sigma_data], dim=1)
        F_x: Tensor = net(
            inputs.contiguous(memory_format=torch.channels_last), c_noise.flatten(), labels
        )
        return c_skip * x + c_out * F_x

    def preconditioning(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c_skip, c_out, c_in, c_noise of EDM's table 1."""
        total = sigma**2 + self.sigma_data**2
        c_out = sigma * self.sigma_data / total.sqrt()
        return self.sigma_data**2 / total, c_out, 1 / total.sqrt(), sigma.log() / 4

    def noise_levels(self) -> Float64[Tensor, " steps_and_zero"]:
        """sigma_i of the sampler, i = 0 .. n_steps - 1, and a final 0 (equation 5)."""
        ramp = torch.linspace(0, 1, self.n_steps, dtype=torch.float64)
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return torch.cat([(high + ramp * (low - high)) ** self.rho, torch.zeros(1).double()])

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
        constraint: Constraint | None = None,
    ) -> Float32[Tensor, "s n 3 h w"]:
        """`n_samples` restorations of each picture, for unaugmented targets, around [0, 1].

        They are not clipped: their mean is the expected image, and the mean of clipped samples
        would be too bright where that is black.

        The noise of image i is drawn from a CPU generator seeded by seeds[i] alone, one sample
        after the other: a restoration depends neither on the rest of the batch nor on n_samples
        (up to the rounding of float32 convolutions). Sampling runs where `net` and `condition`
        are, at most `batch_size` (sample, image) pairs at once. `constraint`: what every estimate
        of an image on the way has to agree with; answers then do if `strength` is 1.
        """
        if len(seeds) != len(condition):
            raise ValueError(f"{len(seeds)} seeds for {len(condition)} pictures; give one each")
        net.eval()
        device, shape = condition.device, condition.shape
        noise = torch.empty(n_samples, *shape)
        for image, seed in enumerate(seeds.tolist()):
            generator = torch.Generator().manual_seed(seed)
            for sample in range(n_samples):
                noise[sample, image] = torch.randn(shape[1:], generator=generator)
        flat_noise = noise.flatten(0, 1)
        restored = torch.empty_like(flat_noise, device=device)
        rows = torch.arange(len(flat_noise))
        image_of = (rows % max(len(condition), 1)).to(device)
        sigmas = self.noise_levels().tolist()
        starts = range(0, len(rows), batch_size)
        for done, start in enumerate(starts):
            part = slice(start, start + batch_size)
            given = to_network(condition[image_of[part]])
            share = share_of(progress, done / len(starts), (done + 1) / len(starts))
            state = flat_noise[part].to(device, torch.float64)
            known = given if self.target == "residual" else 0.0
            denoise = self.denoiser(net, given)
            if constraint is not None:
                denoise = constraint.on(denoise, known)
            drawn = heun(denoise, state, sigmas, progress=share).float()
            restored[part] = (drawn + known + 1) / 2
        return torch.lerp(condition, restored.view(n_samples, *shape), self.strength)

    def denoiser(self, net: nn.Module, condition: Float32[Tensor, "n 3 h w"]) -> Denoiser:
        """D(x; sigma), in float64, of unaugmented images with that condition."""
        labels = torch.zeros(len(condition), N_AUGMENT, device=condition.device)

        def denoise(x: Tensor, sigma: float) -> Tensor:
            level = torch.full((len(x), 1, 1, 1), sigma, device=x.device)
            return self.denoise(net, x.float(), level, condition, labels).double()

        return denoise


def heun(
    denoise: Denoiser,
    noise: Float64[Tensor, " *shape"],
    sigmas: list[float],
    *,
    progress: Progress = no_progress,
) -> Float64[Tensor, " *shape"]:
    """The end of the probability-flow ODE dx/dsigma = (x - D(x; sigma)) / sigma (algorithm 1), from
    sigmas[0] * `noise` (standard normal) through the descending `sigmas`. Heun's second-order
    correction is left out of a step to sigma = 0."""
    x = sigmas[0] * noise
    n_steps = len(sigmas) - 1
    for step, (sigma, sigma_next) in enumerate(itertools.pairwise(sigmas)):
        slope = (x - denoise(x, sigma)) / sigma
        x_next = x + (sigma_next - sigma) * slope
        if sigma_next > 0:
            slope_next = (x_next - denoise(x_next, sigma_next)) / sigma_next
            x_next = x + (sigma_next - sigma) * (slope + slope_next) / 2
        x = x_next
        progress((step + 1) / n_steps)
    return x
