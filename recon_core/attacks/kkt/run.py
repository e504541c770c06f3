"""The `kkt` family: train victims, reconstruct their training images, match what came back.

One run: augment the planned images, subtract their mean, train the victim, attack its weights, and
keep the candidates that can be matched (001, section 2; 002; Haim et al. 2022). The attack, which
gave the family its name, minimises the KKT objective from random candidates, once or with many
drawn hyperparameters; or it separates the span of the first layer; or one after the other
(`kkt_attacks`).

How runs share a machine: on a GPU they are one stack, every product a batched one. On a CPU a run
is alone with its caches: as many go at once as torch has threads, each on one of them, which is
twice as fast on two cores as giving every product both. Runs of a sweep train their victim once.

With a `defence` the victims are trained against leaking (003), and the attack's premise no longer
holds: the loss on the features adds a term to theta that is no sum of lam_i y_i grad phi, so that
`kkt_residual` has a floor of its own even at the true images. The attack is told nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from recon_core.attacks.family_run import FamilyRun
from recon_core.attacks.kkt.attacks import (
    ROWS_AT_ONCE,
    Attack,
    Victim,
    attack_stack,
    check_pictures,
    kkt_of,
    most_candidates,
    saved_iterations,
    span_of,
)
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.kkt.results import Left, result_of
from recon_core.attacks.kkt.span_coordinates import check_dense_first
from recon_core.attacks.kkt.victims import (
    KnownVictim,
    check_labels,
    initial_weights,
    learn,
    shared_victim,
    train_victims,
)
from recon_core.attacks.run_sharing import AtOnce, one_after_another, share_attacks, stacks_of
from recon_core.matching import CLIPPED, check_clipped
from recon_core.precision import Precision, matmul_precision
from recon_core.sampling import binary_labels
from recon_core.tagged import Tagged
from recon_core.threads import share_of, side_by_side
from recon_core.types import Progress, RunResult, RunSpec, Victims, no_progress
from recon_core.victims.feature_defence import check_full_batch, hidden_layer
from recon_core.victims.network import Architecture, Network, Parameters
from recon_core.victims.released import Released
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.training import Training


@dataclass(frozen=True, kw_only=True)
class KKT(FamilyRun):
    """Settings of a run. Defaults are the dataset generation of paper 001, section 2.

    `n_classes`: what the
    victim tells apart; 2 is one output with labels 0 and 1, unless it is trained with the loss
    "ce", which has an output per class. `defence`: what is added to its loss (003), on the features
    of its hidden layer number `defence_layer`, from 1, by default the last; a convolution is the
    first. `released`: how the attacker is given the weights; statistics and margins are those of
    the victim as it was trained. `attack`: by its `kind` the search for a KKT point, the separation
    of the first layer's span, or the former from what the latter found; a span attack with `start`
    "known" is given the weights that the victim started from. `n_attacks`: how often a victim is
    attacked, each time from its own start and, with a search for hyperparameters, with its own;
    candidates are numbered attack after attack.
    `keep`: a candidate is confident if it is at some saved iteration.
    `clipped`: the share of a picture's values that may leave [0, 1] (`matching.fit_to_range`).
    `precision`: of float32 matrix products.
    """

    family: Literal["kkt"] = "kkt"
    augment_p: float = 0.12
    n_classes: int = 2
    victim: Network = field(default_factory=Network)
    training: Training = field(default_factory=Training)
    defence: Annotated[MixCon | UniCon, Tagged("kind")] | None = None
    defence_layer: int | None = None
    released: Released = field(default_factory=Released)
    attack: Attack = field(default_factory=KKTAttack)
    n_attacks: int = 1
    clipped: float = CLIPPED
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "ieee"
    after_victims: ClassVar[tuple[str, ...]] = ("released", "n_attacks", "clipped")
    later: ClassVar[Mapping[str, Any]] = {
        "attack.halving": None,
        "victim.init": "torch",
        "attack.kind": "kkt",
        "attack.coordinates": "pixels",
        "attack.kkt.coordinates": "pixels",
        "defence": None,
        "defence_layer": None,
        "clipped": 0.0,
        "released": {"precision": "full", "noise": 0.0},
    }
    unlike_today: ClassVar[Mapping[str, Any]] = {"clipped": 0.0}
    attacker_knows: ClassVar[str] = (
        "The attack is given a network (its architecture and weights) and the average of its "
        "training pictures, nothing else. It searches for pictures that explain those weights "
        "as the end of training."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_attacks < 1:
            raise ValueError(f"n_attacks={self.n_attacks} must be at least 1")
        check_clipped(self.clipped)
        loss = self.training.loss.kind
        if self.n_classes < 2 or (self.n_classes > 2 and loss != "ce"):
            raise ValueError(
                f"n_classes={self.n_classes} with training.loss.kind={loss!r}; more than two "
                "classes need 'ce', two are the least"
            )
        self._check_attack(loss)
        hidden_layer(self.victim, self.defence_layer)
        if self.defence is not None:
            check_full_batch(self.training.batch_size)
        elif self.defence_layer is not None:
            raise ValueError(
                f"defence_layer={self.defence_layer} without a defence; name one, for example "
                "defence.kind=mixcon, or leave the layer out"
            )

    def _check_attack(self, loss: str) -> None:
        kkt, span, conv = kkt_of(self.attack), span_of(self.attack), self.victim.conv
        if kkt is not None and (loss == "ce") != (kkt.condition == "multiclass"):
            raise ValueError(
                f"training.loss.kind={loss!r} with attack.condition={kkt.condition!r}; a victim "
                "that is trained with 'ce' has an output per class and needs 'multiclass', others "
                "must not have it"
            )
        if kkt is not None and kkt.coordinates == "span":
            check_dense_first(conv)
        if span is not None and conv is not None:
            raise ValueError(
                f"attack.kind={self.attack.kind!r} on a victim whose first layer is a convolution "
                f"of {conv.kernel}x{conv.kernel}: its weights span patches, not images; use "
                "attack.kind=kkt, or set victim.conv to null"
            )
        width = self.victim.widths[0]
        if span is not None and span.n_images is not None and span.n_images > width:
            raise ValueError(
                f"attack.n_images={span.n_images} directions of a first layer of {width} neurons; "
                f"it has {width} at most: lower it, or widen victim.widths"
            )

    def labels_of(
        self, labels: npt.NDArray[np.int64], names: tuple[str, ...]
    ) -> tuple[npt.NDArray[np.int64], str]:
        """(label per image, the task in words): of one output 0 or 1, else the class."""
        if self.n_outputs == 1:
            return binary_labels(labels, names)
        return super().labels_of(labels, names)

    def check_sweep(self, attacks_per_victim: int) -> None:
        """Raises ValueError if so many runs cannot attack the same victim with these settings."""
        if attacks_per_victim > 1 and self.n_attacks > 1:
            raise ValueError(
                f"attacks_per_victim={attacks_per_victim} with n_attacks={self.n_attacks}; in a "
                "sweep every run is one attack: set n_attacks to 1"
            )
        kkt = kkt_of(self.attack)
        if attacks_per_victim == 1 and kkt is not None and kkt.halving is not None:
            raise ValueError(
                "attack.halving compares attacks on one victim, but attacks_per_victim=1; raise "
                "it, or set attack.halving to null"
            )

    @property
    def n_labels(self) -> int:
        """Labels that a run has equally many images of."""
        return self.n_classes

    @property
    def n_outputs(self) -> int:
        return self.n_classes if self.training.loss.kind == "ce" else 1

    @property
    def saved_iterations(self) -> tuple[int, ...]:
        """Of the attack, at which pairs are saved; 0 is what was separated."""
        return saved_iterations(self.attack)

    def check_batch(self, specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"]) -> None:
        """Raises ValueError if the runs cannot be one batch: for other labels or another number of
        images, or if a separation is asked of pictures smaller than its filters."""
        super().check_batch(specs, images)
        check_labels(specs, self.n_classes, self.defence)
        n_images, *shape = images.shape[1:]
        check_pictures(self.attack, n_images, (shape[0], shape[1], shape[2]))

    def arithmetic(self, device: torch.device) -> AbstractContextManager[None]:
        """Full precision whatever was set; scores have it in any case."""
        return matmul_precision("ieee", device)

    def train_victim(
        self,
        spec: RunSpec,
        images: UInt8[Tensor, "n c h w"],
        *,
        device: torch.device,
        victims: Victims | None = None,
        progress: Progress = no_progress,
    ) -> KnownVictim:
        """The victim of a run of a sweep, as `run_batch` trains it; taken from `victims`, if it is
        there, and put there otherwise. Raises ValueError as `run_batch` does."""
        super().check_batch([spec], images[None])
        check_labels([spec], self.n_classes, self.defence)
        data = learn(self, [spec], images[None], device)
        architecture = self.victim.on(data.shape, self.n_outputs)
        with matmul_precision(self.precision, device):
            trained = shared_victim(
                self, architecture, spec, data.inputs, victims=victims, progress=progress
            )
        return KnownVictim(architecture, trained, data.mean[0])

    @property
    def at_once(self) -> AtOnce:
        if self.precision == "ieee":
            return side_by_side
        return one_after_another  # a setting of the whole process: none may end it early

    def run_stack(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        data = learn(self, specs, images, device)
        architecture = self.victim.on(data.shape, self.n_outputs)
        with matmul_precision(self.precision, device):  # not of the scores below
            trained = train_victims(
                self, architecture, specs, data.inputs, share_of(progress, 0.0, 0.5)
            )
            victim = self._victim(architecture, specs, trained.parameters, data.inputs)
            left = self._attack(victim, specs, share_of(progress, 0.5, 1.0))
        return [
            result_of(self, spec, data=data, trained=trained, victim=i, left=left[i])
            for i, spec in enumerate(specs)
        ]

    def run_sweep(
        self,
        victims: Victims | None,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        """Runs that attack one victim: it is trained once, and all of them share its weights."""
        self.check_sweep(attacks_per_victim=2)
        data = learn(self, specs[:1], images[:1], device)
        architecture = self.victim.on(data.shape, self.n_outputs)
        half, rest = share_of(progress, 0.0, 0.5), share_of(progress, 0.5, 1.0)
        with matmul_precision(self.precision, device):
            trained = shared_victim(
                self, architecture, specs[0], data.inputs, victims=victims, progress=half
            )

            victim = self._victim(architecture, specs[:1], trained.parameters, data.inputs)

            def attack(stack: Sequence[RunSpec], part: Progress) -> list[Left]:
                generators = [spec.generator("attack") for spec in stack]
                return attack_stack(self.attack, victim, generators, part)

            stacks = stacks_of(specs, device, size=self._sweep_stack_size(device))
            pieces = share_attacks(
                stacks, attack, device=device, progress=rest, at_once=self.at_once
            )
        left = [one for piece in pieces for one in piece]
        return [
            result_of(self, spec, data=data, trained=trained, victim=0, left=[one])
            for spec, one in zip(specs, left, strict=True)
        ]

    def _sweep_stack_size(self, device: torch.device) -> int:
        """How many attacks go in one stack: on a CPU each alone, unless they compete."""
        kkt = kkt_of(self.attack)
        if device.type == "cpu" and (kkt is None or kkt.halving is None):
            return 1
        return max(1, ROWS_AT_ONCE // most_candidates(self))

    def _victim(
        self,
        architecture: Architecture,
        specs: Sequence[RunSpec],
        trained: Parameters,
        inputs: Float[Tensor, "r n d"],
    ) -> Victim:
        span = span_of(self.attack)
        known = span is not None and span.start == "known"
        start = initial_weights(architecture, specs, inputs) if known else None
        generators = [spec.victim_generator("released weights") for spec in specs]
        return Victim(architecture, self.released.of(trained, generators), start, inputs)

    def _attack(
        self, victim: Victim, specs: Sequence[RunSpec], progress: Progress
    ) -> list[list[Left]]:
        """What every run's attacks leave: all runs at once, or one run's attacks at a time."""
        if self.n_attacks == 1:
            generators = [spec.generator("attack") for spec in specs]
            left = attack_stack(self.attack, victim, generators, progress)
            return [[one] for one in left]
        at_once = max(1, ROWS_AT_ONCE // most_candidates(self))
        every: list[list[Left]] = []
        for i, spec in enumerate(specs):
            own = victim.rows(torch.tensor([i]))
            every.append([])
            for first in range(0, self.n_attacks, at_once):
                last = min(first + at_once, self.n_attacks)
                done = [(i + k / self.n_attacks) / len(specs) for k in (first, last)]
                generators = [spec.generator(f"attack {k}") for k in range(first, last)]
                every[-1] += attack_stack(self.attack, own, generators, share_of(progress, *done))
        return every
