"""The sources of a separation as candidates: sign, label, and how much they can be trusted.

With biases the images are (x, 1), whose last coordinate settles sign and scale, unless their mean
was subtracted. Otherwise the sign is read from the network: the column of the mixing matrix that
belongs to an image x is what flowed back to the first layer while it was learned, nearly

    M_j = lam y relu'(W x)_j (d phi / d a_1)_j,

lam > 0 (the KKT condition's coefficient). Of x and -x the one whose M agrees more is taken, and the
label with it. Images are told from what is none by how sparse a source is and, where sources are no
more than directions, how much of the layer's norm it makes up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import cosine_similarity

from recon_core.attacks.span.features import cosines
from recon_core.attacks.span.subspace import mixing_of
from recon_core.victims.network import Architecture, Parameters

INPUT_NORM = 0.25
"""Standard deviation of a pixel of an image less its mean: the scale at which a source is shown to
the network."""
ALONE = 0.9
"""Share of the direction (0, 1) in the span from which on biases tell nothing."""
SMALLEST_VARIANCE = 1e-3
"""Of a ring of frequencies, in units of the noise's."""


@dataclass(frozen=True)
class Sources:
    """Sources of one victim, best trusted first, in the victim's input space.

    `x` (m, d) have the likelier sign, and the image's scale where biases tell it, otherwise that of
    an average image. `label` is -1 or +1, or a class, `other_label` that of -x. `trust` in [0, 1]
    is the mean rank of `sparsity` and `strength`, the source's share of the layer's norm; of a
    frame, whose shares are not determined, the rank of `sparsity` alone. A separator's `sparsity`
    is minus the share of interference in the source. `agreement`: cosine of the mixing column with
    what the network says of it, which tells the sign, and would rank worse.
    """

    x: Float[Tensor, "m d"]
    label: Int64[Tensor, " m"]
    other_label: Int64[Tensor, " m"]
    trust: Float[Tensor, " m"]
    sparsity: Float[Tensor, " m"]
    strength: Float[Tensor, " m"]
    agreement: Float[Tensor, " m"]


def sources_of(
    rows: Float[Tensor, "k e"],
    sparsity: Float[Tensor, " k"],
    *,
    weight: Float[Tensor, "m e"],
    architecture: Architecture,
    parameters: Parameters,
    is_frame: bool,
) -> Sources:
    """Separated sources, with sign and label.

    `rows` are the sources in the span, with `is_frame` more than it has directions, `weight` what
    was taken apart (less its start, with the biases behind it; several first layers may be joined),
    `parameters` of this one victim.
    """
    d = architecture.d
    mixing = mixing_of(rows, weight).to(rows)
    x, last = rows[:, :d], rows[:, d:]
    scale = INPUT_NORM * d**0.5 / x.norm(dim=1, keepdim=True).clamp_min(1e-30)
    with_bias = last.shape[1] > 0 and biases_tell(rows)
    if with_bias:
        sign = torch.where(last < 0, -1.0, 1.0)
        x, mixing = x * sign, mixing * sign.mT
        own = 1 / last.abs().clamp_min(1e-30)
        scale = torch.where((own / scale - 1).abs() < 1, own, scale)
    unit, column = x * scale, mixing / scale.mT
    flow = column.unflatten(0, (-1, parameters.weights[0].shape[1])).sum(0)
    plus, label = _agreement(architecture, parameters, unit, flow)
    minus, other = _agreement(architecture, parameters, -unit, -flow)
    flip = (minus > plus) & (not with_bias)
    strength = column.norm(dim=0) * unit.norm(dim=1) / weight.norm().clamp_min(1e-30)
    trust = _ranks(sparsity) if is_frame else (_ranks(sparsity) + _ranks(strength)) / 2
    found = Sources(
        x=torch.where(flip[:, None], -unit, unit),
        label=torch.where(flip, other, label),
        other_label=torch.where(flip, label, other),
        trust=trust,
        sparsity=sparsity,
        strength=strength,
        agreement=torch.where(flip, minus, plus),
    )
    order = trust.argsort(descending=True, stable=True)
    return Sources(**{name: values[order] for name, values in vars(found).items()})


def biases_tell(rows: Float[Tensor, "k e"]) -> bool:
    """True if the last coordinates, those of biases, settle signs and scales.

    They do not where (0, 1) lies in the span, as where images had their own mean subtracted: any
    multiple of it can then be added to a source and changes no pixel.
    """
    basis = torch.linalg.qr(rows.double().mT).Q
    return float(basis[-1].square().sum()) < ALONE


def _agreement(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "k d"],
    column: Float[Tensor, "h k"],
) -> tuple[Float[Tensor, " k"], Int64[Tensor, " k"]]:
    """(cosine of each column with what the best label would give, that label)."""
    with torch.enable_grad():
        passed = architecture.forward(parameters, x[None].detach().requires_grad_())
        phi = passed.output[0]
        cosine = []
        for output in range(phi.shape[1]):
            margin = phi[:, output].sum()
            if phi.shape[1] > 1:
                others = phi.detach().clone()
                others[:, output] = -torch.inf
                margin = margin - phi.gather(1, others.argmax(1, keepdim=True)).sum()
            (flow,) = torch.autograd.grad(margin, passed.pre[0], retain_graph=True)
            cosine.append(cosine_similarity(flow[0], column.mT, dim=1, eps=1e-30))
    if len(cosine) == 1:
        return cosine[0].abs(), torch.where(cosine[0] < 0, -1, 1)
    best = torch.stack(cosine).max(0)
    return best.values, best.indices


def _ranks(values: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    places = values.argsort(stable=True).argsort(stable=True).to(values.dtype)
    return places / max(1, len(values) - 1)


def denoised(
    x: Float[Tensor, "k d"],
    weight: Float[Tensor, "h d"],
    *,
    noise: float,
    shape: tuple[int, int, int],
) -> Float[Tensor, "k d"]:
    """Wiener's estimate of sources `x` in `weight`, with noise of standard deviation `noise`;
    without it `x`.

    A start that is not taken off is noise: W = M X + N. With images whose cosines are independent
    with variances v_i C_f, the most likely images are, for v_i = 1, X_f = (M^T M + sigma^2 /
    C_f)^{-1} M^T W_f. C is measured on W itself, in rings of equal frequency.
    """
    if noise <= 0:
        return x
    norm = x.double().square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)
    mixing = mixing_of(x.double() / norm, weight)
    seen = cosines(weight.double().unflatten(1, shape))
    relative = noise**2 / image_spectrum(seen, noise).flatten()
    strengths, axes = torch.linalg.eigh(mixing.mT @ mixing)
    projected = axes.mT @ (mixing.mT @ seen.flatten(1))
    estimate = axes @ (projected / (strengths.clamp_min(0)[:, None] + relative))
    return (cosines(estimate.unflatten(1, shape), inverse=True).flatten(1) * norm).to(x)


def image_spectrum(seen: Float64[Tensor, "h c a b"], noise: float) -> Float64[Tensor, "c a b"]:
    """Variances of the images' cosines, 1 on the average, from those of weights with noise."""
    variance = seen.square().mean(0) - noise**2
    across, down = (torch.arange(n).to(seen) / n for n in seen.shape[2:])
    radius = (across[:, None].square() + down.square()).sqrt() * max(seen.shape[2:])
    ring = radius.round().long().flatten()
    count = torch.bincount(ring)
    total = variance.new_zeros(len(variance), len(count)).index_add_(1, ring, variance.flatten(1))
    mean = total / count.clamp_min(1)
    spectrum = mean[:, ring].clamp_min(SMALLEST_VARIANCE * noise**2).view_as(variance)
    return spectrum / spectrum.mean()
