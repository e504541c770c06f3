"""InstaHide paper: each step of the recovery beside the paper's, on Gaussian images.

    python -m benchmarks.instahide.speed [--quick] [--json FILE]

Public images: beside the semidefinite program. Graph: beside networkx's inverse_line_graph, which
takes simple graphs only. Signs: beside all 2^m of Algorithm 3, vectorised over signs, at the same
pixels. Either side of a comparison has to give the same result, or nothing is timed. One thread.
The whole recovery is timed by `benchmarks.papers.instahide`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np
import torch
from jaxtyping import Float64, Int64
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from benchmarks.record import Measurement, compared, main
from recon_core.attacks.instahide.graph import assign, canonical, gram
from recon_core.attacks.instahide.mixing import Encodings, Mixing, mixture
from recon_core.attacks.instahide.recover import Recovered, by_sdp, find_publics, recover
from recon_core.attacks.instahide.signs import Equations, determined, solve

D = 3072
EXACT = 1e-6
"""The largest error of a pixel, in standard deviations, of an image that came back exactly."""


@dataclass(frozen=True)
class Gaussian:
    """Normal private and public images, and encodings of them."""

    private: Float64[Tensor, "n d"]
    public: Float64[Tensor, "p d"]
    mixing: Mixing
    encodings: Encodings

    @classmethod
    def drawn(
        cls, mixing: Mixing, *, n: int, p: int, m: int, d: int = D, seed: int = 0
    ) -> Gaussian:
        drawn = torch.Generator().manual_seed(seed)
        private = torch.randn(n, d, generator=drawn, dtype=torch.float64)
        public = torch.randn(p, d, generator=drawn, dtype=torch.float64)
        return cls(private, public, mixing, mixing.encode(private, public, m, generator=drawn))

    @property
    def edges(self) -> Int64[np.ndarray, "m 2"]:
        return self.encodings.private.sort(1).values.numpy()

    @property
    def public_part(self) -> Float64[Tensor, "m d"]:
        return mixture(self.public, self.encodings.public, self.encodings.public_weights)

    def recovered(self, device: str | torch.device = "cpu") -> Recovered:
        """By the exact attack, from encodings that are on the device."""
        return recover(
            self.encodings.y.to(device),
            self.mixing,
            public=self.public.to(device),
            n_private=len(self.private),
            generator=torch.Generator().manual_seed(0),
        )

    def first(self, m: int) -> Gaussian:
        """The same with the first m encodings only."""
        parts = {name: part[:m] for name, part in vars(self.encodings).items() if part is not None}
        return replace(self, encodings=Encodings(**parts))

    def matched(self, found: Recovered) -> Matched:
        """The true image of each recovered one, and the distance from it; up to a sign of each
        pixel that all share where there are no public images."""
        x = found.images.nan_to_num(0.0)
        signed = self.mixing.k_pub > 0
        alike = x @ self.private.T if signed else x.abs() @ self.private.abs().T
        ids = torch.from_numpy(linear_sum_assignment(-alike.numpy())[1])
        truth = self.private[ids]
        if not signed:
            truth = truth * torch.where((x * truth).sum(0) < 0, -1.0, 1.0)
        errors = (found.images - truth).abs()
        known, worst = errors.isfinite(), errors.nan_to_num(0.0).amax(1)
        n_exact = int((known.all(1) & (worst < EXACT)).sum())
        return Matched(ids, worst, n_exact, int((known.any(1) & (worst >= EXACT)).sum()))


@dataclass(frozen=True)
class Matched:
    """The true image of each recovered one, and the largest error of a pixel that is known, in
    standard deviations. `n_exact`: images with every pixel right; `n_wrong`: with a wrong one."""

    ids: Int64[Tensor, " n"]
    errors: Float64[Tensor, " n"]
    n_exact: int
    n_wrong: int


def publics(repeats: int, *, p: int, m: int) -> Measurement:
    """Seconds per encoding."""
    case = Gaussian.drawn(Mixing.by_parts(2), n=10, p=p, m=m)
    y, public = case.encodings.y, case.public
    same = torch.equal(find_publics(y, public, case.mixing), by_sdp(y, public, case.mixing))
    check(same, "public images")
    return compared(
        "instahide",
        f"public images of an encoding, 2 of {p}, d={D}",
        ours=lambda: find_publics(y, public, case.mixing),
        reference="semidefinite program of the InstaHide paper, cvxpy with SCS",
        theirs=lambda: by_sdp(y, public, case.mixing),
        repeats=repeats,
        per_call=m,
    )


def graph(repeats: int, *, n: int, m: int) -> Measurement:
    """Seconds per graph, which is simple for networkx's sake."""
    simple = nx.gnm_random_graph(n, m, seed=0)
    edges = np.sort(np.array(list(simple.edges)), axis=1)
    shared = gram(edges).astype(np.int8)
    line = nx.from_numpy_array((shared == 1).astype(np.int8))
    (part,) = assign(shared)
    same = np.array_equal(canonical(part.roots[0]), canonical(edges))
    check(same and nx.inverse_line_graph(line).number_of_edges() == m, "graph")
    return compared(
        "instahide",
        f"graph of {n} images from {m} encodings without a common pair",
        ours=lambda: assign(shared),
        reference="networkx.inverse_line_graph",
        theirs=lambda: nx.inverse_line_graph(line),
        repeats=repeats,
    )


def signs(repeats: int, *, m: int, d: int) -> Measurement:
    """Seconds per pixel."""
    n = m // 2
    equations = next(determined_graphs(n, m))
    rng = np.random.default_rng(1)
    c = rng.standard_normal((m, d))
    y = np.abs(equations.matrix @ rng.standard_normal((n, d)) + c)

    def ours() -> Float64[Tensor, "n d"]:
        return solve(torch.from_numpy(y), torch.from_numpy(c), equations, tolerance=1e-8).z

    check(np.allclose(ours().numpy(), all_signs(equations, y, c), atol=1e-6), "pixels")
    return compared(
        "instahide",
        f"a pixel of {n} images from the signs of {m} encodings",
        ours=ours,
        reference=f"all 2^{m} signs of the InstaHide paper's Algorithm 3, vectorised over signs",
        theirs=lambda: all_signs(equations, y, c),
        repeats=repeats,
        per_call=d,
    )


def all_signs(
    equations: Equations, y: Float64[np.ndarray, "m d"], c: Float64[np.ndarray, "m d"]
) -> Float64[np.ndarray, "n d"]:
    """The z of least residual over all signs, pixel by pixel."""
    w = equations.matrix
    inverse = np.linalg.pinv(w)
    every = np.array(list(itertools.product((1.0, -1.0), repeat=len(y)))).T
    found = np.empty((equations.n, y.shape[1]))
    for pixel in range(y.shape[1]):
        z = inverse @ (every * y[:, pixel : pixel + 1] - c[:, pixel : pixel + 1])
        residual = np.abs(np.abs(w @ z + c[:, pixel : pixel + 1]) - y[:, pixel : pixel + 1])
        found[:, pixel] = z[:, residual.max(0).argmin()]
    return found


def determined_graphs(n: int, m: int) -> Iterator[Equations]:
    """Of random graphs of m encodings, those that determine all n images with public ones."""
    for seed in itertools.count():
        equations = Equations(edges_of(n, m, seed), np.ones((m, 2)), n)
        if determined(equations, with_public=True).images.all():
            yield equations


def check(same: bool, what: str) -> None:
    """Raises ValueError if the two sides do not give the same."""
    if not same:
        raise ValueError(f"the two sides do not give the same {what}: not comparable")


def edges_of(n: int, m: int, seed: int | np.random.Generator) -> Int64[np.ndarray, "m 2"]:
    """Random pairs of different images."""
    rng = np.random.default_rng(seed)
    return np.sort(np.array([rng.choice(n, 2, replace=False) for _ in range(m)]), axis=1)


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds of each step."""
    torch.set_num_threads(1)
    repeats = 2 if quick else 5
    yield publics(repeats, p=12 if quick else 40, m=3)
    yield graph(repeats, n=20 if quick else 100, m=60 if quick else 1000)
    for m in (8,) if quick else (10, 14, 18):
        yield signs(repeats, m=m, d=2 if quick else 4)


if __name__ == "__main__":
    main(measure)
