"""The mean that was subtracted from images before training, as far as the first layer tells it.

Inputs x_i - m lie in the span of the first layer's directions, so that P x_i = P m for all of them,
where P projects off the span: with images at hand P m is known, and m as far as P keeps it. If
nothing was subtracted their mean image lies in the span, at least as much of it as of the images
themselves; if a constant was, their mean less that constant; if their own mean was, neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

FEWEST = 4
"""Images without which nothing is said."""
INSIDE = 0.4
"""Share of the mean's energy outside the span, against the same of the images less their mean, up
to which the mean lies in it. On networks of 40 digits or photographs (small and standard starts,
gradient descent and Adam): up to .36 where it was not subtracted, .69 and more where it was."""
OUTSIDE = 1.1
ROUNDING = 1e-4
KNOWN = 0.1
"""Share of a constant's energy outside the span without which nothing tells it from others."""


@dataclass(frozen=True)
class Subtracted:
    """`kind`: "none", a "constant" per channel (`constant`), the images' "own" mean or one like it,
    or "unknown" where the first layer does not tell."""

    kind: Literal["none", "constant", "own", "unknown"]
    constant: Float[Tensor, " c"] | None = None


def subtracted(directions: Float[Tensor, "k d"], images: Float[Tensor, "n c h w"]) -> Subtracted:
    """The mean that was subtracted from a network's training images, or from others like them.

    Args:
        directions: Those of the first layer, over flat images (c, h, w).
        images: As the network had them but for the mean, so divided by a standard deviation if that
            was done.
    """
    n, channels = images.shape[:2]
    if n < FEWEST:
        return Subtracted("unknown")
    basis = torch.linalg.qr(directions.double().mT).Q
    x = images.double()
    mean = x.mean(0)

    def outside(rows: Tensor) -> Tensor:
        found: Tensor = rows - (rows @ basis) @ basis.mT
        return found

    centred = (x - mean).flatten(1)
    usual = float(outside(centred).square().sum() / centred.square().sum().clamp_min(1e-12))
    constants = torch.eye(channels, dtype=torch.float64)[:, :, None, None]
    constants = constants.expand(-1, -1, *x.shape[2:]).flatten(1)
    left, target = outside(constants), outside(mean.flatten())
    fitted = torch.linalg.lstsq(left.mT, target[:, None]).solution[:, 0]
    rest = target - left.mT @ fitted
    shares = {
        "none": _share(target, mean.flatten()),
        "constant": _share(rest, mean.flatten() - constants.mT @ fitted),
    }
    inside = max(INSIDE * usual, ROUNDING)
    told = float(left.square().sum() / constants.square().sum()) > KNOWN
    if shares["none"] <= inside:
        return Subtracted("none")
    if told and shares["constant"] <= inside and bool(((fitted > 0) & (fitted < 1)).all()):
        return Subtracted("constant", fitted.float())
    if min(shares.values()) >= max(OUTSIDE * usual, ROUNDING):
        return Subtracted("own")
    return Subtracted("unknown")


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.square().sum() / whole.square().sum().clamp_min(1e-12))
