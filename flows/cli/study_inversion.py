"""`palimpsest study inversion`: priced, run and shown; the options are those of `study`."""

from __future__ import annotations

import json
from typing import Any

from rich.markup import escape

from flows.cli import study as shared
from flows.cli.console import show_images
from flows.cli.study_autoencoder import Asked
from flows.fresh import start_over

INVERSION = "inversion"


def show_kind() -> None:
    """The study in the list of studies."""
    from flows.families.inversion.grids import PRESETS
    from tasks.families.inversion.study.record import PAPER, QUESTION

    made = [preset() for preset in PRESETS.values()]
    numbers = "; ".join(f"{s.preset}: {len(s.sources)} sources, {len(s.cells)} cells" for s in made)
    shared.out.print(f"[bold]{INVERSION}[/]  {QUESTION}")
    shared.out.print(f"    {PAPER}; {numbers}", style="dim")


def study_inversions(asked: Asked, *, dry_run: bool, fresh: bool) -> None:
    """Run the study that is asked for, or say what it would take."""
    from flows.families.inversion.studies import resolve_inversion
    from tasks.families.inversion.study.record import ENTRIES, PAGE, RECORD

    made = resolve_inversion(asked.preset, asked.settings, asked.store, only=asked.only)
    if dry_run:
        _show_costs(made, asked)
        return
    from flows.families.autoencoder.study import UnitsFailedError
    from flows.families.inversion.study import inversion_rows, run_inversion_study
    from flows.study import claim_rows
    from tasks.cluster.workers import Workers, check_workers, device_of
    from tasks.families.inversion.study.images import read_sources
    from tasks.families.inversion.study.plan import InversionPlan

    workers = Workers(cluster=asked.cluster, n_workers=asked.n_workers, device=asked.device)
    if fresh:
        check_workers(workers)
        InversionPlan(made, read_sources(made), asked.store, device=device_of(workers))
        start_over(asked.store, ENTRIES, option="--store")
    shared.out.print(
        f"[bold]palimpsest study {INVERSION}[/]  {made.preset}, {len(made.cells)} cells, on "
        f"{escape(', '.join(source.data for source in made.sources))}, "
        f"store {escape(str(asked.store))}"
    )
    for source in read_sources(made).values():
        for split, facts in source.facts.items():
            show_images(shared.out, split, facts)
    failure: UnitsFailedError | None = None
    try:
        run_inversion_study(
            asked.store, asked.preset, dict(asked.settings), only=asked.only, workers=workers
        )
    except UnitsFailedError as error:
        failure = error
    record = json.loads((asked.store / RECORD).read_bytes())
    shared.show_rows(inversion_rows(record))
    shared.show_claims(claim_rows(record))
    page = asked.store / PAGE
    shared.out.print(f"Page: [bold]{escape(str(page.absolute()))}[/]", soft_wrap=True)
    if failure is not None:
        raise failure


def _show_costs(made: Any, asked: Asked) -> None:
    """What every source takes, and the sums."""
    from rich.table import Table

    from tasks.devices import resolve_device, usable_cores
    from tasks.families.inversion.study.cost import costs_of
    from tasks.families.inversion.study.images import read_sources
    from tasks.families.inversion.study.plan import InversionPlan

    where = resolve_device(asked.device)
    plan = InversionPlan(made, read_sources(made), asked.store, device=where)
    costs = costs_of(plan)
    table = Table(box=None, pad_edge=False)
    for title in ("what", "victims", "training", "inversion", "restorers", "disk"):
        table.add_column(title, justify="left" if title == "what" else "right")
    for cost in costs:
        seconds = (cost.train_s, cost.invert_s, cost.restore_s)
        table.add_row(
            cost.name,
            str(cost.n_victims),
            *(shared.duration_text(s) for s in seconds),
            shared.size_text(cost.disk_bytes),
        )
    shared.out.print(table)
    total = sum(cost.seconds for cost in costs)
    n = asked.n_workers or (1 if where == "cuda" else usable_cores())
    shared.out.print(
        f"{len(made.cells)} cells: about {shared.duration_text(total)} of work on {where}, "
        f"{shared.duration_text(total / n)} on {n} workers; "
        f"{shared.size_text(sum(cost.disk_bytes for cost in costs))} of disk. Speed was measured "
        "on this machine just now."
    )
