"""Small audits: of noise or of photographs, with products that are made here or made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.optimisers import Optimiser
from recon_core.victims.network import Network
from recon_core.victims.training import Training
from storage.sources.load import ImageSet, Split
from tasks.audit.attacks import AttackJob
from tasks.audit.plan import AuditImages, AuditPlan, read_images
from tasks.audit.recipe import VictimRecipe
from tasks.audit.record import describe_audit
from tasks.audit.settings import Audit, Defence
from tasks.audit.victims import VictimsJob
from tasks.study.executor import Outcome, run_unit

Scores = npt.NDArray[np.float64]
CLASSES = ("round", "square")


def recipe(**changes: Any) -> VictimRecipe:
    """Victims of 32 neurons a layer that learn eight images."""
    training = Training(epochs=300, optimiser=Optimiser(rule="gd", lr=0.2), span="auto")
    made = VictimRecipe(n_images=8, victim=Network(widths=(32, 32)), training=training)
    return replace(made, **changes)


def audit(**changes: Any) -> Audit:
    """Four victims without a defence, one attack on weights and both on membership."""
    made: dict[str, Any] = {
        "preset": "cpu", "data": "photos", "recipe": recipe(), "n_victims": 4, "n_tests": 40,
        "attacks": ("span", "loss", "likelihood_ratio"),
    }  # fmt: skip
    return Audit(**made | changes)


def defence(name: str, **changes: Any) -> Defence:
    return Defence(name=name, group="own", about="One of these tests.", **changes)


def noise(n: int, *, seed: int, split: Split = "train", classes: tuple[str, ...] = CLASSES,
          size: int = 16) -> ImageSet:  # fmt: skip
    """Images of grey noise, of every class as many."""
    rng = np.random.default_rng(seed)
    return ImageSet(
        name="noise",
        split=split,
        images=rng.integers(0, 256, (n, 1, size, size), np.uint8),
        labels=np.arange(n) % len(classes),
        class_names=classes,
    )


def images_of(n: int, n_others: int = 60, **changes: Any) -> AuditImages:
    """A pool of noise, and others."""
    others = noise(n_others, seed=2, split="heldout", **changes)
    return AuditImages(noise(n, seed=1, **changes), others)


def plan_of(made: Audit, root: Path, images: AuditImages | None = None) -> AuditPlan:
    return AuditPlan(made, images or read_images(made), root, device="cpu")


def run(plan: AuditPlan) -> Outcome:
    """Everything that the plan asks for, made here."""
    done: dict[str, dict[str, Any]] = {}
    waiting = list(plan.first_units())
    while waiting:
        unit = waiting.pop(0)
        done[unit.name] = run_unit(unit, 1)[0]
        waiting += plan.more_units(unit, done[unit.name])
    return Outcome(done, {})


def product(job: VictimsJob | AttackJob) -> dict[str, npt.NDArray[Any]]:
    """What a job leaves, which is run."""
    job.run()
    found = job.folder.product(job.key)
    assert found is not None
    return found[0]


def put_victims(plan: AuditPlan, number: int = 0, **arrays: Any) -> None:
    """Made-up answers of a cell's victims, of which nothing can be told."""
    job = plan.jobs[number]
    v, n = job.members.shape
    rng = np.random.default_rng(number)
    made: dict[str, npt.NDArray[Any]] = {
        "confidence": rng.normal(size=(v, n)).astype(np.float32),
        "margin": rng.uniform(1, 2, (v, n)).astype(np.float32),
        "correct": rng.random((v, len(job.tests))) < 0.8,
        "train_accuracy": np.ones(v, np.float32),
        "diverged": np.zeros(v, bool),
    }
    plan.folder.put(job.key, made | arrays, {"seconds": 0.5})


def put_attack(plan: AuditPlan, ssim: Scores, number: int = 0, name: Any = "span") -> None:
    """Made-up scores (victims, pool) of an attack on a cell, and white pictures; what scores above
    .4 is identified, and the mean image scores .1."""
    cell = plan.study.cells[number]
    for job, own in zip(plan.attacks(cell, name), ssim, strict=True):
        arrays: dict[str, npt.NDArray[Any]] = {
            "ssim": own.astype(np.float32),
            "identified": own > 0.4,
            "control": np.full(len(own), 0.1, np.float32),
        }
        if job.keeps_pictures:
            arrays["pictures"] = np.full(job.of.pool.images.shape, 255, np.uint8)
        plan.folder.put(job.key, arrays, {"seconds": 2.0, "n_pictures": len(own)})


def record_of(plan: AuditPlan, failed: dict[str, str] | None = None) -> dict[str, Any]:
    return describe_audit(plan, Outcome({}, failed or {}))
