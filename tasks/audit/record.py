"""audit.json: what every attack gets out of every cell's victims, what defences cost, and what may
be said of it (docs/audit.md).

Members and decoys are images of the same pool, so counts at a false positive rate need no other
images. Shares have intervals over victims (`recon_core.leakage`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.leakage import (
    Share,
    exchangeable_p,
    paired_difference,
    pareto_front,
    share_found,
    share_of,
)
from recon_core.membership import likelihood_ratio
from recon_core.summary import proportion_interval, t_interval, threshold_for
from tasks.audit.effect import effect_of, is_told
from tasks.audit.exposure import exposure
from tasks.audit.plan import AuditPlan
from tasks.audit.settings import (
    ENOUGH_TESTS,
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
from tasks.audit.verdict import does_not_cover, verdict_of
from tasks.evaluation.record import rounded
from tasks.study.executor import Outcome
from tasks.study.products import Arrays

DIGITS = 6
OF_PICTURES = (
    *("good_at", "control_at", "identified", "identified_decoys", "n_good", "n_good_decoys"),
    *("n_good_control", "mean_ssim", "mean_ssim_decoys", "mean_ssim_control"),
)
"""Numbers that attacks alone have that give pictures."""

Floats = npt.NDArray[np.float64]


def describe_audit(plan: AuditPlan, ended: Outcome) -> dict[str, Any]:
    """The record's own entries."""
    made = plan.study
    cells = [_described(plan, cell, ended) for cell in made.cells]
    base, job = cells[0], plan.jobs[0]
    _compare(cells, priced=why_no_price(len(job.tests)) is None)
    body: dict[str, Any] = {
        "subject": plan.subject,
        "n_images": int(job.members[0].sum()),
        "n_victims": made.n_victims,
        "n_tests": len(job.tests),
        "no_price": why_no_price(len(job.tests)),
        "good_threshold": made.good_threshold,
        "rates": list(RATES),
        "rate": made.rate,
        "task": plan.task,
        "price": "accuracy" if job.recipe.autoencoder is None else "variance explained",
        "classes": list(plan.images.pool.class_names),
        "source": {"victims": plan.images.pool.facts, "others": plan.images.others.facts},
        "attacks": [_about(name) for name in made.attacks],
        "cells": cells,
        **exposure(plan, base),
        "checks": [_checked(limit, base, made) for limit in made.limits],
        "left_out": [*made.left_out, *_not_tried(plan)],
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


def _not_tried(plan: AuditPlan) -> list[str]:
    """Attacks that could be made and were not chosen, in words."""
    if plan.subject == "gradients":  # which the others are not about
        return []
    base, chosen = plan.study.cells[0], {*plan.study.attacks, "gradient"}
    others = (n for n in TITLES if n not in chosen and plan.why_not(base, n) is None)
    return [f"the attack {TITLES[name][0]}" for name in others]


def _about(name: AttackName) -> dict[str, str | None]:
    title, knows = TITLES[name]
    kind = "reconstruction" if name in RECONSTRUCTION else "membership"
    about = {"name": name, "title": title, "kind": kind, "knows": knows}
    return about | {"start": START.get(name)}


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
        about["accuracy"] = _accuracy(arrays)
    about["seconds"] = facts["seconds"]
    for name in plan.study.attacks:
        about["attacks"][name] = _attacked(plan, cell, name, arrays, ended.failed)
    return about | {"leak": _leak(about["attacks"], plan.study)}


def _accuracy(arrays: Arrays) -> dict[str, Any]:
    correct = arrays["correct"].astype(np.float64)
    each = correct.mean(1) if correct.shape[1] else None
    return {
        "train": float(arrays["train_accuracy"].mean()),
        "test": None if each is None else float(each.mean()),
        "test_interval": None if each is None else _accuracy_interval(correct),
        "each": [] if each is None else each.tolist(),
        "change": None,
        "change_interval": None,
    }


def _accuracy_interval(correct: Floats) -> list[float]:
    """An interval over victims, within what a mean can be; of one, over the images."""
    if len(correct) > 1:
        least = min(0.0, float(correct.min()))
        return [min(1.0, max(least, end)) for end in t_interval(correct.mean(1).tolist())]
    return list(proportion_interval(int(correct.sum()), correct.size))


def _attacked(
    plan: AuditPlan,
    cell: Cell,
    name: AttackName,
    arrays: Arrays,
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """Scores of one attack on a cell's victims."""
    if (why := plan.why_not(cell, name)) is not None:
        return {"status": "refused", "why": why}
    job, made = plan.jobs[cell.number], plan.study
    members = job.members
    seconds = 0.0
    if name in MEMBERSHIP:
        scores, more = _membership(name, arrays, members), None
    else:
        units = [f"attack {cell.name}, {name}, victim {v}" for v in range(made.n_victims)]
        if lost := [unit for unit in units if unit in failed]:
            return {"status": "refused", "why": f"failed: {failed[lost[0]]}"}
        more, seconds = plan.scores(cell, name)
        scores = more["ssim"].astype(np.float64)
    rng = np.random.default_rng((made.seed, cell.number, made.attacks.index(name)))
    about: dict[str, Any] = {
        "status": "ran",
        "why": None,
        "seconds": seconds,
        "n": int(members.sum()),
        "n_decoys": int((~members).sum()),
        "found_at": {f"{r:g}": _share(share_found(scores, members, rate=r)) for r in RATES},
        **dict.fromkeys(OF_PICTURES),
        "auc": _auc(scores, members),
        "p_value": _p_value(scores, members, rate=made.rate, generator=rng),
    }
    if more is not None:
        about |= _of_pictures(more, members, made)
    return about


def _of_pictures(arrays: Arrays, members: npt.NDArray[np.bool_], made: Audit) -> dict[str, Any]:
    """Numbers of an attack that gives pictures: its own, and those of the mean image alone."""
    least = made.good_threshold
    scores, control = (arrays[name].astype(np.float64) for name in ("ssim", "control"))
    by_rate = [
        {f"{r:g}": _share(share_found(some, members, rate=r, least=least)) for r in RATES}
        for some in (scores, control)
    ]
    return {
        "good_at": by_rate[0],
        "control_at": by_rate[1],
        "identified": _share(share_of(arrays["identified"], members)),
        "identified_decoys": _share(share_of(arrays["identified"], ~members)),
        "n_good": int((scores[members] > least).sum()),
        "n_good_decoys": int((scores[~members] > least).sum()),
        "n_good_control": int((control[members] > least).sum()),
        "mean_ssim": float(scores[members].mean()),
        "mean_ssim_decoys": float(scores[~members].mean()),
        "mean_ssim_control": float(control[members].mean()),
    }


def _membership(name: AttackName, arrays: Arrays, members: npt.NDArray[np.bool_]) -> Floats:
    sure = arrays["confidence"].astype(np.float64)
    if name == "loss":
        return np.where(np.isfinite(sure), sure, -np.inf)
    found = likelihood_ratio(torch.from_numpy(sure), torch.from_numpy(members))
    return np.asarray(found.numpy(), np.float64)


def _share(share: Share) -> dict[str, Any]:
    return {"mean": share.mean, "interval": list(share.interval), "each": list(share.each)}


def _auc(scores: Floats, members: npt.NDArray[np.bool_]) -> float:
    """Chance that a member scores above a decoy of the same victim; the mean over victims."""
    each = []
    for own, member in zip(scores, members, strict=True):
        order = np.sort(own[~member])
        below = np.searchsorted(order, own[member], side="left")
        not_above = np.searchsorted(order, own[member], side="right")
        each.append((below + not_above).mean() / (2 * len(order)))
    return float(np.mean(each))


def _p_value(
    scores: Floats,
    members: npt.NDArray[np.bool_],
    *,
    rate: float,
    generator: np.random.Generator,
) -> float:
    """The p-value of "nothing leaks": of mean ranks; of one network, whose interval does not know
    that its threshold is the score of one of few decoys, twice the lesser of that and of the chance
    that as many members as here stand above this many decoys."""
    p = exchangeable_p(scores, members, generator=generator)
    if len(scores) > 1:
        return p
    from scipy import stats  # half a second, which a front does without

    decoys = scores[~members]
    n_allowed = int(np.floor(rate * len(decoys) + 1e-9))
    n_above = int((scores[members] > threshold_for(decoys, rate)).sum())
    tail = stats.hypergeom.cdf(n_allowed, scores.size, len(decoys), n_above + n_allowed)
    return float(min(1.0, 2 * min(p, tail)))


def _leak(attacks: Mapping[str, Any], made: Audit) -> dict[str, Any] | None:
    """The largest share that comes back well at the headline's rate."""
    rate = f"{made.rate:g}"
    there = [
        {"attack": name, **attacks[name]["good_at"][rate]}
        for name in RECONSTRUCTION
        if attacks.get(name, {}).get("status") == "ran"
    ]
    return max(there, key=lambda share: share["mean"], default=None)


def why_no_price(n_tests: int) -> str | None:
    """The reason for which no price in accuracy is stated; None: it is."""
    if n_tests >= ENOUGH_TESTS:
        return None
    return f"not measured: {n_tests} held-out images, {ENOUGH_TESTS} needed"


def _compare(cells: Sequence[dict[str, Any]], *, priced: bool) -> None:
    """Effects on the leak, prices where they are measured, and the front, of cells that have
    numbers."""
    for cell in cells[1:]:
        if cell["leak"] and cells[0]["leak"]:
            cell["effect"] = effect_of(cell["leak"], cells[0]["leak"])
    if not priced:
        return
    usable = [
        c for c in cells
        if c["failed"] is None and c["leak"] and (c["accuracy"] or {}).get("each")
    ]  # fmt: skip
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
    """A limit, and the attack that comes nearest to it or exceeds it most. It fails if the share is
    above and members are told from decoys; it is undecided if the share is above, but decoys score
    like members, or if a part of the interval alone is above."""
    key = "good_at" if limit.of == "good" else "found_at"
    shares = {
        name: base["attacks"][name][key][f"{limit.rate:g}"]
        for name in made.attacks
        if base["attacks"].get(name, {}).get("status") == "ran" and base["attacks"][name][key]
    }
    if not shares:
        raise ValueError(f"{limit.text}: no attack ran that it could be checked on")
    told = {name: is_told(base["attacks"][name], share, made.n_victims)
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
