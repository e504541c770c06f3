"""What came back from InstaHide's encodings: scores where the truth is known, the record, and
sentences on what the encodings leave open."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.attacks.instahide.graph import connected, incidence_of
from recon_core.attacks.instahide.recover import Recovered
from recon_core.attacks.instahide.signs import Equations, determined
from recon_core.similarity import similarities
from storage.challenge import Challenge
from tasks.attack_file.comparison import six_digits
from tasks.families.instahide.attack import (
    METHODS,
    SAME,
    Attacked,
    Floats,
    InstaHideJob,
    PreparedChallenge,
)

SCHEMA, VERSION = "palimpsest-attack-instahide", 1
SSIM_SIDE = 11
"""Of its window."""
PARTS_LISTED = 8
WHY = {
    "ambiguous": "either sign of an encoding has a solution, so that a pixel has several values; "
    "another encoding that ties the image to others decides",
    "free": "its encodings fix sums with other images, or it is in none, so that it can be "
    "anything; more encodings of it decide",
    "several graphs": "two assignments of images to encodings explain the same encodings, and no "
    "pixel decides between them; one more encoding does",
    "unsolved": "no signs were found that meet its equations: public images, pairs or weights are "
    "wrong, or the encodings are noisier than is said (--noise)",
    "estimated": "an approximation: too few of its encodings are explained to be sure of it, and "
    "public images and mistaken pairs may be in it",
}
"""What a status means."""


def scored(attacked: Attacked, prepared: PreparedChallenge) -> Attacked:
    """Compare with the truth, if it is known. Images are matched by their pixels; without public
    images, which leave signs open, by absolute values, and each part of the graph has the common
    sign at each pixel that fits it best."""
    from scipy.optimize import linear_sum_assignment

    challenge, found = prepared.challenge, attacked.found
    private = challenge.secret.get("private")
    if private is None or found is None:
        return attacked
    truth = torch.from_numpy(np.asarray(private, np.float64)).flatten(1)
    images = found.images.cpu().double()
    signed = prepared.scheme.k_pub > 0
    there = np.flatnonzero(np.asarray(~images.isnan().all(1)))
    truth_of = np.full(len(images), -1, np.int64)
    if len(there):  # all distances together the least: squares could move an exact image
        filled = images[there].nan_to_num(0.0)
        a, b = (filled, truth) if signed else (filled.abs(), truth.abs())
        rows, ids = linear_sum_assignment(torch.cdist(a, b).numpy())
        truth_of[there[rows]] = ids
    own = np.flatnonzero(truth_of >= 0)
    error, worst, ssim = (np.full(len(images), np.nan) for _ in range(3))
    if len(own):
        mine, true = images[own], truth[truth_of[own]]
        if not signed:
            mine = mine * _common_signs(found, mine.nan_to_num(0.0), true, own)
        known = ~mine.isnan()
        off = (mine - true).abs().where(known, 0.0)
        error[own] = (off.square().sum(1) / known.sum(1)).sqrt().numpy()
        worst[own] = off.amax(1).numpy()
        if min(challenge.shape[1:]) >= SSIM_SIDE:
            shown = (
                torch.from_numpy(prepared.units.shown(x.numpy()))
                .float()
                .reshape(-1, *challenge.shape)
                for x in (mine.where(known, true), true)
            )
            ssim[own] = np.asarray(2 * similarities(*shown).ssim - 1)
    right = _edges_right(found, challenge, len(truth))
    return replace(
        attacked, truth_of=truth_of, error=error, worst=worst, ssim=ssim, edges_right=right
    )


def _common_signs(
    found: Recovered, images: Tensor, truth: Tensor, own: npt.NDArray[np.int64]
) -> Tensor:
    """The sign of each pixel of images `own` that fits the truth best, common to each part of the
    graph; an image in no part has signs of its own."""
    n = len(found.status)
    part = n + np.arange(n, dtype=np.int64)
    equations = _equations(found)
    if len(equations.edges):
        for k, members in enumerate(determined(equations, with_public=False).parts):
            part[members] = k
    signs = torch.ones_like(images)
    for k in np.unique(part[own]):
        rows = torch.from_numpy(np.flatnonzero(part[own] == k))
        agree = (images[rows] * truth[rows]).sum(0)
        signs[rows] = torch.where(agree < 0, -1.0, 1.0).to(images)
    return signs


def _edges_right(found: Recovered, challenge: Challenge, n: int) -> float | None:
    """The share of encodings with both true images; images are numbered so that most are right."""
    from scipy.optimize import linear_sum_assignment

    edges = challenge.secret.get("edges")
    known = (found.edges >= 0).all(1)
    if edges is None or not known.any():
        return None
    n_found = max(len(found.status), int(found.edges.max()) + 1)
    ours, theirs = incidence_of(found.edges[known], n_found), incidence_of(edges[known], n)
    match = np.full(n_found, -1)
    rows, ids = linear_sum_assignment(-(ours.T @ theirs))
    match[rows] = ids
    both = np.sort(match[found.edges[known]], axis=1) == np.sort(edges[known], axis=1)
    return float(both.all(1).sum() / len(edges))


def record_of(
    job: InstaHideJob, prepared: PreparedChallenge, attacked: Sequence[Attacked]
) -> dict[str, Any]:
    """Everything but the pictures, as JSON."""
    challenge, best = prepared.challenge, best_of(attacked)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "source": str(job.path),
        "scheme": dataclasses.asdict(prepared.scheme),
        "units": dataclasses.asdict(prepared.units) | {"exact_within": SAME},
        "n_encodings": len(challenge.encodings),
        "n_private": prepared.n_private,
        "n_public": 0 if challenge.public is None else len(challenge.public),
        "has_labels": challenge.labels is not None,
        "has_truth": "private" in challenge.secret,
        "shape": list(challenge.shape),
        "seed": job.seed,
        "methods": [method_record(a, prepared) for a in attacked],
        "best": None if best is None else list(attacked).index(best),
    }


def best_of(attacked: Sequence[Attacked]) -> Attacked | None:
    """The method with most images recovered; the first of equals."""
    there = [a for a in attacked if a.found is not None]
    return max(there, key=lambda a: a.found.n_recovered if a.found else 0, default=None)


def method_record(attacked: Attacked, prepared: PreparedChallenge) -> dict[str, Any]:
    """As JSON, image by image."""
    base = {
        "method": attacked.name,
        "title": METHODS[attacked.name].title,
        "seconds": round(attacked.seconds, 2),
    }
    found, ssim, error = attacked.found, attacked.ssim, attacked.error
    if found is None:
        return base | {"failure": attacked.failure}
    means: dict[str, tuple[Any, Floats | None]] = {
        "ssim_mean": (np.nanmean, ssim),
        "error_median": (np.nanmedian, error),
    }
    return base | {
        "n_images": len(found.status),
        "by_status": dict(Counter(status.value for status in found.status)),
        "n_explained": int(found.explained.sum()),
        "n_encodings": len(found.edges),
        "exact_graph": found.exact,
        "n_graphs": found.n_graphs,
        "n_exact": attacked.n_exact,
        "n_false": attacked.n_false,
        "edges_right": attacked.edges_right,
        **{
            name: None if x is None or np.isnan(x).all() else six_digits(float(mean(x)))
            for name, (mean, x) in means.items()
        },
        "ambiguity": ambiguity(found, with_public=prepared.scheme.k_pub > 0),
        "images": [image_row(attacked, k) for k in range(len(found.status))],
    }


def image_row(attacked: Attacked, k: int) -> dict[str, Any]:
    """Image k: its status, its encodings, its unknown pixels, and its scores."""
    found = attacked.found
    assert found is not None
    row: dict[str, Any] = {
        "image": k,
        "status": found.status[k].value,
        "n_encodings": int((found.edges == k).any(1).sum()),
        "n_pixels_open": int(found.images[k].isnan().sum()),
    }
    if found.labels is not None:
        row["class"] = int(found.labels[k])
    if attacked.truth_of is None:
        return row
    errors = {"rms_error": attacked.error, "worst_error": attacked.worst, "ssim": attacked.ssim}
    known = {name: float(values[k]) for name, values in errors.items() if values is not None}
    row["truth"] = int(attacked.truth_of[k])
    row.update(six_digits(known))
    return row


def ambiguity(found: Recovered, *, with_public: bool) -> dict[str, Any]:
    """Ambiguity that the explained encodings leave, by theory, before any pixel is looked at.

    `log2_solutions` is of each pixel, of the images that are not free; `sizes` are the numbers of
    images of the largest parts of the graph; a part is two-sided if all its cycles are even.
    """
    equations = _equations(found)
    (first, second), n = equations.edges.T, equations.n
    if not len(first):
        return {"n_equations": 0}
    what = determined(equations, with_public=with_public)
    seen = np.unique(equations.edges)
    part = connected(first, second, n=n)[seen]
    # in the double cover an edge goes to the other side: an odd cycle ties the two of an image
    double = connected(np.append(first, first + n), np.append(second + n, second), n=2 * n)
    parts = np.unique(part, return_counts=True)[1]
    return {
        "n_equations": len(first),
        "n_parts": len(parts),
        "n_two_sided": len(np.unique(part[double[seen] != double[seen + n]])),
        "sizes": np.sort(parts)[::-1][:PARTS_LISTED].tolist(),
        "n_coloops": int(what.coloops.sum()),
        "log2_solutions": round(math.log2(what.n_solutions))
        if math.isfinite(what.n_solutions)
        else None,
        "n_determined": int(what.images.sum()),
        "n_ambiguous": int(what.ambiguous.sum()),
        "n_free": int(what.free.sum()),
        "n_unseen": n - len(seen),
        "equal_weights": bool(np.allclose(equations.weights, equations.weights[0, 0])),
    }


def _equations(found: Recovered) -> Equations:
    """The equations of the encodings that are explained."""
    rows = (found.edges >= 0).all(1) & found.explained
    return Equations(found.edges[rows], found.weights[rows], len(found.status))


def left_open(method: Mapping[str, Any], k_pub: int) -> list[str]:
    """Sentences on one method's record, from the equations to the images."""
    found, n, m = method["ambiguity"], method["n_images"], method["n_encodings"]
    if found["n_equations"]:
        words = [
            f"{found['n_equations']:,} of {_n(m, 'encoding')} are explained: each is an equation "
            f"in its two images, and all together determine {found['n_determined']} of {n} images.",
            *_of_equations(found, k_pub),
        ]
    else:
        words = [
            f"None of {_n(m, 'encoding')} is explained, so nothing is proved: what is shown, if "
            "anything is, is an estimate."
        ]
    if method["n_graphs"] > 1:
        words.append(
            f"{method['n_graphs']:,} graphs have these overlaps: a part that is a triangle, a star "
            "of three, K4, K4 without an edge, or a triangle with a tail, can be drawn in two ways."
        )
    if not method["exact_graph"]:
        words.append(
            "The graph is the most likely one, not the only one with these overlaps: they were "
            "measured with errors. Equations that are met speak for it, encoding by encoding."
        )
    return words


def _of_equations(found: Mapping[str, Any], k_pub: int) -> list[str]:
    words, bits, coloops = [], found["log2_solutions"], found["n_coloops"]
    if found["n_parts"] > 1:
        more = ", ..." if found["n_parts"] > PARTS_LISTED else ""
        words.append(
            f"The graph has {found['n_parts']} parts, of {', '.join(map(str, found['sizes']))}"
            f"{more} images, that no encoding ties to each other; each is solved by itself."
        )
    if found["n_two_sided"] and found["equal_weights"]:
        words.append(
            f"{_n(found['n_two_sided'], 'part')} without a cycle of an odd number of encodings: "
            "images on one side can grow by what those on the other shrink, so all are free."
        )
    power = "more than 10^308 solutions"
    if bits is not None:
        count = f", {2**bits:,}" if bits <= 20 else ""
        power = f"2 to the {bits}{count} solutions" if bits else "1 solution"
    if k_pub and coloops:
        words.append(
            f"{_n(coloops, 'encoding')} in no circuit of equations (coloops): nothing contradicts "
            f"the other sign, and each doubles the solutions of a pixel, {power} for the signs."
        )
    elif k_pub:
        words.append(
            "Every encoding is in a circuit of equations, which a wrong sign contradicts: the "
            "signs of a pixel have one solution."
        )
    else:
        groups = "many groups" if bits is None else _n(bits, "group")
        words.append(
            "Encodings have no public images, so an image and its negative look alike: the "
            f"equations fall into {groups} whose signs can be turned together, which gives {power} "
            "at a pixel. What is determined is determined up to the sign of its group; its first "
            "image is shown positive."
        )
    if free := found["n_free"]:
        unseen = f", {found['n_unseen']} in no explained encoding" if found["n_unseen"] else ""
        words.append(
            f"{_n(free, 'image')} free{unseen}: for each choice of signs a pixel of such an image "
            "has infinitely many values. Determined images are the same in all solutions."
        )
    return words


def _n(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
