"""Compare: one page that puts several evaluations side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.artifacts import leave_link, leave_table
from tasks.compare import compare as compared
from tasks.compare import open_runs
from tasks.compare_page import write_comparison
from tasks.orchestration import flow
from tasks.report_words import interval, percent, score


@flow(name="compare")
def compare(runs: list[Path], page: Path = Path("compare.html")) -> dict[str, Path]:
    """Put finished evaluations side by side; the first is what the others are compared with.

    1. Read every evaluation. 2. Find what differs, with intervals. 3. Write page, CSV and JSON.
    `runs` are jobs' folders or evaluations' own. Raises ValueError for fewer than two, for one
    without a finished evaluation, or if `page` does not end in .html.
    """
    if page.suffix != ".html":
        raise ValueError(f"--out {page} does not end in .html; the page is one")
    opened = open_runs(runs)
    comparison = compared(opened)
    page.parent.mkdir(parents=True, exist_ok=True)
    written = write_comparison(comparison, opened, page)
    leave_link("comparison", written["page"], "The comparison, one self-contained HTML file")
    leave_table(
        "differences", difference_rows(comparison), f"Difference from {opened[0].name}, targets"
    )
    return written


def difference_rows(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per method and run: the differences of the targets, as a table has them."""
    rows = []
    for found in comparison["differences"]:
        body = found["targets"]
        rows.append(
            {
                "method": found["method"],
                "run": found["run"],
                "images": "paired" if body["paired"] else "unpaired",
                "good": percent(body["good_fraction"]),
                "SSIM": score(body["mean_ssim"]),
                "95 %": interval(body["mean_ssim_interval"]),
                "HaarPSI": score(body["mean_haarpsi"]),
            }
        )
    return rows
