"""`palimpsest top-up`: bring a store to a coverage, from a terminal.

Exit codes as everywhere; 1 also where somebody holds the campaign or parts are in quarantine.
"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.console import say, show_facts
from flows.cli.options import (
    DEFAULT_STORE,
    FAILED,
    Chosen,
    Computed,
    Split,
    Store,
    command,
    err,
    images_shown,
    out,
)

top_up_app = typer.Typer()


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
