"""Encodings that share a private image, none being known, and two images for every encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.linalg import eigh
from scipy.optimize import linprog
from scipy.sparse import coo_array, vstack
from scipy.sparse.linalg import eigsh
from torch import Tensor

from recon_core.strict import Count, Natural, NonNegative, Strict, Within


@dataclass(frozen=True, kw_only=True)
class Components(Strict):
    """`spare`: components beyond the private images', in shares of their number, for what else the
    scores hold; the most peaked are kept. `core`: the load from which on an encoding is taken to
    have an image, in shares of that of its best. `n_rounds`: at most."""

    kind: Literal["independent"] = "independent"
    spare: NonNegative = 0.1
    core: Annotated[float, Within("(0, 1)")] = 0.5
    n_rounds: Count = 300


BEST = 0.9
"""Of the loads above 0 of the encodings that an image has, the quantile that is called its best."""


def independent_groups(
    scores: Float[Tensor, "m m"],
    n: int,
    *,
    generator: torch.Generator,
    how: Components | None = None,
) -> Float[Tensor, "m n"]:
    """Loads of m encodings on n images: above 0 where one is taken to have it, 1 at its best.

    A score of common images is a noisy A A^T, where A (m, n) holds the private weights, two in a
    row. Its n leading eigenvectors span A's columns, and which rotation of them A is, is told by
    its zeros: independent component analysis (Hyvarinen 1999: fixed point, symmetric) by the third
    moment, which is above 0 for a column that is mostly 0; the fourth is that of normal numbers if
    a fifth is not 0. `scores`: centred, larger where more is common. Raises ValueError for too few
    encodings.
    """
    how = how or Components()
    m = len(scores)
    wanted = n + round(how.spare * n)
    if wanted >= m:
        raise ValueError(f"{m} encodings are too few for the components of {n} images")
    matrix = np.asarray(scores.double().cpu())
    white = _leading(matrix, wanted, generator) * m**0.5
    found = white @ _rotation(white, generator, how)
    found = found * np.sign((found**3).sum(0))  # long tails above 0
    peaks = (found**3).mean(0)
    loads = found[:, np.sort(np.argsort(-peaks, kind="stable")[:n])]
    n_own = max(2 * m // n, 2)
    best = np.sort(loads, axis=0)[-max(round((1 - BEST) * n_own), 1)]
    loads = loads / np.maximum(best, 1e-9)
    return torch.from_numpy(np.where(loads > how.core, loads, 0.0)).to(scores)


def _leading(
    matrix: Float64[np.ndarray, "m m"], k: int, generator: torch.Generator
) -> Float64[np.ndarray, "m k"]:
    """Eigenvectors of the k largest eigenvalues."""
    m = len(matrix)
    if m < DENSE:
        dense: Float64[np.ndarray, "m k"] = eigh(matrix, subset_by_index=(m - k, m - 1))[1]
        return dense
    start = np.asarray(torch.rand(m, generator=generator, dtype=torch.float64))
    again = np.random.default_rng(0)  # for restarts within a space that is used up
    found: Float64[np.ndarray, "m k"] = eigsh(matrix, k=k, which="LA", v0=start, rng=again)[1]
    return found


DENSE = 1500
"""Encodings from which on eigenvectors are found by iteration."""


def _rotation(
    white: Float64[np.ndarray, "m k"], generator: torch.Generator, how: Components
) -> Float64[np.ndarray, "k k"]:
    m, k = white.shape
    drawn = np.asarray(torch.randn(k, k, generator=generator, dtype=torch.float64))
    rotation = np.linalg.qr(drawn)[0]
    for _ in range(how.n_rounds):
        u, _, vt = np.linalg.svd(white.T @ (white @ rotation) ** 2 / m)
        again = u @ vt
        still = np.abs((again * rotation).sum(0)).min()
        rotation = again
        if still > 1 - STILL:
            break
    return np.asarray(rotation)


STILL = 1e-6


@dataclass(frozen=True, kw_only=True)
class Growth(Strict):
    """`n_seeds`: encodings that clusters grow from, drawn; 0: all. `share`: of an image's encodings
    that a cluster takes in. `n_rounds`: of k-means, at most."""

    kind: Literal["growth"] = "growth"
    n_seeds: Natural = 0
    share: Annotated[float, Within("(0, 1]")] = 0.5
    n_rounds: Count = 50


def grown_groups(
    scores: Float[Tensor, "m m"],
    n: int,
    *,
    generator: torch.Generator,
    how: Growth | None = None,
) -> Bool[Tensor, "m n"]:
    """Encodings of each of n images, as Carlini et al. (2020) find them: clusters grown.

    Around each encoding a cluster grows: the one with the largest total of scores to those that are
    in it joins. k-means with the Jaccard distance makes n of them. Departures: a centre is a set of
    as many encodings as clusters have, and first centres are drawn far apart (greedy k-means++).
    `scores`: larger where more is common. Raises ValueError for fewer encodings, or fewer seeds,
    than images.
    """
    how = how or Growth()
    m = len(scores)
    n_seeds = how.n_seeds or m
    if not n <= n_seeds <= m:
        raise ValueError(
            f"{n_seeds} clusters of {m} encodings for {n} images: there must be as many clusters "
            "as images, and no more than encodings"
        )
    seeds = torch.randperm(m, generator=generator)[:n_seeds].to(scores.device)
    size = max(round(how.share * 2 * m / n), 2)
    return jaccard_kmeans(grown(scores, seeds, size), n, generator=generator, how=how).T


def grown(
    scores: Float[Tensor, "m m"], seeds: Int64[Tensor, " s"], size: int
) -> Bool[Tensor, "s m"]:
    """Clusters of `size` encodings, one from each seed."""
    scores = scores.clone().fill_diagonal_(0.0)
    rows = torch.arange(len(seeds), device=scores.device)
    clusters = torch.zeros((len(seeds), len(scores)), dtype=torch.bool, device=scores.device)
    clusters[rows, seeds] = True
    total = scores[seeds].masked_fill_(clusters, -torch.inf)
    for _ in range(min(size, len(scores)) - 1):
        joins = total.argmax(1)
        clusters[rows, joins] = True
        total += scores[joins]
        total[rows, joins] = -torch.inf
    return clusters


def jaccard_kmeans(
    clusters: Bool[Tensor, "s m"], n: int, *, generator: torch.Generator, how: Growth
) -> Bool[Tensor, "n m"]:
    members = clusters.float()
    size = max(round(float(members.sum(1).mean())), 1)
    centres = _far_apart(members, n, generator)
    nearest = None
    for _ in range(how.n_rounds):
        alike = jaccard(members, centres)
        best, again = alike.max(1)
        if nearest is not None and torch.equal(again, nearest):
            break
        nearest = again
        counts = torch.zeros_like(centres).index_add_(0, nearest, members)
        lost = counts.sum(1) == 0
        if bool(lost.any()):  # no cluster is nearest: the ones that nothing is near to
            counts[lost] = members[best.topk(int(lost.sum()), largest=False).indices]
        centres = torch.zeros_like(counts).scatter_(1, counts.topk(size, dim=1).indices, 1.0)
    return centres > 0


def jaccard(one: Float[Tensor, "s m"], other: Float[Tensor, "n m"]) -> Float[Tensor, "s n"]:
    """Intersection of two sets over their union; 1 less this is the distance."""
    common = one @ other.T
    either: Tensor = one.sum(1)[:, None] + other.sum(1) - common
    return common / either.clamp(min=1)


def _far_apart(
    members: Float[Tensor, "s m"], n: int, generator: torch.Generator
) -> Float[Tensor, "n m"]:
    """Clusters drawn by the square of their distance to those before, of CANDIDATES the one that
    leaves all others nearest."""
    far = members.new_ones(len(members))
    chosen: list[int] = []
    for _ in range(n):
        odds = far.square().double().cpu().clamp(min=1e-12)
        drawn = torch.multinomial(odds, CANDIDATES, replacement=True, generator=generator)
        left = torch.minimum(far[:, None], 1 - jaccard(members, members[drawn]))
        best = int(left.square().sum(0).argmin())
        far = left[:, best]
        chosen.append(int(drawn[best]))
    return members[chosen]


CANDIDATES = 16


Assign = Callable[
    [Float64[np.ndarray, "m k"], Int64[np.ndarray, "m k"], int], Int64[np.ndarray, "m 2"]
]
FORBIDDEN = 1e2
"""Cost of a class that the encoding does not have, in standard deviations of affinities."""


def assigned(
    affinity: Float[Tensor, "m n"],
    allowed: Bool[Tensor, "m n"] | None = None,
    *,
    method: str = "flow",
    n_arcs: int = 20,
    slack: float = 0.05,
) -> Int64[Tensor, "m 2"]:
    """Two images for each encoding, no image having more than its share; -1 where there are none.

    `allowed`: images that an encoding may have; others come last. `method`: one of METHODS, a flow
    at the largest total of affinities (Carlini et al. 2020) or the best pairs first. `n_arcs`:
    images that an encoding may be given to, its best. `slack`: by how much an image may have more
    encodings than 2 m / n, in shares of it. Raises ValueError for fewer than two images.
    """
    m, n = affinity.shape
    if n < 2:
        raise ValueError(f"{n} images: an encoding has two of them")
    worth = affinity.double().cpu()
    worth = (worth - worth.mean()) / worth.std().clamp(min=1e-30)
    if allowed is not None:
        worth = worth - FORBIDDEN * (~allowed.cpu())
    best = worth.topk(min(n_arcs, n), dim=1)
    capacity = int(np.ceil(2 * m / n * (1 + slack) - 1e-9))
    edges = METHODS[method](np.asarray(best.values), np.asarray(best.indices), capacity)
    edges[edges[:, 1] < 0] = -1
    return torch.from_numpy(np.sort(edges, axis=1)).to(affinity.device)


def by_flow(
    worth: Float64[np.ndarray, "m k"], images: Int64[np.ndarray, "m k"], capacity: int
) -> Int64[np.ndarray, "m 2"]:
    """The largest total: a linear program that has whole numbers for answers, as its constraints
    are those of a network. `images`: those that each encoding may be given to, at `worth`."""
    m, k = images.shape
    n_arcs, n = m * k, int(images.max()) + 1
    arcs, ones = np.arange(n_arcs), np.ones(n_arcs)
    per_row = coo_array((ones, (arcs // k, arcs)), shape=(m, n_arcs))
    per_image = coo_array((ones, (images.ravel(), arcs)), shape=(n, n_arcs))
    answer = linprog(
        -(worth.ravel() + 2 * FORBIDDEN),  # an encoding without images is worst of all
        A_ub=vstack([per_row, per_image]).tocsr(),
        b_ub=np.concatenate([np.full(m, 2.0), np.full(n, float(capacity))]),
        bounds=(0, 1),
        method="highs-ds",
    )
    if answer.x is None:
        raise ValueError(f"no assignment of {m} encodings to {n} images: {answer.message}")
    taken = (answer.x > 0.5).reshape(m, k)
    edges = np.full((m, 2), -1, np.int64)
    for row, column in zip(*(part.tolist() for part in np.nonzero(taken)), strict=True):
        edges[row, 0 if edges[row, 0] < 0 else 1] = images[row, column]
    return edges


def greedily(
    worth: Float64[np.ndarray, "m k"], images: Int64[np.ndarray, "m k"], capacity: int
) -> Int64[np.ndarray, "m 2"]:
    """The best pair of an encoding and an image first, as long as neither is full."""
    m, k = images.shape
    edges = np.full((m, 2), -1, np.int64)
    room = np.full(int(images.max()) + 1, capacity)
    for arc in np.argsort(-worth, axis=None, kind="stable").tolist():
        row, image = arc // k, images[arc // k, arc % k]
        if edges[row, 1] < 0 and room[image] and edges[row, 0] != image:
            edges[row, 0 if edges[row, 0] < 0 else 1] = image
            room[image] -= 1
    return edges


METHODS: dict[str, Assign] = {"flow": by_flow, "greedy": greedily}


def common_classes(
    loads: Float[Tensor, "m n"], has: Bool[Tensor, "m n_classes"]
) -> Int64[Tensor, " n"]:
    """The class of each image: the one that most of its encodings have."""
    return (loads.T @ has.to(loads)).argmax(1)
