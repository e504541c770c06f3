"""Scores of what came back from InstaHide's encodings, beside the truth where that is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from recon_core.attacks.instahide.determined import Equations, determined
from recon_core.attacks.instahide.line_graph import incidence_of
from recon_core.attacks.instahide.recover import Recovered, Status
from recon_core.similarity import similarities
from storage.challenge import Challenge
from tasks.attack_file.record import six_digits
from tasks.families.instahide.inputs import PreparedChallenge, Units

SSIM_SIDE = 11
"""Of its window."""
PARTS_LISTED = 20

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """One method's outcome; `seconds` by step.

    `truth_of`: the true image that each found one is, -1: none. `error`: root mean square over
    pixels, `worst`: the largest error of a pixel, `ssim` in [-1, 1], over the pixels that are
    known; `same`: the largest error of what is called exact. `edges_right`: of each encoding,
    whether both its images are the true ones. None where there is no truth, or nothing came back.
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
    edges_right: npt.NDArray[np.bool_] | None = None
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
    """Compared with the truth, if it is known: images are matched by their pixels, without public
    images, where the sign of a pixel is not determined, by absolute values, those of a part with
    the common sign at each pixel that fits them best."""
    challenge, units = prepared.challenge, prepared.units
    private = challenge.secret.get("private")
    if private is None:
        return Scored(name, title, found, seconds)
    truth = torch.from_numpy(np.asarray(private, np.float64)).flatten(1)
    images = found.images.cpu().double()
    signed = prepared.scheme.k_pub > 0
    truth_of = _matched(images, truth, signed=signed)
    own = np.flatnonzero(truth_of >= 0)
    error, worst, ssim = (np.full(len(images), np.nan) for _ in range(3))
    if len(own):
        mine, true = images[own], truth[truth_of[own]]
        if not signed:
            mine = mine * _common_signs(mine.nan_to_num(0.0), true, _parts_of(found)[own])
        known = ~mine.isnan()
        off = (mine - true).abs().where(known, 0.0)
        error[own] = (off.square().sum(1) / known.sum(1)).sqrt().numpy()
        worst[own] = off.amax(1).numpy()
        ssim[own] = _ssim(mine.where(known, true), true, challenge.shape, units)
    return Scored(
        name, title, found, seconds, truth_of=truth_of, error=error, worst=worst, ssim=ssim,
        edges_right=_edges_right(found, challenge, len(truth)), same=units.same,
    )  # fmt: skip


def _matched(images: Tensor, truth: Tensor, *, signed: bool) -> npt.NDArray[np.int64]:
    """One true image for each that is there, all distances together the least: of their squares,
    one that is exact could be matched with another."""
    there = np.asarray(~images.isnan().all(1))
    truth_of = np.full(len(images), -1, np.int64)
    if there.any():
        filled = images[torch.from_numpy(there)].nan_to_num(0.0)
        a, b = (filled, truth) if signed else (filled.abs(), truth.abs())
        rows, ids = linear_sum_assignment(torch.cdist(a, b).numpy())
        truth_of[np.flatnonzero(there)[rows]] = ids
    return truth_of


def _common_signs(images: Tensor, truth: Tensor, part: npt.NDArray[np.int64]) -> Tensor:
    signs = torch.ones_like(images)
    for k in np.unique(part):
        rows = torch.from_numpy(np.flatnonzero(part == k))
        agree = (images[rows] * truth[rows]).sum(0)
        signs[rows] = torch.where(agree < 0, -1.0, 1.0).to(images)
    return signs


def _parts_of(found: Recovered) -> npt.NDArray[np.int64]:
    """The part whose images have a common sign with each image, one of its own if none."""
    n = len(found.status)
    part = n + np.arange(n, dtype=np.int64)
    equations, _rows = _equations(found)
    if len(equations.edges):
        for k, images in enumerate(determined(equations, with_public=False).parts):
            part[images] = k
    return part


def _edges_right(found: Recovered, challenge: Challenge, n: int) -> npt.NDArray[np.bool_] | None:
    """Encodings whose two images are the true ones, images numbered so that most are."""
    edges = challenge.secret.get("edges")
    known = (found.edges >= 0).all(1)
    if edges is None or not known.any():
        return None
    n_found = max(len(found.status), int(found.edges.max()) + 1)
    ours, theirs = incidence_of(found.edges[known], n_found), incidence_of(edges[known], n)
    match = np.full(n_found, -1)
    rows, ids = linear_sum_assignment(-(ours.T @ theirs))
    match[rows] = ids
    right = np.zeros(len(edges), bool)
    both = np.sort(match[found.edges[known]], axis=1) == np.sort(edges[known], axis=1)
    right[known] = both.all(1)
    return right


def _ssim(a: Tensor, b: Tensor, shape: Sequence[int], units: Units) -> Floats:
    """Of pictures from 0 to 1; NaN where they are smaller than SSIM's window."""
    if min(shape[1:]) < SSIM_SIDE:
        return np.full(len(a), np.nan)
    first, second = (
        torch.from_numpy(units.shown(x.numpy())).float().reshape(-1, *shape) for x in (a, b)
    )
    return np.asarray(2 * similarities(first, second).ssim - 1)


def method_record(scored: Scored, prepared: PreparedChallenge) -> dict[str, Any]:
    """As JSON, image by image."""
    total = sum(scored.seconds.values())
    base = {
        "method": scored.name,
        "title": scored.title,
        "seconds": round(total, 2),
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
        "edges_right": None if scored.edges_right is None else float(scored.edges_right.mean()),
        "ssim_mean": _over(np.nanmean, scored.ssim),
        "error_median": _over(np.nanmedian, scored.error),
        "ambiguity": ambiguity(found, with_public=prepared.scheme.k_pub > 0),
        "images": [image_row(scored, k) for k in range(len(found.status))],
    }


def image_row(scored: Scored, k: int) -> dict[str, Any]:
    """Image k: its status, its encodings, the pixels that are not known, and its scores."""
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
    equations, rows = _equations(found)
    if not len(rows):
        return {"n_equations": 0}
    what = determined(equations, with_public=with_public)
    n = equations.n
    ends = equations.edges
    graph = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(n, n))
    label = connected_components(graph, directed=False)[1]
    seen = np.isin(np.arange(n), ends)
    parts = [
        {
            "n_images": int((label == k).sum()),
            "n_encodings": int((label[ends[:, 0]] == k).sum()),
            "n_determined": int((what.images & (label == k)).sum()),
            "two_sided": _two_sided(ends[label[ends[:, 0]] == k]),
        }
        for k in np.unique(label[seen])
    ]
    parts.sort(key=lambda part: -part["n_images"])
    solutions = what.n_solutions
    return {
        "n_equations": len(rows),
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


def _two_sided(edges: npt.NDArray[np.int64]) -> bool:
    """Whether a connected graph has no odd cycle."""
    import networkx as nx

    return bool(nx.is_bipartite(nx.Graph(edges.tolist())))


def _equations(found: Recovered) -> tuple[Equations, npt.NDArray[np.int64]]:
    """Of the encodings that are explained, and which those are."""
    rows = np.flatnonzero((found.edges >= 0).all(1) & found.explained)
    return Equations(found.edges[rows], found.weights[rows], len(found.status)), rows


def _over(mean: Any, values: Floats | None) -> float | None:
    known = values is not None and not np.isnan(values).all()
    found: float | None = six_digits(float(mean(values))) if known else None
    return found
