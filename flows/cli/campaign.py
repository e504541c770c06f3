"""`palimpsest campaign`: how far a campaign is, and pausing, resuming and ending it; `palimpsest
top-up`: bringing a store to a coverage.

`status` reads the store; pause, resume and cancel leave a small file in it that the campaign looks
at every few seconds. Exit codes as everywhere; 1 also where a top-up is held or parts of it are in
quarantine.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.console import print_json, say, show_facts
from flows.cli.options import (
    DEFAULT_STORE,
    FAILED,
    Chosen,
    Computed,
    Json,
    Split,
    Store,
    Stored,
    command,
    err,
    images_shown,
    out,
    write_as_asked,
)
from storage.object_store import Place, open_place
from storage.pairs.dataset import Dataset
from storage.pairs.layout import read_store_file
from tasks.campaign.state import State, clear_quarantine, read_quarantine, write_control

if TYPE_CHECKING:
    from tasks.campaign.status import CampaignStatus

NOTICED = "a running campaign notices within seconds"

campaign_app = typer.Typer(
    no_args_is_help=True, help="How far a campaign is; pause it, resume it, end it."
)
top_up_app = typer.Typer()


@command(campaign_app, "status")
def campaign_status(
    stored: Stored,
    as_json: Json = False,
    plot: Annotated[str | None, "Also draw coverage against runs, as a PNG."] = None,
) -> None:
    """Runs, pairs, coverage, rates and what is left, from the store alone; also while it runs.

    Examples: `palimpsest campaign status --store runs/cifar` · `palimpsest campaign status
    --store s3://bucket/pairs --json` · `palimpsest campaign status --store runs/cifar --plot
    coverage.png`
    """
    from flows.cli.campaign_screen import phase_table, sparklines, status_facts, status_notes
    from tasks.campaign.coverage_plot import coverage_picture
    from tasks.campaign.status import campaign_status as status_of
    from tasks.campaign.status import find_recipe, last_phase_of, phases_curve

    if plot is not None and ("://" in plot or Path(plot).suffix.lower() != ".png"):
        raise ValueError(f"--plot {plot}: give a .png file of this machine")
    dataset = Dataset(stored.location)
    receipts = dataset.receipts
    where = dataset.manifest.get("source", {}).get("split", stored.split)
    status = status_of(dataset, n_runs_last_phase=last_phase_of(find_recipe(stored.store), where))
    if as_json:
        print_json(out, _as_json(status))
    else:
        show_facts(out, status.location, status_facts(status, receipts))
        if status.phases:
            out.print(phase_table(status))
        for line in sparklines(phases_curve(status, receipts)):
            say(out, line)
        for line in status_notes(status, receipts):
            say(err, line)
    if plot is not None:
        write_as_asked(Path(plot), coverage_picture(status, receipts, status.location), "--plot")
        if not as_json:
            out.print(str(Path(plot).absolute()), style="bold", markup=False, soft_wrap=True)


@command(campaign_app, "pause")
def campaign_pause(stored: Stored) -> None:
    """Start no new parts; those that run are finished and kept.

    Example: `palimpsest campaign pause --store runs/cifar`
    """
    split = f" --split {stored.split}" if stored.split != "train" else ""
    _ask(
        stored,
        "paused",
        f"is paused: parts that run are finished, none is started ({NOTICED}); go on with: "
        f"palimpsest campaign resume --store {stored.store}{split}",
    )


@command(campaign_app, "resume")
def campaign_resume(stored: Stored) -> None:
    """Let a paused or cancelled campaign go on.

    Example: `palimpsest campaign resume --store runs/cifar`
    """
    _ask(
        stored,
        "running",
        f"may run: a paused campaign goes on ({NOTICED}); if none is there any more, start it with "
        "its generate command",
    )


@command(campaign_app, "cancel")
def campaign_cancel(stored: Stored) -> None:
    """Stop at once; parts that are being computed are lost, everything stored is kept.

    Example: `palimpsest campaign cancel --store runs/cifar`
    """
    _ask(
        stored,
        "cancelled",
        "is cancelled: a running campaign stops within seconds and loses only the parts that it is "
        "computing; its generate command goes on from what is stored",
    )


@command(campaign_app, "retry")
def campaign_retry(
    stored: Stored,
    parts: Annotated[list[int] | None, "--part", "Only this part; repeatable."] = None,
) -> None:
    """Take parts out of quarantine; the next generate command tries them again.

    Examples: `palimpsest campaign retry --store runs/cifar` · `palimpsest campaign retry
    --store runs/cifar --part 12 --part 40`
    """
    place = _place(stored)
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


@command(top_up_app, "top-up")
def top_up(
    *,
    coverage: Annotated[float, "Fraction of the split's images that are to have a confident pair."],
    n_runs_at_most: Annotated[
        int | None, "Of the whole store; default: twice what is planned now."
    ] = None,
    step: Annotated[int, "Runs that are added at a time; 0: one round."] = 0,
    stall_rounds: Annotated[int, "So many rounds without a new image end it."] = 5,
    store: Store = DEFAULT_STORE,
    split: Split = "train",
    chosen: Chosen,
    computed: Computed,
) -> None:
    """Generate what is planned, then more until enough images are covered; resumes.

    Examples: `palimpsest top-up --store runs/cifar --coverage 0.85 --n-runs-at-most 4000` ·
    `palimpsest top-up --preset cifar-small --data folder:cifar10 --store runs/cifar --coverage
    0.5`
    """
    recipe = chosen.recipe(store)
    with images_shown(recipe, split):
        from flows.coverage_goal import DONE
        from flows.top_up import top_up as flow

        facts = flow(
            recipe,
            store,
            coverage=coverage,
            n_runs_at_most=n_runs_at_most,
            step=step,
            stall_rounds=stall_rounds,
            split=split,
            workers=computed.workers,
        )
    why = facts.pop("why")
    show_facts(out, f"Coverage ({split})", facts)
    if facts["ending"] in DONE:
        say(out, why)
        return
    say(err, why)
    raise typer.Exit(FAILED)


def _place(stored: Stored) -> Place:
    """The place of the store; StorageError if there is none."""
    place = open_place(stored.location)
    read_store_file(place)
    return place


def _ask(stored: Stored, state: State, said: str) -> None:
    place = _place(stored)
    write_control(place, state)
    say(out, f"{place} {said}")


def _as_json(status: CampaignStatus) -> dict[str, Any]:
    values = asdict(status)
    control = values.pop("control")
    for row, quarantined in zip(values["quarantined"], status.quarantined, strict=True):
        del row["log"]
        row["log_path"] = status.log_of(quarantined)
    hours = sum(row.hours for row in status.devices)
    return {
        "store": values.pop("location"),
        "state": control["state"],
        "state_since": control["since"] or None,
        "complete": status.is_complete,
        "pairs_per_worker_hour": round(status.n_pairs / hours, 1) if hours else None,
        **values,
    }
