"""`palimpsest attack autoencoder`: recover degraded training images from a given autoencoder.

Exit codes as everywhere; 2 also where preflight says that an attack cannot work.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from flows.cli import attack_options as options
from flows.cli.attack_weights import (
    REFUSED,
    assignments,
    attack_app,
    default_folder,
    numbers,
    out,
    show_pictures,
    show_preflight,
    show_victim,
    this_command,
)

__all__ = ["attack_app", "attack_autoencoder"]


@attack_app.command(
    "autoencoder",
    epilog="Examples: `palimpsest attack autoencoder --weights net.safetensors --data "
    "folder:training-images --control folder:others` · `palimpsest attack autoencoder --weights "
    "net.pt2 --trust --data cifar10:PATH --masks random,half,window --method noise_aware,unknown` "
    "· `palimpsest attack autoencoder --weights net.pt --degraded damaged --originals whole`",
)
def attack_autoencoder(
    *,
    weights: Annotated[
        Path,
        typer.Option(
            "--weights",
            help="safetensors, a state dict of torch.save, TorchScript, or a .pt2 of torch.export.",
        ),
    ],
    target: options.Out = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="The training images, which are degraded here: photos | folder:PATH | "
            "cifar10:PATH | ...",
        ),
    ] = None,
    split: Annotated[
        Literal["all", "train", "heldout"] | None,
        typer.Option("--split", help="Of --data; default: all of a folder, else train."),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(
            "--control",
            help="Images that it never saw; default: what --data holds out; none for none.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Images of each kind.")] = 50,
    degraded: Annotated[
        Path | None,
        typer.Option("--degraded", help="Instead: a folder of degraded pictures, black missing."),
    ] = None,
    originals: Annotated[
        Path | None,
        typer.Option("--originals", help="Their originals by the same names, to score."),
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks", help="random,blocks,stripes,text,half,window; default: random,half."
        ),
    ] = None,
    mask_files: Annotated[
        list[Path] | None,
        typer.Option("--mask", help="A picture of a mask, white is known; repeatable."),
    ] = None,
    noise: Annotated[
        float, typer.Option("--noise", help="Standard deviation of the noise, for example 0.02.")
    ] = 0.0,
    methods: Annotated[
        str, typer.Option("--method", help="noise_aware (ours), unknown, known, iteration.")
    ] = "noise_aware",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of the methods: gamma=.5, unknown.n_admm=80; repeatable."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", help="fc:3072-512-512-3072 | unet:16-32-64; else inferred."),
    ] = None,
    activation: Annotated[
        Literal["relu", "leaky_relu", "prelu", "softplus", "gelu", "elu", "silu", "tanh", "sigmoid"]
        | None,
        typer.Option("--activation", help="It cannot be read from weights. [default: leaky_relu]"),
    ] = None,
    leak: options.Leak = 0.01,
    last: Annotated[
        Literal["linear", "sigmoid", "tanh"],
        typer.Option("--last", help="What follows the last layer."),
    ] = "linear",
    skips: Annotated[
        bool | None, typer.Option("--skips/--no-skips", help="Of a U-Net; else inferred.")
    ] = None,
    convolutions: Annotated[
        int | None, typer.Option("--convolutions", help="Per level of a U-Net; else inferred.")
    ] = None,
    shape: Annotated[str | None, typer.Option("--shape", help="Of the images: 3x32x32.")] = None,
    mean: Annotated[
        str, typer.Option("--mean", help="Subtracted from images in [0, 1] in training.")
    ] = "0",
    std: Annotated[str, typer.Option("--std", help="What they were then divided by.")] = "1",
    batch: Annotated[
        int | None, typer.Option("--batch", help="Rows that a program takes at once.")
    ] = None,
    trust: options.Trust = False,
    skip_corrupt: options.SkipCorrupt = False,
    seed: options.Seed = 0,
    n_shown: options.Show = 10,
    device: options.Device = "auto",
    preflight_only: options.Preflight = False,
    force: options.Force = False,
    fresh: options.Fresh = False,
) -> None:
    """Degrade an autoencoder's training images, and see whether it gives them back; resumes."""
    from flows.cli.attack_methods import autoencoder_methods
    from flows.families.weights.attack_plan import parse_shape
    from tasks.devices import resolve_device
    from tasks.families.autoencoder.inputs import AutoencoderJob
    from tasks.families.autoencoder.networks import Architecture
    from tasks.families.autoencoder.preflight import prepare

    target = target or default_folder(weights)
    given = tuple(mask_files or ())
    names = ("random", "half") if masks is None and not given else _names(masks or "")
    kinds, changes = _names(methods), assignments(settings)
    if degraded is not None and masks is not None:
        raise ValueError("--masks degrade the images of --data; pictures in --degraded are already")
    job = AutoencoderJob(
        weights=weights,
        out=target,
        network=Architecture(
            arch=arch, activation=activation, leak=leak, last=last, skips=skips,
            convolutions=convolutions,
        ),
        shape=None if shape is None else parse_shape(shape),
        mean=numbers(mean, "--mean"),
        std=numbers(std, "--std"),
        batch=batch,
        trust=trust,
        data=data,
        split=split,
        control=control,
        limit=limit,
        degraded=degraded,
        originals=originals,
        masks=names,
        mask_files=given,
        noise=noise,
        methods=autoencoder_methods(kinds, noise=noise, settings=changes),
        seed=seed,
        n_shown=n_shown,
        skip_corrupt=skip_corrupt,
    )  # fmt: skip
    prepared = prepare(job, resolve_device(device))
    facts = prepared.victim.facts
    kind = f"{facts['architecture']} {facts.get('activation', '')}"
    chosen = autoencoder_methods(kinds, architecture=kind, noise=noise, settings=changes)
    job = replace(job, methods=chosen)
    show_victim(prepared)
    material = prepared.material
    show_pictures({"Training images": material.train, "Control images": material.control})
    show_preflight(prepared)
    if prepared.preflight.stopped and not force:
        raise typer.Exit(REFUSED)
    if preflight_only:
        return
    from flows.families.autoencoder import attack as flow
    from flows.fresh import start_over

    if fresh:
        start_over(target, flow.ENTRIES, option="--out")
    record = flow.attack_autoencoder(job, device=device, force=force, command=this_command())
    _show_attack(record, target)


def _show_attack(record: dict[str, Any], folder: Path) -> None:
    from flows.families.autoencoder.attack import outcome

    if record["best"] is not None:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("mask", "method", "training images", "control", "PSNR"):
            table.add_column(column, justify="left" if column in ("mask", "method") else "right")
        for mask, method, train, against, decibels in _rows(record):
            table.add_row(mask, method, train, against, decibels)
        out.print(table)
    out.print(outcome(record), markup=False)
    for name in ("report.html", "recoveries.png", "attack.json"):
        out.print(f"  {(folder / name).absolute()}", markup=False, soft_wrap=True)


def _rows(record: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Accurate training images beside accurate control images, per mask and method."""
    by_key = {(c["mask"], c["method"], c["split"]): c for c in record["cells"]}
    rows = []
    for (mask, method, side), cell in by_key.items():
        if side == "train":
            against = by_key.get((mask, method, "control"))
            text = "–" if against is None else f"{against['n_accurate']} of {against['n']}"
            count = f"{cell['n_accurate']} of {cell['n']}"
            rows.append((mask, method, count, text, f"{cell['psnr'][0]:.1f} dB"))
    return rows


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
