"""The span attack from rows to candidates: span, features, separation, sign and label.

Images are independent, and sparser than their mixtures, so blind source separation recovers them
from the span of a dense first layer's weights, of an optimiser's state, or of gradients (Kariyappa
et al. 2023, arXiv 2209.05578), whatever the loss. Training images, less their mean, lie in that
span, so restored pictures can be projected on it (`in_span`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.inputs import channel_scales, undone
from recon_core.attacks.span.rows import SpanRows, weight_rows
from recon_core.attacks.span.search import SpanAttack, checked, searched, sources_for
from recon_core.attacks.span.separator import Separator
from recon_core.attacks.span.sources import Sources, biases_tell, sources_of, together
from recon_core.attacks.span.subspace import Subspace
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress
from recon_core.victims.network import Architecture, Parameters

__all__ = ["Separated", "SpanAttack", "check_victim", "separate"]

HIDDEN = 0.7
"""Noise level of a separator's metric where noise hides directions."""


@dataclass(frozen=True)
class Separated:
    """Result of the attack on one victim: its span, its sources, minus the sum of their sparsity,
    and how the search ended. `settled`: it converged before its iterations were used up."""

    subspace: Subspace
    sources: Sources
    objective: float
    n_iterations: int
    settled: bool


def check_victim(architecture: Architecture) -> None:
    """Raises ValueError if the network has no dense first layer, whose weights span images."""
    conv = architecture.network.conv
    if conv is not None:
        raise ValueError(
            f"the first layer is a convolution ({conv.channels} kernels of {conv.kernel}x"
            f"{conv.kernel}): its weights span patches, not images; use attack.kind=kkt"
        )


def separate(
    attack: SpanAttack,
    architecture: Architecture,
    parameters: Parameters,
    generators: Sequence[torch.Generator],
    *,
    rows: Sequence[SpanRows] | None = None,
    separator: Separator | None = None,
    progress: Progress = no_progress,
) -> list[Separated]:
    """Separate the sources of R victims (`parameters`), in order.

    `rows`: the rows to separate, by default each victim's weights; with another `attack.source` the
    weights only give signs and labels. `separator`: one learned for such images, by default a
    shipped one whose shape fits. On a GPU consecutive victims with equally many directions are
    separated at once; on a CPU one after the other, so that a result does not depend on its batch.
    Raises ValueError for a convolution in front, weights that are not finite, rows that do not
    match `attack.source` and `attack.start`, or fewer directions than asked for.
    """
    check_victim(architecture)
    each = [parameters.rows(slice(r, r + 1)) for r in range(len(generators))]
    rows = [weight_rows(own) for own in each] if rows is None else rows
    is_known, problems, here = attack.start == "known", list[_Problem](), None
    for own, given, generator in zip(each, rows, generators, strict=True):
        has_start = given.start is not None and given.source == "weights"
        if (given.source, has_start) != (attack.source, is_known):
            raise ValueError(
                f"attack.source={attack.source!r}, attack.start={attack.start!r} with rows of "
                f"{given.source} {'less a start' if has_start else 'without a start'}; give rows "
                "of that source, and a start where it is known"
            )
        span = given.subspace(attack.n_images, attack.surplus)
        decided = sources_for(attack, span, architecture.shape, separator)
        by = checked(decided, len(span.vectors), architecture.shape, separator)
        pictures = span.vectors[:, : architecture.d]
        if by is not None:
            here = by = here or by.to(pictures.device)  # once for all victims
            # a span without noise shows what channels were divided by
            scales = channel_scales(by, span.vectors) if span.ends_sharply else pictures.new_ones(1)
            pictures = undone(by, span.vectors, scales.to(pictures))
            by = by.at(HIDDEN) if decided.overcomplete > 1 else by.fitted(pictures)
        problems.append(_Problem(decided, own, span, generator, pictures, by))
    stacks = [[problem] for problem in problems]
    if parameters.weights[0].device.type != "cpu":
        stacks = [list(group) for _, group in groupby(problems, key=_Problem.alike)]
    found: list[Separated] = []
    for stack in stacks:
        ends = [n / len(problems) for n in (len(found), len(found) + len(stack))]
        found += _separate_stack(architecture, stack, share_of(progress, *ends))
    progress(1.0)
    return found


class _Problem(NamedTuple):
    attack: SpanAttack
    parameters: Parameters
    span: Subspace
    generator: torch.Generator
    pictures: Float[Tensor, "k d"]
    separator: Separator | None

    @property
    def ones(self) -> Float[Tensor, " k"] | None:
        """The last coordinates of directions, if noise hides none and biases show sizes."""
        rows, is_noisy = self.span.vectors, self.attack.overcomplete > 1
        last = rows[:, self.pictures.shape[1] :].mT
        return None if is_noisy or not len(last) or not biases_tell(rows) else last[0]

    def alike(self) -> tuple[int, SpanAttack, float, bool]:
        """What victims must have in common to be searched at once."""
        noise = 0.0 if self.separator is None else self.separator.noise
        return len(self.pictures), self.attack, noise, self.ones is None


def _separate_stack(
    architecture: Architecture, stack: Sequence[_Problem], progress: Progress
) -> list[Separated]:
    attack, shape, by = stack[0].attack, architecture.shape, stack[0].separator
    pictures = torch.stack([problem.pictures for problem in stack]).unflatten(2, shape)
    last = [ones for problem in stack if (ones := problem.ones) is not None]
    ones = torch.stack(last).to(pictures) if last else None
    n_searches = 1 if by is None else round(attack.overcomplete)
    found: list[list[Sources]] = [[] for _ in stack]
    objective, n_iterations, settled = torch.zeros(len(stack)), 0, True
    for i in range(n_searches):
        part = share_of(progress, i / n_searches, (i + 1) / n_searches)

        def report(n: int, part: Progress = part) -> None:
            part(n / max(attack.n_iterations, 1.25 * n))  # at most four fifths until it ends

        ended = searched(attack, pictures, by, [p.generator for p in stack], report, ones=ones)
        for own, problem, w, sparsity in zip(found, stack, ended.w, ended.sparsity, strict=True):
            own.append(sources_of(
                w, sparsity, span=problem.span, is_of_weights=attack.source == "weights",
                architecture=architecture, parameters=problem.parameters,
            ))  # fmt: skip
        objective -= ended.sparsity.sum(1).cpu()
        n_iterations, settled = n_iterations + ended.n_iterations, settled and ended.settled
    return [
        Separated(problem.span, together(own), total, n_iterations, settled)
        for problem, own, total in zip(stack, found, objective.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class InSpan:
    """Pictures that one network's first layer allows: `mean` (c, h, w), which was subtracted in
    training, plus any vector in the span of the orthonormal `directions` (k, d)."""

    directions: Float[Tensor, "k d"]
    mean: Float[Tensor, "c h w"]

    def nearest(self, pictures: Float[Tensor, "*n c h w"]) -> Float[Tensor, "*n c h w"]:
        """The nearest pictures in the span, not clipped."""
        directions, mean = self.directions.to(pictures), self.mean.to(pictures)
        inside = (pictures - mean).flatten(-3) @ directions.mT @ directions
        return inside.view_as(pictures) + mean

    def share(self, pictures: Float[Tensor, "n c h w"]) -> float:
        """Share of the energy of pictures less the mean that lies in the span."""
        inside, whole = (x - self.mean for x in (self.nearest(pictures), pictures))
        return float(inside.square().sum() / whole.square().sum().clamp_min(1e-30))


def in_span(
    rows: SpanRows,
    mean: Float[Tensor, "c h w"],
    *,
    std: Float[Tensor, " c 1 1"] | None = None,
    attack: SpanAttack | None = None,
) -> tuple[InSpan, Subspace]:
    """The pictures that a network's first layer allows, and their span.

    `mean` and `std`: what was subtracted from images in training, and what they were divided by.
    `attack` sets the number of directions, by default as the span attack counts them. Raises
    NoSpanError where nothing stands out of the start's noise, ValueError for a start of another
    shape or more directions than there are.
    """
    attack, shape = attack or SpanAttack(), (mean.shape[0], mean.shape[1], mean.shape[2])
    span = rows.subspace(attack.n_images, attack.surplus)
    pixels = span.vectors[:, : mean.numel()].unflatten(1, shape) * (1.0 if std is None else std)
    directions = torch.linalg.qr(pixels.flatten(1).double().mT).Q.mT.to(pixels)
    return InSpan(directions.contiguous(), mean.to(pixels)), span
