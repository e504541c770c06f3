"""Learns the models of images that the span attack comes with, and writes them into the package.

    python -m benchmarks.span.source_model --images folder:cifar10 --kind coarse [--out FILE]

From the first images of every class of the train split, which the victims of the measured results
never saw; on one core two minutes for the rough and the coarse model, eight for the fine one. Kept
in half precision.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span import features
from recon_core.attacks.span.features import Kind, SourceModel, cosines
from recon_core.attacks.span.separation import Stage, rotate, rotation_start
from recon_core.types import Progress, no_progress
from storage.sources.load import ImageSet, load_images

SEED = 0
SMALLEST_VARIANCE = 1e-5
"""Share of a colour's largest variance that every cosine is given at least."""
PATCH_STAGES = (Stage(1.0, 60), Stage(0.5, 100))
SMALLEST = 1e-10
"""Share of the largest variance below which a direction of patches holds nothing."""


@dataclass(frozen=True)
class Learning:
    """Settings of the learning.

    Filters of `size` at every `stride`-th place start as the independent components of
    `n_patches` patches.
    `n_steps` steps of Adam on `batch_size` images move `n_pools` pools at the rate `lr` and the
    filters, in units of their size, at `filter_lr`; from the middle on a pool has the `n_kept`
    filters that weigh most in it. `sigma` is the noise, in the images' own deviations.
    """

    size: int = 8
    stride: int = 3
    n_patches: int = 60_000
    n_pools: int = 189
    n_kept: int = 12
    n_steps: int = 800
    batch_size: int = 64
    lr: float = 0.02
    filter_lr: float = 2e-3
    sigma: float = 0.35


KINDS: dict[Kind, tuple[int, Learning]] = {
    "rough": (1500, Learning(sigma=1.2)),
    "coarse": (1500, Learning(sigma=0.7)),
    "fine": (2500, Learning(n_pools=378, n_steps=2400)),
}
"""Images of every class, and how each model is learned."""


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

    kept = torch.ones_like(pools)

    def model() -> SourceModel:
        h, alpha, kappa = (part.exp() for part in logs)
        spectra = spectrum.maximum(floor)
        return SourceModel(shape * size, learning.stride, h * kept, alpha, kappa, spectra)

    rates = (learning.lr, learning.filter_lr)
    groups = [{"params": logs}, {"params": [shape]}]
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    for step in range(learning.n_steps):
        if step == learning.n_steps // 2:
            kept = _largest(pools.detach(), learning.n_kept)
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


def _largest(pools: Float[Tensor, "k f"], n: int) -> Float[Tensor, "k f"]:
    """1 at the n largest of every row, 0 elsewhere."""
    order = pools.topk(min(n, pools.shape[1]), dim=1).indices
    return torch.zeros_like(pools).scatter_(1, order, 1.0)


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


def learned_filters(
    images: Float[Tensor, "n c h w"],
    size: int,
    *,
    generator: torch.Generator,
    n_patches: int = 60_000,
) -> Float[Tensor, "f c s s"]:
    """c (size^2 - 1) filters: the independent components of `n_patches` patches of `images`.

    Patches lose each colour's mean, are whitened by principal components, and rotated as the span
    is (`separation.rotate`). Raises ValueError for images smaller than the filters.
    """
    n, channels, height, width = images.shape
    if min(height, width) < size:
        raise ValueError(f"images of {height}x{width} have no patches of {size}x{size}")
    draws = [
        torch.randint(high, (n_patches,), generator=generator)
        for high in (n, height - size + 1, width - size + 1)
    ]
    blocks = images.float().unfold(2, size, 1).unfold(3, size, 1)
    patches = blocks[draws[0], :, draws[1], draws[2]]
    patches = (patches - patches.mean((2, 3), keepdim=True)).flatten(1)
    patches = patches - patches.mean(0)
    n_filters = channels * (size**2 - 1)
    values, vectors = torch.linalg.eigh((patches.mT @ patches / len(patches)).double())
    if float(values[-n_filters]) <= SMALLEST * float(values[-1]):
        raise ValueError(
            f"patches of {size}x{size} of these {n} images have fewer than {n_filters} directions; "
            "give more, and more varied, images"
        )
    whiten = (vectors[:, -n_filters:] / values[-n_filters:].sqrt()).mT.float()
    start = rotation_start(n_filters, generator).to(whiten)
    turned = rotate((patches @ whiten.mT).mT[None], start[None], PATCH_STAGES)
    filters = (turned.rotation[0] @ whiten).unflatten(1, (channels, size, size))
    centred: Tensor = filters - filters.mean((2, 3), keepdim=True)
    return centred


def first_of_each_class(images: ImageSet, per_class: int) -> torch.Tensor:
    """(n, c, h, w) in [0, 1]."""
    rows = [np.flatnonzero(images.labels == k)[:per_class] for k in np.unique(images.labels)]
    return torch.from_numpy(images.images[np.sort(np.concatenate(rows))]).float() / 255


def write(model: SourceModel, path: Path) -> None:
    """As an .npz of half precision numbers, compressed."""
    arrays: dict[str, Any] = {n: value.half().numpy() for n, value in model.tensors().items()}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays, stride=np.array(model.stride))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, help="folder:PATH, cifar10:PATH, ...")
    parser.add_argument("--kind", choices=KINDS, default="coarse")
    parser.add_argument("--out", type=Path, help="default: where the package has it")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    per_class, learning = KINDS[options.kind]
    if options.steps is not None:
        learning = replace(learning, n_steps=options.steps)
    packaged = Path(features.__file__).with_name(f"source_model_{options.kind}.npz")
    images = first_of_each_class(load_images(options.images, split="train"), per_class)
    generator = torch.Generator().manual_seed(SEED)
    write(
        learn_source_model(images, generator=generator, learning=learning), options.out or packaged
    )


if __name__ == "__main__":
    main()
