"""Plan of a study of recovery: its units, and those that give each cell of the record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.restore import Fit
from recon_core.restore.inpaint import DDNM, biharmonic, unconditional
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import Autoencoder, Model, UNet, initial_weights, n_parameters
from recon_core.victims.autoencoder_training import AutoencoderTraining, train_autoencoders
from tasks.families.autoencoder.study.settings import (
    RecoveryStudy,
    RecoveryVictim,
    Sources,
    level_name,
    mask_name,
    masks_of,
)
from tasks.families.autoencoder.study.units import (
    ROWS_OF_F,
    STATE_SECONDS,
    Group,
    InpaintJob,
    RecoverJob,
    TrainInpainterJob,
    TrainJob,
    VictimFolder,
)
from tasks.study.cost import Cost, seconds_of
from tasks.study.executor import Unit
from tasks.training.inpainter import batch_of

Source = tuple[str, int]


class RecoveryPlan:
    """The units of a study in a folder.

    Raises ValueError, naming the victim or mask, if the images cannot fill it.
    """

    def __init__(
        self,
        study: RecoveryStudy,
        sources: Sources,
        root: Path,
        *,
        device: str,
        state_seconds: float = STATE_SECONDS,
    ) -> None:
        self.study, self.sources, self.device = study, sources, device
        self.root, self.folder, self.state_seconds = str(root), VictimFolder(root), state_seconds
        self.where = {"root": self.root, "device": device}
        for victim in study.victims:
            size = study.source_of(victim)[1]
            victim.network.on((3, size, size))
            self.masks(victim)
        self._check_inpainters()

    def first_units(self) -> list[Unit]:
        """All but the recoveries, which wait to be told how far the trainings came."""
        trainings = [Unit(f"train {v.name}", TrainJob.run, self.training(v)) for v in self.victims]
        inpainters: dict[str, Unit] = {}
        generic = []
        for job in self.inpaintings().values():
            needs: frozenset[str] = frozenset()
            if job.inpainter is not None:
                name = f"train inpainter {job.inpainter.prior[:8]}"
                inpainters[name] = Unit(name, TrainInpainterJob.run, job.inpainter)
                needs = frozenset({name})
            generic.append(Unit(f"inpaint {job.key[:8]}", InpaintJob.run, job, needs))
        return [*inpainters.values(), *trainings, *generic]

    def more_units(self, unit: Unit, given: Mapping[str, Any]) -> Iterable[Unit]:
        """The recoveries from a victim that has been trained."""
        if not isinstance(unit.job, TrainJob):
            return []
        victim = unit.job.victim
        if not self.study.methods.of_victims:
            return []
        return [
            Unit(f"recover {victim.name} at {level_name(level)}", RecoverJob.run, job)
            for level, job in self.recoveries(victim, given).items()
        ]

    @property
    def n_units(self) -> int:
        """Number of units, if every victim reaches all its losses."""
        asked = self.study.victims if self.study.methods.of_victims else ()
        return len(self.first_units()) + sum(len(self.study.wanted(v)) for v in asked)

    @cached_property
    def victims(self) -> list[RecoveryVictim]:
        """The victims, those with most to train first."""

        def work(victim: RecoveryVictim) -> int:
            return victim.training.epochs * victim.n_images

        return sorted(self.study.victims, key=work, reverse=True)

    def training(self, victim: RecoveryVictim) -> TrainJob:
        """The training of a victim."""
        images, control = self.sources.images_of(victim), self.sources.control_of(victim)
        return TrainJob(
            **self.where,
            victim=victim,
            images=images.images[self.sources.victim_ids(victim)],
            control=control.images[self.sources.control_ids(victim)],
            root_seed=self.study.root_seed,
            state_seconds=self.state_seconds,
        )

    def reached(self, victim: RecoveryVictim, given: Mapping[str, Any]) -> dict[float, Any]:
        """The losses that it is evaluated at, falling, with what is known of its weights there."""
        wanted = self.study.wanted(victim)
        kept = {level["level"]: level for level in given["levels"]}
        return {level: kept[level] for level in wanted if level in kept}

    def recoveries(
        self, victim: RecoveryVictim, given: Mapping[str, Any]
    ) -> dict[float, RecoverJob]:
        """Recoveries from a trained victim, by loss."""
        reached = self.reached(victim, given)
        return {
            level: RecoverJob(
                **self.where,
                victim=victim,
                level=level,
                trained=about["sha256"],
                groups=tuple(self.groups(victim, with_control=level == min(reached))),
                methods=self.study.methods,
                root_seed=self.study.root_seed,
            )
            for level, about in reached.items()
        }

    def inpaintings(self) -> dict[tuple[Source, float], InpaintJob]:
        """The generic methods by source and noise: they ask no victim, and the images of victims
        of one source are the first of one order, so all of them are served at once."""
        methods, jobs = self.study.methods, {}
        if not methods.generic:
            return {}
        for victim in sorted(self.study.victims, key=lambda v: v.n_images):
            source = self.study.source_of(victim)
            n = min(victim.n_images, self.study.n_generic)
            for group in self.groups(victim, with_control=False):
                few = replace(group, gamma=0.0, images=group.images[:n], ids=group.ids[:n])
                jobs[source, group.sigma] = InpaintJob(
                    **self.where,
                    group=few,
                    methods=methods,
                    inpainter=None if methods.ddnm is None else self.inpainter(victim),
                    root_seed=self.study.root_seed,
                )
        return jobs

    def inpainter(self, victim: RecoveryVictim) -> TrainInpainterJob:
        """The generic inpainter of the victim's source, at the side of its images."""
        source = self.study.source_of(victim)
        settings = self.study.inpainter
        restorer = replace(settings.restorer, resolution=source[1])
        return TrainInpainterJob(
            **self.where,
            inpainter=replace(settings, restorer=restorer),
            images=self._for_inpainter[source],
        )

    def groups(self, victim: RecoveryVictim, *, with_control: bool) -> list[Group]:
        """The images that it is asked for, and how they are degraded."""
        ids = self.sources.victim_ids(victim)
        images = self.sources.images_of(victim).images[ids]
        masks = self.masks(victim)
        found = [Group("train", 0.0, victim.gamma, images, ids, masks)]
        noise = self.study.noise
        if noise is not None and self.study.has_noise(victim):
            one = mask_name(noise.mask)
            found.append(Group("train", noise.sigma, noise.gamma, images, ids, {one: masks[one]}))
        control_ids = self.sources.control_ids(victim)
        if with_control and self.study.control and len(control_ids):
            control = self.sources.control_of(victim).images[control_ids]
            found.append(Group("test", 0.0, victim.gamma, control, control_ids, masks))
        return found

    def masks(self, victim: RecoveryVictim) -> dict[str, npt.NDArray[np.bool_]]:
        """At the size of its images."""
        size = self.study.source_of(victim)[1]
        if size not in self._masks:
            self._masks[size] = {
                name: np.asarray(mask.numpy()) for name, mask in masks_of(self.study, size).items()
            }
        return self._masks[size]

    @cached_property
    def _masks(self) -> dict[int, dict[str, npt.NDArray[np.bool_]]]:
        return {}

    @cached_property
    def _for_inpainter(self) -> dict[Source, npt.NDArray[np.uint8]]:
        sources = dict.fromkeys(self.study.source_of(victim) for victim in self.study.victims)
        return {source: self.sources.for_inpainter(source) for source in sources}

    def _check_inpainters(self) -> None:
        for victim in self.study.victims if self.study.methods.ddnm is not None else ():
            self.inpainter(victim)


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
