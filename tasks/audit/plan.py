"""Plan of an audit: which victim learns which images, what is trained and attacked, what cannot be
attacked and why, and the costs.

Victims come in pairs. Both have the same pool of 2n images, of which one learns a random half and
the other the rest; so every image is in half of the victims, and beside every training image stands
a decoy that is a training image elsewhere. If nothing leaks the two cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.kkt.attacks import check_pictures
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.attack import SpanAttack, check_victim
from recon_core.leakage import complementary_halves
from recon_core.types import no_progress, seeded_generator
from recon_core.victims.autoencoder import n_parameters
from storage.sources.load import ImageSet, cached_images
from tasks.audit.attacks import AnyAttack, AttackJob
from tasks.audit.recipe import VictimRecipe, noise_multiplier_of
from tasks.audit.settings import FEWEST, RECONSTRUCTION, AttackName, Audit, Cell
from tasks.audit.victims import Pictures, VictimsJob
from tasks.study.executor import Unit
from tasks.study.products import Arrays, Cost, Folder, content_of, in_full

PUBLIC_PER_IMAGE = 2
"""Public images that a student learns from, for each of its teacher's."""
NEEDS = {
    "features": "no features are given away: set recipe.cut, the hidden layer that clients send",
    "autoencoder": "the network is no autoencoder: set recipe.autoencoder",
}
NO_STATE = "its optimiser keeps no average of gradients, as Adam and SGD with momentum do"
ALONE = "weights are given away alone, without the optimiser's state"
TRAINING = "train "
BYTES = 4
NO_CLASSIFIER = "it is an attack on classifiers, and this is an autoencoder"


def attack_name(cell: Cell, name: AttackName, victim: int) -> str:
    """The unit that makes an attack on one of a cell's victims."""
    return f"attack {cell.name}, {name}, victim {victim}"


@dataclass(frozen=True, eq=False)
class AuditImages:
    """Images of both splits of a source: victims learn from `pool`, and no victim sees `others`,
    which are for tests and for students."""

    pool: ImageSet
    others: ImageSet


def read_images(audit: Audit) -> AuditImages:
    """Both splits, victims from the larger one. Where they are equally large, or the held-out one
    has more than victims need, that: models of images, and restorers, may know the other. Held-out
    images that are training images, too, are left out. Raises SourceError if they cannot be read,
    ValueError if all held-out images are."""
    skip, channels = audit.skip_corrupt, audit.channels
    train, heldout = (
        cached_images(audit.data, split=split, skip_corrupt=skip, channels=channels)
        for split in ("train", "heldout")
    )
    trained = {content_of(image) for image in train.images}
    copies = [row for row, image in enumerate(heldout.images) if content_of(image) in trained]
    heldout = heldout.without(copies, because="they are in the training split, too")
    wanted = 8 * (audit.recipe.n_images or audit.most_images)
    if len(heldout) >= min(len(train), wanted):
        return AuditImages(heldout, train)
    return AuditImages(train, heldout)


def resolved(audit: Audit, images: AuditImages) -> Audit:
    """The audit with the number of images that its source has for a victim, where none is asked
    for. Raises ValueError if there are too few."""
    if audit.recipe.n_images is not None:
        return audit
    counts = _counts(audit.recipe, images.pool)
    each = min(int(counts.min()) // 2, audit.most_images // len(counts))
    if each < FEWEST:
        raise ValueError(
            f"{audit.data} has {counts.min()} images of label {counts.argmin()} for two victims "
            f"that share them; at least {2 * FEWEST} are needed: give more images, or others"
        )
    return replace(audit, recipe=replace(audit.recipe, n_images=each * len(counts)))


def pool_of(recipe: VictimRecipe, images: AuditImages, *, seed: int) -> Pictures:
    """The 2n images of victims of a recipe, equally many of each label; those of a smaller recipe
    are the first of a larger one's. Raises ValueError if the source has too few."""
    assert recipe.n_images is not None
    counts = _counts(recipe, images.pool)
    each = 2 * recipe.n_images // len(counts)
    if counts.min() < each:
        raise ValueError(
            f"victims of {recipe.n_images} images need a pool of {each} of each label, but the "
            f"source has {counts.min()} of label {counts.argmin()}; give more images, or lower "
            "recipe.n_images"
        )
    labels, _task = recipe.labels_of(images.pool.labels, images.pool.class_names)
    rows = []
    for label in range(len(counts)):
        there = np.flatnonzero(labels == label)
        order = np.random.default_rng((seed, 11, label)).permutation(len(there))
        rows.append(there[order[:each]])
    every = np.stack(rows, 1).flatten()
    return Pictures(images.pool.images[every], labels[every], every)


def unseen(
    recipe: VictimRecipe, images: AuditImages, n_tests: int, *, seed: int
) -> tuple[Pictures, Pictures]:
    """Images that no victim sees, with a label of the recipe: at most `n_tests` that accuracy is
    measured on, and the others, which are public."""
    labels, _task = recipe.labels_of(images.others.labels, images.others.class_names)
    rows = np.flatnonzero(labels >= 0)
    rows = rows[np.random.default_rng((seed, 12)).permutation(len(rows))]
    others = Pictures(images.others.images[rows], labels[rows], rows)
    at = np.arange(len(others))
    return others.some(at < n_tests), others.some(at >= n_tests)


def _counts(recipe: VictimRecipe, images: ImageSet) -> npt.NDArray[np.intp]:
    """Number of images of each label."""
    labels, _task = recipe.labels_of(images.labels, images.class_names)
    return np.bincount(labels[labels >= 0], minlength=recipe.n_classes)


class AuditPlan:
    """The units of an audit in a folder. `refused`: why a cell has no victims, by its number;
    `trained_by`: the cell that trains a cell's networks, mostly itself. `subject`: what is audited.
    `sides`: names of the images that victims learn, and of the others."""

    subject: Literal["recipe", "weights", "gradients"] = "recipe"

    def __init__(self, study: Audit, images: AuditImages, root: Path, *, device: str) -> None:
        self.study, self.images, self.device = study, images, device
        self.root, self.folder = str(root), Folder(root)
        self.sides: tuple[str, str] = (images.pool.split, images.others.split)
        self.jobs: dict[int, VictimsJob] = {}
        self.refused: dict[int, str] = {}
        for cell in study.cells:
            try:
                self.jobs[cell.number] = self._job(cell)
            except ValueError as error:
                if cell.is_base:
                    raise
                self.refused[cell.number] = str(error)
        # cells that differ only in what becomes of trained networks take those of the first that
        # gives them as they are
        keys = {number: job.training_key for number, job in self.jobs.items()}
        whole = {keys[n]: n for n, j in reversed(self.jobs.items()) if j.recipe.gives_all}
        self.trained_by = {number: whole.get(key, number) for number, key in keys.items()}
        for number, other in self.trained_by.items():
            if other != number:
                networks_of = self.jobs[other].key
                self.jobs[number] = replace(self.jobs[number], networks_of=networks_of)
        base = study.cells[0]
        for limit in study.limits:
            asked = RECONSTRUCTION if limit.of == "good" else study.attacks
            why = {name: self.why_not(base, name) for name in study.attacks if name in asked}
            if None not in why.values():
                reasons = "; ".join(f"{name}: {text}" for name, text in why.items())
                raise ValueError(
                    f"{limit.text} can be held against no attack ({reasons or 'none is chosen'}); "
                    "choose attacks that can be made, or leave the limit out"
                )

    @cached_property
    def task(self) -> str:
        """The victims' task in words."""
        pool = self.images.pool
        return self.study.recipe.labels_of(pool.labels, pool.class_names)[1]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Numbers of cells by name."""
        return {cell.name: cell.number for cell in self.study.cells}

    def first_units(self) -> list[Unit]:
        """Train the victims of every cell, except those that another cell trains."""
        return [self._training(number) for number in self.jobs if self.trained_by[number] == number]

    def more_units(self, unit: Unit, given: Mapping[str, Any]) -> Iterable[Unit]:
        """Attack the trained victims, and make those of cells that start from the same networks."""
        del given
        if not unit.name.startswith(TRAINING):
            return []
        cell = self.study.cells[self.numbers[unit.name.removeprefix(TRAINING)]]
        waited = [k for k, by in self.trained_by.items() if by == cell.number != k]
        return [
            *(self._training(number) for number in waited),
            *(
                Unit(attack_name(cell, name, v), AttackJob.run, job)
                for name in self.reconstructions(cell)
                for v, job in enumerate(self.attacks(cell, name))
            ),
        ]

    def _training(self, number: int) -> Unit:
        return Unit(TRAINING + self.study.cells[number].name, VictimsJob.run, self.jobs[number])

    def reconstructions(self, cell: Cell) -> list[AttackName]:
        """The attacks on a cell's victims that give pictures."""
        chosen = (name for name in RECONSTRUCTION if name in self.study.attacks)
        return [name for name in chosen if self.why_not(cell, name) is None]

    @cached_property
    def n_units(self) -> int:
        n_attacks = sum(len(self.reconstructions(cell)) for cell in self.study.cells)
        return len(self.jobs) + self.study.n_victims * n_attacks

    def attacks(self, cell: Cell, name: AttackName) -> list[AttackJob]:
        """The attack on every victim of a cell."""
        job, attack = self.jobs[cell.number], self.attack(cell, name)
        return AttackJob.on(job, attack, mask=self.study.mask, keeps_pictures=cell.is_base)

    def scores(self, cell: Cell, name: AttackName) -> tuple[Arrays, float]:
        """(victims, pool) `ssim`, `identified` and `control` of an attack, and its seconds. Raises
        ValueError if one is not there."""
        found = [self.folder.product(job.key) for job in self.attacks(cell, name)]
        made = [product for product in found if product is not None]
        if len(made) < len(found):
            raise ValueError(f"{cell.name}, {name}: not there; run the same command again")
        stacked = {key: np.stack([arrays[key] for arrays, _facts in made])
                   for key in ("ssim", "identified", "control")}  # fmt: skip
        return stacked, float(np.mean([facts["seconds"] for _arrays, facts in made]))

    def attack(self, cell: Cell, name: AttackName) -> AnyAttack:
        return self.study.attack(name, self.jobs[cell.number].recipe)

    def why_not(self, cell: Cell, name: AttackName) -> str | None:
        """Why an attack is not made on a cell's victims; None if it is made."""
        if cell.number in self.refused:
            return self.refused[cell.number]
        if name not in RECONSTRUCTION:
            return None
        recipe, job, attack = cell.recipe, self.jobs[cell.number], self.attack(cell, name)
        if isinstance(attack, StrongInversion | NoiseAware):
            needed = recipe.cut if name == "features" else recipe.autoencoder
            return NEEDS[name] if needed is None else None
        try:
            if recipe.autoencoder is not None:
                raise ValueError(NO_CLASSIFIER)
            if isinstance(attack, SpanAttack):
                check_victim(job.architecture)
                check_pictures(attack, len(job.pool) // 2, job.shape)
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

    def _job(self, cell: Cell) -> VictimsJob:
        made, recipe, n_tests = self.study, cell.recipe, self.n_tests
        assert recipe.n_images is not None
        pool = pool_of(recipe, self.images, seed=made.seed)
        tests, public = unseen(recipe, self.images, n_tests, seed=made.seed)
        if recipe.private is not None and not len(tests):
            raise ValueError(
                "a private network is centred by the mean of images that none learns, and the "
                "source has no others; give more images"
            )
        if recipe.distilled and len(public) < FEWEST:
            raise ValueError(
                f"a student needs public images beside the {n_tests} that accuracy is measured on, "
                "and the source has none left; lower n_tests, or give more images"
            )
        n_public = PUBLIC_PER_IMAGE * recipe.n_images
        members = complementary_halves(
            pool.labels, made.n_victims, seeded_generator(made.seed, 0, "audit members")
        )
        return VictimsJob(
            root=self.root,
            device=self.device,
            recipe=recipe,
            pool=pool,
            members=members.numpy(),
            tests=tests,
            public=public.some(np.arange(len(public)) < n_public) if recipe.distilled else None,
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


def costs_of(plan: AuditPlan, _device: str = "") -> list[Cost]:
    """Estimates for all cells that have victims. Two short trainings of every cell are timed, and a
    short attack of each kind on their victims; the remaining epochs and iterations are assumed to
    take as long. Attacks that converge end sooner."""
    before = torch.get_num_threads()
    torch.set_num_threads(plan.study.threads)
    try:
        known: dict[Any, float] = {}
        return [_cost(plan, cell, known) for cell in plan.study.cells if cell.number in plan.jobs]
    finally:
        torch.set_num_threads(before)


def _cost(plan: AuditPlan, cell: Cell, known: dict[Any, float]) -> Cost:
    """The estimate of a cell; `known`: seconds of attacks on victims like those of other cells."""
    job, n_victims, is_trained = plan.jobs[cell.number], plan.study.n_victims, True
    recipe, n, coder = job.recipe, len(job.pool) // 2, job.recipe.autoencoder
    if job.given is not None or plan.trained_by[cell.number] != cell.number:
        is_trained = recipe.distilled and job.given is None
    n_epochs = recipe.training.epochs if coder is None else coder.training.epochs
    victims: Arrays = {}

    def train(epochs: int) -> None:
        short = replace(recipe, training=replace(recipe.training, epochs=epochs))
        if coder is not None:
            few = replace(coder.training, epochs=epochs, check_every=epochs, levels=(1e-30,))
            short = replace(recipe, autoencoder=replace(coder, training=few))
        victims.update(replace(job, recipe=short, networks_of="").make(no_progress)[0])

    train_s = in_full(train, n_epochs if is_trained else 1)
    if plan.trained_by[cell.number] != cell.number:
        train_s /= 2  # the student alone
    seconds: dict[AttackName, float] = {}
    attacks = {name: plan.attacks(cell, name)[0] for name in plan.reconstructions(cell)}
    for name, one in attacks.items():
        key, attack = (name, n, recipe.victim, recipe.cut, coder), one.attack
        if isinstance(attack, SpanAttack):
            n_steps = max(attack.n_network, attack.n_independent)
        else:
            n_steps = attack.n_iterations if isinstance(attack, KKTAttack) else attack.n_steps

        def run(n: int, one: AttackJob = one, attack: AnyAttack = attack) -> None:
            if isinstance(attack, SpanAttack):
                attack = replace(attack, n_network=n, n_independent=n)
            elif isinstance(attack, KKTAttack):
                attack = replace(attack, save_at=(n,))
            else:
                attack = replace(attack, n_steps=n)
            replace(one, attack=attack).scored(victims, no_progress)

        if key not in known:
            known[key] = in_full(run, n_steps)
        seconds[name] = known[key]
    weights = 2 * BYTES * job.architecture.n_parameters  # and the start
    if coder is not None:
        weights = BYTES * n_parameters(coder.network.on(job.shape))
    pictures = job.pool.images.size * len(attacks) * cell.is_base
    return Cost(
        name=cell.name,
        counts={"images": n, "victims": n_victims, "attacks": len(attacks) * n_victims},
        seconds_of={
            "training": train_s if is_trained else 0.0,
            "attacks take": n_victims * sum(seconds.values()),
        },
        disk_bytes=int(n_victims * (weights + pictures)),
    )
