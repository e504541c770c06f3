"""Pictures that agree with a network's weights: training images, less their mean, lie in the span
of its first layer, so that restored pictures can be projected on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.rows import SpanRows
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace


@dataclass(frozen=True)
class InSpan:
    """Pictures that one network's first layer allows: `mean` (c, h, w), what was subtracted in
    training, plus anything in the span of `directions` (k, d), orthonormal."""

    directions: Float[Tensor, "k d"]
    mean: Float[Tensor, "c h w"]

    def nearest(self, pictures: Float[Tensor, "*n c h w"]) -> Float[Tensor, "*n c h w"]:
        """The nearest pictures in the span, not clipped."""
        directions, mean = self.directions.to(pictures), self.mean.to(pictures)
        inside = (pictures - mean).flatten(-3) @ directions.mT @ directions
        return inside.view_as(pictures) + mean

    def share(self, pictures: Float[Tensor, "n c h w"]) -> float:
        """Share of the pictures' energy, less the mean, that lies in the span."""
        inside, whole = (x - self.mean for x in (self.nearest(pictures), pictures))
        return float(inside.square().sum() / whole.square().sum().clamp_min(1e-30))


def in_span(
    rows: SpanRows,
    mean: Float[Tensor, "c h w"],
    *,
    std: Float[Tensor, " c 1 1"] | None = None,
    attack: SpanAttack | None = None,
) -> tuple[InSpan, Subspace]:
    """The pictures that a network's first layer allows, and the span that says so.

    `mean` and `std`: what was subtracted from images in training, and what they were then divided
    by. `attack` says how many directions, by default as a span attack at its defaults counts them.
    Raises NoSpanError where nothing stands out of the start's noise, ValueError for a start of
    another shape or more directions than there are.
    """
    attack, shape = attack or SpanAttack(), (mean.shape[0], mean.shape[1], mean.shape[2])
    span = rows.subspace(attack.n_images, attack.surplus)
    pixels = span.vectors[:, : mean.numel()].unflatten(1, shape) * (1.0 if std is None else std)
    directions = torch.linalg.qr(pixels.flatten(1).double().mT).Q.mT.to(pixels)
    return InSpan(directions.contiguous(), mean.to(pixels)), span
