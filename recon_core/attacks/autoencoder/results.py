"""Inputs and results of a run of the family `autoencoder`: degraded images, scores, pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.attacks.candidate_matching import ROWS
from recon_core.attacks.family_run import FamilyRun, Learned, run_result
from recon_core.attacks.plug_and_play import Ending, Recovered
from recon_core.degradation import degrade, mask_pattern
from recon_core.types import Outcome, RunResult, RunSpec
from recon_core.victims.autoencoder import Model
from recon_core.victims.autoencoder_training import Checkpoint, Overfitted


@dataclass(frozen=True)
class KnownAutoencoder:
    """One trained autoencoder at the loss that is attacked, or where it ended if it is not `ok`."""

    model: Model
    checkpoint: Checkpoint
    ok: bool
    diverged: bool

    @classmethod
    def of(cls, model: Model, trained: Overfitted, level: float) -> KnownAutoencoder:
        reached = trained.at(level)
        return cls(model, reached or trained.last, reached is not None, trained.diverged)

    def f(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """The autoencoder, as the black box that an attack sees."""
        return self.model.forward(self.checkpoint.weights, x.unsqueeze(0))[0]

    def tensors(self) -> dict[str, Tensor]:
        weights = {f"weights/{name}": t.cpu() for name, t in self.checkpoint.weights.items()}
        numbers = [self.checkpoint.loss, self.checkpoint.epoch, self.ok, self.diverged]
        return {**weights, "end": torch.tensor(numbers, dtype=torch.float64)}

    @classmethod
    def from_tensors(
        cls, model: Model, tensors: Mapping[str, Tensor], device: torch.device
    ) -> KnownAutoencoder:
        weights = {name: tensors[f"weights/{name}"].to(device) for name in model.tensor_shapes}
        loss, epoch, ok, diverged = tensors["end"].tolist()
        return cls(model, Checkpoint(weights, loss, int(epoch)), bool(ok), bool(diverged))


@dataclass(frozen=True)
class DegradedImages:
    """All n images of a run by all its masks, mask after mask: row k n + i is image i by mask k.
    `mask` is True where a pixel was kept."""

    y: Float[Tensor, "b c h w"]
    mask: Bool[Tensor, "b c h w"]


def degraded_images(
    spec: RunSpec, x: Float[Tensor, "n c h w"], *, masks: Sequence[str], sigma: float
) -> DegradedImages:
    pieces, kept = [], []
    for name in masks:
        generator = spec.generator(f"mask {name}")
        mask = mask_pattern(name, x.shape[2], x.shape[3], generator=generator)
        noise = [spec.generator(f"noise {name} {i}") for i in range(len(x))] if sigma else []
        pieces.append(degrade(x, mask, sigma=sigma, generators=tuple(noise)))
        kept.append(mask.expand(x.shape))
    return DegradedImages(y=torch.cat(pieces), mask=torch.cat(kept))


def result_of(
    experiment: FamilyRun,
    spec: RunSpec,
    *,
    victim: KnownAutoencoder,
    learned: Learned,
    recovered: Recovered | None,
) -> RunResult:
    """The result of one run; `recovered` is None of a victim that diverged."""
    targets = learned.targets
    stats, pairs = {"train_loss": victim.checkpoint.loss}, None
    outcome = Outcome.OK if victim.ok else Outcome.UNFITTED
    if recovered is None or bool((recovered.ending == Ending.NONFINITE).all()):
        outcome = Outcome.NONFINITE
    else:
        stats |= {
            "attack_loss": _residual(victim, recovered),
            "n_iterations": float(recovered.n_applied.double().mean()),
        }
        row = torch.arange(len(recovered.x)) % len(targets)
        pairs = experiment.own_pairs(recovered.x, targets, row, recovered.n_applied)
    return run_result(spec, outcome, targets, learned.augment, stats=stats, pairs=pairs)


def _residual(victim: KnownAutoencoder, recovered: Recovered) -> float:
    """The mean square of f(x) - x of the recoveries for which f was finite."""
    total, n = 0.0, 0
    for x, ending in zip(recovered.x.split(ROWS), recovered.ending.split(ROWS), strict=True):
        error = (victim.f(x) - x)[ending != Ending.NONFINITE].double()
        total += float(error.square().sum())
        n += error.numel()
    return total / n
