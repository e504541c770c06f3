"""What a network's inputs were normalised by, read off the span of its first layer.

Inputs are u = (x - s) / t of images x in [0, 1], as torchvision's Normalize has them: s is nothing,
a constant per channel or a mean image, t a standard deviation per channel. A separator sees images
x, or x - m with the public mean m, in the metric of their second moments. Both s and t are told:

- Channels of images go together, and any factors other than t put colour into edges that have
  none. Of factors with product 1 those are taken with which the directions have the least energy in
  the metric: min t^T Q t / 2 - sum log t, Q_cd the inner product of the parts of channels c and d,
  which is convex (Marshall and Olkin 1968, Numer. Math. 12).
- With biases behind them, rows (v, b) of inputs become rows t v + b (s - m) of images. Differences
  of images, with b = 0, know nothing of s; what they leave of one image with b = 1 is least, in the
  metric of images less m, at the right s and 1 / t, and linear in (s - m) / t: the Gaussian
  likelihood of the span. Usual s are taken, or else the likeliest of all constants per channel.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from recon_core.attacks.span.separator import Separator

NEWTON_STEPS = 30
LEAST_ROOM = 1e-3
"""Least share of the mean's energy in the metric that is not accounted for by the metric."""
GAIN = 0.01
"""Share of energy that channels lose at least where they are scaled: .012 to .2 of 100 images of a
JPEG copy of CIFAR-10 with the usual divisors, at most .005 of lossless photographs, whose right
factors are not known to more than 3 %."""
SMALLEST, LARGEST = 0.1, 10.0
"""Bounds of 1 / t."""
UNLIKELY = 30.0
"""Fall of the residual, in units of its mean square, from which constants are none of the usual."""


def undone(
    separator: Separator, rows: Float[Tensor, "k e"], scales: Float[Tensor, " c"]
) -> Float[Tensor, "k d"]:
    """Directions of a first layer, e = d or with biases d + 1, as the separator sees pictures, with
    channels multiplied by `scales`."""
    shape, d = separator.card.shape, len(separator.mean)
    pictures: Tensor = (rows[:, :d].unflatten(1, shape) * scales[:, None, None]).flatten(1)
    if rows.shape[1] > d and bool(rows[:, d].any()):
        pictures = pictures + rows[:, d:] * offset(separator, pictures, rows[:, d])
    return pictures


def channel_scales(separator: Separator, rows: Float[Tensor, "k e"]) -> Float64[Tensor, " c"]:
    """The standard deviations that inputs were divided by per channel, up to a common factor: with
    product 1. All 1 where others have nearly as much energy (`GAIN`), as in pictures with detail in
    their colours; of a JPEG copy's, without noise, right to .1 % from 20 images on."""
    d, parts = len(separator.mean), []
    pictures, bias = rows[:, :d], rows[:, d:]
    if bias.shape[1]:  # differences of images, from which the same was subtracted
        pictures = pictures - bias @ (bias.mT @ pictures) / bias.square().sum().clamp_min(1e-30)
    pictures = pictures.unflatten(1, separator.card.shape)
    for channel in range(separator.card.shape[0]):
        alone = torch.zeros_like(pictures)
        alone[:, channel] = pictures[:, channel]
        parts.append(separator.whitened(alone.flatten(1)).double().flatten())
    products = torch.stack(parts) @ torch.stack(parts).mT
    spread = products.diagonal().sqrt()
    products = products / spread / spread[:, None]
    t = torch.ones_like(spread)
    for _ in range(NEWTON_STEPS):  # damped, so that t stays positive
        gradient = products @ t - 1 / t
        step = torch.linalg.solve(products + torch.diag(t**-2), gradient)
        t = t - step / (1 + (step @ gradient).clamp_min(0).sqrt())
    scales: Tensor = t / spread
    scales = scales / scales.log().mean().exp()
    ones = torch.ones_like(scales)
    energies = [some * spread @ products @ (some * spread) for some in (ones, scales)]
    return scales if float(energies[0]) > (1 + GAIN) * float(energies[1]) else ones


def offset(
    separator: Separator, pictures: Float[Tensor, "k d"], bias: Float[Tensor, " k"]
) -> Float[Tensor, " d"]:
    """What directions have for each unit of `bias` beside their pixels: (s - m) / t for a separator
    that sees pictures less m, otherwise s / t."""
    m, shape, b = separator.mean, separator.card.shape, bias[:, None]
    own = separator.whitened(m[None]).double()
    room = (1 - own.square().sum()).clamp_min(LEAST_ROOM).sqrt()

    def seen(x: Float[Tensor, "n d"]) -> Float64[Tensor, "n e"]:
        """Pictures in the metric of images less m; another metric has m m^T in it, which a further
        number undoes (Sherman and Morrison)."""
        white = separator.whitened(x).double()
        return white if separator.card.centred else torch.cat([white, white @ own.mT / room], 1)

    one = b.mT @ pictures / b.square().sum()
    basis = torch.linalg.svd(seen(pictures - b @ one), full_matrices=False)[2][: len(b) - 1]

    def left(x: Float[Tensor, "n d"]) -> Float64[Tensor, "n e"]:
        white = seen(x)
        outside: Tensor = white - (white @ basis.mT) @ basis
        return outside

    constants = torch.eye(shape[0]).to(m)[:, :, None, None].expand(-1, -1, *shape[1:]).flatten(1)
    usual = torch.stack([torch.zeros_like(m), constants.mT @ (constants @ m) / constants[0].sum()])
    usual = torch.cat([usual, torch.full_like(m, 0.5)[None], m[None]])
    start, along = left(one)[0], left(usual - m)
    sizes = -(along @ start) / along.square().sum(1).clamp_min(1e-30)
    sizes = torch.where(along.any(1), sizes.clamp(SMALLEST, LARGEST), 1.0)  # s = m tells no size
    rests = (start + sizes[:, None] * along).square().sum(1)
    best = int(rests.argmin())
    s, size = usual[best], sizes[best].to(m)
    free = left(torch.cat([constants, -m[None]]))
    fitted = torch.linalg.lstsq(free.mT, -start[:, None]).solution[:, 0]
    rest = (start + fitted @ free).square().sum()
    fell = float((rests[best] - rest) / (rest / (len(m) - len(b))).clamp_min(1e-30))
    if fell > UNLIKELY and SMALLEST < float(fitted[-1]) < LARGEST:
        size = fitted[-1].to(m)
        s = fitted[:-1].to(m) @ constants / size
    found: Tensor = size * (s - m) if separator.card.centred else size * s
    return found
