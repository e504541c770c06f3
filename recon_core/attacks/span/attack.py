"""The span attack from rows to candidates: span, features, separation, sign and label.

Images are independent and sparse where mixtures are less so, hence blind source separation takes
apart the span of a dense first layer's weights, of an optimiser's state, or of gradients (as
Kariyappa et al. 2023, arXiv 2209.05578, do). No margin, no homogeneity and no special loss is
needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.normalisation import channel_scales, undone
from recon_core.attacks.span.rows import SpanRows, weight_rows
from recon_core.attacks.span.search import best_start, separator_for, sources_for, views_of
from recon_core.attacks.span.separation import contrast
from recon_core.attacks.span.separator import Separator, mixed_shares
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.sources import Sources, denoised, sources_of
from recon_core.attacks.span.subspace import Subspace
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress
from recon_core.victims.network import Architecture, Parameters, Shape

__all__ = ["Separated", "SpanAttack", "check_victim", "separate"]


@dataclass(frozen=True)
class Separated:
    """The attack's findings in one victim: its span, its sources, and how the search ended.
    `objective` is that of the kept start, `settled` whether nothing fell any more."""

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
    start: Parameters | None = None,
    rows: Sequence[SpanRows] | None = None,
    separator: Separator | None = None,
    progress: Progress = no_progress,
) -> list[Separated]:
    """Findings in the weights of R victims (`parameters`), in order.

    `start` are the weights that training started from (of R networks, or of one), for
    `attack.start` "known". `rows`: what is taken apart of each victim, by default its weights less
    the start; of another `attack.source` the weights only tell signs and labels. `separator`: one
    that was learned for such images, by default a shipped one where its shape fits. On a GPU
    victims that follow each other with equally many directions are separated at once; on a CPU one
    after the other, so that a result does not depend on what it is batched with. Raises ValueError
    for a convolution in front, weights that are not finite, no start where one is needed, rows of
    another source, or fewer directions than asked for.
    """
    check_victim(architecture)
    each = [parameters.rows(slice(r, r + 1)) for r in range(len(generators))]
    if rows is None:
        if (attack.start == "known") != (start is not None):
            raise ValueError(
                f"attack.start={attack.start!r} and the start's weights are "
                f"{'not ' if start is None else ''}given; known needs them, unknown must not have "
                "them"
            )
        begun = [None if start is None else start.rows(slice(r, r + 1)) for r in range(len(each))]
        if start is not None and start.n_runs == 1:
            begun = [start] * len(each)
        rows = [weight_rows(own, its) for own, its in zip(each, begun, strict=True)]
    if others := {own.source for own in rows} - {attack.source}:
        raise ValueError(
            f"attack.source={attack.source!r} with rows of {', '.join(sorted(others))}; give rows "
            "of that source, or another attack.source"
        )
    problems = [
        _problem(attack, architecture, *victim, separator=separator)
        for victim in zip(each, rows, generators, strict=True)
    ]
    found: list[Separated] = []
    stacks = [[problem] for problem in problems]
    if parameters.weights[0].device.type != "cpu":
        groups = groupby(problems, key=lambda p: (len(p.span.vectors), p.attack.sources))
        stacks = [list(group) for _, group in groups]
    for stack in stacks:
        ends = [n / len(problems) for n in (len(found), len(found) + len(stack))]
        found += _separate_stack(architecture, stack, separator, share_of(progress, *ends))
    progress(1.0)
    return found


@dataclass(frozen=True)
class _Problem:
    attack: SpanAttack
    parameters: Parameters
    rows: Float[Tensor, "h e"]
    span: Subspace
    shape: Shape
    generator: torch.Generator

    def sources(self, unmixing: Float[Tensor, "m k"]) -> Float[Tensor, "m e"]:
        """Rows that an unmixing matrix makes of the span's directions; where noise is left in the
        weights, the start or what was added to them, their pixels are denoised."""
        rows, d = unmixing @ self.span.vectors, math.prod(self.shape)
        if self.span.ends_sharply and (self.span.start_shares or self.attack.source != "weights"):
            return rows
        pixels = denoised(rows[:, :d], self.rows[:, :d], noise=self.span.noise, shape=self.shape)
        return torch.cat([pixels, rows[:, d:]], 1)


def _problem(
    attack: SpanAttack,
    architecture: Architecture,
    parameters: Parameters,
    given: SpanRows,
    generator: torch.Generator,
    *,
    separator: Separator | None = None,
) -> _Problem:
    span = given.subspace(architecture.shape, n_directions=attack.n_images, surplus=attack.surplus)
    decided = sources_for(attack, span, architecture.shape, separator)
    rows = given.less(span.start_shares)
    return _Problem(decided, parameters, rows, span, architecture.shape, generator)


def _separate_stack(
    architecture: Architecture,
    stack: Sequence[_Problem],
    separator: Separator | None,
    progress: Progress,
) -> list[Separated]:
    attack, d, shape = stack[0].attack, architecture.d, architecture.shape
    pictures = [p.span.vectors[:, :d] for p in stack]
    if attack.sources == "network":
        separator = separator_for(attack, shape, pictures[0].device, separator)
        assert separator is not None
        pictures = [
            undone(separator, s.vectors, _scales(separator, s)) for s in (p.span for p in stack)
        ]
    views = views_of(attack, torch.stack(pictures).unflatten(2, shape), separator)
    total = attack.n_iterations * attack.n_starts
    generators = [p.generator for p in stack]
    best = best_start(attack, views, generators, lambda n: progress(n / total))
    if views.separator is not None:
        sparsity = -mixed_shares(views.separator, best.sources)
    else:
        unit = best.sources / best.sources.square().mean(2, keepdim=True).sqrt().clamp_min(1e-30)
        sparsity = -contrast(unit, attack.scales[-1])
    found = [problem.sources(best.rotation[r] @ views.whiten[r]) for r, problem in enumerate(stack)]
    return [
        Separated(
            problem.span,
            sources_of(
                found[r],
                sparsity[r],
                weight=problem.rows,
                architecture=architecture,
                parameters=problem.parameters,
                is_frame=attack.overcomplete > 1,
            ),
            float(best.objective[r]),
            best.n_iterations,
            best.settled,
        )
        for r, problem in enumerate(stack)
    ]


def _scales(separator: Separator, span: Subspace) -> Float[Tensor, " c"]:
    """What channels were divided by, as far as a span without noise tells."""
    if not span.ends_sharply or separator.card.shape[0] == 1:
        return span.vectors.new_ones(separator.card.shape[0])
    return channel_scales(separator, span.vectors).to(span.vectors)
