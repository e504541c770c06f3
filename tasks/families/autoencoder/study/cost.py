"""Costs of a study of recovery at most: seconds, memory and disk, before anything is run.

How long an epoch of each victim takes is measured on its own network with a few images, and so is
an evaluation of f; both grow with the number of images. Trainings end at their last loss and
methods when they have converged, so this is an upper bound; how low it ends nobody knows before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.restore import Fit
from recon_core.restore.inpaint import DDNM, biharmonic, unconditional
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import (
    Autoencoder,
    Model,
    UNet,
    initial_weights,
    n_parameters,
)
from recon_core.victims.autoencoder_training import AutoencoderTraining, train_autoencoders
from tasks.families.autoencoder.study.plan import RecoveryPlan
from tasks.families.autoencoder.study.settings import RecoveryVictim
from tasks.families.autoencoder.study.units import ROWS_OF_F, InpaintJob, TrainInpainterJob
from tasks.study.cost import Cost, seconds_of
from tasks.training.inpainter import batch_of

FEW, MORE = 2, 10
"""Images of the two measurements."""
TIMES = 3
"""Tries of each, of which the fastest counts."""
BYTES = 4
TWO_EPOCHS = AutoencoderTraining(epochs=2, check_every=2, levels=(1e-30,))


def costs_of(plan: RecoveryPlan, _device: str = "") -> list[Cost]:
    """Costs of every victim, then of the generic methods; measured here in some seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(plan.study.threads)
    try:
        found = [_of_victim(plan, victim) for victim in plan.study.victims]
        return found + _of_generic(plan)
    finally:
        torch.set_num_threads(before)


def evaluations(method: Any) -> int:
    """Evaluations of f, at most, per sample."""
    if isinstance(method, Iteration):
        return method.n_iterations
    if isinstance(method, KnownMask):
        return method.n_admm
    if isinstance(method, UnknownMask):
        return method.n_admm * method.n_alternations
    if isinstance(method, NoiseAware):
        starts = len(method.fills) + len(method.gammas)
        return starts * (method.n_steps + method.n_release + 3 * method.descent_steps + 1)
    raise TypeError(f"no cost is known of {type(method).__name__}")


def _of_victim(plan: RecoveryPlan, victim: RecoveryVictim) -> Cost:
    study, training = plan.study, victim.training
    model = victim.network.on((3, *(study.source_of(victim)[1],) * 2))
    n, size = victim.n_images, training.batch_size or victim.n_images
    step, call = pace_of(model, plan.device)
    epoch_s = n / size * step(size)
    groups = plan.groups(victim, with_control=False)
    controls = plan.groups(victim, with_control=True)[len(groups) :]
    n_levels = len(study.wanted(victim))
    samples = n_levels * sum(len(g.ids) * len(g.masks) for g in groups)
    samples += sum(len(g.ids) * len(g.masks) for g in controls)
    per_sample = sum(evaluations(method) for method in study.methods.of_victims.values())
    parameters = BYTES * n_parameters(model)
    at_once = max(size, min(ROWS_OF_F, n * len(study.masks)))
    between = BYTES * _activations(victim.network, model)
    n_kept = len(training.levels)
    return Cost(
        name=victim.name,
        counts={"images": n, "units": 1 + (n_levels if study.methods.of_victims else 0)},
        seconds_of={
            "training": training.epochs * epoch_s,
            "recovery": samples * per_sample * (call(1000) / 1000),
        },
        memory_bytes=(4 + n_kept) * parameters + 3 * at_once * between,
        disk_bytes=(n_kept + 1) * parameters,
    )


def _of_generic(plan: RecoveryPlan) -> list[Cost]:
    found: list[Cost] = []
    known: set[str] = set()
    for (source, sigma), job in plan.inpaintings().items():
        train_s, disk = 0.0, 0
        update_s = asked_s = 0.0
        if job.inpainter is not None:
            update_s, asked_s, n_weights = _pace_of_inpainter(job.inpainter, plan.device)
            if job.inpainter.prior not in known:
                known.add(job.inpainter.prior)
                train_s = job.inpainter.inpainter.training.n_steps * update_s
                disk = BYTES * n_weights
        n_samples = len(job.group.ids) * len(job.group.masks)
        found.append(
            Cost(
                name=f"generic, {source[0]}" + (f", noise {sigma:g}" if sigma else ""),
                counts={"images": len(job.group.ids), "units": 1 + (1 if train_s else 0)},
                seconds_of={"training": train_s, "recovery": n_samples * _generic_s(job, asked_s)},
                memory_bytes=8 * disk + BYTES * n_samples * 3 * source[1] ** 2,
                disk_bytes=disk,
            )
        )
    return found


def _generic_s(job: InpaintJob, asked_s: float) -> float:
    methods, seconds = job.methods, 0.0
    if isinstance(methods.ddnm, DDNM):
        ddnm = methods.ddnm
        seconds += ddnm.n_steps * ddnm.travel_repeat * ddnm.n_samples * asked_s
    if methods.biharmonic:
        image = torch.from_numpy(job.group.images[:1]).float() / 255
        masks = [torch.from_numpy(mask) for mask in job.group.masks.values()]
        known = torch.stack(masks).unsqueeze(1).expand(-1, 3, -1, -1)
        y = image.expand(len(masks), -1, -1, -1) * known
        seconds += seconds_of(lambda: biharmonic(y, known)) / len(masks)
    return seconds


@cache
def pace_of(model: Model, device: str) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Seconds of a step of training and of a call of f, by the number of images."""
    generator = seeded_generator(0, 0, "pace")
    weights = {
        name: tensor.to(device)
        for name, tensor in initial_weights(model, [generator], dtype=torch.float32).items()
    }
    x = torch.rand(1, MORE, *model.shape, generator=generator).to(device)

    def step(part: Tensor) -> float:
        two = partial(train_autoencoders, model, weights, part, training=TWO_EPOCHS)
        return seconds_of(two, times=TIMES) / 2

    def call(part: Tensor) -> float:
        with torch.inference_mode():
            return seconds_of(lambda: model.forward(weights, part), times=TIMES)

    call(x)
    steps, calls = ((measure(x[:, :FEW]), measure(x)) for measure in (step, call))
    return _line(*steps), _line(*calls)


def _line(few_s: float, more_s: float) -> Callable[[int], float]:
    """Through the two measurements, not falling."""
    slope = max(0.0, more_s - few_s) / (MORE - FEW)
    return lambda n: few_s + slope * max(0, n - FEW)


def _pace_of_inpainter(job: TrainInpainterJob, device: str) -> tuple[float, float, int]:
    """Seconds of an update, of one image's denoising, and the number of weights."""
    inpainter = job.inpainter
    few = replace(inpainter.training, batch_size=FEW, n_steps=3)
    fit = Fit(inpainter.restorer, few, device=device)
    batch = batch_of(torch.from_numpy(job.images), 0, few)
    fit.update(batch)
    update_s = seconds_of(lambda: fit.update(batch)) * inpainter.training.batch_size / FEW
    denoise = unconditional(inpainter.restorer, fit.ema)
    x = torch.zeros(FEW, *job.images.shape[1:], device=device)
    asked_s = seconds_of(lambda: denoise(x, 1.0)) / FEW
    return update_s, asked_s, sum(p.numel() for p in fit.net.parameters())


def _activations(network: Autoencoder, model: Model) -> int:
    """Numbers between the layers, for one image."""
    if not isinstance(network, UNet):
        return sum(shape[0] for name, shape in model.tensor_shapes.items() if "bias" in name)
    side, total = model.shape[1] * model.shape[2], 0
    for name, shape in model.tensor_shapes.items():
        if name.endswith(".bias"):
            level = 0 if name.startswith("out") else int(name.split(".")[1])
            total += shape[0] * side // 4**level
    return total
