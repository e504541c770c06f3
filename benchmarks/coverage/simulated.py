"""Coverage of images by a campaign, and its evenness: samplers in simulated worlds.

    python -m benchmarks.coverage.simulated [--quick] [--json FILE]

What runs bring back is drawn in the worlds of `benchmarks.coverage.world`, whose difficulty is
calibrated so that the paper's campaign reproduces the paper's figures. Campaigns have parts of 50
runs and rounds of 400, and know what is two rounds old. They are simulated by rounds; in the first
world some of them are also planned run by run with `recon_core.sampling.plan_part`.

`adaptive` was tuned in the first two worlds, with several priors: `enough` is the largest of 1, 2,
4 and 11 with which half the runs cover 98 % of what any learner could. The others were only
measured. `enough=44` shows what more pairs of each image cost in coverage.

The goal is the paper's coverage with half the runs. Beside it stands the ceiling: what half the
runs can cover at most, on average, with any sampler that learns from returns alone.
Without --quick the curves are drawn to docs/results/pictures/coverage.png.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.coverage.world import (
    FAMILIES,
    N_TUNED,
    Family,
    Ints,
    Paper,
    World,
    calibrate,
    ceiling,
    simulate,
)
from benchmarks.record import Measurement, main, measured
from recon_core.balance import gini
from recon_core.sampling import History, Phase, Sampling, plan_part

_line = partial(measured, "coverage")


PLOT = Path(__file__).parents[2] / "docs/results/pictures/coverage.png"
SMALL = Paper(
    n_images=1000,
    images_per_run=60,
    pool_size=100,
    uniform_runs=400,
    least_seen_runs=200,
    covered=850,
    pairs_per_run=80,
    runs_per_part=10,
    thinned=1,
)
N_MARKS = 60


@dataclass(frozen=True)
class Curve:
    """After `n_runs` runs: images covered, Gini coefficient of their pairs, pairs per run."""

    n_runs: tuple[int, ...]
    covered: tuple[int, ...]
    gini: tuple[float, ...]
    pairs_per_run: tuple[float, ...]

    def runs_to(self, n_covered: int) -> int | None:
        """The first mark at which so many images are covered."""
        reached = (n for n, c in zip(self.n_runs, self.covered, strict=True) if c >= n_covered)
        return next(reached, None)


@dataclass(frozen=True)
class Found:
    """A world, how it was calibrated, and the samplers' curves in it."""

    name: str
    level: float
    spread: float
    ceiling_at_half: int | None
    curves: Mapping[str, Curve]


def planned(world: World, sampling: Sampling, *, seed: int = 0) -> tuple[Ints, float]:
    """((3, images) runs, returns and pairs of each image, ms of planning per run) of the campaign
    that is planned run by run."""
    rng = np.random.default_rng(np.random.SeedSequence((seed, 3)))
    n = len(world.labels)
    now = np.zeros((3, n), np.int64)
    known = deque([now] * sampling.lag)
    planning_s = 0.0
    for round_index in range(sampling.n_rounds):
        history = History(*known.popleft())
        for part in sampling.parts_of_round(round_index):
            start = time.process_time()
            specs = plan_part(sampling, part, labels=world.labels, history=history, root_seed=seed)
            planning_s += time.process_time() - start
            ids = np.array([spec.image_ids for spec in specs])
            rows = (np.ones_like(ids), *world.runs(ids, rng))
            counted = [np.bincount(ids.ravel(), row.ravel(), minlength=n) for row in rows]
            now = now + np.stack(counted).astype(np.int64)
        known.append(now)
    return now, 1e3 * planning_s / sampling.n_runs


def explore(family: Family, paper: Paper, *, seed: int = 0) -> Found:
    """The family's world, calibrated, with the campaign of the paper and those of one sampler."""
    level, spread = calibrate(family, paper)
    world = the_world(family, paper, level, spread, seed=seed)
    n = paper.n_runs
    samplings = {
        "paper": paper.sampling(),
        "uniform": paper.sampling(Phase(n_runs=n)),
        "least seen": paper.sampling(
            Phase(sampler="least_seen", n_runs=n, pool_size=paper.pool_size)
        ),
        "adaptive": paper.sampling(Phase(sampler="adaptive", n_runs=n)),
        "adaptive, enough=44": paper.sampling(Phase(sampler="adaptive", n_runs=n, enough=44)),
    }
    curves = {}
    for name, sampling in samplings.items():
        marks = []
        for n_runs, (_visits, _back, pairs) in simulate(
            world, sampling, every=n // N_MARKS, seed=seed
        ):
            own = pairs[pairs > 0].astype(np.float64)
            marks.append((n_runs, len(own), gini(own), float(pairs.sum()) / n_runs))
        curves[name] = Curve(*zip(*marks, strict=True))
    bound = None if world.company else ceiling(world, paper, n // 2)
    return Found(family.name, level, spread, bound, curves)


def the_world(family: Family, paper: Paper, level: float, spread: float, *, seed: int = 0) -> World:
    """The family's world with images drawn at random."""
    u = np.random.default_rng(np.random.SeedSequence((seed, 1))).random(paper.n_images)
    return family.world(level, spread, u)


def against_planned(found: Found, family: Family, paper: Paper) -> Iterator[Measurement]:
    """Campaigns of some rounds planned run by run, beside those that are simulated by rounds."""
    world = the_world(family, paper, found.level, found.spread)
    n_runs = paper.uniform_runs // 10
    for sampler in ("uniform", "least_seen", "adaptive"):
        phase = Phase(sampler=sampler, n_runs=n_runs, pool_size=paper.pool_size)
        sampling = paper.sampling(phase)
        now, ms = planned(world, sampling)
        ((_n, by_rounds),) = simulate(world, sampling, every=n_runs)
        case = f"{found.name}: {sampler}, {n_runs} runs planned one by one"
        pairs, others = now[2].astype(np.float64), by_rounds[2].astype(np.float64)
        for what, unit, of in (
            ("covered", "images", lambda n: float((n > 0).sum())),
            ("Gini", "", lambda n: gini(n[n > 0])),
            ("pairs a run", "pairs", lambda n: n.sum() / n_runs),
        ):
            yield _line(
                f"{case}, {what}",
                of(pairs),
                unit,
                reference="simulated by rounds",
                reference_value=of(others),
            )
        yield _line(f"{case}, planning", ms, "ms of processor time a run")


def measurements(found: Found, paper: Paper, *, tuned: bool) -> Iterator[Measurement]:
    """Measurements of a world's curves."""
    where = f"{found.name} ({'tuned here' if tuned else 'not tuned here'})"
    n, half = paper.n_runs, paper.n_runs // 2
    theirs = found.curves["paper"]
    goal = theirs.covered[-1]
    law = f"{where}: level {found.level:.3g}, spread {found.spread:.3g}; the paper's campaign"
    for case, value, unit, expected in (
        (f"{law} covers", goal, "images", paper.covered),
        (f"{law} gives", theirs.pairs_per_run[-1], "pairs a run", paper.pairs_per_run),
    ):
        yield _line(
            case, value, unit, reference="image restoration paper", reference_value=expected
        )
    yield _line(f"{where}: the paper's campaign, Gini of pairs", theirs.gini[-1], "")
    beside = partial(_line, reference=f"the paper's sampler after {n} runs", reference_value=goal)
    if found.ceiling_at_half is not None:
        case = f"{where}: ceiling of any learner after {half} runs"
        yield beside(case, found.ceiling_at_half, "images")
    for name, of in found.curves.items():
        for n_runs in (half, n):
            if name == "paper" and n_runs == n:
                continue
            i = of.n_runs.index(n_runs)
            case = f"{where}: {name} after {n_runs} runs"
            yield beside(f"{case}, covered", of.covered[i], "images")
            yield _line(f"{case}, Gini of pairs", of.gini[i], "")
            yield _line(f"{case}, pairs a run", of.pairs_per_run[i], "pairs")
        reached = of.runs_to(goal)
        if reached is not None and name != "paper":
            case = f"{where}: {name}, runs to the paper's coverage"
            yield _line(case, reached, "runs", reference="the paper's sampler", reference_value=n)


def draw_plot(worlds: Sequence[Found], path: Path) -> None:
    """A PNG: covered images above, Gini coefficient below, against runs; a column per world. Thin
    lines: what the paper's campaign covers in the end, and half its runs."""
    from matplotlib.figure import Figure

    styles = {
        "paper": ("#333333", "-", "image restoration paper: uniform, then least seen"),
        "uniform": ("#8c8c8c", ":", "uniform"),
        "least seen": ("#d98e04", "--", "least seen from the start"),
        "adaptive": ("#0b6fb8", "-", "adaptive"),
        "adaptive, enough=44": ("#0b6fb8", "--", "adaptive, enough=44"),
    }
    figure = Figure(figsize=(2.9 * len(worlds), 5.6), layout="constrained")
    axes = figure.subplots(2, len(worlds), squeeze=False, sharex=True, sharey="row")
    for column, found in enumerate(worlds):
        top, bottom = axes[:, column]
        goal = found.curves["paper"].covered[-1]
        n_runs = found.curves["paper"].n_runs[-1]
        for name, line_of in found.curves.items():
            color, line, label = styles[name]
            thousands = np.array(line_of.n_runs) / 1000
            top.plot(thousands, line_of.covered, color=color, ls=line, label=label)
            bottom.plot(thousands, line_of.gini, color=color, ls=line)
        top.axhline(goal, color="#333333", lw=0.6)
        for axis in (top, bottom):
            axis.axvline(n_runs / 2000, color="#333333", lw=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        top.set_title(found.name, fontsize=10)
        bottom.set_xlabel("thousand runs")
    axes[0, 0].set_ylabel("images covered")
    axes[1, 0].set_ylabel("Gini of pairs per covered image")
    axes[1, 0].set_ylim(0, 1)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110)


def measure(quick: bool) -> Iterator[Measurement]:
    """Coverage and balance of four campaigns in six worlds."""
    paper, families = (SMALL, FAMILIES[:1]) if quick else (Paper(), FAMILIES)
    if quick:
        worlds = [explore(family, paper) for family in families]
    else:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            worlds = list(pool.map(partial(explore, paper=paper), families))
        draw_plot(worlds, PLOT)
    for index, found in enumerate(worlds):
        yield from measurements(found, paper, tuned=index < N_TUNED)
    yield from against_planned(worlds[0], families[0], paper)


if __name__ == "__main__":
    main(measure)
