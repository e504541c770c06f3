"""recovery.json and recovery-pictures.npz: what was recovered from every victim, and how.

A cell is one victim at one loss, one mask and one method. The generic methods query no victim, so
their cells are the same at all its losses. docs/recovery-study.md has the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from recon_core.attacks.plug_and_play import Ending
from recon_core.degradation import MASKS
from recon_core.similarity import ACCURATE, APPROXIMATE, THRESHOLDS, rates
from tasks.attack_file.comparison import six_digits
from tasks.evaluation.record import describe_source
from tasks.families.autoencoder.study.figure_specs import group_name
from tasks.families.autoencoder.study.plan import RecoveryPlan
from tasks.families.autoencoder.study.settings import RecoveryVictim
from tasks.families.autoencoder.study.units import ESTIMATE_H, Batch, RecoverJob
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


def describe_recovery(plan: RecoveryPlan, outcome: Outcome) -> dict[str, Any]:
    """Describe the victims, cells and shown images of a study, from its units' products."""
    study, first = plan.study, plan.study.victims[0]
    trained = [v for v in study.victims if f"train {v.name}" in outcome.done]
    cells = [cell for victim in trained for cell in _cells(plan, victim, outcome)]
    seconds = {"train": 0.0, "inpainter": 0.0, "recover": 0.0}
    for unit, given in outcome.done.items():
        if unit.startswith("train"):
            what = "inpainter" if unit.startswith("train inpainter") else "train"
            seconds[what] += given["seconds"]
        else:
            seconds["recover"] += sum(given["seconds"].values())
    masks = [
        # those of the paper by their own numbers
        {
            "name": name,
            "title": f"mask {MASKS.index(name) + 1}: {MASK_TITLES[name]}"
            if name in MASKS
            else f"mask {k}: {name}",
            "known_share": float(mask.mean()),
        }
        for k, (name, mask) in enumerate(plan.masks(first).items(), start=1)
    ]
    record: dict[str, Any] = six_digits(
        {
            "source": describe_source(plan.sources.images_of(first)),
            "seconds": seconds,
            "thresholds": {
                "accurate": ACCURATE,
                "approximate": APPROXIMATE,
                "all": list(THRESHOLDS),
            },
            "masks": masks,
            "methods": [
                {"name": name, "knows_mask": False, "ours": False, "generic": False} | METHODS[name]
                for name in study.methods.names
            ],
            "victims": [_victim(plan, victim, outcome) for victim in trained],
            "cells": cells,
            "shown": list(_shown(study.n_shown, cells)),
            "failed": [{"unit": u, "error": why} for u, why in sorted(outcome.failed.items())],
        }
    )
    return record


def _victim(plan: RecoveryPlan, victim: RecoveryVictim, outcome: Outcome) -> dict[str, Any]:
    given = outcome.done[f"train {victim.name}"]
    images = plan.sources.images_of(victim)
    same = ("n_parameters", "last", "diverged", "test_loss", "contraction", "seconds")
    return {
        "name": victim.name,
        "title": victim.title,
        "architecture": asdict(victim.network),
        "n_images": victim.n_images,
        "source": {"name": images.name, "size": list(images.images.shape[2:])},
        "gamma": victim.gamma,
        "levels": [
            {name: about[name] for name in ("level", "loss", "epoch")}
            for about in plan.reached(victim, given).values()
        ],
        "wanted": list(plan.study.wanted(victim)),
        **{name: given[name] for name in same},
    }


def _cells(
    plan: RecoveryPlan, victim: RecoveryVictim, outcome: Outcome
) -> Iterator[dict[str, Any]]:
    """Describe a victim's cells, in the order of falling losses, splits, masks and methods."""
    given = outcome.done[f"train {victim.name}"]
    for level, job in plan.recoveries(victim, given).items():
        arrays, seconds = _products(plan, victim, job)
        for group in job.groups:
            for number, mask in enumerate(group.masks):
                for method in plan.study.methods.names:
                    start = f"{group.name}/{method}"
                    own = {
                        key.removeprefix(f"{start}/"): array[number]
                        for key, array in arrays.items()
                        if key.startswith(f"{start}/")
                    }
                    if "mse" not in own:
                        continue
                    mse, ending = own["mse"][: len(group.ids)], own.get("ending")
                    applied, right = (own.get(name) for name in ("n_applied", "mask_right"))
                    scores = asdict(rates(torch.from_numpy(mse)))
                    yield {
                        "victim": victim.name,
                        "level": level,
                        "loss": plan.reached(victim, given)[level]["loss"],
                        "mask": mask,
                        "sigma": group.sigma,
                        "split": group.split,
                        "method": method,
                        **scores,
                        "by_threshold": list(scores["by_threshold"]),
                        "mse": mse.tolist(),
                        # None for methods without iterations, or without an estimate of the mask
                        "n_applied": None if applied is None else float(applied.mean()),
                        "endings": None
                        if ending is None
                        else {e.name.lower(): int((ending == e).sum()) for e in Ending},
                        "mask_accuracy": None if right is None else float(right.mean()),
                        "seconds": seconds[start] / len(group.masks),
                    }


def _products(
    plan: RecoveryPlan, victim: RecoveryVictim, job: RecoverJob
) -> tuple[Arrays, dict[str, float]]:
    """Arrays and seconds of a recovery, and of the generic methods for the victim's images."""
    source = plan.study.source_of(victim)
    jobs = [job.key]
    jobs += [one.key for (of, _sigma), one in plan.inpaintings().items() if of == source]
    arrays: Arrays = {}
    seconds: dict[str, float] = {}
    for key in jobs:
        if (kept := plan.folder.product(key)) is not None:
            arrays, seconds = arrays | kept[0], seconds | kept[1]["seconds"]
    return arrays, seconds


def _shown(n_shown: int, cells: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """List the first images of every victim, at its lowest loss, under every mask."""
    lowest = {cell["victim"]: cell["level"] for cell in cells}  # losses fall
    seen = set()
    for cell in cells:
        place = {name: cell[name] for name in ("victim", "level", "mask", "sigma")}
        is_last = cell["split"] == "train" and cell["level"] == lowest[cell["victim"]]
        if n_shown and is_last and tuple(place.values()) not in seen:
            seen.add(tuple(place.values()))
            yield {**place, "rows": list(range(min(n_shown, cell["n"])))}


def pictures_of(plan: RecoveryPlan, outcome: Outcome, record: Mapping[str, Any]) -> bytes:
    """recovery-pictures.npz: the masks, and the originals, degraded images and recoveries of every
    shown group."""
    first = plan.study.victims[0]
    arrays: Arrays = {f"masks/{name}": mask for name, mask in plan.masks(first).items()}
    for shown in record["shown"]:
        victim = next(v for v in plan.study.victims if v.name == shown["victim"])
        job = plan.recoveries(victim, outcome.done[f"train {victim.name}"])[shown["level"]]
        group = next(g for g in job.groups if g.split == "train" and g.sigma == shown["sigma"])
        place, mask, n = group_name(shown), shown["mask"], len(shown["rows"])
        few: dict[str, Any] = {"images": group.images[:n], "ids": group.ids[:n]}
        few["masks"] = {mask: group.masks[mask]}
        y = Batch(replace(group, **few), plan.study.root_seed, "cpu").y.clamp(0, 1)
        arrays[f"{place}/original"] = group.images[:n]
        arrays[f"{place}/degraded"] = np.asarray((y * 255).round().to(torch.uint8).numpy())
        products, number = _products(plan, victim, job)[0], list(group.masks).index(mask)
        for method in plan.study.methods.names:
            own = {
                name: products[key][number]
                for name in ("picture", "mse", "mask")
                if (key := f"{group.name}/{method}/{name}") in products
            }
            if len(own.get("picture", ())) < n:
                continue
            arrays[f"{place}/{method}"] = own["picture"][:n]
            arrays[f"{place}/{method}/mse"] = own["mse"][:n]
            if method in ESTIMATE_H:
                arrays[f"{place}/mask/{method}"] = own["mask"][:n]
    return npz_of(arrays)
