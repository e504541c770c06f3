"""Images of the network as it is that come back most often: which, why, and their pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.duplicates import THRESHOLD, most_alike
from recon_core.leakage import share_of
from recon_core.summary import threshold_for
from tasks.audit.plan import AuditPlan
from tasks.audit.victims import VictimsJob
from tasks.study.products import Arrays

N_EXPOSED, N_DECOYS = 24, 8
NEAR_MARGIN = 0.25
"""Quantile of the margins below which an image is near the boundary."""

Floats = npt.NDArray[np.float64]


def exposure(plan: AuditPlan, base: Mapping[str, Any]) -> dict[str, Any]:
    """Images of the base that come back most often, and what they have in common."""
    leak, job = base["leak"], plan.jobs[0]
    nothing: dict[str, Any] = {"exposed": [], "classes_exposed": [], "decoys_shown": []}
    made = plan.folder.product(job.key)
    if leak is None or made is None:
        return nothing
    scores = plan.scores(plan.study.cells[0], leak["attack"])[0]["ssim"].astype(np.float64)
    members, arrays = job.members, made[0]
    threshold = max(threshold_for(scores[~members], plan.study.rate), plan.study.good_threshold)
    back = (scores > threshold) & members
    mean = np.where(members, scores, 0.0).sum(0) / np.maximum(1, members.sum(0))
    order = np.lexsort((-mean, -back.sum(0)))
    order = order[np.any(members[:, order], axis=0)]
    classes = _by_class(plan, job, back, members)
    return {
        "exposed": [
            _of_image(plan, job, int(row), (back, mean, arrays, classes))
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
    plan: AuditPlan,
    job: VictimsJob,
    row: int,
    known: tuple[npt.NDArray[np.bool_], Floats, Arrays, list[dict[str, Any]]],
) -> dict[str, Any]:
    back, mean, arrays, classes = known
    images, source = job.pool, plan.images.pool
    inside = job.members[:, row]
    counts = job.members & np.isfinite(arrays["margin"])  # not of victims that diverged
    own = arrays["margin"][counts[:, row], row]
    margin = float(own.mean()) if own.size else np.nan
    near = float(np.quantile(arrays["margin"][counts], NEAR_MARGIN)) if own.size else np.nan
    label = int(source.labels[images.rows[row]])
    n_copies = _copies(images.images, row)
    is_classifier = job.recipe.autoencoder is None
    near_words = "it lies near the boundary" if is_classifier else "it is fitted worst"
    name = source.class_names[label]
    reasons = [
        *([f"{n_copies} near copies of it are in the pool"] if n_copies else []),
        *([near_words] if margin <= near else []),
        *(["its class leaks most"] if classes and classes[0]["class"] == name else []),
    ]
    return {
        "image_id": int(images.rows[row]),
        "row": row,
        "label": label,
        "class": name,
        "n_in": int(inside.sum()),
        "n_back": int(back[:, row].sum()),
        "mean_ssim": float(mean[row]),
        "margin": margin,
        "n_copies": n_copies,
        "why": "; ".join(reasons),
    }


def _copies(images: npt.NDArray[np.uint8], row: int) -> int:
    """Near copies of an image among the others."""
    own = torch.from_numpy(images[row : row + 1])
    others = torch.from_numpy(np.delete(images, row, 0))
    found = most_alike(others, own)
    return int((found.correlation > THRESHOLD).sum())


def _by_class(
    plan: AuditPlan,
    job: VictimsJob,
    back: npt.NDArray[np.bool_],
    members: npt.NDArray[np.bool_],
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
        n = int(members[:, own].sum())
        found.append({"class": name, "n": n, "share": share.mean, "interval": share.interval})
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
