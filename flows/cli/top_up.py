"""`palimpsest top-up`: bring a store to a coverage, from a terminal.

Exit codes as everywhere; 1 also where somebody holds the campaign or parts are in quarantine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.console import Screen, show_facts
from flows.naming import PRESET_HELP

FAILED = 1

top_up_app = typer.Typer()
out = Screen()
err = Screen(stderr=True)


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
    store: Annotated[Path, typer.Option("--store", help="Folder of the job's products.")] = Path(
        "palimpsest-runs/demo"
    ),
    split: Annotated[Literal["train", "heldout"], typer.Option("--split")] = "train",
    preset: Annotated[
        str | None,
        typer.Option("--preset", help=PRESET_HELP),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="photos | digits | folder:PATH | cifar10:PATH | cifar100:PATH | mnist:PATH | "
            "fashion-mnist:PATH | svhn:PATH | tiny-imagenet:PATH",
        ),
    ] = None,
    skip_corrupt: Annotated[
        bool,
        typer.Option("--skip-corrupt", help="Leave out files of a folder that cannot be read."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value, any setting of the recipe; repeatable."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device")] = "auto",
    n_workers: Annotated[int, typer.Option("--workers", help="0: one per core, or per GPU.")] = 0,
    cluster: Annotated[str, typer.Option("--cluster", help="As of palimpsest generate.")] = "local",
) -> None:
    """Generate what is planned, then more until enough images are covered; resumes."""
    from flows.cli.main import _recipe, images_shown

    recipe = _recipe(store, preset, data, settings, skip_corrupt=skip_corrupt)
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
        out.print(why, markup=False, highlight=False, soft_wrap=True)
        return
    err.print(why, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(FAILED)
