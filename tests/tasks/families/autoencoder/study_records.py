"""Made-up records of recovery studies (docs/pages.md): small, with a figure of every kind.

`recovery()` gives one; `cell` and `cells` look into it, and `set_errors` changes the errors of a
cell and everything that follows from them, so that a test can say what came back and what did not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.summary import proportion_interval
from tasks.families.autoencoder.study.figure_specs import describe_figures, group_name
from tasks.families.autoencoder.study.page import RECOVERY_PAGE
from tests.tasks.page.study_pages import Arrays, Made, StudyPages, claims, header

MASKS = ("random", "blocks", "stripes", "text", "half", "window")
METHODS = ("iteration", "unknown", "known", "noise_aware", "ddnm", "biharmonic")
TITLES = ("f alone", "paper, mask unknown", "paper, mask known", "ours, mask unknown",
          "diffusion (DDNM), mask known", "biharmonic, mask known")  # fmt: skip
LEVELS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
THRESHOLDS = (1e-3, 5e-4, 1e-4, 1e-5, 1e-6, 1e-7)
ACCURATE, APPROXIMATE = 1e-7, 5e-4
VICTIMS = (
    ("unet-leaky_relu", "U-Net, leaky ReLU", {"kind": "unet", "activation": "leaky_relu"}),
    ("unet-softplus", "U-Net, softplus", {"kind": "unet", "activation": "softplus"}),
    ("fc10-leaky_relu", "fully connected, 10 layers", {"kind": "fc", "depth": 10}),
)
MODERATE = ("fc20-moderate", "fully connected, 20 layers", {"kind": "fc", "depth": 20})
RATES: dict[str, tuple[float, float]] = {
    "iteration": (0.05, 0.2),
    "unknown": (0.6, 0.8),
    "known": (0.8, 0.95),
    "noise_aware": (0.75, 0.9),
    "ddnm": (0.0, 0.15),
    "biharmonic": (0.0, 0.05),
}
"""Of training images at the lowest loss: the share below 1e-7, and below 5e-4."""
PAGES = StudyPages(RECOVERY_PAGE)
page_of, rows_of, figure_of = PAGES.page_of, PAGES.rows_of, PAGES.figure_of


def recovery(
    *,
    victims: int = 3,
    moderate: bool = True,
    masks: Sequence[str] = MASKS,
    methods: Sequence[str] = METHODS,
    levels: Sequence[float] = LEVELS,
    rates: Mapping[str, tuple[float, float]] = RATES,
    n: int = 20,
    control: bool = True,
    noise: bool = True,
    contraction: bool = True,
    n_groups: int = 3,
    size: int = 8,
    seed: int = 0,
) -> Made:
    """(record, pictures) of `victims` networks at `levels`, and one of the moderate regime.

    `rates` are the shares at the lowest level; each level above it has three quarters of the level
    below. Test images are attacked at the lowest level, noise (0.02) is on the first mask.
    """
    rng = np.random.default_rng(seed)
    made = _Study(rng, n, list(levels), rates)
    plans = [(*victim, made.levels) for victim in VICTIMS[:victims]]
    plans += [(*MODERATE, [1e-4])] if moderate else []
    for name, title, architecture, wanted in plans:
        made.victim(name, title, architecture, wanted, contraction=contraction)
        for level, mask, method in product(wanted, masks, methods):
            made.cell(name, level, mask, method)
        lowest = min(wanted, default=None)
        for mask, method in product(masks, methods) if lowest and control else ():
            made.cell(name, lowest, mask, method, split="test")
        for level, method in product(wanted, methods) if noise else ():
            made.cell(name, level, masks[0], method, sigma=0.02)
    record = made.record(masks, methods)
    groups = [
        {
            "victim": name,
            "level": min(wanted),
            "mask": mask,
            "sigma": 0.0,
            "rows": [n // 8, n // 3, n // 2],
        }
        for mask, (name, _title, _network, wanted) in product(masks, plans)
        if wanted
    ]
    record["shown"] = groups[:n_groups]
    record["figures"] = describe_figures(record)
    return record, made.pictures(record, size)


def cells(record: Mapping[str, Any], **where: Any) -> list[dict[str, Any]]:
    """The cells with these values: `cells(record, victim="unet-softplus", split="train")`."""
    return [c for c in record["cells"] if all(c[key] == value for key, value in where.items())]


def cell(record: Mapping[str, Any], **where: Any) -> dict[str, Any]:
    """The only cell with these values."""
    (found,) = cells(record, **where)
    return found


def set_errors(found: dict[str, Any], mse: Sequence[float]) -> None:
    """Makes `mse` the errors of a cell, with every number that follows from them."""
    errors = np.asarray(mse, np.float64)
    n = len(errors)
    counts = [int((errors < threshold).sum()) for threshold in THRESHOLDS]
    psnr = -10 * np.log10(np.maximum(errors, 1e-12))
    bar = 2 * float(psnr.std()) / math.sqrt(n) if n else 0.0
    mean = float(psnr.mean()) if n else math.nan
    n_accurate, n_approximate = int((errors < ACCURATE).sum()), int((errors < APPROXIMATE).sum())
    found |= {
        "n": n,
        "n_accurate": n_accurate,
        "n_approximate": n_approximate,
        "accurate": _share(n_accurate, n),
        "approximate": _share(n_approximate, n),
        "psnr": [_six(mean), _six(mean - bar), _six(mean + bar)],
        "by_threshold": counts,
        "mse": [_six(error) for error in errors],
    }


def set_rates(found: dict[str, Any], accurate: int, approximate: int) -> None:
    """Makes `accurate` images of a cell accurate and `approximate` (those among them) close."""
    n = found["n"]
    if not accurate <= approximate <= n:
        raise ValueError(f"{accurate} accurate, {approximate} approximate of {n}")
    set_errors(found, [1e-9] * accurate + [1e-5] * (approximate - accurate)
               + [1e-2] * (n - approximate))  # fmt: skip


class _Study:
    def __init__(
        self,
        rng: np.random.Generator,
        n: int,
        levels: list[float],
        rates: Mapping[str, tuple[float, float]],
    ) -> None:
        self.rng, self.n, self.levels, self.rates = rng, n, levels, rates
        self.victims: list[dict[str, Any]] = []
        self.cells: list[dict[str, Any]] = []

    def victim(
        self,
        name: str,
        title: str,
        architecture: dict[str, Any],
        wanted: list[float],
        *,
        contraction: bool,
    ) -> None:
        radii = {
            split: [_six(r) for r in np.exp(self.rng.normal(mean, 0.2, self.n))]
            for split, mean in (("train", -0.3), ("test", 0.4))
        }
        reached = [
            {"level": level, "loss": _six(0.97 * level), "epoch": 400 * (k + 1)}
            for k, level in enumerate(wanted)
        ]
        last = reached[-1] if reached else {"loss": 0.02, "epoch": 400}
        self.victims.append(
            {
                "name": name,
                "title": title,
                "architecture": architecture,
                "n_parameters": 1_234_567,
                "n_images": self.n,
                "gamma": 1.0,
                "levels": reached,
                "wanted": list(wanted),
                "last": {"loss": last["loss"], "epoch": last["epoch"]},
                "diverged": False,
                "test_loss": 0.0123,
                "contraction": radii if contraction else None,
                "seconds": 321.0,
            }
        )

    def cell(
        self,
        victim: str,
        level: float,
        mask: str,
        method: str,
        *,
        split: str = "train",
        sigma: float = 0.0,
    ) -> None:
        found = {
            "victim": victim, "level": level, "loss": _six(0.97 * level), "mask": mask,
            "sigma": sigma, "split": split, "method": method,
        }  # fmt: skip
        wanted = next(v["wanted"] for v in self.victims if v["name"] == victim)
        above = sum(other < level for other in wanted)
        accurate, approximate = (
            0.0 if split == "test" else rate * 0.75**above for rate in self.rates[method]
        )
        draws = self.rng.random(self.n)
        scale = 10 ** self.rng.uniform(-1, 0, self.n)
        errors = np.where(draws < accurate, 1e-8, np.where(draws < approximate, 1e-4, 1e-2))
        set_errors(found, errors * scale)
        generic, blind = method in METHODS[4:], method in ("unknown", "noise_aware")
        limit = int(self.n / 4)
        found |= {
            "n_applied": None if generic else 640.0,
            "endings": None
            if generic
            else {"converged": self.n - limit, "limit": limit, "nonfinite": 0},
            "mask_accuracy": 0.98 if blind else None,
            "seconds": 12.5,
        }
        self.cells.append(found)

    def record(self, masks: Sequence[str], methods: Sequence[str]) -> dict[str, Any]:
        titles = dict(zip(METHODS, TITLES, strict=True))
        names = ("random pixels", "blocks", "stripes", "text", "lower half", "window")
        numbered = {mask: f"mask {k + 1}: {names[k]}" for k, mask in enumerate(MASKS)}
        return {
            **header("recovery", "autoencoder", "autoencoder paper, section 4"),
            "settings": {"methods": {"unknown": {"admm_steps": 40}}, "seed": 42},
            "source": {"name": "made up", "split": "train", "n_images": 500, "size": [8, 8],
                       "class_names": ["even", "odd"], "content_hash": "f" * 64, "notes": []},
            "seconds": {"train": 2000.0, "inpainter": 300.0, "recover": 41.0},
            "thresholds": {"accurate": ACCURATE, "approximate": APPROXIMATE,
                           "all": list(THRESHOLDS)},
            "masks": [{"name": mask, "title": numbered[mask], "known_share": 0.5}
                      for mask in masks],
            "methods": [{"name": method, "title": titles[method],
                         "knows_mask": "known" in titles[method].split(),
                         "ours": method == "noise_aware", "generic": method in METHODS[4:]}
                        for method in methods],
            "victims": self.victims, "cells": self.cells, "shown": [], "figures": [],
            "claims": claims("figure 3", "section 4", "table 1"),
        }  # fmt: skip

    def pictures(self, record: dict[str, Any], size: int) -> Arrays:
        return dict(self._pictures(record, size))

    def _pictures(
        self, record: dict[str, Any], size: int
    ) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for k, mask in enumerate(record["masks"]):
            known = np.indices((size, size)).sum(0) % (k + 2) > 0
            yield f"masks/{mask['name']}", known
        for shown in record["shown"]:
            group, rows = group_name(shown), shown["rows"]
            shape = (len(rows), 3, size, size)
            for name in ("original", "degraded"):
                yield f"{group}/{name}", self.rng.integers(0, 256, shape, dtype=np.uint8)
            for method in record["methods"]:
                where = {key: shown[key] for key in ("victim", "level", "mask", "sigma")}
                found = cell(record, method=method["name"], split="train", **where)
                name = f"{group}/{method['name']}"
                yield name, self.rng.integers(0, 256, shape, dtype=np.uint8)
                yield f"{name}/mse", np.array([found["mse"][row] for row in rows], np.float64)
                if found["mask_accuracy"] is not None:
                    drawn = self.rng.random((len(rows), size, size)) < 0.5
                    yield f"{group}/mask/{method['name']}", drawn


def _share(n_hits: int, n: int) -> list[float | None]:
    if not n:
        return [None, None, None]
    low, high = proportion_interval(n_hits, n)
    return [_six(n_hits / n), _six(low), _six(high)]


def _six(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
