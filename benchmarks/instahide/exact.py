"""Claims of the InstaHide paper on Gaussian images: exact recovery, what is named, public images,
size, noise, assignments without public images, and the pixels that a Gram matrix needs.

Parts of `benchmarks.papers.instahide`. Images have 3,072 pixels and weights are those of definition
2.5 unless another number or weight is named; settings are the attack's own defaults.
"""

from __future__ import annotations

import itertools
import math
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from benchmarks.instahide.oracles import gram_extract, pairs_right
from benchmarks.instahide.speed import EXACT, D, Gaussian
from benchmarks.papers.findings import Finding, Run
from recon_core.attacks.instahide.graph import assign, assign_uncertain, overlaps
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.recover import Status, find_publics
from recon_core.attacks.instahide.signs import Equations, determined

WEIGHTS = {"by parts": Mixing.by_parts, "as a whole": Mixing.as_a_whole}
SUPPORTS = 0.995
"""Share of encodings whose public images must all be right."""
GRAPH_S, ALL_S = 0.5, 30.0
"""Seconds for the graph of 5,000 encodings, and for all of its recovery."""
DEVIATIONS = 10
"""Of the noise: what no pixel may be off by."""
ENOUGH = 0.99
"""Share of encodings whose two images must be right without public images."""
POOLS = (1000, 10_000)
"""Public images. Of 1,000 each is in 16 of 4,000 encodings with four: a group like a private one's.
"""
STEP = 2**0.5
"""Between two numbers of pixels that are tried; what a ratio of two of them may be off by."""
EXPONENT = 4.5
"""Of 1 / eta: 4, and a little for the steps."""
FAILURE = 0.5
"""The lemma's delta: over seeds the median is taken."""
N_IMAGES = 40
"""Private images of a Gram matrix, and as many public ones."""


@dataclass(frozen=True)
class Outcome:
    """One recovery of n images. `n_said`: given as recovered; `n_possible`: determined by the true
    graph; `as_possible`: exactly those came back. `status` counts the other images'."""

    n: int
    n_exact: int
    n_said: int
    n_wrong: int
    n_possible: int
    as_possible: bool
    status: Counter[str]
    seconds: float

    @property
    def all_exact(self) -> bool:
        return self.n_exact == self.n


def outcome(case: Gaussian) -> Outcome:
    """Recovered images, beside those that the true graph determines."""
    started = time.perf_counter()
    found = case.recovered()
    seconds = time.perf_counter() - started
    match, e = case.matched(found), case.encodings
    equations = Equations(e.private.numpy(), e.private_weights.numpy(), len(case.private))
    possible = determined(equations, with_public=case.mixing.k_pub > 0).images
    said = np.zeros(len(possible), bool)
    said[match.ids.numpy()] = np.array([s is Status.RECOVERED for s in found.status])
    return Outcome(
        n=len(possible),
        n_exact=match.n_exact,
        n_said=found.n_recovered,
        n_wrong=match.n_wrong,
        n_possible=int(possible.sum()),
        as_possible=bool((said == possible).all()) and match.n_exact == int(possible.sum()),
        status=Counter(str(s) for s in found.status if s is not Status.RECOVERED),
        seconds=seconds,
    )


def exact(run: Run) -> Iterator[Finding]:
    """All images from 1,000 and from 600 encodings; what is not determined is named."""
    n, p, n_seeds = (20, 50, 2) if run.quick else (100, 1000, 20)
    found: dict[tuple[int, int], list[Outcome]] = {}
    for m, k_pub in itertools.product((150, 90) if run.quick else (1000, 600), (0, 2, 4)):
        cases = (Gaussian.drawn(Mixing.by_parts(k_pub), n=n, p=p, m=m, seed=s)
                 for s in range(n_seeds))  # fmt: skip
        found[m, k_pub] = [outcome(case) for case in cases]
    for m, least in zip(sorted({m for m, _k in found}, reverse=True), (0, 1), strict=True):
        mine = {k: outcomes for (size, k), outcomes in found.items() if size == m}
        yield Finding(
            claim=f"All {n} private images come back exactly from {m} encodings",
            where="theorem 3.1",
            theirs=f"with high probability, from m = O(n log n) encodings; n log n = "
            f"{n * np.log(n):.0f}",
            ours=f"n={n}, {p} public images, d={D}: "
            + "; ".join(
                f"{k} public ones in each: {sum(o.all_exact for o in outcomes)} of {n_seeds} seeds,"
                f" at least {min(o.n_exact for o in outcomes)} images, median "
                f"{statistics.median(o.seconds for o in outcomes):.2f} s"
                for k, outcomes in mine.items()
            ),
            holds=all(
                sum(o.all_exact for o in outcomes) >= n_seeds - least for outcomes in mine.values()
            ),
            rule=f"every pixel of every image within {EXACT:g} standard deviations, for at least "
            f"{n_seeds - least} of {n_seeds} seeds with 0, 2 and 4 public images each",
        )
    yield _named([o for outcomes in found.values() for o in outcomes])


def _named(outcomes: list[Outcome]) -> Finding:
    status = sum((o.status for o in outcomes), Counter[str]())
    others = ", ".join(f"{count} {name}" for name, count in sorted(status.items())) or "none"
    return Finding(
        claim="Ours: images that are not determined are named and not guessed",
        where="ours; section 3.3 takes a graph that determines all for granted",
        theirs="not in the paper",
        ours=f"{len(outcomes)} recoveries: {sum(o.n_said for o in outcomes)} images given as "
        f"recovered, {sum(o.n_wrong for o in outcomes)} of them wrong; others: {others}; the true "
        f"graphs do not determine {sum(o.n - o.n_possible for o in outcomes)}; exactly what they "
        f"determine came back in {sum(o.as_possible for o in outcomes)}",
        holds=all(o.n_wrong == 0 and o.as_possible for o in outcomes),
        rule="no image with a wrong pixel, and in every recovery exactly the images that the true "
        "graph determines",
    )


def publics(run: Run) -> Iterator[Finding]:
    """The public images of encodings, out of 10,000."""
    p, m = (500, 40) if run.quick else (10_000, 1000)
    shares, texts = [], []
    for (name, make), k_pub in itertools.product(WEIGHTS.items(), (2, 4)):
        case = Gaussian.drawn(make(k_pub), n=100, p=p, m=m)
        public, truth = case.public.float(), case.encodings.public.sort(1).values
        started = time.perf_counter()
        ids = find_publics(case.encodings.y.float(), public, case.mixing)
        seconds = time.perf_counter() - started
        shares.append(float((ids == truth).all(1).double().mean()))
        texts.append(f"{k_pub} of them, {name}: {shares[-1]:.2%}, {seconds / m * 1000:.1f} ms each")
    yield Finding(
        claim="The public images of an encoding are found from its own pixels",
        where="section 3.2",
        theirs="with high probability, by a semidefinite program over all pairs of public images",
        ours=f"{m} encodings, {p} public images, d={D}, before any repair: " + "; ".join(texts),
        holds=min(shares) >= SUPPORTS,
        rule=f"all public images right in at least {SUPPORTS:.1%} of the encodings, for 2 and 4 "
        "each and both normalisations of the paper",
    )


def large(run: Run) -> Iterator[Finding]:
    """The time of 5,000 encodings, and the time and memory of 10,000 of 1,000 images."""
    m, repeats = (200, 1) if run.quick else (5000, 3)
    seconds, graph, n_all = [], [], 0
    for seed in range(repeats):
        case = Gaussian.drawn(Mixing.by_parts(2), n=100 if m > 999 else 20, p=1000, m=m, seed=seed)
        started = time.perf_counter()
        found = case.recovered()
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        assign(found.common.numpy())
        graph.append(time.perf_counter() - started)
        n_all += case.matched(found).n_exact == len(case.private)
    yield Finding(
        claim=f"Ours: {m} encodings take half a minute at most, their graph half a second",
        where="ours; beside theorems 3.1 and C.2",
        theirs="the graph O(m) after the Gram matrix is read, without parallel edges; signs 2^m",
        ours=f"graph with parallel edges {statistics.median(graph):.2f} s, all steps "
        f"{statistics.median(seconds):.1f} s (medians of {repeats}); all {len(case.private)} "
        f"images exactly with {n_all} of {repeats} seeds; n_pub=1000, 2 in each, d={D}",
        holds=n_all == repeats and max(graph) < GRAPH_S and max(seconds) < ALL_S,
        rule=f"all images exactly; graph below {GRAPH_S:g} s and all below {ALL_S:g} s, every time",
    )
    size = (40, 100, 300) if run.quick else (1000, 1000, 10_000)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        took, peak, n_exact, n_wrong = pool.submit(_alone, *size).result()
    yield Finding(
        claim=f"Ours: {size[2]} encodings of {size[0]} private images are within reach",
        where="ours; beside theorem 3.1",
        theirs="2^m m n^2 d steps: out of reach",
        ours=f"{n_exact} of {size[0]} images exactly, {n_wrong} wrong, in {took:.0f} s and "
        f"{peak / 2**30:.1f} GiB at most, pixels and scores included; n_pub={size[1]}, 2 in each, "
        f"d={D}",
        holds=n_exact == size[0],
        rule="all images exactly; no bound on time or memory was asked",
    )


def _alone(n: int, p: int, m: int) -> tuple[float, int, int, int]:
    """Seconds, peak memory in bytes, images that are exact and wrong, in a process of its own."""
    torch.set_num_threads(1)
    case = Gaussian.drawn(Mixing.by_parts(2), n=n, p=p, m=m)
    started = time.perf_counter()
    found = case.recovered()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    match = case.matched(found)
    return seconds, peak, match.n_exact, match.n_wrong


def noise(run: Run) -> Iterator[Finding]:
    """The worst pixel where encodings have noise."""
    sigma = 0.01
    n, m, n_seeds = (20, 150, 1) if run.quick else (100, 1000, 3)
    worst, n_all, n_open = {}, 0, 0
    for k_pub in (0, 2, 4):
        errors = []
        for seed in range(n_seeds):
            case = Gaussian.drawn(Mixing.by_parts(k_pub, noise=sigma), n=n, p=1000, m=m, seed=seed)
            found = case.recovered()
            match = case.matched(found)
            errors.append(float(match.errors.max()) / sigma)
            n_all += found.n_recovered == n
            n_open += int(found.images.isnan().sum())
        worst[k_pub] = max(errors)
    yield Finding(
        claim="Ours: noise of .01 standard deviations spoils no pixel",
        where="ours",
        theirs="not in the paper, whose encodings have no noise",
        ours=f"all {n} images with {n_all} of {3 * n_seeds} seeds; worst pixel, in deviations of "
        "the noise: "
        + ", ".join(f"{value:.1f} ({k} public ones in each)" for k, value in worst.items())
        + f"; {n_open} of {3 * n_seeds * n * D} pixels left in doubt; m={m}, d={D}",
        holds=n_all == 3 * n_seeds and max(worst.values()) < DEVIATIONS and not n_open,
        rule=f"all images, no pixel off by {DEVIATIONS} deviations of the noise and none left in "
        "doubt",
    )


def blind(run: Run) -> Iterator[Finding]:
    """Two public images in each encoding at the usual size, four at larger ones."""
    m, d, n = (150, 3072, 20) if run.quick else (1000, D, 100)
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
        f"with {n_seeds} seeds, at least: "
        + "; ".join(f"{name} {min(values):.1%}" for name, values in shares.items()),
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
    y, edges = case.encodings.y.float(), case.edges
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
    return pairs_right(assigned.numpy(), torch.from_numpy(edges), n)


def _rows(found: Float[np.ndarray, "ms ds"], ms: Sequence[int], ds: Sequence[int]) -> str:
    rows = (
        f"m={m}: " + ", ".join(f"{value:.1%} (d={d})" for d, value in zip(ds, row, strict=True))
        for m, row in zip(ms, found, strict=True)
    )
    return "; ".join(rows)


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
        y, w = case.encodings.y, torch.zeros(m, 2 * N_IMAGES, dtype=torch.float64)
        w.scatter_(1, case.encodings.private, 1.0)
        w.scatter_(1, case.encodings.public + N_IMAGES, 1.0)
        truth = w @ w.T  # how many images each two encodings have in common
        wrong = {d: gram_extract(y[:, :d], k, 1 / (2 * k)) != truth for d in (*tried, D)}
        right.append(1 - float(wrong[D].double().mean()))
        late = max((d for d in tried if wrong[d].any()), default=0)
        found.append(float(min((d for d in tried if d > late), default=math.inf)))
    return Needed(tuple(found), float(np.mean(right)))


def enough(by_m: Mapping[int, Needed], by_k: Mapping[int, Needed]) -> Finding:
    """Judged by the growth with m and with k; undecided if the most pixels were too few."""
    low, high = min(by_m), max(by_m)
    growth = by_m[high].median / by_m[low].median
    allowed = STEP * math.log(high / FAILURE) / math.log(low / FAILURE)
    logs = np.log([found.median for found in by_k.values()])
    known = all(math.isfinite(n.median) for n in (*by_m.values(), *by_k.values()))
    exponent = float(np.polyfit(np.log([2 * k for k in by_k]), logs, 1)[0]) if known else math.nan
    at_k = ", ".join(f"{n.median:,.0f} (k={k}; {n.right:.1%} of entries right at {D:,})"
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
