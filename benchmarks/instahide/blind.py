"""Assignment of images to encodings without public images: the m and d that it takes.

A part of `benchmarks.papers.instahide`. Squares are compared (`overlaps` without public images),
groups are grown (`assign_uncertain`), and pairs are compared with the true ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from benchmarks.instahide.exact import WEIGHTS
from benchmarks.instahide.speed import D, Gaussian
from benchmarks.papers.findings import Finding, Run
from recon_core.attacks.instahide.clusters import assign_uncertain, overlaps
from recon_core.attacks.instahide.line_graph import incidence_of
from recon_core.attacks.instahide.mixing import Mixing

ENOUGH = 0.99
"""Share of encodings whose two images must be right."""
N = 100
POOLS = (1000, 10_000)
"""Public images. Of 1,000 each is in 16 of 4,000 encodings with four: a group like a private one's.
"""


def blind(run: Run) -> Iterator[Finding]:
    """Two public images in each encoding at the usual size, four at larger ones."""
    m, d, n = (150, 3072, 20) if run.quick else (1000, D, N)
    n_seeds = 1 if run.quick else 3
    shares = {
        name: [
            float(table(make(2), n=n, p=POOLS[0], ms=(m,), ds=(d,), seed=seed)[0, 0])
            for seed in range(n_seeds)
        ]
        for name, make in WEIGHTS.items()
    }
    lowest = min(min(values) for values in shares.values())
    yield Finding(
        claim="Ours: pairs of private images are found without the public ones",
        where="ours; Carlini et al. 2020 by a learned similarity",
        theirs="not in the paper, which knows all public images",
        ours=f"2 of {POOLS[0]} public images in each of {m} encodings, d={d}, n={n}; pairs right "
        f"with {n_seeds} seeds: "
        + "; ".join(f"{name} {_range(values)}" for name, values in shares.items()),
        holds=lowest >= ENOUGH,
        rule=f"both images right in at least {ENOUGH:.0%} of the encodings, with every seed",
    )
    pools = POOLS[:1] if run.quick else POOLS
    ms, ds = ((150, 300), (3072,)) if run.quick else ((1000, 2000, 4000), (3072, 6144, 12288))
    for name, make in WEIGHTS.items():
        found = {p: table(make(4), n=n, p=p, ms=ms, ds=ds) for p in pools}
        yield Finding(
            claim=f"Ours: with four unknown public images some m and d are enough (weights {name})",
            where="ours",
            theirs="not in the paper",
            ours=f"4 public images in each encoding, n={n}, one seed; pairs right: "
            + ". ".join(f"Of {p} public ones: {_rows(found[p], ms, ds)}" for p in pools),
            holds=all(bool((shares >= ENOUGH).any()) for shares in found.values()),
            rule=f"both images right in at least {ENOUGH:.0%} of the encodings for some number of "
            "encodings and pixels of each table",
        )


def table(
    mixing: Mixing, *, n: int, p: int, ms: Sequence[int], ds: Sequence[int], seed: int = 0
) -> Float[np.ndarray, "ms ds"]:
    """The share of pairs that are right, for the first m encodings and d pixels of one case."""
    case = Gaussian.drawn(mixing, n=n, p=p, m=max(ms), d=max(ds), seed=seed)
    y, edges = case.encodings.y.float(), case.encodings.private.sort(1).values.numpy()
    found = np.zeros((len(ms), len(ds)))
    for (i, m), (j, d) in itertools.product(enumerate(ms), enumerate(ds)):
        found[i, j] = share(overlaps(y[:m, :d], mixing), edges[:m], n)
    return found


def share(
    scores: Float[Tensor, "m m"], edges: Int64[np.ndarray, "m 2"], n: int, seed: int = 0
) -> float:
    """Share of encodings with both images right, groups renamed to the images they have most of; 0
    if no groups are found."""
    try:
        assigned = assign_uncertain(scores, n, generator=torch.Generator().manual_seed(seed))
    except ValueError:
        return 0.0
    found = assigned.edges.numpy()
    alike = incidence_of(found, n).T @ incidence_of(edges, n)
    named = np.sort(linear_sum_assignment(-alike)[1][found], axis=1)
    return float((named == edges).all(1).mean())


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.1%}" if low == high else f"{low:.1%} to {high:.1%}"


def _rows(found: Float[np.ndarray, "ms ds"], ms: Sequence[int], ds: Sequence[int]) -> str:
    rows = (
        f"m={m}: " + ", ".join(f"{value:.1%} (d={d})" for d, value in zip(ds, row, strict=True))
        for m, row in zip(ms, found, strict=True)
    )
    return "; ".join(rows)
