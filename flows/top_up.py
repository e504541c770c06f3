"""Top up: bring the coverage of a store to what is wanted, and no further.

The planned campaign is run first; then its last phase grows by whole rounds until enough images
have a confident pair. The dataset is the one that a campaign of the final size, planned at once,
would have made. Nothing is remembered but the store: it may be killed at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.coverage_goal import Ending, Goal, Standing, ending_of, standing, statement, with_n_runs
from flows.generate import generate_part
from flows.recipe import Recipe
from flows.settings import resolve
from recon_core.sampling import Sampling
from storage.object_store import Place, open_place
from storage.pairs.dataset import Dataset, is_store
from storage.sources.load import Split
from tasks.artifacts import leave_campaign, leave_facts, leave_progress
from tasks.campaign.state import read_control, read_quarantine
from tasks.campaign.status import last_phase_of, stored_sampling
from tasks.campaign.watch import CampaignError, log_notice
from tasks.cluster.workers import Workers, dask_client, device_of
from tasks.orchestration import flow
from tasks.workspace import Workspace


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
    generate them. 4. Say what came of it: the result's `ending` is why it ended.
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
    goal = Goal(
        coverage=coverage,
        n_runs_at_most=2 * job.sampling.n_runs if n_runs_at_most is None else n_runs_at_most,
        step=step,
        stall_rounds=stall_rounds,
    )
    job = job.as_far_as_stored()
    goal.check(job.sampling)
    before = standing(job.place, goal)
    progress = leave_progress(f"top-up-progress-{split}", f"Towards coverage {coverage} of {store}")
    progress(before.coverage / coverage)
    ending, now, job = grow(job, goal, before, workers or Workers(), progress)
    why = statement(ending, now, goal, job.place)
    log_notice(why)
    facts = {
        "ending": ending,
        "why": why,
        "coverage before": round(before.coverage, 6),
        "coverage": round(now.coverage, 6),
        "coverage wanted": coverage,
        "images covered": now.n_covered,
        "images": now.n_images,
        "runs added": now.n_runs - before.n_runs,
        "runs": now.n_runs,
        "runs at most": goal.n_runs_at_most,
        "parts in quarantine": len(now.quarantined),
    }
    shown = {name: value for name, value in facts.items() if name not in ("why", "images covered")}
    shown |= {name: f"{facts[name]:.3f}" for name in ("coverage before", "coverage")}
    leave_facts(f"top-up-{split}", shown, f"{why} ({job.title})")
    if is_store(job.place):
        last = job.sampling.phases[-1]
        dataset = Dataset(job.place)
        leave_campaign(dataset, split, title=job.title, n_runs_last_phase=last.n_runs)
    return facts


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
        """The job, its last phase at least as long as what the store was brought to before: that
        is in the recipe beside the store, and in the receipts. What else differs from the store is
        left for `generate` to refuse."""
        if not is_store(self.place):
            return self
        dataset, sampling = Dataset(self.place), self.sampling
        stored = stored_sampling(dataset.manifest, None)
        if stored is None or _up_to_last_phase(stored) != _up_to_last_phase(sampling):
            return self
        recipe = Workspace(self.store).settings()
        n_earlier = sampling.n_runs - sampling.phases[-1].n_runs
        n_parts = dataset.receipts[-1].part + 1 if dataset.receipts else 0
        n_runs = max(
            sampling.n_runs,
            n_earlier + (last_phase_of(recipe, self.split) or 0),
            n_parts * sampling.runs_per_part,
        )
        return self.planned(with_n_runs(sampling, n_runs))


def grow(
    job: Job, goal: Goal, now: Standing, workers: Workers, progress: Callable[[float], None]
) -> tuple[Ending, Standing, Job]:
    """Generates, and plans more, until there is a reason to end: that, where the store stands then,
    and the job with all that was planned. Workers that are started live until then."""
    kept: Workers | None = None
    with ExitStack() as stack:
        while now.state == "running":
            if kept is None and now.n_runs < job.sampling.n_runs:
                kept = stack.enter_context(kept_workers(workers, job.recipe.threads))
            generate_planned(job, kept or workers)
            now = standing(job.place, goal)
            progress(now.coverage / goal.coverage)
            longer = goal.grown(job.sampling)
            ending = ending_of(now, goal, may_grow=longer is not None)
            if ending is not None or longer is None:
                return ending or "bound", now, job
            job = job.planned(longer)
    return now.state, now, job


def generate_planned(job: Job, workers: Workers) -> None:
    """Makes what is planned and missing, unless somebody cancels it, or quarantined parts are in
    the way; CampaignError if it fails otherwise."""
    name = f"{job.title}, {job.sampling.n_runs:,} runs"
    try:
        generate_part.named(name)(job.recipe, job.store, job.split, workers, resume_stopped=False)
    except CampaignError:
        if read_control(job.place).state != "cancelled" and not waits_for_quarantined(job):
            raise


def waits_for_quarantined(job: Job) -> bool:
    """True if every part that is missing is quarantined, or cannot be planned without one that is;
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


@contextmanager
def kept_workers(workers: Workers, threads: int) -> Iterator[Workers]:
    """Workers that several campaigns may use, one after another; they are started once."""
    with dask_client(workers, threads=threads) as client:
        scheduler: Any = client.scheduler
        device: Any = device_of(workers)
        yield Workers(cluster=scheduler.addr, device=device)


def _up_to_last_phase(sampling: Sampling) -> tuple[int, ...]:
    """What has to be alike for two lengths of the last phase to be comparable."""
    return (sampling.runs_per_part, *(phase.n_runs for phase in sampling.phases[:-1]))
