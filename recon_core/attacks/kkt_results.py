"""What a run of the family `kkt` leaves: its outcome, its statistics, its pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from recon_core.attacks.kkt_objective import SETTINGS, Settings
from recon_core.attacks.kkt_solver import Attacked
from recon_core.attacks.pairing import no_pairs, pairs_of
from recon_core.types import Outcome, Pairs, RunResult, RunSpec
from recon_core.victims.network import Shape
from recon_core.victims.training import Trained

if TYPE_CHECKING:
    from recon_core.attacks.kkt import KKT


@dataclass(frozen=True)
class Learned:
    """What R victims are trained on: images as pictures and as inputs, and what lies between."""

    targets: UInt8[Tensor, "r n c h w"]
    augment: Float[Tensor, "r n 9"]
    mean: Float[Tensor, "r c h w"]
    inputs: Float[Tensor, "r n d"]

    @property
    def shape(self) -> Shape:
        c, h, w = self.targets.shape[2:]
        return c, h, w


def result_of(
    experiment: KKT,
    spec: RunSpec,
    *,
    data: Learned,
    trained: Trained,
    victim: int,
    attacked: Attacked,
    settings: Settings,
    rows: slice,
) -> RunResult:
    """The result of the attacks in `rows` on one of the victims that were trained together."""
    usable = attacked.usable(rows)
    stats = {
        "train_loss": float(trained.loss[victim]),
        "train_accuracy": float(trained.accuracy[victim]),
        "margin_min": float(trained.margin_min[victim]),
        **_best(attacked, settings, rows),
    }
    outcome = Outcome.OK if stats["train_accuracy"] == 1 else Outcome.UNFITTED
    if not (bool(trained.parameters.isfinite()[victim]) and bool(usable.any())):
        given_up = attacked.n_iterations[rows] < experiment.attack.n_iterations
        stopped = bool((given_up & attacked.loss[rows].isfinite()).any())
        outcome = Outcome.STOPPED if stopped else Outcome.NONFINITE
    targets, mean = data.targets[victim], data.mean[victim]
    if outcome in (Outcome.OK, Outcome.UNFITTED):
        pairs = _pairs(experiment, attacked.x[rows], usable, targets, mean)
    else:
        pairs = no_pairs(data.shape)
    return RunResult(
        spec=spec,
        outcome=outcome,
        targets=targets,
        augment=data.augment[victim],
        mean_image=mean.cpu(),
        margins=trained.margins[victim].float().cpu(),
        pairs=pairs,
        stats=stats,
    )


def _pairs(
    experiment: KKT,
    x: Float[Tensor, "q s m d"],
    usable: Bool[Tensor, " q"],
    targets: UInt8[Tensor, "n c h w"],
    mean: Float[Tensor, "c h w"],
) -> Pairs:
    """Pairs of the attacks that went through; a candidate's number counts from attack 0."""
    numbers = torch.arange(x.shape[0] * x.shape[2]).view(x.shape[0], x.shape[2])
    saved = x[usable].transpose(0, 1).flatten(1, 2).float().unflatten(-1, targets.shape[1:])
    pairs = pairs_of(
        saved,
        targets,
        mean,
        iterations=experiment.attack.save_at,
        keep=experiment.keep,
        threshold=experiment.confident_ssim,
        gap=experiment.confident_gap,
    )
    number = numbers[usable.cpu()].flatten()
    return replace(pairs, candidate=number[pairs.candidate])


def _best(attacked: Attacked, settings: Settings, rows: slice) -> dict[str, float]:
    """How the attack with the smallest residual ended, and its hyperparameters.

    The residuals are NaN if all diverged.
    """
    residual = attacked.residual[rows]
    best = int(residual.nan_to_num(nan=torch.inf).argmin())
    return {
        "attack_loss": float(attacked.loss[rows][best]),
        "kkt_residual": float(residual[best]),
        "residual_relu": float(attacked.residual_relu[rows][best]),
        "n_iterations": float(attacked.n_iterations[rows][best]),
        **{name: float(getattr(settings, name)[rows][best]) for name in SETTINGS},
    }
