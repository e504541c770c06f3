"""A stack of attacks on weights: a search for a KKT point, or a separation.

What is separated is saved as iteration 0. Its sign is read from the network, which is wrong for one
in five, so both are candidates: 0 to m - 1 have the likelier sign, best trusted first, m to 2m - 1
the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from recon_core.attacks.kkt.objective import SETTINGS, KKTAttack, settings_of, starting_points
from recon_core.attacks.kkt.solver import Judge, reconstruct
from recon_core.attacks.span.attack import Separated, SpanAttack, separate
from recon_core.attacks.span.rows import SpanRows
from recon_core.attacks.span.search import FEWEST, checked, separator_for
from recon_core.attacks.span.separation import n_features
from recon_core.attacks.span.separator import SHIPPED, Separator
from recon_core.attacks.span.subspace import NoSpanError
from recon_core.metrics import ncc_matrix
from recon_core.strict import Tagged
from recon_core.threads import share_of
from recon_core.types import Progress
from recon_core.victims.network import Architecture, Parameters, Shape

N_BEST = 10
"""Distances that the authors' stopping rule averages."""
IN_THE_METRIC = 4
"""Directions, sources, their interference and scores: numbers of pictures that a network's
separation holds for each source."""
ROWS_AT_ONCE = 1 << 14
"""Candidates of one stack of attacks on the same victim; bounds memory, 200 MB per buffer."""


Attack = Annotated[KKTAttack | SpanAttack, Tagged("kind")]
"""Any attack on a victim's weights."""


def features_of(span: SpanAttack, shape: Shape) -> int:
    """T: how many features every direction has at most, of pictures (c, h, w)."""
    counts = [0]
    if span.sources in ("auto", "independent"):
        counts.append(n_features(shape))
    if _by_network(span, shape) is not None:
        counts.append(IN_THE_METRIC * math.prod(shape))
    return max(counts)


def separation_operations(span: SpanAttack, n_directions: int, shape: Shape) -> int:
    """Operations of an iteration of a separation of pictures (c, h, w) at most: features are mixed
    and multiplied with their scores; a model sees mixed pictures through its filters and back, a
    network as pictures and in the metric."""
    k, counts = n_directions, [0]
    if span.sources in ("auto", "independent"):
        alone = replace(span, sources="independent")
        counts.append(6 * k * span.n_sources(k) * features_of(alone, shape))
    network = _by_network(span, shape)
    if network is not None and (span.sources == "network" or k >= FEWEST):
        counts.append(6 * k**2 * math.prod(shape) + k * network.operations)
    return max(counts)


def _by_network(span: SpanAttack, shape: Shape) -> Separator | None:
    """The shipped separator that may be followed."""
    if span.sources == "independent" or span.separator not in ("auto", *SHIPPED):
        return None
    return separator_for(span, shape)


def check_pictures(attack: Attack, n_images: int, shape: Shape) -> None:
    """Raises ValueError, before a victim is trained, for pictures too small for a separation."""
    if isinstance(attack, SpanAttack):
        checked(attack, attack.n_images or n_images, shape)


@dataclass(frozen=True)
class AttackOutput:
    """Candidates of one attack at the saved iterations, in the victim's input space. `finite`: it
    reached its end. `stopped`: a rule ended it, or the weights gave it nothing to start from.
    `score`: attacks on one victim are compared by it, lower is better. `stats` as in `STATS`."""

    x: Float[Tensor, "s m d"]
    finite: bool
    stopped: bool
    score: float
    stats: dict[str, float]


@dataclass(frozen=True)
class Victim:
    """Inputs of a stack of Q attacks: the weights of Q victims, or of one; the images, for the
    authors' stopping rule; and what a span attack takes apart, by default the weights."""

    architecture: Architecture
    parameters: Parameters
    inputs: Float[Tensor, "r n d"]
    taken: tuple[SpanRows, ...] = ()

    def rows(self, index: Tensor) -> Victim:
        if len(self.inputs) == 1:
            return self
        taken = tuple(self.taken[i] for i in index.tolist() if self.taken)
        parameters = self.parameters.rows(index)
        return Victim(self.architecture, parameters, self.inputs[index], taken)


def attack_stack(
    attack: Attack,
    victim: Victim,
    generators: Sequence[torch.Generator],
    progress: Progress,
    *,
    separator: Separator | None = None,
) -> list[AttackOutput]:
    """Results of Q attacks, in order, each with a generator of its own; `separator` as in
    `separate`.

    An attack on weights that are not finite, or in which nothing stands out of the noise, leaves
    nothing. Raises ValueError for settings that do not go with the images.
    """
    if isinstance(attack, SpanAttack):
        return [
            AttackOutput(
                victim.inputs[:1, :0], finite=False, stopped=True, score=math.nan, stats={}
            )
            if found is None
            else AttackOutput(
                x=torch.cat([found.sources.x, -found.sources.x])[None],
                finite=bool(found.sources.x.float().isfinite().all()),
                stopped=False,
                score=found.objective,
                stats={
                    "attack_loss": found.objective,
                    "n_iterations": float(found.n_iterations),
                },
            )
            for found in _separated(attack, victim, generators, progress, separator)
        ]
    settings = settings_of(attack, generators)
    x, lam = starting_points(attack, settings, victim.architecture.d, generators)
    attacked = reconstruct(
        victim.architecture,
        victim.parameters,
        x.to(victim.inputs),
        lam.to(victim.inputs),
        attack=attack,
        settings=settings,
        judge=_judge(attack, victim),
        progress=progress,
    )
    columns = {
        "attack_loss": attacked.loss,
        "kkt_residual": attacked.residual,
        "residual_relu": attacked.residual_relu,
        "n_iterations": attacked.n_iterations,
        **{name: getattr(settings, name) for name in SETTINGS},
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    every = [dict(zip(columns, map(float, row), strict=True)) for row in rows]
    return [
        AttackOutput(
            x=attacked.x[q],
            finite=finite,
            stopped=stats["n_iterations"] < attack.n_iterations
            and math.isfinite(stats["attack_loss"]),
            score=stats["kkt_residual"],
            stats=stats,
        )
        for q, (finite, stats) in enumerate(zip(attacked.usable().tolist(), every, strict=True))
    ]


def _judge(attack: KKTAttack, victim: Victim) -> Judge | None:
    """The authors' rule: hopeless if the best matched images are far (`ncc_stop_above`)."""
    limit, inputs, shape = attack.ncc_stop_above, victim.inputs, victim.architecture.shape
    if limit is None:
        return None

    def judge(_iteration: int, x: Tensor, attacks: Int64[Tensor, " k"]) -> Bool[Tensor, " k"]:
        hopeless = []
        for candidates, row in zip(x, attacks.tolist(), strict=True):
            truth = inputs[row if len(inputs) > 1 else 0].unflatten(1, shape)
            distance = ncc_matrix(candidates.unflatten(1, shape), truth)
            nearest = distance.amin(0).sort().values[:N_BEST].mean() * victim.architecture.d
            hopeless.append(bool(nearest > limit))
        return torch.tensor(hopeless, device=x.device)

    return judge


def _separated(
    attack: SpanAttack,
    victim: Victim,
    generators: Sequence[torch.Generator],
    progress: Progress,
    separator: Separator | None,
) -> list[Separated | None]:
    """What is in the weights that each attack is on; None where that is nothing. One after another
    on a CPU, where what a run is batched with must not change a bit, and where one has nothing."""
    n = len(generators)
    rows = torch.arange(n) if victim.parameters.n_runs > 1 else torch.zeros(n, dtype=torch.int64)

    def separated(some: slice, part: Progress) -> list[Separated]:
        return separate(
            attack,
            victim.architecture,
            victim.parameters.rows(rows[some]),
            generators[some],
            rows=[victim.taken[r] for r in rows[some].tolist()] if victim.taken else None,
            separator=separator,
            progress=part,
        )

    if victim.inputs.device.type != "cpu":
        with suppress(NoSpanError):  # of one of them: then each is separated alone
            return list(separated(slice(None), progress))
    found: list[Separated | None] = []
    for q in range(n):
        try:
            found += separated(slice(q, q + 1), share_of(progress, q / n, (q + 1) / n))
        except NoSpanError:
            found.append(None)
    progress(1.0)
    return found
