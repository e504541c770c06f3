"""`palimpsest study`: the studies of papers 002, 000 and 003, from a grid to a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from flows.cli.console import Screen, show_images

study_app = typer.Typer()
out = Screen()

ENTRIES = frozenset(
    {
        *("settings.json", "timings.json", "heldout", "evaluation"),
        *("study.json", "study-pictures.npz", "study.html", "study-data"),
    }
)
"""What the command makes in the store's folder."""


@study_app.command(
    epilog="Examples: `palimpsest study list` · `palimpsest study multiclass --dry-run` · "
    "`palimpsest study width --data folder:cifar10` · "
    "`palimpsest study autoencoder --only fc10` · `palimpsest study inversion --only digits` · "
    "`palimpsest study losses --set n_victims=5 --set experiment.training.epochs=60000`"
)
def study(
    name: Annotated[str, typer.Argument(help="Which; `list` shows all of them.")],
    *,
    preset: Annotated[
        Literal["paper", "cpu", "tiny"] | None,
        typer.Option(
            "--preset",
            help="The size; default: that of the store, else cpu. tiny: autoencoder and inversion "
            "only, a trial.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="photos | digits | folder:PATH | cifar10:PATH | cifar100:PATH | mnist:PATH | "
            "fashion-mnist:PATH | svhn:PATH | tiny-imagenet:PATH",
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Option("--store", "--out", help="Default: palimpsest-runs/study-NAME.")
    ] = None,
    skip_corrupt: Annotated[
        bool,
        typer.Option("--skip-corrupt", help="Leave out files of a folder that cannot be read."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="name=value; experiment.* is set in every cell, victim.* in every autoencoder, "
            "source.* in every source of `inversion`. Repeatable.",
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            "--only", help="Just the cells, autoencoders or sources whose name contains this."
        ),
    ] = "",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device")] = "auto",
    n_workers: Annotated[int, typer.Option("--workers", help="0: one per core, or per GPU.")] = 0,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", help="local | cuda | slurm:YAML | kubernetes:YAML | tcp://HOST:PORT"
        ),
    ] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete the store's products first.")
    ] = False,
) -> None:
    """Attack every victim of a grid, score what comes back, and check the paper's claims.

    `autoencoder` is the study of paper 000, `inversion` of 003, the others are of 002.

    A study that was interrupted goes on where it was; settings are then those of its store.
    """
    if name == "list":
        _show_studies()
        return
    from flows.cli.study_autoencoder import AUTOENCODER, Asked, study_autoencoders
    from flows.cli.study_inversion import INVERSION, study_inversions
    from flows.fresh import start_over
    from flows.naming import unknown_name
    from flows.settings import parse_assignments
    from flows.studies import STUDIES, resolve

    store = store or Path(f"palimpsest-runs/study-{name}")
    chosen: dict[str, Any] = {} if data is None else {"data": data}
    if skip_corrupt:
        chosen["skip_corrupt"] = True
    chosen |= parse_assignments(settings or [])
    if fresh and preset is None:  # the settings of the store go with it
        preset = "cpu"
    if name in (AUTOENCODER, INVERSION):
        asked = Asked(store, preset, chosen, only, device, n_workers, cluster)
        run = study_autoencoders if name == AUTOENCODER else study_inversions
        run(asked, dry_run=dry_run, fresh=fresh)
        return
    if name not in STUDIES:
        raise ValueError(unknown_name("study", name, [*STUDIES, AUTOENCODER, INVERSION, "list"]))
    made = resolve(name, preset, chosen, store, only=only)
    if dry_run:
        _show_costs(made, device, n_workers)
        return
    from flows.study import cell_rows, claim_rows, plan_of, run_study
    from tasks.cluster.workers import Workers, check_workers

    workers = Workers(cluster=cluster, n_workers=n_workers, device=device)
    if fresh:
        check_workers(workers)
        plan_of(made)
        start_over(store, ENTRIES, option="--store")
    out.print(
        f"[bold]palimpsest study {name}[/]  {made.preset}, {_cells(len(made.cells))}, "
        f"{made.n_runs} attacks, on {escape(made.data)}, store {escape(str(store))}"
    )
    show_images(out, made.split, _images_of(made).facts)
    page = run_study(name, store, preset, chosen, only=only, workers=workers)
    record = json.loads((store / "study.json").read_bytes())
    show_rows(cell_rows(record))
    show_claims(claim_rows(record))
    out.print(f"Page: [bold]{escape(str(Path(page).absolute()))}[/]", soft_wrap=True)


def _images_of(made: Any) -> Any:
    from storage.sources.load import load_images

    return load_images(
        made.data, split=made.split, skip_corrupt=made.skip_corrupt, channels=made.channels
    )


def _show_studies() -> None:
    from flows.cli.study_autoencoder import show_kind
    from flows.cli.study_inversion import show_kind as show_inversion
    from flows.studies import PRESETS, STUDIES
    from flows.studies import study as named

    for name, kind in STUDIES.items():
        sizes = [named(name, preset) for preset in PRESETS]
        numbers = "; ".join(
            f"{s.preset}: {_cells(len(s.cells))}, {s.n_runs:,} attacks" for s in sizes
        )
        out.print(f"[bold]{name}[/]  {kind.question}")
        out.print(f"    {kind.paper}; {numbers}", style="dim")
    show_kind()
    show_inversion()


def _show_costs(made: Any, device: Literal["auto", "cpu", "cuda"], n_workers: int) -> None:
    """The cells with their estimates, and the sums."""
    from tasks.devices import resolve_device, usable_cores
    from tasks.study.cost import cost_of, measured_pace, total
    from tasks.study.settings import StudyPlan

    images = _images_of(made)
    show_images(out, made.split, images.facts)
    StudyPlan(made, images)
    where = resolve_device(device)
    c, h, w = images.images.shape[1:]
    pace = measured_pace(where)
    stacked = where != "cpu"
    costs = [cost_of(made, cell, (c, h, w), pace, stacked=stacked) for cell in made.cells]
    table = Table(box=None, pad_edge=False)
    for title in (
        "cell",
        "images",
        "victims",
        "attacks",
        "training",
        "attacks take",
        "memory",
        "disk",
    ):
        table.add_column(title, justify="left" if title == "cell" else "right")
    for cell, cost in zip(made.cells, costs, strict=True):
        table.add_row(
            cell.name,
            str(cell.images_per_run),
            str(made.n_victims),
            str(made.n_victims * made.n_attacks),
            duration_text(cost.train_s),
            duration_text(cost.attack_s),
            size_text(cost.memory_bytes),
            size_text(cost.disk_bytes),
        )
    out.print(table)
    sums = total(costs)
    n = n_workers or (1 if stacked else usable_cores())
    out.print(
        f"{_cells(len(made.cells))}, {made.n_runs:,} attacks: about "
        f"{duration_text(sums['seconds'])} of work on {where}, "
        f"{duration_text(sums['seconds'] / n)} on {n} workers; "
        f"{size_text(sums['memory_bytes'])} of memory per worker at most, "
        f"{size_text(sums['disk_bytes'])} of disk. Speed was measured on this machine just now."
    )


def show_claims(rows: list[dict[str, Any]]) -> None:
    """What became of every claim, and our numbers."""
    for row in rows:
        out.print(f"[bold]{row['here']}[/]: {escape(row['claim'])}", soft_wrap=True)
        out.print(f"    {escape(row['ours'])}", style="dim", soft_wrap=True)


def show_rows(rows: list[dict[str, Any]]) -> None:
    """A table with a column per name."""
    table = Table(box=None, pad_edge=False)
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    out.print(table)


def _cells(n: int) -> str:
    return "1 cell" if n == 1 else f"{n} cells"


def duration_text(seconds: float) -> str:
    """`45 s`, `12 min`, `3.4 h`, `2.1 d`."""
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            value = seconds / unit
            return f"{value:.0f} {name}" if value >= 10 or unit == 1 else f"{value:.1f} {name}"
    return f"{seconds / 86_400:.1f} d"


def size_text(n_bytes: float) -> str:
    """`12 MB`, `3.4 GB`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if n_bytes >= unit:
            value = n_bytes / unit
            return f"{value:.0f} {name}" if value >= 10 else f"{value:.1f} {name}"
    return f"{n_bytes / 1e3:.0f} kB"
