"""Restoration that must agree with the weights: every training image lies in the span of the first
layer, so pictures of them, however they were made, can be put back there, and taken apart anew.

What is wrong in a separated picture is other training images, which one picture alone does not
tell. So all pictures of a victim are seen together: they are where a separation begins that follows
what was learned of images, and each answer is a row of the unmixing matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.rows import weight_rows
from recon_core.attacks.span.search import continued
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace
from recon_core.matching import fit_to_range
from recon_core.types import Progress, no_progress
from recon_core.victims.network import Architecture, Parameters

NEW = 0.1
"""Share of a picture's square that must lie outside the span of those taken before it, for it to
begin a source of its own: x and -x begin one."""


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
        """For every picture the source that it is most like once a separation that was begun at the
        pictures (see `start_at`) has gone on (`search.continued`), in [0, 1].

        Raises ValueError for pictures of a shape that no separator knows.
        """
        unmixing = start_at(self._coordinates(pictures), generator)
        shown = self.directions.unflatten(1, self.mean.shape)[None]
        rows = continued(attack, unmixing[None], shown, lambda n: progress(n / attack.n_iterations))
        progress(1.0)
        sources = rows[0] @ self.directions
        given = (pictures - self.mean).flatten(1)
        unit = sources / sources.norm(dim=1, keepdim=True).clamp_min(1e-30)
        alike = given @ unit.mT
        best = alike.abs().argmax(1)
        sign = alike.gather(1, best[:, None]).sign()
        return fit_to_range((sources[best] * sign).unflatten(1, self.mean.shape), self.mean)

    def _coordinates(self, pictures: Tensor) -> Tensor:
        return (pictures - self.mean).flatten(-3) @ self.directions.mT


def in_span(
    architecture: Architecture,
    parameters: Parameters,
    *,
    start: Parameters | None,
    mean: Float[Tensor, "c h w"],
    std: Float[Tensor, " c 1 1"] | None = None,
    attack: SpanAttack | None = None,
) -> tuple[InSpan, Subspace]:
    """Pictures that the first layer of one network (R = 1) allows, and the span they are read from.

    `start`: the weights that training started from, if known; `mean` and `std`: what was subtracted
    from images in training, and what they were then divided by. `attack` says how many directions,
    by default as a span attack at its defaults counts them. Raises NoSpanError where nothing stands
    out of the start's noise, ValueError for a start of another shape or more directions than there
    are.
    """
    attack, shape = attack or SpanAttack(), architecture.shape
    span = weight_rows(parameters, start).subspace(
        shape, n_directions=attack.n_images, surplus=attack.surplus
    )
    pixels = span.vectors[:, : architecture.d].unflatten(1, shape)
    if std is not None:
        pixels = pixels * std
    wide = pixels.flatten(1).double().mT
    directions = torch.linalg.qr(wide).Q.mT.to(pixels)
    return InSpan(directions.contiguous(), mean.to(pixels)), span


def start_at(coordinates: Float[Tensor, "n k"], generator: torch.Generator) -> Float[Tensor, "k k"]:
    """An unmixing matrix whose first rows are pictures, given in the span's coordinates, in their
    order, each that is new beside those before it (`NEW`); random directions outside them follow.
    """
    unit = coordinates / coordinates.norm(dim=1, keepdim=True).clamp_min(1e-30)
    k = coordinates.shape[1]
    rows, basis = (coordinates.new_zeros(0, k) for _ in range(2))
    for row in unit:
        rest = row - (basis @ row) @ basis
        rest = rest - (basis @ rest) @ basis  # twice is enough
        size = float(rest.square().sum())
        if size >= NEW and len(rows) < k:
            basis = torch.cat([basis, (rest / size**0.5)[None]])
            rows = torch.cat([rows, row[None]])
    drawn = torch.randn(k - len(rows), k, generator=generator, dtype=torch.float64).to(unit)
    outside = drawn - (drawn @ basis.mT) @ basis
    return torch.cat([rows, torch.linalg.qr(outside.mT).Q.mT])
