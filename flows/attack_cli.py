"""`palimpsest attack kkt`: reconstruct training images from a file of weights.

Exit codes as everywhere; 2 also where preflight says that an attack cannot work.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from flows.screen import Screen, show_facts

REFUSED = 2
SIGNS = {"ok": "[green]ok[/]     ", "warning": "[yellow]warning[/]", "stop": "[red]stop[/]   "}

attack_app = typer.Typer(no_args_is_help=True, help="Attack a network that is already trained.")
out = Screen()

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--store",
        help="Folder of what comes back; default: palimpsest-runs/attack-, and the file's name.",
    ),
]
"""Where every attack leaves its results."""


@attack_app.command(
    "kkt",
    epilog="Examples: `palimpsest attack kkt --weights victim.safetensors` · "
    "`palimpsest attack kkt --weights victim.pt --arch mlp:3072-1000-1000-1 --n-images-guess 500 "
    "--data folder:my-images --decoys folder:others`",
)
def attack_kkt(
    *,
    weights: Annotated[
        Path, typer.Option("--weights", help="safetensors, or a state dict of torch.save.")
    ],
    target: OutOption = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", help="mlp:3072-1000-1000-1 | conv:3x32:3072-1000-1; else inferred."),
    ] = None,
    shape: Annotated[str | None, typer.Option("--shape", help="Of the images: 3x32x32.")] = None,
    activation: Annotated[
        Literal["relu", "leaky_relu", "gelu"],
        typer.Option("--activation", help="It cannot be read from weights."),
    ] = "relu",
    leak: Annotated[float, typer.Option("--leak", help="Slope of leaky_relu below 0.")] = 0.01,
    condition: Annotated[
        Literal["binary", "multiclass", "regression"] | None,
        typer.Option("--condition", help="Default: by the number of outputs."),
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", help="ensemble, or an experiment of the papers.")
    ] = "ensemble",
    n_attacks: Annotated[int | None, typer.Option("--attacks", help="How many.")] = None,
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
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="folder:PATH of the training images, to score what comes back."
        ),
    ] = None,
    decoys: Annotated[
        str | None, typer.Option("--decoys", help="folder:PATH of images it never saw.")
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option("--mean", help="What was subtracted: .npy | picture | 0.49,0.48,0.45 | none."),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option("--std", help="What inputs were then divided by, as 0.25,0.24,0.26 or 1."),
    ] = None,
    skip_corrupt: Annotated[
        bool, typer.Option("--skip-corrupt", help="Leave out pictures that cannot be read.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    dtype: Annotated[Literal["float32", "float64"], typer.Option("--dtype")] = "float32",
    n_shown: Annotated[int, typer.Option("--show", help="Pictures that are shown.")] = 40,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device")] = "auto",
    preflight_only: Annotated[
        bool, typer.Option("--preflight", help="Only say whether an attack can work.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Attack whatever preflight says.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete earlier results first.")] = False,
) -> None:
    """Reconstruct training images from a file of weights; resumes what was interrupted."""
    from flows.attack_plan import attack_job, parse_shape
    from tasks.attack_preflight import prepare
    from tasks.devices import resolve_device

    target = target or default_folder(weights)
    job = attack_job(
        weights,
        target,
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
    resolve_device(device)
    prepared = prepare(job)
    show_victim(prepared)
    show_pictures({"Training images": prepared.truth, "Decoys": prepared.decoys})
    show_preflight(prepared)
    if prepared.preflight.stopped and not force:
        raise typer.Exit(REFUSED)
    if preflight_only:
        return
    from flows import attack as flow
    from flows.fresh import start_over

    if fresh:
        start_over(target, flow.ENTRIES, option="--out")
    record = flow.attack_kkt(job, device=device, force=force, command=this_command())
    _show_attack(record, target)


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
    from flows.attack import outcome

    out.print(outcome(record), markup=False)
    for name in ("report.html", "reconstructions.png", "attack.json"):
        out.print(f"  {(folder / name).absolute()}", markup=False, soft_wrap=True)


def this_command() -> str:
    """The command that runs, without --fresh."""
    words = [word for word in sys.argv[1:] if word != "--fresh"]
    return shlex.join(["palimpsest", *words])
