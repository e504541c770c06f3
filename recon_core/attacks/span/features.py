"""Views of pictures in which images are sparse and mixtures are not."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d, normalize

SIZE, STRIDE = 4, 2
"""Sides of the cosine filters, and pixels from one place to the next. Of 100 images of a network
with an unknown start 4x4 give 70 back, 3x3 63, 6x6 and 8x8 68; every place 70, in more time."""


def n_filters(channels: int) -> int:
    """Number of features at each place."""
    return (SIZE**2 - 1) * channels


def n_features(shape: tuple[int, int, int]) -> int:
    """Number of features of a picture (c, h, w)."""
    return n_filters(shape[0]) * math.prod((side - SIZE) // STRIDE + 1 for side in shape[1:])


def check_features(n_directions: int, shape: tuple[int, int, int]) -> None:
    """Raises ValueError for pictures smaller than the filters, or with fewer features than there
    are directions."""
    if min(shape[1:]) < SIZE:
        raise ValueError(
            f"images of {shape[1]}x{shape[2]} are smaller than filters of {SIZE}x{SIZE}; use "
            "larger images"
        )
    if n_features(shape) <= n_directions:
        raise ValueError(
            f"{n_features(shape)} features cannot tell {n_directions} images apart; use larger "
            "images"
        )


def colour_axes(channels: int) -> Float[Tensor, "c c"]:
    """Orthonormal: luminance first, then differences of colours (Helmert's matrix)."""
    ones = torch.ones(channels, channels, dtype=torch.float64)
    axes = normalize(ones.tril(-1) - torch.arange(channels).diag(), dim=1)
    axes[0] = channels**-0.5
    return axes


def cosine_matrix(n: int) -> Float[Tensor, "n n"]:
    """The orthonormal cosine transform of n numbers, in float64; row 0 is the constant."""
    places = torch.arange(n, dtype=torch.float64)
    return normalize(torch.cos(torch.pi * (places[None] + 0.5) * places[:, None] / n), dim=1)


def dct_filters(channels: int) -> Float[Tensor, "f c s s"]:
    """The cosine filters but for the constant, of luminance and every difference of colours."""
    wave = cosine_matrix(SIZE)
    flat = torch.einsum("ai,bj->abij", wave, wave).flatten(0, 1)[1:]
    return torch.einsum("fij,ac->afcij", flat, colour_axes(channels)).flatten(0, 1)


def features_of(pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, "k t"]:
    """Every filter at every second place, filter after filter, each of mean square 1 over all
    directions and places."""
    outputs = conv2d(pictures, dct_filters(pictures.shape[1]).to(pictures), stride=STRIDE)
    scale: Tensor = outputs.square().mean((0, 2, 3), keepdim=True).sqrt().clamp_min(1e-30)
    return (outputs / scale).flatten(1)


def whitening(features: Float[Tensor, "k t"]) -> Float[Tensor, "k k"]:
    """The symmetric matrix with which features have the covariance I over directions."""
    wide = features.double()
    values, vectors = torch.linalg.eigh(wide @ wide.mT / features.shape[1])
    floor = float(values[-1]) * torch.finfo(torch.float32).eps
    return torch.mm(vectors / values.clamp_min(floor).sqrt(), vectors.mT).to(features)


def cosines(pictures: Float[Tensor, "k c h w"], *, inverse: bool = False) -> Tensor:
    """The orthonormal cosine transform of luminance and differences of colours, or its inverse."""
    channels, height, width = pictures.shape[1:]
    colours = colour_axes(channels).to(pictures)
    rows, columns = (cosine_matrix(n).to(pictures) for n in (height, width))
    if inverse:
        return torch.einsum("kahw,hi,wj,ac->kcij", pictures, rows, columns, colours)
    return torch.einsum("kchw,ac,ih,jw->kaij", pictures, colours, rows, columns)
