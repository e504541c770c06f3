"""Views of pictures in which images are sparse and mixtures of them are not.

Every direction of the span is a picture. It is filtered with zero-mean filters, at every
`stride`-th position; each filter's output, over all directions and positions, is divided by what it
varies. An image's outputs are sparse, since it is flat in most places; a sum of images has edges
everywhere.

`dct_filters`: the undecimated n x n cosine transform without its constant, on luminance and two
differences of colours. `learned_filters`: the independent components of patches of other images
(Bell and Sejnowski 1997), edges in colour, which tell more apart where the span is known well, and
less where noise is left in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d

from recon_core.attacks.span.orthogonal import Stage, rotate, rotation_start

PATCH_STAGES = (Stage(1.0, 60), Stage(0.5, 100))
SMALLEST = 1e-10
"""Share of the largest variance below which a direction of patches holds nothing."""


@dataclass(frozen=True)
class Whitened:
    """Features `z` (k, t) of k directions with covariance I, and `whiten` (k, k), which makes them.

    `n_filters` of them stand at each position, filter after filter.
    """

    z: Float[Tensor, "k t"]
    whiten: Float[Tensor, "k k"]
    n_filters: int


def colour_axes(channels: int) -> Float[Tensor, "c c"]:
    """Orthonormal: luminance first, then differences of colours (Helmert's matrix)."""
    axes = torch.zeros(channels, channels, dtype=torch.float64)
    axes[0] = channels**-0.5
    for i in range(1, channels):
        axes[i, :i], axes[i, i] = 1.0, -float(i)
        axes[i] /= math.sqrt(i * (i + 1))
    return axes


def dct_filters(size: int, channels: int, *, colours: bool = True) -> Float[Tensor, "f c s s"]:
    """The size^2 - 1 cosine filters without the constant, for luminance and, with `colours`, every
    difference of colours. ValueError for a size below 2."""
    if size < 2:
        raise ValueError(f"filters of {size}x{size} pixels see no difference; give 2 or more")
    n = torch.arange(size, dtype=torch.float64)
    cosines = torch.cos(torch.pi * (n[None] + 0.5) * n[:, None] / size)
    cosines /= cosines.norm(dim=1, keepdim=True)
    flat = torch.einsum("ai,bj->abij", cosines, cosines).flatten(0, 1)[1:]
    axes = colour_axes(channels)[: channels if colours else 1]
    filters: Tensor = torch.einsum("fij,ac->afcij", flat, axes).flatten(0, 1)
    return filters


def learned_filters(
    images: Float[Tensor, "n c h w"],
    size: int,
    *,
    generator: torch.Generator,
    n_patches: int = 60_000,
) -> Float[Tensor, "f c s s"]:
    """c (size^2 - 1) filters: the independent components of `n_patches` patches of `images`.

    Patches lose each colour's mean, are whitened by principal components, and rotated as the span
    is (`orthogonal.rotate`). Raises ValueError for images smaller than the filters.
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


def whitened_features(
    pictures: Float[Tensor, "k c h w"], filters: Float[Tensor, "f c s s"], *, stride: int
) -> Whitened:
    """The filters' outputs of every direction, whitened over directions.

    Raises:
        ValueError: pictures smaller than the filters, or fewer features than directions.
    """
    size = filters.shape[-1]
    if min(pictures.shape[2:]) < size:
        raise ValueError(
            f"images of {pictures.shape[2]}x{pictures.shape[3]} are smaller than filters of "
            f"{size}x{size}; lower attack.filter_size"
        )
    like = filters.to(pictures)
    outputs = conv2d(pictures, like, stride=stride)
    outputs = outputs / outputs.square().mean((0, 2, 3), keepdim=True).sqrt().clamp_min(1e-30)
    flat = outputs.flatten(1)
    if flat.shape[1] <= len(flat):
        raise ValueError(
            f"{flat.shape[1]} features cannot tell {len(flat)} images apart; lower "
            f"attack.stride={stride}, or raise attack.filter_size={size}"
        )
    covariance = (flat.double() @ flat.double().mT) / flat.shape[1]
    values, vectors = torch.linalg.eigh(covariance)
    floor = float(values[-1]) * torch.finfo(torch.float32).eps
    whiten = ((vectors / values.clamp_min(floor).sqrt()) @ vectors.mT).to(pictures)
    return Whitened(whiten @ flat, whiten, len(filters))
