"""Costs of an audit: seconds, memory and disk of every cell, before anything is run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.kkt.settings import Attack
from recon_core.experiments import KKT, bytes_per_run
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import n_parameters
from recon_core.victims.training import Training
from tasks.audit.attacks import AnyAttack
from tasks.audit.plan import AuditPlan
from tasks.audit.recipe import AutoencoderRecipe, VictimRecipe
from tasks.audit.settings import RECONSTRUCTION, AttackName, Cell
from tasks.audit.victims import VictimsJob, shape_of
from tasks.families.autoencoder.study.plan import evaluations, pace_of
from tasks.families.weights.study.cost import (
    Pace,
    Shape,
    attack_seconds,
    measured_pace,
    training_operations,
)
from tasks.study.cost import Cost, seconds_of

BYTES = 4
STEPS = 3
"""Steps of an inversion that are timed."""


@dataclass(frozen=True)
class _OfVictim:
    """Seconds of a training and of every attack on one victim; bytes of memory, and of files."""

    training: float
    attacks: dict[AttackName, float]
    memory: int
    weights: int


def costs_of(plan: AuditPlan, device: str) -> list[Cost]:
    """Estimates of all cells that have victims; measured on this machine in some seconds."""
    pace = measured_pace(device)
    return [_cost(plan, cell, pace) for cell in plan.study.cells if cell.number in plan.jobs]


def _cost(plan: AuditPlan, cell: Cell, pace: Pace) -> Cost:
    job, n_victims, one = plan.jobs[cell.number], plan.study.n_victims, _of_victim(plan, cell, pace)
    pictures = job.pool.images.size * len(one.attacks) * cell.is_base
    return Cost(
        name=cell.name,
        counts={
            "images": len(job.pool) // 2,
            "victims": n_victims,
            "attacks": len(one.attacks) * n_victims,
        },
        seconds_of={
            "training": n_victims * one.training,
            "attacks take": n_victims * sum(one.attacks.values()),
        },
        memory_bytes=one.memory,
        disk_bytes=int(n_victims * (one.weights + pictures)),
    )


def _of_victim(plan: AuditPlan, cell: Cell, pace: Pace) -> _OfVictim:
    """Networks that are given, or that another cell trains, take no training."""
    job = plan.jobs[cell.number]
    attacks = {
        name: plan.attack(cell, name)
        for name in RECONSTRUCTION
        if name in plan.study.attacks and plan.why_not(cell, name) is None
    }
    if job.recipe.autoencoder is not None:
        found = _of_autoencoders(job, job.recipe.autoencoder, attacks)
    else:
        found = _of_classifiers(job, attacks, pace)
    train_s = found.training
    if plan.trained_by[cell.number] != cell.number or job.given is not None:
        train_s = 0.0
    if job.public is not None:
        train_s += training_seconds(job.recipe, len(job.public), shape_of(job.pool), pace)
    return replace(found, training=train_s)


def _of_classifiers(
    job: VictimsJob, attacks: Mapping[AttackName, AnyAttack], pace: Pace
) -> _OfVictim:
    recipe, n, shape = job.recipe, len(job.pool) // 2, shape_of(job.pool)
    train_s = training_seconds(recipe, n, shape, pace)
    needed = [len(job.members) * bytes_per_run(as_experiment(recipe), n * recipe.views, shape)]
    seconds: dict[AttackName, float] = {}
    for name, attack in attacks.items():
        if isinstance(attack, StrongInversion):
            seconds[name] = _inverting(job, attack, n)
        elif not isinstance(attack, NoiseAware):
            seconds[name] = attack_seconds(as_experiment(recipe, attack), n, shape, pace)
            needed.append(bytes_per_run(as_experiment(recipe, attack), n, shape))
    return _OfVictim(train_s, seconds, max(needed), 2 * BYTES * job.architecture.n_parameters)


def _of_autoencoders(
    job: VictimsJob, recipe: AutoencoderRecipe, attacks: Mapping[AttackName, AnyAttack]
) -> _OfVictim:
    n, shape = len(job.pool) // 2 * job.recipe.views, shape_of(job.pool)
    step, call = pace_of(recipe.network.on(shape), job.device)
    size = recipe.training.batch_size or n
    train_s = recipe.training.epochs * n / size * step(size)
    asked = call(len(job.pool))
    seconds = {
        name: evaluations(attack) * asked
        for name, attack in attacks.items()
        if isinstance(attack, NoiseAware)
    }
    weights = BYTES * n_parameters(recipe.network.on(shape))
    memory = len(job.members) * (4 * weights + BYTES * n * math.prod(shape))
    return _OfVictim(train_s, seconds, memory, weights)


def _inverting(job: VictimsJob, attack: StrongInversion, n_images: int) -> float:
    """Seconds of an inversion of so many images, of which a few steps are made on noise."""
    device, shape, cut = torch.device(job.device), shape_of(job.pool), job.recipe.cut
    assert cut is not None
    drawn = seeded_generator(0, 0, "cost")
    weights = job.architecture.initial([drawn], dtype=torch.float32).map(lambda t: t.to(device))
    x = torch.rand(n_images, *shape, generator=drawn).to(device)

    def h(some: Tensor) -> Tensor:
        return job.architecture.features(weights, some.flatten(1)[None], cut)[0]

    few = replace(attack, n_steps=STEPS)
    generators = [drawn] * n_images
    with torch.no_grad():
        z = h(x)
    seconds = seconds_of(lambda: few.invert(h, z, shape=shape, generators=generators), times=2)
    return seconds / STEPS * attack.n_steps


def training_seconds(recipe: VictimRecipe, n_images: int, shape: Shape, pace: Pace) -> float:
    """Seconds of one training; of a noisy one nothing is saved by the span."""
    n, training = n_images * recipe.views, recipe.training
    experiment = as_experiment(recipe)
    if recipe.is_noisy:
        plain = Training(epochs=training.epochs, optimiser=training.optimiser, loss=training.loss)
        experiment = KKT(
            victim=recipe.victim, training=plain, n_classes=recipe.n_classes, augment_p=0.0,
            attack=experiment.attack,
        )  # fmt: skip
    n_steps = math.ceil(n / (training.batch_size or n))
    epoch = pace.epoch_s * n_steps
    return training.epochs * (
        epoch + training_operations(experiment, n, shape) / pace.training_rate
    )


def as_experiment(recipe: VictimRecipe, attack: Attack | None = None) -> KKT:
    """The same victims in the family `kkt`, for what is counted there."""
    from recon_core.attacks.kkt.objective import KKTAttack

    return KKT(
        augment_p=0.0,
        n_classes=recipe.n_classes,
        victim=recipe.victim,
        training=recipe.training,
        attack=attack or KKTAttack(condition=recipe.condition, n_candidates=2),
    )
