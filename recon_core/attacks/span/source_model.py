"""A model of images, learned once, that tells them from mixtures: pooled filters.

Filter by filter, mixtures of hundreds of images can look as sparse as images do, and the likelihood
of independent filters prefers them to the truth. What mixtures lack is that an image's filters are
quiet together. So the energy of an image pools filters, as a field of experts does (Roth and Black
2005), with pools that are learned (Osindero, Welling and Hinton 2006):

    E(x) = sum over places p, pools k of alpha_k log(1 + sum_f H_kf y_fp^2) + kappa/2 x^T C^{-1} x,

with y the outputs of filters, H >= 0, and C the images' covariance, diagonal in the cosine
transform of each colour. It is learned by denoising score matching (Vincent 2011): noise with
covariance sigma^2 C is added, and the energy's gradient has to point back. Sources are then those
that make -d log|det W| + sum_i E(x_i) small.
"""

from __future__ import annotations

import io
import math
import pkgutil
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.features import colour_axes, cosine_matrix, learned_filters
from recon_core.types import Progress, no_progress

SMALLEST_VARIANCE = 1e-5
"""Share of a colour's largest variance that every cosine is given at least."""


@dataclass(frozen=True)
class SourceModel:
    """E of images (c, h, w): `filters` at every `stride`-th place, `pools` H (k, f), `alpha` (k,),
    `kappa`, and the variance of every cosine of every colour, `spectrum` (c, h, w)."""

    filters: Float[Tensor, "f c s s"]
    stride: int
    pools: Float[Tensor, "k f"]
    alpha: Float[Tensor, " k"]
    kappa: Float[Tensor, ""]
    spectrum: Float[Tensor, "c h w"]

    def to(self, like: Tensor) -> SourceModel:
        """The same in another dtype and on another device."""
        moved = {name: value.to(like) for name, value in self.tensors().items()}
        return SourceModel(stride=self.stride, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """All but the stride, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def outputs(self, pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, "k f p"]:
        """y: every filter at every place."""
        outputs: Tensor = F.conv2d(pictures, self.filters.to(pictures), stride=self.stride)
        return outputs.flatten(2)

    def whitened(self, pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, "k d"]:
        """C^{-1/2} x, in cosines."""
        scaled = cosines(pictures) / self.spectrum.to(pictures).sqrt()
        return scaled.flatten(1)


@cache
def shipped_model() -> SourceModel:
    """The model that comes with the package: of CIFAR-10's training images, 32x32 in colour.

    `python -m benchmarks.source_model IMAGES` learns it anew.
    """
    packaged = pkgutil.get_data(__name__, "source_model.npz")  # part of the code, as this is
    assert packaged is not None
    with np.load(io.BytesIO(packaged), allow_pickle=False) as arrays:
        named = {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files}
    stride = int(named.pop("stride"))
    return SourceModel(stride=stride, **named)


def cosines(pictures: Float[Tensor, "k c h w"], *, inverse: bool = False) -> Tensor:
    """The orthonormal cosine transform of luminance and differences of colours, or its inverse."""
    channels, height, width = pictures.shape[1:]
    colours = colour_axes(channels).to(pictures)
    rows, columns = (cosine_matrix(n).to(pictures) for n in (height, width))
    if inverse:
        mixed = torch.einsum("kahw,hi,wj->kaij", pictures, rows, columns)
        return torch.einsum("kaij,ac->kcij", mixed, colours)
    mixed = torch.einsum("kchw,ac->kahw", pictures, colours)
    return torch.einsum("kahw,ih,jw->kaij", mixed, rows, columns)


@dataclass(frozen=True)
class Learning:
    """How a `SourceModel` is learned.

    Filters of `size` at every `stride`-th place start as the independent components of
    `n_patches` patches.
    `n_steps` steps of Adam on `batch_size` images move `n_pools` pools at the rate `lr` and the
    filters, in units of their size, at `filter_lr`; `sigma` is the noise, in the images' own
    deviations.
    """

    size: int = 8
    stride: int = 3
    n_patches: int = 60_000
    n_pools: int = 189
    n_steps: int = 800
    batch_size: int = 64
    lr: float = 0.02
    filter_lr: float = 2e-3
    sigma: float = 0.35


def learn_source_model(
    images: Float[Tensor, "n c h w"],
    *,
    generator: torch.Generator,
    learning: Learning = Learning(),
    progress: Progress = no_progress,
) -> SourceModel:
    """The model of public images in [0, 1], which must not be the victims' own.

    Raises ValueError for images that are too small, or too few for as many filters.
    """
    filters = learned_filters(
        images, learning.size, generator=generator, n_patches=learning.n_patches
    )
    both = torch.cat([images, images.flip(-1)]).float()
    centred = both - both.mean(0)
    outputs = F.conv2d(centred, filters, stride=learning.stride)
    filters = filters / outputs.square().mean((0, 2, 3)).sqrt()[:, None, None, None]
    spectrum = cosines(centred).square().mean(0)
    floor = SMALLEST_VARIANCE * spectrum.amax((1, 2), keepdim=True)
    pools = torch.full((learning.n_pools, len(filters)), math.log(0.3 / len(filters)))
    pools = pools + 0.3 * torch.randn(pools.shape, generator=generator)
    own = torch.arange(learning.n_pools)
    pools[own, own % len(filters)] = math.log(2.0)
    begun = [pools, torch.full((learning.n_pools,), math.log(0.2)), torch.tensor(math.log(0.3))]
    logs = [part.requires_grad_() for part in begun]
    size = filters.square().mean().sqrt()
    shape = (filters / size).requires_grad_()

    def model() -> SourceModel:
        h, alpha, kappa = (part.exp() for part in logs)
        spectra = spectrum.maximum(floor)
        return SourceModel(shape * size, learning.stride, h, alpha, kappa, spectra)

    rates = (learning.lr, learning.filter_lr)
    groups = [{"params": logs}, {"params": [shape]}]
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    for step in range(learning.n_steps):
        warm, turn = min(1.0, (step + 1) / 20), math.cos(math.pi * step / learning.n_steps)
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * warm * (1 + turn) / 2
        rows = torch.randint(len(centred), (learning.batch_size,), generator=generator)
        noise = torch.randn(centred[rows].shape, generator=generator)
        loss = score_matching(model(), centred[rows], noise, sigma=learning.sigma)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        progress((step + 1) / learning.n_steps)
    with torch.no_grad():
        return model()


def score_matching(
    model: SourceModel,
    x: Float[Tensor, "b c h w"],
    noise: Float[Tensor, "b c h w"],
    *,
    sigma: float,
) -> Float[Tensor, ""]:
    """Mean of (sigma C^{1/2} score + e)^2 at x + sigma C^{1/2} e, e = `noise` in cosines: 1 for a
    model that knows nothing, 1 / (1 + sigma^2) for a Gaussian of the images' covariance."""
    root = model.spectrum.to(x).sqrt()
    seen = x + sigma * cosines(noise * root, inverse=True)
    y = model.outputs(seen)
    share = model.alpha[:, None] / (1 + torch.matmul(model.pools, y.square()))
    psi = 2 * y * torch.matmul(model.pools.mT, share)
    places = [(side - model.filters.shape[2]) // model.stride + 1 for side in x.shape[2:]]
    back = F.conv_transpose2d(psi.unflatten(2, places), model.filters, stride=model.stride)
    back = F.pad(back, (0, x.shape[3] - back.shape[3], 0, x.shape[2] - back.shape[2]))
    score = -cosines(back) * root - model.kappa * cosines(seen) / root
    return (sigma * score + noise).square().mean()
