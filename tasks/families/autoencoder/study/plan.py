"""Plan of a study of recovery: its units, those behind each cell of the record, and their costs.

Costs are estimated from a few timed steps of each victim's training and a call of f with few
images. Trainings stop at their last loss and methods when they converge, so estimates are upper
bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.autoencoder.run import activations
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.restore import Fit
from recon_core.restore.inpaint import biharmonic, unconditional
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import initial_weights, n_parameters
from recon_core.victims.autoencoder_training import AutoencoderTraining, train_autoencoders
from tasks.families.autoencoder.study.settings import (
    RecoveryStudy,
    RecoveryVictim,
    Source,
    Sources,
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
from tasks.study.executor import Unit
from tasks.study.products import Cost, in_full, seconds_of
from tasks.training.inpainter import batch_of

MOST = 32
"""Most images of a timing."""
BYTES = 4


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
        self.study, self.sources, self.root, self.device = study, sources, str(root), device
        self.folder, self.state_seconds = VictimFolder(root), state_seconds
        self.where = {"root": self.root, "device": device}
        used = dict.fromkeys(map(study.source_of, study.victims))
        self._masks = {
            size: {name: np.asarray(mask.numpy()) for name, mask in masks_of(study, size).items()}
            for _data, size in used
        }
        for victim in study.victims:
            size = study.source_of(victim)[1]
            victim.network.on((3, size, size))
        self.inpainters: dict[Source, TrainInpainterJob] = {}
        for source in used if study.methods.ddnm is not None else ():
            restorer = replace(study.inpainter.restorer, resolution=source[1])
            self.inpainters[source] = TrainInpainterJob(
                **self.where,
                inpainter=replace(study.inpainter, restorer=restorer),
                images=sources.for_inpainter(source),
            )

    def first_units(self) -> list[Unit]:
        """All units but the recoveries, which depend on the losses that trainings reach."""
        most_first = sorted(self.study.victims, key=lambda v: -v.training.epochs * v.n_images)
        trainings = [Unit(f"train {v.name}", TrainJob.run, self.training(v)) for v in most_first]
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
        """The recoveries from the victim that a unit has trained."""
        if not isinstance(unit.job, TrainJob) or not self.study.methods.of_victims:
            return []
        victim = unit.job.victim
        return [
            Unit(f"recover {victim.name} at {level:g}", RecoverJob.run, job)
            for level, job in self.recoveries(victim, given).items()
        ]

    @property
    def n_units(self) -> int:
        """Number of units if every victim reaches all its losses."""
        asked = self.study.victims if self.study.methods.of_victims else ()
        return len(self.first_units()) + sum(len(self.study.wanted(v)) for v in asked)

    def training(self, victim: RecoveryVictim) -> TrainJob:
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
        """The falling losses at which a victim is evaluated, with facts of its weights there."""
        kept = {level["level"]: level for level in given["levels"]}
        return {level: kept[level] for level in self.study.wanted(victim) if level in kept}

    def recoveries(
        self, victim: RecoveryVictim, given: Mapping[str, Any]
    ) -> dict[float, RecoverJob]:
        """Recoveries from a trained victim, by loss; `given` has the facts of its training."""
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
        """The generic methods by source and noise. They query no victim, and victims of one source
        have the first images of one order, so one job serves all of them."""
        jobs: dict[tuple[Source, float], InpaintJob] = {}
        if not self.study.methods.generic:
            return jobs
        for victim in sorted(self.study.victims, key=lambda v: v.n_images):
            source = self.study.source_of(victim)
            n = min(victim.n_images, self.study.n_generic)
            for group in self.groups(victim, with_control=False):
                jobs[source, group.sigma] = InpaintJob(
                    **self.where,
                    group=replace(group, gamma=0.0, images=group.images[:n], ids=group.ids[:n]),
                    methods=self.study.methods,
                    inpainter=self.inpainters.get(source),
                    root_seed=self.study.root_seed,
                )
        return jobs

    def groups(self, victim: RecoveryVictim, *, with_control: bool) -> list[Group]:
        """The images to recover from a victim, and how they are degraded."""
        ids, masks = self.sources.victim_ids(victim), self.masks(victim)
        images = self.sources.images_of(victim).images[ids]
        groups = [Group("train", 0.0, victim.gamma, images, ids, masks)]
        noise = self.study.noise
        if noise is not None and victim.name in (noise.victims or (self.study.victims[0].name,)):
            one = mask_name(noise.mask)
            groups.append(Group("train", noise.sigma, noise.gamma, images, ids, {one: masks[one]}))
        if with_control and self.study.control:
            control_ids = self.sources.control_ids(victim)
            control = self.sources.control_of(victim).images[control_ids]
            if len(control):
                groups.append(Group("test", 0.0, victim.gamma, control, control_ids, masks))
        return groups

    def masks(self, victim: RecoveryVictim) -> dict[str, npt.NDArray[np.bool_]]:
        """Masks at the size of a victim's images."""
        return self._masks[self.study.source_of(victim)[1]]


def costs_of(plan: RecoveryPlan, _device: str = "") -> list[Cost]:
    """Estimate the costs of every victim and of the generic methods, timed here in some seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(plan.study.threads)
    try:
        return [*(_of_victim(plan, v) for v in plan.study.victims), *_of_generic(plan)]
    finally:
        torch.set_num_threads(before)


def _evaluations(method: Iteration | KnownMask | UnknownMask | NoiseAware) -> int:
    """Most evaluations of f per sample."""
    if isinstance(method, Iteration):
        return method.n_iterations
    if isinstance(method, KnownMask):
        return method.n_admm
    if isinstance(method, UnknownMask):
        return method.n_admm * method.n_alternations
    starts = len(method.fills) + len(method.gammas)
    return starts * (method.n_steps + method.n_release + 1)


def _of_victim(plan: RecoveryPlan, victim: RecoveryVictim) -> Cost:
    study, training, n = plan.study, victim.training, victim.n_images
    model = victim.network.on((3, *(study.source_of(victim)[1],) * 2))
    size = training.batch_size or n
    few, generator = min(size, MOST), seeded_generator(0, 0, "pace")
    start = initial_weights(model, [generator], dtype=torch.float32)
    weights = {name: tensor.to(plan.device) for name, tensor in start.items()}
    x = torch.rand(1, few, *model.shape, generator=generator).to(plan.device)

    def steps(n: int) -> None:
        short = AutoencoderTraining(epochs=n, check_every=n, levels=(1e-30,))
        train_autoencoders(model, weights, x, training=short)

    train_s = in_full(steps, round(training.epochs * n / size)) * size / few
    with torch.inference_mode():
        call_s = seconds_of(lambda: model.forward(weights, x), times=3) / few
    n_levels, n_kept = len(study.wanted(victim)), len(training.levels)
    groups, more = (plan.groups(victim, with_control=control) for control in (False, True))
    samples = sum(len(g.ids) * len(g.masks) for g in (*groups * n_levels, *more[len(groups) :]))
    per_sample = sum(map(_evaluations, study.methods.of_victims.values()))
    parameters = BYTES * n_parameters(model)
    at_once = max(size, min(ROWS_OF_F, n * len(study.masks)))
    between = BYTES * sum(activations(victim.network, model.shape))
    return Cost(
        name=victim.name,
        counts={"images": n, "units": 1 + (n_levels if study.methods.of_victims else 0)},
        seconds_of={"training": train_s, "recovery": samples * per_sample * call_s},
        memory_bytes=(4 + n_kept) * parameters + 3 * at_once * between,
        disk_bytes=(n_kept + 1) * parameters,
    )


def _of_generic(plan: RecoveryPlan) -> list[Cost]:
    costs: list[Cost] = []
    trained: set[str] = set()
    for (source, sigma), job in plan.inpaintings().items():
        train_s, image_s, disk = 0.0, 0.0, 0
        if job.inpainter is not None and (ddnm := job.methods.ddnm) is not None:
            inpainter, images = job.inpainter.inpainter, job.inpainter.images
            short = replace(inpainter.training, batch_size=2, n_steps=3)
            fit = Fit(inpainter.restorer, short, device=plan.device)
            batch = batch_of(torch.from_numpy(images), 0, short)
            fit.update(batch)
            denoise = unconditional(inpainter.restorer, fit.ema)
            y = torch.zeros(2, *images.shape[1:], device=plan.device)
            asked_s = seconds_of(partial(denoise, y, 1.0)) / 2
            image_s = ddnm.n_steps * ddnm.travel_repeat * ddnm.n_samples * asked_s
            if job.inpainter.prior not in trained:
                trained.add(job.inpainter.prior)
                n_images = inpainter.training.n_steps * inpainter.training.batch_size
                train_s = n_images * seconds_of(partial(fit.update, batch)) / 2
                disk = BYTES * sum(p.numel() for p in fit.net.parameters())
        if job.methods.biharmonic:
            masks = torch.stack([torch.from_numpy(mask) for mask in job.group.masks.values()])
            known = masks.unsqueeze(1).expand(-1, 3, -1, -1)
            y = torch.from_numpy(job.group.images[:1]).float() / 255 * known
            image_s += seconds_of(partial(biharmonic, y, known)) / len(known)
        n_samples = len(job.group.ids) * len(job.group.masks)
        costs.append(
            Cost(
                name=f"generic, {source[0]}" + (f", noise {sigma:g}" if sigma else ""),
                counts={"images": len(job.group.ids), "units": 1 + (1 if train_s else 0)},
                seconds_of={"training": train_s, "recovery": n_samples * image_s},
                memory_bytes=8 * disk + BYTES * n_samples * 3 * source[1] ** 2,
                disk_bytes=disk,
            )
        )
    return costs
