"""Made-up records of inversion studies (docs/pages.md): small, with every figure.

`inversion()` gives one. What an image scores follows from how far apart a setting keeps its
features, so that the grid, the front and the layers look as those of a real study might.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.families.inversion.study.figure_specs import describe_figures
from tasks.families.inversion.study.page import INVERSION_PAGE
from tasks.page.formats import power
from tests.tasks.page.study_pages import Arrays, Made, StudyPages, claims, header

LAMS, BETAS = (0.01, 0.1, 1.0, 10.0), (1e-2, 1e-4, 1e-6)
ATTACKS = (
    ("paper", "the paper's descent", False),
    ("strong", "Adam, three starts, tuned", True),
    ("restored", "Adam and restored", True),
)
SOURCES = (("digits", "digits, 8×8", 1, 10), ("photos", "photos, 8×8", 3, 2))
STRENGTH = {"paper": 0.75, "strong": 1.0, "restored": 1.04}
CHANCE = 0.48
PAGES = StudyPages(INVERSION_PAGE)
page_of, rows_of, figure_of = PAGES.page_of, PAGES.rows_of, PAGES.figure_of


def inversion(
    *,
    sources: int = 2,
    lams: Sequence[float] = LAMS,
    betas: Sequence[float] = BETAS,
    attacks: Sequence[str] = ("paper", "strong", "restored"),
    n_seeds: int = 3,
    n: int = 12,
    n_shown: int = 5,
    size: int = 8,
    layers: bool = True,
    unicon: bool = True,
    sweet_spots: bool = True,
    seed: int = 0,
) -> Made:
    """(record, pictures): a grid of `lams` and `betas` for every source, and what belongs to it.

    The strongest defence diverges with every seed, the one below it in beta with one.
    """
    study = _Study(np.random.default_rng(seed), list(attacks), n_seeds, n)
    for name, title, channels, n_classes in SOURCES[:sources]:
        study.source(name, title, channels, n_classes, lams, betas, size)
        study.cell("none", 0.0, None, roles=["vanilla"])
        for lam in lams:
            for beta in betas:
                paper = (lam, beta) == (1.0, 1e-4)
                study.cell("mixcon", lam, beta, in_grid=True, roles=["paper"] if paper else [])
        if unicon:
            study.cell("unicon", 1.0, None)
        for cut in (1, 3) if layers else ():
            study.cell("none", 0.0, None, cut=cut)
            study.cell("mixcon", 1.0, 1e-4, cut=cut)
        if sweet_spots:
            study.spots()
    record = study.record()
    record["figures"] = describe_figures(record)
    return record, study.pictures(record, n_shown, size)


def estimate(values: Sequence[float | None]) -> dict[str, Any]:
    """The mean over seeds with something like its interval; of nothing, all null."""
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "low": None, "high": None, "values": list(values)}
    mean = float(np.mean(known))
    half = 4.3 * float(np.std(known, ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else None
    ends = (None, None) if half is None else (_six(mean - half), _six(mean + half))
    return {"mean": _six(mean), "low": ends[0], "high": ends[1], "values": list(values)}


def find(record: Mapping[str, Any], name: str, source: str = "digits", cut: int = 2) -> Any:
    """The cell with this name, and its place: `find(record, "vanilla")`."""
    (found,) = [
        (k, cell)
        for k, cell in enumerate(record["cells"])
        if (cell["source"], cell["name"], cell["cut"]) == (source, name, cut)
    ]
    return found


class _Study:
    def __init__(self, rng: np.random.Generator, attacks: list[str], n_seeds: int, n: int) -> None:
        self.rng, self.attacks, self.n_seeds, self.n = rng, attacks, n_seeds, n
        self.sources: list[dict[str, Any]] = []
        self.cells: list[dict[str, Any]] = []
        self.sweet_spots: list[dict[str, Any]] = []

    def source(
        self,
        name: str,
        title: str,
        channels: int,
        n_classes: int,
        lams: Sequence[float],
        betas: Sequence[float],
        size: int,
    ) -> None:
        self.sources.append(
            {
                "name": name, "title": title, "data": name, "side": size, "channels": channels,
                "n_classes": n_classes, "n_train": 1000, "n_tests": 400, "n_inverted": self.n,
                "n_public": 380, "n_seeds": self.n_seeds, "cut": 2, "lams": list(lams),
                "betas": list(betas),
            }
        )  # fmt: skip

    def cell(
        self,
        kind: str,
        lam: float,
        beta: float | None,
        *,
        cut: int = 2,
        in_grid: bool = False,
        roles: Sequence[str] = (),
    ) -> None:
        """A setting whose defence is the stronger the larger lam and the smaller beta."""
        source = self.sources[-1]
        strength = 0.0 if kind == "none" else min(3.0, 1 + math.log10(max(lam, 1e-2)) / 2)
        strength += 0.0 if beta is None else 0.15 * (-math.log10(beta) - 2)
        worst = in_grid and lam == max(source["lams"])
        lost = 0
        if worst and beta == min(source["betas"]):
            lost = self.n_seeds
        elif worst and beta == max(source["betas"]) and self.n_seeds > 1:
            lost = 1
        seeds = [
            self._seed(k, strength, cut, diverged=k >= self.n_seeds - lost, roles=roles)
            for k in range(self.n_seeds)
        ]
        name = {"none": "vanilla", "unicon": f"unicon {lam:g}"}.get(kind, f"mixcon {lam:g} {beta}")
        title = {"none": "vanilla", "unicon": f"UniCon ({lam:g})"}.get(kind, "")
        title = title or f"MixCon ({lam:g}, {power(beta or 0)})"
        cell: dict[str, Any] = {
            "source": source["name"], "cut": cut, "name": name, "title": title,
            "defence": {"kind": kind, "lam": lam, "beta": beta}, "in_grid": in_grid,
            "roles": list(roles), "diverged": lost, "seeds": seeds,
        }  # fmt: skip
        for key in ("accuracy", "train_accuracy", "distance", "min_distance"):
            cell[key] = estimate([one[key] for one in seeds if not one["diverged"]])
        run = [a for a in self.attacks if any(a in one["attacks"] for one in seeds)]
        cell["attacks"] = {attack: self._attack(attack, seeds) for attack in run}
        self.cells.append(cell)

    def _seed(
        self, k: int, strength: float, cut: int, *, diverged: bool, roles: Sequence[str]
    ) -> dict[str, Any]:
        if diverged:
            nothing = dict.fromkeys(("accuracy", "train_accuracy", "distance", "min_distance"))
            return {"seed": k, **nothing, "diverged": True, "attacks": {}}
        accuracy = 0.975 - 0.012 * strength**3 - abs(self.rng.normal(0, 0.002))
        distance = 0.4 * 10 ** (-1.4 * strength) * math.exp(self.rng.normal(0, 0.1))
        attacks = {}
        for attack in self.attacks:
            if attack == "restored" and not roles:
                continue
            mean = CHANCE + (0.95 - CHANCE) * STRENGTH[attack] * 0.8**strength * 0.9 ** (cut - 1)
            ssim = np.clip(mean + self.rng.normal(0, 0.05, self.n), 0, 1)
            attacks[attack] = {
                "ssim": [_six(s) for s in ssim],
                "psim": [_six(0.6 * s + 0.3) for s in ssim],
                "psnr": [_six(30 * s - 6) for s in ssim],
            }
        return {
            "seed": k, "accuracy": _six(accuracy), "train_accuracy": _six(min(1, accuracy + 0.02)),
            "distance": _six(distance), "min_distance": _six(distance / 300), "diverged": False,
            "attacks": attacks,
        }  # fmt: skip

    def _attack(self, attack: str, seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        run = [one["attacks"][attack] for one in seeds if attack in one["attacks"]]
        found: dict[str, Any] = {"worst": {}, "std": {}, "n": self.n, "chance": CHANCE + 0.01}
        for name in ("ssim", "psim", "psnr"):
            scores = [one[name] for one in run]
            found[name] = estimate([_six(float(np.mean(values))) for values in scores])
            found["worst"][name] = max(max(values) for values in scores)
            found["std"][name] = _six(float(np.std(scores[0], ddof=1)))
        return found | {"zeta": [0.01] * len(run)}

    def spots(self) -> None:
        """The sweet spot of this source under each attack that the grid has."""
        name = self.sources[-1]["name"]
        mine = [(k, c) for k, c in enumerate(self.cells) if c["source"] == name and c["cut"] == 2]
        ((place, vanilla),) = [(k, c) for k, c in mine if c["name"] == "vanilla"]
        for attack in ("paper", "strong"):
            if attack not in self.attacks:
                continue
            before = vanilla["attacks"][attack]["ssim"]["mean"]
            allowed = [
                (c["attacks"][attack]["ssim"]["mean"], k)
                for k, c in mine
                if c["in_grid"] and c["accuracy"]["mean"] is not None and attack in c["attacks"]
                and c["accuracy"]["mean"] >= vanilla["accuracy"]["mean"] - 0.01
            ]  # fmt: skip
            if not allowed:
                raise ValueError("no setting keeps the accuracy; ask for a smaller lam")
            leakage, k = min(allowed)
            self.cells[k]["roles"].append(f"sweet spot {attack}")
            loss = vanilla["accuracy"]["mean"] - self.cells[k]["accuracy"]["mean"]
            self.sweet_spots.append(
                {"source": name, "attack": attack, "cell": k, "vanilla": place,
                 "accuracy_loss": _six(loss), "leakage": leakage, "vanilla_leakage": before}
            )  # fmt: skip

    def record(self) -> dict[str, Any]:
        return {
            **header("inversion", "inversion", "003"),
            "settings": {"training": {"epochs": 20}, "seed": 42},
            "seconds": {"train": 2000.0, "invert": 300.0, "restore": None},
            "perceptual": "those of a network trained on public images",
            "thresholds": {"accuracy_loss": 0.01}, "sources": self.sources,
            "attacks": [{"name": name, "title": title, "ours": ours}
                        for name, title, ours in ATTACKS if name in self.attacks],
            "cells": self.cells, "sweet_spots": self.sweet_spots,
            "figures": [], "claims": claims("table 3", "ours", "D.2"),
        }  # fmt: skip

    def pictures(self, record: dict[str, Any], n_shown: int, size: int) -> Arrays:
        found: Arrays = {}
        for source in record["sources"]:
            shape = (n_shown, size, size) + ((3,) if source["channels"] == 3 else ())
            found[f"{source['name']}/original"] = self._picture(shape)
            for k, cell in enumerate(record["cells"]):
                if cell["source"] != source["name"] or not (cell["roles"] or cell["cut"] != 2):
                    continue
                for attack in cell["seeds"][0]["attacks"]:
                    found[f"{k}/{attack}"] = self._picture(shape)
        return found

    def _picture(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        return self.rng.integers(0, 256, shape, dtype=np.uint8)


def _six(value: float) -> float:
    return float(f"{value:.6g}")
