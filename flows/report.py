"""Report: one page for people, from the evaluation's numbers and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.recipe import Recipe
from flows.report_page import report_of_job
from flows.settings import resolve
from tasks.artifacts import leave_link, leave_picture
from tasks.orchestration import flow
from tasks.progress import stage_progress
from tasks.report.image_grids import contact_sheet, curves_sheet


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
    leave_link("report", page, "The report, one self-contained HTML file")
    leave_picture(
        "report-best-images", contact_sheet(folder), "Best images: originals over methods"
    )
    leave_picture(
        "report-ranked-curves", curves_sheet(folder), "SSIM of the i-th best image; dashed: decoys"
    )
    return page
