"""A model of images, learned once, that tells them from mixtures: pooled filters.

Filter by filter, mixtures of hundreds of images look as sparse as images do. What they lack is that
an image's filters are quiet together, so the energy of an image pools filters, as a field of
experts does (Roth and Black 2005), with pools that are learned (Osindero, Welling and Hinton 2006):

    E(x) = sum over places p, pools k of alpha_k log(1 + sum_f H_kf y_fp^2) + kappa/2 x^T C^{-1} x,

with y the outputs of filters, H >= 0, and C the images' covariance, diagonal in the cosine
transform of each colour. It is learned by denoising score matching (Vincent 2011). Sources are then
those that make -d log|det W| + sum_i E(x_i) small.
"""

from __future__ import annotations

import io
import pkgutil
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.features import colour_axes, cosine_matrix


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
        moved = {name: value.to(like) for name, value in self.tensors().items()}
        return SourceModel(stride=self.stride, **moved)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def outputs(self, pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, "k f p"]:
        outputs: Tensor = F.conv2d(pictures, self.filters.to(pictures), stride=self.stride)
        return outputs.flatten(2)

    def whitened(self, pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, "k d"]:
        """C^{-1/2} x, in cosines."""
        scaled = cosines(pictures) / self.spectrum.to(pictures).sqrt()
        return scaled.flatten(1)


@cache
def shipped_model() -> SourceModel:
    """The model that comes with the package: of CIFAR-10's training images, 32x32 in colour, by
    `python -m benchmarks.span.source_model IMAGES`."""
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
