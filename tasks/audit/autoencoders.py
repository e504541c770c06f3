"""Autoencoders as victims: their training, their answers, and what comes back from erased pictures.

Price is the variance that an autoencoder explains of images it never saw, and confidence in an
image is minus the logarithm of its mean squared error. Its attacker has pictures of which a mask
left some pixels, of members and of decoys alike (autoencoder paper, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.plug_and_play import Degraded
from recon_core.degradation import degrade, mask_pattern
from recon_core.types import Progress
from recon_core.victims.autoencoder import Shape, Weights, initial_weights
from recon_core.victims.autoencoder_training import train_autoencoders
from recon_core.victims.network import Parameters, Released
from tasks.audit.recipe import AutoencoderRecipe

ROWS = 1000
"""Pictures that are asked about at once."""
LEAST_ERROR = 1e-30


def trained_autoencoders(
    recipe: AutoencoderRecipe,
    images: Float[Tensor, "r n c h w"],
    starts: Sequence[torch.Generator],
    orders: Sequence[torch.Generator],
    *,
    progress: Progress,
) -> tuple[Weights, Bool[Tensor, " r"]]:
    """(weights, which diverged) of R networks where their training ended. `orders` draw minibatches
    of as many images as the training says."""
    model = recipe.network.on(_shape(images))

    def shuffle(run: int, _epoch: int) -> Tensor:
        return torch.randperm(images.shape[1], generator=orders[run])

    begun = initial_weights(model, starts, dtype=torch.float32)
    begun = {name: tensor.to(images.device) for name, tensor in begun.items()}
    found = train_autoencoders(
        model, begun, images, training=recipe.training, shuffle=shuffle, progress=progress
    )
    ends = [one.last.weights for one in found]
    weights = {name: torch.cat([end[name] for end in ends]) for name in ends[0]}
    return weights, torch.tensor([one.diverged for one in found])


def released_weights(
    weights: Weights, released: Released, drawn: Sequence[torch.Generator]
) -> Weights:
    """The weights as they are given away, changed in the order of their names; a PReLU's one slope
    is a row of one."""
    names = sorted(weights)
    rows = tuple(w.unsqueeze(1) if w.dim() == 1 else w for w in map(weights.__getitem__, names))
    given = released.of(Parameters(rows, (None,) * len(rows)), drawn).weights
    return {
        name: changed.view_as(weights[name]) for name, changed in zip(names, given, strict=True)
    }


@torch.no_grad()
def answers(
    recipe: AutoencoderRecipe,
    weights: Weights,
    pool: Float[Tensor, "n c h w"],
    tests: Float[Tensor, "t c h w"],
    members: Bool[Tensor, "r n"],
) -> dict[str, Tensor]:
    """Confidences of R networks in the pool, and the variance that they explain of their members
    and of the tests, of which every image has its share."""
    of_pool, of_tests = (_errors(recipe, weights, some) for some in (pool, tests))
    explained = [
        1 - own[member].mean() / variance_of(pool[member])
        for own, member in zip(of_pool, members.to(of_pool.device), strict=True)
    ]
    return {
        "confidence": -of_pool.clamp_min(LEAST_ERROR).log(),
        "margin": -of_pool.clamp_min(LEAST_ERROR).log(),
        "train_accuracy": torch.stack(explained),
        "correct": 1 - of_tests / variance_of(tests),
    }


def variance_of(images: Float[Tensor, "n c h w"]) -> Tensor:
    """Mean squared distance of images from their mean, per value; the mean is all that a network
    of variance explained 0 knows."""
    return (images - images.mean(0)).square().mean().clamp_min(LEAST_ERROR)


def recovered(
    recipe: AutoencoderRecipe,
    weights: Weights,
    pool: Float[Tensor, "n c h w"],
    *,
    mask: str,
    method: NoiseAware,
    generator: torch.Generator,
) -> Float[Tensor, "n c h w"]:
    """Every picture of the pool, recovered by one network (R = 1) from what the mask left of it."""
    model = recipe.network.on(_shape(pool))

    def f(x: Tensor) -> Tensor:
        return torch.cat([model.forward(weights, part[None])[0] for part in x.split(ROWS)])

    kept = mask_pattern(mask, pool.shape[2], pool.shape[3], generator=generator).to(pool.device)
    degraded = Degraded(y=degrade(pool, kept), sigma=0.0)
    with torch.set_grad_enabled(method.descent_steps > 0):
        return method.recover(f, degraded).x.detach()


def _errors(
    recipe: AutoencoderRecipe, weights: Mapping[str, Any], images: Float[Tensor, "n c h w"]
) -> Float[Tensor, "r n"]:
    """Mean squared errors of R networks on the same images."""
    model, n_networks = recipe.network.on(_shape(images)), len(next(iter(weights.values())))
    images = images.to(next(iter(weights.values())).device)
    parts = [part.expand(n_networks, -1, -1, -1, -1) for part in images.split(ROWS)]
    found = [(model.forward(weights, x) - x).square().flatten(2).mean(2) for x in parts]
    return torch.cat(found, 1) if found else images.new_zeros(n_networks, 0)


def _shape(images: Tensor) -> Shape:
    c, h, w = images.shape[-3:]
    return c, h, w
