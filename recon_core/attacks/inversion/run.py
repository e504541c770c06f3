"""The `inversion` family: train split classifiers, recover images from what the client sends.

One run (the MixCon paper, section 4): train f = g(h(x)), with a defence or without; look for images
with the features z = h(x) of `held_out` ones; compare each with the one that z is of. The server
knows h and every z that is sent, and no image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from recon_core.attacks.family_run import DTYPES, FamilyRun, Learned, TrainedRun, run_result
from recon_core.attacks.inversion.feature_matching import GradientInversion, Inverted
from recon_core.attacks.inversion.strong_inversion import StrongInversion, whiten
from recon_core.attacks.plug_and_play import Ending
from recon_core.strict import Tagged, Within
from recon_core.types import Outcome, Progress, RunResult, RunSpec
from recon_core.victims.autoencoder import Shape, Weights
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.split import (
    IMAGES_AT_ONCE,
    KERNEL,
    LeNet5,
    SplitModel,
    SplitNetwork,
    features_of,
    initial_weights,
)
from recon_core.victims.split_training import SplitTraining, TrainedSplit, train_split

SSIM_SIDE = 11
INVERTED_AT_ONCE = 256
"""Images of a run that are inverted as one batch; bounds memory."""


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

    def h(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b m"]:
        """What the server sees of x, differentiable."""
        features: Tensor = self.model.features(self.weights, x.unsqueeze(0))[0]
        return features

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


@dataclass(frozen=True, kw_only=True)
class Inversion(TrainedRun[InTwoParts, KnownClassifier]):
    """Settings of a run. Defaults are the MixCon paper's for MNIST without a defence: LeNet5, cut
    after its second block, and the paper's gradient descent.

    `n_classes`: the classes 0 to n_classes - 1; a run has equally many images of each. `defence`:
    what the training adds to its loss; None is the paper's "vanilla". `held_out`: images of each
    class that are not trained on and are what is inverted; 0: all are trained on and inverted.
    `attack`: `strong` measures features by their spread over all z of the run, which the server
    sees.

    No run is `unfitted`: the attack inverts h, however well g classifies. `train_loss`
    (cross-entropy alone), `train_accuracy` and `margin_min` are of the images that were trained on,
    `n_iterations` is the mean number of gradients, those of all starts counted.
    """

    family: Literal["inversion"] = "inversion"
    n_classes: Annotated[int, Within("[2, inf)")] = 10
    victim: Annotated[SplitNetwork, Tagged("kind")] = field(default_factory=LeNet5)
    training: SplitTraining = field(default_factory=SplitTraining)
    defence: Annotated[MixCon | UniCon, Tagged("kind")] | None = None
    held_out: Annotated[int, Within("[0, inf)", fix="0 inverts the training images")] = 10
    attack: Annotated[GradientInversion | StrongInversion, Tagged("kind")] = field(
        default_factory=GradientInversion
    )
    dtype: Literal["float32", "float64"] = "float32"
    attacker_knows: ClassVar[str] = (
        "The attack is given the first layers of a classifier and what they make of each "
        "picture, which is sent to a server that does the rest. It searches for pictures of "
        "which they make the same."
    )

    def check_images(self, n_images: int) -> None:
        self._check_class(n_images // self.n_classes)

    def _check_class(self, images_per_class: int) -> None:
        n_trained = images_per_class - self.held_out
        if n_trained < self.training.per_class:
            raise ValueError(
                f"{images_per_class} images of a class less held_out={self.held_out} leave "
                f"{max(n_trained, 0)} to train on, fewer than training.per_class="
                f"{self.training.per_class} of a batch; a run of {self.n_classes} classes needs "
                f"{self.n_classes * (self.held_out + self.training.per_class)} images, or lower one"
            )

    @property
    def n_labels(self) -> int:
        return self.n_classes

    def learn(self, spec: RunSpec, images: UInt8[Tensor, "n c h w"]) -> InTwoParts:
        own = self.augmented(spec, images)
        parts = two_parts(spec, held_out=self.held_out, n_classes=self.n_classes)
        return InTwoParts(own.targets, own.augment, *parts)

    def read_victim(
        self, learned: InTwoParts, tensors: Mapping[str, Tensor], device: torch.device
    ) -> KnownClassifier:
        model = self.victim.on(learned.shape, self.n_classes)
        return KnownClassifier.from_tensors(model, tensors, device)

    def train_runs(
        self,
        specs: Sequence[RunSpec],
        learned: Sequence[InTwoParts],
        device: torch.device,
        progress: Progress,
    ) -> list[KnownClassifier]:
        model = self.victim.on(learned[0].shape, self.n_classes)
        labels = [
            torch.tensor(s.labels)[own.trained] for s, own in zip(specs, learned, strict=True)
        ]
        generators = [spec.victim_generator("victim") for spec in specs]
        trained = train_split(
            model,
            initial_weights(model, generators, dtype=DTYPES[self.dtype]),
            torch.stack([self._pictures(own.targets[own.trained], device) for own in learned]),
            torch.stack(labels).to(device),
            defences=[self.defence] * len(specs),
            training=self.training,
            shuffle=lambda run, epoch: specs[run].victim_generator(f"minibatches {epoch}"),
            streams=range(len(specs)),
            progress=progress,
        )
        return KnownClassifier.each_of(model, trained)

    def attack_runs(
        self,
        specs: Sequence[RunSpec],
        victims: Sequence[KnownClassifier],
        learned: Sequence[InTwoParts],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        """The results of R runs on their victims; those that diverged send nothing."""
        sent: dict[int, Tensor] = {}
        margins = []
        for i, (spec, victim, own) in enumerate(zip(specs, victims, learned, strict=True)):
            x = self._pictures(own.targets, device)
            margins.append(victim.margins(x, spec.labels))
            z = victim.sent(x[own.attacked.to(device)])
            if not victim.diverged and bool(z.isfinite().all()):
                sent[i] = z
        found: dict[int, Inverted] = {}
        if sent:
            inverted = self._inverted(
                [(specs[i], learned[i].attacked.tolist()) for i in sent],
                [victims[i] for i in sent],
                torch.stack(list(sent.values())),
                progress,
            )
            found = dict(zip(sent, inverted, strict=True))
        progress(1.0)
        return [
            result_of(
                self,
                spec,
                victim=victims[i],
                learned=learned[i],
                margins=margins[i],
                inverted=found.get(i),
            )
            for i, spec in enumerate(specs)
        ]

    def _inverted(
        self,
        attacked: Sequence[tuple[RunSpec, list[int]]],
        victims: Sequence[KnownClassifier],
        z: Float[Tensor, "r b m"],
        progress: Progress,
    ) -> list[Inverted]:
        """The attack on all images that R clients send, so many of each at once; `attacked` are the
        runs and the rows of their targets that z is of."""
        model, n_images = victims[0].model, z.shape[1]
        weights = {
            name: torch.cat([victim.weights[name] for victim in victims])
            for name in model.tensor_shapes
        }
        scale = self._scale(z)
        pieces = []
        for rows in torch.arange(n_images).split(INVERTED_AT_ONCE):
            n_rows, part = len(rows), rows.tolist()

            def h(x: Tensor, n_rows: int = n_rows) -> Tensor:
                """Scaled features of images that come start by start, run by run."""
                by_run = x.unflatten(0, (-1, len(attacked), n_rows)).transpose(0, 1).flatten(1, 2)
                z_of = model.features(weights, by_run) * scale
                by_start: Tensor = z_of.unflatten(1, (-1, n_rows)).transpose(0, 1)
                return by_start.flatten(0, 2)

            piece = self.attack.invert(
                h,
                (z * scale)[:, part].flatten(0, 1),
                shape=model.shape,
                generators=[
                    spec.generator(f"start {targets[i]}")
                    for spec, targets in attacked
                    for i in part
                ],
            )
            pieces.append(_by_run(piece, len(attacked)))
            progress((part[-1] + 1) / n_images)
        return [_joined(of_run) for of_run in zip(*pieces, strict=True)]

    def _scale(self, z: Float[Tensor, "r b m"]) -> Float[Tensor, "r 1 m"]:
        """What features are multiplied by: 1, or, for the strong attack, 1 over their spread."""
        if not isinstance(self.attack, StrongInversion):
            return torch.ones_like(z[:, :1])
        return torch.stack([whiten(own) for own in z]).unsqueeze(1)

    def _pictures(
        self, targets: UInt8[Tensor, "n c h w"], device: torch.device
    ) -> Float[Tensor, "n c h w"]:
        return targets.to(device=device, dtype=DTYPES[self.dtype]) / 255

    def check_batch(self, specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"]) -> None:
        super().check_batch(specs, images)
        if min(images.shape[-2:]) < SSIM_SIDE:
            raise ValueError(
                f"images of {images.shape[-2]}x{images.shape[-1]} are smaller than SSIM's window "
                f"of {SSIM_SIDE}x{SSIM_SIDE}, by which inversions are scored; enlarge them first"
            )
        for spec in specs:
            outside = [label for label in spec.labels if not 0 <= label < self.n_classes]
            if outside:
                raise ValueError(
                    f"run {spec.run} has label {outside[0]}, which is none of the classes 0 to "
                    f"{self.n_classes - 1}; set n_classes to the number of classes"
                )
            self._check_class(min(spec.labels.count(label) for label in range(self.n_classes)))


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


def _by_run(found: Inverted, n_runs: int) -> list[Inverted]:
    parts = [values.unflatten(0, (n_runs, -1)) for values in vars(found).values()]
    return [Inverted(*values) for values in zip(*parts, strict=True)]


def _joined(pieces: Sequence[Inverted]) -> Inverted:
    values = zip(*(vars(piece).values() for piece in pieces), strict=True)
    return Inverted(*(torch.cat(same) for same in values))


PER_PARAMETER, PER_PIXEL, PER_ACTIVATION, PER_WIDEST = 7.0, 3.0, 3.5, 4.0
PER_DEFENDED_FEATURE, PER_FEATURE, PER_ATTACKED_PIXEL, PER_SCORED = 12.0, 6.0, 12.0, 14.0


def inversion_bytes(experiment: Inversion, n_images: int, shape: Shape) -> int:
    """Bytes of device memory that each run of a stack takes at most; `shape` is (c, h, w).

    From counting live tensors, library workspaces left out, the largest of four. With P parameters,
    d numbers of an image and u of its activations, poolings' inputs counted, m at the cut: training
    7 P and, for each image of a batch, 3 d, 3.5 u and, with a defence, 12 m; evaluation 4 times the
    widest activations of the images it takes at once; the attack 12 d, 3.5 u up to the cut and 6 m
    for each start of each image at once, 6 m for each image; the scores 14 d for each image. Beside
    each of these P and 3 d for each image of the run.
    """
    model = experiment.victim.on(shape, experiment.n_classes)
    before, after = activations(experiment, model)
    d, m = math.prod(shape), model.n_features
    n_batch = min(n_images, experiment.training.per_class * experiment.n_classes)
    n_attacked = experiment.held_out * experiment.n_classes or n_images
    attack = experiment.attack
    n_starts = len(attack.starts) if isinstance(attack, StrongInversion) else 1
    rows = n_starts * min(n_attacked, INVERTED_AT_ONCE)
    kept = sum(map(math.prod, model.tensor_shapes.values()))
    defended = 0.0 if experiment.defence is None else PER_DEFENDED_FEATURE * m
    training = PER_PARAMETER * kept + n_batch * (
        PER_ACTIVATION * sum(before + after) + defended + PER_PIXEL * d
    )
    evaluation = PER_WIDEST * max(before + after) * min(n_images, IMAGES_AT_ONCE)
    inversion = rows * (PER_ATTACKED_PIXEL * d + PER_ACTIVATION * sum(before) + PER_FEATURE * m)
    most = max(
        training,
        evaluation,
        inversion + PER_FEATURE * n_attacked * m,
        PER_SCORED * n_images * d,
    )
    return int(DTYPES[experiment.dtype].itemsize * (most + kept + PER_PIXEL * n_images * d))


def activations(experiment: Inversion, model: SplitModel) -> tuple[list[int], list[int]]:
    """Numbers that each layer up to the cut gives for one image, and those that each one after it
    does; of a convolution before and after its pooling."""
    victim = experiment.victim
    if not isinstance(victim, LeNet5):
        widths = [*victim.widths, experiment.n_classes]
        return widths[: victim.cut], widths[victim.cut :]
    layers = []
    sides = [side + (4 if model.shape[1:] == (28, 28) else 0) for side in model.shape[1:]]
    for channels in (6, 16):
        sides = [side - KERNEL + 1 for side in sides]
        pooled = [side // 2 for side in sides]
        layers.append([channels * math.prod(sides), channels * math.prod(pooled)])
        sides = pooled
    layers += [[120], [84], [experiment.n_classes]]
    return list(chain(*layers[: victim.cut])), list(chain(*layers[victim.cut :]))
