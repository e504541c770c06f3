"""The `kkt` family: train victims, reconstruct their training images, match what came back.

One run: augment the planned images, subtract their mean, train the victim, attack its weights, and
keep the candidates that can be matched (image restoration paper, section 2; KKT paper; Haim et al.
2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from recon_core.attacks.family_run import DTYPES, Learned, TrainedRun
from recon_core.attacks.kkt.attacks import (
    ROWS_AT_ONCE,
    Victim,
    attack_stack,
    check_pictures,
    features_of,
)
from recon_core.attacks.kkt.results import (
    AttackOutput,
    KnownVictim,
    initial_weights,
    less_their_mean,
    result_of,
)
from recon_core.attacks.kkt.settings import KKTSettings, most_candidates, most_directions
from recon_core.attacks.span.attack import InSpan, SpanAttack, check_victim, in_span
from recon_core.attacks.span.rows import gradient_rows, state_rows, weight_rows
from recon_core.precision import matmul_precision
from recon_core.threads import AtOnce, one_after_another, share_of, side_by_side
from recon_core.types import Progress, RunResult, RunSpec
from recon_core.victims.network import Parameters, Shape
from recon_core.victims.training import Trained, first_gradient, train


@dataclass(frozen=True, kw_only=True)
class KKT(KKTSettings, TrainedRun[Learned, KnownVictim]):
    def check_batch(self, specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"]) -> None:
        super().check_batch(specs, images)
        for spec in specs:
            if not set(spec.labels) <= set(range(self.n_classes)):
                raise ValueError(
                    f"run {spec.run} has labels {sorted(set(spec.labels))}; a victim of "
                    f"n_classes={self.n_classes} needs labels from 0 to {self.n_classes - 1}"
                )
        n_images, *shape = images.shape[1:]
        check_pictures(self.attack, n_images, (shape[0], shape[1], shape[2]))

    def arithmetic(self, device: torch.device) -> AbstractContextManager[None]:
        """Full precision whatever was set, which is for training and attack; scores have it."""
        return matmul_precision("ieee", device)

    @property
    def at_once(self) -> AtOnce:
        if self.precision == "ieee":
            return side_by_side
        return one_after_another  # a setting of the whole process: none may end it early

    def sweep_size(self, device: torch.device) -> int:
        """Attacks of a sweep that are one stack: on a CPU one."""
        return 1 if device.type == "cpu" else max(1, ROWS_AT_ONCE // most_candidates(self))

    def learn(self, spec: RunSpec, images: UInt8[Tensor, "n c h w"]) -> Learned:
        return self.augmented(spec, images)

    def read_victim(
        self, learned: Learned, tensors: Mapping[str, Tensor], device: torch.device
    ) -> KnownVictim:
        architecture, dtype = self.victim.on(learned.shape, self.n_outputs), DTYPES[self.dtype]
        like = architecture.initial([torch.Generator()], dtype=dtype)
        mean, _inputs = less_their_mean([learned], device, dtype)
        return KnownVictim(architecture, Trained.from_tensors(tensors, like, device), mean[0])

    def train_runs(
        self,
        specs: Sequence[RunSpec],
        learned: Sequence[Learned],
        device: torch.device,
        progress: Progress,
    ) -> list[KnownVictim]:
        architecture = self.victim.on(learned[0].shape, self.n_outputs)
        mean, x = less_their_mean(learned, device, DTYPES[self.dtype])
        labels = torch.tensor([spec.labels for spec in specs], device=device)
        with matmul_precision(self.precision, device):
            trained = train(
                architecture,
                initial_weights(architecture, specs, x),
                x,
                labels if self.n_outputs > 1 else labels.to(x.dtype) * 2 - 1,
                training=self.training,
                generators=[spec.victim_generator("minibatches") for spec in specs],
                progress=progress,
            )
        return KnownVictim.each_of(architecture, trained, mean)

    def attack_runs(
        self,
        specs: Sequence[RunSpec],
        victims: Sequence[KnownVictim],
        learned: Sequence[Learned],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        """The results of R runs on their victims, or on the one that all of them share."""
        n = 1 if all(victim is victims[0] for victim in victims) else len(victims)
        _mean, inputs = less_their_mean(learned[:n], device, DTYPES[self.dtype])
        with matmul_precision(self.precision, device):
            attacked = self._attacked(victims[:n], specs[:n], inputs)
            outputs = self._outputs(attacked, specs, progress)
        return [
            result_of(self, spec, learned=own, victim=victim, outputs=its)
            for spec, own, victim, its in zip(specs, learned, victims, outputs, strict=True)
        ]

    def allowed_by(self, victim: KnownVictim, spec: RunSpec) -> InSpan:
        """Pictures that a victim's first layer allows, told from what its attacker is given.

        Raises NoSpanError where nothing stands out of the start's noise, ValueError for a
        convolution in front.
        """
        check_victim(victim.architecture)
        parameters, start = self._given([victim], [spec])
        rows = weight_rows(parameters, start)
        attack = self.attack if isinstance(self.attack, SpanAttack) else None
        return in_span(rows, victim.mean, attack=attack)[0]

    def _attacked(
        self,
        victims: Sequence[KnownVictim],
        specs: Sequence[RunSpec],
        inputs: Float[Tensor, "r n d"],
    ) -> Victim:
        """What attacks are given: the released weights and, for a span attack, the rows of weights
        less their known start, of optimiser states, or of the gradients of all images at the
        end."""
        parameters, start = self._given(victims, specs)
        source = self.attack.source if isinstance(self.attack, SpanAttack) else "weights"
        taken = []
        for r, (victim, spec) in enumerate(zip(victims, specs, strict=True)):
            trained, own = victim.trained, slice(r, r + 1)
            if start is not None:
                taken.append(weight_rows(parameters.rows(own), start.rows(own)))
            elif source == "state":
                decay = self.training.weight_decay
                rows = state_rows(trained.averages, trained.parameters, weight_decay=decay)
                taken.append(rows)
            elif source == "gradients":
                labels = torch.tensor([spec.labels], device=inputs.device)
                y = labels if self.n_outputs > 1 else labels.to(inputs.dtype) * 2 - 1
                gradient = first_gradient(
                    victim.architecture, trained.parameters, inputs[own], y, self.training.loss
                )
                taken.append(gradient_rows(gradient, "gradients"))
        return Victim(victims[0].architecture, parameters, inputs, tuple(taken))

    def _given(
        self, victims: Sequence[KnownVictim], specs: Sequence[RunSpec]
    ) -> tuple[Parameters, Parameters | None]:
        """The weights of R victims as they are released, and those they started from if the attack
        knows them."""
        architecture, attack = victims[0].architecture, self.attack
        every = [victim.trained.parameters for victim in victims]
        stack = zip(*(weights.tensors() for weights in every), strict=True)
        trained = every[0].like([torch.cat(tensors) for tensors in stack])
        known = isinstance(attack, SpanAttack) and attack.start == "known"
        start = initial_weights(architecture, specs, trained.weights[0]) if known else None
        generators = [spec.victim_generator("released weights") for spec in specs]
        return self.released.of(trained, generators), start

    def _outputs(
        self, victim: Victim, specs: Sequence[RunSpec], progress: Progress
    ) -> list[list[AttackOutput]]:
        """The outputs of each run's attacks: all runs at once, or one run's attacks at a time."""
        if self.n_attacks == 1:
            generators = [spec.generator("attack") for spec in specs]
            return [[one] for one in attack_stack(self.attack, victim, generators, progress)]
        at_once = max(1, ROWS_AT_ONCE // most_candidates(self))
        every: list[list[AttackOutput]] = []
        for i, spec in enumerate(specs):
            own = victim.rows(torch.tensor([i]))
            every.append([])
            for first in range(0, self.n_attacks, at_once):
                last = min(first + at_once, self.n_attacks)
                done = [(i + k / self.n_attacks) / len(specs) for k in (first, last)]
                generators = [spec.generator(f"attack {k}") for k in range(first, last)]
                every[-1] += attack_stack(self.attack, own, generators, share_of(progress, *done))
        return every


PER_PARAMETER, PER_CANDIDATE, PER_ACTIVATION, PER_SAVED = 7.0, 18.0, 6.5, 5.5
PER_FEATURE, PER_PAIR_OF_DIRECTIONS = 7.0, 40.0
BYTES_PER_FIRST_WEIGHT = 9 * 8


def kkt_bytes(experiment: KKT, n_images: int, shape: Shape) -> int:
    """Bytes of device memory that each run of a stack takes at most; `shape` is (c, h, w).

    Counted from live tensors, without library workspaces. With P parameters, x numbers of all
    candidates and u activations of all images and candidates (behind a convolution also its
    patches): 7 P + 18 x + 6.5 u, and 5.5 s x for s saved iterations; a separation of k directions
    with T features takes 7 k T + 40 k^2 and 9 first layers in float64.
    """
    architecture = experiment.victim.on(shape, experiment.n_outputs)
    n_candidates = most_candidates(experiment)
    at_once = min(experiment.n_attacks, max(1, ROWS_AT_ONCE // n_candidates))
    candidates = n_candidates * math.prod(shape)
    (fan_in, fan_out), *dense = architecture.layer_sizes
    units = fan_out * architecture.n_positions + sum(width for _, width in dense)
    if experiment.victim.conv is not None:
        units += fan_in * architecture.n_positions  # the patches that its kernels see
    working = PER_PARAMETER * architecture.n_parameters
    working += PER_ACTIVATION * units * (n_candidates + n_images)
    attack, extra = experiment.attack, 0
    if isinstance(attack, SpanAttack):
        k = most_directions(experiment, attack)
        working += PER_FEATURE * attack.n_sources(k) * features_of(attack, shape)
        working += PER_PAIR_OF_DIRECTIONS * k**2
        extra += BYTES_PER_FIRST_WEIGHT * fan_in * fan_out
    else:
        working += PER_CANDIDATE * candidates
    saved = PER_SAVED * len(experiment.saved_iterations) * candidates * experiment.n_attacks
    return int(DTYPES[experiment.dtype].itemsize * (at_once * working + saved) + extra)
