"""Train a diffusion model without a condition, as the generic prior that `DDNM` inpaints with.

It is the EDM restorer with a condition of zeros, trained on clean images. They must not be those
that the attacked autoencoders were trained on: the model stands for what is known of images at
large. The folder `out` holds the checkpoint `latest` while it trains and the model, `model.json`
with the averaged weights, at the end. A finished training is not repeated; an interrupted one goes
on so that the model is bit for bit what it would have been (on one device, with one number of CPU
threads).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.restore import EDM, Examples, Fit, NonfiniteLossError, Training
from recon_core.restore.edm import Denoiser
from recon_core.restore.examples import to_network
from recon_core.restore.inpaint import DDNM, unconditional
from recon_core.types import N_AUGMENT, seeded_generator
from storage.checkpoints import load_checkpoint, save_checkpoint
from tasks.training.card import device_name, versions
from tasks.training.loop import CHECKPOINT_SHARE, OnStep, ignore_step
from tasks.training.state import LATEST, MODEL, Record, arrays, load_latest, remove, save_latest

SCHEMA = "palimpsest-inpainter"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Inpainter:
    """A generic inpainter's network and its training; the defaults are EDM's for CIFAR-10.

    Raises ValueError if `restorer` diffuses residuals: there is no condition here.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    restorer: EDM = field(default_factory=EDM)
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        if self.restorer.target != "image":
            raise ValueError(
                f"restorer.target={self.restorer.target!r}, but a generic inpainter has no "
                "condition to diffuse the residual of; use target='image'"
            )


PAPER_INPAINTER = Inpainter()
"""EDM for CIFAR-10. The autoencoder paper takes a model that was published with DDNM."""

CPU_INPAINTER = Inpainter(
    restorer=EDM(size="mini"),
    training=Training(
        n_steps=10_000,
        batch_size=16,
        lr=5e-3,
        warmup_images=3200,
        decay="cosine",
        ema_halflife_images=10_000,
    ),
)
"""About 13 minutes on one free core."""

CPU_DDNM = DDNM(n_steps=20, sigma_max=10.0, travel_repeat=10, n_samples=4)
"""How to inpaint with `CPU_INPAINTER`: about a second an image on one core. An exact sample has
twice the squared error of the conditional mean, the mean of four 5/4 of it."""


def train_inpainter(
    inpainter: Inpainter,
    images: npt.NDArray[np.uint8],
    *,
    out: Path,
    device: str,
    on_step: OnStep = ignore_step,
    checkpoint_seconds: float = 60.0,
) -> Denoiser:
    """The denoiser D(x; sigma) of the model in `out`; trains it only as far as it is not there yet.

    `images` are uint8 (n, 3, h, w), none of them a victim's training image. The denoiser takes and
    gives images in [-1, 1] on `device`. A checkpoint is written every `checkpoint_seconds`, less
    often where writing takes long; a model of other settings or images in `out` is replaced.

    Raises:
        ValueError: `images` is not of that kind, or not of the restorer's resolution.
        NonfiniteLossError: the training diverged.
        CorruptPartError: a file in `out` is not as it was written.
    """
    side = inpainter.restorer.resolution
    if images.dtype != np.uint8 or images.shape[1:] != (3, side, side) or not len(images):
        raise ValueError(
            f"images is {images.dtype} {images.shape}; expected uint8 (n, 3, {side}, {side}) with "
            "n at least 1, as restorer.resolution says"
        )
    fingerprint = inpainter_fingerprint(inpainter, images)
    net = inpainter.restorer.build(seed=inpainter.training.seed)
    found = load_checkpoint(out, MODEL)
    if found is None or found[1].get("fingerprint") != fingerprint:
        trainer = _Trainer(inpainter, images, out, device, fingerprint)
        weights = trainer.run(on_step, checkpoint_seconds)
    else:
        weights = found[0]
    net.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return unconditional(inpainter.restorer, net.to(device).eval().requires_grad_(False))


def inpainter_fingerprint(inpainter: Inpainter, images: npt.NDArray[np.uint8]) -> str:
    """SHA-256 over everything the weights depend on, but for device and versions."""
    body = {
        "version": VERSION,
        "inpainter": asdict(inpainter),
        "shape": images.shape,
        "images": hashlib.sha256(np.ascontiguousarray(images).data).hexdigest(),
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def batch_of(images: Tensor, step: int, training: Training) -> Examples:
    """A step's examples, drawn with replacement by (seed, step) alone; their condition is 0."""
    draw = seeded_generator(training.seed, step, "inpainter batch")
    rows = torch.randint(len(images), (training.batch_size,), generator=draw)
    target = to_network(images[rows].float() / 255)
    return Examples(
        condition=torch.zeros_like(target),
        target=target,
        augment=torch.zeros(len(target), N_AUGMENT),
    )


class _Trainer:
    """One training from where `out` has it to its end."""

    def __init__(
        self,
        inpainter: Inpainter,
        images: npt.NDArray[np.uint8],
        out: Path,
        device: str,
        fingerprint: str,
    ) -> None:
        self.inpainter, self.training = inpainter, inpainter.training
        self.images = torch.from_numpy(np.ascontiguousarray(images))
        self.out, self.device, self.fingerprint = out, device, fingerprint
        self.fit = Fit(inpainter.restorer, self.training, device=device)
        self.record = Record.of(self.training.n_steps)
        latest = load_latest(out, fingerprint)
        if latest is None:
            remove(out, LATEST)
        else:
            self.fit.load_state_dict(latest[0])
            self.record.load_state_dict(latest[1]["record"])
        self.started = time.monotonic() - self.record.seconds

    def run(self, on_step: OnStep, checkpoint_seconds: float) -> dict[str, npt.NDArray[Any]]:
        """Trains to the end and writes the model; returns its weights."""
        last_saved, saving = time.monotonic(), 0.0
        while not self.fit.done:
            loss = self.fit.update(batch_of(self.images, self.fit.step, self.training))
            self.record.curve.add(self.fit.step, loss)
            on_step(self.fit.step, self.training.n_steps, loss)
            now = time.monotonic()
            if now - last_saved >= max(checkpoint_seconds, saving / CHECKPOINT_SHARE):
                self._require_finite()
                self.record.seconds = now - self.started
                save_latest(self.out, self.fingerprint, self.fit, self.record, feeds=[])
                last_saved = time.monotonic()
                saving = last_saved - now
        self._require_finite()
        weights = arrays(self.fit.ema.state_dict())
        save_checkpoint(self.out, MODEL, weights, self._card())
        remove(self.out, LATEST)
        return weights

    def _require_finite(self) -> None:
        """A loss can be finite and the step after it not: such weights are not kept."""
        if not self.fit.finite:
            step = self.fit.step - 1
            lr = self.training.learning_rate(step)
            raise NonfiniteLossError(step, math.nan, lr, what="weights that are not finite")

    def _card(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            **asdict(self.inpainter),
            "n_images": len(self.images),
            "n_parameters": sum(p.numel() for p in self.fit.net.parameters()),
            "seconds": round(time.monotonic() - self.started, 3),
            "device": torch.device(self.device).type,
            "device_name": device_name(self.device),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "loss_curve": self.record.curve.points,
        }
