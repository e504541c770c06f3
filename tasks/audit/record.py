"""audit.json: what every attack gets out of every cell's victims, what defences cost, and what may
be said of it (docs/audit.md); and which images of the network as it is come back most, and why.

Members and decoys are images of the same pool, so counts at a false positive rate need no other
images. Shares have intervals over victims (`recon_core.leakage`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.duplicates import THRESHOLD, most_alike
from recon_core.leakage import (
    exchangeable_p,
    likelihood_ratio,
    paired_difference,
    pareto_front,
    share_found,
    share_of,
)
from recon_core.summary import proportion_interval, t_interval, threshold_for
from tasks.audit.plan import AuditPlan, attack_name
from tasks.audit.settings import (
    MEMBERSHIP,
    RATES,
    RECONSTRUCTION,
    START,
    TITLES,
    AttackName,
    Audit,
    Cell,
    Limit,
)
from tasks.audit.tables import accuracy, attacked, key_of
from tasks.audit.verdict import does_not_cover, effect_of, is_significant, verdict_of
from tasks.audit.victims import VictimsJob
from tasks.evaluation.record import rounded
from tasks.study.executor import Outcome
from tasks.study.products import Arrays

DIGITS = 6
ENOUGH_TESTS = 100
"""Held-out images without which no price in accuracy is stated."""
N_EXPOSED, N_DECOYS = 24, 8
NEAR_MARGIN = 0.25
"""Quantile of the margins below which an image is near the boundary."""
OF_PICTURES = (
    *("good_at", "control_at", "identified", "identified_decoys", "n_good", "n_good_decoys"),
    *("n_good_control", "mean_ssim", "mean_ssim_decoys", "mean_ssim_control"),
)
"""Numbers that attacks alone have that give pictures."""

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def describe_audit(plan: AuditPlan, ended: Outcome) -> dict[str, Any]:
    """The record's own entries."""
    made = plan.study
    cells = [_described(plan, cell, ended) for cell in made.cells]
    base, job, n_tests = cells[0], plan.jobs[0], len(plan.jobs[0].tests)
    no_price = None
    if n_tests < ENOUGH_TESTS:
        no_price = f"not measured: {n_tests} held-out images, {ENOUGH_TESTS} needed"
    _compare(cells, priced=no_price is None)
    left_out = list(made.left_out)
    if plan.subject != "gradients":  # attacks that could be made and were not chosen
        chosen = {*made.attacks, "gradient"}
        others = (n for n in TITLES if n not in chosen and plan.why_not(made.cells[0], n) is None)
        left_out += [f"the attack {TITLES[name][0]}" for name in others]
    body: dict[str, Any] = {
        "subject": plan.subject,
        "n_images": int(job.members[0].sum()),
        "n_victims": made.n_victims,
        "n_tests": n_tests,
        "no_price": no_price,
        "good_threshold": made.good_threshold,
        "rates": list(RATES),
        "rate": made.rate,
        "task": plan.task,
        "price": "accuracy" if job.recipe.autoencoder is None else "variance explained",
        "classes": list(plan.images.pool.class_names),
        "source": {"victims": plan.images.pool.facts, "others": plan.images.others.facts},
        "attacks": [
            {
                "name": name,
                "title": TITLES[name][0],
                "kind": "reconstruction" if name in RECONSTRUCTION else "membership",
                "knows": TITLES[name][1],
                "start": START.get(name),
            }
            for name in made.attacks
        ],
        "cells": cells,
        **exposure(plan, base),
        "checks": [_checked(limit, base, made) for limit in made.limits],
        "left_out": left_out,
        "seconds": {
            "train": made.n_victims * sum(cell["seconds"] for cell in cells),
            "attack": made.n_victims
            * sum(a.get("seconds", 0.0) for cell in cells for a in cell["attacks"].values()),
        },
    }
    body["verdict"] = verdict_of(body)
    body["does_not_cover"] = does_not_cover(body)
    plain: dict[str, Any] = rounded(body, DIGITS)
    return plain


def _described(plan: AuditPlan, cell: Cell, ended: Outcome) -> dict[str, Any]:
    job, private = plan.jobs.get(cell.number), cell.recipe.private
    about: dict[str, Any] = {
        "number": cell.number,
        "name": cell.name,
        "group": cell.group,
        "about": cell.about,
        "base": cell.is_base,
        "kind": cell.kind,
        "epsilon": None if private is None else private.epsilon,
        "delta": None if private is None else private.delta,
        "noise_multiplier": None if job is None or private is None else job.noise_multiplier,
        "n_images": cell.recipe.n_images,
        "failed": None,
        "accuracy": None,
        "attacks": {},
        "leak": None,
        "effect": None,
        "on_front": False,
        "seconds": 0.0,
    }
    found = None if job is None else plan.folder.product(job.key)
    if job is None or found is None:
        why = plan.refused.get(cell.number) or ended.failed.get(f"train {cell.name}", "not trained")
        return about | {"failed": why}
    arrays, facts = found
    if bool(arrays["diverged"].any()):
        about["failed"] = f"{int(arrays['diverged'].sum())} of the victims diverged in training"
    if plan.subject != "gradients":  # whose network was not trained on them
        correct = arrays["correct"].astype(np.float64)
        each = correct.mean(1) if correct.shape[1] else None
        interval = None
        if each is not None and len(each) > 1:  # over victims, within what a mean can be
            least = min(0.0, float(correct.min()))
            interval = [min(1.0, max(least, end)) for end in t_interval(each.tolist())]
        elif each is not None:
            interval = list(proportion_interval(int(correct.sum()), correct.size))
        about["accuracy"] = {
            "train": float(arrays["train_accuracy"].mean()),
            "test": None if each is None else float(each.mean()),
            "test_interval": interval,
            "each": [] if each is None else each.tolist(),
            "change": None,
            "change_interval": None,
        }
    about["seconds"] = facts["seconds"]
    for name in plan.study.attacks:
        about["attacks"][name] = _attacked(plan, cell, name, arrays, ended.failed)
    good = [  # the largest share that comes back well, at the headline's rate
        {"attack": name, **about["attacks"][name]["good_at"][key_of(plan.study.rate)]}
        for name in RECONSTRUCTION
        if attacked(about, name)
    ]
    return about | {"leak": max(good, key=lambda share: share["mean"], default=None)}


def _attacked(
    plan: AuditPlan, cell: Cell, name: AttackName, arrays: Arrays, failed: Mapping[str, str]
) -> dict[str, Any]:
    """Scores of one attack on a cell's victims."""
    if (why := plan.why_not(cell, name)) is not None:
        return {"status": "refused", "why": why}
    job, made = plan.jobs[cell.number], plan.study
    members, seconds = job.members, 0.0
    pictures: Arrays | None = None
    if name in MEMBERSHIP:
        sure = arrays["confidence"].astype(np.float64)
        scores = np.where(np.isfinite(sure), sure, -np.inf)
        if name == "likelihood_ratio":
            ratio = likelihood_ratio(torch.from_numpy(sure), torch.from_numpy(members))
            scores = np.asarray(ratio.numpy(), np.float64)
    else:
        units = [attack_name(cell, name, v) for v in range(made.n_victims)]
        if lost := [unit for unit in units if unit in failed]:
            return {"status": "refused", "why": f"failed: {failed[lost[0]]}"}
        pictures, seconds = plan.scores(cell, name)
        scores = pictures["ssim"].astype(np.float64)

    def at_rates(scores: Floats, least: float | None) -> dict[str, Any]:
        found = {rate: share_found(scores, members, rate=rate, least=least) for rate in RATES}
        return {key_of(rate): asdict(share) for rate, share in found.items()}

    from scipy import stats  # half a second, which a front does without

    n, ranks = members.sum(1), stats.rankdata(scores, axis=1)
    above = (np.where(members, ranks, 0).sum(1) / n - (n + 1) / 2) / (~members).sum(1)
    rng = np.random.default_rng((made.seed, cell.number, made.attacks.index(name)))
    about: dict[str, Any] = {
        "status": "ran",
        "why": None,
        "seconds": seconds,
        "n": int(members.sum()),
        "n_decoys": int((~members).sum()),
        "found_at": at_rates(scores, None),
        **dict.fromkeys(OF_PICTURES),
        "auc": float(above.mean()),  # the chance that a member scores above a decoy beside it
        "p_value": _p_value(scores, members, rate=made.rate, generator=rng),
    }
    if pictures is None:
        return about
    least = made.good_threshold
    for end, own in (("", scores), ("_control", pictures["control"].astype(np.float64))):
        about[f"n_good{end}"] = int((own[members] > least).sum())
        about[f"mean_ssim{end}"] = float(own[members].mean())
        about["control_at" if end else "good_at"] = at_rates(own, least)
    return about | {
        "identified": asdict(share_of(pictures["identified"], members)),
        "identified_decoys": asdict(share_of(pictures["identified"], ~members)),
        "n_good_decoys": int((scores[~members] > least).sum()),
        "mean_ssim_decoys": float(scores[~members].mean()),
    }


def _p_value(
    scores: Floats, members: Flags, *, rate: float, generator: np.random.Generator
) -> float:
    """The p-value of "nothing leaks": of mean ranks; of one network, whose interval does not know
    that its threshold is the score of one of few decoys, twice the lesser of that and of the chance
    that as many members as here stand above this many decoys."""
    p = exchangeable_p(scores, members, generator=generator)
    if len(scores) > 1:
        return p
    from scipy import stats

    decoys = scores[~members]
    n_allowed = int(np.floor(rate * len(decoys) + 1e-9))
    n_above = int((scores[members] > threshold_for(decoys, rate)).sum())
    tail = stats.hypergeom.cdf(n_allowed, scores.size, len(decoys), n_above + n_allowed)
    return float(min(1.0, 2 * min(p, tail)))


def _compare(cells: Sequence[dict[str, Any]], *, priced: bool) -> None:
    """Effects on the leak, prices where they are measured, and the front, of cells that have
    numbers."""
    for cell in cells[1:]:
        if cell["leak"] and cells[0]["leak"]:
            cell["effect"] = effect_of(cell["leak"], cells[0]["leak"])
    if not priced:
        return
    usable = [c for c in cells if c["failed"] is None and c["leak"] and accuracy(c)[0] is not None]
    before = (cells[0]["accuracy"] or {}).get("each")
    for cell in usable:
        if not cell["base"] and before:
            own = cell["accuracy"]["each"]
            change, interval = own[0] - before[0], None
            if len(own) > 1:
                change, interval = paired_difference(own, before)
            cell["accuracy"] |= {"change": change, "change_interval": interval}
    offered = [cell for cell in usable if cell["kind"] != "variant"]
    front = pareto_front(
        [c["leak"]["mean"] for c in offered], [c["accuracy"]["test"] for c in offered]
    )
    for cell, on_front in zip(offered, front, strict=True):
        cell["on_front"] = on_front


def _checked(limit: Limit, base: Mapping[str, Any], made: Audit) -> dict[str, Any]:
    """A limit, and the attack that comes nearest to it or exceeds it most. The limit fails if the
    share is above it and members score above decoys. It is undecided if the share is above it but
    decoys score like members, or if only a part of the interval is above it."""
    key = "good_at" if limit.of == "good" else "found_at"
    ran = {name: attacked(base, name) for name in made.attacks}
    shares = {name: own[key][key_of(limit.rate)] for name, own in ran.items() if own and own[key]}
    if not shares:
        raise ValueError(f"{limit.text}: no attack ran that it could be checked on")
    told = {name: is_significant(base["attacks"][name], share, made.n_victims)
            for name, share in shares.items()}  # fmt: skip
    worst = max(shares, key=lambda name: (told[name] and shares[name]["mean"] > limit.limit,
                                          shares[name]["mean"]))  # fmt: skip
    share = shares[worst]
    outcome = "undecided" if share["interval"][1] > limit.limit else "passes"
    if share["mean"] > limit.limit:
        outcome = "fails" if told[worst] else "undecided"
    return {
        "condition": limit.text,
        "cell": base["name"],
        "attack": worst,
        "value": share["mean"],
        "interval": share["interval"],
        "limit": limit.limit,
        "outcome": outcome,
    }


def exposure(plan: AuditPlan, base: Mapping[str, Any]) -> dict[str, Any]:
    """The images that come back most often from the base, and what may explain it."""
    leak, job = base["leak"], plan.jobs[0]
    nothing: dict[str, Any] = {"exposed": [], "classes_exposed": [], "decoys_shown": []}
    made = plan.folder.product(job.key)
    if leak is None or made is None:
        return nothing
    scores = plan.scores(plan.study.cells[0], leak["attack"])[0]["ssim"].astype(np.float64)
    members = job.members
    threshold = max(threshold_for(scores[~members], plan.study.rate), plan.study.good_threshold)
    back = (scores > threshold) & members
    mean = np.where(members, scores, 0.0).sum(0) / np.maximum(1, members.sum(0))
    order = np.lexsort((-mean, -back.sum(0)))
    order = order[np.any(members[:, order], axis=0)]
    classes = _by_class(plan, job, back, members)
    margins = np.where(members, made[0]["margin"].astype(np.float64), np.nan)
    margins[~np.isfinite(margins)] = np.nan  # where a victim did not learn it, or diverged
    return {
        "exposed": [
            _of_image(plan, job, int(row), margins, classes[0]["class"])
            | {"n_back": int(back[:, row].sum()), "mean_ssim": float(mean[row])}
            for row in order[:N_EXPOSED]
        ],
        "classes_exposed": classes,
        "decoys_shown": [
            {"image_id": int(job.pool.rows[row]), "victim": v, "ssim": float(scores[v, row])}
            for v, row in nearest_decoys(scores, members)
        ],
    }


def nearest_decoys(scores: Floats, members: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(victim, row) of the decoys that score best, each once."""
    decoy = np.where(members, -np.inf, scores)
    best = decoy.argmax(0)
    order = np.argsort(-decoy.max(0), kind="stable")[:N_DECOYS]
    return [(int(best[row]), int(row)) for row in order]


def _of_image(
    plan: AuditPlan, job: VictimsJob, row: int, margins: Floats, leakiest: str
) -> dict[str, Any]:
    """An image that comes back, and what may explain it."""
    images, source, own = job.pool, plan.images.pool, margins[:, row]
    margin = near = np.nan
    if np.isfinite(own).any():
        margin, near = float(np.nanmean(own)), float(np.nanquantile(margins, NEAR_MARGIN))
    label = int(source.labels[images.rows[row]])
    n_copies = _copies(images.images, row)
    near_words = "it lies near the boundary"
    if job.recipe.autoencoder is not None:
        near_words = "it is fitted worst"
    reasons = {
        f"{n_copies} near copies of it are in the pool": n_copies > 0,
        near_words: margin <= near,
        "its class leaks most": leakiest == source.class_names[label],
    }
    return {
        "image_id": int(images.rows[row]),
        "row": row,
        "label": label,
        "class": source.class_names[label],
        "n_in": int(job.members[:, row].sum()),
        "margin": margin,
        "n_copies": n_copies,
        "why": "; ".join(reason for reason, holds in reasons.items() if holds),
    }


def _copies(images: npt.NDArray[np.uint8], row: int) -> int:
    """Near copies of an image among the others."""
    others = torch.from_numpy(np.delete(images, row, 0))
    found = most_alike(others, torch.from_numpy(images[row : row + 1]))
    return int((found.correlation > THRESHOLD).sum())


def _by_class(
    plan: AuditPlan, job: VictimsJob, back: Flags, members: Flags
) -> list[dict[str, Any]]:
    """Shares of the images of each class that come back, the largest first."""
    source, learned = plan.images.pool, np.any(members, axis=0)
    label = np.full(len(learned), -1)
    label[learned] = source.labels[job.pool.rows[learned]]
    found = []
    for number, name in enumerate(source.class_names):
        own = label == number
        some = members[:, own].any(1)
        if not some.any():
            continue
        share = share_of(back[some][:, own], members[some][:, own])
        about = {"class": name, "n": int(members[:, own].sum())}
        found.append(about | {"share": share.mean, "interval": share.interval})
    return sorted(found, key=lambda entry: -entry["share"])


def pictures_of(plan: AuditPlan, record: Mapping[str, Any]) -> dict[str, npt.NDArray[np.uint8]]:
    """Pictures of the most exposed images and of the nearest decoys, beside what came back."""
    base, job = record["cells"][0], plan.jobs[0]
    if base["leak"] is None:
        return {}
    jobs = plan.attacks(plan.study.cells[0], base["leak"]["attack"])
    made = [plan.folder.product(one.key) for one in jobs]
    kept = [m[0] for m in made if m is not None]
    ssim = np.stack([arrays["ssim"] for arrays in kept])
    exposed = [entry["row"] for entry in record["exposed"]]
    best = [(int(np.where(job.members[:, row], ssim[:, row], -1).argmax()), row) for row in exposed]
    decoys = nearest_decoys(ssim.astype(np.float64), job.members)
    arrays = {}
    for name, places in (("exposed", best), ("decoys", decoys)):
        rows = np.array([row for _v, row in places], np.int64)
        arrays[f"{name}/original"] = job.pool.images[rows]
        found = [kept[v]["pictures"][row] for v, row in places]
        blank = np.zeros(job.pool.images.shape[1:], np.uint8)
        arrays[f"{name}/reconstruction"] = np.stack([p if p.size else blank for p in found])
    return arrays
