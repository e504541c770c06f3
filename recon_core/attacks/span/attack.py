"""The span attack from weights to candidates: span, features, separation, sign and label.

The training images' span stands in the weights of every dense first layer (`subspace`). Images are
independent and sparse where mixtures are less so, hence blind source separation takes the span
apart. That a layer's gradient can be separated so is known from federated learning (Kariyappa et
al. 2023, arXiv 2209.05578); here it is the weights after training. No margin, no homogeneity and no
special loss is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.features import dct_filters, whitened_features
from recon_core.attacks.span.lbfgs import Descent
from recon_core.attacks.span.likelihood import unmix
from recon_core.attacks.span.orthogonal import (
    Stage,
    contrast,
    grouped_fixed_point,
    rotate,
    rotation_start,
)
from recon_core.attacks.span.sources import Sources, sources_of
from recon_core.attacks.span.subspace import Subspace, rows_of, subspace_of
from recon_core.types import Progress, no_progress
from recon_core.victims.network import Architecture, Parameters


@dataclass(frozen=True, kw_only=True)
class SpanAttack:
    """Settings of the attack.

    `start`: whether the first layer's start is known and taken off. `n_images`: the number of
    directions; None counts those that stand out of the noise and takes the share `surplus` more.
    `filter_size`, `colours`, `stride`: the cosine filters whose outputs are separated. `scales` and
    `n_rotations`: c of the score and the most iterations at each. `n_grouped`: steps of the grouped
    fixed point at `grouped_scale`. `n_likelihood`: iterations without orthogonality, of sources
    with shape `shape` and scale `likelihood_scale`; 0 leaves them out. A stage ends early once the
    objective falls by less than `tolerance` of itself in 20 iterations. `n_starts`: random starts,
    of which the one with the lowest objective is kept.
    """

    kind: Literal["span"] = "span"
    start: Literal["unknown", "known"] = "unknown"
    n_images: int | None = None
    surplus: float = 0.1
    filter_size: int = 4
    colours: bool = True
    stride: int = 2
    scales: tuple[float, ...] = (2.0, 1.0, 0.7, 0.5)
    n_rotations: tuple[int, ...] = (40, 200, 150, 150)
    n_grouped: int = 100
    grouped_scale: float = 0.4
    n_likelihood: int = 60
    shape: float = 2.0
    likelihood_scale: float = 1.5
    tolerance: float = 1e-6
    n_starts: int = 1
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name in ("filter_size", "stride", "n_starts"):
            least = 2 if name == "filter_size" else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.n_images is not None and self.n_images < 2:
            raise ValueError(
                f"n_images={self.n_images}; a span of one image is that image: 2 or more"
            )
        for name in ("n_grouped", "n_likelihood"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        if not 0 <= self.surplus <= 1:
            raise ValueError(f"surplus={self.surplus} is a share, from 0 to 1")
        if len(self.scales) != len(self.n_rotations) or not self.scales:
            raise ValueError(
                f"scales={self.scales} and n_rotations={self.n_rotations} must go together, one "
                "number of iterations for each scale, and at least one"
            )
        positive = (*self.scales, self.grouped_scale, self.shape, self.likelihood_scale)
        if min(positive) <= 0 or min(self.n_rotations) < 1 or not 0 <= self.tolerance < 1:
            raise ValueError(
                f"scales={self.scales}, grouped_scale={self.grouped_scale}, shape={self.shape}, "
                f"likelihood_scale={self.likelihood_scale} must be above 0, n_rotations="
                f"{self.n_rotations} at least 1, tolerance={self.tolerance} in [0, 1)"
            )

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(Stage(c, n) for c, n in zip(self.scales, self.n_rotations, strict=True))

    @property
    def n_iterations(self) -> int:
        """The most iterations of one start."""
        return sum(self.n_rotations) + self.n_grouped + self.n_likelihood


@dataclass(frozen=True)
class Separated:
    """What the attack found in one victim: its span, its sources, and how the search ended.

    `objective` is that of the kept start, `n_iterations` its iterations, `settled` whether it
    ended because nothing fell any more.
    """

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
    progress: Progress = no_progress,
) -> list[Separated]:
    """What is in the weights of R victims (`parameters`), in order.

    `start` are the weights that training started from (of R networks, or of one), for
    `attack.start` "known". On a GPU victims that follow each other with equally many directions are
    separated at once; on a CPU one after the other, so that a result does not depend, bit for bit,
    on what it is batched with.

    Raises:
        ValueError: a convolution in front, weights that are not finite, no start where one is
            needed, or fewer directions than asked for; the message says what to change.
    """
    check_victim(architecture)
    if (attack.start == "known") != (start is not None):
        raise ValueError(
            f"attack.start={attack.start!r} and the start's weights are "
            f"{'not ' if start is None else ''}given; known needs them, unknown must not have them"
        )
    problems = [
        _problem(
            attack,
            architecture,
            parameters.rows(slice(r, r + 1)),
            start if start is None or start.n_runs == 1 else start.rows(slice(r, r + 1)),
            generator=generator,
        )
        for r, generator in enumerate(generators)
    ]
    found: list[Separated] = []
    for stack in _stacks(problems, parameters.weights[0].device):
        share = _Share(progress, len(found) / len(problems), len(stack) / len(problems), attack)
        found += _separate_stack(attack, architecture, stack, share)
    progress(1.0)
    return found


def _stacks(problems: Sequence[_Problem], device: torch.device) -> list[list[_Problem]]:
    if device.type == "cpu":
        return [[problem] for problem in problems]
    groups = groupby(problems, key=lambda problem: len(problem.span.vectors))
    return [list(group) for _, group in groups]


@dataclass(frozen=True)
class _Problem:
    """One victim: its weights, its first layer's rows less their start, and their span."""

    parameters: Parameters
    rows: Float[Tensor, "h e"]
    span: Subspace
    generator: torch.Generator


def _problem(
    attack: SpanAttack,
    architecture: Architecture,
    parameters: Parameters,
    start: Parameters | None,
    *,
    generator: torch.Generator,
) -> _Problem:
    rows = _rows(parameters)
    begun = None if start is None else _rows(start)
    span = subspace_of(
        rows,
        begun,
        shape=architecture.shape,
        n_directions=attack.n_images,
        surplus=attack.surplus,
    )
    if begun is not None and span.start_share is not None:
        rows = rows - begun * span.start_share
    return _Problem(parameters, rows, span, generator)


class _Share:
    """Progress of one stack of victims, from iterations of one stage after the other."""

    def __init__(self, progress: Progress, first: float, share: float, attack: SpanAttack) -> None:
        self.progress, self.first, self.share = progress, first, share
        self.total = attack.n_iterations * attack.n_starts
        self.before = 0

    def __call__(self, n: int) -> None:
        self.progress(self.first + self.share * min(1.0, (self.before + n) / self.total))

    def skip(self, n: int) -> None:
        self.before += n


def _separate_stack(
    attack: SpanAttack, architecture: Architecture, stack: Sequence[_Problem], share: _Share
) -> list[Separated]:
    """Victims with equally many directions, at once."""
    filters = dct_filters(attack.filter_size, architecture.shape[0], colours=attack.colours)
    pictures = [p.span.vectors[:, : architecture.d].unflatten(1, architecture.shape) for p in stack]
    features = [whitened_features(v, filters, stride=attack.stride) for v in pictures]
    z = torch.stack([feature.z for feature in features])
    best = _best_start(attack, z, len(filters), [p.generator for p in stack], share)
    unit = best.sources / best.sources.square().mean(2, keepdim=True).sqrt().clamp_min(1e-30)
    sparsity = -contrast(unit, attack.scales[-1])
    return [
        Separated(
            problem.span,
            sources_of(
                best.rotation[r] @ features[r].whiten @ problem.span.vectors,
                sparsity[r],
                weight=problem.rows,
                architecture=architecture,
                parameters=problem.parameters,
            ),
            float(best.objective[r]),
            best.n_iterations,
            best.settled,
        )
        for r, problem in enumerate(stack)
    ]


def _best_start(
    attack: SpanAttack,
    z: Float[Tensor, "r k t"],
    n_filters: int,
    generators: Sequence[torch.Generator],
    share: _Share,
) -> Descent:
    """Every victim's separation from the start that ends lowest."""
    best: Descent | None = None
    for _ in range(attack.n_starts):
        starts = torch.stack([rotation_start(z.shape[1], g) for g in generators]).to(z)
        ended = _separation(attack, z, starts, n_filters, share)
        best = ended if best is None else _lower(best, ended)
    assert best is not None
    return best


def _separation(
    attack: SpanAttack, z: Tensor, starts: Tensor, n_filters: int, share: _Share
) -> Descent:
    rotated = rotate(z, starts, attack.stages, tolerance=attack.tolerance, report=share)
    share.skip(sum(attack.n_rotations))
    turned = grouped_fixed_point(
        z,
        rotated.rotation,
        n_filters=n_filters,
        scale=attack.grouped_scale,
        n_iterations=attack.n_grouped,
        report=share,
    )
    share.skip(attack.n_grouped)
    freed = unmix(
        z,
        turned.rotation,
        shape=attack.shape,
        scale=attack.likelihood_scale,
        n_iterations=attack.n_likelihood,
        tolerance=attack.tolerance,
        report=share,
    )
    share.skip(attack.n_likelihood)
    n = rotated.n_iterations + turned.n_iterations + freed.n_iterations
    settled = rotated.settled and freed.settled
    return Descent(freed.rotation, freed.sources, freed.objective, n, settled)


def _lower(a: Descent, b: Descent) -> Descent:
    """Victim by victim the one with the lower objective."""
    first = (a.objective <= b.objective)[:, None, None]
    return Descent(
        torch.where(first, a.rotation, b.rotation),
        torch.where(first, a.sources, b.sources),
        torch.minimum(a.objective, b.objective),
        max(a.n_iterations, b.n_iterations),
        a.settled and b.settled,
    )


def _rows(parameters: Parameters) -> Float[Tensor, "h e"]:
    bias = parameters.biases[0]
    return rows_of(parameters.weights[0][0], None if bias is None else bias[0])
