"""Artifacts of a flow on its Prefect page: tables, pictures, how far it is, and a campaign; nothing
without a server."""

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
from tasks.campaign.state import log_notice
from tasks.campaign.status import campaign_status, coverage_picture
from tasks.orchestration import recorded


def publish_table(key: str, rows: list[dict[str, Any]], description: str) -> None:
    """Publish a table; `key` is lower-case words joined by dashes."""
    recorded(lambda: create_table_artifact(table=rows, key=key, description=description))


def publish_facts(key: str, facts: Mapping[str, Any], description: str) -> None:
    """Publish names and values as a table."""
    rows = [
        {"what": name, "value": f"{value:,}" if type(value) is int else value}
        for name, value in facts.items()
    ]
    publish_table(key, rows, description)


def publish_picture(key: str, png: bytes, description: str) -> None:
    """Publish a PNG inside the artifact itself, which needs no file server."""
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    recorded(lambda: create_image_artifact(image_url=url, key=key, description=description))


def publish_link(key: str, path: Path, description: str) -> None:
    """Publish where on this machine a file is."""
    text = f"`{path.absolute()}`"
    recorded(lambda: create_markdown_artifact(text, key=key, description=description))


def publish_progress(key: str, description: str) -> Callable[[float], None]:
    """Publish a progress bar; the returned function sets it to a fraction, clipped to [0, 1]."""
    made = recorded(lambda: create_progress_artifact(0.0, key=key, description=description))

    def update(fraction: float) -> None:
        progress = 100 * min(1.0, max(0.0, fraction))
        if made is not None:
            recorded(lambda: update_progress_artifact(cast(UUID, made), progress=progress))

    return update


def publish_campaign(
    dataset: Dataset, split: str, *, title: str, n_runs_last_phase: int | None = None
) -> None:
    """Publish the phases of the campaign of `dataset` as a table and its coverage as a picture;
    nothing for a store of something else. A picture that cannot be drawn is a notice in the log."""
    status = campaign_status(dataset, n_runs_last_phase=n_runs_last_phase)
    if not status.phases:
        return
    columns = ("sampler", "runs", "confident pairs", "per run", "images covered", "of them new")
    rows = [dict(zip(columns, phase.texts(), strict=True)) for phase in status.phases]
    publish_table(f"phases-{split}", rows, f"What each phase brought ({title})")
    if not dataset.receipts:
        return
    try:
        png = coverage_picture(status, dataset.receipts, title)
    except (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, ValueError) as error:
        log_notice(f"the coverage of {title} was not drawn: {type(error).__name__}: {error}")
        return
    publish_picture(f"coverage-{split}", png, f"{status.n_covered:,} images covered ({title})")
