"""Gradients of MixCon and UniCon on a victim's hidden features (MixCon paper, section 3.2).

    min over theta of mean_i loss(phi(theta; x_i), y_i) + lam L(h(x_1), ..., h(x_n))

with h(x) the activations of one hidden layer and L as in `separability`. In the full batch, tuple i
is the i-th image of every class; images beyond the smallest class are in none (MixCon paper,
footnote 6). The paper's batches are drawn anew, so that in time every image is compared with all of
the other classes; `all_pairs` is the mean of eq. 1 over such draws: P is then the number of ordered
pairs of images of different classes, in place of p C (C - 1), and the sum goes over them. Gradients
are written out, as the rest of a step is. With u = h / ||h||, p tuples and C classes

    MixCon (eq. 1)    dL/du_a = 4 / (p C (C - 1)) sum_b w_ab (u_a - u_b) over the tuple of a,
                      w_ab = 1 - beta / dist_ab^2 where eps <= dist_ab <= 1 / eps, else 0
    UniCon (D.1)      dL/du_a = 4 / (C (p - 1)) (u_a - mean of u over the class of a)
    both              dL/dh = (dL/du - <dL/du, u> u) / ||h||,

in float64, since dist comes from inner products. Without `normalise`, u is h. Nothing here looks at
a number, so that a CUDA graph can hold it.

With this term a trained victim is no KKT point: the gradient of L is no sum of lam_i y_i grad
phi(theta; x_i), and eq. 1 of the image restoration paper has one term too many. A dense first layer
still is a combination of the images, W_1 = W_0 + sum_i d_i x_i^T, only of other d_i.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from recon_core.victims.network import Architecture, Network
from recon_core.victims.separability import MixCon, UniCon, balanced_rows

Defence = MixCon | UniCon


class FeatureDefence:
    def __init__(
        self,
        defence: Defence,
        layer: int,
        tuples: Int64[Tensor, "r p k"],
        n_images: int,
        across: Bool[Tensor, "r 1 k k"] | None = None,
    ) -> None:
        """`tuples`: which of a victim's `n_images` images are compared, from `tuples_of`; `across`:
        which pairs of a tuple are, if not all."""
        self.defence, self.layer = defence, layer
        self.tuples, self.n_images, self.across = tuples, n_images, across
        first = n_images * torch.arange(len(tuples), device=tuples.device)
        self.rows = (tuples + first.view(-1, 1, 1)).flatten()  # of features (R * n, m)

    def of_runs(self, runs: Int64[Tensor, " k"]) -> FeatureDefence:
        across = None if self.across is None else self.across[runs]
        return FeatureDefence(self.defence, self.layer, self.tuples[runs], self.n_images, across)

    def add_gradient_(self, d: Float[Tensor, "r n m"], features: Float[Tensor, "r n m"]) -> None:
        """Adds lam dL/dh to the derivatives `d` of a loss in the features."""
        chosen = features.flatten(0, 1).index_select(0, self.rows)
        h = chosen.double().view(*self.tuples.shape, -1)
        gradient = defence_gradient(self.defence, h, self.across).flatten(0, 2)
        d.flatten(0, 1).index_add_(0, self.rows, gradient.to(d.dtype), alpha=self.defence.lam)


def feature_defence(
    architecture: Architecture,
    y: Shaped[Tensor, "r n"],
    defence: Defence | None,
    layer: int | None,
    batch_size: int | None,
    *,
    all_pairs: bool = False,
) -> FeatureDefence | None:
    """That of victims with these labels, as their loss wants them; None for no defence or lam = 0.
    `all_pairs`: MixCon compares every two images of different classes. Raises ValueError as
    `hidden_layer`, `check_full_batch` and `tuples_of` do."""
    place = hidden_layer(architecture.network, layer)
    if defence is None or not defence.lam:
        return None
    check_full_batch(batch_size)
    classes = (y if architecture.n_outputs > 1 else y > 0).long()
    tuples = tuples_of(defence, classes, max(2, architecture.n_outputs))
    if not (all_pairs and isinstance(defence, MixCon)):
        return FeatureDefence(defence, place, tuples, y.shape[1])
    everyone = torch.arange(y.shape[1], device=y.device).expand(len(y), 1, -1)
    across = (classes.unsqueeze(1) != classes.unsqueeze(2)).unsqueeze(1)
    return FeatureDefence(defence, place, everyone, y.shape[1], across)


def defence_gradient(
    defence: Defence,
    h: Float64[Tensor, "r p k m"],
    across: Bool[Tensor, "r 1 k k"] | None = None,
) -> Float64[Tensor, "r p k m"]:
    """dL/dh, not yet times lam, of every victim's own L; image i of class c is h[:, i, c], or with
    `across`, the pairs that MixCon compares, image c is h[:, 0, c]."""
    if not defence.normalise:
        return _gradient(defence, h, across)
    square = h.square().sum(-1, keepdim=True)
    scale = torch.where(square > 0, square, 1).rsqrt()  # features of 0 stay 0
    u = h * scale
    d = _gradient(defence, u, across)
    return d.sub_((d * u).sum(-1, keepdim=True) * u).mul_(scale)


def _gradient(
    defence: Defence, u: Float64[Tensor, "r p k m"], across: Bool[Tensor, "r 1 k k"] | None
) -> Float64[Tensor, "r p k m"]:
    _, p, k, _ = u.shape
    if isinstance(defence, UniCon):
        return (u - u.mean(1, keepdim=True)).mul_(4 / (k * (p - 1)))
    gram = u @ u.mT
    norms = gram.diagonal(dim1=-2, dim2=-1)
    dist = norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2 * gram
    within = (dist >= defence.eps) & (dist <= 1 / defence.eps)
    if across is not None:
        within &= across
    w = torch.where(within, 1 - defence.beta / dist.square(), 0)  # 0 on the diagonal, too
    gradient = (w.sum(-1, keepdim=True) * u).sub_(w @ u)
    if across is None:
        return gradient.mul_(4 / (p * k * (k - 1)))
    return gradient.mul_(4 / across.sum((-2, -1), keepdim=True).double())


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


def tuples_of(
    defence: Defence, classes: Int64[Tensor, "r n"], n_classes: int
) -> Int64[Tensor, "r p k"]:
    """The images that the defence compares: row i of column c is the i-th of class c. ValueError if
    a class has no image (UniCon: fewer than two), or if the victims' smallest classes are not
    equally large."""
    tuples = [balanced_rows(row, n_classes) for row in classes]
    sizes = [len(rows) for rows in tuples]
    other = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        raise ValueError(
            f"the smallest class of victim 0 has {sizes[0]} images, of victim {other} "
            f"{sizes[other]}; a defence needs the same of all victims of a batch: run them apart, "
            "or with equally many of every class"
        )
    if isinstance(defence, UniCon) and sizes[0] < 2:
        raise ValueError(
            f"UniCon compares images of a class, but the smallest has {sizes[0]}; give a victim at "
            "least 2 of every class"
        )
    return torch.stack(tuples)
