"""Pixels that step 1 of the InstaHide paper alone needs, the Gram matrix of all images
(`gram_extract`).

A part of `benchmarks.papers.instahide`. Encodings of k images of one weight, Gaussian pixels; a
matrix is exact if every entry is that of k W W^T. Every seed's images are drawn once, at the most
pixels, and cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.instahide.oracles import gram_extract
from benchmarks.instahide.speed import Gaussian
from benchmarks.papers.findings import Finding, Run
from recon_core.attacks.instahide.mixing import Encodings, Mixing

STEP = 2**0.5
"""Between two numbers of pixels that are tried; what a ratio of two of them may be off by."""
EXPONENT = 4.5
"""Of 1 / eta: 4, and a little for the steps."""
FAILURE = 0.5
"""The lemma's delta: what is taken over seeds is the median."""
PHOTOGRAPH = 3072
N_IMAGES = 40
"""Private ones, and as many public ones."""


@dataclass(frozen=True)
class Needed:
    """`pixels`: from which on a matrix is exact, by seed, infinite where the most were too few.
    `right`: the share of entries that are right at the pixels of a small photograph."""

    pixels: tuple[float, ...]
    right: float

    @property
    def median(self) -> float:
        return float(np.median(self.pixels))


def gram(run: Run) -> Iterator[Finding]:
    """Pixels that are needed by the number of encodings, and by that of images in each."""
    seeds, k = (2, 2) if run.quick else (5, 3)
    sizes, images = ((10, 40), (2, 3)) if run.quick else ((25, 50, 100), (2, 3, 4))
    by_m = {m: needed(m, k, seeds) for m in sizes}
    yield enough(by_m, {k: needed(min(sizes) * 2, k, seeds) for k in images})


def needed(m: int, k: int, seeds: int) -> Needed:
    """The pixels that m encodings of k images need, two of them private; at most 1000 k^4."""
    most = 1000 * k**4
    tried = sorted(round(most / STEP**i) for i in range(14))
    found, right = [], []
    for seed in range(seeds):
        case = Gaussian.drawn(
            Mixing.as_a_whole(k - 2), n=N_IMAGES, p=N_IMAGES, m=m, d=most, seed=seed
        )
        y, truth = case.encodings.y, exact_gram(case.encodings)
        wrong = {d: gram_extract(y[:, :d], k, 1 / (2 * k)) != truth for d in (*tried, PHOTOGRAPH)}
        right.append(1 - float(wrong[PHOTOGRAPH].double().mean()))
        late = max((d for d in tried if wrong[d].any()), default=0)
        found.append(float(min((d for d in tried if d > late), default=math.inf)))
    return Needed(tuple(found), float(np.mean(right)))


def exact_gram(e: Encodings) -> Float[Tensor, "m m"]:
    """k W W^T: how many images each two encodings have in common."""
    w = torch.zeros(len(e.y), 2 * N_IMAGES, dtype=torch.float64)
    w.scatter_(1, e.private, 1.0)
    w.scatter_(1, e.public + N_IMAGES, 1.0)
    return w @ w.T


def enough(by_m: Mapping[int, Needed], by_k: Mapping[int, Needed]) -> Finding:
    """Judged by the growth with m and with k; undecided if the most pixels were too few."""
    low, high = min(by_m), max(by_m)
    growth = by_m[high].median / by_m[low].median
    allowed = STEP * math.log(high / FAILURE) / math.log(low / FAILURE)
    logs = np.log([found.median for found in by_k.values()])
    known = all(math.isfinite(n.median) for n in (*by_m.values(), *by_k.values()))
    exponent = float(np.polyfit(np.log([2 * k for k in by_k]), logs, 1)[0]) if known else math.nan
    at_k = ", ".join(f"{n.median:,.0f} (k={k}; {n.right:.1%} of entries right at {PHOTOGRAPH:,})"
                     for k, n in by_k.items())  # fmt: skip
    at_m = ", ".join(f"{found.median:,.0f} (m={m})" for m, found in by_m.items())
    return Finding(
        claim="The Gram matrix is exact from order log(m) / eta^4 pixels on",
        where="lemma 3.3",
        theirs="d = Omega(log(m / delta) / eta^4) with eta = 1 / 2k, for k images in an encoding",
        ours=f"pixels in the median of {len(by_m[low].pixels)} seeds: {at_m}, a factor of "
        f"{growth:.2f}; {at_k}, growing as eta^-{exponent:.2f}",
        holds=growth <= allowed and exponent <= EXPONENT if known else None,
        rule=f"with m, pixels grow by no more than log(m / delta), delta = {FAILURE:g}, does, but "
        f"for a factor of {STEP:.2f} (of two numbers that are tried); with 1 / eta by an exponent "
        f"of at most {EXPONENT:g}; undecided if no number that is tried is enough",
    )
