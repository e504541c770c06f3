"""inversion.json: what every defence costs and what every attack gets (docs/pages.md).

An estimate is the mean over seeds, with a t interval of 95 %; the images are the same for all, so
it covers other starts and orders of training, not other images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.summary import t_interval
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.split_training import Defence
from tasks.attack_file.record import six_digits
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
"""Name, title, and whether it is ours."""
NUMBERS = ("accuracy", "train_accuracy", "distance", "min_distance")
SCORES = ("ssim", "psim", "psnr")
JUDGED = ("tuned", "strong")
"""Attacks by which sweet spots are chosen."""


@dataclass(frozen=True)
class Found:
    """Products of one victim that are there: of its training, and by attack."""

    seed: int
    numbers: dict[str, float]
    diverged: bool
    attacks: dict[str, Arrays]
    about: dict[str, Any]


def found_of(plan: InversionPlan, cell: Cell, seeds: Iterable[int]) -> list[Found]:
    """The victims of a cell that are there, by seed."""
    return [f for f in (_victim(plan, cell, seed) for seed in seeds) if f is not None]


def _victim(plan: InversionPlan, cell: Cell, seed: int) -> Found | None:
    victim = plan.victim(cell, seed)
    trained = plan.folder.product(victim.key)
    if trained is None:
        return None
    arrays = trained[0]
    inverted = plan.folder.product(plan.inverting(victim).key)
    attacks: dict[str, Arrays] = {}
    about: dict[str, Any] = {}
    if inverted is not None:
        attacks = _by_attack(inverted[0])
        about = {key: inverted[1].get(key) for key in ("rate", "zeta", "seconds")}
    if plan.study.chain is not None:
        restored = plan.folder.product(plan.restoring(cell, seed).key)
        attacks |= {} if restored is None else _by_attack(restored[0])
    return Found(
        seed=seed,
        numbers={name: float(arrays[name]) for name in NUMBERS},
        diverged=bool(arrays["diverged"]),
        attacks=attacks,
        about=about,
    )


def _by_attack(arrays: Arrays) -> dict[str, Arrays]:
    found: dict[str, Arrays] = {}
    for path, values in arrays.items():
        attack, _slash, name = path.partition("/")
        if name:
            found.setdefault(attack, {})[name] = values
    return found


def sweet_spots(plan: InversionPlan) -> dict[tuple[str, str], Cell]:
    """By source and attack, the cell of the grid with the least mean SSIM among those that lose at
    most `accuracy_loss`; chosen by the seeds of the grid alone. None where nothing was inverted."""
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
    """The cells that the page shows more of, and why."""
    roles: dict[Cell, list[str]] = {}
    for source in plan.study.sources:
        chosen = Cell(source.name, source.cut, source.mixcon(*source.chosen))
        of_source = [("vanilla", Cell(source.name, source.cut, None)), ("paper", chosen)]
        of_source += [
            (f"sweet spot {attack}", sweet[source.name, attack])
            for attack in JUDGED
            if (source.name, attack) in sweet
        ]
        for role, cell in of_source:
            roles.setdefault(cell, []).append(role)
    return roles


def describe_inversion(
    plan: InversionPlan, failed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Sources, attacks, cells and sweet spots, of what is there."""
    study, sweet = plan.study, sweet_spots(plan)
    roles = role_cells(plan, sweet)
    cells = [_cell(plan, cell, roles.get(cell, [])) for cell in study.cells]
    described = {c: (k, cells[k]) for k, c in enumerate(study.cells)}
    body = {
        "perceptual": _perceptual(plan),
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
        "sweet_spots": [
            _sweet(described, source, attack, cell) for (source, attack), cell in sweet.items()
        ],
        "seconds": _seconds(plan),
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


def _cell(plan: InversionPlan, cell: Cell, roles: list[str]) -> dict[str, Any]:
    source = plan.study.source(cell.source)
    victims = found_of(plan, cell, plan.seeds(cell))
    attacks = [name for name, _title, _ours in ATTACKS if any(name in v.attacks for v in victims)]
    return {
        "source": cell.source,
        "cut": cell.cut,
        "name": defence_name(cell.defence),
        "title": defence_title(cell.defence),
        "defence": defence_json(cell.defence),
        "in_grid": source.in_grid(cell) and cell.defence is not None,
        "roles": roles,
        **{name: estimate([v.numbers[name] for v in victims]) for name in NUMBERS},
        "diverged": sum(v.diverged for v in victims),
        "attacks": {name: _attack(victims, name) for name in attacks},
        "seeds": [_seed(victim) for victim in victims],
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
        "rate": [v.about["rate"] for v in victims] if name == "tuned" else [],
        "zeta": [v.about["zeta"] for v in victims] if name == "strong" else [],
    }


def _seed(victim: Found) -> dict[str, Any]:
    return {
        "seed": victim.seed,
        **victim.numbers,
        "diverged": victim.diverged,
        "attacks": {
            name: {s: arrays[s].astype(float).tolist() for s in SCORES}
            for name, arrays in victim.attacks.items()
        },
    }


def _sweet(
    cells: Mapping[Cell, tuple[int, Mapping[str, Any]]], source: str, attack: str, cell: Cell
) -> dict[str, Any]:
    """`cells`: their number, and how they are described."""
    (vanilla, plain), (number, here) = cells[Cell(source, cell.cut, None)], cells[cell]
    return {
        "source": source,
        "attack": attack,
        "cell": number,
        "vanilla": vanilla,
        "accuracy_loss": plain["accuracy"]["mean"] - here["accuracy"]["mean"],
        "leakage": here["attacks"][attack]["ssim"]["mean"],
        "vanilla_leakage": plain["attacks"][attack]["ssim"]["mean"],
    }


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """Mean over seeds with its t interval of 95 %; nulls where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    mean = low = high = None
    if finite and len(finite) == len(values):
        mean = float(np.mean(finite))
        low, high = t_interval(finite) if len(finite) > 1 else (None, None)
    found = {"mean": mean, "low": low, "high": high, "values": list(values)}
    return dict(six_digits(found))


def defence_title(defence: Defence) -> str:
    """`no defence`, `MixCon (1, 10⁻⁴)`, `UniCon (1)`."""
    if isinstance(defence, MixCon):
        beta = "0" if defence.beta == 0 else power(defence.beta)
        return f"MixCon ({defence.lam:g}, {beta})"
    return f"UniCon ({defence.lam:g})" if isinstance(defence, UniCon) else "no defence"


def _perceptual(plan: InversionPlan) -> str:
    if plan.study.perceptual == "own":
        return (
            "both convolutions of a LeNet5 of the same training images that is no victim: no "
            "pretrained network was given, so PSIM does not compare with other studies'"
        )
    return f"torchvision's VGG16 with weights of {plan.study.perceptual.partition(':')[2]}"


def _seconds(plan: InversionPlan) -> dict[str, float]:
    study, keys = plan.study, []
    for cell in study.cells:
        for seed in plan.seeds(cell):
            victim = plan.victim(cell, seed)
            keys += [("train", victim.key), ("invert", plan.inverting(victim).key)]
            if study.chain is not None:
                keys.append(("restore", plan.restoring(cell, seed).key))
    spent = dict.fromkeys(("train", "invert", "restore"), 0.0)
    for stage, key in keys:
        if (product := plan.folder.product(key)) is not None:
            seconds = product[1]["seconds"]
            spent[stage] += sum(seconds.values()) if isinstance(seconds, dict) else seconds
    return {name: round(value, 1) for name, value in spent.items()}


def pictures_of(plan: InversionPlan, record: Mapping[str, Any]) -> bytes:
    """inversion-pictures.npz: the first inverted images of each source, and what every attack made
    of them for the first seed of the cells with a role and of those at other cuts."""
    n, arrays = plan.study.n_shown, {}
    for source in plan.study.sources:
        images = plan.images[source.name].tests.first(min(n, source.n_inverted)).images
        arrays[f"{source.name}/original"] = _as_shown(images)
    for k, (cell, about) in enumerate(zip(plan.study.cells, record["cells"], strict=True)):
        source = plan.study.source(cell.source)
        if not n or not (about["roles"] or cell.cut != source.cut):
            continue
        for victim in found_of(plan, cell, [0]):
            for name, found in victim.attacks.items():
                arrays[f"{k}/{name}"] = _as_shown(found["picture"][:n])
    return npz_of(arrays)


def _as_shown(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(n, c, h, w) to (n, h, w) or (n, h, w, 3)."""
    return (
        images[:, 0] if images.shape[1] == 1 else np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    )


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
