"""Cost of the signs of a pixel: trying all of them, as the InstaHide paper does, and the beam
search.

A part of `benchmarks.papers.instahide`. `benchmarks.instahide.speed.signs` times both at the same
pixels and compares what they find; above 18 encodings only the search is timed.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch

from benchmarks.instahide import speed as instahide
from benchmarks.instahide.figure import draw
from benchmarks.papers.findings import Finding, Run
from recon_core.attacks.instahide.determined import Equations, determined
from recon_core.attacks.instahide.signs import solve

DOUBLING = (1.6, 2.6)
"""The factor for one encoding more that counts as doubling: 2, and a little for the arithmetic."""
POLYNOMIAL = 3.0
"""The largest exponent of m that counts as no exponential growth."""
FAR = 1000
"""Encodings of the paper's size, to which the cost of all signs is continued."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one pixel by all signs and by the search: of the same few encodings, with two for
    every image, and of many, with ten."""

    all_signs: dict[int, float]
    ours: dict[int, float]
    ours_large: dict[int, float]

    @property
    def factor(self) -> float:
        """Growth of the seconds of all signs for one encoding more, over the larger half of the
        sizes."""
        ms = sorted(self.all_signs)
        some = ms[len(ms) // 2 :]
        logs = [np.log(self.all_signs[m]) for m in some]
        return float(np.exp(np.polyfit(some, logs, 1)[0]))

    @property
    def exponent(self) -> float:
        """k of ours ~ m^k over the large sizes."""
        ms = sorted(self.ours_large)
        logs = [np.log(self.ours_large[m]) for m in ms]
        return float(np.polyfit(np.log(ms), logs, 1)[0])

    def log10_all_signs(self, m: int) -> float:
        """log10 of the seconds of all signs of m encodings, doubled from the largest measured."""
        last = max(self.all_signs)
        return float(np.log10(self.all_signs[last]) + (m - last) * np.log10(2))


def signs(run: Run) -> Iterator[Finding]:
    """The cost of all signs, and that of the search at the same sizes and larger ones."""
    small = (6, 8, 10) if run.quick else (6, 8, 10, 12, 14, 16, 18)
    large = (40, 60) if run.quick else (60, 120, 250, 500, FAR, 2000)
    both = {m: instahide.signs(2 if run.quick else 5, m=m, d=4) for m in small}
    cost = Cost(
        all_signs={m: float(found.reference_value or 0) for m, found in both.items()},
        ours={m: seconds(m, m // 2) for m in small},
        ours_large={m: seconds(m, m // 10) for m in large},
    )
    if run.folder is not None:
        folder = run.folder / "instahide"
        folder.mkdir(exist_ok=True)
        (folder / "signs.json").write_text(json.dumps(asdict(cost), indent=1) + "\n")
        draw(run.folder)
    yield Finding(
        claim="Trying all signs costs twice as much with every encoding",
        where="lemma 3.7",
        theirs="2^m m n^2 steps a pixel",
        ours=f"vectorised over signs, {_seconds(cost.all_signs, small)}; a factor of "
        f"{cost.factor:.2f} for each encoding more; doubled on to m={FAR}: "
        f"10^{cost.log10_all_signs(FAR):.0f} s a pixel",
        holds=DOUBLING[0] < cost.factor < DOUBLING[1],
        rule=f"a factor between {DOUBLING[0]:g} and {DOUBLING[1]:g} for one encoding more, "
        "over the larger half of the sizes",
    )
    yield Finding(
        claim="Ours: on graphs of encodings signs take no exponential time",
        where="ours; beside theorem 3.8 and what follows it",
        theirs="hidden signs are hard in the worst case; the average case is left open",
        ours=f"random graphs that determine all images, 512 pixels together: "
        f"{_seconds(cost.ours, small)}; ten encodings for every image: "
        f"{_seconds(cost.ours_large, large)}, growing as m^{cost.exponent:.2f}",
        holds=cost.exponent < POLYNOMIAL,
        rule=f"all equations met, and an exponent of m below {POLYNOMIAL:g} over the large sizes",
    )


def seconds(m: int, n: int, d: int = 512, repeats: int = 3) -> float:
    """Median seconds of a pixel, of d, for m encodings of n images with public ones.

    Raises ValueError if an equation is not met.
    """
    drawn = (Equations(instahide.edges_of(n, m, s), np.ones((m, 2)), n) for s in itertools.count())
    known = (e for e in drawn if determined(e, with_public=True).images.all())
    taken = []
    for seed, equations in enumerate(itertools.islice(known, repeats)):
        rng = np.random.default_rng(seed)
        c = rng.standard_normal((m, d))
        y = np.abs(equations.matrix @ rng.standard_normal((n, d)) + c)
        started = time.perf_counter()
        found = solve(torch.from_numpy(y), torch.from_numpy(c), equations, tolerance=1e-7)
        taken.append((time.perf_counter() - started) / d)
        instahide.check(bool(found.met.all()), "signs")
    return float(f"{statistics.median(taken):.4g}")


def _seconds(found: dict[int, float], ms: tuple[int, ...]) -> str:
    return ", ".join(f"{found[m]:.2g} s (m={m})" for m in ms)
