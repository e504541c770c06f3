"""Small studies for the tests: victims of a few tiny pictures, attacked in a second or two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recon_core.attacks.kkt.objective import KKTAttack, Search
from recon_core.experiments import KKT
from recon_core.optimisers import Optimiser
from recon_core.victims.losses import Loss
from recon_core.victims.network import Conv, Network
from recon_core.victims.training import Training
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.campaign.part import PartJob, batch_of, run_part
from tasks.campaign.plan import open_store
from tasks.evaluation.evaluate import evaluate
from tasks.families.weights.study.settings import Axis, Cell, Study, StudyPlan

SIDE = 16
CLASSES = ("a", "b", "c", "d")


def pictures(n: int = 160, seed: int = 0) -> ImageSet:
    """Random pictures of four classes."""
    rng = np.random.default_rng(seed)
    return ImageSet(
        name="random",
        split="heldout",
        images=rng.integers(0, 256, (n, 3, SIDE, SIDE), dtype=np.uint8),
        labels=np.arange(n) % len(CLASSES),
        class_names=CLASSES,
    )


def experiment(n_images: int, *, n_classes: int = 2, conv: Conv | None = None) -> KKT:
    """A victim of width 16, trained for 100 epochs and attacked for 30 iterations."""
    is_multi = n_classes > 2
    return KKT(
        augment_p=0.0,
        n_classes=n_classes,
        keep="all",
        victim=Network(widths=(16,), conv=conv, bias="first"),
        training=Training(epochs=100, loss=Loss(kind="ce" if is_multi else "bce")),
        attack=KKTAttack(
            condition="multiclass" if is_multi else "binary",
            n_candidates=2 * n_images,
            optimiser=Optimiser(rule="gd", lr=0.1, momentum=0.9),
            search=Search(lr=(0.01, 0.1)),
            save_at=(30,),
        ),
    )


def small_study(**changed: Any) -> Study:
    """Five cells: two sizes of binary victims, two of four classes, and one with a convolution."""
    cells = [
        Cell(name=f"two classes, {n}", panel="grid", at={"n_classes": 2, "n_images": n},
             images_per_run=n, experiment=experiment(n))
        for n in (4, 8)
    ] + [
        Cell(name=f"four classes, {n}", panel="grid", at={"n_classes": 4, "n_images": n},
             images_per_run=n, experiment=experiment(n, n_classes=4))
        for n in (4, 8)
    ] + [
        Cell(name="convolution", panel="conv", at={"kernel": 3}, images_per_run=4,
             experiment=experiment(4, conv=Conv(kernel=3, channels=2)))
    ]  # fmt: skip
    axes = {
        "n_classes": Axis(title="classes", values=(2, 4), scale="linear"),
        "n_images": Axis(title="images", values=(4, 8), scale="log"),
        "kernel": Axis(title="kernel", values=(3,)),
    }
    study = Study(
        name="small",
        preset="cpu",
        data="photos",
        cells=tuple(cells),
        axes=axes,
        n_victims=2,
        n_attacks=2,
        runs_per_part=1,
        n_tests=40,
    )
    return replace(study, **changed)


def attacked(root: Path, plan: StudyPlan, *, parts: Any = None) -> Dataset:
    """The store of a plan, with some or all of its parts, made in this process."""
    dataset = open_store(root, plan.study, plan.images)
    key = plan.study.victims_fingerprint(plan.images)
    for part in range(plan.sampling.n_parts) if parts is None else parts:
        planned = plan.part(part)
        job = PartJob(
            root=str(root),
            planned=planned,
            images=batch_of(planned.specs, plan.images.images),
            fingerprint=plan.study.fingerprint(plan.images),
            source_hash=plan.images.content_hash,
            device="cpu",
            threads=1,
            victims=(str(root / "victims"), key),
        )
        run_part(job)
    dataset.refresh()
    return dataset


def scored(out: Path, plan: StudyPlan, dataset: Dataset) -> Mapping[str, Any]:
    """The evaluation of a study's store."""
    return evaluate(
        plan.study.evaluation,
        dataset=dataset,
        heldout=plan.images,
        restorers={},
        out=out,
        device="cpu",
    )
