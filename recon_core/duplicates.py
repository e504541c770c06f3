"""Near copies: which images are the same photograph as one of some others.

A test photograph that is, recompressed, recoloured or mirrored, in the training set too is not held
out; CIFAR-10 has hundreds (Barz and Denzler 2020). Two images are as alike as the *smaller* of two
correlations (`ncc.unit_vectors`, all channels in one): that of the images, and that of their
detail,

    detail(x) = (x - blur(x)) / sqrt(blur((x - blur(x))^2) + 0.1^2),

Gaussian blurs of 2 pixels, the square averaged over channels, an eighth of the side left out at
each border. Either alone misleads: seas and skies agree in pixels, frames in details. Measured on
CIFAR-10, judged by eye: of the 188 test images above .6 some 20 % are not copies (none of the first
50); from .54 to .6 about a fifth still are. Not found: copies that are shifted by more than a
pixel, cropped or turned.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int, Shaped
from torch import Tensor

from recon_core.metrics import require_same_shape, unit_vectors
from recon_core.types import Progress, no_progress

THRESHOLD = 0.6
"""Images more alike than this are taken for copies; see above for what that gives."""

BLUR = 2.0
CONTRAST = 0.1
RADIUS = 6
ROUNDING = 1e-3
"""Detail below this is float arithmetic's; one grey level makes about .03."""

IMAGE_ROWS = 5000
OTHER_ROWS = 500


@dataclass(frozen=True, kw_only=True)
class MostAlike:
    """Per image the most alike of the others (-1: there is none), how alike, and whether
    mirrored."""

    row: Int[Tensor, " n"]
    correlation: Float32[Tensor, " n"]
    mirrored: Bool[Tensor, " n"]


@dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    """Rows of the images that are near copies, ascending, and rows of what they are copies of."""

    rows: Int[Tensor, " k"]
    nearest: Int[Tensor, " k"]
    correlation: Float32[Tensor, " k"]


def near_duplicates(
    images: Shaped[Tensor, "n c h w"],
    others: Shaped[Tensor, "m c h w"],
    *,
    threshold: float = THRESHOLD,
    progress: Progress = no_progress,
) -> NearDuplicates:
    """The images whose most alike of `others` is more alike than `threshold`, in [0, 1). Raises
    ValueError as `most_alike` does."""
    if not 0 <= threshold < 1:
        raise ValueError(
            f"threshold={threshold}; expected a correlation from 0 to below 1, such as {THRESHOLD}"
        )
    found = most_alike(images, others, progress=progress)
    rows = (found.correlation > threshold).nonzero().squeeze(1)
    return NearDuplicates(rows=rows, nearest=found.row[rows], correlation=found.correlation[rows])


def most_alike(
    images: Shaped[Tensor, "n c h w"],
    others: Shaped[Tensor, "m c h w"],
    *,
    progress: Progress = no_progress,
) -> MostAlike:
    """Each image's most alike of `others`, of the image or its mirror image.

    Images are uint8, or float in [0, 1]. Ties go to the lowest row, unmirrored before mirrored.
    Exact copies have correlation 1; otherwise an image without contrast, or without detail inside
    its border, has 0 or less. Raises ValueError for images of different shapes or types, below 8x8,
    or not finite.
    """
    _check(images, others)
    n = len(images)
    row = torch.full((n,), -1, dtype=torch.int64, device=images.device)
    best = torch.full((n,), -1.0, device=images.device)
    flipped = torch.zeros(n, dtype=torch.bool, device=images.device)
    blocks = [(i, j) for i in range(0, n, IMAGE_ROWS) for j in range(0, len(others), OTHER_ROWS)]
    sides: list[tuple[Tensor, Tensor]] = []
    for k, (i, j) in enumerate(blocks):
        mine = slice(i, i + IMAGE_ROWS)
        if j == 0:
            sides = [_directions(images[mine]), _directions(images[mine].flip(3))]
        whole, detail = _directions(others[j : j + OTHER_ROWS])
        for is_mirrored, (left, left_detail) in zip((False, True), sides, strict=False):
            alike = torch.minimum(left @ whole.T, left_detail @ detail.T)
            value, column = alike.max(dim=1)
            better = value > best[mine]
            best[mine] = value.where(better, best[mine])
            row[mine] = (column + j).where(better, row[mine])
            flipped[mine] = torch.where(better, is_mirrored, flipped[mine])
        progress((k + 1) / len(blocks))
    best.clamp_(-1.0, 1.0)
    first: dict[bytes, int] = {}  # exact copies, whose detail may be none
    for k, other in enumerate(others):
        first.setdefault(_content(other), k)
    for i, image in enumerate(images):
        for is_mirrored, view in ((True, image.flip(2)), (False, image)):
            if (copy := first.get(_content(view))) is not None:
                row[i], best[i], flipped[i] = copy, 1.0, is_mirrored
    return MostAlike(row=row, correlation=best, mirrored=flipped)


def _directions(
    images: Shaped[Tensor, "n c h w"],
) -> tuple[Float32[Tensor, "n d"], Float32[Tensor, "n e"]]:
    unit = images.float() / (255 if images.dtype == torch.uint8 else 1)
    height, width = images.shape[2:]
    top, left = height // 8, width // 8
    detail = unit - _blurred(unit)
    contrast = _blurred(detail.square().mean(dim=1, keepdim=True)) + CONTRAST**2
    inside = (detail / contrast.sqrt())[:, :, top : height - top, left : width - left]
    strength = inside.abs().amax(dim=(1, 2, 3), keepdim=True)
    inside = inside.where(strength > ROUNDING, 0.0)
    return tuple(unit_vectors(x, per_channel=False).float() for x in (unit, inside))  # type: ignore[return-value]


def _blurred(images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    offsets = torch.arange(-RADIUS, RADIUS + 1, device=images.device)
    window = torch.exp(-0.5 * (offsets / BLUR) ** 2)
    window = window / window.sum()
    n_channels = images.shape[1]
    padded = F.pad(images, (RADIUS,) * 4, mode="reflect")
    rows = window.expand(n_channels, 1, 1, -1)
    return F.conv2d(
        F.conv2d(padded, rows, groups=n_channels), rows.transpose(2, 3), groups=n_channels
    )


def _content(image: Shaped[Tensor, "c h w"]) -> bytes:
    return hashlib.blake2b(image.cpu().contiguous().numpy().tobytes(), digest_size=16).digest()


def _check(images: Tensor, others: Tensor) -> None:
    require_same_shape(images, others)
    if images.dtype != others.dtype:
        raise ValueError(
            f"images are {images.dtype} and others {others.dtype}; give both as uint8, or both as "
            "float in [0, 1]"
        )
    if min(images.shape[2:]) <= RADIUS + 1:
        raise ValueError(
            f"images of {images.shape[2]}x{images.shape[3]} are too small to compare their "
            f"detail; use images of at least {RADIUS + 2}x{RADIUS + 2}"
        )
    for name, given in (("images", images), ("others", others)):
        if given.is_floating_point() and not given.isfinite().all():
            row = int((~given.isfinite().flatten(1).all(dim=1)).nonzero()[0])
            raise ValueError(f"{name}[{row}] has a NaN or infinite pixel; leave such images out")
