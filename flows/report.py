"""Report: one page for people, from the evaluation's numbers and pictures, and what the job knows
beyond the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.recipe import Recipe
from flows.settings import command, portable, resolve, to_json
from storage.checkpoints import read_meta
from storage.errors import StorageError
from storage.pairs.dataset import Dataset, is_store
from tasks.artifacts import publish_link, publish_picture
from tasks.campaign.plan import made_with
from tasks.orchestration import flow
from tasks.progress import stage_progress
from tasks.report.image_grids import contact_sheet, curves_sheet
from tasks.report.page import write_report
from tasks.training.loop import MODEL
from tasks.workspace import Workspace

SHOWN_VERSIONS = ("palimpsest", "torch", "numpy", "zarr", "dask", "prefect", "scikit-image", "piq")


@flow(name="report", flow_run_name="{store}")
def report(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write the report of a finished evaluation; needs nothing but the workspace.

    1. Gather what was run, with which settings and for how long. 2. Write the page. 3. Leave on the
    flow's page where it is, the best pictures and the ranked curves. Raises StorageError if there
    is no evaluation yet.
    """
    with stage_progress("Report", "step"):
        page = report_of_job(resolve(recipe, settings), store)
    folder = page.parent
    publish_link("report", page, "The report, one self-contained HTML file")
    publish_picture(
        "report-best-images", contact_sheet(folder), "Best images: originals over methods"
    )
    publish_picture(
        "report-ranked-curves", curves_sheet(folder), "SSIM of the i-th best image; dashed: decoys"
    )
    return page


def report_of_job(recipe: Recipe, store: Path) -> Path:
    """The report of the job at `store`, written from its evaluation; needs nothing else.

    Raises StorageError if there is no evaluation yet.
    """
    workspace = Workspace(store, recipe.pairs_at)
    if not (workspace.evaluation / "evaluation.json").is_file():
        raise StorageError(
            f"{workspace.evaluation} has no evaluation.json; run: palimpsest evaluate "
            f"--store {store}"
        )
    train_store = workspace.pairs("train")
    pairs: dict[str, Any] = {}
    if is_store(train_store):
        dataset = Dataset(train_store)
        names = ("n_runs", "n_pairs", "n_targets", "content_hash")
        pairs = {name: getattr(dataset, name) for name in names}
    cards = {
        name: card
        for name in recipe.restorers
        if (card := read_meta(workspace.restorer(name), MODEL)) is not None
    }
    context: dict[str, Any] = {
        "recipe": portable(to_json(recipe)),
        "seeds": {
            "victims of the restorers": recipe.campaign("train").root_seed,
            "held-out victims": recipe.campaign("heldout").root_seed,
            "curation": recipe.curation.seed,
            "decoys": recipe.evaluation.decoy_seed,
        },
        "stages": [{"name": k, "seconds": v} for k, v in workspace.timings.items()],
        "pairs": pairs,
        "restorers": cards,
        "command": portable(command(recipe, workspace.root)),
        **made_with(SHOWN_VERSIONS),
    }
    return write_report(workspace.evaluation, context)
