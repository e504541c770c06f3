"""Goals of a store's coverage, the fraction of the split's images that have a confident pair, and
the reasons for which a top-up ends before one is reached."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from recon_core.sampling import Sampling
from storage.object_store import Place
from storage.pairs.dataset import Dataset, is_store
from tasks.campaign.state import State, read_control, read_quarantine
from tasks.campaign.status import stored_sampling

Ending = Literal["reached", "paused", "cancelled", "quarantined", "stalled", "bound"]
"""Why it ended: enough images are covered; somebody holds the campaign; parts were given up; no
round brings a new image; more runs are not allowed."""

DONE = frozenset({"reached", "stalled", "bound"})
"""Endings that need nobody's help."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The coverage, or number of runs, at which enough is done: the numbers of `flows.top_up`."""

    coverage: float
    n_runs_at_most: int
    step: int
    stall_rounds: int

    def __post_init__(self) -> None:
        if not 0 < self.coverage <= 1:
            raise ValueError(
                f"coverage={self.coverage} is no fraction of the images; give a number above 0 and "
                "up to 1, for example 0.85"
            )
        if self.step < 0:
            raise ValueError(f"step={self.step} must be 0 (one round) or a number of runs")
        if self.stall_rounds < 1:
            raise ValueError(f"stall_rounds={self.stall_rounds} must be at least 1")

    def check(self, sampling: Sampling) -> None:
        """ValueError if a campaign of this sampling cannot grow towards the goal."""
        round_runs = runs_per_round(sampling)
        if self.step % round_runs:
            raise ValueError(
                f"step={self.step} is not a multiple of the {round_runs} runs of a round; use "
                f"{-(-self.step // round_runs) * round_runs}, or 0 for one round"
            )
        if self.n_runs_at_most < sampling.n_runs:
            raise ValueError(
                f"n_runs_at_most={self.n_runs_at_most} is below the {sampling.n_runs} runs that "
                f"are planned already; use {sampling.n_runs} or more"
            )

    def grown(self, sampling: Sampling) -> Sampling | None:
        """With a longer last phase, which ends with a round; None if the bound leaves no round."""
        round_runs = runs_per_round(sampling)
        n_rounds = sampling.n_runs // round_runs + max(1, self.step // round_runs)
        n_runs = min(n_rounds, self.n_runs_at_most // round_runs) * round_runs
        return with_n_runs(sampling, n_runs) if n_runs > sampling.n_runs else None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Coverage that a store has reached. `n_covered_before` leaves out the last rounds, in which
    it may stall; None if there are too few to say."""

    state: State = "running"
    n_runs: int = 0
    n_images: int = 0
    n_covered: int = 0
    n_covered_before: int | None = None
    quarantined: tuple[int, ...] = ()

    @property
    def coverage(self) -> float:
        return self.n_covered / self.n_images if self.n_images else 0.0

    @property
    def text(self) -> str:
        return f"coverage {self.coverage:.3f} ({self.n_covered:,} of {self.n_images:,} images)"


def standing(place: Place, goal: Goal) -> Standing:
    """Coverage of the store at `place`; nothing if there is none."""
    if not is_store(place):
        return Standing()
    dataset = Dataset(place)
    done = {receipt.part for receipt in dataset.receipts}
    sampling = stored_sampling(dataset.manifest, None)
    covered_before = None
    if sampling is not None and done:
        first = max(done) + 1 - goal.stall_rounds * sampling.parts_per_round
        covered_before = _n_covered(dataset, range(first)) if first >= 0 else None
    return Standing(
        state=read_control(place).state,
        n_runs=dataset.n_runs,
        n_images=int(dataset.manifest.get("source", {}).get("n", 0)),
        n_covered=_n_covered(dataset, done),
        n_covered_before=covered_before,
        quarantined=tuple(q.part for q in read_quarantine(place) if q.part not in done),
    )


def ending_of(now: Standing, goal: Goal, *, may_grow: bool) -> Ending | None:
    """The reason to end here, all that was planned being made or given up; None to go on."""
    if now.state != "running":
        return now.state
    # A product that rounding has put above a whole number is that number.
    if now.n_covered >= math.ceil(round(goal.coverage * now.n_images, 6)):
        return "reached"
    if now.quarantined:
        return "quarantined"
    if now.n_covered_before == now.n_covered:
        return "stalled"
    return None if may_grow else "bound"


def statement(ending: Ending, now: Standing, goal: Goal, place: Place) -> str:
    """The reason of an end and what to do about it, in a sentence or two."""
    match ending:
        case "reached":
            return f"{now.text} is what was wanted, {goal.coverage}"
        case "paused" | "cancelled":
            return (
                f"{now.text}: the campaign is {ending}, and a top-up leaves it so. `palimpsest "
                "campaign resume` and the same again go on"
            )
        case "quarantined":
            parts = ", ".join(map(str, now.quarantined[:10]))
            return (
                f"{now.text}: in quarantine are {len(now.quarantined)} parts ({parts}); see why in "
                f"{place}/quarantine, then `palimpsest campaign retry` and the same again go on"
            )
        case "stalled":
            return (
                f"{now.text}: the last {goal.stall_rounds} rounds brought no new image; raise "
                "stall_rounds to try longer, otherwise the attack has to bring more back"
            )
        case "bound":
            return (
                f"{now.text}: another round would be more than n_runs_at_most="
                f"{goal.n_runs_at_most} runs; raise it to go on"
            )


def runs_per_round(sampling: Sampling) -> int:
    return sampling.runs_per_part * sampling.parts_per_round


def with_n_runs(sampling: Sampling, n_runs: int) -> Sampling:
    """The sampling with its last phase as long as `n_runs` runs in all need."""
    *earlier, last = sampling.phases
    n_last = n_runs - sum(phase.n_runs for phase in earlier)
    return replace(sampling, phases=(*earlier, replace(last, n_runs=n_last)))


def _n_covered(dataset: Dataset, parts: Container[int]) -> int:
    """How many images have a confident pair in some parts."""
    covered = [np.zeros(0, np.int64)]
    for receipt in dataset.receipts:
        if receipt.part in parts:
            table = receipt.image_table()
            covered.append(table.image_ids[table.n_pairs > 0])
    return len(np.unique(np.concatenate(covered)))
