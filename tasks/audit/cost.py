"""Costs of an audit: seconds, memory and disk of every cell, before anything is run."""

from __future__ import annotations

import math

from recon_core.attacks.kkt.settings import Attack
from recon_core.experiments import KKT, bytes_per_run
from recon_core.victims.training import Training
from tasks.audit.plan import AuditPlan
from tasks.audit.settings import RECONSTRUCTION, Cell, VictimRecipe
from tasks.audit.units import shape_of
from tasks.families.weights.study.cost import (
    Pace,
    Shape,
    attack_seconds,
    measured_pace,
    training_operations,
)
from tasks.study.cost import Cost

BYTES = 4


def costs_of(plan: AuditPlan, device: str) -> list[Cost]:
    """Estimates of all cells that have victims; measured on this machine in some seconds."""
    pace = measured_pace(device)
    return [_cost(plan, cell, pace) for cell in plan.study.cells if cell.number in plan.jobs]


def _cost(plan: AuditPlan, cell: Cell, pace: Pace) -> Cost:
    job, n_victims = plan.jobs[cell.number], plan.study.n_victims
    recipe, n, shape = job.recipe, len(job.pool) // 2, shape_of(job.pool)
    attacks = {
        name: plan.attack(cell, name)
        for name in RECONSTRUCTION
        if name in plan.study.attacks and plan.why_not(cell, name) is None
    }
    train_s = training_seconds(recipe, n, shape, pace)
    if recipe.distilled and job.public is not None:
        train_s += training_seconds(recipe, len(job.public), shape, pace)
    attack_s = sum(
        attack_seconds(as_experiment(recipe, attack), n, shape, pace) for attack in attacks.values()
    )
    pictures = len(job.pool) * math.prod(shape) * len(attacks) * cell.is_base
    weights = BYTES * job.architecture.n_parameters
    stacked = n_victims * bytes_per_run(as_experiment(recipe), n * recipe.views, shape)
    searched = [bytes_per_run(as_experiment(recipe, a), n, shape) for a in attacks.values()]
    return Cost(
        name=cell.name,
        counts={"images": n, "victims": n_victims, "attacks": len(attacks) * n_victims},
        seconds_of={"training": n_victims * train_s, "attacks take": n_victims * attack_s},
        memory_bytes=max([stacked, *searched]),
        disk_bytes=int(n_victims * (2 * weights + pictures)),
    )


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
