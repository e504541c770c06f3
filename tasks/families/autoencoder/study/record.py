"""recovery.json and recovery-pictures.npz: what came back from every victim, and how.

A cell is one victim at one loss, one mask and one method. The generic methods ask no victim, so
their cells are the same at all its losses. docs/recovery-study.md has the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.attacks.plug_and_play import Ending
from recon_core.degradation import MASKS
from recon_core.similarity import ACCURATE, APPROXIMATE, THRESHOLDS, rates
from tasks.attack_file.record import six_digits
from tasks.evaluation.record import describe_source
from tasks.families.autoencoder.study.plan import RecoveryPlan
from tasks.families.autoencoder.study.settings import RecoveryVictim, level_name
from tasks.families.autoencoder.study.units import ESTIMATE_H, Batch, Group
from tasks.study.executor import Outcome
from tasks.study.products import Arrays, npz_of

METHODS: dict[str, dict[str, Any]] = {
    "iteration": {"title": "f alone"},
    "unknown": {"title": "paper, mask unknown"},
    "known": {"title": "paper, mask known", "knows_mask": True},
    "noise_aware": {"title": "ours, mask unknown", "ours": True},
    "ddnm": {"title": "diffusion (DDNM), mask known", "knows_mask": True, "generic": True},
    "biharmonic": {"title": "biharmonic, mask known", "knows_mask": True, "generic": True},
}
MASK_TITLES = {
    "random": "random pixels",
    "blocks": "blocks",
    "stripes": "stripes",
    "text": "text",
    "half": "lower half",
    "window": "all but a window",
}

Floats = npt.NDArray[np.float64]


def describe_recovery(plan: RecoveryPlan, outcome: Outcome) -> dict[str, Any]:
    """The victims, cells and shown images of a study, from its units' products."""
    study, first = plan.study, plan.study.victims[0]
    masks = plan.masks(first)
    cells = list(_cells(plan, outcome))
    body = {
        "source": describe_source(plan.sources.images_of(first)),
        "seconds": _seconds(outcome),
        "thresholds": {"accurate": ACCURATE, "approximate": APPROXIMATE, "all": list(THRESHOLDS)},
        "masks": [
            {"name": name, "title": mask_title(name, k), "known_share": float(mask.mean())}
            for k, (name, mask) in enumerate(masks.items())
        ],
        "methods": [
            {"name": name, "knows_mask": False, "ours": False, "generic": False, **METHODS[name]}
            for name in study.methods.names
        ],
        "victims": [_victim(plan, victim, outcome) for victim in _trained(plan, outcome)],
        "cells": cells,
        "shown": list(_shown(plan, cells)),
        "failed": [{"unit": unit, "error": why} for unit, why in sorted(outcome.failed.items())],
    }
    plain: dict[str, Any] = six_digits(body)
    return plain


def mask_title(name: str, number: int) -> str:
    """`mask 1: random pixels`: those of the paper by their own numbers."""
    if name in MASKS:
        return f"mask {MASKS.index(name) + 1}: {MASK_TITLES[name]}"
    return f"mask {number + 1}: {name}"


def _trained(plan: RecoveryPlan, outcome: Outcome) -> list[RecoveryVictim]:
    return [v for v in plan.study.victims if f"train {v.name}" in outcome.done]


def _victim(plan: RecoveryPlan, victim: RecoveryVictim, outcome: Outcome) -> dict[str, Any]:
    given = outcome.done[f"train {victim.name}"]
    images = plan.sources.images_of(victim)
    return {
        "name": victim.name,
        "title": victim.title,
        "architecture": asdict(victim.network),
        "n_parameters": given["n_parameters"],
        "n_images": victim.n_images,
        "source": {"name": images.name, "size": list(images.images.shape[2:])},
        "gamma": victim.gamma,
        "levels": [
            {name: about[name] for name in ("level", "loss", "epoch")}
            for about in plan.reached(victim, given).values()
        ],
        "wanted": list(plan.study.wanted(victim)),
        **{name: given[name] for name in ("last", "diverged", "test_loss", "contraction")},
        "seconds": given["seconds"],
    }


def _cells(plan: RecoveryPlan, outcome: Outcome) -> Iterator[dict[str, Any]]:
    """In the order of victims, falling losses, splits, masks and methods."""
    for victim in _trained(plan, outcome):
        given = outcome.done[f"train {victim.name}"]
        generic = _generic_arrays(plan, victim)
        for level, job in plan.recoveries(victim, given).items():
            own = plan.folder.product(job.key)
            about = {"victim": victim.name, "level": level}
            about["loss"] = plan.reached(victim, given)[level]["loss"]
            for group in job.groups:
                arrays, seconds = ({}, {}) if own is None else (own[0], own[1]["seconds"])
                if group.split == "train":
                    more = generic.get(group.sigma, ({}, {}))
                    arrays, seconds = arrays | more[0], seconds | more[1]
                yield from _of_group(about, group, arrays, seconds, plan.study.methods.names)


def _of_group(
    about: Mapping[str, Any],
    group: Group,
    arrays: Arrays,
    seconds: Mapping[str, float],
    methods: Sequence[str],
) -> Iterator[dict[str, Any]]:
    for number, mask in enumerate(group.masks):
        for method in methods:
            start = f"{group.name}/{method}"
            if f"{start}/mse" not in arrays:
                continue
            mse = arrays[f"{start}/mse"][number][: len(group.ids)]
            yield {
                **about,
                "mask": mask,
                "sigma": group.sigma,
                "split": group.split,
                "method": method,
                **_scores(mse),
                **_course(arrays, start, number),
                "seconds": seconds[start] / len(group.masks),
            }


def _scores(mse: Floats) -> dict[str, Any]:
    found = asdict(rates(torch.from_numpy(mse)))
    return {**found, "by_threshold": list(found["by_threshold"]), "mse": mse.tolist()}


def _course(arrays: Arrays, start: str, number: int) -> dict[str, Any]:
    """Course of the iterations; None for methods that have none, or estimate no mask."""

    def of(name: str) -> npt.NDArray[Any] | None:
        found = arrays.get(f"{start}/{name}")
        return None if found is None else found[number]

    applied, ending, right = of("n_applied"), of("ending"), of("mask_right")
    return {
        "n_applied": None if applied is None else float(applied.mean()),
        "endings": None
        if ending is None
        else {e.name.lower(): int((ending == e).sum()) for e in Ending},
        "mask_accuracy": None if right is None else float(right.mean()),
    }


def _generic_arrays(
    plan: RecoveryPlan, victim: RecoveryVictim
) -> dict[float, tuple[Arrays, dict[str, float]]]:
    """Products of the generic methods for the victim's images, by noise."""
    source = plan.study.source_of(victim)
    found = {}
    for (of_source, sigma), job in plan.inpaintings().items():
        kept = plan.folder.product(job.key) if of_source == source else None
        if kept is not None:
            found[sigma] = (kept[0], kept[1]["seconds"])
    return found


def _seconds(outcome: Outcome) -> dict[str, float]:
    spent = {"train": 0.0, "inpainter": 0.0, "recover": 0.0}
    for unit, given in outcome.done.items():
        if unit.startswith("train inpainter"):
            spent["inpainter"] += given["seconds"]
        elif unit.startswith("train"):
            spent["train"] += given["seconds"]
        else:
            spent["recover"] += sum(given["seconds"].values())
    return spent


def _shown(plan: RecoveryPlan, cells: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first images of every victim, at its lowest loss, under every mask."""
    n_shown = plan.study.n_shown
    lowest = {cell["victim"]: cell["level"] for cell in cells}  # losses fall
    seen = set()
    for cell in cells:
        place = {name: cell[name] for name in ("victim", "level", "mask", "sigma")}
        is_last = cell["split"] == "train" and cell["level"] == lowest[cell["victim"]]
        if n_shown and is_last and tuple(place.values()) not in seen:
            seen.add(tuple(place.values()))
            yield {**place, "rows": list(range(min(n_shown, cell["n"])))}


def pictures_of(plan: RecoveryPlan, outcome: Outcome, record: Mapping[str, Any]) -> bytes:
    """recovery-pictures.npz: the masks, and of every shown group the images and what methods made
    of them."""
    first = plan.study.victims[0]
    arrays: Arrays = {f"masks/{name}": mask for name, mask in plan.masks(first).items()}
    by_name = {victim.name: victim for victim in plan.study.victims}
    for shown in record["shown"]:
        victim = by_name[shown["victim"]]
        arrays |= _group_pictures(plan, outcome, victim, shown)
    return npz_of(arrays)


def _group_pictures(
    plan: RecoveryPlan, outcome: Outcome, victim: RecoveryVictim, shown: Mapping[str, Any]
) -> Arrays:
    job = plan.recoveries(victim, outcome.done[f"train {victim.name}"])[shown["level"]]
    group = next(g for g in job.groups if g.split == "train" and g.sigma == shown["sigma"])
    place = f"{victim.name}/{level_name(job.level)}/{shown['mask']}/{group.sigma:g}"
    number, rows = list(group.masks).index(shown["mask"]), shown["rows"]
    own = plan.folder.product(job.key)
    found = {} if own is None else own[0]
    found |= _generic_arrays(plan, victim).get(group.sigma, ({}, {}))[0]
    arrays: Arrays = {
        f"{place}/original": group.images[rows],
        f"{place}/degraded": degraded_pictures(plan, group, shown["mask"], len(rows)),
    }
    for method in plan.study.methods.names:
        start = f"{group.name}/{method}"
        if f"{start}/picture" not in found or len(found[f"{start}/picture"][number]) < len(rows):
            continue
        arrays[f"{place}/{method}"] = found[f"{start}/picture"][number][rows]
        arrays[f"{place}/{method}/mse"] = found[f"{start}/mse"][number][rows]
        if method in ESTIMATE_H:
            arrays[f"{place}/mask/{method}"] = found[f"{start}/mask"][number][rows]
    return arrays


def degraded_pictures(plan: RecoveryPlan, group: Group, mask: str, n: int) -> npt.NDArray[np.uint8]:
    """The first images as the methods see them, cut to [0, 1]."""
    images, ids = group.images[:n], group.ids[:n]
    few = replace(group, images=images, ids=ids, masks={mask: group.masks[mask]})
    y = Batch(few, plan.study.root_seed, "cpu").y
    return np.asarray((y.clamp(0, 1) * 255).round().to(torch.uint8).numpy())
