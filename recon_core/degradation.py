"""Degraded images y = H x + noise: six masks, and Gaussian noise (autoencoder paper, eq. 3).

The paper gives no file of its masks, so they are drawn here, and grow with the image; all channels
of a pixel are kept or lost together. The noise is not clipped to [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

MASKS = ("random", "blocks", "stripes", "text", "half", "window")
"""The paper's masks 1 to 6, by our names."""

KNOWN_SHARE = 0.3
MISSING_BLOCKS = 0.5
MISSING_BANDS = 1 / 3
WINDOW = 0.6
SMALLEST = 4
"""Pixels of the smallest side that all masks make sense on."""
STROKES_PER_GLYPH = 3
SPACES = 1 / 8

BLACK, WHITE = 16, 239
"""A picture of a mask is at most so bright where a pixel is missing, and at least so where it is
known."""
FEW_GREY = 0.01
"""The share of pixels in between that is put up with, as of a picture that was compressed."""
FAR = 8.0
"""Noise does not carry a pixel so many standard deviations out of [0, 1]: one in 1e15."""

# What a glyph is made of: its 5 rows, from the top; three columns each.
_STROKES = (
    ("#..", "#..", "#..", "#..", "#.."),
    (".#.", ".#.", ".#.", ".#.", ".#."),
    ("..#", "..#", "..#", "..#", "..#"),
    ("###", "...", "...", "...", "..."),
    ("...", "...", "###", "...", "..."),
    ("...", "...", "...", "...", "###"),
    ("..#", "..#", ".#.", "#..", "#.."),
    ("#..", "#..", ".#.", "..#", "..#"),
)


def mask_pattern(
    name: str, height: int, width: int, *, generator: torch.Generator
) -> Bool[Tensor, "h w"]:
    """One of `MASKS`, True where a pixel is known. Raises ValueError for another name or sides too
    small."""
    if min(height, width) < SMALLEST:
        raise ValueError(
            f"a mask of {height}x{width}; all masks need at least {SMALLEST}x{SMALLEST} pixels"
        )
    if name == "random":
        order = torch.randperm(height * width, generator=generator)
        return (order < round(KNOWN_SHARE * height * width)).view(height, width)
    if name == "blocks":
        known = torch.ones(height, width, dtype=torch.bool)
        side = max(2, round(min(height, width) / 8))
        while (~known).sum() < MISSING_BLOCKS * height * width:
            top, left = (
                int(torch.randint(length - side + 1, (), generator=generator))
                for length in (height, width)
            )
            known[top : top + side, left : left + side] = False
        return known
    if name == "stripes":
        band = max(1, round(min(height, width) / 16))
        stripes = []
        for side in (height, width):
            n = math.ceil(side / band)
            order = torch.randperm(n, generator=generator)
            stripes.append((order >= round(MISSING_BANDS * n)).repeat_interleave(band)[:side])
        return stripes[0].unsqueeze(1) & stripes[1]
    if name == "text":
        return _text(height, width, generator)
    known = torch.zeros(height, width, dtype=torch.bool)
    if name == "half":
        known[: height // 2] = True
        return known
    if name == "window":
        h, w = round(WINDOW * height), round(WINDOW * width)
        top, left = (height - h) // 2, (width - w) // 2
        known[top : top + h, left : left + w] = True
        return known
    raise ValueError(f"there is no mask {name!r}; choose one of {', '.join(MASKS)}")


def degrade(
    images: Float[Tensor, "n c h w"],
    mask: Tensor,
    *,
    sigma: float = 0.0,
    generators: Sequence[torch.Generator] = (),
) -> Float[Tensor, "n c h w"]:
    """y = H x + noise: images in [0, 1], 0 where `mask`, bool (h, w) or (n, h, w), is False.

    `sigma` is the noise's standard deviation, on missing pixels too. Every sample has its own
    generator, drawn from on the CPU in float32. Raises ValueError for arguments that do not fit
    together.
    """
    n, _, h, w = images.shape
    if mask.dtype != torch.bool or tuple(mask.shape) not in {(h, w), (n, h, w)}:
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)}; these images need bool {(h, w)}, or "
            f"{(n, h, w)} for a mask each"
        )
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"sigma={sigma} is not a standard deviation; 0 is no noise")
    _check_range("images", images, 0.0)
    known = mask.to(images.device).expand(n, h, w).unsqueeze(1)
    y = torch.where(known, images, 0.0)
    if not sigma:
        return y
    if len(generators) != n:
        raise ValueError(f"noise needs one generator per image: {len(generators)} for {n}")
    noise = torch.stack([torch.randn(images.shape[1:], generator=g) for g in generators])
    return y + sigma * noise.to(y)


def check_degraded(y: Tensor, sigma: float | None) -> None:
    """ValueError unless y has floats (n, c, h, w), at least one, finite, and in [0, 1] where
    `sigma` is 0. With noise they may be outside by 8 `sigma`, or by 1 where that is more; None: by
    1, the noise is unknown."""
    if y.dim() != 4 or not y.is_floating_point() or not y.numel():
        raise ValueError(
            f"degraded images are {y.dtype} {tuple(y.shape)}; expected floats (n, c, h, w) in "
            "[0, 1], at least one"
        )
    if sigma is not None and not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(
            f"sigma={sigma} is not a standard deviation; 0 is no noise, None is not known"
        )
    _check_range("degraded images", y, 0.0 if sigma == 0 else max(1.0, FAR * (sigma or 0.0)))


def mask_from_picture(array: npt.NDArray[Any], height: int, width: int) -> Bool[Tensor, "h w"]:
    """The mask in a picture (h, w), (h, w, 1) or (h, w, 3): white is known, black is missing.
    Raises ValueError if it has another size or type, too many grey pixels, or leaves everything or
    nothing."""
    if array.dtype != np.uint8 or array.ndim < 2 or array.shape[2:] not in {(), (1,), (3,)}:
        raise ValueError(
            f"the mask's picture is {array.dtype} {array.shape}; expected uint8 (h, w), grey, or "
            "(h, w, 3), RGB; save it without transparency"
        )
    if array.shape[:2] != (height, width):
        raise ValueError(
            f"the mask's picture is {array.shape[0]}x{array.shape[1]}, the images are "
            f"{height}x{width}; a mask has one pixel for each of theirs, do not resize it"
        )
    lowest, highest = (array, array) if array.ndim == 2 else (array.min(2), array.max(2))
    grey = int(((highest > BLACK) & (lowest < WHITE)).sum())
    if grey > max(3, FEW_GREY * height * width):
        raise ValueError(
            f"{grey} of {height * width} pixels of the mask's picture are neither black nor white; "
            "save it with two colours and without smoothing: white is known, black is missing"
        )
    known = (array if array.ndim == 2 else array.mean(2)) >= 128
    if known.all() or not known.any():
        raise ValueError(
            f"the mask's picture is all {'white, no' if known.all() else 'black, every'} pixel is "
            "missing; white is known, black is missing"
        )
    return torch.from_numpy(known)


def _text(height: int, width: int, generator: torch.Generator) -> Tensor:
    """Lines of random glyphs, 5 units high and 3 wide with a unit between; a unit is a 32nd of the
    side."""
    unit = max(1, round(min(height, width) / 32))
    n_lines, n_columns = math.ceil(height / (6 * unit)), math.ceil(width / (4 * unit))
    n = n_lines * n_columns
    strokes = torch.tensor([[[c == "#" for c in row] for row in stroke] for stroke in _STROKES])
    order = torch.rand(n, len(strokes), generator=generator).argsort(dim=1)
    glyphs = strokes[order[:, :STROKES_PER_GLYPH]].any(1)
    is_space = torch.rand(n, generator=generator) < SPACES
    is_space[0] = False  # so that something is missing in the smallest image
    glyphs &= ~is_space.view(-1, 1, 1)
    cells = torch.nn.functional.pad(glyphs, (0, 1, 0, 1)).view(n_lines, n_columns, 6, 4)
    lines = cells.transpose(1, 2).flatten(2).flatten(0, 1)
    ink = lines.repeat_interleave(unit, 0).repeat_interleave(unit, 1)
    return ~ink[:height, :width]


def _check_range(what: str, x: Tensor, margin: float) -> None:
    if not x.isfinite().all():
        raise ValueError(f"{what} have NaN or infinite pixels; pixels are numbers in [0, 1]")
    lowest, highest = (float(v) for v in x.aminmax()) if x.numel() else (0.0, 1.0)
    if lowest < -margin or highest > 1 + margin:
        but = " but for the noise, of the sigma given" if margin else ""
        raise ValueError(
            f"{what} have pixels from {lowest:g} to {highest:g}; they must be in [0, 1]{but}; "
            "divide 8-bit pixels by 255, and if there is noise, give sigma"
        )
