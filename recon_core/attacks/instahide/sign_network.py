"""The signs that InstaHide takes from an image, guessed by a small network up to one for a region.

Where a smooth image crosses zero its absolute value has a crease. Trained on mixtures of public
images, whose signs are known, the network gives their high frequencies, whitened and of unit energy
near every pixel, up to a sign for each window of 4 to 32 pixels. Untrained it gives those of |y|. A
U-Net on patches of 2 x 2 pixels corrects the whitened |y| by a factor and a sum and weighs it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor, nn

PATCH = 2
GRID = 8
"""Sides of images must be multiples of this: patches, halved twice."""
FILTER = 7
"""Side of the whitening filter, in pixels; smaller where images are."""
REGULAR = 0.1
"""Added to the power at each frequency, in shares of its mean."""
NEAR = 5
"""Side of the neighbourhood with unit energy, in pixels."""
FAINT = 0.05
"""Amplitude, in shares of the image's, below which a neighbourhood stays faint."""
CREASE = 0.05
"""Width around zero, in units of pixels in [-1, 1], that is shown to the network as such."""
LEAST = 0.05
"""Weight of a pixel, at least."""


class Unfolder(nn.Module):
    """Absolute values (n, c, h, w) of mixtures of images in [-1, 1] to fields of that shape."""

    whitening: Tensor

    def __init__(self, n_channels: int, width: int, deep_width: int) -> None:
        super().__init__()
        self.n_channels = n_channels
        c, a, b = n_channels, width, deep_width
        filter_shape = (c, c, FILTER, FILTER)
        self.register_buffer("whitening", torch.zeros(filter_shape))
        self.patches = nn.Conv2d(3 * c, a, 2 * PATCH, stride=PATCH, padding=PATCH // 2)
        self.down = nn.ModuleList([_Residual(a), _conv(a, b), _Residual(b), _conv(b, b)])
        self.bottom = nn.ModuleList([_Residual(b), _Residual(b)])
        self.up = nn.ModuleList([_Residual(b), nn.Conv2d(b, a, 1), _Residual(a)])
        self.correction = _conv(a, (2 * c + 1) * PATCH**2)
        nn.init.zeros_(self.correction.weight)
        assert self.correction.bias is not None
        nn.init.zeros_(self.correction.bias)

    def forward(self, y: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        c, white = self.n_channels, self.whitened(y)
        seen = torch.cat([4 * y - 1, (-y / CREASE).exp(), white], 1)
        fine = self.down[0](F.relu(self.patches(_channels_last(seen))))
        coarse = self.down[2](F.relu(self.down[1](F.avg_pool2d(fine, 2))))
        coarsest = self.bottom[0](F.relu(self.down[3](F.avg_pool2d(coarse, 2))))
        coarse = self.up[0](coarse + _doubled(self.bottom[1](coarsest)))
        fine = self.up[2](fine + _doubled(self.up[1](coarse)))
        change = F.pixel_shuffle(self.correction(F.relu(fine)), PATCH)
        factor, added, weight = change.split([c, c, 1], 1)
        field: Tensor = of_unit_energy(white * (1 + factor) + added)
        weighed: Tensor = field * (1 + weight).clamp(min=LEAST)
        return weighed

    def target(self, signed: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        return of_unit_energy(self.whitened(signed))

    def whitened(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        edge = FILTER // 2
        return F.conv2d(F.pad(x, (edge,) * 4, mode="replicate"), self.whitening)

    @torch.no_grad()
    def calibrate(self, signed: Float[Tensor, "n c h w"]) -> None:
        """Take the filter that whitens these mixtures."""
        self.whitening.copy_(whitening_filter(signed))


class _Residual(nn.Module):
    """x plus two convolutions of it."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.first, self.second = _conv(n_channels, n_channels), _conv(n_channels, n_channels)

    def forward(self, x: Float[Tensor, "n k h w"]) -> Float[Tensor, "n k h w"]:
        change: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + change


def _conv(n_in: int, n_out: int) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, padding=1)


def _doubled(x: Float[Tensor, "n k h w"]) -> Float[Tensor, "n k hh ww"]:
    return F.interpolate(x, scale_factor=2)


def _channels_last(x: Float[Tensor, "n k h w"]) -> Float[Tensor, "n k h w"]:
    """Half again as fast on a CPU."""
    return x.contiguous(memory_format=torch.channels_last)


def of_unit_energy(field: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    edge = NEAR // 2
    energy = field.square().mean(1, keepdim=True)
    around = F.avg_pool2d(F.pad(energy, (edge,) * 4, mode="replicate"), NEAR, 1)
    whole = energy.mean((1, 2, 3), keepdim=True)
    return field * (around + FAINT**2 * whole + 1e-12).rsqrt()


def whitening_filter(signed: Float[Tensor, "n c h w"]) -> Float32[Tensor, "c c k k"]:
    """The filter, (channels out, channels in, FILTER, FILTER), that makes images' power equal at
    all frequencies and channels uncorrelated; without the mean, and with outputs of variance 1."""
    height, width = signed.shape[2:]
    n_channels, edge = signed.shape[1], FILTER // 2
    if min(height, width) < FILTER:
        raise ValueError(f"images of {height} x {width} pixels are smaller than the filter's 7 x 7")
    transform = torch.fft.fft2(signed.float() - signed.float().mean((0, 2, 3), keepdim=True))
    power = torch.einsum("nihw,njhw->hwij", transform, transform.conj()) / len(signed)
    power[0, 0] = power[1, 0] + power[0, 1]
    levels, axes = torch.linalg.eigh(power)
    scale = (levels.clamp(min=0.0) + REGULAR * levels.mean()).rsqrt().to(axes.dtype)
    inverse = (axes * scale[..., None, :]) @ axes.mH
    response = torch.fft.fftshift(torch.fft.ifft2(inverse.permute(2, 3, 0, 1)).real, dim=(2, 3))
    rows = slice(height // 2 - edge, height // 2 + edge + 1)
    columns = slice(width // 2 - edge, width // 2 + edge + 1)
    kernel = response[:, :, rows, columns].flip(2, 3)
    kernel = kernel - kernel.mean((2, 3), keepdim=True)
    spread = F.conv2d(signed.float(), kernel.contiguous()).std()
    if not float(spread) > 0:
        raise ValueError(f"{len(signed)} images of {n_channels} channels have no contrast")
    white: Tensor = kernel / spread
    return white


def windows(blocks: Float[Tensor, "gh gw *s"]) -> list[Float[Tensor, "a b *s"]]:
    """Sums over all windows of 1, 2, 4, ... blocks a side, the last of them the whole."""
    sums, side = [blocks], 1
    while 2 * side <= min(blocks.shape[:2]):
        last = sums[-1]
        rows = last[:-side] + last[side:]
        sums.append(rows[:, :-side] + rows[:, side:])
        side *= 2
    if sums[-1].shape[:2] != (1, 1):
        sums.append(blocks.sum((0, 1), keepdim=True))
    return sums


def unfolding_loss(
    field: Float[Tensor, "n c h w"], target: Float[Tensor, "n c h w"], block: int
) -> Float[Tensor, ""]:
    """Squared error of the field up to a sign per window, mean over windows' sizes, less the
    target's own square: f^2 - 2 |f t|, summed in windows, per pixel. -1 is perfect."""
    n, _c, h, w = field.shape

    def summed(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "gh gw n"]:
        return (
            x.mean(1).reshape(n, h // block, block, w // block, block).sum((2, 4)).permute(1, 2, 0)
        )

    products, squares = windows(summed(field * target)), windows(summed(field.square()))
    losses = []
    for k, (product, square) in enumerate(zip(products, squares, strict=True)):
        n_pixels = h * w if k + 1 == len(products) else (block * 2**k) ** 2
        losses.append((square - 2 * product.abs()).mean() / n_pixels)
    return torch.stack(losses).mean()


def n_windows(n_rows: int, n_columns: int) -> list[int]:
    """Number of windows of each size that `windows` gives."""
    return [math.prod(s.shape) for s in windows(torch.zeros(n_rows, n_columns))]
