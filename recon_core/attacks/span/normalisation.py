"""What a network's inputs were normalised by, read off the span of its first layer.

Inputs are u = (x - s) / t of images x in [0, 1], as torchvision's Normalize has them: s is nothing,
a constant per channel or a mean image, t a standard deviation per channel. A separator sees x, or
x - m with the public mean m, in the metric of their second moments.

- Channels of images go together, and wrong ratios of t put colour into edges that have none. Of
  factors with product 1 those are taken with which the directions have the least energy in the
  metric: min t^T Q t / 2 - sum log t, Q_cd the inner product of the parts of channels c and d,
  which is convex (Marshall and Olkin 1968, Numer. Math. 12).
- With biases behind them, rows (v, b) of inputs become rows t v + b (s - m) of images. Differences
  of images, with b = 0, do not depend on s. What they leave of one image, with b = 1, is linear in
  (s - m) / t, and least at the right s and t in the metric of images less m.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from recon_core.attacks.span.separator import Separator

NEWTON_STEPS = 30
GAIN = 0.01
"""Least share of energy that channels lose where they are scaled: .012 to .2 of 100 images of a
JPEG copy of CIFAR-10 with the usual divisors, at most .005 of lossless photographs, whose right
factors are not known to more than 3 %."""
SMALLEST = 0.1
"""Least 1 / t that is told: it is 0 where the mean was subtracted, which tells none."""


def undone(
    separator: Separator, rows: Float[Tensor, "k e"], scales: Float[Tensor, " c"]
) -> Float[Tensor, "k d"]:
    """Directions of a first layer, e = d or with biases d + 1, as the separator sees pictures, with
    channels multiplied by `scales`."""
    shape, d = separator.card.shape, len(separator.mean)
    pictures: Tensor = (rows[:, :d].unflatten(1, shape) * scales[:, None, None]).flatten(1)
    if bool(rows[:, d:].any()):
        pictures = pictures + rows[:, d:] * offset(separator, pictures, rows[:, d:])
    return pictures


def channel_scales(separator: Separator, rows: Float[Tensor, "k e"]) -> Float64[Tensor, " c"]:
    """The standard deviations that inputs were divided by per channel, up to a common factor: with
    product 1. All 1 where others have nearly as much energy (`GAIN`), as in pictures with detail in
    their colours; of a JPEG copy's, without noise, right to .1 % from 20 images on."""
    d, shape = len(separator.mean), separator.card.shape
    pictures, bias = rows[:, :d], rows[:, d:]  # differences of images do not depend on s
    pictures = pictures - bias @ (bias.mT @ pictures) / bias.square().sum().clamp_min(1e-30)
    alone = torch.eye(shape[0]).to(rows)[:, None, :, None, None] * pictures.unflatten(1, shape)
    parts = torch.stack([separator.metric.whitened(x.flatten(1)).double().flatten() for x in alone])
    products = parts @ parts.mT
    t = products.diagonal().rsqrt()
    for _ in range(NEWTON_STEPS):  # damped, so that t stays positive
        gradient = products @ t - 1 / t
        step = torch.linalg.solve(products + torch.diag(t**-2), gradient)
        t = t - step / (1 + (step @ gradient).clamp_min(0).sqrt())
    t = t / t.log().mean().exp()
    return t if products.sum() > (1 + GAIN) * (t @ products @ t) else torch.ones_like(t)


def offset(
    separator: Separator, pictures: Float[Tensor, "k d"], bias: Float[Tensor, "k 1"]
) -> Float[Tensor, " d"]:
    """What directions have for each unit of `bias` beside their pixels: (s - m) / t for a separator
    that sees pictures less m, otherwise s / t."""
    m, c, n = separator.mean, separator.card.shape[0], len(bias)
    constants = torch.eye(c).to(m).repeat_interleave(len(m) // c, 1)
    one = bias.mT @ pictures / bias.square().sum()
    given = torch.cat([pictures - bias @ one, one, constants, -m[None]])
    white = separator.metric.whitened(given).double()
    if not separator.card.centred:  # the metric has m m^T in it; a further number undoes that
        room = (1 - white[-1].square().sum()).clamp_min(1e-3).sqrt()  # (Sherman, Morrison)
        white = torch.cat([white, white @ white[-1:].mT / room], 1)
    basis = torch.linalg.svd(white[:n], full_matrices=False)[2][: n - 1]
    left = white[n:] - (white[n:] @ basis.mT) @ basis
    fitted = torch.linalg.lstsq(left[1:].mT, -left[0, :, None]).solution[:, 0].to(m)
    s, size = (fitted[:-1] @ constants, fitted[-1]) if fitted[-1] > SMALLEST else (m, 1.0)
    return s - size * m if separator.card.centred else s
