"""Which images a run trains on: planned in rounds, never raced for.

A campaign is a sequence of phases; a phase is a number of runs and a sampler. Runs are grouped into
parts (the work of one task), parts into rounds. Round k is a pure function of the settings, the
labels and the pair counts known from rounds <= k - lag, so the plan is the same whatever the
number of workers, their speed, or how often they died. Paper 001, section 2: 100,000 uniform runs,
then 50,000 on the 4,000 least-seen images (there updated after every run, here every round).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int64

from recon_core.types import RunSpec

CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
VEHICLES = frozenset({"airplane", "automobile", "ship", "truck"})


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`n_runs` runs whose images are drawn by one sampler.

    `uniform`: from all images. `least_seen`: from the `pool_size` images with the fewest confident
    pairs so far, equally many of each label; ties are broken at random.
    """

    sampler: Literal["uniform", "least_seen"] = "uniform"
    n_runs: int = 1
    pool_size: int = 4000
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.n_runs < 1:
            raise ValueError(f"n_runs={self.n_runs} must be at least 1")
        if self.pool_size < 2:
            raise ValueError(f"pool_size={self.pool_size} must be at least 2")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How many images a run trains on, and how runs are grouped into parts and rounds.

    `lag`: a round may be planned once all rounds up to `lag` before it are finished, so up to
    `lag` rounds are in flight at a time.
    """

    images_per_run: int = 300
    phases: tuple[Phase, ...] = (
        Phase(n_runs=100_000),
        Phase(sampler="least_seen", n_runs=50_000),
    )
    runs_per_part: int = 50
    parts_per_round: int = 8
    lag: int = 2
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.images_per_run < 2:
            raise ValueError(
                f"images_per_run={self.images_per_run} is too small; a run needs an image of each "
                "label, so at least 2"
            )
        for name in ("runs_per_part", "parts_per_round", "lag"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.phases:
            raise ValueError("phases=() plans no run; give at least one Phase(n_runs=...)")
        for phase in self.phases:
            if phase.n_runs % self.runs_per_part:
                rounded = -(-phase.n_runs // self.runs_per_part) * self.runs_per_part
                raise ValueError(
                    f"n_runs={phase.n_runs} is not a multiple of "
                    f"runs_per_part={self.runs_per_part}; use {rounded}, or other parts"
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
        """The parts of a round; the last round may be shorter."""
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
        """Whether the round's plan depends on earlier rounds' results."""
        return any(
            self.phase_of_part(p).sampler != "uniform" for p in self.parts_of_round(round_index)
        )

    def known_rounds(self, round_index: int) -> range:
        """The rounds whose results the plan of `round_index` may use."""
        return range(max(0, round_index - self.lag + 1))


def binary_labels(
    labels: Int64[np.ndarray, " n"], class_names: Sequence[str]
) -> tuple[Int64[np.ndarray, " n"], str]:
    """(0 or 1 per image, the task in words) for the binary victim.

    CIFAR-10's classes become vehicles against animals (Haim et al.); of any other classes the first
    half, in order, is set against the rest. Raises ValueError for fewer than two classes.
    """
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
    task = f"{_and(class_names[:half])} against {_and(class_names[half:])}"
    return (labels >= half).astype(np.int64), task


def class_labels(
    labels: Int64[np.ndarray, " n"], class_names: Sequence[str], n_classes: int
) -> tuple[Int64[np.ndarray, " n"], str]:
    """(class per image or -1, the task in words) for a victim with an output per class.

    Its classes are the first `n_classes` of the source (002, section 4.2, takes 2, 3, 4, 5 and 10
    of CIFAR-10's); images of others are -1 and not used. Raises ValueError if there are fewer.
    """
    if len(class_names) < n_classes:
        raise ValueError(
            f"n_classes={n_classes}, but the source has {len(class_names)} "
            f"({', '.join(class_names)}); use at most that many"
        )
    task = " against ".join(class_names[:n_classes])
    return np.where(labels < n_classes, labels, -1).astype(np.int64), task


def check_balance(images_per_run: int, n_labels: int) -> None:
    """Raises ValueError if a run cannot have equally many images of each label."""
    if images_per_run % n_labels:
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
    seen: Int64[np.ndarray, " n"],
    root_seed: int,
    n_labels: int = 2,
) -> tuple[RunSpec, ...]:
    """The runs of one part: which images each trains on, equally many of each label.

    `labels` are 0 to n_labels - 1 per image of the source, -1 for one that is not used; `seen` is
    the number of confident pairs per image from `sampling.known_rounds`. The draw of run r depends
    on (root_seed, r) alone, the pool of `least_seen` on (root_seed, round). Raises ValueError if
    a label has too few images, or if the images of a run cannot be shared equally.
    """
    check_balance(sampling.images_per_run, n_labels)
    n_each = sampling.images_per_run // n_labels
    phase = sampling.phase_of_part(part)
    pools = []
    for label in range(n_labels):
        members = np.flatnonzero(labels == label)
        if len(members) < n_each:
            raise ValueError(
                f"images_per_run={sampling.images_per_run} needs {n_each} images of each of the "
                f"{n_labels} labels, but label {label} has {len(members)}; use at most "
                f"{n_labels * len(members)}"
            )
        if phase.sampler == "least_seen":
            members = _least_seen(
                members,
                seen,
                max(phase.pool_size // n_labels, n_each),
                (root_seed, 1, sampling.round_of_part(part), label),
            )
        pools.append(members)
    first = part * sampling.runs_per_part
    runs = range(first, first + sampling.runs_per_part)
    return tuple(_plan_run(run, pools, n_each, root_seed) for run in runs)


def plan_hash(specs: Sequence[RunSpec]) -> str:
    """sha256 over the runs' images, labels and seeds."""
    content = [[s.run, s.root_seed, s.image_ids, s.labels] for s in specs]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _plan_run(
    run: int, pools: Sequence[Int64[np.ndarray, " _"]], n_each: int, root_seed: int
) -> RunSpec:
    rng = np.random.default_rng(np.random.SeedSequence((root_seed, 0, run)))
    image_ids = [rng.choice(pool, size=n_each, replace=False) for pool in pools]
    return RunSpec(
        run=run,
        root_seed=root_seed,
        image_ids=tuple(int(i) for ids in image_ids for i in ids),
        labels=tuple(label for label in range(len(pools)) for _ in range(n_each)),
    )


def _least_seen(
    members: Int64[np.ndarray, " k"],
    seen: Int64[np.ndarray, " n"],
    size: int,
    entropy: tuple[int, ...],
) -> Int64[np.ndarray, " j"]:
    """The `size` members with the smallest counts, ties at random, in ascending order."""
    rng = np.random.default_rng(np.random.SeedSequence(entropy))
    order = np.lexsort((rng.random(len(members)), seen[members]))
    return np.sort(members[order[:size]])


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
