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
Curve = Mapping[int, tuple[int, float, float]]
"""After so many runs: images covered, Gini coefficient of their pairs, pairs per run."""
STYLES = {
    "paper": ("#333333", "-"),
    "uniform, then least seen": ("#333333", "--"),
    "uniform": ("#8c8c8c", ":"),
    "least seen": ("#d98e04", "--"),
    "adaptive": ("#0b6fb8", "-"),
    "adaptive, enough=44": ("#0b6fb8", "--"),
}


@dataclass(frozen=True)
class Found:
    """A world, how it was calibrated, and the samplers' curves in it."""

    name: str
    level: float
    spread: float
    ceiling_at_half: int | None
    curves: Mapping[str, Curve]


def planned(world: World, sampling: Sampling) -> tuple[Ints, float]:
    """((3, images) runs, returns and pairs of each image, ms of planning per run) of the campaign
    that is planned run by run."""
    rng = np.random.default_rng(np.random.SeedSequence((0, 3)))
    n = len(world.labels)
    now = np.zeros((3, n), np.int64)
    known = deque([now] * sampling.lag)
    planning_s = 0.0
    for round_index in range(sampling.n_rounds):
        history = History(*known.popleft())
        for part in sampling.parts_of_round(round_index):
            start = time.process_time()
            specs = plan_part(sampling, part, labels=world.labels, history=history, root_seed=0)
            planning_s += time.process_time() - start
            ids = np.array([spec.image_ids for spec in specs])
            rows = (np.ones_like(ids), *world.runs(ids, rng))
            counted = [np.bincount(ids.ravel(), row.ravel(), minlength=n) for row in rows]
            now = now + np.stack(counted).astype(np.int64)
        known.append(now)
    return now, 1e3 * planning_s / sampling.n_runs


def explore(family: Family, paper: Paper) -> Found:
    """The family's world, calibrated, with the campaign of the paper and those of one sampler."""
    level, spread = calibrate(family, paper)
    world = the_world(family, paper, level, spread)
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
    curves: dict[str, Curve] = {}
    for name, sampling in samplings.items():
        marks = simulate(world, sampling, every=n // N_MARKS)
        curves[name] = {
            n_runs: (len(own := pairs[pairs > 0]), gini(own * 1.0), float(own.sum()) / n_runs)
            for n_runs, (_visits, _back, pairs) in marks
        }
    bound = None if world.company else ceiling(world, paper, n // 2)
    return Found(family.name, level, spread, bound, curves)


def the_world(family: Family, paper: Paper, level: float, spread: float) -> World:
    """The family's world with images drawn at random."""
    u = np.random.default_rng(np.random.SeedSequence((0, 1))).random(paper.n_images)
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
    goal, unequal, per_run = found.curves["paper"][n]
    law = f"{where}: level {found.level:.3g}, spread {found.spread:.3g}; the paper's campaign"
    for case, value, unit, expected in (
        (f"{law} covers", goal, "images", paper.covered),
        (f"{law} gives", per_run, "pairs a run", paper.pairs_per_run),
    ):
        yield _line(
            case, value, unit, reference="image restoration paper", reference_value=expected
        )
    yield _line(f"{where}: the paper's campaign, Gini of pairs", unequal, "")
    beside = partial(_line, reference=f"the paper's sampler after {n} runs", reference_value=goal)
    if found.ceiling_at_half is not None:
        case = f"{where}: ceiling of any learner after {half} runs"
        yield beside(case, found.ceiling_at_half, "images")
    for name, curve in found.curves.items():
        for n_runs in (half,) if name == "paper" else (half, n):
            covered, unequal, per_run = curve[n_runs]
            case = f"{where}: {name} after {n_runs} runs"
            yield beside(f"{case}, covered", covered, "images")
            yield _line(f"{case}, Gini of pairs", unequal, "")
            yield _line(f"{case}, pairs a run", per_run, "pairs")
        reached = next((n for n, (covered, *_) in curve.items() if covered >= goal), None)
        if reached is not None and name != "paper":
            case = f"{where}: {name}, runs to the paper's coverage"
            yield _line(case, reached, "runs", reference="the paper's sampler", reference_value=n)


def draw_curves(
    worlds: Sequence[tuple[str, float, Mapping[str, Sequence[Curve]]]], path: Path
) -> None:
    """A PNG with a column per world: its title, a number of images to mark, and by sampler the
    curves of every seed. Covered images above, Gini coefficient below, against runs; the thin lines
    are the mark and half of the runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 2.9 * len(worlds), 5.6), layout="constrained")
    axes = figure.subplots(2, len(worlds), squeeze=False, sharex=True, sharey="row")
    for column, (title, mark, curves) in enumerate(worlds):
        top, bottom = axes[:, column]
        for name, of_seeds in curves.items():
            color, line = STYLES[name]
            for k, curve in enumerate(of_seeds):
                covered, unequal, _per_run = zip(*curve.values(), strict=True)
                top.plot(list(curve), covered, color=color, ls=line, label=None if k else name)
                bottom.plot(list(curve), unequal, color=color, ls=line)
        top.axhline(mark, color="#333333", lw=0.6)
        top.set_title(title, fontsize=10)
        bottom.set_xlabel("runs")
        for axis in (top, bottom):
            axis.axvline(max(curve) / 2, color="#333333", lw=0.6)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("images covered")
    axes[1, 0].set_ylabel("Gini of pairs per covered image")
    axes[1, 0].set_ylim(0, 1)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def measure(quick: bool) -> Iterator[Measurement]:
    """Coverage and balance of four campaigns in six worlds."""
    paper, families = (SMALL, FAMILIES[:1]) if quick else (Paper(), FAMILIES)
    if quick:
        worlds = [explore(family, paper) for family in families]
    else:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            worlds = list(pool.map(partial(explore, paper=paper), families))
        draw_curves(
            [
                (w.name, w.curves["paper"][paper.n_runs][0], {s: [c] for s, c in w.curves.items()})
                for w in worlds
            ],
            PLOT,
        )
    for index, found in enumerate(worlds):
        yield from measurements(found, paper, tuned=index < N_TUNED)
    yield from against_planned(worlds[0], families[0], paper)


if __name__ == "__main__":
    main(measure)
