"""Made-up records of studies (docs/pages.md): small, with a figure of every kind."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.families.weights.study.page import STUDY_PAGE
from tests.tasks.page.study_pages import Arrays, Made, StudyPages, claims, header

SIZE, KERNEL = 8, 3
CLASSES, PER_CLASS = (2, 5, 10), (1, 5, 10)
DECAYS = (0.0, 0.0001, 0.001, 0.01)
LOSSES = ("BCE", "MSE", "a loss with a rather long name")
PAGES = StudyPages(STUDY_PAGE)
page_of, rows_of, figure_of = PAGES.page_of, PAGES.rows_of, PAGES.figure_of


def study(
    *,
    grid: int = 9,
    decays: int = 8,
    losses: int = 3,
    level: float = 0.3,
    n_shown: int = 4,
    seed: int = 0,
) -> Made:
    """(record, pictures) of the first `grid` cells of classes by size, `decays` of weight decay by
    classes (0 is a baseline), and `losses` with texts for an axis; SSIM scatters about `level`."""
    made = _Study(level, n_shown, seed)
    for n_classes, per_class in list(product(CLASSES, PER_CLASS))[:grid]:
        name = f"{n_classes} classes, {per_class} per class"
        made.add("grid", name, n_classes * per_class, n_classes=n_classes, per_class=per_class)
    for n_classes, decay in list(product((2, 10), DECAYS))[:decays]:
        name = f"{n_classes} classes, weight decay {decay:g}"
        made.add("decay", name, 10, n_classes=n_classes, weight_decay=decay)
    for loss in LOSSES[:losses]:
        made.add("loss", f"trained with {loss}", 10, loss=loss)
    return made.record(), made.pictures


class _Study:
    def __init__(self, level: float, n_shown: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.level, self.n_shown = level, n_shown
        self.cells: list[dict[str, Any]] = []
        keys = ("cell", "victim", "image_id", "label", "margin", "loss", "ssim", "ssim3",
                "decoy_ssim")  # fmt: skip
        self.images: dict[str, list[Any]] = {key: [] for key in keys}
        self.pictures: Arrays = {}

    def add(self, panel: str, name: str, per_victim: int, **at: Any) -> None:
        number, n_victims = len(self.cells), 2
        n, first = per_victim * n_victims, len(self.images["cell"])
        ssim = np.clip(self.rng.normal(self.level, 0.15, n), 0.02, 0.97).round(6)
        decoys = np.clip(self.rng.normal(0.2, 0.06, n), 0.02, 0.97).round(6)
        columns = {
            "cell": [number] * n,
            "victim": [victim for victim in range(n_victims) for _ in range(per_victim)],
            "image_id": list(range(first, first + n)),
            "label": [k % 2 for k in range(n)],
            "margin": (3 * self.rng.random(n)).round(6).tolist(),
            "loss": (10 ** -(6 * self.rng.random(n))).round(9).tolist(),
            "ssim": ssim.tolist(),
            "ssim3": ssim.tolist(),
            "decoy_ssim": decoys.tolist(),
        }
        for key, values in columns.items():
            self.images[key] += values
        shown = (first + np.argsort(-ssim, kind="stable")[: self.n_shown]).tolist()
        halves = ssim.reshape(n_victims, per_victim)
        self.cells.append(
            {
                "number": number, "name": name, "panel": panel, "at": at, "n_images": per_victim,
                "victims": [0, 1], "n_attacks": 4, "outcomes": {"ok": 7, "unfitted": 1},
                "targets": _summary(ssim), "decoys": _summary(decoys), "auc": 0.75,
                "vote": {"n_good": 1, "mean_ssim": 0.31},
                "victim": {
                    "train_loss": [0.0001, 0.0003], "train_accuracy": [1.0, 1.0],
                    "test_accuracy": [0.31, 0.29], "n_effective": [4, 7],
                    "n_good": [int((half > 0.4).sum()) for half in halves],
                    "mean_ssim": [round(float(half.mean()), 6) for half in halves],
                },
                "shown": shown, "seconds": 61.0,
            }
        )  # fmt: skip
        pair = self.rng.integers(0, 256, (2, len(shown), 3, SIZE, SIZE), dtype=np.uint8)
        self.pictures[f"cell_{number:04d}/original"] = pair[0]
        self.pictures[f"cell_{number:04d}/reconstruction"] = pair[1]

    def record(self) -> dict[str, Any]:
        """Everything, with the figures that the cells allow."""
        numbers = {panel: [c["number"] for c in self.cells if c["panel"] == panel]
                   for panel in ("grid", "decay", "loss")}  # fmt: skip
        figures = [
            figure
            for panel in numbers
            if numbers[panel]
            for figure in copy.deepcopy(_FIGURES[panel])
        ]
        for figure in figures:
            if figure["kind"] == "scatter":
                figure["cells"] = numbers["loss"] if figure["x"] == "loss" else numbers["grid"]
            if figure["kind"] == "kernels":
                figure["cells"] = numbers["loss"][:1]
                for number in figure["cells"]:
                    self.pictures[f"kernels_{number:04d}"] = self.rng.integers(
                        0, 256, (12, 3, KERNEL, KERNEL), dtype=np.uint8
                    )
        return {
            **header("study", "made-up", "KKT paper, section 4.2"),
            "settings": {"attack": {"n_steps": 4711}, "widths": [20, 30]},
            "source": {"name": "made up", "split": "train", "n_images": 500, "size": [SIZE, SIZE],
                       "class_names": ["even", "odd"], "content_hash": "f" * 64, "notes": []},
            "good_threshold": 0.4, "n_attacks": 4, "n_victims": 2,
            "seconds": {"attack": 200.0, "score": 41.0},
            "axes": {
                "n_classes": {"title": "classes", "scale": "linear", "values": list(CLASSES)},
                "per_class": {"title": "images per class", "scale": "log",
                              "values": list(PER_CLASS)},
                "weight_decay": {"title": "weight decay", "scale": "log", "values": list(DECAYS)},
                "loss": {"title": "loss function", "scale": "category", "values": list(LOSSES)},
            },
            "cells": self.cells, "images": self.images, "figures": figures,
            "claims": claims("figure 3", "figure 5", "appendix G"),
        }  # fmt: skip


def _summary(scores: npt.NDArray[np.float64]) -> dict[str, Any]:
    n, n_good, mean = len(scores), int((scores > 0.4).sum()), float(scores.mean())
    share = n_good / n
    return {
        "n": n, "n_good": n_good, "good_fraction": round(share, 6),
        "good_interval": [round(max(0.0, share - 0.1), 6), round(min(1.0, share + 0.12), 6)],
        "mean_ssim": round(mean, 6),
        "mean_ssim_interval": [round(mean - 0.02, 6), round(mean + 0.03, 6)],
        "best_ssim": float(scores.max()), "n_good_ssim3": n_good, "mean_ssim3": round(mean, 6),
    }  # fmt: skip


_WORDS = {"caption": "What is shown.", "cannot": "what must not be concluded."}
_FIGURES: dict[str, list[dict[str, Any]]] = {
    "grid": [
        {"kind": "heatmap", "name": "good", "title": "Good ones", "where": "KKT paper, figure 3b",
         "panel": "grid", "x": "per_class", "y": "n_classes", "value": "n_good", **_WORDS},
        {"kind": "scatter", "name": "margins", "title": "Near the boundary",
         "where": "KKT paper, figure 2", "x": "margin", **_WORDS},
    ],
    "decay": [
        {"kind": "lines", "name": "decays", "title": "Weight decay", "where": "KKT paper, figure 5",
         "panel": "decay", "x": "weight_decay", "series": "n_classes", "value": "n_good",
         "baselines": [], **_WORDS},
    ],
    "loss": [
        {"kind": "lines", "name": "losses", "title": "Losses", "where": "KKT paper, figure 4",
         "panel": "loss", "x": "loss", "series": None, "value": "mean_ssim", "baselines": [],
         **_WORDS},
        {"kind": "scatter", "name": "hard-ones", "title": "Hard ones",
         "where": "KKT paper, figure 4", "x": "loss", **_WORDS},
        {"kind": "kernels", "name": "kernels", "title": "Kernels", "where": "KKT paper, figure 16",
         **_WORDS},
    ],
}  # fmt: skip
