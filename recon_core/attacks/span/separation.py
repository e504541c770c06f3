"""Separation of whitened mixtures into sparse sources: rotations, then maximum likelihood.

Sources are the rows of Y = W Z with W orthogonal. Minimised is the mean over samples of

    sum_i log(1 + (y_i / c)^2),

by L-BFGS on the orthogonal group (Picard-O: Ablin, Cardoso and Gramfort 2018, "Faster ICA under
orthogonal constraint"): with psi(y) = y / (c^2 + y^2) and G = E[psi(y) y^T], the relative gradient
is G - G^T, its Hessian nearly diagonal, E psi'_i + E psi'_j - G_ii - G_jj. A wide score (large c)
has few false optima and a narrow one tells images from mixtures, so c is lowered in stages. Then a
fixed point with a score that knows which samples belong together,

    g(y) = y / (c^2 + mean over filters at the place of y^2 + y^2),

which also takes more sources than directions: then the rows of W are a tight frame, W^T W = I, and
the score sees them at length 1 (as in reconstruction ICA, Le et al. 2011, whose penalty on
W^T W z - z is a constraint here).

Whitened images are not quite orthogonal, so W is freed at last (`Likelihood`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.lbfgs import (
    Derivatives,
    Descent,
    Report,
    Solve,
    after,
    likelihood_blocks,
    minimise,
    unheard,
)

SMALLEST_CURVATURE = 0.02
SMALLEST_ROW = 1e-6


@dataclass(frozen=True)
class Stage:
    scale: float
    n_iterations: int


@dataclass(frozen=True)
class Sparsity:
    """sum_i E log(1 + (y_i / c)^2) over rotations."""

    scale: float

    def at(
        self, _w: Float[Tensor, "r k k"], y: Float[Tensor, "r k t"]
    ) -> tuple[Float[Tensor, " r"], Derivatives]:
        return contrast(y, self.scale).sum(1), lambda: self._derivatives(y)

    def _derivatives(self, y: Float[Tensor, "r k t"]) -> tuple[Float[Tensor, "r k k"], Solve]:
        inverse = y.square().add_(self.scale**2).reciprocal_()
        score = y * inverse
        g = torch.bmm(score, y.mT) / y.shape[2]
        # psi' = (c^2 - y^2) / (c^2 + y^2)^2 = 2 c^2 inverse^2 - inverse
        curve = 2 * self.scale**2 * inverse.square().mean(2) - inverse.mean(2)
        own = curve - g.diagonal(dim1=1, dim2=2)
        h = (own[:, :, None] + own[:, None, :]).clamp_min(2 * SMALLEST_CURVATURE)
        return g - g.mT, lambda v: v / h

    def step(self, p: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        return cayley(p)

    def clean(self, w: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        return orthogonal(w)


def rotation_start(
    size: int, generator: torch.Generator, *, n_sources: int | None = None
) -> Float[Tensor, "m k"]:
    """A random rotation (Haar), or tight frame of `n_sources` rows, drawn on the CPU in float64."""
    drawn = torch.randn(n_sources or size, size, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(drawn)
    rotation: Tensor = q * r.diagonal().sign()
    return rotation


def contrast(sources: Float[Tensor, "r k t"], scale: float) -> Float[Tensor, "r k"]:
    """Mean of log(1 + (y/c)^2) of every source: the lower, the sparser."""
    return (sources / scale).square_().log1p_().mean(2)


def rotate(
    z: Float[Tensor, "r k t"],
    start: Float[Tensor, "r k k"],
    stages: Sequence[Stage],
    *,
    tolerance: float = 1e-6,
    report: Report = unheard,
) -> Descent:
    done = Descent(start, start @ z, z.new_zeros(len(z)), 0, False)
    for stage in stages:
        ended = minimise(
            Sparsity(stage.scale),
            z,
            done.rotation,
            n_iterations=stage.n_iterations,
            tolerance=tolerance,
            report=partial(after, report, done.n_iterations),
        )
        n = done.n_iterations + ended.n_iterations
        done = replace(ended, n_iterations=n)
    return done


def cayley(p: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
    """(I - p/2)^{-1} (I + p/2), orthogonal for antisymmetric p and exp(p) up to p^3/12."""
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    solved: Tensor = torch.linalg.solve(eye - p / 2, eye + p / 2)
    return solved


def orthogonal(w: Float[Tensor, "r m k"]) -> Float[Tensor, "r m k"]:
    """The nearest orthogonal matrix, or tight frame, W (W^T W)^{-1/2}."""
    u, _, v = torch.linalg.svd(w.double(), full_matrices=False)
    nearest: Tensor = (u @ v).to(w.dtype)
    return nearest


def grouped_fixed_point(
    z: Float[Tensor, "r k t"],
    rotation: Float[Tensor, "r m k"],
    *,
    n_filters: int,
    scale: float,
    n_iterations: int,
    report: Report = unheard,
) -> Descent:
    """FastICA's steps W <- orth(E[g(y) z^T] - diag(E[g'(y)]) W) with the grouped score.

    `n_filters` samples stand at each place, filter after filter; the sources are as many as the
    directions, or more.
    """
    w, places = rotation, (n_filters, z.shape[2] // n_filters)
    is_frame = w.shape[1] > w.shape[2]
    y = w @ z
    for n in range(n_iterations):
        if is_frame:
            length = w.norm(dim=2, keepdim=True).clamp_min(SMALLEST_ROW)
            w, y = w / length, y / length
        square = y.unflatten(2, places).square()
        inverse = (square.mean(2, keepdim=True) + square + scale**2).reciprocal_()
        slope = (inverse - 2 * square * inverse.square()).flatten(2).mean(2)
        g = torch.bmm(y * inverse.flatten(2), z.mT) / z.shape[2]
        w = orthogonal(g - slope[:, :, None] * w)
        y = w @ z
        report(n + 1)
    return Descent(w, y, contrast(y, scale).sum(1), n_iterations, False)


@dataclass(frozen=True)
class Likelihood:
    """-log|det W| + a sum_i E[log(1 + (y_i / c)^2)]: independent Student sources with 2a - 1
    degrees of freedom; relative gradient a E[psi(y) y^T] - I, psi(y) = 2y / (c^2 + y^2), with
    Picard's 2x2 blocks for the Hessian (Ablin, Cardoso and Gramfort 2018, "Faster independent
    component analysis by preconditioning with Hessian approximations")."""

    shape: float
    scale: float

    def at(
        self, w: Float[Tensor, "r k k"], y: Float[Tensor, "r k t"]
    ) -> tuple[Float[Tensor, " r"], Derivatives]:
        volume = torch.linalg.slogdet(w.double()).logabsdet
        value: Tensor = self.shape * contrast(y, self.scale).sum(1) - volume.to(y.dtype)
        return value, lambda: self._derivatives(y)

    def _derivatives(self, y: Float[Tensor, "r k t"]) -> tuple[Float[Tensor, "r k k"], Solve]:
        square = y.square()
        inverse = (square + self.scale**2).reciprocal_()
        g = torch.bmm(y * inverse, y.mT).mul_(2 * self.shape / y.shape[2])
        curve = inverse.square().mul_(2 * self.scale**2).sub_(inverse).mul_(2 * self.shape)
        h = curve.mean(2)[:, :, None] * square.mean(2)[:, None, :]
        h.diagonal(dim1=1, dim2=2).copy_((curve * square).mean(2))
        return g - torch.eye(y.shape[1], dtype=y.dtype, device=y.device), likelihood_blocks(h)

    def step(self, p: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        return p + torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)

    def clean(self, w: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        return w
