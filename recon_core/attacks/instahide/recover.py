"""All private images, exactly: the InstaHide paper's Algorithm 1 in another order.

Publics, then overlaps, then graph, then signs (the paper: overlaps, publics, graph, signs). An
encoding whose equation |W x + c| = y is not met to rounding is taken out, looked at again with the
images known, and returns if that explains it.

Public images are step 2 of the paper (section 3.2). For standard normal images E[(y^2 / var - 1) (p
p^T - I)] = 2 w w^T / var over pixels, where p are the public images' values at a pixel and w their
weights: a spike of k_pub entries, which `by_sdp` finds as the paper does. `find_publics` screens by
the diagonal, adds images greedily, and exchanges them by the block and, at last, by the likelihood
of y itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int8, Int64
from torch import Tensor

from recon_core.attacks.instahide.graph import (
    Component,
    NotALineGraphError,
    assign_nearly,
    assign_uncertain,
    common_images,
    overlaps,
)
from recon_core.attacks.instahide.mixing import Mixing, Scheme, mixture
from recon_core.attacks.instahide.signs import CAP, Equations, Solved, solve, suspects
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress

MOST = 0.98
"""Share of pixels that must meet an equation, and of equations that must hold, to be believed."""
N_REPAIRS = 3
"""Rounds in which encodings that are not explained are looked at again."""
AT_ONCE_ON_CPU, AT_ONCE_ON_GPU = 8, 256
"""Encodings whose blocks are computed together: on a CPU few, whose images its cache holds."""
DOUBT = 6.0
"""A choice is certain if the best exchange would lose this many of its standard deviations."""
N_KEPT, N_TRIED = 64, 8
"""Public images that the diagonal leaves for the block, and the best of these that are tried by
likelihood in place of a chosen one."""
MAX_PUBLIC = 40
"""Public images up to which the program is solved in a second or so for each encoding; of 60 some
take minutes."""


class Status(StrEnum):
    """What became of a private image."""

    RECOVERED = "recovered"
    AMBIGUOUS = "ambiguous"  # either sign of an encoding has a solution
    FREE = "free"  # its encodings fix sums of images only
    SEVERAL_GRAPHS = "several graphs"  # two assignments explain the same encodings
    UNSOLVED = "unsolved"  # no signs were found that meet the equations
    ESTIMATED = "estimated"  # an approximation: public images and mistaken encodings are in it


@dataclass(frozen=True)
class Recovered:
    """Images, with `status` of each: pixels are NaN unless it is RECOVERED or ESTIMATED, and where
    `unmet` equations leave them in doubt.

    `edges`: the two images of each encoding, -1 if unknown; `weights`: theirs; `public`: its public
    images; `explained`: encodings whose equations are met. `scores`: how much each two encodings
    have in common, as measured; `common`: the overlaps that the graph was found from; `exact`:
    whether that was by the exact reconstruction; `n_graphs`: assignments that have these overlaps.
    `labels`: classes of the images, -1 if unknown; None where encodings have no labels.
    """

    images: Float64[Tensor, "n d"]
    status: tuple[Status, ...]
    edges: Int64[np.ndarray, "m 2"]
    weights: Float64[np.ndarray, "m 2"]
    public: Int64[Tensor, "m k"] | None
    explained: Bool[np.ndarray, " m"]
    scores: Float[Tensor, "m m"]
    common: Int8[Tensor, "m m"]
    exact: bool = False
    n_graphs: int = 1
    labels: Int64[np.ndarray, " n"] | None = None

    @property
    def n_recovered(self) -> int:
        return sum(status is Status.RECOVERED for status in self.status)


def check_encodings(
    y: Float[Tensor, "m d"],
    mixing: Scheme,
    public: Float[Tensor, "p _"] | None,
    *,
    n_private: int | None,
    fewest: int = 2,
) -> Float[Tensor, "k d"]:
    """The public images, in y's dtype and place; none if none are in encodings. Raises ValueError
    for encodings that are not finite, fewer than images, or images of another size or too few."""
    m, d = y.shape
    if not bool(y.isfinite().all()):
        row = int((~y.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"encoding {row} has pixels that are not finite")
    if n_private is not None and not fewest <= n_private <= m:
        raise ValueError(
            f"{m} encodings of n_private={n_private} images: there must be {fewest} images or "
            "more, and no fewer encodings than images, or they are not determined"
        )
    pool = y.new_zeros(0, d) if public is None or not mixing.k_pub else public.to(y)
    if pool.shape[1] != d:
        raise ValueError(f"public images have {pool.shape[1]} pixels, encodings {d}")
    if len(pool) < mixing.k_pub:
        raise ValueError(
            f"{len(pool)} public images are too few: every encoding has k_pub={mixing.k_pub} of "
            "them, which must be given"
        )
    return pool


def recover(
    y: Float[Tensor, "m d"],
    mixing: Mixing,
    *,
    public: Float[Tensor, "p _"] | None = None,
    n_private: int | None = None,
    generator: torch.Generator,
    semidefinite: bool = False,
    progress: Progress = no_progress,
) -> Recovered:
    """Every private image that the encodings determine.

    `y`: absolute values of encodings, pixels in units of a standard normal; signs are ignored.
    `n_private`: how many images there are; without it, as many as the graph has, which must then be
    exact. Without public images in the encodings each pixel is known up to one sign for all images
    of a connected part, of which the first is positive. `semidefinite`: public images are found by
    the paper's program (`by_sdp`), which takes few of them. Raises ValueError as `check_encodings`,
    and NotALineGraphError if overlaps have errors and `n_private` is not given.
    """
    y = y.abs().double()
    pool = check_encodings(y, mixing, public, n_private=n_private)
    if semidefinite:
        ids = by_sdp(y, pool, mixing, progress=share_of(progress, 0.0, 0.3))
    else:
        ids = find_publics(y.float(), pool.float(), mixing)
    progress(0.3)
    state = _Solving(y, pool, mixing, ids)
    single, c = y.float(), state.c.float()
    scores = overlaps(single, mixing, c)
    common = common_images(single, mixing, c, scores)
    progress(0.4)
    exact = True
    try:
        components = assign_nearly(common, scores)
        n_found = sum(min(c.n_images(k) for k in range(len(c.roots))) for c in components)
        exact = n_private is None or n_found <= n_private
    except NotALineGraphError:
        if n_private is None:
            raise
        exact = False
    if not exact and n_private is not None:  # the most likely graph: the overlaps have errors
        found = np.asarray(assign_uncertain(scores, n_private, generator=generator).cpu())
        edges = np.unique(found, return_inverse=True)[1].reshape(-1, 2)
        components = [Component(np.arange(len(edges)), (edges,))]
    for k, component in enumerate(components):
        state.add(component)
        progress(0.4 + 0.6 * (k + 1) / len(components))
    unseen = max((n_private or 0) - len(state.status), 0)
    return Recovered(
        images=torch.cat([*state.images, y.new_full((unseen, y.shape[1]), torch.nan)]),
        status=(*state.status, *[Status.FREE] * unseen),
        edges=state.edges,
        weights=np.full(state.edges.shape, mixing.wa),
        public=state.ids,
        explained=state.explained,
        scores=scores,
        common=common,
        exact=exact,
        n_graphs=int(np.prod([float(len(part.roots)) for part in components])),
    )


class _Solving:
    """Images of the components that were solved so far, and the encodings that they explain."""

    def __init__(
        self,
        y: Float64[Tensor, "m d"],
        public: Float64[Tensor, "p d"],
        mixing: Mixing,
        ids: Int64[Tensor, "m k"],
    ) -> None:
        self.y, self.public, self.mixing, self.ids = y, public, mixing, ids
        self.c = self._public_part(ids)
        self.edges = np.full((len(y), 2), -1, np.int64)
        self.explained = np.zeros(len(y), bool)
        self.images: list[Float64[Tensor, "k d"]] = []
        self.status: list[Status] = []
        self.cap = CAP * mixing.variance
        single = all(torch.equal(some.float().double(), some) for some in (y, public))
        rounding = 1e-5 if single else 1e-8  # at 1e-4, sparse graphs meet some pixels by chance
        self.tolerance = rounding * mixing.variance**0.5 + 8 * mixing.noise

    def add(self, component: Component) -> None:
        """The images of a component. Two assignments of one have the same sums and explain all
        encodings: the triangle and K(1, 3), and K(1, 3) with one more edge, K4 without an edge and
        K4 with another order of their edges."""
        rows, edges = component.rows, min(component.roots, key=np.max)  # with the fewest images
        n, first = int(edges.max()) + 1, len(self.status)
        if len(component.roots) > 1:
            self.edges[rows] = edges + first
            self.images.append(self.y.new_full((n, self.y.shape[1]), torch.nan))
            self.status += [Status.SEVERAL_GRAPHS] * n
            return
        solved, good = self._solved(rows, edges, n)
        if not good.all() and N_REPAIRS:
            edges, solved, good = self._repaired(rows, edges, n)
        self.edges[rows] = edges + first
        self.explained[rows] = good
        enough = solved.met.double().mean(1) > MOST
        self.images.append(solved.z.where(solved.met & enough[:, None], torch.nan))
        known = solved.determined
        status = np.where(np.asarray(enough.cpu()), Status.RECOVERED, Status.UNSOLVED)
        status[known.ambiguous], status[known.free] = Status.AMBIGUOUS, Status.FREE
        self.status += map(Status, status.tolist())

    def _solved(
        self, rows: Int64[np.ndarray, " k"], edges: Int64[np.ndarray, "k 2"], n: int
    ) -> tuple[Solved, Bool[np.ndarray, " k"]]:
        """The n images of these encodings, and which encodings they explain."""
        at = torch.from_numpy(rows).to(self.y.device)
        y, c = self.y[at], self.c[at]
        equations = Equations(edges, np.full(edges.shape, self.mixing.wa), n)
        solved = solve(y, c, equations, tolerance=self.tolerance, cap=self.cap)
        return solved, self._explained(solved.z, y, c, edges)

    def _explained(
        self,
        z: Float64[Tensor, "n d"],
        y: Float64[Tensor, "k d"],
        c: Float64[Tensor, "k d"],
        edges: Int64[np.ndarray, "k 2"],
    ) -> Bool[np.ndarray, " k"]:
        """Encodings whose equation is met at nearly all pixels that are known, or has none."""
        ends = torch.from_numpy(edges).to(y.device)
        left = ((self.mixing.wa * (z[ends[:, 0]] + z[ends[:, 1]]) + c).abs() - y).abs()
        met = (left <= self.tolerance).double().mean(1) > MOST
        return np.asarray((met | left.isnan().all(1)).cpu())

    def _repaired(
        self, rows: Int64[np.ndarray, " k"], edges: Int64[np.ndarray, "k 2"], n: int
    ) -> tuple[Int64[np.ndarray, "k 2"], Solved, Bool[np.ndarray, " k"]]:
        """Leave out encodings that the others contradict, and let those return that the images
        then explain, also with other public images or another pair."""
        edges, at = edges.copy(), torch.from_numpy(rows).to(self.y.device)
        for _ in range(N_REPAIRS):
            equations = Equations(edges, np.full(edges.shape, self.mixing.wa), n)
            wrong = suspects(
                self.y[at], self.c[at], equations, tolerance=self.tolerance, cap=self.cap
            )
            solved, _good = self._solved(rows[~wrong], edges[~wrong], n)
            left = ~self._explained(solved.z, self.y[at], self.c[at], edges)
            images = solved.z.nan_to_num(0.0)
            for row in np.flatnonzero(left).tolist():
                k = int(rows[row])
                for ends, ids in self._guesses(images, k, edges[row]):
                    c = self._public_part(ids[None])
                    if self._explained(solved.z, self.y[k : k + 1], c, ends[None])[0]:
                        edges[row], self.ids[k], self.c[k] = ends, ids, c[0]
                        break
            good = self._explained(solved.z, self.y[at], self.c[at], edges)
            if good.all() or not good.any():
                break
        if good.any():
            solved, kept = self._solved(rows[good], edges[good], n)
            good[good] = kept
        return edges, solved, good

    def _guesses(
        self, images: Float64[Tensor, "n d"], k: int, ends: Int64[np.ndarray, " 2"]
    ) -> Iterator[tuple[Int64[np.ndarray, " 2"], Int64[Tensor, " k"]]]:
        """What encoding k could be: other public images, or another pair, or both in turn.

        y^2 - s^2 = 2 s c + c^2 times s is, on average, in proportion to c, and the same holds with
        s and c exchanged; without public images squares are compared.
        """
        square, ids = self.y[k].square(), self.ids[k]

        def publics_of(ends: Int64[np.ndarray, " 2"]) -> Int64[Tensor, " k"]:
            s = self.mixing.wa * images[torch.from_numpy(ends).to(images.device)].sum(0)
            scores = self.public @ ((square - s.square()) * s)
            return scores.topk(self.mixing.k_pub).indices.sort().values

        yield ends, publics_of(ends)
        for _ in range(3):
            c = self._public_part(ids[None])[0]
            if self.mixing.k_pub:
                scores = images @ ((square - c.square()) * c)
            else:
                scores = images.square() @ (square - square.mean())
            ends = np.sort(np.asarray(scores.topk(2).indices.cpu()))
            yield ends, ids
            ids = publics_of(ends)
            yield ends, ids

    def _public_part(self, ids: Int64[Tensor, "m k"]) -> Float64[Tensor, "m d"]:
        return mixture(self.public, ids, self.public.new_full(ids.shape, self.mixing.wb))


def find_publics(
    y: Float[Tensor, "m d"],
    public: Float[Tensor, "p d"],
    mixing: Mixing,
) -> Int64[Tensor, "m k"]:
    """The k_pub public images of every encoding, in ascending order. Pixels are in units of a
    standard normal."""
    k = mixing.k_pub
    if k == 0:
        return torch.zeros((len(y), 0), dtype=torch.int64, device=y.device)
    by_diagonal = (y.square() / mixing.variance - 1) @ (public.square() - 1).T
    kept = by_diagonal.topk(min(max(N_KEPT, k), len(public)), dim=1).indices
    found = []
    at_once = AT_ONCE_ON_CPU if y.device.type == "cpu" else AT_ONCE_ON_GPU
    doubted = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    for rows in torch.arange(len(y), device=y.device).split(at_once):
        some = kept[rows]
        block = spike(y[rows], public[some], mixing)
        gain, greedy = block.diagonal(dim1=1, dim2=2).clone(), []
        for _ in range(k):  # one after another the image that adds most to the sum of the block
            best = gain.argmax(1, keepdim=True)
            greedy.append(best)
            gain += 2 * block.gather(1, best[:, :, None].expand(-1, 1, block.shape[2]))[:, 0]
            gain.scatter_(1, best, -torch.inf)
        chosen, loss = _exchanged(block, torch.cat(greedy, 1))
        found.append(some.gather(1, chosen))
        doubted[rows] = loss < DOUBT * ((8 + 16 * (k - 1)) / y.shape[1]) ** 0.5
    ids = torch.cat(found)
    for rows in doubted.nonzero()[:, 0].split(at_once):
        tried = kept[rows, : N_TRIED + k]
        ids[rows] = _by_likelihood(y[rows], public, ids[rows], tried, mixing)
    return ids.sort(1).values


def spike(
    y: Float[Tensor, "b d"], public: Float[Tensor, "b s d"], mixing: Mixing
) -> Float[Tensor, "b s s"]:
    """M of section 3.2: the mean of (y^2 / var - 1) (p p^T - I) over pixels."""
    z = y.square() / mixing.variance - 1
    found = (public * z[:, None]) @ public.mT / y.shape[1]
    found.diagonal(dim1=1, dim2=2).sub_(z.mean(1, keepdim=True))
    return found


def _exchanged(
    block: Float[Tensor, "b s s"], chosen: Int64[Tensor, "b k"]
) -> tuple[Int64[Tensor, "b k"], Float[Tensor, " b"]]:
    """Exchanges while the sum of the block grows, and what the best further one would lose."""
    b, k = chosen.shape
    own = block.diagonal(dim1=1, dim2=2)
    for _ in range(10):
        rows = block.gather(1, chosen[:, :, None].expand(b, k, block.shape[2]))
        others = rows.sum(1)  # (b, s): to all that are chosen
        left = own.gather(1, chosen) + 2 * (others - own).gather(1, chosen)
        gain = own[:, None] + 2 * (others[:, None] - rows) - left[:, :, None]
        gain.scatter_(2, chosen[:, None].expand(b, k, k), -torch.inf)
        best, where = gain.flatten(1).max(1)
        better = (best > 0).nonzero()[:, 0]
        if not len(better):
            break
        out, into = where // block.shape[2], where % block.shape[2]
        chosen[better, out[better]] = into[better]
    return chosen, -best


def _by_likelihood(
    y: Float[Tensor, "b d"],
    public: Float[Tensor, "p d"],
    ids: Int64[Tensor, "b k"],
    candidates: Int64[Tensor, "b t"],
    mixing: Mixing,
) -> Int64[Tensor, "b k"]:
    """Exchange images while the likelihood of |s + c| = y grows, for normal s."""
    k, variance = ids.shape[1], mixing.private_variance
    weights = y.new_full(ids.shape, mixing.wb)
    c = mixture(public, ids, weights)

    def likelihood(c: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """log p(y | c) summed over pixels, of y = |s + c| with normal s, less a constant."""
        product = (y * c).abs() / variance
        cosh = product + torch.log1p(torch.exp(-2 * product))
        return (cosh - c.square() / (2 * variance)).sum(-1)

    score = likelihood(c)
    for _ in range(2 * k):
        best, change = score, torch.full((len(ids), 2), -1, device=y.device)
        for out in range(k):
            without = c - mixing.wb * public[ids[:, out]]
            for t in range(candidates.shape[1]):
                into = candidates[:, t]
                tried = likelihood(without + mixing.wb * public[into])
                tried = tried.where(~(ids == into[:, None]).any(1), -torch.inf)
                better = tried > best
                best = best.where(~better, tried)
                move = torch.tensor([out, t], device=y.device)
                change = torch.where(better[:, None], move, change)
        rows = (change[:, 0] >= 0).nonzero()[:, 0]
        if not len(rows):
            break
        ids[rows, change[rows, 0]] = candidates[rows, change[rows, 1]]
        c, score = mixture(public, ids, weights), best
    return ids


def check_pool(n_public: int, mixing: Scheme) -> None:
    """ValueError for more public images than the program takes, or fewer than encodings have."""
    if n_public > MAX_PUBLIC:
        raise ValueError(
            f"{n_public:,} public images are too many for the semidefinite program, which has "
            f"{n_public**2:,} unknowns for each encoding; give at most {MAX_PUBLIC}, or use the "
            "method exact, which takes thousands"
        )
    if n_public < mixing.k_pub:
        raise ValueError(
            f"{n_public} public images are too few: every encoding has {mixing.k_pub} of them"
        )


def by_sdp(
    y: Float[Tensor, "m d"],
    public: Float[Tensor, "p d"],
    mixing: Mixing,
    *,
    progress: Progress = no_progress,
) -> Int64[Tensor, "m k"]:
    """The k_pub public images of every encoding, in ascending order, by the paper's program.

    With M the `spike` of an encoding: max <M, Z> over Z psd with tr Z = 1 and sum |Z| <= k_pub; the
    largest k_pub entries of Z's leading eigenvector are its public images. Z has p^2 entries for p
    public images, so this takes them by the dozen. Raises ValueError as `check_pool`, or if the
    solver gives nothing for an encoding.
    """
    check_pool(len(public), mixing)
    p, k = len(public), mixing.k_pub
    found = np.zeros((len(y), k), np.int64)
    if not k:
        return torch.from_numpy(found).to(y.device)
    cvxpy: Any = importlib.import_module("cvxpy")  # its names are made at run time
    m, z = cvxpy.Parameter((p, p), symmetric=True), cvxpy.Variable((p, p), PSD=True)
    within = [cvxpy.trace(z) == 1, cvxpy.sum(cvxpy.abs(z)) <= k]
    problem = cvxpy.Problem(cvxpy.Maximize(cvxpy.sum(cvxpy.multiply(m, z))), within)
    for row in range(len(y)):
        block = spike(y[row : row + 1].double(), public[None].double(), mixing)[0].cpu().numpy()
        m.value = (block + block.T) / 2
        problem.solve(solver=cvxpy.SCS, warm_start=False)
        if problem.status not in (cvxpy.OPTIMAL, cvxpy.OPTIMAL_INACCURATE):
            raise ValueError(
                f"the semidefinite program of encoding {row} has no solution to this accuracy; use "
                "the method exact"
            )
        leading = np.linalg.eigh(np.asarray(z.value))[1][:, -1]
        found[row] = np.sort(np.argsort(-np.abs(leading), kind="stable")[:k])
        progress((row + 1) / len(y))
    return torch.from_numpy(found).to(y.device)
