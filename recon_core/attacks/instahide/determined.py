"""Private images that encodings determine, before any pixel is looked at.

At a pixel an encoding says W z = sigma y - c with an unknown sign. Which other signs have a
solution, too, is a matter of the matroid of W's rows: with public images an equation in no circuit
(a coloop) has one for either sign, 2^coloops in all; without, the signs of every connected
component may be turned round, 2^components. Images that none of this moves are determined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64
from scipy.linalg import qr
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

TOL = 1e-9
MOST_BITS = 1023
"""Of a number of solutions that a float can hold."""


@dataclass(frozen=True)
class Equations:
    """The linear part of m equations in n images: vertices and weights of every edge."""

    edges: Int64[np.ndarray, "m 2"]
    weights: Float64[np.ndarray, "m 2"]
    n: int

    @property
    def matrix(self) -> Float64[np.ndarray, "m n"]:
        """W of the InstaHide paper, definition 2.7, with the weights in it."""
        w = np.zeros((len(self.edges), self.n))
        np.put_along_axis(w, self.edges, self.weights, axis=1)
        return w

    def of(self, rows: Int64[np.ndarray, " k"]) -> Equations:
        return Equations(self.edges[rows], self.weights[rows], self.n)


@dataclass(frozen=True)
class Determined:
    """Unknowns that equations determine. `coloops`: equations that are in no circuit; `ambiguous`:
    images that other signs move; `free`: images that no encoding, or no sum of them, fixes;
    `parts`: the images that are determined, in groups whose equations are connected, and which,
    without public images, have a common sign. `n_solutions`: of a generic pixel, if nothing is
    free."""

    coloops: Bool[np.ndarray, " m"]
    ambiguous: Bool[np.ndarray, " n"]
    free: Bool[np.ndarray, " n"]
    parts: tuple[Int64[np.ndarray, " _"], ...]
    n_solutions: float

    @property
    def images(self) -> Bool[np.ndarray, " n"]:
        """True if the image has one solution, or two that are each other's negative."""
        known: Bool[np.ndarray, " n"] = ~(self.ambiguous | self.free)
        return known


def determined(equations: Equations, *, with_public: bool) -> Determined:
    w = equations.matrix
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    rank = int((s > TOL * max(s.max(initial=0.0), 1.0) * max(w.shape)).sum())
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    coloops = (u * u).sum(1) > 1 - TOL
    free = (vt * vt).sum(0) < 1 - TOL
    moves = np.abs(vt.T @ (u / s).T) > TOL**0.5  # (n, m): images that an equation's sign moves
    if with_public:
        ambiguous = moves[:, coloops].any(1) & ~free
        parts, n_bits = _connected(equations, ~coloops, ~(ambiguous | free)), int(coloops.sum())
    else:
        component = circuits(w, rank)
        first = component[moves.argmax(1)]
        ambiguous = (moves & (component != first[:, None])).any(1) & ~free
        known = ~(ambiguous | free)
        labels = np.unique(first[known])
        parts = tuple(np.flatnonzero(known & (first == label)) for label in labels)
        n_bits = int(component.max(initial=-1)) + 1
    n_solutions = 2.0**n_bits if n_bits <= MOST_BITS else math.inf
    return Determined(coloops, ambiguous, free, parts, n_solutions)


def circuits(w: Float64[np.ndarray, "m n"], rank: int) -> Int64[np.ndarray, " m"]:
    """The connected component of the matroid of w's rows that each row is in: rows of a basis, and
    those whose combination has them, belong together."""
    _q, r, order = qr(w.T, mode="economic", pivoting=True)
    coefficients = np.linalg.solve(r[:rank, :rank], r[:rank, rank:])
    of_basis, of_others = np.nonzero(np.abs(coefficients) > TOL**0.5)
    ends = order[of_basis], order[rank + of_others]
    graph = coo_array((np.ones(len(ends[0])), ends), shape=(len(w),) * 2)
    component: Int64[np.ndarray, " m"]
    _n, component = connected_components(graph, directed=False)
    return component.astype(np.int64)


def _connected(
    equations: Equations, rows: Bool[np.ndarray, " m"], images: Bool[np.ndarray, " n"]
) -> tuple[Int64[np.ndarray, " _"], ...]:
    ends = equations.edges[rows & images[equations.edges].all(1)]
    graph = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(images),) * 2)
    label = connected_components(graph, directed=False)[1]
    return tuple(np.flatnonzero((label == k) & images) for k in np.unique(label[images]))
