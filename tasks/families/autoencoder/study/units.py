"""Units of a study of recovery: train one victim, or recover images from one at one loss.

Weights are stored where a training passes a loss. Its state is saved every few minutes, so a killed
training goes on from there and ends bit for bit as if it had not been (on one kind of machine, with
one number of threads). The methods get all masks and images of a group as one batch; a unit makes
arrays `GROUP/METHOD/NAME`: `mse`, `n_applied`, `ending`, `mask_right`, each (masks, images), and
the `picture` and estimated `mask` of the first images.

ROOT/victims/NAME-LEVEL.safetensors   weights where a victim passed a loss, and its architecture
ROOT/victims/NAME/                outcome of its training, and its state during it
ROOT/inpainter/KEY/               the generic inpainter, a folder per set of images
ROOT/cells/KEY.json               results of the methods for one victim at one loss
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.attacks.autoencoder.preflight import reconstruction_errors, spectral_radii
from recon_core.attacks.plug_and_play import Degraded, Function, KnownMask, Recovered, UnknownMask
from recon_core.degradation import check_degraded, degrade
from recon_core.restore.edm import Denoiser
from recon_core.restore.inpaint import biharmonic
from recon_core.similarity import errors
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress, seeded_generator
from recon_core.victims.autoencoder import Model, Weights, initial_weights, n_parameters, single
from recon_core.victims.autoencoder_training import Checkpoint, Overfitted, train_autoencoders
from storage.checkpoints import save_checkpoint
from tasks.families.autoencoder.study.settings import STORED, Methods, RecoveryVictim
from tasks.study.products import (
    NOTHING,
    Arrays,
    Folder,
    Ids,
    Job,
    Pixels,
    hash_of,
    key_of,
    loaded,
    read_weights,
    sha256,
    write_weights,
)
from tasks.training.inpainter import Inpainter, train_inpainter

STATE_SECONDS = 120.0
"""Seconds between two saves of a training's state."""
N_RADII = 8
"""Training images, and test images, whose contraction is estimated."""
NOT_OF_TRAINING = ("name", "title", "gamma", "start", "data", "size", "n_images")
"""Settings of a victim that do not affect its training, except through its images."""
ESTIMATE_H = ("unknown", "noise_aware")
"""Methods that estimate the mask."""
KNOW_MASK = ("known", "ddnm", "biharmonic")
VALUES_AT_ONCE = 2**26
"""Most pixels of a batch of samples."""
ROWS_OF_F = 1024
"""Most images in one call of f."""


class VictimFolder(Folder):
    """The paths of a study, and its products by key."""

    name: ClassVar[str] = "cells"

    def victim(self, name: str) -> Path:
        return self.root / "victims" / name

    def weights(self, name: str, level: float | None) -> Path:
        """Path of a victim's weights at a loss, or at the end of its training (None)."""
        which = "last" if level is None else f"{level:g}"
        return self.root / "victims" / f"{name}-{which}.safetensors"

    def trained(self, name: str, key: str) -> dict[str, Any] | None:
        """Outcome of a victim's training; None unless it ended with this key and its weights are
        intact."""
        saved = loaded(self.victim(name), "trained")
        if saved is None or saved[1].get("key") != key:
            return None
        for level in saved[1]["levels"]:
            path = self.weights(name, level["level"])
            if not path.is_file() or sha256(path.read_bytes()) != level["sha256"]:
                return None
        return saved[1]


@dataclass(frozen=True, kw_only=True)
class RecoveryJob(Job):
    """A job of a study of recovery."""

    @property
    def folder(self) -> VictimFolder:
        return VictimFolder(Path(self.root))


@dataclass(frozen=True, kw_only=True)
class TrainJob(RecoveryJob):
    """The training of a victim on images (n, c, h, w); `control`: images that it does not see."""

    victim: RecoveryVictim
    images: Pixels
    control: Pixels
    root_seed: int
    state_seconds: float = STATE_SECONDS

    @property
    def key(self) -> str:
        settings = {k: v for k, v in asdict(self.victim).items() if k not in NOT_OF_TRAINING}
        return key_of([settings, hash_of(self.images), hash_of(self.control), self.root_seed])

    def run(self, progress: Progress = no_progress) -> dict[str, Any]:
        """Trains the victim as far as it is not trained yet; what became of it."""
        folder, victim = self.folder, self.victim
        if (done := folder.trained(victim.name, self.key)) is not None:
            return done
        arrays, meta = self.make(progress)
        save_checkpoint(folder.victim(victim.name), "trained", arrays, meta)
        for path in folder.victim(victim.name).glob("state*"):
            path.unlink()
        return meta

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        course = _Course(self)
        result = course.train(progress)
        meta = {
            "key": self.key,
            "n_parameters": n_parameters(course.model),
            "levels": [course.kept(level, at) for level, at in result.levels.items()],
            "last": {"loss": _finite(result.last.loss), "epoch": result.last.epoch},
            "diverged": result.diverged,
            "test_loss": None,
            "contraction": None,
        }
        if not result.diverged:
            course.kept(None, result.last)
            meta |= course.asked(result.last.weights)
        return NOTHING, meta | {"seconds": round(course.seconds, 3)}


class _Course:
    """A training in progress, and its seconds of work over all attempts."""

    def __init__(self, job: TrainJob) -> None:
        self.job, self.place = job, job.folder.victim(job.victim.name)
        device = torch.device(job.device)
        self.x = (torch.from_numpy(job.images).float() / 255).to(device)
        self.control = (torch.from_numpy(job.control).float() / 255).to(device)
        c, h, w = job.images.shape[1:]
        self.model: Model = job.victim.network.on((c, h, w))
        generator = seeded_generator(job.root_seed, 0, "autoencoder's start")
        start = initial_weights(self.model, [generator], dtype=torch.float32)
        self.start = {name: tensor.to(device) for name, tensor in start.items()}
        self.started, self.before = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def train(self, progress: Progress) -> Overfitted:
        """Train to the end, from the last saved state."""
        job, every = self.job, 1
        state: dict[str, Tensor] | None = None
        saved = loaded(self.place, "state")
        if saved is not None and saved[1].get("key") == job.key:
            self.before = float(saved[1]["seconds"])
            state = {name: torch.from_numpy(array.copy()) for name, array in saved[0].items()}

        def shuffle(_run: int, epoch: int) -> Tensor:
            generator = seeded_generator(job.root_seed, epoch, "autoencoder's order")
            return torch.randperm(len(self.x), generator=generator)

        def save(state: Mapping[str, Tensor]) -> None:
            arrays = {name: np.asarray(tensor.numpy()) for name, tensor in state.items()}
            meta = {"key": job.key, "seconds": round(self.seconds, 3)}
            save_checkpoint(self.place, "state", arrays, meta)

        train = partial(
            train_autoencoders, self.model, self.start, self.x.unsqueeze(0), shuffle=shuffle
        )
        training = job.victim.training
        if job.state_seconds > 0:
            started = time.perf_counter()
            train(training=replace(training, epochs=3, check_every=3))
            epoch_s = (time.perf_counter() - started) / 3
            every = max(1, int(job.state_seconds / max(epoch_s, 1e-6)))
        (result,) = train(
            training=training, progress=progress, state=state, on_state=save, state_every=every
        )
        return result

    def kept(self, level: float | None, checkpoint: Checkpoint) -> dict[str, Any]:
        """Write the weights of a loss; return facts of them."""
        victim = self.job.victim
        passed = {"loss": checkpoint.loss, "epoch": checkpoint.epoch}
        about = {
            "kind": "autoencoder",
            "network": asdict(victim.network),
            "shape": list(self.model.shape),
            "victim": victim.name,
            "level": "last" if level is None else f"{level:g}",
            **passed,
        }
        path = self.job.folder.weights(victim.name, level)
        return {"level": level, **passed, "sha256": write_weights(path, checkpoint.weights, about)}

    def asked(self, weights: Weights) -> dict[str, Any]:
        """The loss on control images, and the contraction of f around images of both kinds."""
        on_device = {name: tensor.to(self.x.device) for name, tensor in weights.items()}

        @torch.no_grad()
        def f(x: Tensor) -> Tensor:
            return self.model.forward(on_device, x.unsqueeze(0))[0]

        radii: dict[str, list[float | None]] = {}
        for side, x in (("train", self.x), ("test", self.control)):
            few, seed = x[:N_RADII], self.job.root_seed
            drawn = [seeded_generator(seed, k, f"radius {side}") for k in range(len(few))]
            radii[side] = [*map(_finite, spectral_radii(f, few, drawn).tolist())] if drawn else []
        errors = [reconstruction_errors(f, part) for part in self.control.split(256)]
        test_loss = float(torch.cat(errors).mean()) if errors else None
        return {"test_loss": test_loss, "contraction": radii}


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


@dataclass(frozen=True)
class Group:
    """Images that are degraded alike: by every mask, and with the same noise.

    `ids`: the images' rows in their source, which seed their random numbers. `split`: "train" for
    the victim's images, "test" for control images.
    """

    split: str
    sigma: float
    gamma: float
    images: Pixels
    ids: Ids
    masks: Mapping[str, npt.NDArray[np.bool_]]

    @property
    def name(self) -> str:
        return f"{self.split} {self.sigma:g}"

    def described(self) -> list[Any]:
        """Describe all that the results depend on, for a key."""
        masks = {name: hash_of(mask) for name, mask in self.masks.items()}
        return [self.name, self.gamma, hash_of(self.images, self.ids), masks]


@dataclass(frozen=True, kw_only=True)
class RecoverJob(RecoveryJob):
    """Recovery by every method from one victim at one loss; `trained`: sha256 of its weights."""

    victim: RecoveryVictim
    level: float
    trained: str
    groups: tuple[Group, ...]
    methods: Methods
    root_seed: int

    @property
    def key(self) -> str:
        settings = {name: asdict(method) for name, method in self.methods.of_victims.items()}
        network = asdict(self.victim.network)
        groups = [group.described() for group in self.groups]
        start = self.victim.start
        return key_of([self.trained, network, start, settings, groups, self.root_seed])

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Run all methods on all groups: arrays, and seconds by group and method."""
        tensors = read_weights(self.folder.weights(self.victim.name, self.level))
        f = function_of(self.victim, tensors, self.groups[0].images.shape[1:], self.device)
        methods = self.methods.of_victims
        arrays: Arrays = {}
        seconds: dict[str, float] = {}
        for k, group in enumerate(self.groups):
            batch = Batch(group, self.root_seed, self.device)
            for m, (name, method) in enumerate(methods.items()):
                changes: dict[str, Any] = {}
                if isinstance(method, UnknownMask):
                    changes = {"gamma": group.gamma, "start": self.victim.start}
                elif isinstance(method, KnownMask):
                    changes = {"gamma": group.gamma, "noisy": group.sigma > 0}
                recover = partial(replace(method, **changes).recover, f)
                found, seconds[f"{group.name}/{name}"] = batch.ask(recover, name)
                arrays |= found
                progress((k * len(methods) + m + 1) / (len(self.groups) * len(methods)))
        return arrays, {"seconds": seconds}


@dataclass(frozen=True, kw_only=True)
class TrainInpainterJob(RecoveryJob):
    """Training of the generic method's diffusion model on images (n, 3, h, w)."""

    inpainter: Inpainter
    images: Pixels

    @property
    def prior(self) -> str:
        """sha256 of all that the model depends on."""
        return key_of([asdict(self.inpainter), hash_of(self.images)])

    @property
    def key(self) -> str:
        return key_of(["inpainter", self.prior])

    def trained(self, progress: Progress = no_progress) -> Denoiser:
        """Train the model to its end and return it. Raises ArithmeticError if it diverges."""
        return train_inpainter(
            self.inpainter,
            self.images,
            out=self.folder.root / "inpainter" / self.prior[:16],
            device=self.device,
            on_step=lambda step, n_steps, _loss: progress(step / n_steps),
        )

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        started = time.perf_counter()
        self.trained(progress)
        return NOTHING, {"seconds": round(time.perf_counter() - started, 3)}


@dataclass(frozen=True, kw_only=True)
class InpaintJob(RecoveryJob):
    """The generic methods on a group of images; `inpainter`: the training of their model."""

    group: Group
    methods: Methods
    inpainter: TrainInpainterJob | None
    root_seed: int

    @property
    def key(self) -> str:
        ddnm = None if self.methods.ddnm is None else asdict(self.methods.ddnm)
        prior = None if ddnm is None or self.inpainter is None else self.inpainter.prior
        group = self.group.described()
        return key_of([ddnm, prior, self.methods.biharmonic, group, self.root_seed])

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Run all generic methods: arrays, and seconds by group and method."""
        batch = Batch(self.group, self.root_seed, self.device)
        arrays: Arrays = {}
        seconds: dict[str, float] = {}
        n_methods = len(self.methods.generic)
        for done, name in enumerate(self.methods.generic):
            share = share_of(progress, done / n_methods, (done + 1) / n_methods)
            found, seconds[f"{self.group.name}/{name}"] = batch.ask(self._method(share, name), name)
            arrays |= found
        return arrays, {"seconds": seconds}

    def _method(self, progress: Progress, name: str) -> Callable[[Degraded], Tensor]:
        ddnm, prior = self.methods.ddnm, self.inpainter
        denoiser = prior.trained() if name == "ddnm" and prior is not None else None

        def recover(given: Degraded) -> Tensor:
            assert given.mask is not None
            if denoiser is None or ddnm is None:
                return biharmonic(given.y, given.mask)
            return ddnm.inpaint(
                denoiser,
                given.y,
                given.mask,
                generators=given.generators,
                sigma=self.group.sigma,
                progress=progress,
            )

        return recover


def function_of(
    victim: RecoveryVictim, tensors: Arrays, shape: Sequence[int], device: str
) -> Function:
    """The autoencoder as a function of a batch, differentiable."""
    c, h, w = shape
    model = victim.network.on((c, h, w))
    weights = single(model, {name: torch.from_numpy(t).to(device) for name, t in tensors.items()})

    def f(x: Tensor) -> Tensor:
        parts = [model.forward(weights, part.unsqueeze(0))[0] for part in x.split(ROWS_OF_F)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return f


class Batch:
    """A group's images under all its masks: sample k is image k % n under mask k // n."""

    def __init__(self, group: Group, root_seed: int, device: str) -> None:
        self.group, self.root_seed, self.n = group, root_seed, len(group.images)
        self.original = (torch.from_numpy(group.images).float() / 255).to(device)
        masks = [torch.from_numpy(mask).to(device) for mask in group.masks.values()]
        self.masks: Bool[Tensor, "m h w"] = torch.stack(masks)
        degraded = []
        for k, mask in enumerate(masks):
            ends = k * self.n, (k + 1) * self.n
            noise = self._generators("noise", *ends) if group.sigma else ()
            degraded.append(degrade(self.original, mask, sigma=group.sigma, generators=noise))
        self.y: Float[Tensor, "b c h w"] = torch.cat(degraded)
        check_degraded(self.y, group.sigma)

    def _generators(self, purpose: str, first: int, end: int) -> tuple[torch.Generator, ...]:
        """One generator per sample, seeded by image and mask alone."""
        names, generators = list(self.group.masks), []
        for k in range(first, end):
            mask, row = divmod(k, self.n)
            words = f"{purpose} {self.group.split} {names[mask]}"
            generators.append(seeded_generator(self.root_seed, int(self.group.ids[row]), words))
        return tuple(generators)

    def ask(
        self, method: Callable[[Degraded], Recovered | Tensor], name: str
    ) -> tuple[Arrays, float]:
        """Run a method: arrays named after the group and the method, and its seconds. A sample's
        result does not depend on its batch."""
        started = time.perf_counter()
        rows_at_once = max(1, VALUES_AT_ONCE // self.y[0].numel())
        parts: list[dict[str, Tensor]] = []
        for first in range(0, len(self.y), rows_at_once):
            y = self.y[first : first + rows_at_once]
            sample = torch.arange(first, first + len(y), device=y.device)
            truth = self.masks[sample // self.n].unsqueeze(1).expand_as(y)
            result = method(
                Degraded(
                    y=y,
                    mask=truth if name in KNOW_MASK else None,
                    generators=self._generators("start", first, first + len(y)),
                )
            )
            recovered = result.x if isinstance(result, Recovered) else result
            images = sample % self.n
            shown = images < STORED
            scores = {
                "mse": errors(recovered, self.original[images]),
                "picture": (recovered[shown].clamp(0, 1) * 255).round().to(torch.uint8),
            }
            if isinstance(result, Recovered):
                scores |= {"n_applied": result.n_applied, "ending": result.ending}
                if name in ESTIMATE_H:
                    scores["mask_right"] = (result.mask == truth).flatten(1).double().mean(1)
                    scores["mask"] = result.mask[shown].double().mean(1) > 0.5
            parts.append(scores)
        arrays: Arrays = {}
        for key in parts[0]:
            joined = np.concatenate([part[key].cpu().numpy() for part in parts])
            by_mask = joined.reshape(len(self.masks), -1, *joined.shape[1:])
            arrays[f"{self.group.name}/{name}/{key}"] = by_mask
        return arrays, round(time.perf_counter() - started, 3)
