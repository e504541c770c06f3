"""The whole chain: from images to a report, each stage resumable by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flows.evaluate import evaluate
from flows.generate import generate
from flows.recipe import Recipe
from flows.report import report
from flows.settings import resolve
from flows.train import curate, train
from recon_core.precision import require_precision
from storage.sources.load import Split
from tasks.campaign.plan import Plan
from tasks.cluster.workers import Workers, check_workers
from tasks.devices import resolve_device
from tasks.evaluation.evaluate import open_elsewhere
from tasks.evaluation.settings import check_names
from tasks.evaluation.victims import check_decoys
from tasks.orchestration import flow

SPLITS: tuple[Split, ...] = ("train", "heldout")


@flow(name="chain", flow_run_name="{store}")
def chain(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    settings: dict[str, Any] | None = None,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Everything, in order; what is finished is not repeated.

    1. Victims trained and attacked, their pairs stored. 2. Pairs balanced over the images.
    3. Restorers trained on them. 4. Other victims, on images no restorer has seen, attacked.
    5. Every method scored, on targets and on decoys. 6. The report.

    Args:
        recipe: A preset's name, such as `demo`, or a whole recipe.
        store: The job's folder.
        settings: Single settings by dotted name, as `--set` takes them.
        workers: Where parts are computed: cluster, number of workers, device.
    """
    recipe = resolve(recipe, settings)
    workers = workers or Workers()
    held = [recipe.images(split) for split in SPLITS]  # read once: every stage finds them so
    check_decoys(Plan(recipe.campaign("heldout"), recipe.images("heldout")))
    pairs = generate(recipe, store, "train", workers=workers)
    balance = curate(recipe, store)
    restorers = train(recipe, store, device=workers.device)
    heldout = generate(recipe, store, "heldout", workers=workers)
    evaluation = evaluate(recipe, store, device=workers.device, workers=workers)
    page = report(recipe, store)
    del held
    return {
        "pairs": pairs,
        "balance": balance,
        "restorers": restorers,
        "heldout": heldout,
        "evaluation": evaluation,
        "report": page,
    }


def check_chain(recipe: Recipe, workers: Workers) -> None:
    """Raises what a stage would raise of its settings, its images, the device or the cluster.

    Before anything is started or deleted; nothing is written.
    """
    check_workers(workers)
    here = resolve_device(workers.device)
    images = {split: recipe.images(split) for split in SPLITS}
    for split, found in images.items():
        Plan(recipe.campaign(split), found)
    check_decoys(Plan(recipe.campaign("heldout"), images["heldout"]))
    for campaign in recipe.further_campaigns().values():
        Plan(campaign, images["heldout"])
    for plan in recipe.restorers.values():
        require_precision(plan.training.precision, torch.device(here))
    check_names(recipe.restorers, taken=recipe.evaluation.external)
    open_elsewhere(recipe.evaluation, images["heldout"], here)
