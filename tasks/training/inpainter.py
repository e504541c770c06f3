"""Train a diffusion model without a condition, as the generic prior that `DDNM` inpaints with: the
EDM restorer with a condition of zeros, on clean images, none of them of the attacked autoencoders.
`out` holds `latest` while it trains and the model at the end, as of a restorer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.restore import EDM, Examples, Training
from recon_core.restore.edm import Denoiser
from recon_core.restore.examples import to_network
from recon_core.restore.inpaint import DDNM, unconditional
from recon_core.strict import Strict
from recon_core.types import N_AUGMENT, seeded_generator
from storage.checkpoints import load_checkpoint
from tasks.training.loop import MODEL, OnStep, Trainer, ignore

SCHEMA = "palimpsest-inpainter"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Inpainter(Strict):
    """A generic inpainter's network and its training; the defaults are EDM's for CIFAR-10.

    Raises ValueError if `restorer` diffuses residuals: there is no condition here.
    """

    restorer: EDM = field(default_factory=EDM)
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        super().__post_init__()
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
    on_step: OnStep = ignore,
    checkpoint_seconds: float = 60.0,
) -> Denoiser:
    """Train the model in `out` as far as it is not there yet, and return its denoiser D(x; sigma),
    so that it is bit for bit what it would have been without interruption (on one device, with one
    number of CPU threads).

    `images` are uint8 (n, 3, h, w). The denoiser takes and gives images in [-1, 1] on `device`. A
    checkpoint is written every `checkpoint_seconds`, less often where writing takes long; a model
    of other settings or images in `out` is replaced.

    Raises ValueError if `images` is not of that kind, or not of the restorer's resolution,
    NonfiniteLossError if the training diverged, CorruptPartError if a file in `out` is not as it
    was written.
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
        feed = CleanImages(torch.from_numpy(np.ascontiguousarray(images)), inpainter.training)
        trainer = Trainer(
            inpainter.restorer, inpainter.training, feed, out=out, device=device,
            fingerprint=fingerprint,
        )  # fmt: skip
        trainer.run(on_step, checkpoint_seconds)
        trainer.finish({"schema": SCHEMA, "version": VERSION})
        found = load_checkpoint(out, MODEL)
        assert found is not None
    net.load_state_dict({name: torch.from_numpy(array) for name, array in found[0].items()})
    return unconditional(inpainter.restorer, net.to(device).eval().requires_grad_(False))


def inpainter_fingerprint(inpainter: Inpainter, images: npt.NDArray[np.uint8]) -> str:
    """SHA-256 over everything the weights depend on, but for device and versions."""
    pixels = hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()
    body = [VERSION, asdict(inpainter), images.shape, pixels]
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


@dataclass
class CleanImages:
    """Endless batches of clean images, a function of the step alone."""

    images: Tensor
    training: Training
    step: int = 0

    @property
    def n_given(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        while True:
            self.step += 1
            yield vars(batch_of(self.images, self.step - 1, self.training))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
