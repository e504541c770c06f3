"""Views of pictures in which images are sparse and mixtures are not, and a model of images."""

from __future__ import annotations

import io
import math
import pkgutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
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


BLOCK, BLOCK_ON_GPU = 16, 1024
"""Pictures that a model sees at once: on a CPU as many as fit a cache."""
SPARSE = 0.25
"""Share of a pool matrix from which on it is multiplied as any other."""


@dataclass(frozen=True)
class SourceModel:
    """A model of images, learned once by denoising score matching (Vincent 2011), that tells them
    from mixtures, whose filters are not quiet together: pools of filters as in a field of experts
    (Roth and Black 2005; Osindero, Welling and Hinton 2006).

        E(x) = sum over places p, pools k of alpha_k log(1 + sum_f H_kf y_fp^2)
            + kappa/2 x^T C^{-1} x

    with y the outputs of `filters` at every `stride`-th place, `pools` H (k, f), and C the images'
    covariance, diagonal in the cosine transform of each colour, `spectrum` (c, h, w). Sources are
    those that make -d log|det W| + sum_i E(x_i) small.
    """

    filters: Float[Tensor, "f c s s"]
    stride: int
    pools: Float[Tensor, "k f"]
    alpha: Float[Tensor, " k"]
    kappa: Float[Tensor, ""]
    spectrum: Float[Tensor, "c h w"]

    def to(self, like: Tensor) -> SourceModel:
        moved = {name: value.to(like) for name, value in self.tensors().items()}
        return SourceModel(stride=self.stride, **moved)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def outputs(self, pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, "k f p"]:
        outputs: Tensor = F.conv2d(pictures, self.filters.to(pictures), stride=self.stride)
        return outputs.flatten(2)

    def pooled(
        self, pictures: Float[Tensor, "k c h w"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k c h w"]]:
        """(the pools' part of the energy, its gradient) of pictures, `BLOCK` at a time."""
        alpha, size, (pools, back) = self.alpha[:, None], self.filters.shape[-1], self._factors
        flat = self.filters.flatten(1)
        energies, gradients = [], []
        for y, n in self._seen(pictures):
            total = (pools @ y.square()).add_(1)
            energies.append((self.alpha @ total.log()).view(n, -1).sum(1))
            psi = (back @ (2 * alpha / total)).mul_(y)
            patches = (flat.mT @ psi).view(len(flat[0]), n, -1).transpose(0, 1)
            gradients.append(
                F.fold(patches.contiguous(), pictures.shape[2:], size, stride=self.stride)
            )
        return torch.cat(energies), torch.cat(gradients)

    def curves(
        self, pictures: Float[Tensor, "k c h w"]
    ) -> tuple[Float[Tensor, "k f"], Float[Tensor, "k f"]]:
        """(the energy's second derivative by each filter's output, but for what pools have in
        common, summed over places; the mean square of the output)."""
        alpha, (pools, back), twice = self.alpha[:, None], self._factors, self._squared
        curves, squares = [], []
        for y, n in self._seen(pictures):
            square = y.square()
            total = (pools @ square).add_(1)
            bent = (twice @ (alpha / total.square())).mul_(square)
            curve = 2 * (back @ (alpha / total)) - 4 * bent
            curves.append(curve.view(len(y), n, -1).sum(2).mT)
            squares.append(square.view(len(y), n, -1).mean(2).mT)
        return torch.cat(curves), torch.cat(squares)

    def _seen(self, pictures: Tensor) -> Iterator[tuple[Float[Tensor, "f p"], int]]:
        """(outputs at all places of n pictures, n)."""
        size = self.filters.shape[-1]
        for block in pictures.split(BLOCK if pictures.device.type == "cpu" else BLOCK_ON_GPU):
            patches = block.unfold(2, size, self.stride).unfold(3, size, self.stride)
            columns = patches.permute(1, 4, 5, 0, 2, 3).reshape(self.filters[0].numel(), -1)
            yield self.filters.flatten(1) @ columns, len(block)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        return _fast(self.pools), _fast(self.pools.mT)

    @cached_property
    def _squared(self) -> Tensor:
        return _fast(self.pools.mT.square())

    def whitened(self, pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, "k d"]:
        """C^{-1/2} x, in cosines."""
        scaled = cosines(pictures) / self.spectrum.to(pictures).sqrt()
        return scaled.flatten(1)


def _fast(matrix: Float[Tensor, "a b"]) -> Tensor:
    """The matrix as it is multiplied fastest from the left."""
    matrix = matrix.contiguous()
    few = float(matrix.count_nonzero()) < SPARSE * matrix.numel()
    if matrix.device.type != "cpu" or not few or not torch.backends.mkl.is_available():
        return matrix
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return matrix.to_sparse_csr()


Kind = Literal["rough", "coarse", "fine"]


@cache
def shipped_model(kind: Kind = "coarse") -> SourceModel:
    """A model that comes with the package, of the training images of a JPEG copy of CIFAR-10: 32x32
    in colour, by `python -m benchmarks.span.source_model`, learned in noise of 1.2 ("rough"), .7
    and .35 of the images' size. `fine` has twice the pools."""
    packaged = pkgutil.get_data(__name__, f"source_model_{kind}.npz")  # part of the code, as this
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
