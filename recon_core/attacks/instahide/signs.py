"""Pixels from equations whose signs are hidden: step 4 of the InstaHide paper (section 3.4).

At every pixel |a z_u + b z_v + c| = y for each encoding (u, v). The paper tries all 2^m signs
(Algorithm 3). `solve` starts from the shortest odd cycle, whose L equations have one solution for
each of 2^L signs, adds images in the order of how many encodings tie them to those already there,
keeps the best few combinations (a beam), and solves by least squares until no sign changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy.sparse import coo_array
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from recon_core.attacks.instahide.determined import Determined, Equations, determined

PIXELS_AT_ONCE = 512
LONGEST = 13
"""Of odd cycles that are started from: 2^13 signs."""


BEAMS = (8, 64, 512, 4096)
"""Combinations that are kept, and how many where that was too few."""
CAP = 0.1
"""The most that one encoding's squared error adds to a cost, so that a wrong one does no more."""
N_REFINEMENTS = 20


@dataclass(frozen=True)
class Solved:
    """`z`: pixels of every image, NaN where they are not determined. `residual`: the largest | |Wz
    + c| - y | at each pixel, over the equations of determined images that are connected with this
    one; `met`: whether it is within tolerance. `determined`: which images."""

    z: Float64[Tensor, "n d"]
    residual: Float64[Tensor, "n d"]
    met: Bool[Tensor, "n d"]
    determined: Determined


class NoShortCycleError(ValueError):
    """There is no odd cycle that is short enough to start from."""


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

    `tolerance`: the largest residual of an equation that is met. Where c is 0 the images of each of
    `Determined.parts` have a common sign that nothing tells: their first is positive. Images with
    no odd cycle that is short enough to start from meet nothing.
    """
    known = determined(equations, with_public=bool(c.any()))
    n, d = equations.n, y.shape[1]
    z = torch.full((n, d), torch.nan, dtype=torch.float64, device=y.device)
    residual = torch.full_like(z, torch.inf)
    for rows, part in _parts(equations, known):
        mine = torch.from_numpy(rows).to(y.device)
        images = torch.from_numpy(part.images).to(y.device)
        z[images], residual[images] = part.solve(
            y[mine].double(), c[mine].double(), tolerance, cap, beams
        )
    return Solved(z, residual, residual <= tolerance, known)


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
    """Equations of images that all are determined, and the order in which these are found.

    `cycle`: rows of the first equations; `order`: the images of these, then the others; `behind`:
    of each other image the rows that tie it to images before it.
    """

    equations: Equations
    images: Int64[np.ndarray, " k"]
    cycle: list[int]
    order: list[int]
    behind: list[list[int]]

    @classmethod
    def of(cls, equations: Equations, part: Int64[np.ndarray, " k"]) -> _Part:
        local = np.full(equations.n, -1)
        local[part] = np.arange(len(part))
        own = Equations(local[equations.edges], equations.weights, len(part))
        cycle, order = _start(own)
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
    ) -> tuple[Float64[Tensor, "k d"], Float64[Tensor, " d"]]:
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
                found = self.search(y[:, some].float(), c[:, some].float(), beam, cap)
                found, apart = _refined(w, inverse, found.double(), y[:, some], c[:, some])
                better = apart < residual[some]
                residual[some] = apart.where(better, residual[some])
                z[:, some] = found.where(better, z[:, some])
                gained = bool((apart <= tolerance).any())
        if not c.any():
            z = z * torch.where(z[:1] < 0, -1.0, 1.0)
        return z, residual

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
        if not len(rows):
            continue
        try:
            part = _Part.of(equations.of(rows), images)
        except NoShortCycleError:
            continue
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


def _refined(
    w: Float64[Tensor, "m k"],
    inverse: Float64[Tensor, "k m"],
    z: Float64[Tensor, "k d"],
    y: Float64[Tensor, "m d"],
    c: Float64[Tensor, "m d"],
) -> tuple[Float64[Tensor, "k d"], Float64[Tensor, " d"]]:
    """Least squares with the signs that z has, until they do not change."""
    signs = (w @ z + c).sign()
    for _ in range(N_REFINEMENTS):
        z = inverse @ (signs * y - c)
        mixed = w @ z + c
        if torch.equal(mixed.sign(), signs):
            break
        signs = mixed.sign()
    return z, (mixed.abs() - y).abs().amax(0)


def _start(equations: Equations) -> tuple[list[int], list[int]]:
    """Rows of a shortest odd cycle, and its vertices in the same order; NoShortCycleError if there
    is none that is short enough."""
    n, edges = equations.n, equations.edges
    ends = np.concatenate([edges + np.array([0, n]), edges + np.array([n, 0])])
    double = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(2 * n, 2 * n))
    far, back = shortest_path(
        double.tocsr(), directed=False, unweighted=True, indices=range(n), return_predecessors=True
    )
    lengths = far[np.arange(n), np.arange(n) + n]
    root = int(np.argmin(lengths))
    if not lengths[root] <= LONGEST:
        raise NoShortCycleError(
            f"the shortest odd cycle of {n} images has {lengths[root]:g} encodings; at most "
            f"{LONGEST} can be started from: more encodings of these images are needed"
        )
    walk, vertex = [root], root + n
    while vertex != root:
        vertex = int(back[root, vertex])
        walk.append(vertex % n)
    vertices = walk[:-1]
    return _rows(equations, [*vertices, vertices[0]]), vertices


def _rows(equations: Equations, walk: Sequence[int]) -> list[int]:
    """An equation for every step of a walk."""
    first: dict[tuple[int, int], int] = {}
    for row, (u, v) in enumerate(equations.edges.tolist()):
        first.setdefault((min(u, v), max(u, v)), row)
    return [first[min(u, v), max(u, v)] for u, v in itertools.pairwise(walk)]
