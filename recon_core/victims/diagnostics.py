"""Measurements of a trained network before it is attacked, in float64.

*Without its images.* How far the network is from homogeneous; how much of a layer is signal and not
the noise that it was initialised with. The singular values of an (o, i) matrix of independent
entries with standard deviation s fill [s |sqrt(i) - sqrt(o)|, s (sqrt(i) + sqrt(o))] (Marchenko and
Pastur 1967); what training adds to W_1 is sum_i c_i d_i x_i^T, of at most as many directions as
there are images, and stands above that edge.

*With its images.* How much of theta the condition theta = sum_i lam_i y_i grad phi(theta; x_i)
(image restoration paper, eq. 1; KKT paper, eqs. 8 and 14) explains with the true images and the
best possible lam. The gradient of layer l is an outer product, so all that is needed are the n x n
matrices

    K_l = (D_l D_l^T) * (A_l A_l^T + 1 if there is a bias),    t_l = <theta_l, grad_l phi> = D_l.U_l

and lam >= 0 minimises ||theta||^2 - 2 lam.t + lam.K lam: non-negative least squares. Derivatives
are those that training used, not the attack's surrogates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from recon_core.types import seeded_generator
from recon_core.victims.network import Architecture, Parameters

N_PROBES = 32
PROBE_STD = 0.25
"""About the standard deviation of pictures in [0, 1] less their mean."""
SCALE = 2.0
RANK_TOLERANCE = 1e-12
FLOAT32_ROUNDING = 1e-7
AGREED = 0.9
"""Share of the squares that channels have in common where a layer is made of the images."""
NULL = 1e-3
"""Directions of images with a smaller share of the largest singular value are none: the subtracted
mean is zero but for rounding."""


@dataclass(frozen=True)
class Spectrum:
    """A matrix as signal above a bulk of noise. `signal_share` of the squared norm is in the
    `n_signal` singular values above the edge; the rest looks like independent entries of standard
    deviation `noise_std`."""

    n_signal: int
    signal_share: float
    noise_std: float
    largest: float


@dataclass(frozen=True)
class Explained:
    """theta in terms of given images: 0 is a perfect KKT point, 1 says nothing is explained.

    `residual` is ||theta - sum_i c_i grad phi_i||^2 / ||theta||^2 at the best `lam`;
    `layer_residuals` the same of each layer at that lam; `first_layer` of the first layer alone,
    with the lam that is best for it.
    """

    lam: Float[Tensor, " n"]
    residual: float
    layer_residuals: tuple[float, ...]
    first_layer: float

    def n_support(self, n_images: int) -> int:
        """Images with a multiplier that is not zero: those that the weights are made of."""
        size = self.lam.abs().view(n_images, -1).amax(1)
        return int((size > 1e-6 * size.max()).sum())


def homogeneity_gap(architecture: Architecture, parameters: Parameters) -> float:
    """max |phi(c theta; x) - c^L phi(theta; x)| / max |c^L phi(theta; x)| over random x, c = 2.
    Zero up to rounding for (leaky) ReLU with no bias beyond the first layer; one network (R =
    1)."""
    generator = seeded_generator(0, 0, "homogeneity")
    x = torch.randn(1, N_PROBES, architecture.d, generator=generator, dtype=torch.float64)
    x = (x * PROBE_STD).to(parameters.weights[0].device)
    wide = parameters.map(lambda tensor: tensor.double())
    expected = SCALE**architecture.n_layers * architecture.forward(wide, x).output
    found = architecture.forward(wide.map(lambda tensor: tensor * SCALE), x).output
    size = float(expected.abs().max())
    return float((found - expected).abs().max()) / size if size > 0 else 0.0


def spectrum(weight: Float[Tensor, "o i"]) -> Spectrum:
    """Signal and noise of a matrix: the largest bulk of singular values that noise explains.
    Starting from all, whatever is above the edge of the noise of the rest's variance is signal,
    until nothing changes. The edge is widened by 1 + min(o, i)^(-2/3) for finite sizes."""
    values = torch.linalg.svdvals(weight.double()).cpu().numpy()
    n_small, n_large = sorted(weight.shape)
    energy = np.square(values)
    total = float(energy.sum())
    slack = 1 + n_small ** (-2 / 3)
    n_signal, noise_std = 0, 0.0
    while True:
        bulk = float(energy[n_signal:].sum())
        # A bulk of k values less than the full rank is noise on the k other directions.
        noise_std = math.sqrt(bulk / max(1, (n_small - n_signal) * n_large))
        edge = slack * noise_std * (math.sqrt(n_small) + math.sqrt(n_large))
        above = int((values > max(edge, FLOAT32_ROUNDING * values[0])).sum())
        if above <= n_signal:
            break
        n_signal = above
    share = float(energy[:n_signal].sum()) / total if total > 0 else 0.0
    return Spectrum(n_signal, share, noise_std, float(values[0]) if len(values) else 0.0)


def channel_scales(
    weight: Float[Tensor, "o d"], images: Float[Tensor, "n d"], n_channels: int
) -> Float[Tensor, " c"] | None:
    """Scales, of geometric mean 1, by which the channels of the images were divided in training.

    A first layer is sum_i c_i d_i x_i^T, with the same c_i d_i for all channels of x_i. Least
    squares gives them from each channel by itself, and their first singular vector has the ratio.
    None if the channels do not agree, or if there are more images than half of a channel's pixels.
    """
    layers = weight.double().unflatten(1, (n_channels, -1)).unbind(1)
    pixels = images.double().unflatten(1, (n_channels, -1)).unbind(1)
    if len(images) > pixels[0].shape[1] // 2:
        return None
    found = torch.stack(
        [
            torch.linalg.lstsq(x.mT, w.mT, rcond=NULL, driver="gelsd").solution.flatten()
            for x, w in zip(pixels, layers, strict=True)
        ]
    )
    vectors, values, _rest = torch.linalg.svd(found, full_matrices=False)
    if float(values[0].square() / values.square().sum()) < AGREED:
        return None
    seen = vectors[:, 0].abs().clamp_min(1e-6)
    scales: Tensor = (seen.log().mean() - seen.log()).exp()
    return scales


def margin_gradients(
    output: Float[Tensor, "n o"], labels: Float[Tensor, " n"] | Int[Tensor, " n"]
) -> Float[Tensor, "n o"]:
    """Derivative of `Loss.margins` in the outputs: y, or e_y - e_j with the strongest j."""
    if output.shape[1] == 1:
        return labels.to(output.dtype).unsqueeze(1)
    index = labels.long().unsqueeze(1)
    rival = output.scatter(1, index, -torch.inf).argmax(1, keepdim=True)
    chosen = torch.zeros_like(output)
    return chosen.scatter(1, index, 1.0).scatter(1, rival, -1.0)


def all_rivals(classes: Int[Tensor, " n"], n_outputs: int) -> Float[Tensor, "p o"]:
    """e_y - e_j for every image and every j != y, image after image (KKT paper, eq. 8)."""
    one_hot = torch.eye(n_outputs, dtype=torch.float64, device=classes.device)
    pairs = one_hot[classes].unsqueeze(1) - one_hot
    return pairs[pairs.any(2)]


def gram_systems(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "n d"],
    output_gradient: Float[Tensor, "n o"],
) -> list[tuple[Float[Tensor, "n n"], Float[Tensor, " n"], float]]:
    """(K_l, t_l, ||theta_l||^2) of every layer of one network for the gradients of
    <output_gradient, phi(x)>."""
    wide = parameters.map(lambda tensor: tensor.double())
    passed = architecture.forward(wide, x.double().unsqueeze(0))
    d = output_gradient.double()
    u = [*(z[0] for z in passed.pre), passed.output[0]]
    systems = []
    for layer in range(architecture.n_layers - 1, -1, -1):
        weight, bias = wide.weights[layer], wide.biases[layer]
        if layer < architecture.n_layers - 1:
            d = (d @ wide.weights[layer + 1][0]) * architecture.slope(u[layer])
        a = passed.inputs[layer][0]
        if layer == 0 and architecture.network.conv is not None:
            maps = d.unflatten(1, (-1, architecture.n_positions))
            kernels = torch.bmm(maps, a.mT).flatten(1)
            gram = kernels @ kernels.T
            gram = gram if bias is None else gram + maps.sum(2) @ maps.sum(2).T
        else:
            gram = (a @ a.T + (0.0 if bias is None else 1.0)) * (d @ d.T)
        square = float(sum(v.square().sum() for v in (weight, bias) if v is not None))
        systems.append((gram, (d * u[layer]).sum(1), square))
    return systems[::-1]


def explained(
    systems: Sequence[tuple[Float[Tensor, "n n"], Float[Tensor, " n"], float]],
    *,
    free_sign: bool,
) -> Explained:
    """Share of theta that the images' gradients explain, at the best multipliers. `free_sign`: lam
    of either sign (KKT paper, eq. 15), otherwise lam >= 0."""
    gram = torch.stack([s[0] for s in systems]).sum(0)
    target = torch.stack([s[1] for s in systems]).sum(0)
    lam = best_multipliers(gram, target, free_sign=free_sign)
    first = best_multipliers(systems[0][0], systems[0][1], free_sign=free_sign)
    whole = sum(s[2] for s in systems)
    return Explained(
        lam=lam,
        residual=_left(gram, target, whole, lam),
        layer_residuals=tuple(_left(*s, lam) for s in systems),
        first_layer=_left(*systems[0], first),
    )


def best_multipliers(
    gram: Float[Tensor, "n n"], target: Float[Tensor, " n"], *, free_sign: bool
) -> Float[Tensor, " n"]:
    """lam that minimises lam.K lam - 2 lam.t, non-negative unless `free_sign`. With K = V S V^T
    this is least squares with the matrix S^(1/2) V^T and the right side S^(-1/2) V^T t; t lies in
    the range of K, so directions with S = 0 are left out."""
    from scipy.optimize import nnls

    values, vectors = torch.linalg.eigh(gram)
    keep = values > RANK_TOLERANCE * values[-1].clamp_min(0)
    if not bool(keep.any()):
        return torch.zeros_like(target)
    root, basis = values[keep].sqrt(), vectors[:, keep]
    right = (basis.T @ target) / root
    if free_sign:
        free: Tensor = basis @ (right / root)
        return free
    matrix = (root.unsqueeze(1) * basis.T).cpu().numpy()
    solution, _norm = nnls(matrix, right.cpu().numpy(), maxiter=30 * len(target))
    return torch.as_tensor(solution, dtype=target.dtype, device=target.device)


def _left(gram: Tensor, target: Tensor, square: float, lam: Tensor) -> float:
    value = square - 2 * float(lam @ target) + float(lam @ gram @ lam)
    return max(0.0, value) / square if square > 0 else 0.0
