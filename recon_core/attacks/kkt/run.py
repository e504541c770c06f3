"""The `kkt` family: train victims, reconstruct their training images, match what came back.

One run: augment the planned images, subtract their mean, train the victim, attack its weights, and
keep the candidates that can be matched (image restoration paper, section 2; KKT paper; Haim et al.
2022). The attack, which gave the family its name, minimises the KKT objective from random
candidates, once or with many drawn hyperparameters; or it separates the span of the first layer; or
one after the other (`kkt_attacks`).

How runs share a machine: on a GPU they are one stack, every product a batched one. On a CPU a run
is alone with its caches: as many go at once as torch has threads, each on one of them, which is
twice as fast on two cores as giving every product both. Runs of a sweep train their victim once.

With a `defence` the victims are trained against leaking (MixCon paper), and the attack's premise no
longer holds: the loss on the features adds a term to theta that is no sum of lam_i y_i grad phi, so
that `kkt_residual` has a floor of its own even at the true images. The attack is told nothing of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from recon_core.attacks.kkt.attacks import (
    ROWS_AT_ONCE,
    Victim,
    attack_stack,
    check_pictures,
)
from recon_core.attacks.kkt.results import Left, result_of
from recon_core.attacks.kkt.settings import KKTSettings, kkt_of, most_candidates, span_of
from recon_core.attacks.kkt.victims import (
    KnownVictim,
    check_labels,
    initial_weights,
    learn,
    shared_victim,
    train_victims,
)
from recon_core.attacks.run_sharing import AtOnce, one_after_another, share_attacks, stacks_of
from recon_core.precision import matmul_precision
from recon_core.threads import share_of, side_by_side
from recon_core.types import Progress, RunResult, RunSpec, Victims, no_progress
from recon_core.victims.network import Architecture, Parameters


@dataclass(frozen=True, kw_only=True)
class KKT(KKTSettings):
    """Runs with these settings."""

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
