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

`FeatureDefence` adds MixCon's gradient to a victim's (MixCon paper, section 3.2):

    min over theta of mean_i loss(phi(theta; x_i), y_i) + lam L(h(x_1), ..., h(x_n))

with h(x) the activations of one hidden layer. The paper's batches are drawn anew, so that in time
every image is compared with all of the other classes; L is the mean of eq. 1 over such draws, that
over all P ordered pairs of images of different classes. Gradients are written out, as the rest of a
step is. With u = h / ||h||, in float64,

    dL/du_a = 4 / P sum_b w_ab (u_a - u_b) over the images b of other classes than a's,
              w_ab = 1 - beta / dist_ab^2 where eps <= dist_ab <= 1 / eps, else 0
    dL/dh   = (dL/du - <dL/du, u> u) / ||h||.

Without `normalise`, u is h. Nothing here looks at a number, so that a CUDA graph can hold it. With
this term a trained victim is no KKT point: the gradient of L is no sum of lam_i y_i grad
phi(theta; x_i), and eq. 1 of the image restoration paper has one term too many. A dense first layer
still is a combination of the images, W_1 = W_0 + sum_i d_i x_i^T, only of other d_i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from recon_core.strict import Strict, Within
from recon_core.victims.network import Architecture, Network

EPS = 1e-8
"""The paper names no value; its smallest beta, 1e-8, balances at a dist of 1e-4."""
ROWS_AT_ONCE = 1024
LARGER = "this loss needs at least {}: give larger batches, the same number of every class"


@dataclass(frozen=True, kw_only=True)
class MixCon(Strict):
    """lam times eq. 1 is added to the loss. Defaults: table 3, MNIST and FashionMNIST. `normalise`:
    features of norm 1 (footnote 3); without, dist is that of h itself."""

    kind: Literal["mixcon"] = "mixcon"
    lam: Annotated[float, Within("[0, inf)", fix="the paper has 0.01 to 100")] = 1.0
    beta: float = 1e-4
    eps: Annotated[float, Within("(0, 1)", fix=f"give a small one, as {EPS}")] = EPS
    normalise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
    lam: Annotated[float, Within("[0, inf)", fix="the paper has 0.01 to 100")] = 1.0
    normalise: bool = True


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
    if n_classes < 2:
        raise ValueError(f"{n_classes} classes have no pairs of different ones; give at least 2")
    if n_images < 1:
        raise ValueError(f"p={n_images} images of each class; {LARGER.format(1)}")
    h = features.double()
    first, second = torch.triu_indices(n_classes, n_classes, 1, device=h.device)
    gram = h @ h.mT
    norms = gram.diagonal(dim1=-2, dim2=-1)
    if normalise:  # ||u_a - u_b||^2 from <h_a, h_b>, with u = h / ||h||; 0 stays 0
        scale = torch.where(norms > 0, norms, 1).rsqrt()
        gram = gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)
        norms = (norms > 0).to(gram.dtype)
    dist = norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2 * gram
    dist = dist[..., first, second].clamp(eps, 1 / eps)
    cost = dist + beta.double().view(-1, 1, 1) / dist
    return cost.mean((1, 2)).to(features.dtype)


def unicon(features: Float[Tensor, "r p k m"], *, normalise: bool = True) -> Float[Tensor, " r"]:
    """1/|C| sum_c 1/(|C_c| (|C_c| - 1)) sum_{i, j in C_c} ||h(x_i) - h(x_j)||^2 (D.1), R networks.
    ValueError for fewer than two images of a class."""
    n_images = features.shape[1]
    if n_images < 2:
        raise ValueError(f"p={n_images} images of each class; {LARGER.format(2)}")
    u = _unit(features) if normalise else features
    spread = (u - u.mean(1, keepdim=True)).square().sum((1, 3)) / (n_images - 1)
    return 2 * spread.mean(1)


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
            a, b = u[i : i + ROWS_AT_ONCE], u[j : j + ROWS_AT_ONCE]
            norms = a.square().sum(1, keepdim=True) + b.square().sum(1)
            dist = (norms - 2 * a @ b.T).clamp_min(0)
            later = torch.ones_like(dist, dtype=torch.bool).triu(1 if i == j else -n)
            total += torch.where(later, dist.sqrt(), 0).sum()
            value, where = torch.where(later, dist, math.inf).flatten().min(0)
            here = torch.stack([i + where // dist.shape[1], j + where % dist.shape[1]])
            closest = torch.where(value < least, here, closest)
            least = torch.minimum(least, value)
    gap = (u[closest[0]] - u[closest[1]]).square().sum()
    gap = torch.where(least.isnan(), least, gap.sqrt())
    return torch.stack([total / (n * (n - 1) / 2), gap])


def _unit(h: Float[Tensor, "*rows m"]) -> Float[Tensor, "*rows m"]:
    """h at norm 1; 0 stays 0, with the gradient of h itself."""
    norms = h.square().sum(-1, keepdim=True)
    return h * torch.where(norms > 0, norms, 1).rsqrt()


@dataclass(frozen=True)
class FeatureDefence:
    """MixCon on a hidden layer of R victims; `across`: images of different classes."""

    defence: MixCon
    layer: int
    across: Bool[Tensor, "r n n"]

    def of_runs(self, runs: Int64[Tensor, " k"]) -> FeatureDefence:
        return FeatureDefence(self.defence, self.layer, self.across[runs])

    def add_gradient_(self, d: Float[Tensor, "r n m"], features: Float[Tensor, "r n m"]) -> None:
        """Adds lam dL/dh to the derivatives `d` of a loss in the features."""
        gradient = defence_gradient(self.defence, features.double(), self.across)
        d.add_(gradient.to(d.dtype), alpha=self.defence.lam)


def feature_defence(
    architecture: Architecture,
    y: Shaped[Tensor, "r n"],
    defence: MixCon | None,
    layer: int | None,
    batch_size: int | None,
) -> FeatureDefence | None:
    """That of victims with these labels, as their loss wants them; None for no defence or lam = 0.
    Raises ValueError as `hidden_layer` and `check_full_batch` do, and for images of one class."""
    place = hidden_layer(architecture.network, layer)
    if defence is None or not defence.lam:
        return None
    check_full_batch(batch_size)
    classes = y if architecture.n_outputs > 1 else y > 0
    across = classes.unsqueeze(1) != classes.unsqueeze(2)
    if not bool(across.any(2).any(1).all()):
        raise ValueError("a victim's images are of one class; MixCon compares those of several")
    return FeatureDefence(defence, place, across)


def defence_gradient(
    defence: MixCon, h: Float64[Tensor, "r n m"], across: Bool[Tensor, "r n n"]
) -> Float64[Tensor, "r n m"]:
    """dL/dh, not yet times lam, of every victim's own L."""
    scale, u = torch.ones_like(h[..., :1]), h
    if defence.normalise:
        square = h.square().sum(-1, keepdim=True)
        scale = torch.where(square > 0, square, 1).rsqrt()  # features of 0 stay 0
        u = h * scale
    gram = u @ u.mT
    norms = gram.diagonal(dim1=-2, dim2=-1)
    dist = norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2 * gram
    within = (dist >= defence.eps) & (dist <= 1 / defence.eps) & across
    w = torch.where(within, 1 - defence.beta / dist.square(), 0)
    gradient = (w.sum(-1, keepdim=True) * u).sub_(w @ u)
    gradient.mul_(4 / across.sum((-2, -1), keepdim=True).double())
    if not defence.normalise:
        return gradient
    return gradient.sub_((gradient * u).sum(-1, keepdim=True) * u).mul_(scale)


def hidden_layer(network: Network, layer: int | None, name: str = "defence_layer") -> int:
    """The hidden layer with a number from 1, counted from 0; None is the last. A convolution is the
    first. ValueError if there is no such layer; `name` is the setting's."""
    n_hidden = len(network.widths) + (network.conv is not None)
    if layer is None:
        return n_hidden - 1
    if not 1 <= layer <= n_hidden:
        raise ValueError(
            f"{name}={layer} is no hidden layer of this victim; it has {n_hidden}: give a "
            f"number from 1 to {n_hidden}, or null for the last"
        )
    return layer - 1


def check_full_batch(batch_size: int | None) -> None:
    """Raises ValueError for minibatches, which have as many images of a class as chance has it."""
    if batch_size is not None:
        raise ValueError(
            f"training.batch_size={batch_size} with a defence, which compares images of every "
            "class and so needs the full batch; set batch_size to null"
        )
