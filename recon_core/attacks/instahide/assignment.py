"""Two private images for every encoding, from how much it is like each group (Carlini et al. 2020).

Every encoding has two images and every image 2 m / n encodings: a flow from encodings to images, at
the largest total of affinities. Its constraints are those of a network, so that the linear program
has whole numbers for answers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.optimize import linprog
from scipy.sparse import coo_array, vstack
from torch import Tensor

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

    `allowed`: images that an encoding may have; others come last. `method`: one of METHODS.
    `n_arcs`: images that an encoding may be given to, its best. `slack`: by how much an image may
    have more encodings than 2 m / n, in shares of it. Raises ValueError for fewer than two images.
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
    """The largest total. `images`: those that each encoding may be given to, at `worth`."""
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
