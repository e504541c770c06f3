"""Memory that a run of the family `autoencoder` takes, to tell how many a GPU holds at once.

An upper estimate from counting live tensors, library workspaces left out. With P parameters, x
numbers of all images and u activations of all images, training holds up to 8 P + 6 x + 3 u numbers;
the attack, on b degraded images of d pixels at once, 22 b d and 4 b times the widest activations of
an image, 4 for each degraded pixel of all masks, and 3 P.
"""

from __future__ import annotations

import math

from recon_core.attacks.autoencoder.run import SAMPLES_AT_ONCE, AutoencoderRecovery
from recon_core.attacks.family_run import DTYPES
from recon_core.victims.autoencoder import Shape, UNet, n_parameters
from recon_core.victims.autoencoder_training import ROWS_AT_ONCE

PER_PARAMETER, PER_KEPT, PER_PIXEL, PER_ACTIVATION = 8.0, 3.0, 6.0, 3.0
PER_ATTACKED_PIXEL, PER_WIDEST, PER_DEGRADED_PIXEL = 22.0, 4.0, 4.0


def bytes_per_run(experiment: AutoencoderRecovery, n_images: int, shape: Shape) -> int:
    """Bytes of device memory that each run of a stack takes at most; `shape` is (c, h, w)."""
    model = experiment.victim.on(shape)
    d, units = math.prod(shape), activations(experiment, shape)
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


def activations(experiment: AutoencoderRecovery, shape: Shape) -> list[int]:
    """Numbers that each layer gives for one image."""
    victim = experiment.victim
    if not isinstance(victim, UNet):
        return [victim.width] * (victim.depth - 1) + [math.prod(shape)]
    units = []
    for name, weight in victim.on(shape).tensor_shapes.items():
        if name.endswith(".weight"):
            level = int(name.split(".")[1]) if name != "out.weight" else 0
            joined = sum(weight[:2])  # what a convolution sees may be joined of two tensors
            units.append(joined * shape[1] * shape[2] // 4**level)
    return units
