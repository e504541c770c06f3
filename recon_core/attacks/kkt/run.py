"""The `kkt` family: train victims, reconstruct their training images, match what came back.

One run: augment the planned images, subtract their mean, train the victim, attack its weights, and
keep the candidates that can be matched (image restoration paper, section 2; KKT paper; Haim et al.
2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from recon_core.attacks.candidate_matching import pairs_of
from recon_core.attacks.family_run import DTYPES, Learned, TrainedRun, run_result
from recon_core.attacks.kkt.attacks import (
    ROWS_AT_ONCE,
    Attack,
    AttackOutput,
    Victim,
    attack_stack,
    check_pictures,
    features_of,
)
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.attack import InSpan, SpanAttack, check_victim, in_span
from recon_core.attacks.span.rows import gradient_rows, state_rows, weight_rows
from recon_core.matching import CLIPPED, check_clipped
from recon_core.precision import Precision, matmul_precision
from recon_core.sampling import binary_labels
from recon_core.strict import Count, Share
from recon_core.threads import AtOnce, one_after_another, share_of, side_by_side
from recon_core.types import Outcome, Progress, RunResult, RunSpec
from recon_core.victims.network import Architecture, Network, Parameters, Released, Shape
from recon_core.victims.training import Trained, Training, first_gradient, train


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


@dataclass(frozen=True, kw_only=True)
class KKT(TrainedRun[Learned, KnownVictim]):
    """Settings of a run. Defaults: dataset generation of the image restoration paper, section 2.

    `n_classes`: what the victim tells apart; 2 is one output with labels 0 and 1, unless it is
    trained with the loss "ce", which has an output per class. `released`: how the attacker is
    given the weights; statistics and margins are those of the victim as it was trained. `attack`: a
    span attack with `start` "known" is given the weights that the victim started from. `n_attacks`:
    how often a victim is attacked, each time from its own start and hyperparameters; candidates are
    numbered attack after attack. `keep`: a candidate is confident if it is at some saved iteration.
    `clipped`: the share of a picture's values that may leave [0, 1] (`matching.fit_to_range`).
    `precision`: of float32 matrix products.
    """

    family: Literal["kkt"] = "kkt"
    augment_p: Share = 0.12
    n_classes: int = 2
    victim: Network = field(default_factory=Network)
    training: Training = field(default_factory=Training)
    released: Released = field(default_factory=Released)
    attack: Attack = field(default_factory=KKTAttack)
    n_attacks: Count = 1
    clipped: float = CLIPPED
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "ieee"
    after_victims: ClassVar[tuple[str, ...]] = ("released", "n_attacks", "clipped")
    attacker_knows: ClassVar[str] = (
        "The attack is given a network (its architecture and weights) and the average of its "
        "training pictures, nothing else. It searches for pictures that explain those weights "
        "as the end of training."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clipped(self.clipped)
        loss = self.training.loss.kind
        if self.n_classes < 2 or (self.n_classes > 2 and loss != "ce"):
            raise ValueError(
                f"n_classes={self.n_classes} with training.loss.kind={loss!r}; more than two "
                "classes need 'ce', two are the least"
            )
        attack, conv = self.attack, self.victim.conv
        if isinstance(attack, KKTAttack):
            if (loss == "ce") != (attack.condition == "multiclass"):
                raise ValueError(
                    f"training.loss.kind={loss!r} with attack.condition={attack.condition!r}; a "
                    "victim that is trained with 'ce' has an output per class and needs "
                    "'multiclass', others must not have it"
                )
            return
        if conv is not None:
            raise ValueError(
                "attack.kind='span' on a victim whose first layer is a convolution of "
                f"{conv.kernel}x{conv.kernel}: its weights span patches, not images; use "
                "attack.kind=kkt, or set victim.conv to null"
            )
        optimiser = self.training.optimiser
        if attack.source == "state" and not optimiser.averages_gradients:
            raise ValueError(
                f"attack.source='state' with training.optimiser.rule={optimiser.rule!r}, which "
                "keeps no average of gradients; use adam, or gd with momentum"
            )
        width = self.victim.widths[0]
        if attack.n_images is not None and attack.n_images > width:
            raise ValueError(
                f"attack.n_images={attack.n_images} directions of a first layer of {width} "
                f"neurons; it has {width} at most: lower it, or widen victim.widths"
            )

    def labels_of(
        self, labels: npt.NDArray[np.int64], names: tuple[str, ...]
    ) -> tuple[npt.NDArray[np.int64], str]:
        if self.n_outputs == 1:
            return binary_labels(labels, names)
        return super().labels_of(labels, names)

    def check_sweep(self, attacks_per_victim: int) -> None:
        if attacks_per_victim > 1 and self.n_attacks > 1:
            raise ValueError(
                f"attacks_per_victim={attacks_per_victim} with n_attacks={self.n_attacks}; in a "
                "sweep every run is one attack: set n_attacks to 1"
            )

    @property
    def n_labels(self) -> int:
        return self.n_classes

    @property
    def n_outputs(self) -> int:
        return self.n_classes if self.training.loss.kind == "ce" else 1

    @property
    def saved_iterations(self) -> tuple[int, ...]:
        return self.attack.save_at if isinstance(self.attack, KKTAttack) else (0,)

    @property
    def most_directions(self) -> int:
        """An upper bound for the directions that a span attack finds. There are about as many as
        images, but rules that move every weight at its own rate (Adadelta) leave their span."""
        n_images = self.attack.n_images if isinstance(self.attack, SpanAttack) else None
        return n_images or self.victim.widths[0]

    @property
    def most_candidates(self) -> int:
        """An upper bound for the candidates of an attack."""
        if isinstance(self.attack, KKTAttack):
            return self.attack.n_candidates
        return 2 * self.attack.n_sources(self.most_directions)

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
        return 1 if device.type == "cpu" else max(1, ROWS_AT_ONCE // self.most_candidates)

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
        return [self._result(*each) for each in zip(specs, learned, victims, outputs, strict=True)]

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
        at_once = max(1, ROWS_AT_ONCE // self.most_candidates)
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

    def _result(
        self,
        spec: RunSpec,
        learned: Learned,
        victim: KnownVictim,
        outputs: Sequence[AttackOutput],
    ) -> RunResult:
        """The result of a run's attacks on its victim; its statistics are those of the attack with
        the lowest score, or of the first if none has one. Candidates are numbered from attack 0."""
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
                iterations=self.saved_iterations,
                keep=self.keep,
                threshold=self.confident_ssim,
                gap=self.confident_gap,
                clipped=self.clipped,
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
    n_candidates = experiment.most_candidates
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
        k = experiment.most_directions
        working += PER_FEATURE * attack.n_sources(k) * features_of(attack, shape)
        working += PER_PAIR_OF_DIRECTIONS * k**2
        extra += BYTES_PER_FIRST_WEIGHT * fan_in * fan_out
    else:
        working += PER_CANDIDATE * candidates
    saved = PER_SAVED * len(experiment.saved_iterations) * candidates * experiment.n_attacks
    return int(DTYPES[experiment.dtype].itemsize * (at_once * working + saved) + extra)
