"""The victims of a study, trained before any attack and examined afterwards, and its record.

If victims are trained first, the seconds of a part are those of its attack alone. They are stored
where the parts look for them (`tasks.campaign.plan`); a worker that cannot read that folder trains
a victim again. Cells that differ only in the attack share their victims. study.json
(docs/studies.md) has the scores of the study's evaluation (docs/evaluation.md), cell by cell, and
what is measured on the victims: losses, accuracy on unseen images, kernels of the first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.attacks.kkt.run import KnownVictim
from recon_core.experiments import KKT, Experiment
from recon_core.summary import detect, summarise
from recon_core.types import Progress, RunSpec, Victims, no_progress, seeded_generator
from storage.pairs.dataset import Dataset
from tasks.campaign.plan import VICTIMS, kept_victims, sha256_of, without_attack
from tasks.cluster.jobs import device_name
from tasks.evaluation.record import rounded
from tasks.families.weights.study.settings import Cell, Study, StudyPlan

DIGITS = 6
N_SHOWN = 10
"""Pairs of a cell that are stored as pictures, best first."""
KEPT = ("n", "n_good", "good_fraction", "good_interval", "mean_ssim", "mean_ssim_interval",
        "best_ssim", "n_good_ssim3", "mean_ssim3")  # fmt: skip
METHOD = "plain"
SCORES = ("ssim", "haarpsi", "ssim3")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class VictimJob:
    """A victim's training on images (n, c, h, w). `numbers`: those by which the study knows it."""

    experiment: Experiment
    spec: RunSpec
    numbers: tuple[int, ...]
    images: npt.NDArray[np.uint8]
    device: str
    victims: tuple[str, str]


def train_victim(job: VictimJob, progress: Progress = no_progress) -> dict[str, Any]:
    """Train a victim unless it is stored, and store it under each of its numbers."""
    kept = kept_victims(job.victims, device_name(job.device))
    assert kept is not None
    images, device = torch.from_numpy(job.images), torch.device(job.device)
    job.experiment.train_victim(job.spec, images, device=device, victims=kept)
    trained = kept.get(job.spec.victim)
    for number in job.numbers:
        if trained is not None and kept.get(number) is None:
            kept.put(number, trained)
    progress(1.0)
    return {}


def jobs_of(plan: StudyPlan, dataset: Dataset, device: str) -> list[VictimJob]:
    """Trainings of the victims that are still to be attacked, those with most images first."""
    study, stored = plan.study, {receipt.part for receipt in dataset.receipts}
    missing = {
        part * study.runs_per_part // study.n_attacks
        for part in range(plan.sampling.n_parts)
        if part not in stored
    }
    same: dict[str, list[int]] = {}
    for victim in sorted(missing):
        spec = plan.spec(victim * study.n_attacks)
        experiment = asdict(plan.cell(victim).experiment)
        without_attack(experiment)
        key = sha256_of([experiment, spec.image_ids, spec.labels, spec.victim_stream])
        same.setdefault(key, []).append(victim)
    folder = str(Path(dataset.root) / VICTIMS)
    jobs = []
    for numbers in same.values():
        spec = plan.spec(numbers[0] * study.n_attacks)
        job = VictimJob(
            experiment=plan.cell(numbers[0]).experiment,
            spec=spec,
            numbers=tuple(numbers),
            images=plan.images.images[list(spec.image_ids)],
            device=device,
            victims=(folder, study.victims_fingerprint(plan.images)),
        )
        jobs.append(job)
    return sorted(jobs, key=lambda job: -len(job.images))


@dataclass(frozen=True)
class Examined:
    """Measurements of a victim on its own images and on others; None where there are none."""

    loss: Floats
    n_effective: float | None = None
    train_loss: float = np.nan
    train_accuracy: float = np.nan
    test_accuracy: float | None = None
    kernels: npt.NDArray[np.uint8] | None = None


def examine(
    plan: StudyPlan, victim: int, *, tests: npt.NDArray[np.int64], device: str, victims: Victims
) -> Examined:
    """Measure a victim, stored or trained again, on its images and on `tests`, ids of images that
    it has not seen; tests of classes that it does not know are left out."""
    cell = plan.cell(victim)
    spec = plan.spec(victim * plan.study.n_attacks)
    images = torch.from_numpy(plan.images.images[list(spec.image_ids)])
    known = cell.experiment.train_victim(spec, images, device=torch.device(device), victims=victims)
    if not isinstance(known, KnownVictim) or not isinstance(cell.experiment, KKT):
        return Examined(np.full(len(images), np.nan))  # victims of other families are not measured
    labels, loss = plan.labels_of(cell), cell.experiment.training.loss
    usable = tests[labels[tests] >= 0]
    others = torch.from_numpy(plan.images.images[usable])
    right = known.is_right(others, torch.from_numpy(labels[usable])) if len(usable) else None
    # the loss of each single image, and its slope in the output of the image's own class
    phi = known.outputs(images).double()
    classes = torch.tensor(spec.labels, device=phi.device)
    y = classes if loss.kind == "ce" else classes.to(phi.dtype) * 2 - 1
    alone, own = (phi[:, None], y[:, None]), classes if loss.kind == "ce" else classes * 0
    slope = loss.gradient(*alone)[:, 0].gather(1, own[:, None])[:, 0].abs()
    kernels, pictures = known.kernels(), None
    if kernels is not None:  # scaled from smallest to largest weight; grey if not RGB
        if kernels.shape[1] != 3:
            kernels = kernels.mean(1, keepdim=True).expand(-1, 3, -1, -1)
        low, high = kernels.amin((1, 2, 3), keepdim=True), kernels.amax((1, 2, 3), keepdim=True)
        unit = (kernels - low) / (high - low).clamp_min(torch.finfo(kernels.dtype).tiny)
        pictures = np.asarray((unit * 255).round().to(torch.uint8).numpy())
    return Examined(
        loss=np.asarray(loss.value(*alone).cpu().numpy()),
        n_effective=effective_number(np.asarray(slope.cpu().numpy())),
        train_loss=float(known.trained.loss[0]),
        train_accuracy=float(known.trained.accuracy[0]),
        test_accuracy=None if right is None else float(right.double().mean()),
        kernels=pictures,
    )


def unseen_images(plan: StudyPlan, dataset: Dataset) -> npt.NDArray[np.int64]:
    """Draw up to `n_tests` images that no victim was trained on, the same for all cells."""
    used = np.unique(dataset.column("targets/image_id"))
    rest = np.setdiff1d(np.arange(len(plan.images)), used)
    generator = seeded_generator(plan.study.seed, 0, "tests")
    order = torch.randperm(len(rest), generator=generator).numpy()
    return np.sort(rest[order[: plan.study.n_tests]])


def describe_study(
    plan: StudyPlan,
    scored: Mapping[str, Any],
    examined: Mapping[int, Examined],
    dataset: Dataset,
) -> dict[str, Any]:
    """Describe the study's cells and images, from the record `scored` of its evaluation.

    The columns of `images` have an entry per row of the evaluation, whose victims are in the order
    of the cells.
    """
    study, method, targets = plan.study, scored["methods"][METHOD], scored["targets"]
    losses = [loss for v in dict.fromkeys(targets["victim"]) for loss in examined[v].loss.tolist()]
    images: dict[str, list[Any]] = {
        "cell": [study.cell_of(victim) for victim in targets["victim"]],
        **{name: targets[name] for name in ("victim", "image_id", "label", "margin")},
        "loss": [float(f"{loss:.{DIGITS}g}") for loss in losses],
        "ssim": method["targets"]["ssim"],
        "ssim3": method["targets"]["ssim3"],
        "decoy_ssim": method["decoys"]["ssim"],
        "decoy_ssim3": method["decoys"]["ssim3"],
    }
    of_row = np.array(images["cell"], np.int64)
    seconds = [0.0] * len(study.cells)
    for receipt in dataset.receipts:
        victim = receipt.part * study.runs_per_part // study.n_attacks
        seconds[study.cell_of(victim)] += receipt.seconds
    cells: list[dict[str, Any]] = []
    for number, cell in enumerate(study.cells):
        rows = np.flatnonzero(of_row == number)
        ssim, run = (
            np.array(method["targets"][name], np.float64)[rows] for name in ("ssim", "run")
        )
        order = [int(rows[k]) for k in np.argsort(-ssim, kind="stable") if run[k] >= 0]
        about = _described(cell, rows, scored, study, examined)
        about |= {"shown": order[:N_SHOWN], "seconds": seconds[number]}
        cells.append({"number": number, **about})
    body: dict[str, Any] = {
        "n_victims": study.n_victims,
        "n_attacks": study.n_attacks,
        "good_threshold": study.evaluation.good_threshold,
        "source": scored["source"],
        "axes": {name: asdict(axis) for name, axis in study.axes.items()},
        "cells": cells,
        "images": images,
    }
    plain: dict[str, Any] = rounded(body, DIGITS)
    return plain


def _described(
    cell: Cell,
    rows: npt.NDArray[np.int64],
    scored: Mapping[str, Any],
    study: Study,
    examined: Mapping[int, Examined],
) -> dict[str, Any]:
    method, threshold = scored["methods"][METHOD], study.evaluation.good_threshold
    of_row = [scored["targets"]["victim"][row] for row in rows]
    victims = sorted(set(of_row))
    sides = {
        side: {name: np.array(method[side][name], np.float64)[rows] for name in SCORES}
        for side in ("targets", "decoys")
    }
    summaries = {
        side: summarise(*columns.values(), good_threshold=threshold)
        for side, columns in sides.items()
    }
    vote = scored["methods"]["vote"]["targets"]
    runs = zip(scored["runs"]["outcome"], scored["runs"]["victim"], strict=True)
    outcomes = [outcome for outcome, victim in runs if victim in victims]
    asked, ssim = [examined[v] for v in victims], sides["targets"]["ssim"]
    own = [ssim[np.equal(of_row, v)] for v in victims]
    return {
        "name": cell.name,
        "panel": cell.panel,
        "at": cell.at,
        "n_images": cell.images_per_run,
        "victims": victims,
        "n_attacks": study.n_attacks,
        "outcomes": {name: outcomes.count(name) for name in scored["dataset"]["outcomes"]},
        **{side: {key: dict(found)[key] for key in KEPT} for side, found in summaries.items()},
        "auc": detect(ssim, sides["decoys"]["ssim"])["auc"],
        "vote": {
            **_vote(vote, rows, threshold),
            "nearest": _vote(vote["nearest"], rows, threshold),
        },
        "victim": {
            "train_loss": [float(f"{e.train_loss:.{DIGITS}g}") for e in asked],
            "train_accuracy": [e.train_accuracy for e in asked],
            "test_accuracy": [e.test_accuracy for e in asked],
            "n_effective": [e.n_effective for e in asked],
            "n_good": [int((scores > threshold).sum()) for scores in own],
            "mean_ssim": [float(scores.mean()) for scores in own],
        },
    }


def _vote(
    scores: Mapping[str, Sequence[float]], rows: npt.NDArray[np.int64], threshold: float
) -> dict[str, int | float]:
    """Number of good images and mean SSIM, by either window."""
    found: dict[str, int | float] = {}
    for name, of in (("ssim", ""), ("ssim3", "_ssim3")):
        values = np.array(scores[name], np.float64)[rows]
        found |= {
            f"n_good{of}": int((values > threshold).sum()),
            f"mean_{name}": float(values.mean()),
        }
    return found


def effective_number(weights: Floats) -> float | None:
    """(sum c)^2 / sum c^2: how many images shape a network's weights; None if all c are 0.

    It is n if all n images weigh alike, 1 if one has all the weight. The KKT paper counts margin
    samples: by its equation 14 (without weight decay in the limit, by equation 2) the weights are a
    sum over images with coefficients c, larger the closer an image is to the boundary.
    """
    square = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / square if square > 0 else None
