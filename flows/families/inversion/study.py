"""A study of split classifiers: train them, invert them, and say what a defence is worth."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed import Client

from flows.families.autoencoder.study import UnitsFailedError
from flows.families.inversion.studies import command, resolve_inversion, to_json
from flows.study import claim_rows
from storage.files import write_file, write_json
from storage.object_store import open_place
from tasks.artifacts import leave_link, leave_table
from tasks.campaign.plan import sha256_of
from tasks.campaign.state import resume_if_stopped
from tasks.campaign.watch import Pace, Watch, log_notice
from tasks.cluster.workers import Workers, dask_client, device_of, usable_cores
from tasks.families.inversion.study.claims import check_inversion
from tasks.families.inversion.study.figure_specs import describe_figures
from tasks.families.inversion.study.images import read_sources
from tasks.families.inversion.study.page import INVERSION_PAGE
from tasks.families.inversion.study.plan import InversionPlan
from tasks.families.inversion.study.record import (
    PAPER,
    PICTURES,
    QUESTION,
    RECORD,
    SCHEMA,
    TITLE,
    VERSION,
    describe_inversion,
    pictures_of,
    role_cells,
    sweet_spots,
)
from tasks.families.inversion.study.weights import write_victims
from tasks.orchestration import flow, task
from tasks.progress import Advance, stage_progress
from tasks.study.executor import Outcome, Unit, run_units, say_what_is_there
from tasks.study.products import SETTINGS
from tasks.study.record import created_now


@flow(name="study-inversion", flow_run_name="{store}")
def run_inversion_study(
    store: Path,
    preset: str | None = None,
    settings: dict[str, Any] | None = None,
    *,
    only: str = "",
    workers: Workers | None = None,
) -> Path:
    """Bring the study at `store` to its end; what is there is not repeated. Returns its page.

    `preset`, `settings` and `only` as in `flows.families.inversion.studies.resolve_inversion`; by
    default those of the store. 1. Read the images. 2. Plan. 3. Train and invert the victims of the
    grid, of the cuts and of the synthetic experiment. 4. Choose the sweet spots, train and invert
    these with the other seeds, and train the restorers. 5. Check the paper's claims. 6. Write
    inversion.json, its pictures, the victims that it shows, and the page. Raises UnitsFailedError
    after all that, if something failed, naming it.
    """
    study = resolve_inversion(preset, settings, store, only=only)
    workers = workers or Workers()
    plan = InversionPlan(study, read_sources(study), store, device=device_of(workers))
    store.mkdir(parents=True, exist_ok=True)
    write_json(store / SETTINGS, to_json(study))
    if notice := resume_if_stopped(open_place(str(store))):
        log_notice(notice)
    failed = make_products(plan, workers)
    record = make_record(plan, failed)
    write_file(store / PICTURES, pictures_of(plan, record))
    write_victims(plan, role_cells(plan, sweet_spots(plan)))
    write_json(store / RECORD, record)
    page = INVERSION_PAGE.write(store)
    leave_table(
        "inversion", inversion_rows(record), "What the features of split networks give away"
    )
    leave_table("claims", claim_rows(record), "The claims of paper 003")
    leave_link("study-inversion", page, "The page of the study")
    if failed:
        raise UnitsFailedError(
            f"{len(failed)} of the study's units failed, the page has the others: "
            + "; ".join(f"{unit}: {why}" for unit, why in sorted(failed.items()))
            + "; run the same command again to retry them"
        )
    return page


@task(name="make products")
def make_products(plan: InversionPlan, workers: Workers) -> dict[str, str]:
    """Every unit's product, on Dask workers that live as long as this; what failed, and why."""
    say_what_is_there("Study inversion", Path(plan.root) / "products", plan.n_units)
    with (
        stage_progress("Study inversion", "unit") as advance,
        dask_client(workers, threads=plan.study.threads) as client,
    ):
        run = _Rounds(plan, client, advance)
        run.units(plan.first_units())
        sweet = sweet_spots(plan)
        run.units(plan.confirm(dict.fromkeys(sweet.values())))
        run.units(plan.restoring_units(role_cells(plan, sweet)))
        return run.so_far.failed


class _Rounds:
    """Rounds of units whose progress is one bar."""

    def __init__(self, plan: InversionPlan, client: Client, advance: Advance) -> None:
        self.plan, self.client, self.advance = plan, client, advance
        self.so_far = Outcome({}, {})

    def units(self, units: list[Unit]) -> None:
        plan = self.plan
        outcome: Outcome = run_units(
            units,
            self.client,
            threads=plan.study.threads,
            watch=Watch(
                open_place(plan.root),
                self.client,
                device=plan.device,
                pace=Pace(),
                on_notice=log_notice,
            ),
            then=plan.more_units,
            on_progress=self._report,
            earlier=self.so_far,
        )
        done, failed = self.so_far.done | outcome.done, self.so_far.failed | outcome.failed
        self.so_far = Outcome(done, failed)

    def _report(self, done: float, total: float, note: str = "") -> None:
        n_before = len(self.so_far.done) + len(self.so_far.failed)
        self.advance(n_before + done, max(n_before + total, self.plan.n_units), note)


def make_record(plan: InversionPlan, failed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """inversion.json, of the products that are there."""
    study = plan.study
    settings = to_json(study)
    hashes = {name: images.content_hash for name, images in plan.images.items()}
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
        **describe_inversion(plan, failed),
    }
    record["figures"] = describe_figures(record)
    record["claims"] = check_inversion(record)
    return record


def inversion_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per cell with a role: what it costs, and what every attack gets."""
    rows = []
    for cell in record["cells"]:
        if not cell["roles"] or cell["accuracy"]["mean"] is None:
            continue
        row = {
            "images": cell["source"],
            "defence": cell["title"],
            "chosen as": ", ".join(cell["roles"]),
            "accuracy": f"{cell['accuracy']['mean']:.1%}",
        }
        for attack in record["attacks"]:
            there = cell["attacks"].get(attack["name"])
            mean = None if there is None else there["ssim"]["mean"]
            row[f"SSIM, {attack['name']}"] = "" if mean is None else f"{mean:.3f}"
        rows.append(row)
    return rows
