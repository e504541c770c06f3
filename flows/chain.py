"""The whole chain: from images to a report, each stage resumable by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.curate import curate
from flows.evaluate import evaluate
from flows.generate import generate
from flows.presets import Recipe
from flows.report import report
from flows.settings import resolve
from flows.train import train
from tasks.orchestration import flow
from tasks.workers import Workers


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
    """
    recipe = resolve(recipe, settings)
    workers = workers or Workers()
    pairs = generate(recipe, store, "train", workers=workers)
    balance = curate(recipe, store)
    restorers = train(recipe, store, device=workers.device)
    heldout = generate(recipe, store, "heldout", workers=workers)
    evaluation = evaluate(recipe, store, device=workers.device, workers=workers)
    page = report(recipe, store)
    return {
        "pairs": pairs,
        "balance": balance,
        "restorers": restorers,
        "heldout": heldout,
        "evaluation": evaluation,
        "report": page,
    }
