"""Inputs and results of a run of the family `inversion`: its parts, victim, scores, pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from recon_core.attacks.family_run import FamilyRun, Learned, run_result
from recon_core.attacks.inversion.feature_matching import Inverted
from recon_core.attacks.plug_and_play import Ending
from recon_core.types import Outcome, RunResult, RunSpec
from recon_core.victims.autoencoder import Weights
from recon_core.victims.split import IMAGES_AT_ONCE, SplitModel, features_of
from recon_core.victims.split_training import TrainedSplit


@dataclass(frozen=True)
class InTwoParts(Learned):
    """Rows that the victim is trained on, and rows that are inverted, both rising."""

    trained: Int64[Tensor, " t"]
    attacked: Int64[Tensor, " b"]


def two_parts(
    spec: RunSpec, *, held_out: int, n_classes: int
) -> tuple[Int64[Tensor, " t"], Int64[Tensor, " b"]]:
    """(rows that are trained on, rows that are inverted): `held_out` images of each class are drawn
    by the victim's generator and are the second; with 0 both are all rows."""
    if not held_out:
        return torch.arange(len(spec.labels)), torch.arange(len(spec.labels))
    labels, generator = torch.tensor(spec.labels), spec.victim_generator("held out")
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(n_classes):
        rows = (labels == label).nonzero()[:, 0]
        is_held_out[rows[torch.randperm(len(rows), generator=generator)[:held_out]]] = True
    return (~is_held_out).nonzero()[:, 0], is_held_out.nonzero()[:, 0]


@dataclass(frozen=True)
class KnownClassifier:
    """One trained classifier, with its loss and accuracy on what it was trained on. `weights` keep
    a leading dimension of 1. Those of one that diverged are the last finite ones."""

    model: SplitModel
    weights: Weights
    loss: float
    accuracy: float
    diverged: bool

    @classmethod
    def each_of(cls, model: SplitModel, trained: TrainedSplit) -> list[KnownClassifier]:
        """Outcomes of networks that were trained together."""
        numbers = zip(
            trained.loss.tolist(), trained.accuracy.tolist(), trained.diverged.tolist(), strict=True
        )
        return [
            cls(
                model,
                {name: tensor[i : i + 1].clone() for name, tensor in trained.weights.items()},
                loss,
                accuracy,
                diverged or not math.isfinite(loss),
            )
            for i, (loss, accuracy, diverged) in enumerate(numbers)
        ]

    def tensors(self) -> dict[str, Tensor]:
        weights = {f"weights/{name}": tensor.cpu() for name, tensor in self.weights.items()}
        numbers = [self.loss, self.accuracy, self.diverged]
        return {**weights, "end": torch.tensor(numbers, dtype=torch.float64)}

    @classmethod
    def from_tensors(
        cls, model: SplitModel, tensors: Mapping[str, Tensor], device: torch.device
    ) -> KnownClassifier:
        weights = {name: tensors[f"weights/{name}"].to(device) for name in model.tensor_shapes}
        loss, accuracy, diverged = tensors["end"].tolist()
        return cls(model, weights, loss, accuracy, bool(diverged))

    def sent(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b m"]:
        """z = h(x), which the server sees."""
        return features_of(self.model, self.weights, x)[0]

    @torch.no_grad()
    def margins(self, x: Float[Tensor, "n c h w"], labels: Sequence[int]) -> Float32[Tensor, " n"]:
        """phi_y - max of the other phi, on the CPU: positive if an image is put into its class."""
        truth = torch.tensor(labels)
        parts = []
        for rows in torch.arange(len(x)).split(IMAGES_AT_ONCE):
            z = self.sent(x[rows.to(x.device)]).unsqueeze(0)
            phi = self.model.classify(self.weights, z)[0].cpu()
            own = truth[rows, None]
            parts.append(phi.gather(1, own)[:, 0] - phi.scatter(1, own, -math.inf).amax(1))
        return torch.cat(parts).float()


def result_of(
    experiment: FamilyRun,
    spec: RunSpec,
    *,
    victim: KnownClassifier,
    learned: InTwoParts,
    margins: Float32[Tensor, " n"],
    inverted: Inverted | None,
) -> RunResult:
    """The result of one run; `inverted` is None of a victim that diverged."""
    targets = learned.targets
    stats = {
        "train_loss": victim.loss,
        "train_accuracy": victim.accuracy,
        "margin_min": float(margins[learned.trained].min()),
    }
    outcome, pairs = Outcome.NONFINITE, None
    if inverted is not None and bool((inverted.ending != Ending.NONFINITE).any()):
        finite = inverted.ending != Ending.NONFINITE
        stats |= {
            "attack_loss": float(inverted.objective[finite].double().mean()),
            "n_iterations": float(inverted.n_steps.double().mean()),
        }
        outcome = Outcome.OK
        pairs = experiment.own_pairs(inverted.x, targets, learned.attacked, inverted.n_steps)
    return run_result(
        spec, outcome, targets, learned.augment, stats=stats, pairs=pairs, margins=margins
    )
