"""The `autoencoder` family: overfit autoencoders, recover their training images from degraded ones.

One run: train an autoencoder until its loss is at a level, degrade every image by every mask,
recover each, compare it with the image that it was degraded from (the autoencoder paper). In full
float32: a loss of 1e-8 is not to be had in TF32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.candidate_matching import ROWS
from recon_core.attacks.family_run import DTYPES, Learned, TrainedRun, run_result
from recon_core.attacks.plug_and_play import (
    Degraded,
    Ending,
    Iteration,
    KnownMask,
    Recovered,
    UnknownMask,
)
from recon_core.degradation import MASKS, degrade, mask_pattern
from recon_core.strict import NonNegative, Tagged
from recon_core.threads import Shares
from recon_core.types import Outcome, Progress, RunResult, RunSpec
from recon_core.victims.autoencoder import (
    Autoencoder,
    FullyConnected,
    Model,
    Shape,
    UNet,
    initial_weights,
    n_parameters,
)
from recon_core.victims.autoencoder_training import (
    ROWS_AT_ONCE,
    AutoencoderTraining,
    Checkpoint,
    Overfitted,
    train_autoencoders,
)


@dataclass(frozen=True)
class KnownAutoencoder:
    """One trained autoencoder at the loss that is attacked, or where it ended if it is not `ok`."""

    model: Model
    checkpoint: Checkpoint
    ok: bool
    diverged: bool

    @classmethod
    def of(cls, model: Model, trained: Overfitted, level: float) -> KnownAutoencoder:
        reached = trained.levels.get(level)
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


def _residual(victim: KnownAutoencoder, recovered: Recovered) -> float:
    """The mean square of f(x) - x of the recoveries for which f was finite."""
    total, n = 0.0, 0
    for x, ending in zip(recovered.x.split(ROWS), recovered.ending.split(ROWS), strict=True):
        error = (victim.f(x) - x)[ending != Ending.NONFINITE].double()
        total += float(error.square().sum())
        n += error.numel()
    return total / n


SAMPLES_AT_ONCE = 1024
"""Degraded images that are recovered as one batch; bounds memory."""

PlugAndPlay = UnknownMask | KnownMask | NoiseAware | Iteration
"""Any method of recovery; `kind` tells them apart."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderRecovery(TrainedRun[Learned, KnownAutoencoder]):
    """Settings of a run. Defaults: the autoencoder paper's fully connected one of 10 layers.

    `level`: the loss whose checkpoint is attacked, one of `training.levels`, by default the last;
    no run trains beyond it. A victim that does not get there is attacked where it ended, and its
    run is `unfitted`. `masks`: names of `recon_core.degradation.MASKS`; each run draws its own, one
    for all its images. `sigma`: the standard deviation of the noise, of which no attack is told.
    `keep`: a recovery is paired with the image that it was degraded from.
    """

    family: Literal["autoencoder"] = "autoencoder"
    victim: Annotated[Autoencoder, Tagged("kind")] = field(default_factory=FullyConnected)
    training: AutoencoderTraining = field(default_factory=AutoencoderTraining)
    level: float | None = None
    masks: tuple[str, ...] = MASKS
    sigma: NonNegative = 0.0
    attack: Annotated[PlugAndPlay, Tagged("kind")] = field(default_factory=UnknownMask)
    dtype: Literal["float32", "float64"] = "float32"
    task: ClassVar[str] = "images in, the same images out"
    after_victims: ClassVar[tuple[str, ...]] = ("masks", "sigma")
    attacker_knows: ClassVar[str] = (
        "The attack is given an autoencoder, of which it only asks for f(x), and one degraded "
        "copy of each training picture, with many pixels erased. It searches for a picture that"
        " the autoencoder leaves as it is and that agrees with what is left of the copy."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level is not None and self.level not in self.training.levels:
            raise ValueError(
                f"level={self.level:g} is not one of training.levels="
                f"{tuple(self.training.levels)}; name one of them, or null for the last"
            )
        unknown = [name for name in self.masks if name not in MASKS]
        if unknown or not self.masks or len(set(self.masks)) < len(self.masks):
            raise ValueError(
                f"masks={','.join(self.masks)!r} must be different ones of {', '.join(MASKS)}, "
                "at least one"
            )
        if self.sigma and isinstance(self.attack, KnownMask) and not self.attack.noisy:
            raise ValueError(
                f"sigma={self.sigma} with attack.noisy=false, which puts the known pixels back "
                "with their noise; set attack.noisy to true"
            )

    @property
    def to_level(self) -> AutoencoderTraining:
        levels = self.training.levels
        last = len(levels) if self.level is None else levels.index(self.level) + 1
        return replace(self.training, levels=levels[:last])

    def sweep_size(self, device: torch.device) -> int:
        del device
        return 1

    def learn(self, spec: RunSpec, images: UInt8[Tensor, "n c h w"]) -> Learned:
        return self.augmented(spec, images)

    def read_victim(
        self, learned: Learned, tensors: Mapping[str, Tensor], device: torch.device
    ) -> KnownAutoencoder:
        model = self.victim.on(learned.shape)
        return KnownAutoencoder.from_tensors(model, tensors, device)

    def train_runs(
        self,
        specs: Sequence[RunSpec],
        learned: Sequence[Learned],
        device: torch.device,
        progress: Progress,
    ) -> list[KnownAutoencoder]:
        targets = torch.stack([own.targets for own in learned])
        dtype, n_images = DTYPES[self.dtype], targets.shape[1]
        model = self.victim.on(learned[0].shape)

        def shuffle(run: int, epoch: int) -> Tensor:
            generator = specs[run].victim_generator(f"minibatches {epoch}")
            return torch.randperm(n_images, generator=generator)

        trained = train_autoencoders(
            model,
            initial_weights(model, [s.victim_generator("victim") for s in specs], dtype=dtype),
            targets.to(device=device, dtype=dtype) / 255,
            training=self.to_level,
            shuffle=shuffle,
            progress=progress,
        )
        return [KnownAutoencoder.of(model, one, self.to_level.levels[-1]) for one in trained]

    def attack_runs(
        self,
        specs: Sequence[RunSpec],
        victims: Sequence[KnownAutoencoder],
        learned: Sequence[Learned],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        shares = Shares(progress, [1 / len(specs)] * len(specs))
        results = []
        for i, (spec, victim, own) in enumerate(zip(specs, victims, learned, strict=True)):
            x = own.targets.to(DTYPES[self.dtype]) / 255
            recovered = None
            if not victim.diverged:
                degraded = degraded_images(spec, x, masks=self.masks, sigma=self.sigma)
                recovered = self._recovered(spec, victim, degraded, device, shares.of(i))
            shares.of(i)(1.0)
            results.append(self._result(spec, victim, own, recovered))
        return results

    def _result(
        self, spec: RunSpec, victim: KnownAutoencoder, learned: Learned, recovered: Recovered | None
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
            pairs = self.own_pairs(recovered.x, targets, row, recovered.n_applied)
        return run_result(spec, outcome, targets, learned.augment, stats=stats, pairs=pairs)

    def _recovered(
        self,
        spec: RunSpec,
        victim: KnownAutoencoder,
        degraded: DegradedImages,
        device: torch.device,
        progress: Progress,
    ) -> Recovered:
        pieces = []
        for rows in torch.arange(len(degraded.y)).split(SAMPLES_AT_ONCE):
            given = Degraded(
                y=degraded.y[rows].to(device),
                mask=degraded.mask[rows].to(device) if self.attack.kind == "known" else None,
                generators=tuple(spec.generator(f"start {row}") for row in rows.tolist()),
            )
            pieces.append(self.attack.recover(victim.f, given))
            progress((int(rows[-1]) + 1) / len(degraded.y))
        values = zip(*(vars(piece).values() for piece in pieces), strict=True)
        return Recovered(*(torch.cat(same) for same in values))


PER_PARAMETER, PER_KEPT, PER_PIXEL, PER_ACTIVATION = 8.0, 3.0, 6.0, 3.0
PER_ATTACKED_PIXEL, PER_WIDEST, PER_DEGRADED_PIXEL = 22.0, 4.0, 4.0


def autoencoder_bytes(experiment: AutoencoderRecovery, n_images: int, shape: Shape) -> int:
    """Bytes of device memory that each run of a stack takes at most; `shape` is (c, h, w).

    From counting live tensors, library workspaces left out. With P parameters, x numbers of all
    images and u activations of all images, training holds up to 8 P + 6 x + 3 u numbers; the
    attack, on b degraded images of d pixels at once, 22 b d and 4 b times the widest activations of
    an image, 4 for each degraded pixel of all masks, and 3 P.
    """
    model = experiment.victim.on(shape)
    d, units = math.prod(shape), activations(experiment.victim, shape)
    n_degraded = n_images * len(experiment.masks)
    n_trained = min(n_images, experiment.training.batch_size or n_images)
    n_at_once = min(n_degraded, SAMPLES_AT_ONCE)
    training = (
        PER_PARAMETER * n_parameters(model)
        + PER_PIXEL * n_images * d
        + PER_ACTIVATION * sum(units) * n_trained
        + PER_WIDEST * max(units) * min(n_images, ROWS_AT_ONCE)
    )
    attack = (
        n_at_once * (PER_ATTACKED_PIXEL * d + PER_WIDEST * max(units))
        + PER_DEGRADED_PIXEL * n_degraded * d
    )
    kept = PER_KEPT * n_parameters(model) + n_images * d
    return int(DTYPES[experiment.dtype].itemsize * max(training, kept + attack))


def activations(victim: Autoencoder, shape: Shape) -> list[int]:
    """Numbers that each layer gives for one image."""
    if not isinstance(victim, UNet):
        return [victim.width] * (victim.depth - 1) + [math.prod(shape)]
    units = []
    for name, weight in victim.on(shape).tensor_shapes.items():
        if name.endswith(".weight"):
            level = int(name.split(".")[1]) if name != "out.weight" else 0
            joined = sum(weight[:2])  # what a convolution sees may be joined of two tensors
            units.append(joined * shape[1] * shape[2] // 4**level)
    return units
