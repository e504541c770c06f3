"""Private images of each encoding, from the number that each two share (section 3.3).

Private images are vertices, encodings that mix two of them edges: the numbers of common images are
the Gram matrix of a graph, which is found from its line graph (the InstaHide paper: by Whitney's
theorem). Encodings with two common images are merged. The neighbours of an edge uv are then two
cliques, the other edges at u and those at v; once the star of edges at u is known, so is that at
the other end w of each: N(uw) without the star of u. With labelled edges the triangle and K(1, 3),
and the labelled roots of K(1, 3) with one edge more, K4 without an edge, and K4, are two each.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Int8, Int64, Integer, Shaped
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

Edges = Int64[np.ndarray, "m 2"]
"""The two vertices of every edge, the smaller first."""


@dataclass(frozen=True)
class Component:
    """A connected part of the graph: its encodings (rows), and every way to assign images to them,
    numbered from 0 within the component. Assignments that differ only in these numbers count once.
    """

    rows: Int64[np.ndarray, " k"]
    roots: tuple[Edges, ...]

    def n_images(self, root: int = 0) -> int:
        return int(self.roots[root].max()) + 1


class NotALineGraphError(ValueError):
    """No assignment of two images to every encoding has these numbers of common images."""


def assign(shared: Integer[np.ndarray, "m m"]) -> list[Component]:
    """All assignments of two images to every encoding with `shared` images in common, 0, 1 or 2.

    Components in the order of their first encoding; the assignments of the whole are all choices of
    one root for each. Raises ValueError for what is no Gram matrix, NotALineGraphError if there is
    no assignment.
    """
    a = _checked(shared)
    first, member = _merged(a)
    simple: Bool[np.ndarray, "k k"] = a[np.ix_(first, first)] == 1
    n, part = _parts(simple)
    components = []
    for k in range(n):
        mine = np.flatnonzero(part == k)
        roots = tuple(_roots(simple if n == 1 else simple[np.ix_(mine, mine)]))
        if not roots:
            raise NotALineGraphError(
                f"the encodings {_some(first[mine])} are no line graph: no assignment of two "
                "images to each has these overlaps. The Gram matrix has errors; use the "
                "noise-tolerant assignment"
            )
        position = np.full(len(first), -1)
        position[mine] = np.arange(len(mine))
        rows = np.flatnonzero(part[member] == k)
        components.append(Component(rows, tuple(r[position[member[rows]]] for r in roots)))
    return sorted(components, key=lambda c: int(c.rows[0]))


def assign_nearly(common: Int8[Tensor, "m m"], scores: Float[Tensor, "m m"]) -> list[Component]:
    """`assign`, also with one or two of the overlaps changed that nearly were something else."""
    shared = np.asarray(common.cpu())
    try:
        return assign(shared)
    except NotALineGraphError as error:
        refused = error
    above = np.triu(np.asarray((scores - 0.5).abs().cpu()), 1)
    rows, columns = np.nonzero((above < DOUBTFUL) & np.triu(shared < 2, 1))
    order = above[rows, columns].argsort()[: MOST_DOUBTFUL + 1]
    if len(order) <= MOST_DOUBTFUL:
        for changed in itertools.chain(
            itertools.combinations(order, 1), itertools.combinations(order, 2)
        ):
            at = rows[list(changed)], columns[list(changed)]
            other = shared.copy()
            other[at] = other[at[::-1]] = 1 - shared[at]
            with contextlib.suppress(NotALineGraphError):
                return assign(other)
    raise refused


DOUBTFUL = 0.1
"""How near to one half a score is that may stand for the other number of common images."""
MOST_DOUBTFUL = 12
"""Of those, or overlaps are too uncertain to be changed one by one."""


def gram(edges: Integer[np.ndarray, "m 2"]) -> Int64[np.ndarray, "m m"]:
    """The number of common vertices of each two edges, 2 on the diagonal (section 3.3)."""
    return _common(edges).astype(np.int64)


def _common(edges: Integer[np.ndarray, "m 2"]) -> Float32[np.ndarray, "m m"]:
    incidence = incidence_of(edges).astype(np.float32)
    return incidence @ incidence.T  # small whole numbers, exact


def incidence_of(
    edges: Integer[np.ndarray, "m 2"], n: int | None = None
) -> Int64[np.ndarray, "m n"]:
    """W_priv of the InstaHide paper, definition 2.7: 1 where the encoding has the image."""
    found = np.zeros((len(edges), int(edges.max(initial=-1)) + 1 if n is None else n), np.int64)
    np.put_along_axis(found, edges, 1, axis=1)
    return found


def canonical(edges: Integer[np.ndarray, "m 2"]) -> Edges:
    """The same with vertices numbered by the edges that they have, compared in order: equal for two
    assignments that differ only in the images' numbers."""
    columns = incidence_of(edges).T
    columns = columns[columns.any(1)]
    order = np.lexsort(-columns.T[::-1])
    return np.sort(np.nonzero(columns[order].T)[1].reshape(-1, 2), axis=1)


def _checked(shared: Integer[np.ndarray, "m m"]) -> Int8[np.ndarray, "m m"]:
    """The same with 2 on the diagonal: an encoding shares both its images with itself."""
    if shared.ndim != 2 or len(shared) != shared.shape[1] or not len(shared):
        raise ValueError(f"shared has shape {shared.shape}; expected (m, m) with m >= 1")
    whole = shared.copy()
    np.fill_diagonal(whole, 2)
    if whole.min() < 0 or whole.max() > 2:
        strange = whole.min() if whole.min() < 0 else whole.max()
        raise ValueError(
            f"shared has {strange}; two encodings of two images have 0, 1 or 2 of them in common"
        )
    whole = whole.astype(np.int8)
    if not np.array_equal(whole, whole.T):
        i, j = np.argwhere(whole != whole.T)[0].tolist()
        raise ValueError(
            f"shared is not symmetric: {whole[i, j]} at ({i}, {j}), {whole[j, i]} at ({j}, {i})"
        )
    return whole


def _merged(
    shared: Int8[np.ndarray, "m m"],
) -> tuple[Int64[np.ndarray, " k"], Int64[np.ndarray, " m"]]:
    """The first encoding of every pair of images, and whose pair each encoding has."""
    member = _parts(shared == 2)[1]
    first = np.unique(member, return_index=True)[1]
    unlike = np.flatnonzero((shared != shared[first][member]).any(1))
    if len(unlike):
        i = int(unlike[0])
        j = int(first[member[i]])
        raise NotALineGraphError(
            f"encodings {j} and {i} are said to mix the same two images, but do not share equally "
            "many with every other encoding"
        )
    return first, member


def _parts(linked: Bool[np.ndarray, "k k"]) -> tuple[int, Int64[np.ndarray, " k"]]:
    ends = np.nonzero(linked)
    graph = coo_array((np.ones(len(ends[0]), np.int8), ends), shape=linked.shape)
    n, member = connected_components(graph, directed=False)
    return int(n), member.astype(np.int64)


def _roots(adjacent: Bool[np.ndarray, "k k"]) -> list[Edges]:
    """The roots of a connected simple line graph; none if it is not one."""
    k = len(adjacent)
    n_near = adjacent.sum(1)
    if int(n_near.min()) == k - 1:
        return _complete(k)
    seed, parts = _seed(adjacent, n_near)
    found: dict[bytes, Edges] = {}
    for one in _halves(parts):
        edges = _followed(adjacent, seed, np.union1d(one, [seed]))
        if edges is not None and _has_line_graph(edges, adjacent):
            edges = canonical(edges)
            found[edges.tobytes()] = edges
    return list(found.values())


def _complete(k: int) -> list[Edges]:
    """All k edges share a vertex; or three of them are a triangle."""
    star = np.stack([np.zeros(k, np.int64), np.arange(1, k + 1)], 1)
    return [star, np.array([[0, 1], [0, 2], [1, 2]])] if k == 3 else [star]


Rows = Int64[np.ndarray, " _"]
Parts = list[tuple[Rows, Rows]]


def _seed(adjacent: Bool[np.ndarray, "k k"], n_near: Int64[np.ndarray, " k"]) -> tuple[int, Parts]:
    """An edge whose neighbours fall into two cliques in the fewest ways, and the pieces that do."""
    best: tuple[int, Parts] | None = None
    for edge in np.argsort(n_near, kind="stable").tolist():
        near = np.flatnonzero(adjacent[edge])
        apart = ~adjacent[np.ix_(near, near)]
        np.fill_diagonal(apart, False)
        if not apart.any():
            continue  # all its neighbours are at one end, or it is in a triangle of its own
        parts = _two_coloured(apart, near)
        if parts is None or len(parts) > 2:
            return edge, []  # no two cliques: not a line graph
        if len(parts) == 1:
            return edge, parts
        best = best or (edge, parts)
    assert best is not None  # else the graph is complete
    return best


def _two_coloured(apart: Bool[np.ndarray, "k k"], names: Int64[np.ndarray, " k"]) -> Parts | None:
    """The components of a bipartite graph, each with its two sides; None if it is not bipartite."""
    n, part = _parts(apart)
    parts: Parts = []
    for k in range(n):
        mine = np.flatnonzero(part == k)
        side = np.full(len(apart), -1)
        side[mine[0]], front, colour = 0, mine[:1], 0
        while len(front):
            colour = 1 - colour
            reached = np.flatnonzero(apart[front].any(0))
            if (side[reached] == 1 - colour).any():
                return None
            front = reached[side[reached] < 0]
            side[front] = colour
        parts.append((names[side == 0], names[side == 1]))
    return parts


def _halves(parts: Parts) -> Iterator[Rows]:
    """One of two cliques, for every way to part; the other way round it is the same graph."""
    if not parts:
        return
    for swaps in itertools.product((0, 1), repeat=len(parts) - 1):
        yield np.concatenate([p[s] for p, s in zip(parts, (0, *swaps), strict=True)])


def _followed(
    adjacent: Bool[np.ndarray, "k k"], seed: int, star: Int64[np.ndarray, " s"]
) -> Edges | None:
    """Two vertices of every edge, from the edges at one end of one of them; None if that fails."""
    ends, n_stars = np.full((len(adjacent), 2), -1, np.int64), np.zeros(len(adjacent), np.int64)
    other = np.setdiff1d(np.flatnonzero(adjacent[seed]), star)
    stars = [star, np.append(other, seed)]
    n_stars[star] += 1
    n_stars[stars[1]] += 1
    vertex = 0
    while vertex < len(stars):
        star = stars[vertex]
        ends[star, np.where(ends[star, 0] < 0, 0, 1)] = vertex
        inside = np.zeros(len(adjacent), bool)
        inside[star] = True
        for edge in star.tolist():
            if n_stars[edge] == 1:
                beyond = adjacent[edge] & ~inside
                beyond[edge] = True
                if (n_stars[beyond] > 1).any():
                    return None
                n_stars[beyond] += 1
                stars.append(np.flatnonzero(beyond))
        vertex += 1
    return np.sort(ends, axis=1) if (n_stars == 2).all() else None


def _has_line_graph(edges: Edges, adjacent: Bool[np.ndarray, "k k"]) -> bool:
    found = _common(edges) == 1
    proper = bool((edges[:, 0] < edges[:, 1]).all())
    return proper and np.array_equal(found, adjacent)


def _some(rows: Shaped[np.ndarray, " k"]) -> str:
    shown = ", ".join(str(int(r)) for r in rows[:5])
    return f"{shown}, ..." if len(rows) > 5 else shown
