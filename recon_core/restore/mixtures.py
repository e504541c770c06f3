"""Examples without any attack: pictures that are mixed as an attack on a network mixes them.

What the gradients of a dense first layer move lies in the span of the training pictures (minus
their mean): in victims of 100 CIFAR-10 images 99.5 % of the energy of confident reconstructions is
a mixture of the run's images, in which the image that is coming back leads and the weights of the
others have heavy tails. Such mixtures cost nothing, and show all images of the training split. This
is ours; the image restoration paper learns from attacks alone.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from recon_core.matching import fit_to_range
from recon_core.restore.examples import Examples, to_network
from recon_core.types import N_AUGMENT

DEGREES_OF_FREEDOM = 3
"""Of Student's t, from which the weights of the other images come."""
STRENGTH_SPREAD = 0.6
"""Standard deviation of the logarithm of their norm."""
WHITE = 0.06
"""White noise, relative to the mixture: the start of the attack and of the victim's weights."""


def mixture_examples(
    images: UInt8[Tensor, "pool c h w"],
    *,
    n_examples: int,
    n_mixed: int,
    strength: float,
    generator: torch.Generator,
    n_sharing: int = 1,
) -> Examples:
    """Examples whose condition is their target mixed with `n_mixed` - 1 other images.

    condition ~ t - mean + sum_j b_j (x_j - mean) + white noise, fitted to the range as
    reconstructions are; the mean is that of all `n_mixed`. The weights b have a random norm with
    the median `strength` (the target's weight is 1): about 2 in the runs measured. `n_sharing`
    successive examples mix the same images. `generator` is a CPU one. Raises ValueError for fewer
    than two images to mix, or no images at all.
    """
    if len(images) == 0 or n_mixed < 2:
        raise ValueError(
            f"n_mixed={n_mixed} of {len(images)} images; a mixture takes at least two, of a source "
            "that has images"
        )
    pool, shape = images.cpu(), images.shape[1:]
    pieces = []
    for start in range(0, n_examples, n_sharing):
        n = min(n_sharing, n_examples - start)
        mixed = pool[torch.randint(len(pool), (n_mixed,), generator=generator)]
        pictures = mixed.flatten(1).float() / 255
        mean = pictures.mean(dim=0)
        own = torch.randint(n_mixed, (n,), generator=generator)
        weights = _weights(n, n_mixed, own, strength, generator)
        x = weights @ (pictures - mean)
        rms = x.square().mean(dim=1, keepdim=True).sqrt()
        x += WHITE * rms * torch.randn(x.shape, generator=generator)
        fitted = fit_to_range(x.view(n, *shape), mean.view(1, *shape).expand(n, *shape))
        pieces.append((to_network(fitted), to_network(pictures[own].view(n, *shape))))
    return Examples(
        condition=torch.cat([condition for condition, _target in pieces]),
        target=torch.cat([target for _condition, target in pieces]),
        augment=torch.zeros(n_examples, N_AUGMENT),
    )


def _weights(
    n: int, n_mixed: int, own: Tensor, strength: float, generator: torch.Generator
) -> Float32[Tensor, "n mixed"]:
    """1 for the own image; for the others Student's t, of a log-normal norm."""
    normal = torch.randn(n, n_mixed, DEGREES_OF_FREEDOM + 1, generator=generator)
    tails = normal[..., 0] / normal[..., 1:].square().mean(dim=2).sqrt()
    tails[torch.arange(n), own] = 0
    spread = STRENGTH_SPREAD * torch.randn(n, 1, generator=generator)
    norm = (math.log(strength) + spread).exp()
    weights: Tensor = tails * (norm / tails.norm(dim=1, keepdim=True))
    weights[torch.arange(n), own] = 1
    return weights
