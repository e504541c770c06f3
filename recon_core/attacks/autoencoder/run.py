"""The `autoencoder` family: overfit autoencoders, recover their training images from degraded ones.

One run: train an autoencoder on the run's images until its loss is at a level, degrade every image
by every mask, recover each by the attack, compare it with the image that it was degraded from
(paper 000). An autoencoder has no labels; those of the images are carried along.

What the attack gives is a picture: nothing was subtracted from the images, so `mean_image` is 0,
which says that a reconstruction has a scale of its own (`recon_core.matching.fit_to_range`).

How runs share a machine: on a GPU the trainings of a batch are one stack, and the attack on each
victim is a batch of all its degraded images. On a CPU as many runs go side by side as torch has
threads. Products and convolutions are in full float32: a loss of 1e-8 is not to be had in TF32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.autoencoder.results import (
    DegradedImages,
    Learned,
    degraded_images,
    result_of,
)
from recon_core.attacks.plug_and_play import Degraded, Iteration, KnownMask, Recovered, UnknownMask
from recon_core.attacks.run_sharing import kept_or_trained, share_attacks, share_runs
from recon_core.augment import augment_images
from recon_core.degradation import MASKS
from recon_core.restore.precision import float32_arithmetic
from recon_core.tagged import Tagged
from recon_core.threads import Shares, share_of
from recon_core.types import Progress, RunResult, RunSpec, Victims, no_progress
from recon_core.victims.autoencoder import (
    Autoencoder,
    FullyConnected,
    Model,
    Shape,
    initial_weights,
)
from recon_core.victims.autoencoder_training import (
    AutoencoderTraining,
    Checkpoint,
    Overfitted,
    train_autoencoders,
)

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SAMPLES_AT_ONCE = 1024
"""Degraded images that are recovered as one batch; bounds memory."""

PlugAndPlay = UnknownMask | KnownMask | NoiseAware | Iteration
"""Any method of recovery; `kind` tells them apart."""


@dataclass(frozen=True)
class KnownAutoencoder:
    """One trained autoencoder at the loss that is attacked, or where it ended if it is not `ok`."""

    model: Model
    checkpoint: Checkpoint
    ok: bool
    diverged: bool

    @classmethod
    def of(cls, model: Model, trained: Overfitted, level: float) -> KnownAutoencoder:
        """What became of a training to `level`."""
        reached = trained.at(level)
        return cls(model, reached or trained.last, reached is not None, trained.diverged)

    def f(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """The autoencoder, as the black box that an attack sees."""
        return self.model.forward(self.checkpoint.weights, x.unsqueeze(0))[0]

    def tensors(self) -> dict[str, Tensor]:
        """All of it, on the CPU, to be kept."""
        weights = {f"weights/{name}": t.cpu() for name, t in self.checkpoint.weights.items()}
        numbers = [self.checkpoint.loss, self.checkpoint.epoch, self.ok, self.diverged]
        return {**weights, "end": torch.tensor(numbers, dtype=torch.float64)}

    @classmethod
    def from_tensors(
        cls, model: Model, tensors: Mapping[str, Tensor], device: torch.device
    ) -> KnownAutoencoder:
        """What `tensors` gave."""
        weights = {name: tensors[f"weights/{name}"].to(device) for name in model.tensor_shapes}
        loss, epoch, ok, diverged = tensors["end"].tolist()
        return cls(model, Checkpoint(weights, loss, int(epoch)), bool(ok), bool(diverged))


@dataclass(frozen=True, kw_only=True)
class AutoencoderRecovery:
    """Settings of a run. Defaults are those of 000's fully connected autoencoder of 10 layers.

    `level`: the loss whose checkpoint is attacked, one of `training.levels`, by default the last;
    no run trains beyond it. A victim that does not get there is attacked where it ended, and its
    run is `unfitted`. `masks`: names of `recon_core.degradation.MASKS`; each run draws its own, one
    for all its images. `sigma`: the standard deviation of the noise, of which no attack is told.
    `augment_p`: as in the other families; 000 has none. `keep`: pairs of confident recoveries only,
    or of all. A recovery is confident if its SSIM to the image that it was degraded from is above
    `confident_ssim` and at least `confident_gap` above that to any other image of the run.
    """

    family: Literal["autoencoder"] = "autoencoder"
    augment_p: float = 0.0
    victim: Annotated[Autoencoder, Tagged("kind")] = field(default_factory=FullyConnected)
    training: AutoencoderTraining = field(default_factory=AutoencoderTraining)
    level: float | None = None
    masks: tuple[str, ...] = MASKS
    sigma: float = 0.0
    attack: Annotated[PlugAndPlay, Tagged("kind")] = field(default_factory=UnknownMask)
    keep: Literal["confident", "all"] = "confident"
    confident_ssim: float = 0.4
    confident_gap: float = 0.05
    dtype: Literal["float32", "float64"] = "float32"
    n_labels: ClassVar[None] = None  # images are drawn whatever their label
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not 0 <= self.augment_p <= 1:
            raise ValueError(f"augment_p={self.augment_p} is not a probability in [0, 1]")
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
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ValueError(f"sigma={self.sigma} is not a standard deviation; 0 is no noise")
        if self.sigma and isinstance(self.attack, KnownMask) and not self.attack.noisy:
            raise ValueError(
                f"sigma={self.sigma} with attack.noisy=false, which puts the known pixels back "
                "with their noise; set attack.noisy to true"
            )

    def check_sweep(self, attacks_per_victim: int) -> None:
        """Accepts any number: runs on one victim draw masks, noise and starts of their own."""
        del attacks_per_victim

    @property
    def to_level(self) -> AutoencoderTraining:
        """The training, which ends at the level that is attacked."""
        levels = self.training.levels
        last = len(levels) if self.level is None else levels.index(self.level) + 1
        return replace(self.training, levels=levels[:last])

    def run_batch(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        *,
        device: torch.device,
        progress: Progress = no_progress,
        victims: Victims | None = None,
    ) -> list[RunResult]:
        """Train and attack R victims; one result per spec, in order.

        `images[i]` are the images of `specs[i]`, before augmentation. On a GPU the trainings are
        one stack, equal to rounding whatever it holds. On a CPU a run is bit for bit the same
        whatever it is batched with, given that torch has one thread; with more, runs of a batch go
        side by side on one thread each. Specs with the same victim, which follow each other, are
        attacks on one network; it is taken from `victims`, if it is there, and put there once it is
        trained. Raises ValueError if a spec has another number of images than the batch, or if the
        images do not suit the network.
        """
        check_batch(specs, images)
        with float32_arithmetic("float32", device):
            return share_runs(
                specs,
                images,
                run_stack=self._run_stack,
                run_sweep=partial(self._run_sweep, victims),
                has_keeper=victims is not None,
                device=device,
                progress=progress,
            )

    def train_victim(
        self,
        spec: RunSpec,
        images: UInt8[Tensor, "n c h w"],
        *,
        device: torch.device,
        victims: Victims | None = None,
        progress: Progress = no_progress,
    ) -> KnownAutoencoder:
        """The victim of a run of a sweep, as `run_batch` trains it; taken from `victims`, if it is
        there, and put there otherwise. Raises ValueError as `run_batch` does."""
        check_batch([spec], images[None])
        with float32_arithmetic("float32", device):
            targets = self._learn(spec, images).targets
            return self._shared_victim(spec, targets, device, victims, progress)

    def _run_stack(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        """Runs with a victim of their own, trained at once."""
        learned = [self._learn(spec, own) for spec, own in zip(specs, images, strict=True)]
        targets = torch.stack([own.targets for own in learned])
        trained = self._trained(specs, targets, device, share_of(progress, 0.0, 0.5))
        shares = Shares(share_of(progress, 0.5, 1.0), [1 / len(specs)] * len(specs))
        return [
            self._attacked(spec, victim, own, device, shares.of(i))
            for i, (spec, victim, own) in enumerate(zip(specs, trained, learned, strict=True))
        ]

    def _run_sweep(
        self,
        victims: Victims | None,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        """Runs that attack one victim: it is trained once."""
        learned = self._learn(specs[0], images[0])
        half = share_of(progress, 0.0, 0.5)
        victim = self._shared_victim(specs[0], learned.targets, device, victims, half)

        def attack(stack: Sequence[RunSpec], part: Progress) -> RunResult:
            return self._attacked(stack[0], victim, learned, device, part)

        alone = [[spec] for spec in specs]
        rest = share_of(progress, 0.5, 1.0)
        return share_attacks(alone, attack, device=device, progress=rest)

    def _shared_victim(
        self,
        spec: RunSpec,
        targets: UInt8[Tensor, "n c h w"],
        device: torch.device,
        victims: Victims | None,
        progress: Progress,
    ) -> KnownAutoencoder:
        model = self.victim.on(_shape(targets))
        return kept_or_trained(
            spec,
            victims,
            read=lambda known: KnownAutoencoder.from_tensors(model, known, device),
            train=lambda: self._trained([spec], targets[None], device, progress)[0],
            progress=progress,
        )

    def _trained(
        self,
        specs: Sequence[RunSpec],
        targets: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[KnownAutoencoder]:
        """The victims of R runs, trained at once."""
        dtype, n_images = DTYPES[self.dtype], targets.shape[1]
        model = self.victim.on(_shape(targets[0]))

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

    def _attacked(
        self,
        spec: RunSpec,
        victim: KnownAutoencoder,
        learned: Learned,
        device: torch.device,
        progress: Progress,
    ) -> RunResult:
        """The result of one run on a victim."""
        x = learned.targets.to(DTYPES[self.dtype]) / 255
        recovered = None
        if not victim.diverged:
            degraded = degraded_images(spec, x, masks=self.masks, sigma=self.sigma)
            recovered = self._recovered(spec, victim, degraded, device, progress)
        progress(1.0)
        return result_of(self, spec, victim=victim, learned=learned, recovered=recovered)

    def _recovered(
        self,
        spec: RunSpec,
        victim: KnownAutoencoder,
        degraded: DegradedImages,
        device: torch.device,
        progress: Progress,
    ) -> Recovered:
        """The attack on all degraded images of a run, so many at once."""
        pieces = []
        for rows in torch.arange(len(degraded.y)).split(SAMPLES_AT_ONCE):
            given = Degraded(
                y=degraded.y[rows].to(device),
                mask=degraded.mask[rows].to(device) if self.attack.kind == "known" else None,
                generators=tuple(spec.generator(f"start {row}") for row in rows.tolist()),
            )
            pieces.append(self.attack.recover(victim.f, given))
            progress((int(rows[-1]) + 1) / len(degraded.y))
        return Recovered(
            x=torch.cat([piece.x for piece in pieces]),
            mask=torch.cat([piece.mask for piece in pieces]),
            n_applied=torch.cat([piece.n_applied for piece in pieces]),
            ending=torch.cat([piece.ending for piece in pieces]),
        )

    def _learn(self, spec: RunSpec, images: UInt8[Tensor, "n c h w"]) -> Learned:
        generator = spec.victim_generator("augment")
        return Learned(*augment_images(images, p=self.augment_p, generator=generator))


def check_batch(specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"]) -> None:
    """Raises ValueError if the runs cannot be one batch."""
    if len(specs) != len(images):
        raise ValueError(f"{len(specs)} specs came with images of {len(images)} runs")
    for spec in specs:
        if len(spec.image_ids) != images.shape[1]:
            raise ValueError(
                f"run {spec.run} plans {len(spec.image_ids)} images, the batch has "
                f"{images.shape[1]}; runs of one batch must have equally many"
            )


def _shape(targets: UInt8[Tensor, "n c h w"]) -> Shape:
    c, h, w = targets.shape[1:]
    return c, h, w
