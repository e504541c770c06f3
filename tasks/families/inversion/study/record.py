"""inversion.json: what every defence costs and every attack recovers (docs/pages.md).

An estimate is the mean over seeds with a 95 % t interval. All seeds share the images, so it covers
other starts and orders of training, not other images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recon_core.summary import t_interval
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.split_training import Defence
from tasks.attack_file.comparison import six_digits
from tasks.families.inversion.study.plan import InversionPlan
from tasks.families.inversion.study.settings import Cell, defence_json, defence_name
from tasks.page.formats import power
from tasks.study.products import Arrays, npz_of

ATTACKS = (
    ("paper", "the paper’s descent", False),
    ("tuned", "the descent, rate tuned", True),
    ("strong", "our attack", True),
    ("restored", "our attack, restored", True),
)
"""Attacks by name, title, and whether they are ours."""
NUMBERS = ("accuracy", "train_accuracy", "distance", "min_distance")
SCORES = ("ssim", "psim", "psnr")
JUDGED = ("tuned", "strong")
"""Attacks by which sweet spots are chosen."""


@dataclass(frozen=True)
class Found:
    """Stored products of one victim: of its training, and by attack."""

    seed: int
    numbers: dict[str, float]
    diverged: bool
    attacks: dict[str, Arrays]
    about: dict[str, Any]
    seconds: dict[str, float]


def found_of(plan: InversionPlan, cell: Cell, seeds: Iterable[int]) -> list[Found]:
    """Read the stored victims of a cell, by seed."""
    victims = []
    for seed in seeds:
        victim = plan.victim(cell, seed)
        trained = plan.folder.product(victim.key)
        if trained is None:
            continue
        keys = {"invert": plan.inverting(victim).key}
        if plan.study.chain is not None:
            keys["restore"] = plan.restoring(cell, seed).key
        products = {stage: plan.folder.product(key) for stage, key in keys.items()}
        attacks: dict[str, Arrays] = {}
        seconds = {"train": trained[1]["seconds"]}
        for stage, product in products.items():
            if product is None:
                continue
            spent = product[1]["seconds"]
            seconds[stage] = sum(spent.values()) if isinstance(spent, dict) else spent
            for path, values in product[0].items():
                attack, slash, name = path.partition("/")
                if slash:
                    attacks.setdefault(attack, {})[name] = values
        victims.append(
            Found(
                seed=seed,
                numbers={name: float(trained[0][name]) for name in NUMBERS},
                diverged=bool(trained[0]["diverged"]),
                attacks=attacks,
                about=(products["invert"] or ({}, {}))[1],
                seconds=seconds,
            )
        )
    return victims


def sweet_spots(plan: InversionPlan) -> dict[tuple[str, str], Cell]:
    """Choose, by source and attack, the cell of the grid with the least mean SSIM among those that
    lose at most `accuracy_loss`, by the seeds of the grid alone; no entry where nothing was
    inverted."""
    found: dict[tuple[str, str], Cell] = {}
    seeds = range(plan.study.n_grid_seeds)
    for source in plan.study.sources:
        grid = [cell for cell in source.cells() if source.in_grid(cell)]
        victims = {cell: found_of(plan, cell, seeds) for cell in grid}
        vanilla = victims[grid[0]]
        if not vanilla:
            continue
        limit = _mean(v.numbers["accuracy"] for v in vanilla) - plan.study.accuracy_loss
        for attack in JUDGED:
            leaks = {
                cell: _mean(float(v.attacks[attack]["ssim"].mean()) for v in there)
                for cell, there in victims.items()
                if there
                and all(attack in v.attacks for v in there)
                and _mean(v.numbers["accuracy"] for v in there) >= limit - 1e-12
            }
            if leaks:
                found[source.name, attack] = min(leaks, key=lambda cell: leaks[cell])
    return found


def role_cells(plan: InversionPlan, sweet: Mapping[tuple[str, str], Cell]) -> dict[Cell, list[str]]:
    """The cells that the page shows in detail, and their roles."""
    roles: dict[Cell, list[str]] = {}
    for source in plan.study.sources:
        chosen = Cell(source.name, source.cut, source.mixcon(*source.chosen))
        roles.setdefault(Cell(source.name, source.cut, None), []).append("vanilla")
        roles.setdefault(chosen, []).append("paper")
        for (name, attack), cell in sweet.items():
            if name == source.name:
                roles.setdefault(cell, []).append(f"sweet spot {attack}")
    return roles


def describe_inversion(
    plan: InversionPlan, failed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Describe sources, attacks, cells and sweet spots, of all stored products."""
    study, sweet = plan.study, sweet_spots(plan)
    roles = role_cells(plan, sweet)
    victims = {cell: found_of(plan, cell, plan.seeds(cell)) for cell in study.cells}
    every = [victim for own in victims.values() for victim in own]
    cells = [_cell(plan, cell, roles.get(cell, []), own) for cell, own in victims.items()]
    described = {c: (k, cells[k]) for k, c in enumerate(study.cells)}
    spots = []
    for (source, attack), cell in sweet.items():
        (vanilla, plain), (number, here) = described[Cell(source, cell.cut, None)], described[cell]
        spots.append(
            {
                "source": source,
                "attack": attack,
                "cell": number,
                "vanilla": vanilla,
                "accuracy_loss": plain["accuracy"]["mean"] - here["accuracy"]["mean"],
                "leakage": here["attacks"][attack]["ssim"]["mean"],
                "vanilla_leakage": plain["attacks"][attack]["ssim"]["mean"],
            }
        )
    perceptual = (
        "both convolutions of a LeNet5 of the same training images that is no victim: no "
        "pretrained network was given, so PSIM does not compare with other studies'"
    )
    if study.perceptual != "own":
        path = study.perceptual.partition(":")[2]
        perceptual = f"torchvision's VGG16 with weights of {path}"
    body = {
        "perceptual": perceptual,
        "thresholds": {"accuracy_loss": study.accuracy_loss},
        "n_seeds": study.n_seeds,
        "n_grid_seeds": study.n_grid_seeds,
        "sources": [_source(plan, source.name) for source in study.sources],
        "attacks": [
            {"name": name, "title": title, "ours": ours}
            for name, title, ours in ATTACKS
            if any(name in cell["attacks"] for cell in cells)
        ],
        "cells": cells,
        "sweet_spots": spots,
        "seconds": {
            stage: round(sum(v.seconds.get(stage, 0.0) for v in every), 1)
            for stage in ("train", "invert", "restore")
        },
        "failed": [{"unit": unit, "why": why} for unit, why in sorted((failed or {}).items())],
    }
    return dict(six_digits(body))


def _source(plan: InversionPlan, name: str) -> dict[str, Any]:
    source, images = plan.study.source(name), plan.images[name]
    return {
        **{key: getattr(source, key) for key in (
            "name", "title", "data", "channels", "n_classes", "n_train", "n_tests", "n_inverted",
            "n_public", "cut")},
        "side": source.size,
        "n_seeds": plan.study.n_seeds,
        "lams": list(source.lams),
        "betas": list(source.betas),
        "content_hash": images.content_hash,
        "notes": list(images.notes),
    }  # fmt: skip


def _cell(
    plan: InversionPlan, cell: Cell, roles: list[str], victims: Sequence[Found]
) -> dict[str, Any]:
    attacks = [name for name, _title, _ours in ATTACKS if any(name in v.attacks for v in victims)]
    seeds = [
        {
            "seed": victim.seed,
            **victim.numbers,
            "diverged": victim.diverged,
            "attacks": {
                name: {s: arrays[s].astype(float).tolist() for s in SCORES}
                for name, arrays in victim.attacks.items()
            },
        }
        for victim in victims
    ]
    return {
        "source": cell.source,
        "cut": cell.cut,
        "name": defence_name(cell.defence),
        "title": defence_title(cell.defence),
        "defence": defence_json(cell.defence),
        "in_grid": plan.study.source(cell.source).in_grid(cell) and cell.defence is not None,
        "roles": roles,
        **{name: estimate([v.numbers[name] for v in victims]) for name in NUMBERS},
        "diverged": sum(v.diverged for v in victims),
        "attacks": {name: _attack(victims, name) for name in attacks},
        "seeds": seeds,
    }


def _attack(victims: Sequence[Found], name: str) -> dict[str, Any]:
    own = [v.attacks[name] for v in victims if name in v.attacks]
    scores = {score: np.concatenate([arrays[score] for arrays in own]) for score in SCORES}
    return {
        **{score: estimate([float(arrays[score].mean()) for arrays in own]) for score in SCORES},
        "worst": {score: float(values.max()) for score, values in scores.items()},
        "std": {score: float(values.std()) for score, values in scores.items()},
        "n": len(scores["ssim"]),
        "chance": _mean(float(arrays["chance"].mean()) for arrays in own),
        "rate": [v.about.get("rate") for v in victims] if name == "tuned" else [],
        "zeta": [v.about.get("zeta") for v in victims] if name == "strong" else [],
    }


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """Mean over seeds with its 95 % t interval; None where there is none."""
    mean = low = high = None
    if values and all(map(math.isfinite, values)):
        mean = _mean(values)
        low, high = t_interval(values) if len(values) > 1 else (None, None)
    found = {"mean": mean, "low": low, "high": high, "values": list(values)}
    return dict(six_digits(found))


def defence_title(defence: Defence) -> str:
    """`no defence`, `MixCon (1, 10⁻⁴)`, `UniCon (1)`."""
    if isinstance(defence, MixCon):
        return f"MixCon ({defence.lam:g}, {power(defence.beta)})"
    return f"UniCon ({defence.lam:g})" if isinstance(defence, UniCon) else "no defence"


def pictures_of(plan: InversionPlan, record: Mapping[str, Any]) -> bytes:
    """inversion-pictures.npz: the first inverted images of each source, and every attack's
    reconstructions of them for the first seed of cells with a role and of cells at other cuts."""
    n, arrays = plan.study.n_shown, {}
    for source in plan.study.sources:
        images = plan.images[source.name].tests.first(min(n, source.n_inverted)).images
        arrays[f"{source.name}/original"] = images
    for k, (cell, about) in enumerate(zip(plan.study.cells, record["cells"], strict=True)):
        if n and (about["roles"] or cell.cut != plan.study.source(cell.source).cut):
            for victim in found_of(plan, cell, [0]):
                for name, found in victim.attacks.items():
                    arrays[f"{k}/{name}"] = found["picture"][:n]
    shown = {name: np.moveaxis(images, 1, -1) for name, images in arrays.items()}
    return npz_of({name: x[..., 0] if x.shape[-1] == 1 else x for name, x in shown.items()})


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
