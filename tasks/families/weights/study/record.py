"""study.json: what came back in every cell, as numbers and as a few pictures (docs/studies.md).

The scores are those of the evaluation of the study's store (docs/evaluation.md), cell by cell. What
only victims can tell is asked of them: losses, accuracy on unseen images, kernels of a first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.attacks.kkt.results import KnownVictim
from recon_core.experiments import KKT
from recon_core.summary import detect, summarise
from recon_core.types import Victims, seeded_generator
from recon_core.victims.losses import Loss
from storage.pairs.dataset import Dataset
from tasks.evaluation.record import rounded
from tasks.families.weights.study.settings import Cell, Study, StudyPlan

DIGITS = 6
N_SHOWN = 10
"""Pairs of a cell that are kept as pictures, the best first."""
KEPT = ("n", "n_good", "good_fraction", "good_interval", "mean_ssim", "mean_ssim_interval",
        "best_ssim", "n_good_ssim3", "mean_ssim3")  # fmt: skip
METHOD = "plain"
SCORES = ("ssim", "haarpsi", "ssim3")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Examined:
    """Answers of a victim about its own images and others; None where there are none."""

    loss: Floats
    n_effective: float | None
    train_loss: float
    train_accuracy: float
    test_accuracy: float | None
    kernels: npt.NDArray[np.uint8] | None

    @classmethod
    def nothing(cls, n_images: int) -> Examined:
        """Answers of a family whose victims are not asked."""
        return cls(np.full(n_images, np.nan), None, np.nan, np.nan, None, None)


def examine(
    plan: StudyPlan, victim: int, *, tests: npt.NDArray[np.int64], device: str, victims: Victims
) -> Examined:
    """The victim, as it is kept or trained again, on its images and on `tests`, ids of images that
    it has not seen; those of classes that it does not know are left out."""
    cell = plan.cell(victim)
    spec = plan.spec(victim * plan.study.n_attacks)
    images = torch.from_numpy(plan.images.images[list(spec.image_ids)])
    known = cell.experiment.train_victim(spec, images, device=torch.device(device), victims=victims)
    if not isinstance(known, KnownVictim) or not isinstance(cell.experiment, KKT):
        return Examined.nothing(len(images))
    labels = plan.labels_of(cell)
    usable = tests[labels[tests] >= 0]
    others = torch.from_numpy(plan.images.images[usable])
    right = known.is_right(others, torch.from_numpy(labels[usable])) if len(usable) else None
    kernels = known.kernels()
    losses, slopes = _losses(known, cell.experiment.training.loss, images, spec.labels)
    return Examined(
        loss=losses,
        n_effective=effective_number(slopes),
        train_loss=float(known.trained.loss[0]),
        train_accuracy=float(known.trained.accuracy[0]),
        test_accuracy=None if right is None else float(right.double().mean()),
        kernels=None if kernels is None else _as_pictures(kernels),
    )


def unseen_images(plan: StudyPlan, dataset: Dataset) -> npt.NDArray[np.int64]:
    """Up to `n_tests` images that no victim was trained on, the same for all cells."""
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
    """The study's cells and images, from the record `scored` of its evaluation."""
    study = plan.study
    images = _images(study, scored, examined)
    of_row = np.array(images["cell"], np.int64)
    seconds = _seconds(study, dataset)
    cells: list[dict[str, Any]] = []
    for number, cell in enumerate(study.cells):
        rows = np.flatnonzero(of_row == number)
        about = _described(cell, rows, scored, study, examined)
        shown, spent = _best(rows, scored), seconds[number]
        cells.append({"number": number, **about, "shown": shown, "seconds": spent})
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


def _images(
    study: Study, scored: Mapping[str, Any], examined: Mapping[int, Examined]
) -> dict[str, list[Any]]:
    """Columns with an entry per row of the evaluation, whose victims are in the order of cells."""
    method, targets = scored["methods"][METHOD], scored["targets"]
    losses = [loss for v in dict.fromkeys(targets["victim"]) for loss in examined[v].loss.tolist()]
    return {
        "cell": [study.cell_of(victim) for victim in targets["victim"]],
        **{name: targets[name] for name in ("victim", "image_id", "label", "margin")},
        "loss": [float(f"{loss:.{DIGITS}g}") for loss in losses],
        "ssim": method["targets"]["ssim"],
        "ssim3": method["targets"]["ssim3"],
        "decoy_ssim": method["decoys"]["ssim"],
        "decoy_ssim3": method["decoys"]["ssim3"],
    }


def _described(
    cell: Cell,
    rows: npt.NDArray[np.int64],
    scored: Mapping[str, Any],
    study: Study,
    examined: Mapping[int, Examined],
) -> dict[str, Any]:
    method, threshold = scored["methods"][METHOD], study.evaluation.good_threshold
    victims = sorted({scored["targets"]["victim"][row] for row in rows})
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
    return {
        "name": cell.name,
        "panel": cell.panel,
        "at": cell.at,
        "n_images": cell.images_per_run,
        "victims": victims,
        "n_attacks": study.n_attacks,
        "outcomes": {name: outcomes.count(name) for name in scored["dataset"]["outcomes"]},
        **{side: {key: dict(found)[key] for key in KEPT} for side, found in summaries.items()},
        "auc": detect(sides["targets"]["ssim"], sides["decoys"]["ssim"])["auc"],
        "vote": {
            **_vote(vote, rows, threshold),
            "nearest": _vote(vote["nearest"], rows, threshold),
        },
        "victim": _of_victims(victims, scored, examined, threshold),
    }


def _vote(
    scores: Mapping[str, Sequence[float]], rows: npt.NDArray[np.int64], threshold: float
) -> dict[str, int | float]:
    """Good images and the mean, by either window of SSIM."""
    found: dict[str, int | float] = {}
    for name, of in (("ssim", ""), ("ssim3", "_ssim3")):
        values = np.array(scores[name], np.float64)[rows]
        found |= {
            f"n_good{of}": int((values > threshold).sum()),
            f"mean_{name}": float(values.mean()),
        }
    return found


def _of_victims(
    victims: Sequence[int],
    scored: Mapping[str, Any],
    examined: Mapping[int, Examined],
    threshold: float,
) -> dict[str, list[Any]]:
    of_row = np.array(scored["targets"]["victim"], np.int64)
    ssim = np.array(scored["methods"][METHOD]["targets"]["ssim"], np.float64)
    asked, own = [examined[v] for v in victims], [ssim[of_row == v] for v in victims]
    return {
        "train_loss": [float(f"{e.train_loss:.{DIGITS}g}") for e in asked],
        "train_accuracy": [e.train_accuracy for e in asked],
        "test_accuracy": [e.test_accuracy for e in asked],
        "n_effective": [e.n_effective for e in asked],
        "n_good": [int((scores > threshold).sum()) for scores in own],
        "mean_ssim": [float(scores.mean()) for scores in own],
    }


def effective_number(weights: Floats) -> float | None:
    """(sum c)^2 / sum c^2, how many images share the weights of a network; None if all are 0.

    n if all n are alike, 1 if one has it all. The KKT paper calls them margin samples: by equation
    14 (and without weight decay in the limit, by equation 2) the weights are a sum over images with
    these c, which are larger the closer an image is to the boundary.
    """
    square = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / square if square > 0 else None


def _best(rows: npt.NDArray[np.int64], scored: Mapping[str, Any]) -> list[int]:
    found = scored["methods"][METHOD]["targets"]
    ssim, run = (np.array(found[name], np.float64)[rows] for name in ("ssim", "run"))
    order = [int(rows[k]) for k in np.argsort(-ssim, kind="stable") if run[k] >= 0]
    return order[:N_SHOWN]


def _seconds(study: Study, dataset: Dataset) -> list[float]:
    spent = [0.0] * len(study.cells)
    for receipt in dataset.receipts:
        victim = receipt.part * study.runs_per_part // study.n_attacks
        spent[study.cell_of(victim)] += receipt.seconds
    return spent


def _losses(
    known: KnownVictim, loss: Loss, images: torch.Tensor, labels: Sequence[int]
) -> tuple[Floats, Floats]:
    """The loss of each image by itself, and the size of its slope in the image's own output."""
    phi = known.outputs(images).double()
    classes = torch.tensor(labels, device=phi.device)
    y = classes if loss.kind == "ce" else classes.to(phi.dtype) * 2 - 1
    alone, own = (phi[:, None], y[:, None]), classes if loss.kind == "ce" else classes * 0
    slope = loss.gradient(*alone)[:, 0].gather(1, own[:, None])[:, 0].abs()
    return np.asarray(loss.value(*alone).cpu().numpy()), np.asarray(slope.cpu().numpy())


def _as_pictures(kernels: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Each kernel from its smallest to its largest weight; other than three channels as grey."""
    if kernels.shape[1] != 3:
        kernels = kernels.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    low, high = kernels.amin((1, 2, 3), keepdim=True), kernels.amax((1, 2, 3), keepdim=True)
    unit = (kernels - low) / (high - low).clamp_min(torch.finfo(kernels.dtype).tiny)
    return np.asarray((unit * 255).round().to(torch.uint8).numpy())
