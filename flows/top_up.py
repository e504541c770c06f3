"""Top up: bring the coverage of a store to what is wanted, and no further.

Coverage is the fraction of the split's images that have a confident pair. The planned campaign is
run first; then its last phase grows by whole rounds until enough images are covered. The dataset is
the one that a campaign of the final size, planned at once, would have made. Nothing is remembered
but the store: it may be killed at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np

from flows.generate import generate_part
from flows.recipe import Recipe
from flows.settings import resolve
from recon_core.sampling import Sampling
from recon_core.strict import Count, Natural, Strict, Within
from storage.object_store import Place, open_place
from storage.pairs.dataset import Dataset, is_store
from storage.sources.load import Split
from tasks.artifacts import publish_campaign, publish_facts, publish_progress
from tasks.campaign.state import CampaignError, State, log_notice, read_control, read_quarantine
from tasks.campaign.status import last_phase_of, stored_sampling
from tasks.cluster.workers import Workers, dask_client, device_of
from tasks.devices import Device
from tasks.orchestration import flow
from tasks.workspace import Workspace

StopReason = Literal["reached", "paused", "cancelled", "quarantined", "stalled", "bound"]
"""Enough images are covered; the campaign was paused or cancelled; parts are quarantined; the last
rounds brought no new image; more runs are not allowed."""
DONE = frozenset({"reached", "stalled", "bound"})
"""Reasons that need nobody's help."""


@flow(name="top-up", flow_run_name="{store}, {split}, to {coverage}")
def top_up(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    *,
    coverage: float = 0.85,
    n_runs_at_most: int | None = None,
    step: int = 0,
    stall_rounds: int = 5,
    split: Split = "train",
    settings: dict[str, Any] | None = None,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Bring the store of one split to a coverage: the planned runs, then more until it is there.

    1. Read how far the store is, and leave it alone if somebody paused or cancelled its campaign.
    2. Generate what is planned. 3. While too few images have a confident pair, plan more rounds and
    generate them. 4. Publish the result, whose `ending` is why it ended.
    Raises as `generate`, and ValueError for a number that cannot be.

    Args:
        recipe: A preset's name, such as `demo`, or a whole recipe.
        store: The job's folder.
        coverage: Share of the split's images that are to have a confident pair.
        n_runs_at_most: Bound on the runs of the whole store; by default twice the recipe's plan.
        step: Runs to add at a time; 0 adds one round.
        stall_rounds: Rounds without a newly covered image after which to end.
        split: `train` or `heldout`.
        settings: Single settings by dotted name, as `--set` takes them.
        workers: Where parts are computed: cluster, number of workers, device.
    """
    job = Job(resolve(recipe, settings), store, split)
    rule = StopRule(
        coverage=coverage,
        n_runs_at_most=2 * job.sampling.n_runs if n_runs_at_most is None else n_runs_at_most,
        step=step,
        stall_rounds=stall_rounds,
    )
    job = job.as_far_as_stored()
    rule.check(job.sampling)
    before = progress_of(job.place, rule)
    publish = publish_progress(
        f"top-up-progress-{split}", f"Towards coverage {coverage} of {store}"
    )
    publish(before.coverage / coverage)
    reason, now, job = grow(job, rule, before, workers or Workers(), publish)
    why = statement(reason, now, rule, job.place)
    log_notice(why)
    facts = {
        "ending": reason,
        "why": why,
        "coverage before": round(before.coverage, 6),
        "coverage": round(now.coverage, 6),
        "coverage wanted": coverage,
        "images covered": now.n_covered,
        "images": now.n_images,
        "runs added": now.n_runs - before.n_runs,
        "runs": now.n_runs,
        "runs at most": rule.n_runs_at_most,
        "parts in quarantine": len(now.quarantined),
    }
    shown = {name: value for name, value in facts.items() if name not in ("why", "images covered")}
    shown |= {name: f"{facts[name]:.3f}" for name in ("coverage before", "coverage")}
    publish_facts(f"top-up-{split}", shown, f"{why} ({job.title})")
    if is_store(job.place):
        n_runs = job.sampling.phases[-1].n_runs
        publish_campaign(Dataset(job.place), split, title=job.title, n_runs_last_phase=n_runs)
    return facts


@dataclass(frozen=True, kw_only=True)
class StopRule(Strict):
    """The coverage, or number of runs, at which enough is done: the numbers of `top_up`."""

    coverage: Annotated[float, Within("(0, 1]", fix="0.85 is a fraction of the images")]
    n_runs_at_most: int
    step: Natural
    stall_rounds: Count

    def check(self, sampling: Sampling) -> None:
        """ValueError if a campaign of this sampling cannot grow under this rule."""
        round_runs = sampling.runs_per_part * sampling.parts_per_round
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
        round_runs = sampling.runs_per_part * sampling.parts_per_round
        n_rounds = sampling.n_runs // round_runs + max(1, self.step // round_runs)
        n_runs = min(n_rounds, self.n_runs_at_most // round_runs) * round_runs
        return with_n_runs(sampling, n_runs) if n_runs > sampling.n_runs else None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a store. `n_covered_before` leaves out the last rounds, in which it may stall;
    None if there are too few rounds to tell."""

    state: State = "running"
    n_runs: int = 0
    n_images: int = 0
    n_covered: int = 0
    n_covered_before: int | None = None
    quarantined: tuple[int, ...] = ()

    @property
    def coverage(self) -> float:
        return self.n_covered / self.n_images if self.n_images else 0.0


def progress_of(place: Place, rule: StopRule) -> Progress:
    """Coverage of the store at `place`; nothing if there is none."""
    if not is_store(place):
        return Progress()
    dataset = Dataset(place)
    done = {receipt.part for receipt in dataset.receipts}
    sampling = stored_sampling(dataset.manifest, None)

    def n_covered(parts: Container[int]) -> int:
        covered = [np.zeros(0, np.int64)]
        for receipt in dataset.receipts:
            if receipt.part in parts:
                table = receipt.image_table()
                covered.append(table.image_ids[table.n_pairs > 0])
        return len(np.unique(np.concatenate(covered)))

    covered_before = None
    if sampling is not None and done:
        first = max(done) + 1 - rule.stall_rounds * sampling.parts_per_round
        covered_before = n_covered(range(first)) if first >= 0 else None
    return Progress(
        state=read_control(place).state,
        n_runs=dataset.n_runs,
        n_images=int(dataset.manifest.get("source", {}).get("n", 0)),
        n_covered=n_covered(done),
        n_covered_before=covered_before,
        quarantined=tuple(q.part for q in read_quarantine(place) if q.part not in done),
    )


def stop_reason(now: Progress, rule: StopRule, *, may_grow: bool) -> StopReason | None:
    """The reason to end here, all that was planned being made or given up; None to go on."""
    if now.state != "running":
        return now.state
    # A product that rounding has put above a whole number is that number.
    if now.n_covered >= math.ceil(round(rule.coverage * now.n_images, 6)):
        return "reached"
    if now.quarantined:
        return "quarantined"
    if now.n_covered_before == now.n_covered:
        return "stalled"
    return None if may_grow else "bound"


def statement(reason: StopReason, now: Progress, rule: StopRule, place: Place) -> str:
    """The reason of an end and what to do about it, in a sentence or two."""
    n_rounds, n_runs = rule.stall_rounds, rule.n_runs_at_most
    parts = ", ".join(map(str, now.quarantined[:10]))
    held = (
        f": the campaign is {reason}, and a top-up leaves it so. `palimpsest campaign resume` and "
        "the same again go on"
    )
    sentence = {
        "reached": f" is what was wanted, {rule.coverage}",
        "paused": held,
        "cancelled": held,
        "quarantined": f": in quarantine are {len(now.quarantined)} parts ({parts}); see why in "
        f"{place}/quarantine, then `palimpsest campaign retry` and the same again go on",
        "stalled": f": the last {n_rounds} rounds brought no new image; raise stall_rounds to try "
        "longer, otherwise the attack has to bring more back",
        "bound": f": another round would be more than n_runs_at_most={n_runs} runs; raise it to go "
        "on",
    }[reason]
    return f"coverage {now.coverage:.3f} ({now.n_covered:,} of {now.n_images:,} images){sentence}"


def with_n_runs(sampling: Sampling, n_runs: int) -> Sampling:
    """The sampling with its last phase as long as `n_runs` runs in all need."""
    *earlier, last = sampling.phases
    n_last = n_runs - sum(phase.n_runs for phase in earlier)
    return replace(sampling, phases=(*earlier, replace(last, n_runs=n_last)))


@dataclass(frozen=True)
class Job:
    """The campaign of one split of a job, as far as it is planned."""

    recipe: Recipe
    store: Path
    split: Split

    @property
    def sampling(self) -> Sampling:
        return self.recipe.campaign(self.split).sampling

    @property
    def place(self) -> Place:
        return open_place(Workspace(self.store, self.recipe.pairs_at).pairs(self.split))

    @property
    def title(self) -> str:
        return f"{self.store}, {self.split}"

    def planned(self, sampling: Sampling) -> Job:
        """The same campaign, planned further."""
        return replace(self, recipe=self.recipe.with_sampling(self.split, sampling))

    def as_far_as_stored(self) -> Job:
        """Extend the last phase to the runs that the store has or was planned to have, by its
        receipts and the recipe beside it. `generate` refuses all other differences."""
        if not is_store(self.place):
            return self
        dataset, sampling = Dataset(self.place), self.sampling
        stored = stored_sampling(dataset.manifest, None)
        n_earlier = [phase.n_runs for phase in sampling.phases[:-1]]
        if (
            stored is None
            or [phase.n_runs for phase in stored.phases[:-1]] != n_earlier
            or stored.runs_per_part != sampling.runs_per_part
        ):
            return self
        n_last = last_phase_of(Workspace(self.store).settings(), self.split) or 0
        n_parts = dataset.receipts[-1].part + 1 if dataset.receipts else 0
        stored_runs = max(sum(n_earlier) + n_last, n_parts * sampling.runs_per_part)
        return self.planned(with_n_runs(sampling, max(sampling.n_runs, stored_runs)))


def grow(
    job: Job, rule: StopRule, now: Progress, workers: Workers, publish: Callable[[float], None]
) -> tuple[StopReason, Progress, Job]:
    """Generate and plan more until there is a reason to end. Returns the reason, the progress of
    the store, and the job with all planned runs. Workers that are started live until then."""
    is_started = False
    with ExitStack() as stack:
        while now.state == "running":
            if not is_started and now.n_runs < job.sampling.n_runs:
                client = stack.enter_context(dask_client(workers, threads=job.recipe.threads))
                scheduler, device, is_started = client.scheduler, device_of(workers), True
                workers = Workers(cluster=cast(Any, scheduler).addr, device=cast(Device, device))
            generate_planned(job, workers)
            now = progress_of(job.place, rule)
            publish(now.coverage / rule.coverage)
            longer = rule.grown(job.sampling)
            reason = stop_reason(now, rule, may_grow=longer is not None)
            if reason is not None or longer is None:
                return reason or "bound", now, job
            job = job.planned(longer)
    return now.state, now, job


def generate_planned(job: Job, workers: Workers) -> None:
    """Generate what is planned and missing. Raises CampaignError if that fails, unless somebody
    cancelled it or all that is missing waits for quarantined parts."""
    name = f"{job.title}, {job.sampling.n_runs:,} runs"
    generate = generate_part.renamed(flow_run_name=name)
    try:
        generate(job.recipe, job.store, job.split, workers, resume_stopped=False)
    except CampaignError:
        if read_control(job.place).state != "cancelled" and not waits_for_quarantined(job):
            raise


def waits_for_quarantined(job: Job) -> bool:
    """Tell whether every missing part is quarantined or cannot be planned without one that is;
    otherwise something else has failed."""
    sampling = job.sampling
    done = {receipt.part for receipt in Dataset(job.place).receipts}
    given_up = {q.part for q in read_quarantine(job.place)} - done
    first = min((sampling.round_of_part(part) for part in given_up), default=sampling.n_rounds)
    return all(
        sampling.needs_counts(k) and first in sampling.known_rounds(k)
        for k in range(sampling.n_rounds)
        if not set(sampling.parts_of_round(k)) <= done | given_up
    )
