"""Pixels from equations whose signs are hidden: step 4 of the InstaHide paper (section 3.4).

At every pixel |a z_u + b z_v + c| = y for each encoding (u, v), so that W z = sigma y - c with an
unknown sign sigma. Which other signs have a solution too is known before any pixel is looked at, by
the matroid of W's rows (`determined`): with public images an equation in no circuit (a coloop) has
one for either sign, 2^coloops in all; without, the signs of every connected component may be turned
round, 2^components. Images that none of this moves are determined.

The paper tries all 2^m signs (Algorithm 3). `solve` starts from the shortest odd cycle, whose L
equations have one solution for each of 2^L signs, adds images in the order of how many encodings
tie them to those already there, keeps the best few combinations (a beam), and solves by least
squares until no sign changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.linalg import qr
from scipy.sparse import coo_array
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from recon_core.attacks.instahide.graph import connected

TOL = 1e-9
MOST_BITS = 1023
"""A float holds 2 to this power."""
PIXELS_AT_ONCE = 512
LONGEST = 13
"""Encodings of the longest odd cycle that is started from: 2^13 signs."""
BEAMS = (8, 64, 512, 4096)
"""Numbers of combinations that are kept; each is tried where the one before was too few."""
CAP = 0.1
"""The most that one encoding's squared error adds to a cost, so that a wrong one does no more."""
N_REFINEMENTS = 20


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


@dataclass(frozen=True)
class Determined:
    """What equations determine. `coloops`: equations that are in no circuit; `ambiguous`: images
    that other signs move; `free`: images that no encoding, or no sum of them, fixes; `parts`: the
    determined images, in groups whose equations are connected, and which, without public images,
    have a common sign. `n_solutions`: of a generic pixel, if nothing is free."""

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
    """What the equations determine, where encodings have public images or none."""
    w, edges = equations.matrix, equations.edges
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    rank = int((s > TOL * max(s.max(initial=0.0), 1.0) * max(w.shape)).sum())
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    coloops = (u * u).sum(1) > 1 - TOL
    free = (vt * vt).sum(0) < 1 - TOL
    moves = np.abs(vt.T @ (u / s).T) > TOL**0.5  # (n, m): images that an equation's sign moves
    if with_public:
        ambiguous = moves[:, coloops].any(1) & ~free
        known = ~(ambiguous | free)
        tied = edges[~coloops & known[edges].all(1)]
        label, n_bits = connected(tied[:, 0], tied[:, 1], n=equations.n), int(coloops.sum())
    else:
        # in the matroid, rows of a basis are connected with those whose combination has them
        _q, r, order = qr(w.T, mode="economic", pivoting=True)
        coefficients = np.linalg.solve(r[:rank, :rank], r[:rank, rank:])
        of_basis, of_others = np.nonzero(np.abs(coefficients) > TOL**0.5)
        component = connected(order[of_basis], order[rank + of_others], n=len(w))
        label, n_bits = component[moves.argmax(1)], int(component.max(initial=-1)) + 1
        ambiguous = (moves & (component != label[:, None])).any(1) & ~free
        known = ~(ambiguous | free)
    parts = tuple(np.flatnonzero(known & (label == k)) for k in np.unique(label[known]))
    n_solutions = 2.0**n_bits if n_bits <= MOST_BITS else math.inf
    return Determined(coloops, ambiguous, free, parts, n_solutions)


@dataclass(frozen=True)
class Solved:
    """`z`: pixels of every image, NaN where they are not determined. `met`: where the largest | |Wz
    + c| - y | is within tolerance, over the equations of determined images that are connected with
    this one. `determined`: which images."""

    z: Float64[Tensor, "n d"]
    met: Bool[Tensor, "n d"]
    determined: Determined


def solve(
    y: Float[Tensor, "m d"],
    c: Float[Tensor, "m d"],
    equations: Equations,
    *,
    tolerance: float,
    cap: float = CAP,
    beams: Sequence[int] = BEAMS,
) -> Solved:
    """Pixels of all determined images. `c`: the weighted public images of every encoding.

    `tolerance`: the largest residual of an equation that is met. Where c is 0 the common sign of
    the images of each of `Determined.parts` is not determined: their first is positive. Images
    without an odd cycle that is short enough to start from meet nothing.
    """
    known = determined(equations, with_public=bool(c.any()))
    shape = (equations.n, y.shape[1])
    z = torch.full(shape, torch.nan, dtype=torch.float64, device=y.device)
    met = torch.zeros(shape, dtype=torch.bool, device=y.device)
    for rows, part in _parts(equations, known):
        mine = torch.from_numpy(rows).to(y.device)
        images = torch.from_numpy(part.images).to(y.device)
        z[images], met[images] = part.solve(
            y[mine].double(), c[mine].double(), tolerance, cap, beams
        )
    return Solved(z, met, known)


def suspects(
    y: Float[Tensor, "m d"],
    c: Float[Tensor, "m d"],
    equations: Equations,
    *,
    tolerance: float,
    cap: float = CAP,
) -> Bool[np.ndarray, " m"]:
    """Encodings that the others contradict: their equation is met at far fewer of some hundred
    pixels. Every image gets its values from two encodings, so that one that is wrong is outvoted.
    """
    known = determined(equations, with_public=bool(c.any()))
    d = y.shape[1]
    some = torch.arange(0, d, max(d // PIXELS_AT_ONCE, 1), device=y.device)
    found = np.zeros(len(y), bool)
    for rows, part in _parts(equations, known):
        mine = torch.from_numpy(rows).to(y.device)
        y_some, c_some = y[mine][:, some].float(), c[mine][:, some].float()
        z = part.search(y_some, c_some, 2 * BEAMS[0], cap, n_ties=2)
        w = torch.from_numpy(part.equations.matrix).to(z)
        within = max(tolerance, 1e-3 * float(y_some.square().mean().sqrt()))
        met = (((w @ z + c_some).abs() - y_some).abs() <= within).float().mean(1)
        found[rows] = np.asarray((met < met.median() / 2).cpu())
    return found


@dataclass(frozen=True)
class _Part:
    """Equations of determined images, and the order in which these are found.

    `cycle`: rows of the first equations; `order`: their images, then the others; `behind`: for each
    other image the rows that tie it to images before it.
    """

    equations: Equations
    images: Int64[np.ndarray, " k"]
    cycle: list[int]
    order: list[int]
    behind: list[list[int]]

    @classmethod
    def of(
        cls, equations: Equations, rows: Int64[np.ndarray, " r"], part: Int64[np.ndarray, " k"]
    ) -> _Part | None:
        """The equations `rows` of the images `part`; None without a short odd cycle."""
        local = np.full(equations.n, -1)
        local[part] = np.arange(len(part))
        own = Equations(local[equations.edges[rows]], equations.weights[rows], len(part))
        start = _start(own)
        if start is None:
            return None
        cycle, order = start
        rows_of: list[list[int]] = [[] for _ in range(own.n)]
        for row, (u, v) in enumerate(own.edges.tolist()):
            rows_of[u].append(row)
            rows_of[v].append(row)
        ties = np.zeros(own.n, np.int64)
        placed = np.zeros(own.n, bool)

        def place(vertex: int) -> None:
            placed[vertex] = True
            for row in rows_of[vertex]:
                ties[own.edges[row]] += 1

        for vertex in order:
            place(vertex)
        behind = []
        while len(order) < own.n:
            vertex = int(np.argmax(np.where(placed, -1, ties)))
            behind.append([r for r in rows_of[vertex] if placed[own.edges[r]].any()])
            order.append(vertex)
            place(vertex)
        return cls(own, part, cycle, order, behind)

    def solve(
        self,
        y: Float64[Tensor, "m d"],
        c: Float64[Tensor, "m d"],
        tolerance: float,
        cap: float,
        beams: Sequence[int],
    ) -> tuple[Float64[Tensor, "k d"], Bool[Tensor, " d"]]:
        w = torch.from_numpy(self.equations.matrix).to(y.device)
        inverse = torch.linalg.pinv(w)
        z = torch.zeros((self.equations.n, y.shape[1]), dtype=torch.float64, device=y.device)
        residual = torch.full((y.shape[1],), torch.inf, dtype=torch.float64, device=y.device)
        for beam in beams:
            left = (residual > tolerance).nonzero()[:, 0]
            gained = True
            for some in left.split(max(PIXELS_AT_ONCE * beams[0] // beam, 1)):
                if not gained or not len(some):
                    break  # where no pixel gains, equations are wrong and no beam is wide enough
                found = self.search(y[:, some].float(), c[:, some].float(), beam, cap).double()
                mixed = w @ found + c[:, some]
                for _ in range(N_REFINEMENTS):  # least squares until no sign changes
                    signs = mixed.sign()
                    found = inverse @ (signs * y[:, some] - c[:, some])
                    mixed = w @ found + c[:, some]
                    if torch.equal(mixed.sign(), signs):
                        break
                apart = (mixed.abs() - y[:, some]).abs().amax(0)
                better = apart < residual[some]
                residual[some] = apart.where(better, residual[some])
                z[:, some] = found.where(better, z[:, some])
                gained = bool((apart <= tolerance).any())
        if not c.any():
            z = z * torch.where(z[:1] < 0, -1.0, 1.0)
        return z, residual <= tolerance

    def search(
        self,
        y: Float[Tensor, "m d"],
        c: Float[Tensor, "m d"],
        beam: int,
        cap: float,
        n_ties: int = 1,
    ) -> Float[Tensor, "k d"]:
        """The best combination of signs at each pixel, image after image. `n_ties`: encodings of an
        image of which each gives two values for it."""
        edges, device = self.equations.edges, y.device
        weights = torch.from_numpy(self.equations.weights).to(y)
        z, cost = self._first(y, c, beam, cap)
        position = {vertex: k for k, vertex in enumerate(self.order)}
        for vertex, rows in zip(self.order[len(self.cycle) :], self.behind, strict=True):
            at = torch.tensor(rows, device=device)
            side = torch.from_numpy((edges[rows, 1] == vertex).astype(np.int64)).to(device)
            before = [
                position[int(edges[r, 1 - s])] for r, s in zip(rows, side.tolist(), strict=True)
            ]
            own = weights[at, side][:, None, None]
            known = z[before] * weights[at, 1 - side][:, None, None] + c[at][:, :, None]
            seen = y[at][:, :, None]
            ties = range(min(n_ties, len(rows)))
            values = [(sign * seen[k] - known[k]) / own[k] for k in ties for sign in (1, -1)]
            value = torch.cat(values, -1)
            n = len(values)
            errors = (known.repeat(1, 1, n) + own * value).abs_().sub_(seen)
            cost = cost.repeat(1, n) + errors.square_().clamp_(max=cap).sum(0)
            z, cost = _best(torch.cat([z.repeat(1, 1, n), value[None]]), cost, beam, cap)
        found = torch.empty_like(z[:, :, 0])
        best = cost.argmin(1)[None, :, None].expand(len(z), -1, 1)
        found[self.order] = z.gather(2, best).squeeze(2)
        return found

    def _first(
        self, y: Float[Tensor, "m d"], c: Float[Tensor, "m d"], beam: int, cap: float
    ) -> tuple[Float[Tensor, "a d b"], Float[Tensor, "d b"]]:
        """The images of the cycle, for all signs of its equations, by what else ties them."""
        local = {vertex: k for k, vertex in enumerate(self.order[: len(self.cycle)])}
        w = torch.from_numpy(self.equations.matrix).to(y)[:, list(local)]
        inverse = torch.linalg.inv(w[self.cycle].double()).to(y)
        signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=len(self.cycle)))).to(y)
        if not c.any():
            signs = signs[: len(signs) // 2]  # the others give the negative
        right = signs.T[:, None] * y[self.cycle][:, :, None] - c[self.cycle][:, :, None]
        z = torch.einsum("ij,jdb->idb", inverse, right)
        among = np.isin(self.equations.edges, list(local)).all(1)
        others = np.setdiff1d(np.flatnonzero(among), self.cycle).tolist()
        found = torch.einsum("ri,idb->rdb", w[others], z) + c[others][:, :, None]
        cost = (found.abs() - y[others][:, :, None]).square().clamp(max=cap).sum(0)
        return _best(z, cost, beam, cap)


def _parts(
    equations: Equations, known: Determined
) -> Iterator[tuple[Int64[np.ndarray, " _"], _Part]]:
    """The parts that are determined and can be started, with the rows of their equations."""
    for images in known.parts:
        inside = np.zeros(equations.n, bool)
        inside[images] = True
        rows = np.flatnonzero(inside[equations.edges].all(1) & ~known.coloops)
        part = _Part.of(equations, rows, images) if len(rows) else None
        if part is not None:
            yield rows, part


def _best(
    z: Float[Tensor, "a d b"], cost: Float[Tensor, "d b"], beam: int, cap: float
) -> tuple[Float[Tensor, "a d c"], Float[Tensor, "d c"]]:
    """The cheapest combinations of each pixel: as many as any pixel needs that has some nearly as
    good as its best, and `beam` at most."""
    near = (cost <= cost.amin(1, keepdim=True) + 3 * cap).sum(1).amax()
    n = min(beam, int(near))
    cost, kept = cost.topk(n, dim=1, largest=False)
    return z.gather(2, kept[None].expand(len(z), -1, -1)), cost


def _start(equations: Equations) -> tuple[list[int], list[int]] | None:
    """Rows of a shortest odd cycle, and its vertices in the same order; None if it is too long."""
    n, edges = equations.n, equations.edges
    ends = np.concatenate([edges + np.array([0, n]), edges + np.array([n, 0])])
    double = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(2 * n, 2 * n))
    far, back = shortest_path(
        double.tocsr(), directed=False, unweighted=True, indices=range(n), return_predecessors=True
    )
    lengths = far[np.arange(n), np.arange(n) + n]
    root = int(np.argmin(lengths))
    if not lengths[root] <= LONGEST:
        return None
    walk, vertex = [root], root + n
    while vertex != root:
        vertex = int(back[root, vertex])
        walk.append(vertex % n)
    first: dict[tuple[int, ...], int] = {}
    for row, edge in enumerate(edges.tolist()):
        first.setdefault(tuple(sorted(edge)), row)
    return [first[tuple(sorted(step))] for step in itertools.pairwise(walk)], walk[:-1]
