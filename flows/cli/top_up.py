"""`palimpsest top-up`: bring a store to a coverage, from a terminal.

Exit codes as everywhere; 1 also where somebody holds the campaign or parts are in quarantine.
"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.console import say, show_facts
from flows.cli.options import (
    DEFAULT_STORE,
    ClusterOption,
    DataOption,
    DeviceOption,
    PresetOption,
    SetOption,
    SkipOption,
    SplitOption,
    StoreOption,
    WorkersOption,
    err,
    images_shown,
    out,
    recipe_of,
)

FAILED = 1

top_up_app = typer.Typer()


@top_up_app.command(
    "top-up",
    epilog="Examples: `palimpsest top-up --store runs/cifar --coverage 0.85 "
    "--n-runs-at-most 4000` · `palimpsest top-up --preset cifar-small --data folder:cifar10 "
    "--store runs/cifar --coverage 0.5`",
)
def top_up(
    *,
    coverage: Annotated[
        float,
        typer.Option(
            "--coverage", help="Fraction of the split's images that are to have a confident pair."
        ),
    ],
    n_runs_at_most: Annotated[
        int | None,
        typer.Option(
            "--n-runs-at-most", help="Of the whole store; default: twice what is planned now."
        ),
    ] = None,
    step: Annotated[
        int, typer.Option("--step", help="Runs that are added at a time; 0: one round.")
    ] = 0,
    stall_rounds: Annotated[
        int, typer.Option("--stall-rounds", help="So many rounds without a new image end it.")
    ] = 5,
    store: StoreOption = DEFAULT_STORE,
    split: SplitOption = "train",
    preset: PresetOption = None,
    data: DataOption = None,
    skip_corrupt: SkipOption = False,
    settings: SetOption = None,
    device: DeviceOption = "auto",
    n_workers: WorkersOption = 0,
    cluster: ClusterOption = "local",
) -> None:
    """Generate what is planned, then more until enough images are covered; resumes."""
    recipe = recipe_of(store, preset, data, settings, skip_corrupt=skip_corrupt)
    with images_shown(recipe, split):
        from flows.coverage_goal import DONE
        from flows.top_up import top_up as flow
        from tasks.cluster.workers import Workers

        facts = flow(
            recipe,
            store,
            coverage=coverage,
            n_runs_at_most=n_runs_at_most,
            step=step,
            stall_rounds=stall_rounds,
            split=split,
            workers=Workers(cluster=cluster, n_workers=n_workers, device=device),
        )
    why = facts.pop("why")
    show_facts(out, f"Coverage ({split})", facts)
    if facts["ending"] in DONE:
        say(out, why)
        return
    say(err, why)
    raise typer.Exit(FAILED)
