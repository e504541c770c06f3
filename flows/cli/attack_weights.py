"""`palimpsest attack weights` and `attack kkt`: training images from a file of weights.

`weights` chooses the attack that can work; `kkt` is one of them, with all that it can be told. Exit
codes as everywhere; 2 also where preflight says that an attack cannot work.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from flows.cli import attack_options as options
from flows.cli.console import Screen, show_facts

REFUSED = 2
SIGNS = {"ok": "[green]ok[/]     ", "warning": "[yellow]warning[/]", "stop": "[red]stop[/]   "}

attack_app = typer.Typer(no_args_is_help=True, help="Attack a network that is already trained.")
out = Screen()


@attack_app.command(
    "weights",
    epilog="Examples: `palimpsest attack weights --weights victim.safetensors` · "
    "`palimpsest attack weights --weights victim.pt --initial epoch0.pt --data folder:my-images "
    "--decoys folder:others`",
)
def attack_weights(
    *,
    weights: options.Weights,
    initial: Annotated[
        Path | None,
        typer.Option("--initial", help="The weights that training started from, if known."),
    ] = None,
    method: Annotated[
        Literal["auto", "span", "kkt"],
        typer.Option(
            "--method", help="span: takes the first layer apart, in seconds; kkt: minutes to hours."
        ),
    ] = "auto",
    target: options.Out = None,
    arch: options.Arch = None,
    shape: options.Shape = None,
    activation: options.Activation = "relu",
    leak: options.Leak = 0.01,
    n_attacks: options.Attacks = None,
    n_images: Annotated[
        int | None,
        typer.Option(
            "--n-images-guess", help="Training images; default: counted in the first layer."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value, e.g. attack.n_likelihood=200; repeatable."),
    ] = None,
    data: options.Data = None,
    decoys: options.Decoys = None,
    mean: options.Mean = None,
    std: options.Std = None,
    skip_corrupt: options.SkipCorrupt = False,
    seed: options.Seed = 0,
    dtype: options.Dtype = "float32",
    n_shown: options.Show = 40,
    device: options.Device = "auto",
    preflight_only: options.Preflight = False,
    force: options.Force = False,
    fresh: options.Fresh = False,
) -> None:
    """Reconstruct training images from a file of weights, by the attack that can work; resumes."""
    from flows.families.weights.attack_plan import attack_job, parse_shape
    from tasks.families.weights.preflight import prepare

    job_of = partial(
        attack_job,
        weights,
        target or default_folder(weights),
        initial=initial,
        arch=arch,
        shape=None if shape is None else parse_shape(shape),
        activation=activation,
        leak=leak,
        n_attacks=n_attacks,
        n_images=n_images,
        settings=assignments(settings),
        data=data,
        decoys=decoys,
        mean=mean,
        std=None if std is None else numbers(std, "--std"),
        seed=seed,
        dtype=dtype,
        n_shown=n_shown,
        skip_corrupt=skip_corrupt,
    )
    job = job_of(method="kkt" if method == "kkt" else "span")
    prepared = prepare(job)
    if method == "auto" and prepared.preflight.stopped:
        job = job_of(method="kkt", initial=None)
        instead, prepared = prepared.preflight.reason, prepare(job)
        out.print(f"Method: kkt, since span cannot work here: {instead}", markup=False)
    elif method == "auto":
        out.print(f"Method: span. {prepared.preflight.verdict}", markup=False)
    _attack(job, prepared, device, preflight_only=preflight_only, force=force, fresh=fresh)


@attack_app.command(
    "kkt",
    epilog="Examples: `palimpsest attack kkt --weights victim.safetensors` · "
    "`palimpsest attack kkt --weights victim.pt --arch mlp:3072-1000-1000-1 --n-images-guess 500 "
    "--data folder:my-images --decoys folder:others`",
)
def attack_kkt(
    *,
    weights: options.Weights,
    target: options.Out = None,
    arch: options.Arch = None,
    shape: options.Shape = None,
    activation: options.Activation = "relu",
    leak: options.Leak = 0.01,
    condition: Annotated[
        Literal["binary", "multiclass", "regression"] | None,
        typer.Option("--condition", help="Default: by the number of outputs."),
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", help="ensemble, or an experiment of the papers.")
    ] = "ensemble",
    n_attacks: options.Attacks = None,
    n_images: Annotated[
        int | None,
        typer.Option("--n-images-guess", help="Training images; twice as many candidates."),
    ] = None,
    n_iterations: Annotated[
        int | None, typer.Option("--iterations", help="Of each attack.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value, e.g. attack.alpha=50; repeatable."),
    ] = None,
    data: options.Data = None,
    decoys: options.Decoys = None,
    mean: options.Mean = None,
    std: options.Std = None,
    skip_corrupt: options.SkipCorrupt = False,
    seed: options.Seed = 0,
    dtype: options.Dtype = "float32",
    n_shown: options.Show = 40,
    device: options.Device = "auto",
    preflight_only: options.Preflight = False,
    force: options.Force = False,
    fresh: options.Fresh = False,
) -> None:
    """Reconstruct training images by the KKT search alone, with all its settings; resumes."""
    from flows.families.weights.attack_plan import attack_job, parse_shape
    from tasks.families.weights.preflight import prepare

    job = attack_job(
        weights,
        target or default_folder(weights),
        arch=arch,
        shape=None if shape is None else parse_shape(shape),
        activation=activation,
        leak=leak,
        condition=condition,
        preset=preset,
        n_attacks=n_attacks,
        n_images=n_images,
        n_iterations=n_iterations,
        settings=assignments(settings),
        data=data,
        decoys=decoys,
        mean=mean,
        std=None if std is None else numbers(std, "--std"),
        seed=seed,
        dtype=dtype,
        n_shown=n_shown,
        skip_corrupt=skip_corrupt,
    )
    _attack(job, prepare(job), device, preflight_only=preflight_only, force=force, fresh=fresh)


def _attack(
    job: Any, prepared: Any, device: Any, *, preflight_only: bool, force: bool, fresh: bool
) -> None:
    """Says what was read and what its chances are, and attacks if that is asked for."""
    from tasks.devices import resolve_device

    resolve_device(device)
    show_victim(prepared)
    show_pictures({"Training images": prepared.truth, "Decoys": prepared.decoys})
    show_preflight(prepared)
    if prepared.preflight.stopped and not force:
        raise typer.Exit(REFUSED)
    if preflight_only:
        return
    from flows.families.weights import attack as flow
    from flows.fresh import start_over

    if fresh:
        start_over(job.out, flow.ENTRIES, option="--out")
    run = flow.attack_kkt if prepared.method == "kkt" else flow.attack_weights
    _show_attack(run(job, device=device, force=force, command=this_command()), job.out)


def default_folder(attacked: Path) -> Path:
    """Where results go unless `--out` says it."""
    return Path("palimpsest-runs") / f"attack-{attacked.stem}"


def assignments(settings: list[str] | None) -> dict[str, str]:
    """The name=value pairs of `--set`; whatever knows all settings is loaded only if there are."""
    if not settings:
        return {}
    from flows.settings import parse_assignments

    return parse_assignments(settings)


def numbers(text: str, option: str) -> tuple[float, ...]:
    """One number, or one per channel with commas; ValueError naming the option."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} {text} is no number, nor one per channel: 0.5,0.5,0.5") from (
            error
        )


def show_victim(prepared: Any) -> None:
    """What was read of the network."""
    facts = prepared.victim.facts
    out.print(f"[bold]{escape(facts['file'])}[/]")
    width = max(len(name) for name in facts) + 2
    for name, value in facts.items():
        if name != "file":
            text = f"{value:,}" if isinstance(value, int) else str(value)
            out.print(f"  {name:{width}}{text}", markup=False, highlight=False, soft_wrap=True)


def show_pictures(read: Mapping[str, Any]) -> None:
    """What was read of each source that is known, by what it is."""
    for title, pictures in read.items():
        if pictures is not None:
            show_facts(out, title, {"source": pictures.source} | pictures.facts)


def show_preflight(prepared: Any) -> None:
    """Findings and the verdict."""
    out.print("[bold]Preflight[/]")
    for finding in prepared.preflight.findings:
        text = f"[bold]{escape(finding.subject)}[/]: {escape(finding.text)}"
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column()
        row.add_row(f"  {SIGNS[finding.level]}", text)
        out.print(row)
    out.print(f"[bold]{escape(prepared.preflight.verdict)}[/]")
    if prepared.preflight.stopped:
        out.print("Mend what is marked stop, or give --force to attack all the same.")


def _show_attack(record: dict[str, Any], folder: Path) -> None:
    from flows.families.weights.attack import outcome

    out.print(outcome(record), markup=False)
    for name in ("report.html", "reconstructions.png", "attack.json"):
        out.print(f"  {(folder / name).absolute()}", markup=False, soft_wrap=True)


def this_command() -> str:
    """The command that runs, without --fresh."""
    words = [word for word in sys.argv[1:] if word != "--fresh"]
    return shlex.join(["palimpsest", *words])
