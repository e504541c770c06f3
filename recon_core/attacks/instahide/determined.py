"""Which private images encodings determine, before any pixel is looked at.

At a pixel an encoding says |a z_u + b z_v + c| = y: a linear equation W z = sigma y - c with an unknown
sign. If an equation is independent of all others (a coloop of the matroid of W's rows; with equal
weights: of the even-cycle matroid of the graph), either sign has a solution, whatever the pixels
are. With generic pixels these are the only ambiguities: 2^coloops solutions, and, without public
images, the other sign of everything in each component. Images that neither a coloop nor the kernel
of W moves are determined; paper 004 says of none whether it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

TOL = 1e-9


@dataclass(frozen=True)
class Equations:
    """The linear part of m equations in n images: vertices and weights of every edge."""

    edges: Int64[np.ndarray, "m 2"]
    weights: Float64[np.ndarray, "m 2"]
    n: int

    @property
    def matrix(self) -> Float64[np.ndarray, "m n"]:
        """W of 004, definition 2.7, with the weights in it."""
        w = np.zeros((len(self.edges), self.n))
        np.put_along_axis(w, self.edges, self.weights, axis=1)
        return w

    def of(self, rows: Int64[np.ndarray, " k"]) -> Equations:
        return Equations(self.edges[rows], self.weights[rows], self.n)


@dataclass(frozen=True)
class Determined:
    """What is determined. `coloops`: equations of which either sign has a solution; `ambiguous`:
    images that these move; `free`: images that no encoding, or no sum of them, fixes; `parts`: the
    images that are determined, in groups that share a sign without public images."""

    coloops: Bool[np.ndarray, " m"]
    ambiguous: Bool[np.ndarray, " n"]
    free: Bool[np.ndarray, " n"]
    parts: tuple[Int64[np.ndarray, " k"], ...]

    @property
    def images(self) -> Bool[np.ndarray, " n"]:
        """Whether there is one solution for the image, or two that are each other's negative."""
        return ~(self.ambiguous | self.free)

    def n_solutions(self, *, with_public: bool) -> int:
        """Solutions of a generic pixel, if nothing is free."""
        return int(2 ** (int(self.coloops.sum()) + (0 if with_public else len(self.parts))))


def determined(equations: Equations) -> Determined:
    """What the equations determine at a generic pixel."""
    w = equations.matrix
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    rank = int((s > TOL * max(s.max(initial=0.0), 1.0) * max(w.shape)).sum())
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    coloops = (u * u).sum(1) > 1 - TOL
    moved = np.abs(vt.T @ (u[coloops] / s).T) > TOL ** 0.5
    free = (vt * vt).sum(0) < 1 - TOL
    ambiguous = moved.any(1) & ~free
    known = ~(ambiguous | free)
    kept = np.flatnonzero(~coloops & known[equations.edges].all(1))
    ends = equations.edges[kept]
    graph = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(known),) * 2)
    label = connected_components(graph, directed=False)[1]
    parts = tuple(
        rows for k in np.unique(label[known]) if len(rows := np.flatnonzero((label == k) & known))
    )
    return Determined(coloops, ambiguous, free, parts)
