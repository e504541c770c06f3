"""Giving up the hopeless attacks of a sweep without looking at a training image.

Attacks on one victim with different hyperparameters start together. At each *rung*, an iteration,
those go on whose KKT residual is among the lowest of all that were asked before them at this rung,
the rest are stopped: asynchronous successive halving (Li et al. 2020), as Optuna's pruner has it,
asked in the order of the attacks. About a third gets three times as far, a ninth nine times.

The residual is taken with ReLU's own derivative. The attacks' own objectives are not comparable:
each has another surrogate of the derivative (`alpha`) and other penalties (`lam_min`). The image
restoration paper gave 56 of 303 attacks up as poor; Haim et al.'s code judges by the training
images (`KKTAttack.ncc_stop_above`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Halving:
    """Rungs are at iteration `first`, `first` * `factor`, and so on; about one attack in `factor`
    passes each."""

    first: int = 500
    factor: int = 3
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.first < 1 or self.factor < 2:
            raise ValueError(
                f"halving.first={self.first} must be an iteration, 1 or later, and "
                f"halving.factor={self.factor} 2 or more"
            )

    def rungs(self, n_iterations: int) -> tuple[int, ...]:
        """The rungs before the last iteration."""
        rungs = []
        rung = self.first
        while rung < n_iterations:
            rungs.append(rung)
            rung *= self.factor
        return tuple(rungs)


class Race:
    """The attacks of one stack that compete; `hopeless` is asked at every rung, in their order.

    Raises ValueError if Optuna is not installed.
    """

    def __init__(self, halving: Halving, n_attacks: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ValueError("halving needs Optuna; install it with: pip install optuna") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = optuna.pruners.SuccessiveHalvingPruner(
            min_resource=halving.first, reduction_factor=halving.factor
        )
        study = optuna.create_study(
            direction="minimize", pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0)
        )
        self.trials = [study.ask() for _ in range(n_attacks)]

    def hopeless(
        self, iteration: int, residual: Float[Tensor, " k"], attacks: Int64[Tensor, " k"]
    ) -> Bool[Tensor, " k"]:
        """Those of the running `attacks`, with these residuals at a rung, that are stopped."""
        stopped = []
        for attack, value in zip(attacks.tolist(), residual.tolist(), strict=True):
            trial = self.trials[attack]
            trial.report(value, iteration)
            stopped.append(trial.should_prune())
        return torch.tensor(stopped, dtype=torch.bool, device=residual.device)
