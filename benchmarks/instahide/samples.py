"""Encodings that give all private images, and that could: the InstaHide paper's sample complexity,
and what the signs of a pixel cost.

Parts of `benchmarks.papers.instahide`. Every seed has one sequence of encodings; recoveries see its
first m. What could be recovered is known from the graph alone (`determined`): once all images are
determined they remain so, and a sequence has one number of encodings from which on they are.
Recoveries have 3,072 pixels: with fewer, and no public images, some of the 10^5 overlaps are wrong.
`signs` times all signs, as the paper tries them, and the beam search, above 18 encodings alone.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from benchmarks.instahide import speed
from benchmarks.instahide.exact import outcome
from benchmarks.instahide.speed import EXACT, D, Gaussian
from benchmarks.papers.findings import Finding, Run
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.signs import Equations, determined, solve

NAME = "instahide-samples.png"
COLOURS = ("#c77800", "#a03c17", "#6b4a9a", "#0b6e99")
MARKERS = ("o", "s", "^", "D")
GREY, DARK = "#8c8c8c", "#333333"
UNIVERSE_S = 4.35e17
"""Its age in seconds."""
CONTINUED = 100
"""Encodings up to which the cost of all signs is continued in the picture."""
P = 200
"""Public images; how many there are does not matter to how many encodings are needed."""
MULTIPLES = (0.5, 0.6, 0.7, 0.8, 1.0, 1.3)
"""m / (n log n) of the recoveries."""
SEEDS = {20: 40, 50: 20, 100: 10, 200: 4}
"""Sequences that recoveries are made of, by the number of images; seconds decide."""
N_GRAPHS = 400
FIRST_GRAPH = 10_000
"""Its seed: other graphs than those of recoveries."""
GROWTH = 1.1
"""By which m / (n log n) may differ between the smallest and the largest n."""
K_PUB = (0, 2)
DOUBLING = (1.6, 2.6)
"""The factor for one encoding more that counts as doubling: 2, and a little for the arithmetic."""
POLYNOMIAL = 3.0
"""The largest exponent of m that counts as no exponential growth."""
FAR = 1000
"""Encodings of the paper's size, to which the cost of all signs is continued."""


@dataclass(frozen=True)
class Point:
    """Recoveries of n images from m encodings: with how many seeds all images came back, with how
    many the graph determines all, and with how many exactly what it determines came back."""

    n: int
    k_pub: int
    m: int
    n_seeds: int
    n_all: int
    n_possible: int
    n_as_possible: int
    n_wrong: int
    seconds: float


@dataclass(frozen=True)
class Needed:
    """Numbers of encodings of random graphs of n images, sorted, with which every image is in
    one, in two, and all images are determined without and with public images."""

    n: int
    once: list[int]
    twice: list[int]
    determined: dict[int, list[int]]


def samples(run: Run) -> Iterator[Finding]:
    """Recoveries and graphs for growing n."""
    seeds = {8: 2, 12: 2} if run.quick else SEEDS
    points = [p for n, n_seeds in seeds.items() for k in K_PUB for p in recoveries(n, k, n_seeds)]
    graphs = [needed(n, 10 if run.quick else N_GRAPHS) for n in seeds]
    record = {"points": [asdict(p) for p in points], "graphs": [asdict(g) for g in graphs]}
    _keep(run, "samples", record)
    yield enough(points, graphs)
    yield at_least(graphs)
    yield as_possible(points)


def recoveries(n: int, k_pub: int, n_seeds: int) -> Iterator[Point]:
    """One point for each of MULTIPLES, over prefixes of the same sequences."""
    sizes = [round(multiple * n * np.log(n)) for multiple in MULTIPLES]
    cases = [
        Gaussian.drawn(Mixing.by_parts(k_pub), n=n, p=P, m=sizes[-1], seed=seed)
        for seed in range(n_seeds)
    ]
    for m in sizes:
        found = [outcome(case.first(m)) for case in cases]
        yield Point(
            n=n,
            k_pub=k_pub,
            m=m,
            n_seeds=n_seeds,
            n_all=sum(o.all_exact for o in found),
            n_possible=sum(o.n_possible == n for o in found),
            n_as_possible=sum(o.as_possible for o in found),
            n_wrong=sum(o.n_wrong for o in found),
            seconds=float(np.median([o.seconds for o in found])),
        )


def needed(n: int, n_graphs: int) -> Needed:
    """Thresholds of random sequences of pairs."""
    once, twice = [], []
    found: dict[int, list[int]] = {k: [] for k in K_PUB}
    for seed in range(FIRST_GRAPH, FIRST_GRAPH + n_graphs):
        edges = sequence(n, np.random.default_rng([n, seed]))
        first, second = met(edges, n, 1), met(edges, n, 2)
        once.append(first)
        twice.append(second)
        for k in K_PUB:
            found[k].append(from_which_on(edges, n, second, with_public=k > 0))
    return Needed(n, sorted(once), sorted(twice), {k: sorted(v) for k, v in found.items()})


def sequence(n: int, rng: np.random.Generator) -> Int64[np.ndarray, "m 2"]:
    """Pairs of different images, more than are needed to determine all."""
    pairs = rng.integers(0, n, (round(8 * n * np.log(n)) + 40, 2))
    return np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1)


def met(edges: Int64[np.ndarray, "m 2"], n: int, times: int) -> int:
    """The number of pairs after which every image has been in `times` of them."""
    last = 0
    for image in range(n):
        rows = np.flatnonzero((edges == image).any(1))
        last = max(last, int(rows[times - 1]) + 1)
    return last


def from_which_on(edges: Int64[np.ndarray, "m 2"], n: int, least: int, *, with_public: bool) -> int:
    """The number of pairs, `least` or more, from which on all images are determined.

    An image in a single encoding is not, so that two encodings of each are the least.
    """

    def all_known(m: int) -> bool:
        equations = Equations(edges[:m], np.ones((m, 2)), n)
        return bool(determined(equations, with_public=with_public).images.all())

    low, high, step = least - 1, least, 1  # not determined at low
    while not all_known(high):
        low, high, step = high, high + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if all_known(middle) else (middle, high)
    return high


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest number that is enough for this share of the graphs."""
    return sorted(values)[max(int(np.ceil(share * len(values))) - 1, 0)]


def enough(points: Sequence[Point], graphs: Sequence[Needed]) -> Finding:
    """The upper bound."""
    shares = {
        k: {g.n: quantile(g.determined[k], 0.95) / (g.n * np.log(g.n)) for g in graphs}
        for k in K_PUB
    }
    texts = [
        f"{k} public ones in each: "
        + ", ".join(f"{share:.2f} (n={n})" for n, share in by_n.items())
        for k, by_n in shares.items()
    ]
    most = max(MULTIPLES)
    last = [p for p in points if p.m == round(most * p.n * np.log(p.n))]
    came = ", ".join(f"{p.n_all} of {p.n_seeds} (n={p.n}, k_pub={p.k_pub})" for p in last)
    steady = all(by_n[max(by_n)] <= GROWTH * by_n[min(by_n)] for by_n in shares.values())
    return Finding(
        claim="m = O(n log n) encodings are enough for all private images",
        where="theorems 1.1 and 3.1",
        theirs="O(n log n), without a constant; before, n^(4/3) for a single image",
        ours="m / (n log n) with which 95 % of random graphs determine all images: "
        + "; ".join(texts)
        + f". All images came back exactly at m = {most:g} n log n with {came} seeds (d={D})",
        holds=bool(steady) and all(p.n_all == p.n_possible for p in points),
        rule="the recovery has all images back with every seed whose graph determines them, and m "
        f"/ (n log n) for 95 % of the graphs is, at the largest n, at most {GROWTH:g} times that at"
        " the smallest",
    )


def at_least(graphs: Sequence[Needed]) -> Finding:
    """The lower bound."""
    texts = [
        f"n={g.n}: {quantile(g.once, 0.5) / (g.n * np.log(g.n)):.2f}, "
        f"{quantile(g.twice, 0.5) / (g.n * np.log(g.n)):.2f}, "
        f"{quantile(g.determined[2], 0.5) / (g.n * np.log(g.n)):.2f}"
        for g in graphs
    ]
    ordered = all(
        g.once[i] <= g.twice[i] <= g.determined[k][i]
        for g in graphs
        for k in K_PUB
        for i in range(len(g.once))
    )
    first, last = graphs[0], graphs[-1]
    shares = [quantile(g.once, 0.5) / (g.n * np.log(g.n)) for g in (first, last)]
    return Finding(
        claim="Fewer than order n log n encodings do not have all images in them",
        where="remark 3.2",
        theirs="at least n log n encodings, as a coupon collector needs",
        ours="m / (n log n) with which, for half of the graphs, every image is in one encoding, in "
        "two, and all are determined: " + "; ".join(texts) + ". An encoding has two coupons: the "
        "collector's law is n log n / 2, and with two of each n (log n + log log n) / 2",
        holds=bool(ordered and shares[1] * GROWTH >= shares[0] and min(shares) >= 0.4),
        rule="each graph has its thresholds in this order, and in the median every image is in one "
        "encoding at .4 n log n or later, at the largest n not below "
        f"1/{GROWTH:g} of the share at the smallest",
    )


def as_possible(points: Sequence[Point]) -> Finding:
    """The algorithm beside what is possible."""
    n, same = sum(p.n_seeds for p in points), sum(p.n_as_possible for p in points)
    others = "; ".join(
        f"{p.n_seeds - p.n_as_possible} of {p.n_seeds} at n={p.n}, k_pub={p.k_pub}, m={p.m}"
        for p in points
        if p.n_as_possible < p.n_seeds
    )
    possible, came = sum(p.n_possible for p in points), sum(p.n_all for p in points)
    return Finding(
        claim="Ours: exactly the images that the graph determines come back",
        where="ours",
        theirs="not in the paper",
        ours=f"{n} recoveries of {', '.join(str(k) for k in sorted({p.n for p in points}))} images "
        f"from {MULTIPLES[0]:g} to {MULTIPLES[-1]:g} n log n encodings: in {same} exactly those, "
        f"{sum(p.n_wrong for p in points)} images with a pixel off by {EXACT:g} or more; all "
        f"images are determined in {possible} and came back in {came}; not so: {others or 'none'}",
        holds=same == n and not any(p.n_wrong for p in points),
        rule="in every recovery exactly the determined images, and no wrong one",
    )


def signs(run: Run) -> Iterator[Finding]:
    """The cost of all signs, and that of the search at the same sizes and larger ones: seconds of
    one pixel, by the number of encodings, of which there are two for every image, or ten."""
    small = (6, 8, 10) if run.quick else (6, 8, 10, 12, 14, 16, 18)
    large = (40, 60) if run.quick else (60, 120, 250, 500, FAR, 2000)
    tried = {m: speed.signs(2 if run.quick else 5, m=m, d=4).reference_value or 0.0 for m in small}
    ours = {m: seconds(m, m // 2) for m in small}
    ours_large = {m: seconds(m, m // 10) for m in large}
    _keep(run, "signs", {"all_signs": tried, "ours": ours, "ours_large": ours_large})
    half = small[len(small) // 2 :]
    factor = float(np.exp(np.polyfit(half, np.log([tried[m] for m in half]), 1)[0]))
    exponent = float(np.polyfit(np.log(large), np.log([ours_large[m] for m in large]), 1)[0])
    far = np.log10(tried[small[-1]]) + (FAR - small[-1]) * np.log10(2)
    yield Finding(
        claim="Trying all signs costs twice as much with every encoding",
        where="lemma 3.7",
        theirs="2^m m n^2 steps a pixel",
        ours=f"vectorised over signs, {_seconds(tried)}; a factor of {factor:.2f} "
        f"for each encoding more; doubled on to m={FAR}: 10^{far:.0f} s a pixel",
        holds=DOUBLING[0] < factor < DOUBLING[1],
        rule=f"a factor between {DOUBLING[0]:g} and {DOUBLING[1]:g} for one encoding more, "
        "over the larger half of the sizes",
    )
    yield Finding(
        claim="Ours: on graphs of encodings signs take no exponential time",
        where="ours; beside theorem 3.8 and what follows it",
        theirs="hidden signs are hard in the worst case; the average case is left open",
        ours=f"random graphs that determine all images, 512 pixels together: "
        f"{_seconds(ours)}; ten encodings for every image: {_seconds(ours_large)}, growing as "
        f"m^{exponent:.2f}",
        holds=exponent < POLYNOMIAL,
        rule=f"all equations met, and an exponent of m below {POLYNOMIAL:g} over the large sizes",
    )


def seconds(m: int, n: int, d: int = 512, repeats: int = 3) -> float:
    """Median seconds of a pixel, of d, for m encodings of n images with public ones.

    Raises ValueError if an equation is not met.
    """
    taken = []
    for seed, equations in enumerate(itertools.islice(speed.determined_graphs(n, m), repeats)):
        rng = np.random.default_rng(seed)
        c = rng.standard_normal((m, d))
        y = np.abs(equations.matrix @ rng.standard_normal((n, d)) + c)
        started = time.perf_counter()
        found = solve(torch.from_numpy(y), torch.from_numpy(c), equations, tolerance=1e-7)
        taken.append((time.perf_counter() - started) / d)
        speed.check(bool(found.met.all()), "signs")
    return float(f"{statistics.median(taken):.4g}")


def _seconds(found: dict[int, float]) -> str:
    return ", ".join(f"{seconds:.2g} s (m={m})" for m, seconds in found.items())


def _keep(run: Run, name: str, record: dict[str, Any]) -> None:
    if run.folder is not None:
        folder = run.folder / "instahide"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(record) + "\n")
        draw(run.folder)


def draw(folder: Path) -> None:
    """The picture in `folder`, of what is in its `instahide/`: nothing before both parts are."""
    files = [folder / "instahide" / name for name in ("samples.json", "signs.json")]
    if not all(path.is_file() for path in files):
        return
    from matplotlib.figure import Figure

    record, cost = (json.loads(path.read_text()) for path in files)
    figure = Figure(figsize=(14.4, 3.9), dpi=150, layout="constrained")
    shares, law, signs = panels = figure.subplots(1, 3)
    _shares(shares, record)
    _law(law, record["graphs"])
    _signs(signs, cost)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10.5)
    figure.savefig(folder / NAME, metadata={"Software": None})


def _shares(axes: Any, record: dict[str, Any]) -> None:
    """How often all images came back, and of how many graphs they could."""
    for graph, colour, marker in zip(record["graphs"], COLOURS, MARKERS, strict=False):
        n = graph["n"]
        unit = n * np.log(n)
        for k, line in (("0", ":"), ("2", "-")):
            ms, counts = np.unique(graph["determined"][k], return_counts=True)
            axes.plot(ms / unit, np.cumsum(counts) / counts.sum(), color=colour, ls=line, zorder=1)
        for k_pub, face, size in ((0, "none", 9.5), (2, colour, 5.5)):
            points = [p for p in record["points"] if (p["n"], p["k_pub"]) == (n, k_pub)]
            axes.plot(
                [p["m"] / unit for p in points],
                [p["n_all"] / p["n_seeds"] for p in points],
                **{"ls": "none", "marker": marker, "ms": size, "color": colour, "mfc": face},
                label=f"n = {n}" if k_pub else None,
            )
    for label, style in (
        ("came back, no public", {"ls": "none", "marker": "o", "ms": 9.5, "mfc": "none"}),
        ("determined, 2 public", {"lw": 1.5}),
        ("determined, no public", {"lw": 1.5, "ls": ":"}),
    ):
        axes.plot([], [], color=DARK, label=label, **style)
    axes.axvline(0.5, color=GREY, lw=1, ls="--", zorder=0)
    axes.set(xlim=(0.4, 1.7), ylim=(-0.025, 1.04), xlabel="m / (n log n)")
    axes.set_ylabel("share with all images back")
    axes.set_title("All private images back (points), possible (lines)", loc="left")
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")


def _law(axes: Any, graphs: Sequence[dict[str, Any]]) -> None:
    """Encodings that half and 95 % of the graphs need, in units of n log n, against n."""
    ns = np.array([graph["n"] for graph in graphs])
    line = np.geomspace(ns.min(), ns.max(), 100)
    for key, share, marker, colour, label in (
        ("2", 0.95, "^", COLOURS[3], "all determined, 95 % of graphs"),
        ("2", 0.5, "o", COLOURS[3], "all determined, half of them"),
        ("twice", 0.5, "x", DARK, "every image in two encodings, half"),
        ("once", 0.5, "o", COLOURS[0], "every image in one encoding, half"),
    ):
        values = [np.quantile(g.get(key) or g["determined"][key], share) for g in graphs]
        scaled = values / (ns * np.log(ns))
        axes.plot(ns, scaled, ls="none", marker=marker, ms=6.5, color=colour, label=label)
    twice = (1 + np.log(np.log(line)) / np.log(line)) / 2
    axes.plot(line, twice, color=DARK, lw=1.2, ls="--", label="n (log n + log log n) / 2")
    axes.axhline(0.5, color=GREY, lw=1, ls="--", label="n log n / 2", zorder=0)
    axes.set(xscale="log", ylim=(0, 2.4), xlabel="private images n", ylabel="m / (n log n)")
    axes.set_xticks(ns, [str(n) for n in ns])
    axes.minorticks_off()
    axes.set_title("The graphs' need grows no faster than n log n", loc="left")
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", labelspacing=0.25)


def _signs(axes: Any, cost: dict[str, Any]) -> None:
    """Seconds of a pixel against encodings."""
    ms = [int(m) for m in cost["all_signs"]]
    on = np.arange(ms[-1], CONTINUED)
    doubled = cost["all_signs"][str(ms[-1])] * 2.0 ** (on - ms[-1])
    axes.plot(on, doubled, color=COLOURS[1], ls="--", label="all $2^m$ signs, continued")
    for key, colour, marker, label in (
        ("all_signs", COLOURS[1], "s", "all $2^m$ signs"),
        ("ours", COLOURS[3], "o", "beam search, m = 2n"),
        ("ours_large", COLOURS[3], "D", "beam search, m = 10n"),
    ):
        axes.plot([int(m) for m in cost[key]], cost[key].values(), color=colour, marker=marker,
                  ms=5, label=label)  # fmt: skip
    axes.axhline(UNIVERSE_S, color=GREY, lw=1, ls=":", label="age of the universe")
    axes.set(xscale="log", yscale="log", ylim=(2e-6, 1e20))
    axes.set(xlabel="encodings m", ylabel="seconds per pixel")
    axes.set_title("Hidden signs: the cost of one pixel", loc="left")
    axes.legend(frameon=False, fontsize=8.5, loc="center right")
