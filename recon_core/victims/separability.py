"""Distances of a network's features, and the losses that move them closer: MixCon, UniCon.

MixCon (MixCon paper, eq. 1), of p images of each class of C:

    1/p 1/(|C| (|C| - 1)) sum_i sum_{c1 != c2} (dist + beta / dist),
    dist = ||h(x_{i,c1}) - h(x_{i,c2})||_2^2, h of norm 1, dist within [eps, 1/eps]     (footnote 3)

It is least where every dist is sqrt(beta); beta = 0 asks for collapse. UniCon (appendix D.1) draws
the images of a class together instead. As in the paper, dist is cut off and nothing else: where it
is below eps, its gradient is 0, so features that have collapsed stay where they are, at the cost of
beta / eps. The sums go over ordered pairs, which divided by |C| (|C| - 1) is the mean over pairs.

dist is 2 - 2 <u, v>, from inner products in float64. Measured on 400 features in float32: right to
1e-12 at dist = .01, to 5e-7 at 1e-8. In float32 inner products are off by 1e-4 at .01, by more than
dist below 1e-6; differences by 1e-4 at 1e-8, and in ten times the time. Features of norm 0 (a ReLU
layer can be all 0) stay 0, at distance 1 of all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from recon_core.strict import Strict

EPS = 1e-8
"""The paper names no value; its smallest beta, 1e-8, balances at a dist of 1e-4."""
ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class MixCon(Strict):
    """lam times eq. 1 is added to the loss. Defaults: table 3, MNIST and FashionMNIST. `normalise`:
    features of norm 1 (footnote 3); without, dist is that of h itself."""

    kind: Literal["mixcon"] = "mixcon"
    lam: float = 1.0
    beta: float = 1e-4
    eps: float = EPS
    normalise: bool = True

    def __post_init__(self) -> None:
        self._within("[0, inf)", "lam", fix="the paper has 0.01 to 100")
        self._within("(0, 1)", "eps", fix=f"give a small one, as {EPS}")
        balance = math.sqrt(self.beta) if self.beta >= 0 else math.nan
        if self.beta != 0 and not self.eps <= balance <= 1 / self.eps:
            raise ValueError(
                f"beta={self.beta} must be 0, or its balance, dist = sqrt(beta), within "
                f"[eps, 1/eps] of eps={self.eps}; the paper has 1e-8 to 1e-2"
            )


@dataclass(frozen=True, kw_only=True)
class UniCon(Strict):
    """lam times D.1's loss is added. Default: MNIST and FashionMNIST there. `normalise`: as
    MixCon's; without, the loss is as small as one likes at no cost for what the server sees."""

    kind: Literal["unicon"] = "unicon"
    lam: float = 1.0
    normalise: bool = True

    def __post_init__(self) -> None:
        self._within("[0, inf)", "lam", fix="the paper has 0.01 to 100")


@dataclass(frozen=True)
class Separability:
    """Distances between the features of different images, one number per network."""

    mean: Float64[Tensor, " r"]
    minimum: Float64[Tensor, " r"]


def mixcon(
    features: Float[Tensor, "r p k m"],
    beta: Float[Tensor, " r"],
    *,
    normalise: bool = True,
    eps: float = EPS,
) -> Float[Tensor, " r"]:
    """Eq. 1 of R networks; image i of class c is features[:, i, c]. ValueError for fewer than two
    classes, or no images."""
    _, n_images, n_classes, _ = features.shape
    _check_batch(n_images, n_classes)
    h = features.double()
    first, second = torch.triu_indices(n_classes, n_classes, 1, device=h.device)
    dist = _squared_distances(h @ h.mT, normalise=normalise)[..., first, second]
    dist = dist.clamp(eps, 1 / eps)
    cost = dist + beta.double().view(-1, 1, 1) / dist
    return cost.mean((1, 2)).to(features.dtype)


def unicon(features: Float[Tensor, "r p k m"], *, normalise: bool = True) -> Float[Tensor, " r"]:
    """1/|C| sum_c 1/(|C_c| (|C_c| - 1)) sum_{i, j in C_c} ||h(x_i) - h(x_j)||^2 (D.1), R networks.
    ValueError for fewer than two images of a class."""
    n_images = features.shape[1]
    _check_batch(n_images, features.shape[2], least_images=2, least_classes=1)
    u = _unit(features) if normalise else features
    spread = (u - u.mean(1, keepdim=True)).square().sum((1, 3)) / (n_images - 1)
    return 2 * spread.mean(1)


def balanced_rows(labels: Int64[Tensor, " n"], n_classes: int) -> Int64[Tensor, "p k"]:
    """The batch's first p images of every class, p as the smallest class has (MixCon paper,
    footnote 6); row i of column c is the i-th of class c. ValueError if a class has none."""
    rows = [(labels == c).nonzero().flatten() for c in range(n_classes)]
    n_images = min(len(r) for r in rows)
    if n_images == 0:
        missing = [c for c, r in enumerate(rows) if not len(r)]
        raise ValueError(
            f"the batch of {len(labels)} has no image of class {', '.join(map(str, missing))}; "
            "draw the same number of every class"
        )
    return torch.stack([r[:n_images] for r in rows], dim=1)


@torch.no_grad()
def separability(features: Float[Tensor, "r n m"], *, normalise: bool = True) -> Separability:
    """The mean and the least of ||h(x_i) - h(x_j)|| over all pairs i < j (definition 3.1). Of norm
    1 (footnote 3) unless `normalise` is false. In float64, in blocks. NaN where a feature is not
    finite; ValueError for fewer than two images."""
    n_images = features.shape[1]
    if n_images < 2:
        raise ValueError(f"{n_images} images have no pairs; give the features of at least 2")
    found = [_pairs(h.double(), normalise=normalise) for h in features]
    mean, minimum = torch.stack(found).unbind(1)
    return Separability(mean=mean, minimum=minimum)


def _pairs(h: Float64[Tensor, "n m"], *, normalise: bool) -> Float64[Tensor, " 2"]:
    """The mean distance and the least. The closest pair is measured again by its difference: equal
    features are at 0, not where rounding leaves them."""
    u = _unit(h) if normalise else h
    u = u - u.mean(0)
    n = len(u)
    total = u.new_zeros(())
    least, closest = u.new_full((), math.inf), torch.zeros(2, dtype=torch.int64, device=u.device)
    for i in range(0, n, ROWS_AT_ONCE):
        for j in range(i, n, ROWS_AT_ONCE):
            dist = _between(u[i : i + ROWS_AT_ONCE], u[j : j + ROWS_AT_ONCE])
            later = torch.ones_like(dist, dtype=torch.bool).triu(1 if i == j else -n)
            total += torch.where(later, dist.sqrt(), 0).sum()
            value, where = torch.where(later, dist, math.inf).flatten().min(0)
            here = torch.stack([i + where // dist.shape[1], j + where % dist.shape[1]])
            closest = torch.where(value < least, here, closest)
            least = torch.minimum(least, value)
    gap = (u[closest[0]] - u[closest[1]]).square().sum()
    gap = torch.where(least.isnan(), least, gap.sqrt())
    return torch.stack([total / (n * (n - 1) / 2), gap])


def _between(a: Float64[Tensor, "i m"], b: Float64[Tensor, "j m"]) -> Float64[Tensor, "i j"]:
    norms = a.square().sum(1, keepdim=True) + b.square().sum(1)
    return (norms - 2 * a @ b.T).clamp_min(0)


def _squared_distances(
    gram: Float64[Tensor, "r p k k"], *, normalise: bool
) -> Float64[Tensor, "r p k k"]:
    """||u_a - u_b||^2 from <h_a, h_b>, where u is h, or h at norm 1 (0 stays 0)."""
    norms = gram.diagonal(dim1=-2, dim2=-1)
    if normalise:
        scale = torch.where(norms > 0, norms, 1).rsqrt()
        gram = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
        norms = (norms > 0).to(gram.dtype)
    return norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2 * gram


def _unit(h: Float[Tensor, "*rows m"]) -> Float[Tensor, "*rows m"]:
    """h at norm 1; 0 stays 0, with the gradient of h itself."""
    norms = h.square().sum(-1, keepdim=True)
    return h * torch.where(norms > 0, norms, 1).rsqrt()


def _check_batch(
    n_images: int, n_classes: int, *, least_images: int = 1, least_classes: int = 2
) -> None:
    if n_classes < least_classes:
        raise ValueError(
            f"{n_classes} classes have no pairs of different ones; give at least {least_classes}"
        )
    if n_images < least_images:
        raise ValueError(
            f"p={n_images} images of each class; this loss needs at least {least_images}: give "
            "larger batches, the same number of every class"
        )
