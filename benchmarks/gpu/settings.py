"""Settings of the chain on a GPU: the paper's victims and the schedule that the time allows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flows.presets import half_hour_restorers, small_restorers
from flows.recipe import Recipe, one_phase
from recon_core.attacks.kkt.objective import SAVE_AT_PAPER, KKTAttack
from recon_core.balance import Curation
from recon_core.experiments import KKT
from recon_core.precision import Precision
from recon_core.victims.network import Network
from recon_core.victims.training import Training
from storage.sources.load import Split, load_images
from tasks.evaluation.settings import Evaluation

OVERHEAD_S = 25.0
"""To start the workers, and to match and write what came back."""
MOST_PARTS = 8


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the victims, of their attacks and of the restorers' trainings. `precision`: of
    float32 products."""

    widths: tuple[int, ...]
    n_images: int
    n_heldout: int
    n_batched: int
    epochs: int
    save_at: tuple[int, ...]
    n_steps: int
    batch_size: int
    precision: Precision


PAPER = Size(
    widths=(1000, 1000),
    n_images=300,
    n_heldout=2,
    n_batched=8,
    epochs=50_000,
    save_at=(2400, 7000, SAVE_AT_PAPER[-1]),
    n_steps=5000,
    batch_size=256,
    precision="tf32",
)
"""A run of the image restoration paper (section 2), saved at three of its iterations."""
SMALL = Size(
    widths=(32, 32),
    n_images=8,
    n_heldout=2,
    n_batched=2,
    epochs=400,
    save_at=(50, 100, 200),
    n_steps=8,
    batch_size=8,
    precision="ieee",
)
"""A rehearsal: every stage, in little time on a CPU; its numbers mean nothing."""


@dataclass(frozen=True)
class Pace:
    """Seconds of one epoch and of one iteration of a whole part."""

    epoch_s: float
    iteration_s: float


@dataclass(frozen=True)
class Schedule:
    """Number of parts of runs, and the share of the paper's epochs and iterations."""

    n_parts: int
    share: float


UNKNOWN_PACE = Schedule(n_parts=2, share=0.02)


def schedule(size: Size, pace: Pace | None, seconds: float) -> Schedule:
    """As many parts with the whole schedule as fit; if not two do, two with a share of it."""
    if pace is None:
        return UNKNOWN_PACE
    part = size.epochs * pace.epoch_s + size.save_at[-1] * pace.iteration_s
    free = max(seconds - OVERHEAD_S, 0.0)
    n_parts = int(free // part)
    if n_parts >= 2:
        return Schedule(n_parts=min(n_parts, MOST_PARTS), share=1.0)
    return Schedule(n_parts=2, share=max(0.01, round(free / (2 * part), 3)))


def recipe_of(size: Size, planned: Schedule, data: str) -> Recipe:
    """The whole job, from images to a report."""
    n_images, n_heldout = (n_fitting(data, split, size) for split in ("train", "heldout"))
    experiment = KKT(
        victim=Network(widths=size.widths),
        training=Training(epochs=max(1, round(planned.share * size.epochs))),
        attack=KKTAttack(
            n_candidates=4 * (n_images // 3),
            save_at=tuple(sorted({max(1, round(planned.share * step)) for step in size.save_at})),
        ),
        precision=size.precision,
    )
    plans = small_restorers() if size == SMALL else half_hour_restorers()
    restorers = {
        name: replace(
            plan,
            training=replace(plan.training, n_steps=size.n_steps, batch_size=size.batch_size),
            validation=replace(plan.validation, n_parts=1, every=size.n_steps, n_samples=2),
        )
        for name, plan in plans.items()
    }
    return Recipe(
        name="gpu",
        data=data,
        encoding="uint8",
        experiment=experiment,
        sampling=one_phase(
            planned.n_parts * size.n_batched, images=n_images, per_part=size.n_batched
        ),
        heldout=one_phase(size.n_heldout, images=n_heldout, per_part=size.n_heldout),
        curation=Curation(mixture_fraction=1.0),
        restorers=restorers,
        evaluation=Evaluation(baselines=(), n_samples=8),
    )


def again_of(recipe: Recipe) -> Recipe:
    """A store of one short part, all candidates kept, that is made twice."""
    assert isinstance(recipe.experiment, KKT)
    brief = replace(
        recipe.experiment,
        training=Training(epochs=200),
        attack=KKTAttack(n_candidates=40, save_at=(50,)),
        keep="all",
    )
    sampling = one_phase(2, images=recipe.sampling.images_per_run, per_part=2)
    return replace(recipe, experiment=brief, sampling=sampling, restorers={})


def n_fitting(data: str, split: Split, size: Size) -> int:
    """Images of a run: the paper's number, or fewer where the source has too few. Of held-out
    images as many as one victim learns must be left for decoys."""
    images = load_images(data, split=split)
    labels, _task = KKT().labels_of(images.labels, images.class_names)
    fewest = int(np.bincount(labels[labels >= 0]).min())
    if split == "heldout":
        fewest //= size.n_heldout + 1
    return 2 * min(size.n_images // 2, fewest)


def described(size: Size, planned: Schedule, recipe: Recipe) -> dict[str, Any]:
    """The schedule beside the paper's, for the record."""
    experiment = recipe.experiment
    assert isinstance(experiment, KKT)
    assert isinstance(experiment.attack, KKTAttack)
    return {
        **asdict(planned),
        "data": recipe.data,
        "widths": list(size.widths),
        "images of a victim": recipe.sampling.images_per_run,
        "images of a held-out victim": recipe.heldout.images_per_run,
        "runs": recipe.sampling.n_runs,
        "runs at once": recipe.sampling.runs_per_part,
        "epochs": experiment.training.epochs,
        "epochs of the paper": KKT().training.epochs,
        "iterations": experiment.attack.n_iterations,
        "iterations of the paper": SAVE_AT_PAPER[-1],
        "first layer": experiment.victim.init_std_first,
        "precision": f"{experiment.dtype}, {experiment.precision}",
    }
