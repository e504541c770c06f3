"""`palimpsest campaign`: how far a campaign is, and pausing, resuming and ending it.

Nothing here needs the process that runs the campaign: `status` reads the store, the others leave a
small file in it that the campaign looks at every few seconds. `--store` is a job's folder (with
`--split`), the folder of a store, or s3://bucket/prefix. Exit codes as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.console import print_json, say, show_facts
from flows.cli.options import (
    DEFAULT_STORE,
    JsonOption,
    PlaceOption,
    SplitOption,
    err,
    out,
    store_location,
)
from storage.errors import StorageError
from storage.object_store import Place, open_place
from storage.pairs.dataset import Dataset
from storage.pairs.store_file import read_store_file
from tasks.campaign.state import (
    clear_quarantine,
    read_quarantine,
    write_control,
)

if TYPE_CHECKING:
    from storage.pairs.receipts import Receipt
    from tasks.campaign.status import CampaignStatus, CoverageCurve

NOTICED = "a running campaign notices within seconds"

campaign_app = typer.Typer(
    no_args_is_help=True, help="How far a campaign is; pause it, resume it, end it."
)


@campaign_app.command(
    "status",
    epilog="Examples: `palimpsest campaign status --store runs/cifar` · "
    "`palimpsest campaign status --store s3://bucket/pairs --json` · "
    "`palimpsest campaign status --store runs/cifar --plot coverage.png`",
)
def campaign_status(
    store: PlaceOption = str(DEFAULT_STORE),
    split: SplitOption = "train",
    as_json: JsonOption = False,
    plot: Annotated[
        str | None, typer.Option("--plot", help="Also draw coverage against runs, as a PNG.")
    ] = None,
) -> None:
    """Runs, pairs, coverage, rates and what is left, from the store alone; also while it runs."""
    from tasks.campaign.status import campaign_status as status_of
    from tasks.campaign.status import coverage_curve, find_recipe, last_phase_of

    file = None if plot is None else _png_path(plot)
    dataset = Dataset(store_location(store, split))
    where = dataset.manifest.get("source", {}).get("split", split)
    recipe = find_recipe(store)
    status = status_of(dataset, n_runs_last_phase=last_phase_of(recipe, where))
    firsts = _first_parts(status, dataset.receipts)
    curve = coverage_curve(dataset.receipts, also=[first - 1 for first in firsts])
    if as_json:
        print_json(out, _as_json(status))
    else:
        _show(status, curve, dataset.receipts)
    if file is not None:
        _write_plot(file, status, curve)
        if not as_json:
            out.print(str(file.absolute()), style="bold", markup=False, soft_wrap=True)


@campaign_app.command("pause", epilog="Example: `palimpsest campaign pause --store runs/cifar`")
def campaign_pause(store: PlaceOption = str(DEFAULT_STORE), split: SplitOption = "train") -> None:
    """Start no new parts; those that run are finished and kept."""
    place = _place(store, split)
    write_control(place, "paused")
    say(
        out,
        f"{place} is paused: parts that run are finished, none is started ({NOTICED}); go on with: "
        f"palimpsest campaign resume{_same(store, split)}",
    )


@campaign_app.command("resume", epilog="Example: `palimpsest campaign resume --store runs/cifar`")
def campaign_resume(store: PlaceOption = str(DEFAULT_STORE), split: SplitOption = "train") -> None:
    """Let a paused or cancelled campaign go on."""
    place = _place(store, split)
    write_control(place, "running")
    say(
        out,
        f"{place} may run: a paused campaign goes on ({NOTICED}); if none is there any more, start "
        "it with its generate command",
    )


@campaign_app.command("cancel", epilog="Example: `palimpsest campaign cancel --store runs/cifar`")
def campaign_cancel(store: PlaceOption = str(DEFAULT_STORE), split: SplitOption = "train") -> None:
    """Stop at once; parts that are being computed are lost, everything stored is kept."""
    place = _place(store, split)
    write_control(place, "cancelled")
    say(
        out,
        f"{place} is cancelled: a running campaign stops within seconds and loses only the parts "
        "that it is computing; its generate command goes on from what is stored",
    )


@campaign_app.command(
    "retry",
    epilog="Examples: `palimpsest campaign retry --store runs/cifar` · "
    "`palimpsest campaign retry --store runs/cifar --part 12 --part 40`",
)
def campaign_retry(
    store: PlaceOption = str(DEFAULT_STORE),
    split: SplitOption = "train",
    parts: Annotated[
        list[int] | None, typer.Option("--part", help="Only this part; repeatable.")
    ] = None,
) -> None:
    """Take parts out of quarantine; the next generate command tries them again."""
    place = _place(store, split)
    there = [quarantined.part for quarantined in read_quarantine(place)]
    unknown = sorted(set(parts or []) - set(there))
    if unknown:
        raise ValueError(
            f"--part {unknown[0]} is not in quarantine; there "
            + (f"are {', '.join(map(str, there))}" if there else "is none")
        )
    chosen = sorted(set(parts or there))
    clear_quarantine(place, chosen)
    if chosen:
        listed = ", ".join(map(str, chosen))
        say(out, f"the next generate command tries again: part{'s' * (len(chosen) > 1)} {listed}")
    else:
        say(out, "nothing is in quarantine")


def _place(store: str, split: str) -> Place:
    """The place of the store; StorageError if there is none."""
    place = open_place(store_location(store, split))
    read_store_file(place)
    return place


def _same(store: str, split: str) -> str:
    """The options that name the same store again."""
    return f" --store {store}" + (f" --split {split}" if split != "train" else "")


def _show(status: CampaignStatus, curve: CoverageCurve, receipts: Sequence[Receipt]) -> None:
    from flows.cli.campaign_screen import phase_table, sparklines, status_facts, status_notes

    show_facts(out, status.location, status_facts(status, receipts))
    if status.phases:
        out.print(phase_table(status))
    if len(curve.n_runs) > 1:
        for line in sparklines(curve):
            say(out, line)
    for line in status_notes(status, receipts):
        say(err, line)


def _as_json(status: CampaignStatus) -> dict[str, Any]:
    values = asdict(status)
    control = values.pop("control")
    for row, quarantined in zip(values["quarantined"], status.quarantined, strict=True):
        del row["log"]
        row["log_path"] = status.log_of(quarantined)
    return {
        "store": values.pop("location"),
        "state": control["state"],
        "state_since": control["since"] or None,
        "complete": status.is_complete,
        "pairs_per_worker_hour": _pairs_per_hour(status),
        **values,
    }


def _pairs_per_hour(status: CampaignStatus) -> float | None:
    hours = sum(row.hours for row in status.devices)
    return round(status.n_pairs / hours, 1) if hours else None


def _write_plot(file: Path, status: CampaignStatus, curve: CoverageCurve) -> None:
    from storage.files import write_file
    from tasks.campaign.coverage_plot import coverage_plot

    starts: list[tuple[int, str]] = []
    first = 0
    for phase in status.phases:
        if first <= status.n_runs and (phase.n_runs or not starts):
            starts.append((first, phase.sampler))
        first += phase.n_runs
    png = coverage_plot(curve, title=status.location, n_images=status.n_images, phases=starts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, png)
    except OSError as error:
        raise StorageError(
            f"cannot write {file} ({error.strerror}); choose another --plot"
        ) from error


def _first_parts(status: CampaignStatus, receipts: Sequence[Receipt]) -> list[int]:
    """How many parts lie before each phase's end, so that the curve bends where a phase does."""
    if not receipts:
        return []
    firsts, n_parts, n_runs = [], 0, receipts[0].n_runs
    for phase in status.phases:
        n_parts += phase.n_runs // max(1, n_runs)
        firsts.append(n_parts)
    return firsts


def _png_path(text: str) -> Path:
    if "://" in text or Path(text).suffix.lower() != ".png":
        raise ValueError(f"--plot {text}: give a .png file of this machine")
    return Path(text)
