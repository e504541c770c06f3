"""One unit of a study of recovery: train one victim, and keep it where it passes a loss.

Every few minutes the training's state is saved, so a killed training goes on from there and ends
bit for bit as if nothing had happened (on one kind of machine, with one number of threads).

ROOT/victims/NAME-LEVEL.safetensors   weights where a victim passed a loss; architecture inside
ROOT/victims/NAME/                what became of its training, and its state while it trains
ROOT/inpainter/KEY/               the generic inpainter, a folder per set of images
ROOT/cells/KEY.json               what methods gave for one victim at one loss
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from recon_core.attacks.autoencoder.preflight import reconstruction_errors, spectral_radii
from recon_core.types import Progress, no_progress, seeded_generator
from recon_core.victims.autoencoder import (
    Model,
    Weights,
    initial_weights,
    n_parameters,
)
from recon_core.victims.autoencoder_training import Checkpoint, Overfitted, train_autoencoders
from storage.checkpoints import save_checkpoint
from tasks.families.autoencoder.study.settings import RecoveryVictim, level_name
from tasks.study.images import Pixels
from tasks.study.products import (
    NOTHING,
    Arrays,
    Folder,
    Job,
    hash_of,
    key_of,
    loaded,
    sha256,
    write_weights,
)

TRAINED, STATE = "trained", "state"
STATE_SECONDS = 120.0
"""Between two saves of a training's state."""
N_RADII = 8
"""Images of each side whose contraction is estimated."""
NOT_OF_TRAINING = ("name", "title", "gamma", "start", "data", "size", "n_images")
"""Settings of a victim on which its training does not depend but for the images."""


class VictimFolder(Folder):
    """The paths of a study, and its products by key."""

    name: ClassVar[str] = "cells"

    def victim(self, name: str) -> Path:
        return self.root / "victims" / name

    def weights(self, name: str, level: float | None) -> Path:
        """Weights of a victim at a loss; None: where its training ended."""
        which = "last" if level is None else level_name(level)
        return self.root / "victims" / f"{name}-{which}.safetensors"

    def inpainter(self, key: str) -> Path:
        return self.root / "inpainter" / key[:16]

    def trained(self, name: str, key: str) -> dict[str, Any] | None:
        """Outcome of a victim's training; None unless it ended with this key and its weights
        are still as they were written."""
        found = loaded(self.victim(name), TRAINED)
        if found is None or found[1].get("key") != key:
            return None
        meta = found[1]
        for level in meta["levels"]:
            path = self.weights(name, level["level"])
            if not path.is_file() or sha256(path.read_bytes()) != level["sha256"]:
                return None
        return meta


@dataclass(frozen=True, kw_only=True)
class RecoveryJob(Job):
    """A job of a study of recovery."""

    @property
    def folder(self) -> VictimFolder:
        return VictimFolder(Path(self.root))


@dataclass(frozen=True, kw_only=True)
class TrainJob(RecoveryJob):
    """A victim and its images (n, c, h, w); `control` are images that it does not see."""

    victim: RecoveryVictim
    images: Pixels
    control: Pixels
    root_seed: int
    state_seconds: float = STATE_SECONDS

    @property
    def key(self) -> str:
        settings = asdict(self.victim)
        settings["network"] = asdict(self.victim.network)
        for name in NOT_OF_TRAINING:
            settings.pop(name)
        return key_of([settings, hash_of(self.images), hash_of(self.control), self.root_seed])

    def run(self, progress: Progress = no_progress) -> dict[str, Any]:
        """Trains the victim as far as it is not trained yet; what became of it."""
        folder, victim = self.folder, self.victim
        if (found := folder.trained(victim.name, self.key)) is not None:
            return found
        arrays, meta = self.make(progress)
        save_checkpoint(folder.victim(victim.name), TRAINED, arrays, meta)
        for path in folder.victim(victim.name).glob(f"{STATE}*"):
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
            "seconds": 0.0,
        }
        if not result.diverged:
            course.kept(None, result.last)
            meta |= course.asked(result.last.weights)
        return NOTHING, meta | {"seconds": round(course.seconds, 3)}


class _Course:
    """A training in progress, and the seconds of work in it over all attempts."""

    def __init__(self, job: TrainJob) -> None:
        self.job, self.place = job, job.folder.victim(job.victim.name)
        self.device = torch.device(job.device)
        self.x = (torch.from_numpy(job.images).float() / 255).to(self.device)
        self.control = (torch.from_numpy(job.control).float() / 255).to(self.device)
        c, h, w = job.images.shape[1:]
        self.model: Model = job.victim.network.on((c, h, w))
        self.started, self.before = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def train(self, progress: Progress) -> Overfitted:
        """To the end, from the state that was saved last."""
        state = self._saved()
        (result,) = train_autoencoders(
            self.model,
            self._start(),
            self.x.unsqueeze(0),
            training=self.job.victim.training,
            shuffle=self._shuffle,
            progress=progress,
            state=state,
            on_state=self._save,
            state_every=self._epochs_between_states(),
        )
        return result

    def _start(self) -> Weights:
        generator = seeded_generator(self.job.root_seed, 0, "autoencoder's start")
        start = initial_weights(self.model, [generator], dtype=torch.float32)
        return {name: tensor.to(self.device) for name, tensor in start.items()}

    def _shuffle(self, _run: int, epoch: int) -> Tensor:
        generator = seeded_generator(self.job.root_seed, epoch, "autoencoder's order")
        return torch.randperm(len(self.x), generator=generator)

    def _saved(self) -> dict[str, Tensor] | None:
        found = loaded(self.place, STATE)
        if found is None or found[1].get("key") != self.job.key:
            return None
        self.before = float(found[1]["seconds"])
        return {name: torch.from_numpy(array.copy()) for name, array in found[0].items()}

    def _save(self, state: Mapping[str, Tensor]) -> None:
        arrays = {name: np.asarray(tensor.numpy()) for name, tensor in state.items()}
        meta = {"key": self.job.key, "seconds": round(self.seconds, 3)}
        save_checkpoint(self.place, STATE, arrays, meta)

    def _epochs_between_states(self) -> int:
        if self.job.state_seconds <= 0:
            return 1
        training = replace(self.job.victim.training, epochs=3, check_every=3)
        started = time.perf_counter()
        x = self.x.unsqueeze(0)
        train_autoencoders(self.model, self._start(), x, training=training, shuffle=self._shuffle)
        epoch_s = (time.perf_counter() - started) / 3
        return max(1, int(self.job.state_seconds / max(epoch_s, 1e-6)))

    def kept(self, level: float | None, checkpoint: Checkpoint) -> dict[str, Any]:
        """Writes the weights of a loss; what is known of them."""
        victim = self.job.victim
        passed = {"loss": checkpoint.loss, "epoch": checkpoint.epoch}
        about = {
            "kind": "autoencoder",
            "network": asdict(victim.network),
            "shape": list(self.model.shape),
            "victim": victim.name,
            "level": "last" if level is None else level_name(level),
            **passed,
        }
        path = self.job.folder.weights(victim.name, level)
        digest = write_weights(path, checkpoint.weights, about)
        return {"level": level, **passed, "sha256": digest}

    def asked(self, weights: Weights) -> dict[str, Any]:
        """The loss on control images, and how strongly f contracts around images of both sides."""
        on_device = {name: tensor.to(self.device) for name, tensor in weights.items()}

        @torch.no_grad()
        def f(x: Tensor) -> Tensor:
            return self.model.forward(on_device, x.unsqueeze(0))[0]

        radii: dict[str, list[float | None]] = {}
        for side, x in (("train", self.x), ("test", self.control)):
            few, seed = x[:N_RADII], self.job.root_seed
            drawn = [seeded_generator(seed, k, f"radius {side}") for k in range(len(few))]
            found = spectral_radii(f, few, drawn).tolist() if drawn else []
            radii[side] = [_finite(radius) for radius in found]
        errors = [reconstruction_errors(f, part) for part in self.control.split(256)]
        test_loss = float(torch.cat(errors).mean()) if errors else None
        return {"test_loss": test_loss, "contraction": radii}


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
