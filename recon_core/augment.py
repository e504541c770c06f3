"""Augmentation of the images a victim is trained on, and the nine numbers that describe it.

The pipe of Karras et al. 2022 (EDM, appendix F.2): flips, isotropic scaling, rotation, anisotropic
scaling and translation, each applied to an image with probability p; only the flip along x is
always eligible. Images are augmented *before* the victim is trained (image restoration paper,
section 2), and rounded to uint8, so that what it sees is exactly what is stored.

Resampling is band-limited: upsample twofold with the sym6 wavelet's scaling filter, look up
bilinearly, downsample with the same filter, which is orthonormal. Departures: reflection at the
border is exact at any distance (one period of the mirrored image is upsampled and coordinates wrap
around); the filter's phase is taken from its first moment, not from its middle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Float, Float32, UInt8
from torch import Tensor

SCALE_STD = 0.2  # log2 units
ANISO_STD = 0.2  # log2 units
ANISO_ROTATE_PROB = 0.5
TRANSLATE_STD = 0.125  # fraction of the image side

AUGMENT_LABELS = (
    "xflip",
    "yflip",
    "scale",
    "rotate_cos_minus_1",
    "rotate_sin",
    "aniso_cos",
    "aniso_sin",
    "translate_x",
    "translate_y",
)
"""Names of the nine labels, in EDM's order; all of them are 0 for an unchanged image."""

_SYM6 = (
    0.015404109327027373,
    0.0034907120842174702,
    -0.11799011114819057,
    -0.048311742585633,
    0.4910559419267466,
    0.787641141030194,
    0.3379294217276218,
    -0.07263752278646252,
    -0.021060292512300564,
    0.04472490177066578,
    0.0017677118642428036,
    -0.007800708325034148,
)
_CHUNK_IMAGES = 128  # bounds the memory of the upsampled copies


@dataclass(frozen=True, kw_only=True)
class AugmentParameters:
    """The drawn transformation of n images; zero everywhere leaves them unchanged.

    `scale` and `aniso` are in units of their standard deviation (.2 octaves), `angle` and
    `aniso_angle` in radians, `shift` (x to the right, y downwards) in units of 1/8 of the side.
    A positive `angle` turns the picture counter-clockwise. `aniso` stretches along the direction
    `aniso_angle` and shrinks across it.
    """

    xflip: Bool[Tensor, " n"]
    yflip: Bool[Tensor, " n"]
    scale: Float32[Tensor, " n"]
    angle: Float32[Tensor, " n"]
    aniso: Float32[Tensor, " n"]
    aniso_angle: Float32[Tensor, " n"]
    shift: Float32[Tensor, "n 2"]

    def labels(self) -> Float32[Tensor, "n 9"]:
        columns = [
            self.xflip.float(),
            self.yflip.float(),
            self.scale,
            self.angle.cos() - 1,
            self.angle.sin(),
            self.aniso * self.aniso_angle.cos(),
            self.aniso * self.aniso_angle.sin(),
            self.shift[:, 0],
            self.shift[:, 1],
        ]
        return torch.stack(columns, dim=1)


def mirrored_labels(labels: Float32[Tensor, "n 9"]) -> Float32[Tensor, "n 9"]:
    """The labels of augmented images that are then flipped left to right: the same as a flip at the
    beginning and the mirror image of all that follows."""
    mirrored = labels.clone()
    mirrored[:, AUGMENT_LABELS.index("xflip")] = 1 - labels[:, AUGMENT_LABELS.index("xflip")]
    for name in ("rotate_sin", "aniso_sin", "translate_x"):
        mirrored[:, AUGMENT_LABELS.index(name)].neg_()
    return mirrored


def augment_images(
    images: UInt8[Tensor, "n c h w"], *, p: float, generator: torch.Generator
) -> tuple[UInt8[Tensor, "n c h w"], Float32[Tensor, "n 9"]]:
    """Randomly augmented images, on the device of `images`, and their nine labels.

    p is the probability of each transformation (EDM and the image restoration paper: .12); the flip
    along x is drawn with probability 1/2 for any p > 0. Takes the same number of draws from the CPU
    generator whatever p is.
    """
    parameters = draw_parameters(len(images), p=p, generator=generator)
    return apply_augmentation(images, parameters), parameters.labels().to(images.device)


def draw_parameters(n_images: int, *, p: float, generator: torch.Generator) -> AugmentParameters:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p={p} is not a probability; choose it from 0 (off) to 1, e.g. 0.12")

    def uniform() -> Tensor:
        return torch.rand(n_images, generator=generator)

    def gate(value: Tensor, probability: float) -> Tensor:
        keep = uniform() < probability
        return torch.where(keep.view(-1, *[1] * (value.ndim - 1)), value, torch.zeros_like(value))

    def angle() -> Tensor:
        return (2 * uniform() - 1) * math.pi

    xflip = gate((uniform() < 0.5).float(), 1.0 if p > 0 else 0.0) > 0
    yflip = gate((uniform() < 0.5).float(), p) > 0
    scale = gate(torch.randn(n_images, generator=generator), p)
    rotation = gate(angle(), p)
    aniso = gate(torch.randn(n_images, generator=generator), p)
    aniso_angle = gate(angle(), ANISO_ROTATE_PROB)
    shift = gate(torch.randn(n_images, 2, generator=generator), p)
    return AugmentParameters(
        xflip=xflip,
        yflip=yflip,
        scale=scale,
        angle=rotation,
        aniso=aniso,
        aniso_angle=torch.where(aniso == 0, torch.zeros_like(aniso_angle), aniso_angle),
        shift=shift,
    )


def apply_augmentation(
    images: UInt8[Tensor, "n c h w"], parameters: AugmentParameters
) -> UInt8[Tensor, "n c h w"]:
    """The images, flipped exactly and then resampled where their geometry changes."""
    device = images.device
    flip_x = parameters.xflip.to(device).view(-1, 1, 1, 1)
    flip_y = parameters.yflip.to(device).view(-1, 1, 1, 1)
    out = torch.where(flip_x, images.flip(3), images)
    out = torch.where(flip_y, out.flip(2), out)
    matrix, moved = _inverse_geometry(parameters, height=images.shape[2], width=images.shape[3])
    for rows in torch.split(moved.nonzero()[:, 0], _CHUNK_IMAGES):
        resampled = resample(out[rows.to(device)].float(), matrix[rows].to(device))
        out[rows.to(device)] = resampled.round().clamp(0, 255).to(torch.uint8)
    return out


def _inverse_geometry(
    parameters: AugmentParameters, *, height: int, width: int
) -> tuple[Float32[Tensor, "n 2 3"], Bool[Tensor, " n"]]:
    """Where each output pixel comes from, p_in = S^-1 R^-1 A^-1 (p_out - t), in pixels from the
    image's centre, y downwards; and whether that differs from where it is."""
    unit = 2.0 ** (SCALE_STD * parameters.scale)
    stretch = 2.0 ** (ANISO_STD * parameters.aniso)
    zero = torch.zeros_like(unit)
    scale_inverse = _matrix(1 / unit, zero, zero, 1 / unit)
    aniso_inverse = (
        _rotation(-parameters.aniso_angle)
        @ _matrix(1 / stretch, zero, zero, stretch)
        @ _rotation(parameters.aniso_angle)
    )
    linear = scale_inverse @ _rotation(parameters.angle) @ aniso_inverse
    side = torch.tensor([width, height], dtype=torch.float32)
    shift = parameters.shift * TRANSLATE_STD * side
    offset = -(linear @ shift.unsqueeze(2))
    moved = (
        (parameters.scale != 0)
        | (parameters.angle != 0)
        | (parameters.aniso != 0)
        | (parameters.shift != 0).any(dim=1)
    )
    return torch.cat([linear, offset], dim=2), moved


def _matrix(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Float32[Tensor, "n 2 2"]:
    return torch.stack([torch.stack([a, b], dim=1), torch.stack([c, d], dim=1)], dim=1)


def _rotation(angle: Tensor) -> Float32[Tensor, "n 2 2"]:
    return _matrix(angle.cos(), -angle.sin(), angle.sin(), angle.cos())


def resample(
    images: Float[Tensor, "n c h w"], matrix: Float[Tensor, "n 2 3"]
) -> Float[Tensor, "n c h w"]:
    """Band-limited resampling: out(p) = in(matrix @ (p, 1)), p = (x, y) pixels from the centre. The
    image continues beyond its border as its own mirror image. Filtering is separable."""
    n, channels, height, width = images.shape
    rows, columns = (_upsampling(side).to(images) for side in (height, width))
    upsampled = rows @ images @ columns.T
    taps = torch.tensor(_SYM6, dtype=torch.float64)
    delay = float((taps * torch.arange(len(_SYM6))).sum() / taps.sum())

    def positions(side: int) -> Tensor:
        # The samples that the downsampling filter will read, in pixels from the centre.
        samples = torch.arange(2 * (side - 1) + len(_SYM6), device=images.device)
        return (samples.to(images.dtype) - delay) / 2 - (side - 1) / 2

    y, x = torch.meshgrid(positions(height), positions(width), indexing="ij")
    points = torch.stack([x, y, torch.ones_like(x)]).flatten(1)
    source = matrix.to(images.dtype) @ points
    column = 2 * (source[:, 0] + (width - 1) / 2) + delay
    row = 2 * (source[:, 1] + (height - 1) / 2) + delay
    looked_up = _bilinear_wrapped(upsampled, row, column).view(n, channels, *y.shape)
    rows, columns = (_downsampling(side).to(images) for side in (height, width))
    return rows @ looked_up @ columns.T


@cache
def _upsampling(side: int) -> Float[Tensor, "up side"]:
    """y[m] = sum_n h[m - 2n] x[n], for one period, 4(side-1) long, of the mirrored signal x."""
    period = max(2 * (side - 1), 1)
    matrix = torch.zeros(2 * period, side, dtype=torch.float64)
    for n in range(period):
        for k, tap in enumerate(_SYM6):
            matrix[(2 * n + k) % (2 * period), min(n, period - n)] += tap
    return matrix


@cache
def _downsampling(side: int) -> Float[Tensor, "side samples"]:
    """x[n] = sum_m h[m - 2n] y[m]: the adjoint filter, on the samples 0 to 2 side + 9."""
    matrix = torch.zeros(side, 2 * (side - 1) + len(_SYM6), dtype=torch.float64)
    for n in range(side):
        matrix[n, 2 * n : 2 * n + len(_SYM6)] = torch.tensor(_SYM6, dtype=torch.float64)
    return matrix


def _bilinear_wrapped(
    signal: Float[Tensor, "n c h w"], row: Float[Tensor, "n k"], column: Float[Tensor, "n k"]
) -> Float[Tensor, "n c k"]:
    n, channels, height, width = signal.shape
    flat = signal.flatten(2)
    row_0, column_0 = row.floor(), column.floor()
    weight_row, weight_column = (row - row_0).unsqueeze(1), (column - column_0).unsqueeze(1)

    def at(rows: Tensor, columns: Tensor) -> Tensor:
        index = rows.long().remainder(height) * width + columns.long().remainder(width)
        return flat.gather(2, index.unsqueeze(1).expand(n, channels, -1))

    top = torch.lerp(at(row_0, column_0), at(row_0, column_0 + 1), weight_column)
    bottom = torch.lerp(at(row_0 + 1, column_0), at(row_0 + 1, column_0 + 1), weight_column)
    return torch.lerp(top, bottom, weight_row)
