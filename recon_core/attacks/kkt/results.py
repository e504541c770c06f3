"""Results of a run of the family `kkt`: its outcome, its statistics, its pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from recon_core.attacks.candidate_matching import pairs_of
from recon_core.attacks.family_run import Learned, run_result
from recon_core.attacks.kkt.objective import SETTINGS, KKTAttack, Settings
from recon_core.attacks.kkt.settings import KKTSettings
from recon_core.attacks.kkt.solver import Attacked
from recon_core.attacks.kkt.victims import KnownVictim
from recon_core.types import Outcome, Pairs, RunResult, RunSpec


@dataclass(frozen=True)
class Left:
    """Candidates of one attack at the saved iterations, in the victim's input space. `finite`: it
    went through to its end. `stopped`: a rule, or the weights themselves, gave it up. `score`: what
    attacks on one victim are compared by, lower is better. `stats` as in `STATS`."""

    x: Float[Tensor, "s m d"]
    finite: bool
    stopped: bool
    score: float
    stats: dict[str, float]

    @classmethod
    def nothing(cls, x: Float[Tensor, "s 0 d"]) -> Left:
        """Result of an attack that had nothing to begin with."""
        return cls(x=x, finite=False, stopped=True, score=math.nan, stats={})


def left_by(attack: KKTAttack, attacked: Attacked, settings: Settings) -> list[Left]:
    columns = {
        "attack_loss": attacked.loss,
        "kkt_residual": attacked.residual,
        "residual_relu": attacked.residual_relu,
        "n_iterations": attacked.n_iterations,
        **{name: getattr(settings, name) for name in SETTINGS},
    }
    values = {name: column.tolist() for name, column in columns.items()}
    usable = attacked.usable().tolist()
    return [
        Left(
            x=attacked.x[q],
            finite=usable[q],
            stopped=stats["n_iterations"] < attack.n_iterations
            and math.isfinite(stats["attack_loss"]),
            score=stats["kkt_residual"],
            stats=stats,
        )
        for q in range(len(usable))
        for stats in [{name: float(column[q]) for name, column in values.items()}]
    ]


def result_of(
    experiment: KKTSettings,
    spec: RunSpec,
    *,
    learned: Learned,
    victim: KnownVictim,
    left: Sequence[Left],
) -> RunResult:
    """The result of a run's attacks on its victim."""
    trained = victim.trained
    stats = {
        "train_loss": float(trained.loss),
        "train_accuracy": float(trained.accuracy),
        "margin_min": float(trained.margin_min),
        **_best(left).stats,
    }
    outcome = Outcome.OK if stats["train_accuracy"] == 1 else Outcome.UNFITTED
    is_finite = bool(trained.parameters.isfinite())
    if not (is_finite and any(one.finite for one in left)):
        stopped = is_finite and any(one.stopped for one in left)
        outcome = Outcome.STOPPED if stopped else Outcome.NONFINITE
    has_pairs = outcome in (Outcome.OK, Outcome.UNFITTED)
    return run_result(
        spec,
        outcome,
        learned.targets,
        learned.augment,
        stats=stats,
        pairs=_pairs(experiment, left, learned.targets, victim.mean) if has_pairs else None,
        mean_image=victim.mean.cpu(),
        margins=trained.margins[0].float().cpu(),
    )


def _pairs(
    experiment: KKTSettings,
    left: Sequence[Left],
    targets: UInt8[Tensor, "n c h w"],
    mean: Float[Tensor, "c h w"],
) -> Pairs:
    """Pairs of the attacks that went through; a candidate's number counts from attack 0."""
    numbers = torch.arange(sum(one.x.shape[1] for one in left))
    numbers = numbers.split([one.x.shape[1] for one in left])
    usable = [q for q, one in enumerate(left) if one.finite]
    saved = torch.cat([left[q].x for q in usable], 1).float().unflatten(-1, targets.shape[1:])
    pairs = pairs_of(
        saved,
        targets,
        mean,
        iterations=experiment.saved_iterations,
        keep=experiment.keep,
        threshold=experiment.confident_ssim,
        gap=experiment.confident_gap,
        clipped=experiment.clipped,
    )
    number = torch.cat([numbers[q] for q in usable])
    return replace(pairs, candidate=number[pairs.candidate])


def _best(left: Sequence[Left]) -> Left:
    """The attack with the lowest score; the first if none has one."""
    return min(left, key=lambda one: math.inf if math.isnan(one.score) else one.score)
