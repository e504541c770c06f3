"""Worlds in which to try samplers: how likely each image is to come back, calibrated on the image
restoration paper.

The law: image i has a chance p_i of coming back in a run that trains on it. If it does, a geometric
number of candidates (1.5 on average, our assumption) are confident, and each is kept at all 11
saved iterations: a return gives 11, 22, ... pairs. The images are CIFAR-10's, 5,000 of each class,
20,000 vehicles and 30,000 animals; a run has 150 of each label.

Only the distribution of p_i differs between worlds. A family of distributions has two free numbers,
`level` and `spread`, and the paper gives two figures: 42,707 images covered after its 150,000 runs,
and 60 million pairs. `calibrate` solves for the two by nested bisection, on a tenth of the images
(and of those of a run, and of the pool: visits per image stay the same). What the campaign then
gives at full size is measured in `benchmarks.coverage.simulated`, not assumed.

Campaigns are simulated round by round, without planning single runs: within a round all runs know
the same, so the visits to an image are Binomial(runs, its chance of being drawn into one). That
chance is n / pool for the paper's samplers; drawing in proportion to w takes image i with
1 - exp(-t w_i), t such that they sum to n (up to 1/n). `benchmarks.coverage.simulated` measures the
difference to campaigns that `plan_part` plans run by run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, expit, logit, ndtri

from recon_core.sampling import History, Phase, Sampling, worth

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

N_SAVED, CANDIDATES_PER_RETURN = 11, 1.5
VEHICLES = (0, 1, 8, 9)
CLASS_SHIFTS = np.array([0.0, 1, -1, -2, -0.5, -1.5, 1.5, 0.5, 2, 0])
"""Of the log chance, by class; made up."""
_LEAST, _MOST = 1e-9, 0.98  # chances are kept between the two


@dataclass(frozen=True, kw_only=True)
class Paper:
    """The campaign of the image restoration paper, section 2, and what came of it."""

    n_images: int = 50_000
    images_per_run: int = 300
    pool_size: int = 4000
    uniform_runs: int = 100_000
    least_seen_runs: int = 50_000
    covered: int = 42_707
    pairs_per_run: float = 400.0
    runs_per_part: int = 50
    thinned: int = 10  # calibrated on one image in so many

    @property
    def n_runs(self) -> int:
        return self.uniform_runs + self.least_seen_runs

    def sampling(self, *phases: Phase) -> Sampling:
        """These phases in runs of this size; the paper's if there are none."""
        own = (
            Phase(n_runs=self.uniform_runs),
            Phase(sampler="least_seen", n_runs=self.least_seen_runs, pool_size=self.pool_size),
        )
        return Sampling(
            images_per_run=self.images_per_run,
            phases=phases or own,
            runs_per_part=self.runs_per_part,
        )

    def thin(self) -> Paper:
        """The same visits per image, with fewer images."""
        k = self.thinned
        return replace(
            self,
            n_images=self.n_images // k,
            images_per_run=self.images_per_run // k,
            pool_size=self.pool_size // k,
            covered=self.covered // k,
            pairs_per_run=self.pairs_per_run / k,
            thinned=1,
        )


@dataclass(frozen=True, eq=False)
class World:
    """`ease` is logit p_i. With `company`, the logit moves by that much of how far the run's mean
    ease is from the `usual` one: above 0, hard company hurts, below 0 it helps."""

    name: str
    labels: Ints
    ease: Floats
    company: float
    usual: float

    def runs(self, image_ids: Ints, rng: np.random.Generator) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Returns of each image of each run, and their numbers of pairs; both (runs, images)."""
        ease = self.ease[image_ids]
        ease = ease + self.company * (ease.mean(1, keepdims=True) - self.usual)
        back = rng.random(ease.shape) < expit(ease)
        return back, self._pairs(back.astype(np.int64), rng)

    def visits(self, n_runs: int, drawn: Floats, rng: np.random.Generator) -> Ints:
        """(3, images): runs, returns and pairs after runs that take image i with chance drawn[i].

        A run's company is what it is on average: 300 images differ little from that.
        """
        shift = self.company * (float(drawn @ self.ease / drawn.sum()) - self.usual)
        visits = rng.binomial(n_runs, drawn)
        back = rng.binomial(visits, expit(self.ease + shift))
        return np.stack([visits, back, self._pairs(back, rng)])

    def _pairs(self, back: Ints, rng: np.random.Generator) -> Ints:
        pairs = np.zeros_like(back)
        some = back > 0
        more = rng.negative_binomial(back[some], 1 / CANDIDATES_PER_RETURN)
        pairs[some] = N_SAVED * (back[some] + more)
        return pairs


@dataclass(frozen=True)
class Family:
    """A law of difficulty: chance(u, classes, level, spread), u uniform in (0, 1) per image.

    Pairs rise with `level`. At equal pairs, coverage rises with `spread` if `evens`, else it falls.
    Both are searched for between their bounds, on a logarithmic scale.
    """

    name: str
    chance: Callable[[Floats, Ints, float, float], Floats]
    level: tuple[float, float]
    spread: tuple[float, float]
    evens: bool = False
    company: float = 0.0

    def world(self, level: float, spread: float, u: Floats) -> World:
        """The world whose images, of the ten classes in turns, lie at the quantiles `u`."""
        classes = np.arange(len(u)) % 10
        ease = logit(np.clip(self.chance(u, classes, level, spread), _LEAST, _MOST))
        labels = 1 - np.isin(classes, VEHICLES).astype(np.int64)
        usual = float(np.mean([ease[labels == label].mean() for label in (0, 1)]))
        return World(self.name, labels, ease, self.company, usual)


def _beta(u: Floats, _classes: Ints, level: float, spread: float) -> Floats:
    return np.asarray(betaincinv(spread, spread * (1 / level - 1), u))


def _lognormal(u: Floats, _classes: Ints, level: float, spread: float) -> Floats:
    return np.asarray(level * np.exp(spread * ndtri(u)))


def _two_points(u: Floats, _classes: Ints, level: float, spread: float) -> Floats:
    return np.where(u < 0.25, spread, level)


def _by_class(u: Floats, classes: Ints, level: float, spread: float) -> Floats:
    return np.asarray(level * np.exp(spread * ndtri(u) + CLASS_SHIFTS[classes]))


def _logistic(u: Floats, _classes: Ints, level: float, spread: float) -> Floats:
    return np.asarray(expit(np.log(level) + spread * ndtri(u)))


FAMILIES = (
    Family("beta", _beta, level=(1e-4, 0.9), spread=(1e-3, 3), evens=True),
    Family("lognormal", _lognormal, level=(1e-6, 0.9), spread=(0.1, 20)),
    Family("two points", _two_points, level=(1e-3, 0.9), spread=(1e-7, 1e-1), evens=True),
    Family("by class", _by_class, level=(1e-6, 0.9), spread=(0.1, 20)),
    Family("hard company hurts", _logistic, (1e-6, 0.9), (0.1, 20), company=0.3),
    Family("hard company helps", _logistic, (1e-6, 0.9), (0.1, 20), company=-0.3),
)
CALIBRATION_STEPS = 13
N_TUNED = 2
"""The settings of `adaptive` were chosen in so many of them, from the first on."""


def calibrate(family: Family, paper: Paper) -> tuple[float, float]:
    """(level, spread) with which the paper's campaign covers as many images and gives as many pairs
    as the paper says; ValueError if it misses either by more than 2 %."""
    thin = paper.thin()
    u = (np.arange(thin.n_images // 10) + 0.5) / (thin.n_images // 10)
    quantiles = np.repeat(u, 10)  # every class has the same

    def found(level: float, spread: float) -> tuple[int, float]:
        world = family.world(level, spread, quantiles)
        ((_n_runs, now),) = simulate(world, thin.sampling(), every=thin.n_runs)
        return int((now[2] > 0).sum()), float(now[2].sum()) / thin.n_runs

    def level_for(spread: float) -> float:
        return _bisect(
            family.level, CALIBRATION_STEPS, lambda x: found(x, spread)[1] < thin.pairs_per_run
        )

    spread = _bisect(
        family.spread,
        CALIBRATION_STEPS,
        lambda x: (found(level_for(x), x)[0] < thin.covered) == family.evens,
    )
    level = level_for(spread)
    covered, pairs = found(level, spread)
    if abs(covered / thin.covered - 1) > 0.02 or abs(pairs / thin.pairs_per_run - 1) > 0.02:
        raise ValueError(
            f"{family.name}: {covered} images and {pairs:.0f} pairs a run at level={level:.3g}, "
            f"spread={spread:.3g}, expected {thin.covered} and {thin.pairs_per_run:g}; widen the "
            "bounds of the family"
        )
    return level, spread


def simulate(world: World, sampling: Sampling, *, every: int) -> Iterator[tuple[int, Ints]]:
    """(runs so far, (3, images) runs, returns and pairs of each image), every so many runs."""
    rng = np.random.default_rng(np.random.SeedSequence((0, 2)))
    n_round = sampling.runs_per_part * sampling.parts_per_round
    now = np.zeros((3, len(world.labels)), np.int64)
    n_done = end = 0
    for phase in sampling.phases:
        end += phase.n_runs
        known = deque([now] * sampling.lag)
        history = History(*now)
        while n_done < end:
            stop = min(end, n_done + every - n_done % every)
            if phase.sampler != "uniform":
                stop = min(stop, n_done + n_round - n_done % n_round)
                if n_done % n_round == 0:
                    history = History(*known.popleft())
            drawn = chances(phase, history, world.labels, sampling, rng)
            now = now + world.visits(stop - n_done, drawn, rng)
            n_done = stop
            if n_done % n_round == 0:
                known.append(now)
            if n_done % every == 0:
                yield n_done, now


def chances(
    phase: Phase, history: History, labels: Ints, sampling: Sampling, rng: np.random.Generator
) -> Floats:
    """Each image's chance of being drawn into a run of this phase."""
    n_each = sampling.images_per_run // 2
    drawn = np.zeros(len(labels))
    for label in (0, 1):
        members = np.flatnonzero(labels == label)
        if phase.sampler == "least_seen":
            order = np.lexsort((rng.random(len(members)), history.n_pairs[members]))
            members = members[order[: max(phase.pool_size // 2, n_each)]]
        drawn[members] = n_each / len(members)
        if phase.sampler == "adaptive":
            weights = worth(history.of(members), phase)
            # 1 - exp(-t w), with t by Newton's method from below such that they sum to n_each
            t = n_each / weights.sum()
            for _ in range(100):
                missing = n_each + np.expm1(-t * weights).sum()
                if missing < 1e-6 * n_each:
                    break
                t += missing / (weights * np.exp(-t * weights)).sum()
            drawn[members] = -np.expm1(-t * weights)
    return drawn


def ceiling(world: World, paper: Paper, n_runs: int) -> int:
    """Images that `n_runs` runs cover at most, on average, if only returns tell images apart.

    The longer an image has failed, the smaller its chance in the next run, whatever the law; so
    none covers more than who always takes the uncovered with the fewest failures. With m visits to
    each that is sum 1 - (1 - p)^m images for sum (1 - (1 - p)^m) / p visits, in each label.
    """
    if world.company:
        raise ValueError(f"{world.name}: chances depend on the run; there is no such bound")
    total = 0.0
    for label in (0, 1):
        chance = expit(world.ease[world.labels == label])
        budget = n_runs * paper.images_per_run / 2

        def fits(m: float, p: Floats = chance, most: float = budget) -> bool:
            return bool(((1 - (1 - p) ** m) / p).sum() < most)

        total += float((1 - (1 - chance) ** _bisect((1e-3, 1e9), 60, fits)).sum())
    return round(total)


def _bisect(bounds: tuple[float, float], steps: int, is_low: Callable[[float], bool]) -> float:
    """Where `is_low` turns from true to false, on a logarithmic scale."""
    low, high = np.log(bounds)
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(float(np.exp(middle))) else (low, middle)
    return float(np.exp((low + high) / 2))
