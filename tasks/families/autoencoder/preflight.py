"""Before an attack on an autoencoder: everything read and checked, and what its chances are."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recon_core.attacks.autoencoder.preflight import (
    NOT_FITTED,
    Samples,
    autoencoder_preflight,
    reconstruction_errors,
)
from recon_core.types import seeded_generator
from recon_core.victims.preflight import Preflight
from tasks.attack_file.record import chances
from tasks.families.autoencoder.inputs import AutoencoderJob, AutoencoderVictim, read_victim
from tasks.families.autoencoder.material import Material, read_material, shape_hint

N_NOISE = 8
MAX_IMAGES = 64
"""Images of each kind that preflight looks at."""


@dataclass(frozen=True, eq=False)
class PreparedAutoencoder:
    """Start of an attack, checked."""

    victim: AutoencoderVictim
    material: Material
    preflight: Preflight

    def record(self) -> dict[str, Any]:
        """The preflight as JSON."""
        numbers = self.preflight.numbers
        return chances(self.preflight) | {
            "numbers": {name: float(f"{value:.6g}") for name, value in numbers.items()},
            "victim": self.victim.facts,
        }


def prepare_autoencoder(job: AutoencoderJob, device: str = "cpu") -> PreparedAutoencoder:
    """Read and check the job's files, and ask f.

    Raises:
        WeightsError, SourceError: a file cannot be used.
        ValueError: settings that do not fit together.
    """
    victim = read_victim(job, functools.partial(shape_hint, job))
    material = read_material(job, victim.shape)
    train = None if material.train is None else material.train.images[:MAX_IMAGES].to(device)
    control = None if material.control is None else material.control.images[:MAX_IMAGES].to(device)
    noise = [
        torch.rand(victim.shape, generator=seeded_generator(job.seed, row, "preflight noise"))
        for row in range(N_NOISE)
    ]
    samples = Samples(
        images=train,
        control=control,
        noise=torch.stack(noise).to(device),
        generators=lambda n: [seeded_generator(job.seed, row, "preflight") for row in range(n)],
    )
    f = victim.function(device)
    remedy = "" if train is None else _remedy(victim, train, device)
    return PreparedAutoencoder(victim, material, autoencoder_preflight(f, samples, remedy=remedy))


def _remedy(victim: AutoencoderVictim, images: Tensor, device: str) -> str:
    """Which other activation would reconstruct the images, if one does and this one does not."""
    if float(reconstruction_errors(victim.function(device), images).mean()) <= NOT_FITTED:
        return ""
    losses = {
        name: float(reconstruction_errors(function(device), images).mean())
        for name, function in victim.alternatives.items()
    }
    best = min(losses, key=lambda name: losses[name], default=None)
    if best is None or not losses[best] <= NOT_FITTED:
        return ""
    return f"With --activation {best} the error is {losses[best]:.2g}."
