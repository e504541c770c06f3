"""All private images, exactly: the InstaHide paper's Algorithm 1 in another order.

Publics, then overlaps, then graph, then signs (the paper: overlaps, publics, graph, signs). An
encoding whose equation |W x + c| = y is not met to rounding is taken out, looked at again with the
images known, and returns if that explains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

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
from recon_core.attacks.instahide.mixing import Mixing, mixture
from recon_core.attacks.instahide.public_images import by_sdp, find_publics
from recon_core.attacks.instahide.signs import CAP, Equations, Solved, solve, suspects
from recon_core.types import Progress, no_progress

MOST = 0.98
"""Share of pixels that must meet an equation, and of equations that must hold, to be believed."""


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


def recover(
    y: Float[Tensor, "m d"],
    mixing: Mixing,
    *,
    public: Float[Tensor, "p _"] | None = None,
    n_private: int | None = None,
    generator: torch.Generator,
    n_repairs: int = 3,
    semidefinite: bool = False,
    progress: Progress = no_progress,
) -> Recovered:
    """Every private image that the encodings determine.

    `y`: absolute values of encodings, pixels in units of a standard normal; signs are ignored.
    `n_private`: how many images there are; without it, as many as the graph has, which must then be
    exact. Without public images in the encodings each pixel is known up to one sign for all images
    of a connected part, of which the first is positive. `n_repairs`: rounds in which encodings that
    are not explained are looked at again. `semidefinite`: public images are found by the paper's
    program (`by_sdp`), which takes few of them. Raises ValueError for encodings that are not
    finite, too few, or have public images that are not given.
    """
    m, d = y.shape
    if not bool(y.isfinite().all()):
        row = int((~y.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"encoding {row} has pixels that are not finite")
    if mixing.k_pub and public is None:
        raise ValueError(
            f"k_pub={mixing.k_pub}, but no public images are given; exact recovery needs them"
        )
    if public is not None and public.shape[1] != d:
        raise ValueError(
            f"public images have {public.shape[1]} pixels, encodings {d}; they must be alike"
        )
    if n_private is not None and not 2 <= n_private <= m:
        raise ValueError(
            f"{m} encodings of n_private={n_private} images: there must be 2 images or more, and "
            "no fewer encodings than images, or they are not determined"
        )
    y = y.abs().double()
    pool = y.new_zeros((0, y.shape[1])) if public is None else public.to(y)
    if semidefinite:
        ids = by_sdp(y, pool, mixing, progress=lambda share: progress(0.3 * share))
    else:
        ids = find_publics(y.float(), pool.float(), mixing)
    progress(0.3)
    c = _public_part(pool, ids, mixing)
    scores = overlaps(y.float(), mixing, c.float())
    common = common_images(y.float(), mixing, c.float(), scores)
    progress(0.4)
    state = _Solving(y, pool, mixing, ids=ids, c=c, n_repairs=n_repairs)
    components, exact = _graph(common, scores, n_private, generator)
    n_graphs = int(np.prod([float(len(part.roots)) for part in components]))
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
        n_graphs=n_graphs,
    )


class _Solving:
    """Images of the components that were solved so far, and the encodings that they explain."""

    def __init__(
        self,
        y: Float64[Tensor, "m d"],
        public: Float64[Tensor, "p d"],
        mixing: Mixing,
        *,
        ids: Int64[Tensor, "m k"],
        c: Float64[Tensor, "m d"],
        n_repairs: int,
    ) -> None:
        self.y, self.public, self.mixing, self.n_repairs = y, public, mixing, n_repairs
        self.ids, self.c = ids.clone(), c.clone()
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
        if not good.all() and self.n_repairs:
            edges, solved, good = self._repaired(rows, edges, n)
        self.edges[rows] = edges + first
        self.explained[rows] = good
        enough = solved.met.double().mean(1) > MOST
        self.images.append(solved.z.where(solved.met & enough[:, None], torch.nan))
        known = solved.determined
        for k in range(n):
            if known.free[k]:
                self.status.append(Status.FREE)
            elif known.ambiguous[k]:
                self.status.append(Status.AMBIGUOUS)
            else:
                self.status.append(Status.RECOVERED if bool(enough[k]) else Status.UNSOLVED)

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
        for _ in range(self.n_repairs):
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
                    c = _public_part(self.public, ids[None], self.mixing)
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
            c = _public_part(self.public, ids[None], self.mixing)[0]
            if self.mixing.k_pub:
                scores = images @ ((square - c.square()) * c)
            else:
                scores = images.square() @ (square - square.mean())
            ends = np.sort(np.asarray(scores.topk(2).indices.cpu()))
            yield ends, ids
            ids = publics_of(ends)
            yield ends, ids


def _graph(
    common: Int8[Tensor, "m m"],
    scores: Float[Tensor, "m m"],
    n_private: int | None,
    generator: torch.Generator,
) -> tuple[list[Component], bool]:
    """The graph and whether it is exact; the most likely one if the overlaps have errors."""
    try:
        components = assign_nearly(common, scores)
    except NotALineGraphError:
        if n_private is None:
            raise
    else:
        fewest = sum(min(c.n_images(k) for k in range(len(c.roots))) for c in components)
        if n_private is None or fewest <= n_private:
            return components, True
    found = assign_uncertain(scores, n_private, generator=generator)
    edges = np.unique(np.asarray(found.cpu()), return_inverse=True)[1].reshape(-1, 2)
    return [Component(np.arange(len(edges)), (edges,))], False


def _public_part(
    public: Float64[Tensor, "p d"], ids: Int64[Tensor, "m k"], mixing: Mixing
) -> Float64[Tensor, "m d"]:
    return mixture(public, ids, public.new_full(ids.shape, mixing.wb))
