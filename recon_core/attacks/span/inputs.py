"""What a first layer shows of a network's inputs: their order, and what was subtracted from them.

Images are (c, h, w) here, in red, green, blue. Keras and numpy flatten height x width x channels,
OpenCV has blue first. Training inputs x_i - m lie in the span of the first layer's directions;
images in another order do not, nor does their mean if it was subtracted. Without images, directions
are smooth pictures only in the right order, up to transposition and exchanged colours, which no
weights show.

Normalised inputs are u = (x - s) / t of images x in [0, 1], as torchvision's Normalize has them: s
is nothing, a constant per channel or a mean image, t a standard deviation per channel. A separator
sees x, or x - m with the public mean m, in the metric of their second moments.

- Channels of images go together, and wrong ratios of t put colour into edges that have none. Of
  factors with product 1 those are taken with which the directions have the least energy in the
  metric: min t^T Q t / 2 - sum log t, Q_cd the inner product of the parts of channels c and d,
  which is convex (Marshall and Olkin 1968, Numer. Math. 12).
- With biases behind them, rows (v, b) of inputs become rows t v + b (s - m) of images. Differences
  of images, with b = 0, do not depend on s. What they leave of one image, with b = 1, is linear in
  (s - m) / t, and least at the right s and t in the metric of images less m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from recon_core.attacks.span.separator import Separator
from recon_core.victims.network import Shape

PixelOrder = Literal["chw", "hwc", "cwh", "whc", "hcw", "wch"]
ChannelOrder = Literal["rgb", "bgr"]

T_AT_LEAST, RESIDUAL = 4.0, 0.95
"""An order fits better from this Student's t of paired differences on, and up to this ratio of the
energies outside the span. On networks of 40 photographs or digits the ratio was .02 to .95 for the
right order, .98 and more for images that were never seen."""
SMOOTHER = 0.85
"""Largest ratio of roughnesses by which another order is likelier: .33 to .71 where inputs were
flattened as hwc, above 1 where not."""
FEWEST = 4
"""Least images that show what was subtracted."""
INSIDE, OUTSIDE, ROUNDING = 0.4, 1.1, 1e-4
"""Share of the mean's energy outside the span over that of the images less their mean: up to .36 on
these networks where it was not subtracted, .69 and more where it was."""


@dataclass(frozen=True)
class InputOrder:
    """`pixels`: the axes from slowest to fastest, "hwc" for an image flattened as (h, w, c)."""

    pixels: PixelOrder = "chw"
    channels: ChannelOrder = "rgb"

    def __str__(self) -> str:
        return f"{self.pixels} in {self.channels.upper()}"

    def places(self, shape: Shape) -> Int64[Tensor, " d"]:
        """The index in a flat image (c, h, w) of each input."""
        index = torch.arange(torch.Size(shape).numel()).view(shape)
        index = index.flip(0) if self.channels == "bgr" else index
        return index.permute(*("chw".index(axis) for axis in self.pixels)).flatten()

    def to_images(self, rows: Float[Tensor, "... d"], shape: Shape) -> Float[Tensor, "... d"]:
        """Rows over the network's inputs as rows over flat images (c, h, w)."""
        return rows.index_select(-1, self.places(shape).argsort().to(rows.device))

    def to_inputs(self, rows: Float[Tensor, "... d"], shape: Shape) -> Float[Tensor, "... d"]:
        """The inverse of `to_images`."""
        return rows.index_select(-1, self.places(shape).to(rows.device))


def orders_of(shape: Shape) -> tuple[InputOrder, ...]:
    """All orders in which inputs of images of a shape may differ, the usual one first."""
    pixels = ("chw", "cwh") if shape[0] == 1 else get_args(PixelOrder)
    channels = get_args(ChannelOrder)[: 2 if shape[0] == 3 else 1]
    return tuple(InputOrder(p, c) for c in channels for p in pixels)


def shares_in_span(
    directions: Float[Tensor, "k d"], images: Float[Tensor, "n c h w"]
) -> dict[InputOrder, Float[Tensor, " n"]]:
    """Share of each image's energy, less the images' mean, in the span of directions of a network's
    inputs, by their order."""
    basis = torch.linalg.qr(directions.double().mT).Q
    x, (c, h, w) = (images - images.mean(0)).double().flatten(1), images.shape[1:]
    inside = {o: (o.to_inputs(x, (c, h, w)) @ basis).square().sum(1) for o in orders_of((c, h, w))}
    return {o: energy / x.square().sum(1).clamp_min(1e-12) for o, energy in inside.items()}


def better_order(
    shares: dict[InputOrder, Float[Tensor, " n"]], taken: InputOrder
) -> InputOrder | None:
    """The order that fits images clearly better than `taken`; None if there is none."""
    best = max(shares, key=lambda order: float(shares[order].mean()))
    gain = shares[best] - shares[taken]
    if best == taken or len(gain) < 2:
        return None
    t = float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp_min(1e-12))
    left = float((1 - shares[best].mean()) / (1 - shares[taken].mean()).clamp_min(1e-12))
    return best if t >= T_AT_LEAST and left <= RESIDUAL else None


def smoother_order(
    directions: Float[Tensor, "k d"], shape: Shape, taken: InputOrder
) -> InputOrder | None:
    """The order in which directions are much smoother pictures than in `taken`; None if there is
    none. Transposed and recoloured pictures are as smooth."""
    pictures = {o: o.to_images(directions, shape).unflatten(-1, shape) for o in orders_of(shape)}
    rough = {o: float(roughness(some).mean()) for o, some in pictures.items()}
    best = min(rough, key=lambda o: rough[o])
    return best if rough[best] < SMOOTHER * rough[taken] else None


def roughness(pictures: Float[Tensor, "k c h w"]) -> Float[Tensor, " k"]:
    """Mean square difference of neighbouring pixels over the mean square: 2 of white noise, .3 to
    1.8 of mixtures of images with noise in them."""
    across, down = (pictures.diff(dim=dim).square().mean((1, 2, 3)) for dim in (3, 2))
    return (across + down) / 2 / pictures.square().mean((1, 2, 3)).clamp_min(1e-300)


def subtracted(
    directions: Float[Tensor, "k d"], images: Float[Tensor, "n c h w"]
) -> Float[Tensor, " c"] | Literal["own"] | None:
    """What was subtracted from a network's training images, judged by these or similar `images`: a
    constant per channel (0 for nothing), "own" for a mean image, None if the layer does not show.

    `directions`: of the first layer, over flat images. `images`: as the network had them but for
    the mean, so divided by a standard deviation if that was done. Their mean, less a constant that
    was subtracted, lies in the span as much as they do, unless the mean was subtracted itself.
    """
    if len(images) < FEWEST:
        return None
    basis = torch.linalg.qr(directions.double().mT).Q
    x, channels = images.double().flatten(1), images.shape[1]
    mean, shades = x.mean(0), torch.eye(channels).to(x).repeat_interleave(x.shape[1] // channels, 1)

    def share(rows: Tensor) -> float:
        """Share of the energy outside the span."""
        inside = (rows @ basis).square().sum()
        return 1 - float(inside / rows.square().sum().clamp_min(1e-12))

    both = torch.cat([basis, shades.mT], 1)
    fitted: Tensor = torch.linalg.lstsq(both, mean[:, None]).solution[-channels:, 0].clamp(0, 1)
    usual, none, constant = share(x - mean), share(mean), share(mean - fitted @ shades)
    inside = max(INSIDE * usual, ROUNDING)
    if min(none, constant) <= inside:
        return torch.zeros(channels) if none <= inside else fitted.float()
    return "own" if min(none, constant) >= max(OUTSIDE * usual, ROUNDING) else None


NEWTON_STEPS = 30
GAIN = 0.01
"""Least share of energy that rescaled channels must lose: .012 to .2 for 100 images of a JPEG copy
of CIFAR-10 with the usual divisors, at most .005 for lossless photographs, whose right factors this
finds to 3 % only."""
SMALLEST = 0.1
"""Least 1 / t that is believed: it is 0 where the mean was subtracted, which shows none."""


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
    product 1. All are 1 where other factors save hardly any energy (`GAIN`), as in pictures with
    detailed colours. Of a JPEG copy, without noise, they are right to .1 % from 20 images on."""
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
