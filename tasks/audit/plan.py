"""Plan of an audit: what is trained, what is attacked, and what cannot be, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.kkt.attacks import check_pictures
from recon_core.attacks.span.attack import SpanAttack, check_victim
from tasks.audit.attacks import AnyAttack, AttackJob
from tasks.audit.images import AuditImages, members_of, pool_of, public_of, tests_of
from tasks.audit.privacy import noise_multiplier_of
from tasks.audit.recipe import VictimRecipe
from tasks.audit.settings import RECONSTRUCTION, AttackName, Audit, Cell
from tasks.audit.victims import VictimsJob, shape_of
from tasks.study.executor import Unit
from tasks.study.products import Arrays, Folder

PUBLIC_PER_IMAGE = 2
"""Public images that a student learns from, for each of its teacher's."""
NEEDS = {
    "features": "no features are given away: set recipe.cut, the hidden layer that clients send",
    "autoencoder": "the network is no autoencoder: set recipe.autoencoder",
}
NO_STATE = "its optimiser keeps no average of gradients, as Adam and SGD with momentum do"
ALONE = "weights are given away alone, without the optimiser's state"
TRAINING = "train "
NO_CLASSIFIER = "it is an attack on classifiers, and this is an autoencoder"


def training_name(cell: Cell) -> str:
    """The unit that makes a cell's victims."""
    return TRAINING + cell.name


def attack_name(cell: Cell, name: AttackName, victim: int) -> str:
    """The unit that makes an attack on one of a cell's victims."""
    return f"attack {cell.name}, {name}, victim {victim}"


class AuditPlan:
    """The units of an audit in a folder. `refused`: why a cell has no victims, by its number;
    `trained_by`: the cell that trains a cell's networks."""

    def __init__(self, study: Audit, images: AuditImages, root: Path, *, device: str) -> None:
        self.study, self.images, self.device = study, images, device
        self.root, self.folder = str(root), Folder(root)
        self.jobs: dict[int, VictimsJob] = {}
        self.refused: dict[int, str] = {}
        for cell in study.cells:
            try:
                self.jobs[cell.number] = self._job(cell)
            except ValueError as error:
                if cell.is_base:
                    raise
                self.refused[cell.number] = str(error)
        self.trained_by = self._shared()
        self._check_limits()

    @property
    def subject(self) -> Literal["recipe", "weights", "gradients"]:
        """The thing that is audited."""
        return "recipe"

    @property
    def task(self) -> str:
        """The victims' task in words."""
        pool = self.images.pool
        return self.study.recipe.labels_of(pool.labels, pool.class_names)[1]

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the images that victims learn, and of the others."""
        return self.images.pool.split, self.images.others.split

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Numbers of cells by name."""
        return {cell.name: cell.number for cell in self.study.cells}

    def first_units(self) -> list[Unit]:
        """The victims of every cell, but for those that another trains."""
        return [self._training(number) for number in self.jobs if self.trained_by[number] == number]

    def more_units(self, unit: Unit, given: Mapping[str, Any]) -> Iterable[Unit]:
        """The attacks on victims that have been trained, and the cells that go on with them."""
        del given
        if not unit.name.startswith(TRAINING):
            return []
        cell = self.study.cells[self.numbers[unit.name.removeprefix(TRAINING)]]
        waited = [k for k, by in self.trained_by.items() if by == cell.number != k]
        return [
            *(self._training(number) for number in waited),
            *(
                Unit(attack_name(cell, name, v), AttackJob.run, job)
                for name in RECONSTRUCTION
                if name in self.study.attacks and self.why_not(cell, name) is None
                for v, job in enumerate(self.attacks(cell, name))
            ),
        ]

    def _training(self, number: int) -> Unit:
        name = training_name(self.study.cells[number])
        return Unit(name, VictimsJob.run, self.jobs[number])

    def _shared(self) -> dict[int, int]:
        """The cell that trains a cell's networks, by number: mostly itself. Cells that differ only
        in what becomes of trained networks take those of the first that gives them as they are."""
        keys = {number: job.training_key for number, job in self.jobs.items()}
        whole = {keys[n]: n for n, j in reversed(self.jobs.items()) if j.recipe.gives_all}
        by = {number: whole.get(key, number) for number, key in keys.items()}
        for number, other in by.items():
            if other != number:
                job = self.jobs[number]
                self.jobs[number] = replace(job, networks_of=self.jobs[other].key)
        return by

    @cached_property
    def n_units(self) -> int:
        return len(self.jobs) + sum(
            self.study.n_victims
            for cell in self.study.cells
            for name in RECONSTRUCTION
            if name in self.study.attacks and self.why_not(cell, name) is None
        )

    def attacks(self, cell: Cell, name: AttackName) -> list[AttackJob]:
        """The attack on every victim of a cell."""
        job, attack = self.jobs[cell.number], self.attack(cell, name)
        return AttackJob.on(job, attack, mask=self.study.mask, keeps_pictures=cell.is_base)

    def scores(self, cell: Cell, name: AttackName) -> tuple[Arrays, float]:
        """(victims, pool) `ssim`, `identified` and `control` of an attack, and its seconds. Raises
        ValueError if one is not there."""
        made, seconds = [], []
        for job in self.attacks(cell, name):
            found = self.folder.product(job.key)
            if found is None:
                raise ValueError(f"{cell.name}, {name}: not there; run the same command again")
            made.append(found[0])
            seconds.append(found[1]["seconds"])
        names = ("ssim", "identified", "control")
        stacked = {name: np.stack([arrays[name] for arrays in made]) for name in names}
        return stacked, float(np.mean(seconds))

    def attack(self, cell: Cell, name: AttackName) -> AnyAttack:
        recipe = self.jobs[cell.number].recipe
        assert recipe.n_images is not None
        return self.study.attack(name, recipe, recipe.n_images)

    def why_not(self, cell: Cell, name: AttackName) -> str | None:
        """The reason for which an attack is not made on a cell's victims; None: it is."""
        if cell.number in self.refused:
            return self.refused[cell.number]
        if name not in RECONSTRUCTION:
            return None
        recipe, job, attack = cell.recipe, self.jobs[cell.number], self.attack(cell, name)
        needs = {"features": recipe.cut is not None, "autoencoder": recipe.autoencoder is not None}
        if isinstance(attack, StrongInversion | NoiseAware):
            return None if needs[name] else NEEDS[name]
        try:
            if recipe.autoencoder is not None:
                raise ValueError(NO_CLASSIFIER)
            if isinstance(attack, SpanAttack):
                shape = shape_of(job.pool)
                check_victim(recipe.architecture(shape))
                check_pictures(attack, len(job.pool) // 2, shape)
            if name == "span_state":
                self.check_state(recipe)
        except ValueError as error:
            return str(error)
        return None

    def check_state(self, recipe: VictimRecipe) -> None:
        """ValueError where no optimiser's state is given away."""
        if not recipe.gives_state:
            raise ValueError(ALONE)
        if not recipe.training.optimiser.averages_gradients:
            raise ValueError(NO_STATE)

    def _check_limits(self) -> None:
        """Raises ValueError for a limit that no attack on the base could be held against."""
        base = self.study.cells[0]
        for limit in self.study.limits:
            asked = RECONSTRUCTION if limit.of == "good" else self.study.attacks
            why = {name: self.why_not(base, name) for name in self.study.attacks if name in asked}
            if None not in why.values():
                reasons = "; ".join(f"{name}: {text}" for name, text in why.items())
                raise ValueError(
                    f"{limit.text} can be held against no attack ({reasons or 'none is chosen'}); "
                    "choose attacks that can be made, or leave the limit out"
                )

    def _job(self, cell: Cell) -> VictimsJob:
        made, recipe = self.study, cell.recipe
        assert recipe.n_images is not None
        pool = pool_of(recipe, self.images, seed=made.seed)
        n_tests = self.n_tests
        tests = tests_of(recipe, self.images, n_tests, seed=made.seed)
        if recipe.private is not None and not len(tests):
            raise ValueError(
                "a private network is centred by the mean of images that none learns, and the "
                "source has no others; give more images"
            )
        public = None
        if recipe.distilled:
            n = PUBLIC_PER_IMAGE * recipe.n_images
            public = public_of(recipe, self.images, n_tests, n=n, seed=made.seed)
        return VictimsJob(
            root=self.root,
            device=self.device,
            recipe=recipe,
            pool=pool,
            members=members_of(pool, made.n_victims, seed=made.seed),
            tests=tests,
            public=public,
            noise_multiplier=noise_multiplier_of(recipe, recipe.n_images),
            seed=made.seed,
        )

    @cached_property
    def n_tests(self) -> int:
        """Images that accuracy is measured on: where there are few others, two of three, so that
        there are public ones for a student, whether a cell has students or not."""
        others = self.images.others
        labels, _task = self.study.recipe.labels_of(others.labels, others.class_names)
        n_others = int((labels >= 0).sum())
        return min(self.study.n_tests, n_others - n_others // 3)
