"""Hopeless attacks of a sweep are given up: asynchronous successive halving (Li et al. 2020).

At each *rung*, an iteration, those attacks on one victim go on whose KKT residual, with ReLU's own
derivative, is among the lowest of all that were asked before them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from recon_core.strict import Strict


@dataclass(frozen=True, kw_only=True)
class Halving(Strict):
    """Rungs are at iteration `first`, `first` * `factor`, and so on; about one attack in `factor`
    passes each."""

    first: int = 500
    factor: int = 3

    def __post_init__(self) -> None:
        if self.first < 1 or self.factor < 2:
            raise ValueError(
                f"halving.first={self.first} must be an iteration, 1 or later, and "
                f"halving.factor={self.factor} 2 or more"
            )

    def rungs(self, n_iterations: int) -> tuple[int, ...]:
        rungs = []
        rung = self.first
        while rung < n_iterations:
            rungs.append(rung)
            rung *= self.factor
        return tuple(rungs)


class Race:
    """The attacks of one stack that compete; `hopeless` is asked at every rung, in their order.
    Raises ValueError if Optuna is not installed."""

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
