"""Maximum likelihood without orthogonality: the second half of a separation.

Whitened images are not quite orthogonal, since images have something in common. So W is freed:
minimised is

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

from recon_core.attacks.span.lbfgs import Descent, Report, Solve, minimise, unheard
from recon_core.attacks.span.orthogonal import contrast

SMALLEST_EIGENVALUE = 0.01


def unmix(
    z: Float[Tensor, "r k t"],
    start: Float[Tensor, "r k k"],
    *,
    shape: float,
    scale: float,
    n_iterations: int,
    tolerance: float = 1e-6,
    report: Report = unheard,
) -> Descent:
    """The unmixing matrix that likelihood ends in, from `start`; rows' scales are fitted, too.

    `shape` is a, `scale` is c. Without iterations it is the start.
    """
    objective = Likelihood(shape, scale)
    return minimise(
        objective, z, start, n_iterations=n_iterations, tolerance=tolerance, report=report
    )


@dataclass(frozen=True)
class Likelihood:
    """-log|det W| + a sum_i E[log(1 + (y_i / c)^2)]."""

    shape: float
    scale: float

    def loss(self, w: Float[Tensor, "r k k"], y: Float[Tensor, "r k t"]) -> Float[Tensor, " r"]:
        volume = torch.linalg.slogdet(w.double()).logabsdet
        value: Tensor = self.shape * contrast(y, self.scale).sum(1) - volume.to(y.dtype)
        return value

    def gradient(self, y: Float[Tensor, "r k t"]) -> tuple[Float[Tensor, "r k k"], Solve]:
        """For i != j the Hessian's block of (p_ij, p_ji) is ((h_ij, 1), (1, h_ji)), h_ij =
        E[psi'_i] E[y_j^2]; of p_ii it is E[psi'_i y_i^2] + 1. Eigenvalues below a bound are lifted
        to it."""
        square = y.square()
        inverse = (square + self.scale**2).reciprocal_()
        g = torch.bmm(y * inverse, y.mT).mul_(2 * self.shape / y.shape[2])
        curve = inverse.square().mul_(2 * self.scale**2).sub_(inverse).mul_(2 * self.shape)
        h = curve.mean(2)[:, :, None] * square.mean(2)[:, None, :]
        own = (curve * square).mean(2)
        eye = torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
        middle, apart = (h + h.mT) / 2, (h - h.mT) / 2
        lowest = middle - (apart.square() + 1).sqrt()
        h = h + (SMALLEST_EIGENVALUE - lowest).clamp_min(0.0)
        determinant = (h * h.mT - 1).clamp_min(SMALLEST_EIGENVALUE**2)
        diagonal = (own + 1).clamp_min(SMALLEST_EIGENVALUE)

        def solve(v: Tensor) -> Tensor:
            off = (h.mT * v - v.mT) / determinant
            return off * (1 - eye) + torch.diag_embed(v.diagonal(dim1=1, dim2=2) / diagonal)

        return g - eye, solve

    def step(self, p: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        return p + torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)

    def clean(self, w: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        return w
