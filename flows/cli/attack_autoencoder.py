"""`palimpsest attack autoencoder`: recover degraded training images from a given autoencoder.

Exit codes as everywhere; 2 also where preflight says that an attack cannot work.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli import options
from flows.cli.attack_file import (
    assignments,
    attack,
    default_folder,
    may_go_on,
    names,
    numbers,
    parse_shape,
)

autoencoder_app = typer.Typer()


@autoencoder_app.command(
    "autoencoder",
    epilog="Examples: `palimpsest attack autoencoder --weights net.safetensors --data "
    "folder:training-images --control folder:others` · `palimpsest attack autoencoder --weights "
    "net.pt2 --trust --data cifar10:PATH --masks random,half,window --method noise_aware,unknown` "
    "· `palimpsest attack autoencoder --weights net.pt --degraded damaged --originals whole`",
)
def attack_autoencoder(
    *,
    weights: Annotated[Path, options.NETWORK_WEIGHTS],
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
    shape: options.Shape = None,
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
    device: options.DeviceOption = "auto",
    preflight_only: options.Preflight = False,
    force: options.Force = False,
    fresh: options.Fresh = False,
) -> None:
    """Degrade an autoencoder's training images, and see whether it gives them back; resumes."""
    from flows.families.autoencoder.methods import autoencoder_methods
    from tasks.devices import resolve_device
    from tasks.families.autoencoder.inputs import AutoencoderJob
    from tasks.families.autoencoder.material import prepare_autoencoder
    from tasks.families.autoencoder.networks import Architecture

    target = target or default_folder(weights)
    given = tuple(mask_files or ())
    drawn = ("random", "half") if masks is None and not given else names(masks or "")
    kinds, changes = names(methods), assignments(settings)
    if degraded is not None and masks is not None:
        raise ValueError("--masks degrade the images of --data; pictures in --degraded are already")
    job = AutoencoderJob(
        weights=weights,
        out=target,
        network=Architecture(
            arch=arch, activation=activation, leak=leak, last=last, skips=skips,
            convolutions=convolutions,
        ),
        shape=parse_shape(shape),
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
        masks=drawn,
        mask_files=given,
        noise=noise,
        methods=autoencoder_methods(kinds, noise=noise, settings=changes),
        seed=seed,
        n_shown=n_shown,
        skip_corrupt=skip_corrupt,
    )  # fmt: skip
    prepared = prepare_autoencoder(job, resolve_device(device))
    facts = prepared.victim.facts
    kind = f"{facts['architecture']} {facts.get('activation', '')}"
    chosen = autoencoder_methods(kinds, architecture=kind, noise=noise, settings=changes)
    job = replace(job, methods=chosen)
    material = prepared.material
    pictures = {"Training images": material.train, "Control images": material.control}
    if may_go_on(prepared, pictures, preflight_only=preflight_only, force=force):
        from flows.families.autoencoder import attack as flow

        attack(
            flow,
            lambda command: flow.attack_autoencoder(
                job, device=device, force=force, command=command
            ),
            target,
            fresh=fresh,
        )
