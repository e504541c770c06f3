"""A campaign's status on the screen: facts, phases, sparklines, and what to do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from flows.naming import counted, listed
from storage.pairs.receipts import Receipt
from tasks.campaign.state import age_text
from tasks.campaign.status import CampaignStatus, CoverageCurve

SPARKS = " ▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 48
QUIET_SECONDS = 600.0
QUIET_PARTS = 5
"""A campaign is called quiet when its last part is older than both this and so many parts' time."""


def status_facts(status: CampaignStatus, receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Facts of a status, in the order in which people read them."""
    state: str = status.control.state
    if state != "running":
        state = f"{state} {age_text(time.time() - status.control.since)} ago"
    if status.is_complete:
        state = "complete" if status.control.state == "running" else f"complete; {state}"
    elif _is_quiet(status, receipts):
        state = "quiet: it may run, but brings nothing"
    outcomes = ", ".join(f"{n:,} {name}" for name, n in status.outcomes.items() if n)
    images = "" if status.n_images is None else f" of the split's {status.n_images:,}"
    given_up = [q.part for q in status.quarantined]
    facts: dict[str, Any] = {
        "state": state,
        "runs": _of(status.n_runs, status.n_planned),
        "outcomes": outcomes or "none yet",
        "parts": _of(status.n_parts, status.n_parts_planned),
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


def phase_table(status: CampaignStatus) -> Table:
    """Table of what each phase of the plan brought."""
    table = Table(title="Phases: confident pairs, and images that have one", title_justify="left")
    table.add_column("sampler")
    for name in ("runs", "confident", "per run", "images", "new"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in status.phases:
        table.add_row(*phase.texts())
    return table


def sparklines(curve: CoverageCurve) -> list[str]:
    """One character per stretch of runs: pairs per run, and coverage so far; of one point, none."""
    lines = []
    rows = (
        ()
        if len(curve.n_runs) < 2
        else (
            ("confident pairs per run", curve.pairs_per_run, "{:,.1f}"),
            ("images covered", curve.n_covered, "{:,.0f}"),
        )
    )
    for name, values, form in rows:
        low, high = form.format(min(values)), form.format(max(values))
        lines.append(f"  {name:25}{sparkline(values)}  {low} to {high}")
    return lines


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """At most `width` characters, whose height is the mean of the values there, from 0."""
    n = min(width, len(values))
    edges = [round(k * len(values) / n) for k in range(n + 1)] if n else []
    means = [sum(values[first:last]) / (last - first) for first, last in itertools.pairwise(edges)]
    top = max(means, default=0.0)
    return "".join(SPARKS[max(1, round(8 * mean / top)) if mean > 0 else 0] for mean in means)


def status_notes(status: CampaignStatus, receipts: Sequence[Receipt]) -> list[str]:
    """Advice on everything that is not as it should be."""
    notes = [
        f"part {q.part} is in quarantine after {q.attempts} attempts: "
        f"{' '.join(q.reason.split())[:200]}; its log: {status.log_of(q)}"
        for q in status.quarantined
    ]
    if notes:
        notes.append("try them again with: palimpsest campaign retry, then the generate command")
    if _is_quiet(status, receipts):
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


def _of(done: int, planned: int | None) -> str:
    return f"{done:,}" if planned is None else f"{done:,} of {planned:,}"
