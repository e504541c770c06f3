"""`palimpsest study autoencoder`: priced, run and shown; the options are those of `study`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape

from flows.cli import study as shared
from flows.cli.console import show_images
from flows.fresh import start_over

AUTOENCODER = "autoencoder"


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    store: Path
    preset: str | None
    settings: Mapping[str, Any]
    only: str
    device: Literal["auto", "cpu", "cuda"]
    n_workers: int
    cluster: str


def show_kind() -> None:
    """The study in the list of studies."""
    from flows.families.autoencoder.grids import PRESETS
    from tasks.families.autoencoder.study.record import PAPER, QUESTION

    made = [preset() for preset in PRESETS.values()]
    numbers = "; ".join(
        f"{s.preset}: {len(s.victims)} autoencoders, {len(s.masks)} masks" for s in made
    )
    shared.out.print(f"[bold]{AUTOENCODER}[/]  {QUESTION}")
    shared.out.print(f"    {PAPER}; {numbers}", style="dim")


def study_autoencoders(asked: Asked, *, dry_run: bool, fresh: bool) -> None:
    """Run the study that is asked for, or say what it would take."""
    from flows.families.autoencoder.studies import resolve_recovery
    from tasks.families.autoencoder.study.record import ENTRIES, RECORD

    made = resolve_recovery(asked.preset, asked.settings, asked.store, only=asked.only)
    if dry_run:
        _show_costs(made, asked)
        return
    from flows.families.autoencoder.study import UnitsFailedError, recovery_rows, run_recovery_study
    from flows.study import claim_rows
    from tasks.cluster.workers import Workers, check_workers, device_of
    from tasks.families.autoencoder.study.images import Sources
    from tasks.families.autoencoder.study.plan import RecoveryPlan

    workers = Workers(cluster=asked.cluster, n_workers=asked.n_workers, device=asked.device)
    if fresh:
        check_workers(workers)
        RecoveryPlan(made, Sources.read(made), asked.store, device=device_of(workers))
        start_over(asked.store, ENTRIES, option="--store")
    shared.out.print(
        f"[bold]palimpsest study {AUTOENCODER}[/]  {made.preset}, {len(made.victims)} "
        f"autoencoders, {len(made.masks)} masks, on {escape(made.data)}, "
        f"store {escape(str(asked.store))}"
    )
    for images in Sources.read(made).images:
        show_images(shared.out, images.split, images.facts)
    failure: UnitsFailedError | None = None
    try:
        run_recovery_study(
            asked.store, asked.preset, dict(asked.settings), only=asked.only, workers=workers
        )
    except UnitsFailedError as error:
        failure = error
    record = json.loads((asked.store / RECORD).read_bytes())
    shared.show_rows(recovery_rows(record))
    shared.show_claims(claim_rows(record))
    page = asked.store / "recovery.html"
    shared.out.print(f"Page: [bold]{escape(str(page.absolute()))}[/]", soft_wrap=True)
    if failure is not None:
        raise failure


def _show_costs(made: Any, asked: Asked) -> None:
    """What every victim and the generic methods take, and the sums."""
    from rich.table import Table

    from tasks.devices import resolve_device, usable_cores
    from tasks.families.autoencoder.study.cost import costs_of
    from tasks.families.autoencoder.study.images import Sources
    from tasks.families.autoencoder.study.plan import RecoveryPlan

    where = resolve_device(asked.device)
    plan = RecoveryPlan(made, Sources.read(made), asked.store, device=where)
    costs = costs_of(plan)
    table = Table(box=None, pad_edge=False)
    for title in ("unit", "images", "units", "training", "recovery", "memory", "disk"):
        table.add_column(title, justify="left" if title == "unit" else "right")
    for cost in costs:
        table.add_row(
            cost.name,
            str(cost.n_images),
            str(cost.n_units),
            shared.duration_text(cost.train_s),
            shared.duration_text(cost.recover_s),
            shared.size_text(cost.memory_bytes),
            shared.size_text(cost.disk_bytes),
        )
    shared.out.print(table)
    seconds = sum(cost.seconds for cost in costs)
    n = asked.n_workers or (1 if where == "cuda" else usable_cores())
    longest = max(seconds / n, *(cost.seconds for cost in costs))
    shared.out.print(
        f"{plan.n_units} units: at most about {shared.duration_text(seconds)} of work on {where}, "
        f"{shared.duration_text(longest)} on {n} workers; "
        f"{shared.size_text(max(cost.memory_bytes for cost in costs))} of memory per worker at "
        f"most, {shared.size_text(sum(cost.disk_bytes for cost in costs))} of disk. Speed was "
        "measured on this machine just now."
    )
