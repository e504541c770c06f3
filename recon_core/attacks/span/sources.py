"""The sources of a separation as images: sign, scale, label, and how far to trust them.

With biases images are (x, 1), whose last coordinate settles sign and scale, unless their mean was
subtracted. Otherwise sign and label are those with which an image x best explains its column of the
mixing matrix, which is nearly the gradient at the first layer while x was learned,

    M_j = lam y relu'(W x)_j (d phi / d a_1)_j,  lam > 0 (the KKT condition's coefficient).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import avg_pool2d, cosine_similarity, pad

from recon_core.attacks.span.separation import cosines
from recon_core.attacks.span.subspace import Subspace, mixing_of
from recon_core.victims.network import Architecture, Parameters, Shape

INPUT_NORM = 0.25
"""Standard deviation of a pixel of an average image, as the network sees it."""
ALONE = 0.9
"""Share of the direction (0, 1) in the span from which biases settle nothing."""
POOLED, SMALLEST_VARIANCE = 5, 1e-3
"""Side of the square of frequencies over which variances of images are averaged; and the least
variance, in units of the noise's."""


@dataclass(frozen=True)
class Sources:
    """Sources of one victim in its input space, most trusted first.

    `x` (m, d) have the likelier sign, and the image's scale where biases settle it, otherwise the
    scale of an average image. `label` is -1 or +1, or a class. `trust` in [0, 1] is the mean rank
    of sparsity and of the source's share of the layer's norm; with more sources than directions
    these shares are not determined, and it is the rank of sparsity alone.
    """

    x: Float[Tensor, "m d"]
    label: Int64[Tensor, " m"]
    trust: Float[Tensor, " m"]


def sources_of(
    w: Float[Tensor, "m k"],
    sparsity: Float[Tensor, " m"],
    *,
    span: Subspace,
    is_of_weights: bool,
    architecture: Architecture,
    parameters: Parameters,
) -> Sources:
    """The sources `w` times the directions of a span, denoised, with signs and labels.

    `sparsity` is larger for images. `span` is that of weights or of gradients, perhaps of several
    first layers; `parameters` are those of this victim.
    """
    x, last = (w @ span.vectors).tensor_split([architecture.d], 1)
    if not span.ends_sharply or (is_of_weights and not span.start_shares):
        # the start, or noise added to the weights, is in them
        learned = span.learned[:, : architecture.d]
        x = denoised(x, learned, noise=span.noise, shape=architecture.shape)
    rows = torch.cat([x, last], 1)
    mixing = mixing_of(rows, span.learned).to(rows)
    norm = x.norm(dim=1, keepdim=True).clamp_min(1e-30)
    told = [sparsity] if len(w) > w.shape[1] else [sparsity, mixing.norm(dim=0) * norm[:, 0]]
    ranks = torch.stack(told).argsort(stable=True, dim=1).argsort(1).to(x).mean(0)
    scale = INPUT_NORM * architecture.d**0.5 / norm
    with_bias = last.shape[1] > 0 and biases_tell(rows)
    if with_bias:
        scale = torch.copysign(torch.minimum(1 / last.abs(), 2 * scale), last)
    x, column = x * scale, mixing / scale.mT
    flow = column.unflatten(0, (-1, parameters.weights[0].shape[1])).sum(0)
    both = torch.cat([x, -x]), torch.cat([flow, -flow], 1)
    agreement, label = (some.chunk(2) for some in _agreement(architecture, parameters, *both))
    flip = (agreement[1] > agreement[0]) & (not with_bias)
    order = ranks.argsort(descending=True, stable=True)
    return Sources(
        x=torch.where(flip[:, None], -x, x)[order],
        label=torch.where(flip, *label[::-1])[order],
        trust=ranks[order] / max(1, len(rows) - 1),
    )


def together(parts: Sequence[Sources]) -> Sources:
    """Join the sources of several searches, most trusted first."""
    every = [torch.cat(values) for values in zip(*(vars(p).values() for p in parts), strict=True)]
    order = every[-1].argsort(descending=True, stable=True)
    return Sources(*(values[order] for values in every))


def biases_tell(rows: Float[Tensor, "k e"]) -> bool:
    """True if the last coordinates, those of biases, settle signs and scales.

    They do not if (0, 1) lies in the span, as when images had their own mean subtracted: any
    multiple of it can then be added to a source without changing a pixel.
    """
    basis = torch.linalg.qr(rows.double().mT).Q
    return float(basis[-1].square().sum()) < ALONE


def _agreement(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "k d"],
    column: Float[Tensor, "h k"],
) -> tuple[Float[Tensor, " k"], Int64[Tensor, " k"]]:
    """(cosine of each column with the gradient of the best label's margin, that label)."""
    found = []
    with torch.enable_grad():
        passed = architecture.forward(parameters, x[None].detach().requires_grad_())
        phi, is_binary = passed.output[0], passed.output.shape[2] == 1
        phi = pad(phi, (0, 1)) if is_binary else phi  # as two classes with outputs phi and 0
        first, second = phi.topk(2).indices.mT[..., None]
        for output in range(phi.shape[1]):
            rival = phi.gather(1, torch.where(first == output, second, first))
            margin = phi[:, output].sum() - rival.sum()
            (flow,) = torch.autograd.grad(margin, passed.pre[0], retain_graph=True)
            found.append(cosine_similarity(flow[0], column.mT, dim=1, eps=1e-30))
    cosine, label = torch.stack(found).max(0)
    return cosine, 1 - 2 * label if is_binary else label


def denoised(
    x: Float[Tensor, "k d"], weight: Float[Tensor, "h d"], *, noise: float, shape: Shape
) -> Float[Tensor, "k d"]:
    """Wiener's estimate of sources `x` in `weight`, with noise of standard deviation `noise`; `x`
    itself without noise.

    A start that is not subtracted is noise: W = M X + N. For images with independent cosines of
    variances v_i C_f, the most likely ones are X_f = (M^T M + sigma^2 / C_f)^{-1} M^T W_f at
    v_i = 1. C, 1 on average, is measured on W itself.
    """
    if noise <= 0:
        return x
    norm = x.double().square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)
    mixing = mixing_of(x.double() / norm, weight)
    seen = cosines(weight.double().unflatten(1, shape))
    strengths, axes = torch.linalg.eigh(mixing.mT @ mixing)
    variance = seen.square().mean(0) - noise**2
    variance = avg_pool2d(variance, POOLED, 1, POOLED // 2, count_include_pad=False)
    spectrum = variance.clamp_min(SMALLEST_VARIANCE * noise**2).flatten()
    relative = noise**2 * spectrum.mean() / spectrum
    projected = axes.mT @ mixing.mT @ seen.flatten(1)
    estimate = axes @ (projected / (strengths.clamp_min(0)[:, None] + relative))
    return (cosines(estimate.unflatten(1, shape), inverse=True).flatten(1) * norm).to(x)
