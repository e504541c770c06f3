"""Artifacts of a flow on its Prefect page: tables, a picture, how far it is, and a campaign.

Thin on purpose: which facts is the flows' business. Without a server nothing is left anywhere, and
one that goes away ends nothing (`tasks.orchestration`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from storage.pairs.dataset import Dataset
from tasks.campaign.coverage_plot import coverage_plot
from tasks.campaign.status import CampaignStatus, campaign_status, coverage_curve
from tasks.campaign.watch import log_notice
from tasks.orchestration import recorded


def leave_table(key: str, rows: list[dict[str, Any]], description: str) -> None:
    """A table artifact; `key` is lower-case words joined by dashes."""
    recorded(lambda: create_table_artifact(table=rows, key=key, description=description))


def leave_facts(key: str, facts: Mapping[str, Any], description: str) -> None:
    """A table artifact of names and values."""
    rows = [{"what": name, "value": _readable(value)} for name, value in facts.items()]
    leave_table(key, rows, description)


def leave_picture(key: str, png: bytes, description: str) -> None:
    """An image artifact that needs no file server: the PNG is in the artifact itself."""
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    recorded(lambda: create_image_artifact(image_url=url, key=key, description=description))


def leave_link(key: str, path: Path, description: str) -> None:
    """A note that says where on this machine a file is."""
    text = f"`{path.absolute()}`"
    recorded(lambda: create_markdown_artifact(text, key=key, description=description))


def leave_progress(key: str, description: str) -> Callable[[float], None]:
    """A progress artifact; the value to call with the fraction that is done, cut to 0 to 1."""
    made = recorded(lambda: create_progress_artifact(0.0, key=key, description=description))

    def update(fraction: float) -> None:
        progress = 100 * min(1.0, max(0.0, fraction))
        if made is not None:
            recorded(lambda: update_progress_artifact(cast(UUID, made), progress=progress))

    return update


def leave_campaign(
    dataset: Dataset, split: str, *, title: str, n_runs_last_phase: int | None = None
) -> None:
    """The phases of the campaign of `dataset` as a table, its coverage as a picture.

    A store without parts has no picture, one that is no campaign's nothing. A picture that cannot
    be drawn is said in the log and ends nothing: the pairs are stored.
    """
    status = campaign_status(dataset, n_runs_last_phase=n_runs_last_phase)
    if not status.phases:
        return
    leave_table(f"phases-{split}", phase_rows(status), f"What each phase brought ({title})")
    if not dataset.receipts:
        return
    try:
        png = coverage_picture(dataset, status, title)
    except (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, ValueError) as error:
        log_notice(f"the coverage of {title} was not drawn: {type(error).__name__}: {error}")
        return
    leave_picture(f"coverage-{split}", png, f"{status.n_covered:,} images covered ({title})")


def phase_rows(status: CampaignStatus) -> list[dict[str, Any]]:
    """One row per phase, in words that a table's columns have."""
    return [
        {
            "sampler": phase.sampler,
            "runs": f"{phase.n_runs:,}"
            + ("" if phase.n_planned is None else f" of {phase.n_planned:,}"),
            "confident pairs": f"{phase.n_confident:,}",
            "per run": f"{phase.n_confident / phase.n_runs:,.1f}" if phase.n_runs else "",
            "images covered": f"{phase.n_covered:,}",
            "of them new": f"{phase.n_new:,}",
        }
        for phase in status.phases
    ]


def coverage_picture(dataset: Dataset, status: CampaignStatus, title: str) -> bytes:
    """A PNG of the store's coverage, which bends where a phase begins; ValueError without parts."""
    runs_per_part = dataset.receipts[0].n_runs if dataset.receipts else 1
    starts: list[tuple[int, str]] = []
    bends, first = [], 0
    for phase in status.phases:
        if first <= status.n_runs and (phase.n_runs or not starts):
            starts.append((first, phase.sampler))
        first += phase.n_runs
        bends.append(first // runs_per_part - 1)
    curve = coverage_curve(dataset.receipts, also=bends)
    return coverage_plot(curve, title=title, n_images=status.n_images, phases=starts)


def _readable(value: Any) -> Any:
    """A whole number with its thousands apart, as people read it."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else value
