"""Plan of a study of recovery: its units, and those that give each cell of the record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.families.autoencoder.study.images import Sources, mask_name, masks_of
from tasks.families.autoencoder.study.settings import RecoveryStudy, RecoveryVictim, level_name
from tasks.families.autoencoder.study.training import STATE_SECONDS, TrainJob, VictimFolder
from tasks.families.autoencoder.study.units import (
    Group,
    InpaintJob,
    RecoverJob,
    TrainInpainterJob,
)
from tasks.study.executor import Unit

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
