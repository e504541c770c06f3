"""A study of recovery: train autoencoders, ask them for their images, and say what comes back."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.families.autoencoder.studies import command, resolve_recovery, to_json
from flows.study import claim_rows
from storage.errors import StorageError
from storage.files import write_file, write_json
from storage.object_store import open_place
from tasks.artifacts import leave_link, leave_table
from tasks.campaign.plan import sha256_of
from tasks.campaign.state import resume_if_stopped
from tasks.campaign.watch import Pace, Watch, log_notice
from tasks.cluster.workers import Workers, dask_client, device_of, usable_cores
from tasks.families.autoencoder.study.claims import check_recovery
from tasks.families.autoencoder.study.figure_specs import describe_figures
from tasks.families.autoencoder.study.images import Sources
from tasks.families.autoencoder.study.page import RECOVERY_PAGE
from tasks.families.autoencoder.study.plan import RecoveryPlan
from tasks.families.autoencoder.study.record import (
    PAPER,
    PICTURES,
    QUESTION,
    RECORD,
    SCHEMA,
    TITLE,
    VERSION,
    describe_recovery,
    pictures_of,
)
from tasks.families.autoencoder.study.training import STATE_SECONDS
from tasks.orchestration import flow, task
from tasks.progress import stage_progress
from tasks.study.executor import Outcome, run_units, say_what_is_there
from tasks.study.products import SETTINGS
from tasks.study.record import created_now


class UnitsFailedError(StorageError):
    """Some units failed, and the record and page are of the others."""


@flow(name="study-autoencoder", flow_run_name="{store}")
def run_recovery_study(
    store: Path,
    preset: str | None = None,
    settings: dict[str, Any] | None = None,
    *,
    only: str = "",
    workers: Workers | None = None,
    state_seconds: float = STATE_SECONDS,
) -> Path:
    """Bring the study at `store` to its end; what is there is not repeated. Returns its page.

    `preset`, `settings` and `only` as in `flows.families.autoencoder.studies.resolve_recovery`; by
    default those of the store. `state_seconds`: between two saves of a training that goes on. 1.
    Read the images. 2. Plan. 3. Train the victims and the inpainter, and ask every victim at every
    loss, on the workers. 4. Check the paper's claims. 5. Write recovery.json, its pictures and the
    page. Raises UnitsFailedError after all that, if something failed, naming it.
    """
    study = resolve_recovery(preset, settings, store, only=only)
    workers = workers or Workers()
    sources = Sources.read(study)
    plan = RecoveryPlan(
        study, sources, store, device=device_of(workers), state_seconds=state_seconds
    )
    store.mkdir(parents=True, exist_ok=True)
    write_json(store / SETTINGS, to_json(study))
    if notice := resume_if_stopped(open_place(str(store))):
        log_notice(notice)
    outcome = make_products(plan, workers)
    record = make_record(plan, outcome)
    write_file(store / PICTURES, pictures_of(plan, outcome, record))
    write_json(store / RECORD, record)
    page = RECOVERY_PAGE.write(store)
    leave_table("recovery", recovery_rows(record), f"What came back from {len(study.victims)} "
                "autoencoders at their lowest losses")  # fmt: skip
    leave_table("claims", claim_rows(record), "The claims of paper 000")
    leave_link("study-autoencoder", page, "The page of the study")
    if outcome.failed:
        raise UnitsFailedError(
            f"{len(outcome.failed)} of the study's units failed, the page has the others: "
            + "; ".join(f"{unit}: {why}" for unit, why in sorted(outcome.failed.items()))
            + "; run the same command again to retry them"
        )
    return page


@task(name="make products")
def make_products(plan: RecoveryPlan, workers: Workers) -> Outcome:
    """Every unit's product, on Dask workers that live as long as this task."""
    say_what_is_there("Study autoencoder", Path(plan.root) / "cells", plan.n_units)
    with (
        stage_progress("Study autoencoder", "unit") as advance,
        dask_client(workers, threads=plan.study.threads) as client,
    ):
        return run_units(
            plan.first_units(),
            client,
            threads=plan.study.threads,
            watch=Watch(
                open_place(plan.root),
                client,
                device=plan.device,
                pace=Pace(),
                on_notice=log_notice,
            ),
            then=plan.more_units,
            on_progress=advance,
            total=plan.n_units,
        )


def make_record(plan: RecoveryPlan, outcome: Outcome) -> dict[str, Any]:
    """recovery.json."""
    study = plan.study
    settings = to_json(study)
    hashes = {
        f"{data} {size} {split}": images.content_hash
        for (data, size), splits in plan.sources.sets.items()
        for split, images in splits.items()
    }
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "name": study.name,
        "preset": study.preset,
        "title": TITLE,
        "question": QUESTION,
        "paper": PAPER,
        "command": command(study),
        "created": created_now(),
        "machine": f"{platform.processor() or platform.machine()}, {usable_cores()} cores",
        "fingerprint": sha256_of([settings, hashes]),
        "settings": settings,
        **describe_recovery(plan, outcome),
    }
    record["figures"] = describe_figures(record)
    record["claims"] = check_recovery(record)
    return record


def recovery_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per victim and method, at the lowest loss that was reached, over all masks."""
    rows = []
    for victim in record["victims"]:
        if not victim["levels"]:
            last = victim["last"]["loss"]
            rows.append({"victim": victim["title"], "loss": "none", "method": f"last {last:.2g}"})
            continue
        level = min(at["level"] for at in victim["levels"])
        for method in record["methods"]:
            cells = [
                cell
                for cell in record["cells"]
                if (cell["victim"], cell["level"]) == (victim["name"], level)
                and cell["method"] == method["name"]
                and (cell["split"], cell["sigma"]) == ("train", 0.0)
            ]
            if not cells:
                continue
            n = sum(cell["n"] for cell in cells)
            rows.append(
                {
                    "victim": victim["title"],
                    "loss": f"{level:g}",
                    "method": method["title"],
                    "accurate": f"{sum(c['n_accurate'] for c in cells)}/{n}",
                    "approximate": f"{sum(c['n_approximate'] for c in cells)}/{n}",
                    "PSNR": f"{sum(c['n'] * c['psnr'][0] for c in cells) / n:.1f} dB",
                }
            )
    names = ("victim", "loss", "method", "accurate", "approximate", "PSNR")
    return [{name: row.get(name, "") for name in names} for row in rows]
