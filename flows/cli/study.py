"""`palimpsest study`: studies of the papers, from a grid to a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from flows.cli.options import (
    Computed,
    Data,
    FreshStore,
    SkipFiles,
    command,
    out,
    show_images,
    show_rows,
    size_text,
    start_over,
)

if TYPE_CHECKING:
    from flows.study_kind import StudyKind

study_app = typer.Typer()


@command(study_app, "study")
def study(
    name: Annotated[str, typer.Argument(help="Which; `list` shows all of them.")],
    *,
    preset: Annotated[
        Literal["paper", "cpu", "tiny"] | None,
        "The size; default: that of the store, else cpu. tiny: autoencoder, inversion "
        "and span only, a trial.",
    ] = None,
    data: Data = None,
    store: Annotated[
        Path | None, "--store", "--out", "Default: palimpsest-runs/study-NAME."
    ] = None,
    skip_corrupt: SkipFiles = False,
    settings: Annotated[
        list[str] | None,
        "--set",
        "name=value; experiment.* is set in every cell, victim.* in every autoencoder, "
        "source.* in every source of `inversion`. Repeatable.",
    ] = None,
    only: Annotated[str, "Just the parts (cells, rows, sources, ...) whose name has this."] = "",
    computed: Computed,
    dry_run: Annotated[bool, "Only say what it would take."] = False,
    fresh: FreshStore = False,
) -> None:
    """Attack every victim of a grid, score what comes back, and check the paper's claims.

    `autoencoder` is the study of the autoencoder paper, `inversion` of the MixCon paper, `span` and
    `span-networks` are ours, the others are of the KKT paper.

    A study that was interrupted goes on where it was; settings are then those of its store.

    Examples: `palimpsest study list` · `palimpsest study multiclass --dry-run` · `palimpsest study
    width --data folder:cifar10` · `palimpsest study autoencoder --only fc10` · `palimpsest study
    inversion --only digits` · `palimpsest study losses --set n_victims=5 --set
    experiment.training.epochs=60000` · `palimpsest study span --only digits --set
    kinds.digits.data=mnist:PATH`
    """
    from flows.settings import parse_assignments
    from flows.study import STUDIES, kind_of

    if name == "list":
        for kind in STUDIES.values():
            sizes = (f"{preset}: {kind.size(make())}" for preset, make in kind.presets.items())
            out.print(f"[bold]{kind.name}[/]  {kind.question}")
            out.print(f"    {kind.paper}; {'; '.join(sizes)}", style="dim")
        return
    store = store or Path(f"palimpsest-runs/study-{name}")
    chosen: dict[str, Any] = {} if data is None else {"data": data}
    if skip_corrupt:
        chosen["skip_corrupt"] = True
    chosen |= parse_assignments(settings or [])
    if fresh and preset is None:  # the settings of the store go with it
        preset = "cpu"
    kind = kind_of(name)
    made = kind.resolve(preset, chosen, store, only=only)
    if dry_run:
        show_costs(kind, made, store, computed)
        return
    from flows.study import claim_rows

    record, failure = run_kind(
        kind, made, store, preset, chosen, only=only, computed=computed, fresh=fresh
    )
    for row in claim_rows(record):
        out.print(f"[bold]{row['here']}[/]: {escape(row['claim'])}", soft_wrap=True)
        out.print(f"    {escape(row['ours'])}", style="dim", soft_wrap=True)
    page = store / f"{kind.page.name}.html"
    out.print(f"Page: [bold]{escape(str(page.absolute()))}[/]", soft_wrap=True)
    if failure is not None:
        raise failure


def run_kind(
    kind: StudyKind[Any, Any],
    made: Any,
    store: Path,
    preset: str | None,
    chosen: dict[str, Any],
    *,
    only: str,
    computed: Computed,
    fresh: bool,
    option: str = "--store",
) -> tuple[dict[str, Any], Exception | None]:
    """The record of a study that has ended, and the failure or limit to report in the end.
    `option`: the one that `store` was given by."""
    from flows.study import LimitExceededError, UnitsFailedError, run_study
    from tasks.cluster.workers import check_workers, device_of

    workers = computed.workers
    failure: Exception | None = None
    if fresh:
        check_workers(workers)
    plan = kind.plan(made, store, device_of(workers))
    if fresh:
        start_over(store, kind.entries, option=option)
    name = "audit" if kind.name == "audit" else f"study {kind.name}"
    out.print(
        f"[bold]palimpsest {name}[/]  {made.preset}, {kind.size(made)}, "
        f"{f'on {escape(made.data)}, ' if made.data else ''}store {escape(str(store))}"
    )
    for split, facts in kind.facts(plan):
        show_images(out, split, facts)
    for note in kind.notes(plan):
        out.print(note, style="dim", markup=False, soft_wrap=True)
    try:
        flow = run_study.renamed(name=kind.flow)
        flow(kind.name, store, preset, chosen, only=only, workers=workers)
    except (UnitsFailedError, LimitExceededError) as error:
        failure = error
    record = json.loads((store / kind.record).read_bytes())
    _show_table(kind.rows(record))
    return record, failure


def show_costs(kind: StudyKind[Any, Any], made: Any, store: Path, computed: Computed) -> None:
    """Every part with its estimates, and the sums."""
    from tasks.campaign.state import age_text
    from tasks.devices import resolve_device, usable_cores

    where = resolve_device(computed.device)
    plan = kind.plan(made, store, where)
    for split, facts in kind.facts(plan):
        show_images(out, split, facts)
    costs = kind.costs(plan, where)
    rows: list[dict[str, Any]] = []
    for cost in costs:
        seconds = {name: age_text(s) for name, s in cost.seconds_of.items()}
        memory = {} if cost.memory_bytes is None else {"memory": size_text(cost.memory_bytes)}
        disk = {"disk": size_text(cost.disk_bytes)}
        rows.append({kind.unit: cost.name, **cost.counts, **seconds, **memory, **disk})
    _show_table(rows, numbers=True)
    work, disk_bytes = (sum(getattr(c, of) for c in costs) for of in ("seconds", "disk_bytes"))
    n = computed.n_workers or (1 if where != "cpu" else usable_cores())
    longest = max(cost.seconds for cost in costs) if kind.whole_units else 0.0
    memory_bytes = max(cost.memory_bytes or 0 for cost in costs)
    memory_text = f"{size_text(memory_bytes)} of memory per worker at most, "
    out.print(
        f"{kind.planned(plan)}: {'at most ' if kind.whole_units else ''}about "
        f"{age_text(work)} of work on {where}, "
        f"{age_text(max(longest, work / n))} on {n} workers; "
        f"{memory_text if memory_bytes else ''}{size_text(disk_bytes)} of disk. "
        "Speed was measured on this machine just now."
    )


def _show_table(rows: list[dict[str, Any]], *, numbers: bool = False) -> None:
    """A table with a column per name; of `numbers` all but the first are on the right."""
    texts = [{name: escape(str(value)) for name, value in row.items()} for row in rows]
    left = list(rows[0])[: 1 if numbers else None] if rows else ()
    table = Table(box=None, pad_edge=False)
    show_rows(out, texts, table, left=left, overflow="fold")
