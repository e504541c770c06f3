"""Images that a run trains on: planned in rounds, never raced for.

Runs are grouped into parts (the work of one task), parts into rounds. Round k is a pure function of
the settings, the labels and the history known from rounds <= k - lag, whatever the number of
workers or how often they died. Image restoration paper, section 2: 100,000 uniform runs, then
50,000 on the 4,000 least-seen images.

The sampler `adaptive` learns from earlier rounds what another run of each image is worth.
An image that came back in k of n runs, with z confident pairs, is worth

    w = (k + prior_back) / (n + prior_runs) * 2^(-z / enough):

its expected chance under a Beta(prior_back, prior_runs - prior_back) prior, times what another pair
of it is worth (image restoration paper, end of section 2). Each run draws its images without
replacement with probabilities in proportion to w, so every image is always possible. Thompson
sampling gave the same coverage in simulated worlds, and less balance among covered images.

Only sums, products, quotients and powers of two occur, which are the same on every machine; between
the halvings the worth goes down in a straight line.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float64, Int64

from recon_core.strict import Count, Strict, Within
from recon_core.types import RunSpec

_FAINTEST = 500
"""Halvings, beyond those of the image with the fewest pairs, after which no more are counted."""


@dataclass(frozen=True, kw_only=True)
class Phase(Strict):
    """`n_runs` runs whose images are drawn by one sampler.

    `uniform`: from all images. `least_seen`: from the `pool_size` images with the fewest confident
    pairs so far, equally many of each label; ties are broken at random. `adaptive`: from all
    images, in proportion to what another run is worth, with the prior `prior_back` of `prior_runs`
    and `enough` pairs (`worth`).
    """

    sampler: Literal["uniform", "least_seen", "adaptive"] = "uniform"
    n_runs: Count = 1
    pool_size: Annotated[int, Within("[2, inf)")] = 4000
    enough: Annotated[int, Within("[1, inf)", fix="an image with as many pairs counts half")] = 2
    prior_back: float = 1.0
    prior_runs: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.prior_back < self.prior_runs < math.inf:
            raise ValueError(
                f"prior_back={self.prior_back} must be above 0 and below "
                f"prior_runs={self.prior_runs}, for example 1 and 10"
            )


@dataclass(frozen=True, eq=False)
class History:
    """Record of each image of the source in the rounds that are known, (n,) each. `n_runs`: runs
    that trained on it; `n_back`: those in which a confident pair of it came back; `n_pairs`:
    confident pairs. Raises ValueError if they cannot be counts of the same runs."""

    n_runs: Int64[np.ndarray, " n"]
    n_back: Int64[np.ndarray, " n"]
    n_pairs: Int64[np.ndarray, " n"]

    def __post_init__(self) -> None:
        wrong = np.flatnonzero((self.n_back < 0) | (self.n_back > self.n_runs) | (self.n_pairs < 0))
        if len(wrong):
            i = int(wrong[0])
            raise ValueError(
                f"image {i} came back in {self.n_back[i]} of {self.n_runs[i]} runs, with "
                f"{self.n_pairs[i]} pairs; expected 0 <= n_back <= n_runs and no negative count"
            )

    @classmethod
    def empty(cls, n_images: int) -> History:
        return cls(*(np.zeros(n_images, np.int64) for _ in range(3)))

    def of(self, image_ids: Int64[np.ndarray, " k"]) -> History:
        return History(self.n_runs[image_ids], self.n_back[image_ids], self.n_pairs[image_ids])


def worth(history: History, phase: Phase) -> Float64[np.ndarray, " n"]:
    """w of each image, times a power of two that keeps it above 0 however many pairs there are. At
    least one image."""
    chance = (history.n_back + phase.prior_back) / (history.n_runs + phase.prior_runs)
    halvings, rest = np.divmod(history.n_pairs, phase.enough)
    halvings = np.minimum(halvings - halvings.min(), _FAINTEST)
    left = np.ldexp(1 - rest / (2 * phase.enough), -halvings)
    return np.asarray(chance * left)


def draw(
    weights: Float64[np.ndarray, " k"], size: int, rng: np.random.Generator
) -> Int64[np.ndarray, " size"]:
    """`size` different positions, one after another in proportion to the weights of those left.
    `weights` are above 0 and at least `size`. Drawing with replacement and skipping repeats is the
    same."""
    taken = np.zeros(0, np.int64)
    remaining = weights
    while len(taken) < size:
        cumulative = np.cumsum(remaining)
        at = np.searchsorted(cumulative, rng.random(2 * size) * cumulative[-1], side="right")
        found, first = np.unique(at[at < len(weights)], return_index=True)
        taken = np.concatenate([taken, found[np.argsort(first)]])[:size]
        if len(taken) < size:
            remaining = weights.copy()
            remaining[taken] = 0
    return taken


CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
VEHICLES = frozenset({"airplane", "automobile", "ship", "truck"})


@dataclass(frozen=True, kw_only=True)
class Sampling(Strict):
    """Number of images that a run trains on, and the parts and rounds of runs.

    `lag`: a round may be planned once all rounds up to `lag` before it are finished, so up to `lag`
    rounds are in flight at a time. `attacks_per_victim`: so many runs in a row attack the same
    victim, each from its own start and with its own hyperparameters (image restoration paper,
    section 5.1: 303).
    """

    images_per_run: Annotated[int, Within("[2, inf)", fix="one of each label")] = 300
    phases: tuple[Phase, ...] = (
        Phase(n_runs=100_000),
        Phase(sampler="least_seen", n_runs=50_000),
    )
    runs_per_part: Count = 50
    parts_per_round: Count = 8
    lag: Count = 2
    attacks_per_victim: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.phases:
            raise ValueError("phases=() plans no run; give at least one Phase(n_runs=...)")
        for phase in self.phases:
            if phase.n_runs % self.runs_per_part:
                rounded = -(-phase.n_runs // self.runs_per_part) * self.runs_per_part
                raise ValueError(
                    f"n_runs={phase.n_runs} is not a multiple of "
                    f"runs_per_part={self.runs_per_part}; use {rounded}, or other parts"
                )
            n = self.attacks_per_victim
            if phase.n_runs % n:
                raise ValueError(
                    f"n_runs={phase.n_runs} is not a multiple of attacks_per_victim={n}; "
                    f"use {-(-phase.n_runs // n) * n}"
                )
            if n > 1 and phase.sampler != "uniform":
                raise ValueError(
                    f"attacks_per_victim={n} with sampler={phase.sampler!r}, whose choice changes "
                    "from round to round; all attacks on a victim need the same images: use "
                    "'uniform'"
                )

    @property
    def n_runs(self) -> int:
        return sum(phase.n_runs for phase in self.phases)

    @property
    def n_parts(self) -> int:
        return self.n_runs // self.runs_per_part

    @property
    def n_rounds(self) -> int:
        return -(-self.n_parts // self.parts_per_round)

    def parts_of_round(self, round_index: int) -> range:
        first = round_index * self.parts_per_round
        return range(first, min(first + self.parts_per_round, self.n_parts))

    def round_of_part(self, part: int) -> int:
        return part // self.parts_per_round

    def phase_of_part(self, part: int) -> Phase:
        first = 0
        for phase in self.phases:
            first += phase.n_runs // self.runs_per_part
            if part < first:
                return phase
        raise ValueError(f"part {part} is beyond the campaign's {self.n_parts} parts")

    def needs_counts(self, round_index: int) -> bool:
        return any(
            self.phase_of_part(p).sampler != "uniform" for p in self.parts_of_round(round_index)
        )

    def known_rounds(self, round_index: int) -> range:
        """The rounds whose results the plan of `round_index` may use."""
        return range(max(0, round_index - self.lag + 1))


def binary_labels(
    labels: Int64[np.ndarray, " n"], class_names: Sequence[str]
) -> tuple[Int64[np.ndarray, " n"], str]:
    """(0 or 1 per image, the task in words) for the binary victim. CIFAR-10's classes become
    vehicles against animals (Haim et al.); of others the first half is set against the rest. Raises
    ValueError for fewer than two classes."""
    if len(class_names) < 2:
        raise ValueError(
            f"the source has {len(class_names)} class ({', '.join(class_names)}); a binary victim "
            "needs two: put the images into at least two class folders"
        )
    if set(class_names) <= set(CIFAR10_CLASSES):
        positive = np.array([name not in VEHICLES for name in class_names])
        if positive.any() and not positive.all():
            return positive[labels].astype(np.int64), "vehicles against animals"
    half = len(class_names) // 2
    sides = (
        " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        for names in (class_names[:half], class_names[half:])
    )
    return (labels >= half).astype(np.int64), " against ".join(sides)


def class_labels(
    labels: Int64[np.ndarray, " n"], class_names: Sequence[str], n_classes: int
) -> tuple[Int64[np.ndarray, " n"], str]:
    """(class per image or -1, the task in words) for a victim with an output per class. Its classes
    are the first `n_classes` of the source (KKT paper, section 4.2); images of others are -1 and
    not used. Raises ValueError if there are fewer."""
    if len(class_names) < n_classes:
        raise ValueError(
            f"n_classes={n_classes}, but the source has {len(class_names)} "
            f"({', '.join(class_names)}); use at most that many"
        )
    task = " against ".join(class_names[:n_classes])
    return np.where(labels < n_classes, labels, -1).astype(np.int64), task


def check_balance(images_per_run: int, n_labels: int | None) -> None:
    """Raises ValueError if a run cannot have equally many images of each label (None: of any)."""
    if n_labels is not None and images_per_run % n_labels:
        nearest = max(1, images_per_run // n_labels) * n_labels
        raise ValueError(
            f"images_per_run={images_per_run} is not a multiple of the {n_labels} labels; a "
            f"balanced run needs equally many of each, for example {nearest}"
        )


def plan_part(
    sampling: Sampling,
    part: int,
    *,
    labels: Int64[np.ndarray, " n"],
    history: History,
    root_seed: int,
    n_labels: int | None = 2,
) -> tuple[RunSpec, ...]:
    """The runs of one part: which images each trains on, equally many of each label.

    `labels` are 0 to n_labels - 1 per image of the source, -1 for one that is not used; None draws
    images whatever their label. `history` is what is known from `sampling.known_rounds`. The random
    numbers of run r depend on (root_seed, r) alone, those of the pool of `least_seen` on
    (root_seed, round). Raises ValueError if a label has too few images, if they cannot be shared
    equally, or if the history is of another number of images.
    """
    if len(history.n_runs) != len(labels):
        raise ValueError(
            f"the history is of {len(history.n_runs)} images, the labels of {len(labels)}; "
            "give one entry per image of the source in both"
        )
    check_balance(sampling.images_per_run, n_labels)
    n_pools = n_labels or 1
    n_each = sampling.images_per_run // n_pools
    phase = sampling.phase_of_part(part)
    pools: list[tuple[Int64[np.ndarray, " _"], Float64[np.ndarray, " _"] | None]] = []
    for label in range(n_pools):
        members = np.flatnonzero(labels >= 0 if n_labels is None else labels == label)
        if n_labels is None and len(members) < n_each:
            raise ValueError(
                f"images_per_run={sampling.images_per_run}, but there are {len(members)} images; "
                "use at most that many"
            )
        if len(members) < n_each:
            raise ValueError(
                f"images_per_run={sampling.images_per_run} needs {n_each} images of each of the "
                f"{n_pools} labels, but label {label} has {len(members)}; use at most "
                f"{n_pools * len(members)}"
            )
        weights = None  # alike
        if phase.sampler == "least_seen":
            entropy = (root_seed, 1, sampling.round_of_part(part), label)
            ties = np.random.default_rng(np.random.SeedSequence(entropy)).random(len(members))
            order = np.lexsort((ties, history.n_pairs[members]))
            members = np.sort(members[order[: max(phase.pool_size // n_pools, n_each)]])
        elif phase.sampler == "adaptive":
            weights = worth(history.of(members), phase)
        pools.append((members, weights))
    first = part * sampling.runs_per_part
    specs = []
    for run in range(first, first + sampling.runs_per_part):
        victim = run // sampling.attacks_per_victim
        rng = np.random.default_rng(np.random.SeedSequence((root_seed, 0, victim)))
        image_ids: list[int] = []
        for members, weights in pools:
            if weights is None:
                image_ids += rng.choice(members, size=n_each, replace=False).tolist()
            else:
                image_ids += members[draw(weights, n_each, rng)].tolist()
        specs.append(
            RunSpec(
                run=run,
                victim=victim,
                root_seed=root_seed,
                image_ids=tuple(image_ids),
                labels=tuple(labels[image_ids].tolist()),
            )
        )
    return tuple(specs)


def plan_hash(specs: Sequence[RunSpec]) -> str:
    """sha256 over the runs' images, labels and seeds, over the victims that runs share, and over
    random streams that are not their own."""
    content = [
        [
            *(s.run, s.root_seed, s.image_ids, s.labels),
            *[s.victim] * (s.victim != s.run),
            *[[s.stream, s.victim_stream]] * ((s.stream, s.victim_stream) != (None, None)),
        ]
        for s in specs
    ]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
