"""Generate: train victims, attack them, keep what came back as pairs in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.recipe import Recipe
from flows.settings import resolve, to_json
from storage.errors import StoreMismatchError
from storage.files import write_json
from storage.pairs.dataset import Dataset, is_store
from storage.sources.load import ImageSet, Split
from tasks.artifacts import publish_campaign, publish_facts
from tasks.campaign.generate import run_campaign
from tasks.campaign.plan import VICTIMS, Plan, open_store, victims_key
from tasks.campaign.state import CampaignError, log_notice, read_quarantine, resume_if_stopped
from tasks.campaign.status import runs_by_outcome
from tasks.cluster.workers import Workers, dask_client, device_of
from tasks.dataset.curate import exclude_near_duplicates
from tasks.orchestration import flow, task
from tasks.progress import stage_progress
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
) -> dict[str, Any]:
    """Bring the store of one split to its planned number of runs; what is there is not repeated.

    1. Read the images. 2. Plan: which run trains on which. 3. Open the store, or refuse one that
    other settings wrote. 4. Run the missing parts on the workers. 5. Say what the store now holds,
    also if the campaign was cancelled or parts failed. A campaign that was paused or cancelled
    runs again.

    Args:
        recipe: A preset's name, such as `demo`, or a whole recipe.
        store: The job's folder, in which the pairs are stored.
        split: `train` for pairs to learn from, `heldout` for those to be evaluated on.
        settings: Single settings by dotted name, as `--set` takes them.
        workers: Where parts are computed: cluster, number of workers, device.
    """
    return _generate(resolve(recipe, settings), store, split, workers or Workers())


def _generate(
    recipe: Recipe,
    store: Path,
    split: Split,
    workers: Workers,
    *,
    further: str | None = None,
    resume_stopped: bool = True,
) -> dict[str, Any]:
    """`further`: the kind of one of the recipe's further attacks, whose store is another one.
    `resume_stopped`: a campaign that was paused or cancelled runs again."""
    workspace = Workspace(store, recipe.pairs_at)
    device = device_of(workers)
    images = images_of(recipe, split, store)
    campaign = recipe.campaign(split) if further is None else recipe.further_campaigns()[further]
    plan = Plan(campaign, images)
    before = Workspace.found(store)
    if before.recipe.is_file() and before.pairs_at != recipe.pairs_at:
        here, there = (
            "in the folder itself" if at is None else f"at {at}"
            for at in (before.pairs_at, recipe.pairs_at)
        )
        raise StoreMismatchError(
            f"the pairs of {store} are {here}, not {there}; use --set "
            f"pairs_at={before.pairs_at or 'null'}, or another --store"
        )
    dataset = open_store(workspace.pairs(split, further), plan.campaign, images)
    name, title = split if further is None else f"{split}-{further}", TITLES[split]
    if further is not None:
        title += f", {further.replace('_', ' ')}"
    store.mkdir(parents=True, exist_ok=True)
    write_json(workspace.recipe, to_json(recipe))
    if resume_stopped and (notice := resume_if_stopped(dataset.place)):
        log_notice(notice)
    try:
        if len(dataset.receipts) < plan.sampling.n_parts:
            with workspace.timed(f"generate {name}"):
                # A folder of victims that several attacks share, or whose span is asked for. A
                # store begun without has the time of training in its receipts, and gets none now.
                victims, place = None, workspace.pairs("heldout")
                is_read = split == "heldout" and (recipe.further_attacks or recipe.evaluation.span)
                if is_read and "://" not in str(place):
                    folder = Path(place) / VICTIMS
                    is_late = not folder.is_dir() and is_store(place) and Dataset(place).receipts
                    if is_late and further is not None:
                        first = recipe.further_attacks[0].kind
                        folder = Path(workspace.pairs("heldout", first)) / VICTIMS
                    if not is_late or further is not None:
                        victims = str(folder), victims_key(plan.campaign.manifest(plan.images))
                dataset = make_pairs(plan, dataset, workers, device, title, shared_victims=victims)
    except CampaignError:
        dataset.refresh()
        publish_store(dataset, plan, name, store)
        raise
    return publish_store(dataset, plan, name, store)


generate_part = flow(name="generate", flow_run_name="{store}, {split}")(_generate)
"""The same as a part of another flow."""


def images_of(recipe: Recipe, split: Split, store: Path) -> ImageSet:
    """Return the images of one split of the job at `store`. Held-out images leave out near copies
    of training images if the recipe says so (`tasks.dataset.curate`)."""
    images = recipe.images(split)
    if split == "train" or recipe.near_duplicates is None:
        return images
    with stage_progress("Leave out near copies", "part") as advance:
        rest = exclude_near_duplicates(
            images,
            recipe.images("train"),
            threshold=recipe.near_duplicates,
            report=Workspace(store).excluded,
            progress=lambda fraction: advance(100 * fraction, 100),
        )
        advance(100, 100)
    return rest


def publish_store(dataset: Dataset, plan: Plan, name: str, store: Path) -> dict[str, Any]:
    """Publish the facts, phases and coverage of a store on the run's page; return the facts.
    `name`: its split and, if any, its further attack."""
    image_ids, pairs = dataset.image_counts()
    outcomes = runs_by_outcome(dataset.receipts)
    facts = {
        "task": plan.task,
        "runs": dataset.n_runs,
        **{f"runs {name}": count for name, count in outcomes.items() if count},
        "pairs": dataset.n_pairs,
        "confident pairs": int(pairs.sum()),
        "images trained on": len(image_ids),
        "images with a confident pair": int((pairs > 0).sum()),
        "worker seconds": round(sum(r.seconds for r in dataset.receipts), 1),
        "dataset hash": dataset.content_hash,
    }
    if quarantined := read_quarantine(dataset.place):
        facts["parts in quarantine"] = len(quarantined)
    holds = f"{dataset.n_runs:,} runs, {facts['confident pairs']:,} confident pairs"
    key = name.replace("_", "-")
    publish_facts(f"pairs-{key}", facts, f"{holds} ({store}, {name})")
    n_runs = plan.sampling.phases[-1].n_runs
    publish_campaign(dataset, key, title=f"{store}, {name}", n_runs_last_phase=n_runs)
    return facts


@task(name="make pairs")
def make_pairs(
    plan: Plan,
    dataset: Dataset,
    workers: Workers,
    device: str,
    title: str,
    *,
    shared_victims: tuple[str, str] | None = None,
) -> Dataset:
    """Every part that has no receipt, on Dask workers that live as long as this task."""
    if n_stored := len(dataset.receipts):
        n_parts = plan.sampling.n_parts
        log_notice(f"{title}: goes on, {n_stored:,} of {n_parts:,} parts are stored")
    with (
        stage_progress(title, "run") as advance,
        dask_client(workers, threads=plan.campaign.threads) as client,
    ):
        return run_campaign(
            plan, dataset, client, device=device, on_progress=advance, shared_victims=shared_victims
        )
