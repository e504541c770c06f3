"""Trained victims of the `kkt` family, and results of a run: outcome, statistics, pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from recon_core.attacks.candidate_matching import pairs_of
from recon_core.attacks.family_run import Learned, run_result
from recon_core.attacks.kkt.objective import SETTINGS, KKTAttack, Settings
from recon_core.attacks.kkt.settings import KKTSettings
from recon_core.attacks.kkt.solver import Attacked
from recon_core.types import Outcome, RunResult, RunSpec
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.training import Trained


@dataclass(frozen=True)
class KnownVictim:
    """One trained network; `mean` (c, h, w) in [0, 1] is what its images have subtracted."""

    architecture: Architecture
    trained: Trained
    mean: Float[Tensor, "c h w"]

    @classmethod
    def each_of(
        cls, architecture: Architecture, trained: Trained, mean: Float[Tensor, "r c h w"]
    ) -> list[KnownVictim]:
        """Networks that were trained together."""
        tensors = {name: t for name, t in vars(trained).items() if isinstance(t, Tensor)}
        found = []
        for i, own in enumerate(mean):
            rows = slice(i, i + 1)
            ended: dict[str, Any] = {name: tensor[rows] for name, tensor in tensors.items()}
            ended["averages"] = tuple(tensor[rows] for tensor in trained.averages)
            one = replace(trained, parameters=trained.parameters.rows(rows), **ended)
            found.append(cls(architecture, one, own))
        return found

    def tensors(self) -> dict[str, Tensor]:
        return self.trained.tensors()

    def outputs(self, images: UInt8[Tensor, "k c h w"]) -> Float[Tensor, "k o"]:
        """phi(x) of other images, prepared as its own were."""
        weights = self.trained.parameters
        like = weights.weights[0]
        x = images.to(like.device, like.dtype) / 255 - self.mean.to(like)
        return self.architecture.forward(weights, x.flatten(1)[None]).output[0]

    def is_right(
        self, images: UInt8[Tensor, "k c h w"], labels: Int64[Tensor, " k"]
    ) -> Bool[Tensor, " k"]:
        """True for each image that is put into its class: by the sign of phi, or its largest
        output."""
        phi = self.outputs(images)
        found = (phi[:, 0] > 0).long() if phi.shape[1] == 1 else phi.argmax(1)
        return found.cpu() == labels

    def kernels(self) -> Float32[Tensor, "m c k k"] | None:
        """The kernels of the first layer; None without a convolution (KKT paper, figure 16)."""
        conv = self.architecture.network.conv
        if conv is None:
            return None
        channels = self.architecture.shape[0]
        flat = self.trained.parameters.weights[0][0].float().cpu()
        return flat.reshape(-1, channels, conv.kernel, conv.kernel)


def less_their_mean(
    learned: Sequence[Learned], device: torch.device, dtype: torch.dtype
) -> tuple[Float[Tensor, "r c h w"], Float[Tensor, "r n d"]]:
    """(mean images in float32, the inputs of R victims): pictures in [0, 1] minus the mean of their
    training set (image restoration paper, section 2; KKT paper, appendix A.1)."""
    unit = torch.stack([own.targets for own in learned]).to(device=device, dtype=dtype) / 255
    mean = unit.mean(dim=1, keepdim=True)
    return mean[:, 0].float(), (unit - mean).flatten(2)


def initial_weights(
    architecture: Architecture, specs: Sequence[RunSpec], like: Tensor
) -> Parameters:
    """Weights that the victims of R runs start from, with the dtype and on the device of `like`."""
    generators = [spec.victim_generator("victim") for spec in specs]
    return architecture.initial(generators, dtype=like.dtype).map(lambda t: t.to(like.device))


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


def outputs_of(attack: KKTAttack, attacked: Attacked, settings: Settings) -> list[AttackOutput]:
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
        AttackOutput(
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
    outputs: Sequence[AttackOutput],
) -> RunResult:
    """The result of a run's attacks on its victim; its statistics are those of the attack with the
    lowest score, or of the first if none has one. A candidate's number counts from attack 0."""
    trained, targets = victim.trained, learned.targets
    best = min(outputs, key=lambda one: math.inf if math.isnan(one.score) else one.score)
    stats = {
        "train_loss": float(trained.loss),
        "train_accuracy": float(trained.accuracy),
        "margin_min": float(trained.margin_min),
        **best.stats,
    }
    outcome = Outcome.OK if stats["train_accuracy"] == 1 else Outcome.UNFITTED
    is_finite = bool(trained.parameters.isfinite())
    if not (is_finite and any(one.finite for one in outputs)):
        stopped = is_finite and any(one.stopped for one in outputs)
        outcome = Outcome.STOPPED if stopped else Outcome.NONFINITE
    pairs = None
    if outcome in (Outcome.OK, Outcome.UNFITTED):
        sizes = [one.x.shape[1] for one in outputs]
        numbers = torch.arange(sum(sizes)).split(sizes)
        usable = [q for q, one in enumerate(outputs) if one.finite]
        saved = torch.cat([outputs[q].x for q in usable], 1).float()
        pairs = pairs_of(
            saved.unflatten(-1, targets.shape[1:]),
            targets,
            victim.mean,
            iterations=experiment.saved_iterations,
            keep=experiment.keep,
            threshold=experiment.confident_ssim,
            gap=experiment.confident_gap,
            clipped=experiment.clipped,
        )
        number = torch.cat([numbers[q] for q in usable])
        pairs = replace(pairs, candidate=number[pairs.candidate])
    return run_result(
        spec,
        outcome,
        targets,
        learned.augment,
        stats=stats,
        pairs=pairs,
        mean_image=victim.mean.cpu(),
        margins=trained.margins[0].float().cpu(),
    )
