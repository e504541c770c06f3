"""Maximum likelihood without orthogonality: the second half of a separation.

Whitened images are not quite orthogonal, so W is freed: minimised is

    -log|det W| + a sum_i E[log(1 + (y_i / c)^2)],

the likelihood of independent Student sources with 2a - 1 degrees of freedom, by L-BFGS in the
relative gradient a E[psi(y) y^T] - I, psi(y) = 2y / (c^2 + y^2), with Picard's 2x2 blocks for the
Hessian (Ablin, Cardoso and Gramfort 2018, "Faster independent component analysis by preconditioning
with Hessian approximations").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.lbfgs import (
    Solve,
    likelihood_blocks,
)
from recon_core.attacks.span.orthogonal import contrast
from recon_core.attacks.span.source_model import SourceModel

ROWS = 50
"""Sources whose pools are computed at once: fits a cache."""


class _Free:
    """How W moves where it may be any matrix: to (I + p) W."""

    def step(self, p: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        return p + torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)

    def clean(self, w: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        return w


@dataclass(frozen=True)
class Likelihood(_Free):
    """-log|det W| + a sum_i E[log(1 + (y_i / c)^2)]."""

    shape: float
    scale: float

    def loss(self, w: Float[Tensor, "r k k"], y: Float[Tensor, "r k t"]) -> Float[Tensor, " r"]:
        volume = torch.linalg.slogdet(w.double()).logabsdet
        value: Tensor = self.shape * contrast(y, self.scale).sum(1) - volume.to(y.dtype)
        return value

    def gradient(
        self, _w: Float[Tensor, "r k k"], y: Float[Tensor, "r k t"]
    ) -> tuple[Float[Tensor, "r k k"], Solve]:
        square = y.square()
        inverse = (square + self.scale**2).reciprocal_()
        g = torch.bmm(y * inverse, y.mT).mul_(2 * self.shape / y.shape[2])
        curve = inverse.square().mul_(2 * self.scale**2).sub_(inverse).mul_(2 * self.shape)
        h = curve.mean(2)[:, :, None] * square.mean(2)[:, None, :]
        h.diagonal(dim1=1, dim2=2).copy_((curve * square).mean(2))
        return g - torch.eye(y.shape[1], dtype=y.dtype, device=y.device), likelihood_blocks(h)


@dataclass(frozen=True)
class ModelLikelihood(_Free):
    """-log|det W| + sum_i E(x_i) / d of sources Y = W Z, for a batch of spans. `precision` (r, k,
    k): Z's Gram matrix in units of the images' covariance, so that tr(W S W^T) = sum_i x_i^T C^{-1}
    x_i. The rows of W are scaled by the model itself."""

    model: SourceModel
    precision: Float[Tensor, "r k k"]
    n_pixels: int

    def loss(self, w: Float[Tensor, "r k k"], y: Float[Tensor, "r k t"]) -> Float[Tensor, " r"]:
        energies = [self._energy(rows) for rows in self._places(y).split(ROWS)]
        pooled_energy = torch.cat(energies).view(y.shape[:2]).sum(1)
        square = ((w @ self.precision) * w).sum((1, 2))
        energy = (pooled_energy + self.model.kappa / 2 * square) / self.n_pixels
        value: Tensor = energy - torch.linalg.slogdet(w.double()).logabsdet.to(energy)
        return value

    def gradient(
        self, w: Float[Tensor, "r k k"], y: Float[Tensor, "r k t"]
    ) -> tuple[Tensor, Solve]:
        """The Hessian is taken as if filters were independent, with E[psi'] of each."""
        scores, curves = [], []
        for rows in self._places(y).split(ROWS):
            weight, curve = self._weight_and_curve(rows)
            scores.append(weight.mul_(rows).flatten(1))
            curves.append(curve.sum(2))
        score = torch.cat(scores).view(y.shape)
        square = self._places(y).square().mean(2).view(*y.shape[:2], -1)
        g = torch.bmm(score, y.mT)
        h = torch.bmm(torch.cat(curves).view_as(square), square.mT)
        stiff = (self.model.kappa / self.n_pixels) * (w @ self.precision @ w.mT)
        h = h + stiff.diagonal(dim1=1, dim2=2)[:, None, :]
        relative: Tensor = g + stiff - torch.eye(g.shape[1]).to(g)
        return relative, likelihood_blocks(h)

    def _places(self, y: Float[Tensor, "r k t"]) -> Float[Tensor, "m f p"]:
        places: Tensor = y.flatten(0, 1).unflatten(1, (self.model.filters.shape[0], -1))
        return places

    def _energy(self, y: Float[Tensor, "m f p"]) -> Float[Tensor, " m"]:
        logs = torch.matmul(self.model.pools, y.square()).log1p_()
        return torch.einsum("mkp,k->m", logs, self.model.alpha)

    def _weight_and_curve(
        self, y: Float[Tensor, "m f p"]
    ) -> tuple[Float[Tensor, "m f p"], Float[Tensor, "m f p"]]:
        """(psi / y, psi' but for what pools have in common), over d."""
        square = y.square()
        total = torch.matmul(self.model.pools, square).add_(1)
        share = self.model.alpha[:, None] / total
        weight = torch.matmul(self.model.pools.mT, share).mul_(2 / self.n_pixels)
        bent = torch.matmul(self.model.pools.square().mT, share.div_(total))
        curve = weight - bent.mul_(square).mul_(4 / self.n_pixels)
        return weight, curve
