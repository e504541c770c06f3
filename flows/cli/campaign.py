"""`palimpsest campaign`: how far a campaign is, and pausing, resuming and ending it; `palimpsest
top-up`: bringing a store to a coverage.

`status` reads the store; pause, resume and cancel leave a small file in it that the campaign looks
at every few seconds. Exit codes as everywhere; 1 also where a top-up is held or parts of it are in
quarantine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli import options as cli
from flows.naming import counted, listed
from storage.object_store import Place, open_place
from storage.pairs.dataset import Dataset
from storage.pairs.layout import read_store_file
from tasks.campaign.state import State, age_text, clear_quarantine, read_quarantine, write_control

if TYPE_CHECKING:
    from storage.pairs.receipts import Receipt
    from tasks.campaign.status import CampaignStatus

SPARKS = " ▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 48
QUIET_SECONDS = 600.0
QUIET_PARTS = 5
"""A campaign is called quiet when its last part is older than both this and so many parts' time."""
NOTICED = "a running campaign notices within seconds"

campaign_app = typer.Typer(
    no_args_is_help=True, help="How far a campaign is; pause it, resume it, end it."
)
top_up_app = typer.Typer()


@cli.command(campaign_app, "status")
def campaign_status(
    stored: cli.Stored,
    as_json: cli.Json = False,
    plot: Annotated[str | None, "Also draw coverage against runs, as a PNG."] = None,
) -> None:
    """Runs, pairs, coverage, rates and what is left, from the store alone; also while it runs.

    Examples: `palimpsest campaign status --store runs/cifar` · `palimpsest campaign status
    --store s3://bucket/pairs --json` · `palimpsest campaign status --store runs/cifar --plot
    coverage.png`
    """
    from rich.table import Table

    from tasks.campaign.status import campaign_status as status_of
    from tasks.campaign.status import coverage_picture, find_recipe, last_phase_of, phases_curve

    if plot is not None and ("://" in plot or Path(plot).suffix.lower() != ".png"):
        raise ValueError(f"--plot {plot}: give a .png file of this machine")
    dataset = Dataset(stored.location)
    receipts = dataset.receipts
    where = dataset.manifest.get("source", {}).get("split", stored.split)
    status = status_of(dataset, n_runs_last_phase=last_phase_of(find_recipe(stored.store), where))
    if as_json:
        values = asdict(status)
        control = values.pop("control")
        for row, quarantined in zip(values["quarantined"], status.quarantined, strict=True):
            del row["log"]
            row["log_path"] = status.log_of(quarantined)
        hours = sum(row.hours for row in status.devices)
        facts = {
            "store": values.pop("location"),
            "state": control["state"],
            "state_since": control["since"] or None,
            "complete": status.is_complete,
            "pairs_per_worker_hour": round(status.n_pairs / hours, 1) if hours else None,
        }
        cli.print_json(facts | values)
    else:
        is_quiet = _is_quiet(status, receipts)
        cli.show_facts(status.location, status_facts(status, is_quiet=is_quiet))
        names = ("sampler", "runs", "confident", "per run", "images", "new")
        rows = [dict(zip(names, phase.texts(), strict=True)) for phase in status.phases]
        title = "Phases: confident pairs, and images that have one"
        cli.show_rows(rows, Table(title=title, title_justify="left"), left=("sampler",))
        curve = phases_curve(status, receipts)
        if len(curve.n_runs) > 1:
            for name, series, form in (
                ("confident pairs per run", curve.pairs_per_run, "{:,.1f}"),
                ("images covered", curve.n_covered, "{:,.0f}"),
            ):
                low, high = form.format(min(series)), form.format(max(series))
                cli.say(cli.out, f"  {name:25}{sparkline(series)}  {low} to {high}")
        for line in status_notes(status, is_quiet=is_quiet):
            cli.say(cli.err, line)
    if plot is not None:
        picture = coverage_picture(status, receipts, status.location)
        cli.write_as_asked(Path(plot), picture, "--plot")
        if not as_json:
            cli.out.print(str(Path(plot).absolute()), style="bold", markup=False, soft_wrap=True)


CONTROLS: dict[str, tuple[State, str, str]] = {
    "pause": (
        "paused",
        "Start no new parts; those that run are finished and kept.",
        f"is paused: parts that run are finished, none is started ({NOTICED}); go on with: "
        "palimpsest campaign resume --store ",
    ),
    "resume": (
        "running",
        "Let a paused or cancelled campaign go on.",
        f"may run: a paused campaign goes on ({NOTICED}); if none is there any more, start it with "
        "its generate command",
    ),
    "cancel": (
        "cancelled",
        "Stop at once; parts that are being computed are lost, everything stored is kept.",
        "is cancelled: a running campaign stops within seconds and loses only the parts that it is "
        "computing; its generate command goes on from what is stored",
    ),
}
"""By command: the state that a campaign is asked for, the command's help, what it reports."""


def _add_control(name: str) -> None:
    state, about, report = CONTROLS[name]

    def control(stored: cli.Stored) -> None:
        place = _place(stored)
        write_control(place, state)
        split = f" --split {stored.split}" if stored.split != "train" else ""
        again = f"{stored.store}{split}" if name == "pause" else ""
        cli.say(cli.out, f"{place} {report}{again}")

    control.__doc__ = f"{about}\n\nExample: `palimpsest campaign {name} --store runs/cifar`"
    cli.command(campaign_app, name)(control)


for _name in CONTROLS:
    _add_control(_name)


@cli.command(campaign_app, "retry")
def campaign_retry(
    stored: cli.Stored,
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
        parts_text = f"part{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))}"
        cli.say(cli.out, f"the next generate command tries again: {parts_text}")
    else:
        cli.say(cli.out, "nothing is in quarantine")


@cli.command(top_up_app, "top-up")
def top_up(
    *,
    coverage: Annotated[float, "Fraction of the split's images that are to have a confident pair."],
    n_runs_at_most: Annotated[
        int | None, "Of the whole store; default: twice what is planned now."
    ] = None,
    step: Annotated[int, "Runs that are added at a time; 0: one round."] = 0,
    stall_rounds: Annotated[int, "So many rounds without a new image end it."] = 5,
    store: cli.Store = cli.DEFAULT_STORE,
    split: cli.Split = "train",
    chosen: cli.Chosen,
    computed: cli.Computed,
) -> None:
    """Generate what is planned, then more until enough images are covered; resumes.

    Examples: `palimpsest top-up --store runs/cifar --coverage 0.85 --n-runs-at-most 4000` ·
    `palimpsest top-up --preset cifar-small --data folder:cifar10 --store runs/cifar --coverage
    0.5`
    """
    recipe = chosen.recipe(store)
    with cli.images_shown(recipe, split):
        from flows.top_up import DONE
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
    cli.show_facts(f"Coverage ({split})", facts)
    if facts["ending"] in DONE:
        cli.say(cli.out, why)
        return
    cli.say(cli.err, why)
    raise typer.Exit(cli.FAILED)


def _place(stored: cli.Stored) -> Place:
    """The place of the store; StorageError if there is none."""
    place = open_place(stored.location)
    read_store_file(place)
    return place


def status_facts(status: CampaignStatus, *, is_quiet: bool) -> dict[str, Any]:
    """Facts of a status, in the order in which people read them."""
    state: str = status.control.state
    if state != "running":
        state = f"{state} {age_text(time.time() - status.control.since)} ago"
    if status.is_complete:
        state = "complete" if status.control.state == "running" else f"complete; {state}"
    elif is_quiet:
        state = "quiet: it may run, but brings nothing"
    outcomes = ", ".join(f"{n:,} {name}" for name, n in status.outcomes.items() if n)
    images = "" if status.n_images is None else f" of the split's {status.n_images:,}"
    given_up = [q.part for q in status.quarantined]

    def of(done: int, planned: int | None) -> str:
        return f"{done:,}" if planned is None else f"{done:,} of {planned:,}"

    facts: dict[str, Any] = {
        "state": state,
        "runs": of(status.n_runs, status.n_planned),
        "outcomes": outcomes or "none yet",
        "parts": of(status.n_parts, status.n_parts_planned),
        "quarantined": f"{counted(len(given_up), 'part')}: {listed(given_up, 10)}"
        if given_up
        else "none",
        "pairs": f"{status.n_pairs:,}, of which confident {status.n_confident:,}",
        "images covered": f"{status.n_covered:,} of {status.n_trained:,} trained on{images}",
        "gini of confident pairs": status.gini,
    }
    for row in status.devices:
        kind = "worker" if row.device == "cpu" else "GPU"
        rate = "?" if row.pairs_per_hour is None else f"{row.pairs_per_hour:,.0f}"
        of_which = f", {row.device}" if len(status.devices) > 1 else ""
        facts[f"pairs per {kind} hour{of_which}"] = f"{rate} ({row.device}, {row.hours:,.2f} hours)"
    if status.runs_per_hour is not None:
        facts["runs per hour"] = f"{status.runs_per_hour:,.0f} in the last hour of receipts"
    if status.remaining_s and status.control.state == "running":
        facts["remaining"] = f"{age_text(status.remaining_s)} at that rate"
    if status.last_part_age_s is not None:
        facts["last part"] = f"{age_text(status.last_part_age_s)} ago"
    return facts


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """At most `width` characters, whose height is the mean of the values there, from 0."""
    n = min(width, len(values))
    edges = [round(k * len(values) / n) for k in range(n + 1)] if n else []
    means = [sum(values[first:last]) / (last - first) for first, last in itertools.pairwise(edges)]
    top = max(means, default=0.0)
    return "".join(SPARKS[max(1, round(8 * mean / top)) if mean > 0 else 0] for mean in means)


def status_notes(status: CampaignStatus, *, is_quiet: bool) -> list[str]:
    """Advice on everything that is not as it should be."""
    notes = [
        f"part {q.part} is in quarantine after {q.attempts} attempts: "
        f"{' '.join(q.reason.split())[:200]}; its log: {status.log_of(q)}"
        for q in status.quarantined
    ]
    if notes:
        notes.append("try them again with: palimpsest campaign retry, then the generate command")
    if is_quiet:
        age = age_text(status.last_part_age_s or 0.0)
        notes.append(f"no part for {age}: if nothing runs, the generate command goes on")
    if status.n_planned is None:
        notes.append(
            "how many runs are planned is in the job's recipe.json, which is not beside this "
            "store; give the job's folder as --store to see it"
        )
    return notes


def _is_quiet(status: CampaignStatus, receipts: Sequence[Receipt]) -> bool:
    """Whether a campaign that is to run has brought nothing for much longer than a part takes."""
    age = status.last_part_age_s
    if age is None or status.control.state != "running" or status.is_complete:
        return False
    usual_s = median(receipt.seconds for receipt in receipts)
    return age > max(QUIET_SECONDS, QUIET_PARTS * usual_s)
