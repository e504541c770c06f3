"""Views of pictures in which images are sparse and mixtures are not."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d


def colour_axes(channels: int) -> Float[Tensor, "c c"]:
    """Orthonormal: luminance first, then differences of colours (Helmert's matrix)."""
    axes = torch.zeros(channels, channels, dtype=torch.float64)
    axes[0] = channels**-0.5
    for i in range(1, channels):
        axes[i, :i], axes[i, i] = 1.0, -float(i)
        axes[i] /= math.sqrt(i * (i + 1))
    return axes


def cosine_matrix(n: int) -> Float[Tensor, "n n"]:
    """The orthonormal cosine transform of n numbers, in float64; row 0 is the constant."""
    places = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(torch.pi * (places[None] + 0.5) * places[:, None] / n)
    orthonormal: Tensor = matrix / matrix.norm(dim=1, keepdim=True)
    return orthonormal


def dct_filters(size: int, channels: int, *, colours: bool = True) -> Float[Tensor, "f c s s"]:
    """The size^2 - 1 cosine filters without the constant, for luminance and, with `colours`, every
    difference of colours. ValueError for a size below 2."""
    if size < 2:
        raise ValueError(f"filters of {size}x{size} pixels see no difference; give 2 or more")
    cosines = cosine_matrix(size)
    flat = torch.einsum("ai,bj->abij", cosines, cosines).flatten(0, 1)[1:]
    axes = colour_axes(channels)[: channels if colours else 1]
    return torch.einsum("fij,ac->afcij", flat, axes).flatten(0, 1)


def outputs_of(
    pictures: Float[Tensor, "k c h w"], filters: Float[Tensor, "f c s s"], *, stride: int
) -> Float[Tensor, "k t"]:
    """Every filter at every `stride`-th place, filter after filter, each of mean square 1 over all
    directions and places. ValueError for pictures smaller than the filters."""
    size = filters.shape[-1]
    if min(pictures.shape[2:]) < size:
        raise ValueError(
            f"images of {pictures.shape[2]}x{pictures.shape[3]} are smaller than filters of "
            f"{size}x{size}; lower attack.filter_size"
        )
    outputs = conv2d(pictures, filters.to(pictures), stride=stride)
    scale: Tensor = outputs.square().mean((0, 2, 3), keepdim=True).sqrt().clamp_min(1e-30)
    return (outputs / scale).flatten(1)


def whitened(features: Float[Tensor, "k t"]) -> tuple[Float[Tensor, "k t"], Float[Tensor, "k k"]]:
    """(features of covariance I over directions, what they were multiplied with), symmetric.

    Raises ValueError for fewer features than directions.
    """
    n_directions, n_features = features.shape
    if n_features <= n_directions:
        raise ValueError(
            f"{n_features} features cannot tell {n_directions} images apart; use larger images, a "
            "smaller attack.stride or a larger attack.filter_size"
        )
    wide = features.double()
    values, vectors = torch.linalg.eigh(wide @ wide.mT / n_features)
    floor = float(values[-1]) * torch.finfo(torch.float32).eps
    whiten = ((vectors / values.clamp_min(floor).sqrt()) @ vectors.mT).to(features)
    return whiten @ features, whiten


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
