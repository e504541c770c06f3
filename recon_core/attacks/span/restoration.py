"""Restoration that must agree with the weights: every training image lies in the span of the first
layer, so pictures of them can be projected on it, or exchanged for the sources they are most like.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from recon_core.attacks.span.rows import SpanRows
from recon_core.attacks.span.search import searched, separator_for, views_of
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace
from recon_core.matching import fit_to_range
from recon_core.types import Progress, no_progress


@dataclass(frozen=True)
class InSpan:
    """Pictures that one victim's first layer allows: `mean` (c, h, w), what was subtracted in
    training, and anything in the span of `directions` (k, d), orthonormal."""

    directions: Float[Tensor, "k d"]
    mean: Float[Tensor, "c h w"]

    def projected(self, pictures: Float[Tensor, "*n c h w"]) -> Float[Tensor, "*n c h w"]:
        """The nearest pictures in the span, clipped to [0, 1]."""
        return self.nearest(pictures).clamp(0, 1)

    def nearest(self, pictures: Float[Tensor, "*n c h w"]) -> Float[Tensor, "*n c h w"]:
        """The nearest pictures in the span, wherever their values lie."""
        inside: Tensor = self._coordinates(pictures) @ self.directions
        nearest: Tensor = inside.unflatten(-1, self.mean.shape) + self.mean
        return nearest

    def to(self, like: Tensor | torch.device | str) -> InSpan:
        """The same where `like` is, or of its type."""
        return InSpan(self.directions.to(like), self.mean.to(like))

    def share(self, pictures: Float[Tensor, "n c h w"]) -> float:
        """Share of the pictures' squares, less the mean, that lies in the span."""
        whole = float((pictures - self.mean).square().sum())
        return float(self._coordinates(pictures).square().sum()) / whole if whole > 0 else 0.0

    def separated_again(
        self,
        pictures: Float[Tensor, "n c h w"],
        *,
        attack: SpanAttack,
        generator: torch.Generator,
        progress: Progress = no_progress,
    ) -> Float[Tensor, "n c h w"]:
        """For every picture the source that it is most like, of those that a network finds in the
        span, in [0, 1].

        Raises ValueError for pictures of a shape that no separator knows.
        """
        shape = self.mean.shape[0], self.mean.shape[1], self.mean.shape[2]
        separator = separator_for(attack, shape, self.directions.device)
        fitted = None if separator is None else separator.fitted(self.directions)
        views = views_of(attack, self.directions.unflatten(1, shape)[None], fitted)
        ended = searched(attack, views, [generator], lambda n: progress(n / attack.n_iterations))
        progress(1.0)
        sources = normalize(ended.rotation[0] @ views.whiten[0] @ self.directions)
        alike = (pictures - self.mean).flatten(1) @ sources.mT
        best = alike.abs().argmax(1)
        sign = alike.gather(1, best[:, None]).sign()
        return fit_to_range((sources[best] * sign).unflatten(1, self.mean.shape), self.mean)

    def _coordinates(self, pictures: Tensor) -> Tensor:
        return (pictures - self.mean).flatten(-3) @ self.directions.mT


def in_span(
    rows: SpanRows,
    mean: Float[Tensor, "c h w"],
    *,
    std: Float[Tensor, " c 1 1"] | None = None,
    attack: SpanAttack | None = None,
) -> tuple[InSpan, Subspace]:
    """Pictures that the first layer of one network allows, and the span they are read from.

    `mean` and `std`: what was subtracted from images in training, and what they were then divided
    by. `attack` says how many directions, by default as a span attack at its defaults counts them.
    Raises NoSpanError where nothing stands out of the start's noise, ValueError for a start of
    another shape or more directions than there are.
    """
    attack, shape = attack or SpanAttack(), (mean.shape[0], mean.shape[1], mean.shape[2])
    span = rows.subspace(shape, n_directions=attack.n_images, surplus=attack.surplus)
    pixels = span.vectors[:, : mean.numel()].unflatten(1, shape) * (1.0 if std is None else std)
    directions = torch.linalg.qr(pixels.flatten(1).double().mT).Q.mT.to(pixels)
    return InSpan(directions.contiguous(), mean.to(pixels)), span
