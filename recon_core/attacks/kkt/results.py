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
from recon_core.types import Outcome, Pairs, RunResult, RunSpec
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.separability import Defence, tuples_of
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


def check_labels(specs: Sequence[RunSpec], n_classes: int, defence: Defence | None = None) -> None:
    """Raises ValueError if labels are none of the classes, or too few for the defence."""
    for spec in specs:
        if not set(spec.labels) <= set(range(n_classes)):
            raise ValueError(
                f"run {spec.run} has labels {sorted(set(spec.labels))}; a victim of "
                f"n_classes={n_classes} needs labels from 0 to {n_classes - 1}"
            )
    if defence is not None:
        tuples_of(defence, torch.tensor([spec.labels for spec in specs]), n_classes)


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
