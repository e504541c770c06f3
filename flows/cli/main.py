"""The `palimpsest` command. Exit codes: 0 done, 1 the job failed, 2 bad usage,
3 an audit found more than a limit allows, 130 and 143 interrupted by Ctrl-C and SIGTERM.

Every command works on one folder, the store (`--store`), and takes its settings from a preset, from
what an earlier command left there, and from `--set name=value`, in that order.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from flows.cli import attack_file, attack_weights, campaign, dataset, instahide, restore, study
from flows.cli import options as cli
from flows.cli.command import end_if_interrupted, resume_line
from flows.failures import expected_line
from storage.errors import SourceError, StorageError, StoreMismatchError, shown
from tasks import __version__
from tasks.cluster.process_settings import keep_freed_memory
from tasks.interruption import end_on_sigterm, start_guard, take_ctrl_c_alone
from tasks.workspace import Workspace

DONE, BAD_USAGE = 0, 2
INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt."""
WIDE_TABLE = 110
"""Columns of a terminal from which the table of scores has all of its columns."""
QUIET_PREFECT = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "PREFECT_CLIENT_MAX_RETRIES": "4",
}
"""A command keeps Prefect's own messages off the screen, and waits half a minute for a server that
went away."""
WORKSPACE_ENTRIES = frozenset(
    {
        *("recipe.json", "timings.json", "pairs", "heldout", "heldout-excluded.json"),
        *("heldout-kkt", "heldout-span"),
        *("curation.json", "restorers", "evaluation"),
    }
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
attack_app = typer.Typer(no_args_is_help=True, help="Attack a network that is already trained.")
for group in (attack_weights.weights_app, instahide.encodings_app, attack_file.given_app):
    attack_app.add_typer(group)
app.add_typer(dataset.dataset_app, name="dataset")
app.add_typer(campaign.campaign_app, name="campaign")
app.add_typer(attack_app, name="attack")
app.add_typer(instahide.instahide_app, name="instahide")
for group in (campaign.top_up_app, restore.restore_app, study.study_app):
    app.add_typer(group)
app.add_typer(attack_weights.train_app, name="train")


def _say_version(wanted: bool) -> None:
    if wanted:
        cli.out.print(f"palimpsest {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def palimpsest(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Say which release this is.", is_eager=True, callback=_say_version
        ),
    ] = False,
) -> None:
    """Measure what trained networks remember of their training images."""


@cli.command(app, "demo")
def demo(
    *,
    store: cli.Store = cli.DEFAULT_STORE,
    chosen: cli.Chosen,
    computed: cli.Computed,
    fresh: cli.FreshStore = False,
) -> None:
    """Run every stage from images to a report; finished stages are not repeated.

    Examples: `palimpsest demo` · `palimpsest demo --fresh` · `palimpsest demo --data
    folder:my-images --store runs/mine --set seed=1`
    """
    from flows.chain import chain, check_chain

    if fresh and chosen.preset is None:  # the store's settings go with it
        chosen = replace(chosen, preset="demo")
    recipe, workers = chosen.recipe(store), computed.workers
    elsewhere = Workspace.found(store).pairs_at if fresh else None
    if elsewhere is not None:
        raise ValueError(
            f"--fresh would leave the pairs of {store} at {elsewhere}; remove the stores there "
            "and the folder yourself, or use another --store"
        )
    cli.out.print(f"[bold]palimpsest[/]  {recipe.name} on {recipe.data}, store {store}")
    with cli.images_shown(recipe, "train", "heldout"):
        if fresh:
            check_chain(recipe, workers)
            cli.start_over(store, WORKSPACE_ENTRIES, option="--store")
        products = chain(recipe, store, workers=workers)
    cli.show_facts("Pairs", products["pairs"])
    _show_scores(products["evaluation"])
    cli.out.print(f"Report: [bold]{Path(products['report']).absolute()}[/]")


@cli.command(app, "generate")
def generate(
    *,
    store: cli.Store = cli.DEFAULT_STORE,
    split: cli.Split = "train",
    chosen: cli.Chosen,
    computed: cli.Computed,
    batch: Annotated[
        str | None, "Runs per part: a number, or auto: what the GPU has room for."
    ] = None,
) -> None:
    """Train victims, attack them, store the pairs; resumes what is there.

    Examples: `palimpsest generate --preset cifar-small --data folder:cifar10 --store
    runs/cifar` · `palimpsest generate --split heldout --store runs/cifar`
    """
    recipe = chosen.recipe(store)
    with cli.images_shown(recipe, split):
        from flows.generate import generate as flow
        from tasks.cluster.batching import batched

        workers = computed.workers
        if batch is not None:
            campaign = recipe.campaign(split)
            pairs = Workspace(store, recipe.pairs_at).pairs(split)
            shape = recipe.images(split).images.shape[1:]
            sampling = batched(campaign, batch, shape=shape, workers=workers, store=pairs)
            recipe = recipe.with_sampling(split, sampling)
        facts = flow(recipe, store, split, workers=workers)
    cli.show_facts(f"Pairs ({split})", facts)


@cli.command(app, "curate")
def curate(
    *,
    store: cli.Store = cli.DEFAULT_STORE,
    preset: cli.Preset = None,
    settings: cli.Settings = None,
) -> None:
    """Balance the pairs over the images, for the restorers' training.

    Example: `palimpsest curate --store runs/cifar --set curation.n_subsets=20`
    """
    from flows.settings import to_json
    from storage.files import write_json
    from tasks.dataset.curate import curate_pairs

    recipe = cli.Chosen(preset=preset, settings=settings).recipe(store)
    workspace = Workspace(store, recipe.pairs_at)
    facts = curate_pairs(recipe.curation, workspace)
    write_json(workspace.recipe, to_json(recipe))
    cli.show_facts("Curation", facts)


@cli.command(attack_weights.train_app, None)
def train(
    *,
    store: cli.Store = cli.DEFAULT_STORE,
    only: Annotated[str | None, "One restorer of the recipe."] = None,
    preset: cli.Preset = None,
    settings: cli.Settings = None,
    device: cli.Device = "auto",
) -> None:
    """Train the restorers on the pairs; resumes what was interrupted.

    Examples: `palimpsest train --store runs/cifar` · `palimpsest train --store runs/cifar
    --only edm --set restorers.edm.training.n_steps=4000`
    """
    from flows.chain import train as flow

    recipe = cli.Chosen(preset=preset, settings=settings).recipe(store)
    for name, card in flow(recipe, store, only, device=device).items():
        single = {k: v for k, v in card.items() if isinstance(v, int | float | str)}
        cli.show_facts(f"Restorer {name}", single)


@cli.command(app, "evaluate")
def evaluate(
    *, store: cli.Store = cli.DEFAULT_STORE, chosen: cli.Chosen, computed: cli.Computed
) -> None:
    """Attack the held-out victims, if that is not done, and score every method on their images and
    on decoys; resumes what was interrupted.

    Examples: `palimpsest evaluate --store runs/cifar --set evaluation.n_samples=20` ·
    `palimpsest evaluate --preset restoration-cpu --data folder:cifar10 --store runs/sweep`
    """
    recipe = chosen.recipe(store)
    with cli.images_shown(recipe, "heldout"):
        from flows.chain import evaluate as flow

        _show_scores(flow(recipe, store, device=computed.device, workers=computed.workers))


@cli.command(app, "report")
def report(
    run: Annotated[
        Path | None,
        typer.Argument(help="Rebuild from this folder alone: a job's, or its evaluation's."),
    ] = None,
    store: Annotated[Path | None, f"The job's folder; default: {cli.DEFAULT_STORE}."] = None,
    page: Annotated[Path | None, "--out", "With RUN: the page, by default in its folder."] = None,
    preset: cli.Preset = None,
    settings: cli.Settings = None,
) -> None:
    """Rebuild the HTML report from a finished evaluation.

    Examples: `palimpsest report --store runs/cifar` · `palimpsest report runs/cifar` ·
    `palimpsest report copied/evaluation --out page.html`
    """
    if run is None:
        if page is not None:
            raise ValueError(f"--out {page} goes with a folder: palimpsest report RUN --out {page}")
        from flows.chain import report as flow

        store = store or cli.DEFAULT_STORE
        made = flow(cli.Chosen(preset=preset, settings=settings).recipe(store), store)
    elif store is not None or preset is not None or settings:
        raise ValueError(
            f"{run} is rebuilt from its folder alone; leave out --store, --preset and --set"
        )
    else:
        from tasks.report.page import rebuild_report

        made = rebuild_report(run, page)
    cli.out.print(f"Report: [bold]{Path(made).absolute()}[/]")


@cli.command(app, "compare")
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Jobs' folders or evaluations' own; the first is compared with."),
    ],
    page: Annotated[Path, "--out", "The page; the same numbers come beside it as .json."] = Path(
        "compare.html"
    ),
) -> None:
    """Put evaluations side by side: settings that differ, scores, differences with intervals.

    Examples: `palimpsest compare runs/a runs/b` · `palimpsest compare runs/plain runs/defended
    runs/larger --out pages/defence.html`
    """
    from tasks.report.compare import compare_runs, difference_rows

    if rows := difference_rows(compare_runs(runs, page)):
        table = Table(title="Difference from the first run, targets", title_justify="left")
        cli.show_rows(rows, table)
    else:
        cli.out.print("The runs have no method in common.")
    for path in (page, page.with_suffix(".json")):
        cli.say(cli.out, str(path.absolute()))


def main() -> NoReturn:
    """Run the command: one line for what went wrong, how to resume, and the exit code."""
    end_on_sigterm()
    try:
        start_guard()
        keep_freed_memory()
        take_ctrl_c_alone()
        for name, value in QUIET_PREFECT.items():
            os.environ.setdefault(name, value)
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        cli.show_notices()
        _refuse_other_bytes(sys.argv[1:])
        code = app(standalone_mode=False)
    except BaseException as error:
        end_if_interrupted()  # a clean-up that is cut off may raise anything
        if isinstance(error, ValueError | SourceError | StoreMismatchError):
            _fail(error, BAD_USAGE)
        if hasattr(error, "show"):  # click's usage errors know how to present themselves
            vars(error)["message"] = shown(str(vars(error)["message"]), keep="\n")
            error.show()
            context = getattr(error, "ctx", None)
            known = getattr(getattr(context, "command", None), "commands", None)
            if context is not None and known and "No such command" in str(error):
                cli.say(cli.err, f"Commands of {context.command_path}: {', '.join(known)}")
            sys.exit(BAD_USAGE)
        line = expected_line(error) if isinstance(error, Exception) else None
        if line is None:
            raise
        _fail(line, cli.FAILED)
    if code == INTERRUPTED:
        end_if_interrupted()
        cli.err.print(resume_line(), markup=False, highlight=False, soft_wrap=True)
    sys.exit(code if isinstance(code, int) else DONE)


def _refuse_other_bytes(words: list[str]) -> None:
    """Refuse arguments that are not UTF-8, since the parameters of flows are JSON. Pictures and
    folders below a path may have any name."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            _fail(f"{shown(word)} is not UTF-8; rename it, or give a link to it that is", BAD_USAGE)


def _fail(error: Exception | str, code: int) -> NoReturn:
    said = shown(str(error)) if isinstance(error, StorageError) else str(error)  # one line
    cli.err.print(f"error: {said}", style="red", markup=False, soft_wrap=True)
    sys.exit(code)


def _show_scores(record: dict[str, Any]) -> None:
    from flows.chain import summary_rows

    table = Table(title="Scores (good: SSIM above the threshold)", title_justify="left")
    is_narrow = cli.out.width < WIDE_TABLE or bool(record.get("span"))  # names are long then
    left_out = ("HaarPSI",) if is_narrow else ()
    rows = [
        {name: cli.fact_text(v) for name, v in row.items() if not name.startswith(left_out)}
        for row in summary_rows(record)
    ]
    cli.show_rows(rows, table)


if __name__ == "__main__":
    main()
