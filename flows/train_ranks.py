"""Train on several GPUs: `torchrun --nproc-per-node 4 -m flows.train_ranks --store runs/cifar`.

What `palimpsest train` does with the pairs of a job that exists, by as many processes as torchrun
starts and without Prefect: each of them runs this, rank 0 writes. `palimpsest train` takes what
they have finished as finished.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import Screen
from flows.naming import unknown_name
from flows.settings import parse_assignments, read_recipe, resolve, to_json
from recon_core.restore import NonfiniteLossError
from recon_core.restore.fit import Ranks
from storage.errors import SourceError, StorageError, StoreMismatchError
from storage.files import write_json
from storage.pairs.dataset import Dataset
from tasks.devices import Device, resolve_device
from tasks.progress import Advance, stage_progress
from tasks.training.loop import Accelerated, leave
from tasks.training.train import train_restorer
from tasks.workspace import Workspace


def train_on_ranks(
    store: Annotated[Path, typer.Option(help="The job's folder.")],
    only: Annotated[str | None, typer.Option(help="One restorer of the recipe.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="name=value")] = None,
    device: Device = "auto",
) -> None:
    """Train the restorers of the job at `store`; resumes what as many processes have begun.

    Raises:
        StorageError: there is no job at `store`, or as `train_restorer`.
        StoreMismatchError: another number of processes has begun it.
        ValueError: an unknown restorer or setting, or as `train_restorer`.
    """
    workspace = Workspace.found(store)
    recipe = read_recipe(workspace)
    if recipe is None:
        raise StorageError(
            f"{workspace.root} has no recipe.json; start with `palimpsest generate --store "
            f"{workspace.root}`"
        )
    recipe = resolve(recipe, parse_assignments(settings or []))
    if only is not None and only not in recipe.restorers:
        raise ValueError(unknown_name("restorer", only, recipe.restorers))
    own_device = resolve_device(device)
    group = Ranks()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # set by torchrun
        group = accelerated = Accelerated(cpu=own_device == "cpu")
        own_device = accelerated.device
    for name, plan in recipe.restorers.items():
        if only in (None, name):
            with stage_progress(name, "step") if group.rank == 0 else nullcontext() as advance:
                train_restorer(
                    plan.restorer,
                    plan.training,
                    dataset=Dataset(workspace.pairs("train")),
                    curation=recipe.curation,
                    images_for_noise=recipe.images("train").images,
                    out=workspace.restorer(name),
                    device=own_device,
                    validation=plan.validation,
                    group=group,
                    on_step=partial(_report, advance),
                )
    if group.rank == 0:
        write_json(workspace.recipe, to_json(recipe))
    group.close()
    if group.size > 1:
        leave()


def _report(advance: Advance | None, done: int, n_steps: int, loss: float) -> None:
    if advance is not None:
        advance(done, n_steps, f"loss {loss:.4g}")


def main() -> None:
    """The command: one line for what went wrong, and the exit codes of `palimpsest`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train_on_ranks)
    try:
        app()
    except (ValueError, StorageError, NonfiniteLossError) as error:
        who = f"process {os.environ['RANK']}: " if "RANK" in os.environ else ""
        Screen(stderr=True).print(
            f"{who}error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(2 if isinstance(error, ValueError | SourceError | StoreMismatchError) else 1)


if __name__ == "__main__":
    main()
