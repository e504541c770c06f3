"""Report: one page for people, from the evaluation's numbers and pictures."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows.presets import Recipe
from flows.settings import command, resolve, to_json
from storage.dataset import Dataset, is_store
from storage.errors import StorageError
from tasks.artifacts import leave_link, leave_picture
from tasks.campaign import code_version
from tasks.contact_sheet import contact_sheet, curves_sheet
from tasks.orchestration import flow
from tasks.report import saved_context, write_report
from tasks.report_record import evaluation_folder
from tasks.workers import usable_cores
from tasks.workspace import Workspace

SHOWN_VERSIONS = ("palimpsest", "torch", "numpy", "zarr", "dask", "prefect", "scikit-image", "piq")


@flow(name="report", flow_run_name="{store}")
def report(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write the report of a finished evaluation; needs nothing but the workspace.

    1. Gather what was run, with which settings and for how long. 2. Write the page.
    Raises StorageError if there is no evaluation yet.
    """
    recipe = resolve(recipe, settings)
    workspace = Workspace(store, recipe.pairs_at)
    if not (workspace.evaluation / "evaluation.json").is_file():
        raise StorageError(
            f"{workspace.evaluation} has no evaluation.json; run: palimpsest evaluate "
            f"--store {store}"
        )
    page = write_report(workspace.evaluation, context(recipe, workspace))
    leave_report(page, workspace.evaluation)
    return page


@flow(name="rebuild report", flow_run_name="{run}")
def rebuild(run: Path, page: Path | None = None) -> Path:
    """Write the report of a finished evaluation from its folder alone.

    1. Read evaluation.json and pictures.npz. 2. Write the page, by default beside them.
    `run` is a job's folder or the evaluation's own; no store is opened. What the evaluation itself
    does not know (times, settings of the job) is taken from an earlier report there, if any.
    Raises ValueError for a folder without a finished evaluation, or of another version.
    """
    folder = evaluation_folder(run)
    page = write_report(folder, saved_context(folder), page=page)
    leave_report(page, folder)
    return page


def leave_report(page: Path, folder: Path) -> None:
    """On the flow's page: where the report is, the best pictures and the ranked curves."""
    leave_link("report", page, "The report, one self-contained HTML file")
    leave_picture(
        "report-best-images", contact_sheet(folder), "Best images: originals over methods"
    )
    leave_picture(
        "report-ranked-curves", curves_sheet(folder), "SSIM of the i-th best image; dashed: decoys"
    )


def context(recipe: Recipe, workspace: Workspace) -> dict[str, Any]:
    """Everything the page says beyond the scores."""
    train_store = workspace.pairs("train")
    pairs: dict[str, Any] = {}
    if is_store(train_store):
        dataset = Dataset(train_store)
        pairs = {
            "n_runs": dataset.n_runs,
            "n_pairs": dataset.n_pairs,
            "n_targets": dataset.n_targets,
            "content_hash": dataset.content_hash,
        }
    cards = {
        name: json.loads((workspace.restorer(name) / "model.json").read_text())["meta"]
        for name in recipe.restorers
        if (workspace.restorer(name) / "model.json").is_file()
    }
    return {
        "recipe": to_json(recipe),
        "seeds": {
            "victims of the restorers": recipe.campaign("train").root_seed,
            "held-out victims": recipe.campaign("heldout").root_seed,
            "curation": recipe.curation.seed,
            "decoys": recipe.evaluation.decoy_seed,
        },
        "stages": [{"name": k, "seconds": v} for k, v in workspace.timings.items()],
        "pairs": pairs,
        "restorers": cards,
        "versions": {
            "code": code_version(),
            "python": platform.python_version(),
            **{name: version(name) for name in SHOWN_VERSIONS},
        },
        "machine": f"{platform.machine()}, {usable_cores()} cores, {platform.system()}",
        "command": command(recipe, workspace.root),
        "created": datetime.now(UTC).isoformat(timespec="minutes"),
    }
