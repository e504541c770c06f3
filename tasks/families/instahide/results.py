"""What came back from InstaHide's encodings: scores where the truth is known, and sentences on what
the encodings leave open."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from recon_core.attacks.instahide.graph import incidence_of
from recon_core.attacks.instahide.recover import Recovered, Status
from recon_core.attacks.instahide.signs import Equations, determined
from recon_core.similarity import similarities
from storage.challenge import Challenge
from tasks.attack_file.comparison import six_digits
from tasks.families.instahide.inputs import PreparedChallenge

SSIM_SIDE = 11
"""Of its window."""
PARTS_LISTED = 20
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

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """One method's outcome; `seconds` by step.

    `truth_of`: the true image of each recovered one, -1: none. `error`: root mean square over
    pixels, `worst`: the largest error of a pixel, `ssim` in [-1, 1], over the pixels that are
    known; `same`: the largest error of an exact image. `edges_right`: the share of
    encodings with both true images. None where there is no truth, or nothing came back.
    """

    name: str
    title: str
    found: Recovered | None
    seconds: dict[str, float]
    failure: str = ""
    truth_of: npt.NDArray[np.int64] | None = None
    error: Floats | None = None
    worst: Floats | None = None
    ssim: Floats | None = None
    edges_right: float | None = None
    same: float = 0.0

    @property
    def n_exact(self) -> int | None:
        return None if self.worst is None else int((self.worst <= self.same).sum())

    @property
    def n_false(self) -> int | None:
        """Images that are called recovered and are not: no method should have any."""
        if self.worst is None or self.found is None:
            return None
        called = np.array([status is Status.RECOVERED for status in self.found.status])
        return int((called & ~(self.worst <= self.same)).sum())


def scored(
    name: str, title: str, found: Recovered, prepared: PreparedChallenge, seconds: dict[str, float]
) -> Scored:
    """Compare with the truth, if it is known. Images are matched by their pixels; without public
    images, which leave signs open, by absolute values, and each part of the graph has the common
    sign at each pixel that fits it best."""
    challenge, units = prepared.challenge, prepared.units
    private = challenge.secret.get("private")
    if private is None:
        return Scored(name, title, found, seconds)
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
                torch.from_numpy(units.shown(x.numpy())).float().reshape(-1, *challenge.shape)
                for x in (mine.where(known, true), true)
            )
            ssim[own] = np.asarray(2 * similarities(*shown).ssim - 1)
    return Scored(
        name, title, found, seconds, truth_of=truth_of, error=error, worst=worst, ssim=ssim,
        edges_right=_edges_right(found, challenge, len(truth)), same=units.same,
    )  # fmt: skip


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


def method_record(scored: Scored, prepared: PreparedChallenge) -> dict[str, Any]:
    """As JSON, image by image."""
    base = {
        "method": scored.name,
        "title": scored.title,
        "seconds": round(sum(scored.seconds.values()), 2),
        "seconds_of_steps": {name: round(s, 3) for name, s in scored.seconds.items()},
    }
    found = scored.found
    if found is None:
        return base | {"failure": scored.failure}
    return base | {
        "n_images": len(found.status),
        "by_status": dict(Counter(status.value for status in found.status)),
        "n_explained": int(found.explained.sum()),
        "n_encodings": len(found.edges),
        "exact_graph": found.exact,
        "n_graphs": found.n_graphs,
        "n_exact": scored.n_exact,
        "n_false": scored.n_false,
        "edges_right": scored.edges_right,
        "ssim_mean": _over(np.nanmean, scored.ssim),
        "error_median": _over(np.nanmedian, scored.error),
        "ambiguity": ambiguity(found, with_public=prepared.scheme.k_pub > 0),
        "images": [image_row(scored, k) for k in range(len(found.status))],
    }


def image_row(scored: Scored, k: int) -> dict[str, Any]:
    """Image k: its status, its encodings, its unknown pixels, and its scores."""
    found = scored.found
    assert found is not None
    row: dict[str, Any] = {
        "image": k,
        "status": found.status[k].value,
        "n_encodings": int((found.edges == k).any(1).sum()),
        "n_pixels_open": int(found.images[k].isnan().sum()),
    }
    if found.labels is not None:
        row["class"] = int(found.labels[k])
    if scored.truth_of is None:
        return row
    errors = {"rms_error": scored.error, "worst_error": scored.worst, "ssim": scored.ssim}
    known = {name: float(values[k]) for name, values in errors.items() if values is not None}
    row["truth"] = int(scored.truth_of[k])
    row.update(six_digits(known))
    return row


def ambiguity(found: Recovered, *, with_public: bool) -> dict[str, Any]:
    """Ambiguity that the explained encodings leave, by theory, before any pixel is looked at.

    `log2_solutions` is of each pixel, of the images that are not free.
    """
    equations = _equations(found)
    ends, n = equations.edges, equations.n
    if not len(ends):
        return {"n_equations": 0}
    what = determined(equations, with_public=with_public)
    import networkx as nx

    graph = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(n, n))
    label = connected_components(graph, directed=False)[1]
    seen = np.isin(np.arange(n), ends)
    parts = [
        {
            "n_images": int((label == k).sum()),
            "n_encodings": int((label[ends[:, 0]] == k).sum()),
            "n_determined": int((what.images & (label == k)).sum()),
            "two_sided": nx.is_bipartite(nx.Graph(ends[label[ends[:, 0]] == k].tolist())),
        }
        for k in np.unique(label[seen])
    ]
    parts.sort(key=lambda part: -part["n_images"])
    solutions = what.n_solutions
    return {
        "n_equations": len(ends),
        "n_parts": len(parts),
        "n_two_sided": sum(part["two_sided"] for part in parts),
        "parts": parts[:PARTS_LISTED],
        "n_coloops": int(what.coloops.sum()),
        "log2_solutions": round(math.log2(solutions)) if math.isfinite(solutions) else None,
        "n_determined": int(what.images.sum()),
        "n_ambiguous": int(what.ambiguous.sum()),
        "n_free": int(what.free.sum()),
        "n_unseen": int(n - seen.sum()),
        "equal_weights": bool(np.allclose(equations.weights, equations.weights[0, 0])),
    }


def _equations(found: Recovered) -> Equations:
    """The equations of the encodings that are explained."""
    rows = (found.edges >= 0).all(1) & found.explained
    return Equations(found.edges[rows], found.weights[rows], len(found.status))


def _over(mean: Any, values: Floats | None) -> float | None:
    known = values is not None and not np.isnan(values).all()
    return six_digits(float(mean(values))) if known else None


def left_open(method: Mapping[str, Any], k_pub: int) -> list[str]:
    """Sentences on one method's record, from the equations to the images."""
    found, n, m = method["ambiguity"], method["n_images"], method["n_encodings"]
    if found["n_equations"]:
        said = [
            f"{found['n_equations']:,} of {_n(m, 'encoding')} are explained: each is an equation "
            f"in its two images, and all together determine {found['n_determined']} of {n} images.",
            *_of_equations(found, k_pub),
        ]
    else:
        said = [
            f"None of {_n(m, 'encoding')} is explained, so nothing is proved: what is shown, if "
            "anything is, is an estimate."
        ]
    if method["n_graphs"] > 1:
        said.append(
            f"{method['n_graphs']:,} graphs have these overlaps: a part that is a triangle, a star "
            "of three, K4, K4 without an edge, or a triangle with a tail, can be drawn in two ways."
        )
    if not method["exact_graph"]:
        said.append(
            "The graph is the most likely one, not the only one with these overlaps: they were "
            "measured with errors. Equations that are met speak for it, encoding by encoding."
        )
    return said


def _of_equations(found: Mapping[str, Any], k_pub: int) -> list[str]:
    said, bits, coloops = [], found["log2_solutions"], found["n_coloops"]
    if found["n_parts"] > 1:
        sizes = ", ".join(str(part["n_images"]) for part in found["parts"][:8])
        said.append(
            f"The graph has {found['n_parts']} parts, of {sizes}"
            f"{', ...' if found['n_parts'] > 8 else ''} images, that no encoding ties to each "
            "other; each is solved by itself."
        )
    if found["n_two_sided"] and found["equal_weights"]:
        have, their = ("parts have", "their") if found["n_two_sided"] > 1 else ("part has", "its")
        said.append(
            f"{found['n_two_sided']} {have} no cycle of an odd number of encodings: images on one "
            f"side can grow by what those on the other shrink, so all {their} images are free."
        )
    power = "more than 10^308 solutions"
    if bits is not None:
        count = f", {2**bits:,}" if bits <= 20 else ""
        power = f"2 to the {bits}{count} solutions" if bits else "1 solution"
    if k_pub and coloops:
        are = "are in no circuit of equations (coloops)"
        if coloops == 1:
            are = "is in no circuit of equations (a coloop)"
        said.append(
            f"{_n(coloops, 'encoding')} {are}: nothing contradicts the other sign, and each "
            f"doubles the solutions of a pixel, {power} for the signs."
        )
    elif k_pub:
        said.append(
            "Every encoding is in a circuit of equations, which a wrong sign contradicts: the "
            "signs of a pixel have one solution."
        )
    else:
        groups = "many groups" if bits is None else _n(bits, "group")
        said.append(
            "Encodings have no public images, so an image and its negative look alike: the "
            f"equations fall into {groups} whose signs can be turned together, which gives {power} "
            "at a pixel. What is determined is determined up to the sign of its group; its first "
            "image is shown positive."
        )
    if free := found["n_free"]:
        unseen = f", {found['n_unseen']} in no explained encoding" if found["n_unseen"] else ""
        are, them = ("is", "it") if free == 1 else ("are", "them")
        said.append(
            f"{_n(free, 'image')} {are} free{unseen}: for each choice of signs a pixel of {them} "
            "has infinitely many values. Determined images are the same in all solutions."
        )
    return said


def _n(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
