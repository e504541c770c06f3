"""Train on several GPUs: `torchrun --nproc-per-node 4 -m flows.train_ranks --store runs/cifar`.

What `palimpsest train` does with the pairs of a job that exists, by as many processes as torchrun
starts and without Prefect: each of them runs this, rank 0 writes. `palimpsest train` takes what
they have finished as finished.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from flows.cli.console import Screen
from flows.naming import unknown_name
from flows.recipe import Recipe
from flows.settings import parse_assignments, read_recipe, resolve, to_json
from recon_core.restore import NonfiniteLossError
from recon_core.restore.fit import Ranks
from storage.errors import SourceError, StorageError, StoreMismatchError
from storage.files import write_json
from storage.pairs.dataset import Dataset
from tasks.devices import Device, resolve_device
from tasks.progress import LOG_EVERY_SECONDS, progress_line
from tasks.training.loop import Accelerated, OnStep, leave
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
    recipe = _recipe(workspace, settings or [])
    if only is not None and only not in recipe.restorers:
        raise ValueError(unknown_name("restorer", only, recipe.restorers))
    group, own_device = _group(device)
    for name, plan in recipe.restorers.items():
        if only in (None, name):
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
                on_step=_lines(name, shown=group.rank == 0),
            )
    if group.rank == 0:
        write_json(workspace.recipe, to_json(recipe))
    group.close()
    if group.size > 1:
        leave()


def _recipe(workspace: Workspace, settings: list[str]) -> Recipe:
    recipe = read_recipe(workspace)
    if recipe is None:
        raise StorageError(
            f"{workspace.root} has no recipe.json; start with `palimpsest generate --store "
            f"{workspace.root}`"
        )
    return resolve(recipe, parse_assignments(settings))


def _group(device: Device) -> tuple[Ranks, str]:
    kind = resolve_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # torchrun says how many it has started
        return Ranks(), kind
    group = Accelerated(cpu=kind == "cpu")
    return group, group.device


def _lines(name: str, *, shown: bool) -> OnStep:
    """A line on stderr every ten seconds."""
    console = Screen(stderr=True)
    started = last = time.monotonic()
    before: int | None = None

    def on_step(done: int, n_steps: int, loss: float) -> None:
        nonlocal before, last
        before = done if before is None else before
        now = time.monotonic()
        if shown and now - last >= LOG_EVERY_SECONDS:
            last = now
            line = progress_line(name, "step", done, n_steps, now - started, before=before)
            console.print(f"{line}  loss {loss:.4g}", soft_wrap=True, highlight=False)

    return on_step


def main() -> None:
    """The command: one line for what went wrong, and the exit codes of `palimpsest`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train_on_ranks)
    try:
        app()
    except (ValueError, SourceError, StoreMismatchError) as error:
        _fail(error, 2)
    except (StorageError, NonfiniteLossError) as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> NoReturn:
    who = f"process {os.environ['RANK']}: " if "RANK" in os.environ else ""
    Screen(stderr=True).print(
        f"{who}error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    sys.exit(code)


if __name__ == "__main__":
    main()
