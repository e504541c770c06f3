"""Generate: train victims, attack them, keep what came back as pairs in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.heldout import images_of
from flows.presets import Recipe
from flows.settings import resolve, to_json
from storage.dataset import Dataset
from storage.errors import StoreMismatchError
from storage.files import write_json
from storage.sources import Split
from tasks.artifacts import leave_campaign, leave_facts
from tasks.campaign import AnyPlan, Plan, open_store
from tasks.campaign_state import read_quarantine, resume_if_stopped
from tasks.campaign_watch import CampaignError, log_notice
from tasks.generate import run_campaign
from tasks.orchestration import flow, task
from tasks.progress import stage_progress
from tasks.workers import Workers, dask_client, device_of
from tasks.workspace import Workspace

TITLES = {
    "train": "Generate pairs for the restorers",
    "heldout": "Attack the victims to be evaluated",
}


@flow(name="generate", flow_run_name="{store}, {split}")
def generate(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    split: Split = "train",
    settings: dict[str, Any] | None = None,
    workers: Workers | None = None,
    *,
    resume_stopped: bool = True,
) -> dict[str, Any]:
    """Bring the store of one split to its planned number of runs; what is there is not repeated.

    1. Read the images. 2. Plan: which run trains on which. 3. Open the store, or refuse one that
    other settings wrote. 4. Run the missing parts on the workers. 5. Say what the store now holds,
    also if the campaign was cancelled or parts failed. A campaign that was paused or cancelled
    runs again, unless `resume_stopped` is false.
    """
    recipe = resolve(recipe, settings)
    workers = workers or Workers()
    workspace = Workspace(store, recipe.pairs_at)
    device = device_of(workers)
    images = images_of(recipe, split, store)
    plan = Plan(recipe.campaign(split), images)
    _check_place(store, recipe.pairs_at)
    dataset = open_store(workspace.pairs(split), plan.campaign, images)
    store.mkdir(parents=True, exist_ok=True)
    write_json(workspace.recipe, to_json(recipe))
    if resume_stopped and (notice := resume_if_stopped(dataset.place)):
        log_notice(notice)
    try:
        if len(dataset.receipts) < plan.sampling.n_parts:
            with workspace.timed(f"generate {split}"):
                dataset = make_pairs(plan, dataset, workers, device, TITLES[split])
    except CampaignError:
        dataset.refresh()
        leave_store(dataset, plan, split, store)
        raise
    return leave_store(dataset, plan, split, store)


def leave_store(dataset: Dataset, plan: Plan, split: Split, store: Path) -> dict[str, Any]:
    """The facts of a store, which are also left on the run's page: a table of them, one of the
    phases, and a picture of the coverage."""
    facts = dataset_facts(dataset, plan.task)
    quarantined = read_quarantine(dataset.place)
    if quarantined:
        facts["parts in quarantine"] = len(quarantined)
    holds = f"{dataset.n_runs:,} runs, {facts['confident pairs']:,} confident pairs"
    leave_facts(f"pairs-{split}", facts, f"{holds} ({store}, {split})")
    leave_campaign(
        dataset,
        split,
        title=f"{store}, {split}",
        n_runs_last_phase=plan.sampling.phases[-1].n_runs,
    )
    return facts


def _check_place(store: Path, pairs_at: str | None) -> None:
    """A job's pairs stay where they are; StoreMismatchError if they are to be elsewhere now."""
    found = Workspace.found(store)
    if found.recipe.is_file() and found.pairs_at != pairs_at:
        raise StoreMismatchError(
            f"the pairs of {store} are {_where(found.pairs_at)}, not {_where(pairs_at)}; use --set "
            f"pairs_at={found.pairs_at or 'null'}, or another --store"
        )


def _where(pairs_at: str | None) -> str:
    return "in the folder itself" if pairs_at is None else f"at {pairs_at}"


@task(name="make pairs")
def make_pairs(
    plan: AnyPlan, dataset: Dataset, workers: Workers, device: str, title: str
) -> Dataset:
    """Every part that has no receipt, on Dask workers that live as long as this task."""
    if n_stored := len(dataset.receipts):
        n_parts = plan.sampling.n_parts
        log_notice(f"{title}: goes on, {n_stored:,} of {n_parts:,} parts are stored")
    with (
        stage_progress(title, "run") as advance,
        dask_client(workers, threads=plan.campaign.threads) as client,
    ):
        return run_campaign(plan, dataset, client, device=device, on_progress=advance)


def dataset_facts(dataset: Dataset, task_in_words: str) -> dict[str, Any]:
    """What a store holds, in the words a summary uses."""
    outcomes: dict[str, int] = {}
    for receipt in dataset.receipts:
        for name, count in receipt.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count
    image_ids, pairs = dataset.image_counts()
    return {
        "task": task_in_words,
        "runs": dataset.n_runs,
        **{f"runs {name}": count for name, count in outcomes.items() if count},
        "pairs": dataset.n_pairs,
        "confident pairs": int(pairs.sum()),
        "images trained on": len(image_ids),
        "images with a confident pair": int((pairs > 0).sum()),
        "worker seconds": round(sum(r.seconds for r in dataset.receipts), 1),
        "dataset hash": dataset.content_hash,
    }
