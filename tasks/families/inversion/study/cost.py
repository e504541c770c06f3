"""Costs of a study of split classifiers: seconds and disk, before anything is run.

Steps of training, gradients of the attacks and steps of the restorer are timed on the study's own
networks and images, a few of each; all of them are done whatever comes out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion, whiten
from recon_core.restore import Fit
from recon_core.restore.examples import Examples
from recon_core.types import N_AUGMENT, seeded_generator
from recon_core.victims.split import initial_weights
from recon_core.victims.split_training import train_split
from tasks.families.inversion.study.images import Part
from tasks.families.inversion.study.plan import InversionPlan
from tasks.families.inversion.study.settings import Cell, InversionSource
from tasks.families.inversion.study.units import Victim, VictimId, pictures, run_attack
from tasks.study.cost import Cost, seconds_of

STEPS = 3
MAX_ROLES = 4
"""Cells of a source that get a restorer: without defence, the paper's, and two sweet spots."""
BYTES = 4


def costs_of(plan: InversionPlan, _device: str = "") -> list[Cost]:
    """Costs of every source; measured on this machine in some seconds."""
    return [_cost(plan, source) for source in plan.study.sources]


def _cost(plan: InversionPlan, source: InversionSource) -> Cost:
    study = plan.study
    per_cut: dict[int, int] = {}
    for cell in source.cells():
        per_cut[cell.cut] = per_cut.get(cell.cut, 0) + len(plan.seeds(cell))
    per_cut[source.cut] += 2 * (study.n_seeds - study.n_grid_seeds) + 1  # sweet spots, PSIM's
    train_s = invert_s = disk = 0.0
    for cut, n in per_cut.items():
        victim = plan.victim(Cell(source.name, cut, None), 0)
        train_s += n * _training(plan, victim)
        invert_s += n * _inverting(plan, victim)
        disk += n * _bytes(victim, source)
    n_chains = 0 if study.chain is None else MAX_ROLES * min(study.n_seeds, study.chain.n_seeds)
    restore_s = n_chains * _restoring(plan, source) if n_chains else 0.0
    return Cost(
        name=source.name,
        counts={"victims": sum(per_cut.values())},
        seconds_of={"training": train_s, "inversion": invert_s, "restorers": restore_s},
        disk_bytes=int(disk),
    )


def _training(plan: InversionPlan, victim: VictimId) -> float:
    source, device = victim.source, torch.device(plan.device)
    per_class = source.training.per_class
    x = pictures(plan.images[source.name].train, device)
    labels = torch.from_numpy(plan.images[source.name].train.labels).to(device)
    n_batches = source.n_train // source.n_classes // per_class
    few = slice(0, STEPS * per_class * source.n_classes)
    steps = min(STEPS, n_batches)
    model, n = victim.model(), plan.study.victims_at_once
    start = initial_weights(model, [seeded_generator(0, 0, "cost")], dtype=torch.float32)
    weights = {k: t.repeat(n, *[1] * (t.dim() - 1)).to(device) for k, t in start.items()}

    def run() -> None:
        train_split(
            model,
            weights,
            x[few],
            labels[few],
            defences=[source.mixcon(*source.chosen)] * n,
            training=replace(source.training, epochs=1),
            shuffle=lambda _s, _e: seeded_generator(0, 0, "cost"),
        )

    return seconds_of(run, times=2) / n / steps * n_batches * source.training.epochs


def _inverting(plan: InversionPlan, victim: VictimId) -> float:
    device, study = torch.device(plan.device), plan.study
    job = plan.inverting(victim)
    model = victim.model()
    start = initial_weights(model, [seeded_generator(0, 0, "cost")], dtype=torch.float32)
    own = Victim(model, {k: t.to(device) for k, t in start.items()}, diverged=False)
    descent, strong = victim.source.attack, study.strong
    short, quick = replace(descent, n_steps=STEPS), replace(strong, n_steps=STEPS)
    first = replace(quick, starts=strong.starts[:1])
    tries: list[tuple[Part, GradientInversion | StrongInversion, int]] = [
        (job.inverted, short, 2 * descent.n_steps),
        (job.tuning, short, len(study.rates) * descent.n_steps),
        (job.inverted, quick, strong.n_steps),
        (job.tuning, first, len(study.zetas) * strong.n_steps),
    ]
    seconds = 0.0
    for part, attack, n_steps in tries:
        x = pictures(part, device)
        z = own.sent(x)
        whitening = None if attack is short else whiten(z)
        drawn = victim.generators(len(x), "cost")
        run = partial(run_attack, (attack, whitening), own, z, x, drawn)
        seconds += seconds_of(run, times=2) / STEPS * n_steps
    return seconds


def _restoring(plan: InversionPlan, source: InversionSource) -> float:
    chain = plan.study.chain
    if chain is None:
        return 0.0
    victim = plan.victim(Cell(source.name, source.cut, None), 0)
    pairs = plan.images[source.name].public.after(plan.study.n_tuning)
    share = len(pairs.images) / source.n_inverted
    fit = Fit(chain.restorer, chain.training, device=plan.device)
    shape = (chain.training.batch_size, 3, source.size, source.size)
    noise = torch.rand(shape, generator=seeded_generator(0, 0, "cost")) * 2 - 1
    batch = Examples(
        condition=noise, target=noise, augment=torch.zeros(chain.training.batch_size, N_AUGMENT)
    )
    step = seconds_of(lambda: fit.update(batch), times=2)
    return _inverting(plan, victim) * (1 + share) / 2 + step * chain.training.n_steps


def _bytes(victim: VictimId, source: InversionSource) -> float:
    weights = sum(torch.Size(s).numel() for s in victim.model().tensor_shapes.values())
    return BYTES * weights + 3 * source.n_inverted * source.channels * source.size**2
