"""Training examples of restorers: a reconstruction as a picture, the image it came from, labels.

A raw reconstruction x becomes the picture r x + mean of `recon_core.matching.fit_to_range` (image
restoration paper, section 5.1). Networks see [-1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, UInt8
from numpy.typing import NDArray
from torch import Tensor

from recon_core.augment import mirrored_labels
from recon_core.matching import fit_to_range
from recon_core.types import N_AUGMENT

E = TypeVar("E", bound="Examples")
"""Examples of one kind, in place of `Self`, which beartype does not support in single methods."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """n training examples: condition and target in [-1, 1], augmentation labels of the target."""

    condition: Float32[Tensor, "n c h w"]
    target: Float32[Tensor, "n c h w"]
    augment: Float32[Tensor, "n 9"]

    def __len__(self) -> int:
        return len(self.target)

    def rows(self: E, start: int, end: int) -> E:
        return self._each(lambda tensor: tensor[start:end])

    def mirrored(self: E, flip: Bool[Tensor, " n"]) -> E:
        """Examples with condition and target flipped left to right where `flip` is True."""
        where = flip[:, None, None, None]
        return replace(
            self,
            condition=torch.where(where, self.condition.flip(-1), self.condition),
            target=torch.where(where, self.target.flip(-1), self.target),
            augment=torch.where(flip[:, None], mirrored_labels(self.augment), self.augment),
        )

    def to(self: E, device: torch.device | str) -> E:
        return self._each(lambda tensor: tensor.to(device))

    def _each(self: E, change: Callable[[Tensor], Tensor]) -> E:
        return replace(self, **{name: change(tensor) for name, tensor in vars(self).items()})


def interleaved(*kinds: tuple[Bool[Tensor, " n"], Examples]) -> Examples:
    """One sequence of n examples: each kind's, in order, at the places where its mask is True."""
    n = len(kinds[0][0])
    whole = {}
    for name in ("condition", "target", "augment"):
        parts = [(mask, getattr(examples, name)) for mask, examples in kinds]
        whole[name] = torch.empty(n, *parts[0][1].shape[1:])
        for mask, values in parts:
            whole[name][mask] = values
    return Examples(**whole)


def make_examples(batch: Mapping[str, NDArray[np.generic]]) -> Examples:
    """The examples in a batch of the pair stream.

    Reads `reconstruction` (floats; the raw one or, where the mean is not 0 everywhere, any positive
    multiple of it), `mean_image` (float32 in [0, 1]), `target` (uint8) and `augment` (float32), n
    rows each.
    """
    missing = {"reconstruction", "mean_image", "target", "augment"} - batch.keys()
    if missing:
        raise ValueError(f"the batch lacks {sorted(missing)}; it has {sorted(batch)}")
    reconstruction, mean, target = (
        torch.from_numpy(np.ascontiguousarray(batch[name]))
        for name in ("reconstruction", "mean_image", "target")
    )
    examples = Examples(
        condition=torch.empty(reconstruction.shape),
        target=torch.empty(target.shape),
        augment=torch.from_numpy(np.ascontiguousarray(batch["augment"], dtype=np.float32)),
    )
    for start in range(0, len(examples), _PIECE):
        rows = slice(start, start + _PIECE)
        fitted = fit_to_range(reconstruction[rows].float(), mean[rows])
        examples.condition[rows] = to_network(fitted)
        examples.target[rows].copy_(target[rows]).div_(255).mul_(2).sub_(1)
    return examples


_PIECE = 64
"""Examples that are normalised at a time: as many as fit a core's cache, six times faster."""


def noise_examples(
    images: UInt8[Tensor, "pool c h w"],
    *,
    n_examples: int,
    n_averaged: int,
    generator: torch.Generator,
    n_sharing: int = 1,
) -> Examples:
    """Examples whose condition says nothing about the target (image restoration paper, section 3).

    Each averages `n_averaged` random images (paper: 300, the size of a run), adds white noise and
    fits it to the range; its target is one of the averaged images. `n_sharing` successive examples
    share an average, as the reconstructions of one run do. `generator` is a CPU one.
    """
    if len(images) == 0:
        raise ValueError("images is empty; noise examples average images of the training set")
    shape = images.shape[1:]
    n_averages = math.ceil(n_examples / n_sharing)
    rows = torch.randint(len(images), (n_averages, n_averaged), generator=generator)
    chosen = torch.randint(n_averaged, (n_examples,), generator=generator)
    noise = torch.randn(n_examples, *shape, generator=generator)
    pool, average = images.cpu(), torch.arange(n_examples) // n_sharing
    sums = [pool.numpy()[drawn].sum(axis=0, dtype=np.uint32) for drawn in rows.numpy()]
    means = np.array(sums, np.float32).reshape(n_averages, *shape) / np.float32(255 * n_averaged)
    mean = torch.from_numpy(means)[average]
    condition = torch.empty_like(noise)
    for start in range(0, n_examples, _PIECE):
        piece = slice(start, start + _PIECE)
        condition[piece] = to_network(fit_to_range(noise[piece], mean[piece]))
    return Examples(
        condition=condition,
        target=to_network(pool[rows[average, chosen]].float() / 255),
        augment=torch.zeros(n_examples, N_AUGMENT),
    )


def to_network(pictures: Float[Tensor, "*n c h w"]) -> Float[Tensor, "*n c h w"]:
    """[0, 1] to [-1, 1]."""
    return 2 * pictures - 1


def to_pictures(values: Float[Tensor, "*n c h w"]) -> Float[Tensor, "*n c h w"]:
    """[-1, 1] to [0, 1], clipped."""
    return ((values + 1) / 2).clamp(0, 1)


DEGREES_OF_FREEDOM = 3
"""Degrees of freedom of Student's t, from which the other images' weights are drawn."""
STRENGTH_SPREAD = 0.6
"""Standard deviation of the logarithm of these weights' norm."""
WHITE = 0.06
"""White noise relative to the mixture, for the starts of the attack and of the victim's weights."""


def mixture_examples(
    images: UInt8[Tensor, "pool c h w"],
    *,
    n_examples: int,
    n_mixed: int,
    strength: float,
    generator: torch.Generator,
    n_sharing: int = 1,
) -> Examples:
    """Examples whose condition is their target mixed with `n_mixed` - 1 other images: ours.

    What the gradients of a dense first layer move lies in the span of the training pictures (minus
    their mean): in victims of 100 CIFAR-10 images 99.5 % of the energy of confident reconstructions
    is a mixture of the run's images. condition ~ t - mean + sum_j b_j (x_j - mean) + white noise,
    fitted to the range; the mean is that of all `n_mixed`. The weights b have a random norm with
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
