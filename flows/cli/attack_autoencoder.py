"""`palimpsest attack autoencoder`: recover degraded training images from a given autoencoder.

Exit codes as everywhere; 2 also where preflight says that an attack cannot work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.attack_file import (
    NETWORK_WEIGHTS,
    Attempt,
    Leak,
    Out,
    Shape,
    Show,
    SkipPictures,
    Trust,
    assignments,
    attack,
    default_folder,
    names,
    numbers,
    parse_shape,
)
from flows.cli.options import command

autoencoder_app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class Network:
    """Facts that a file of weights lacks."""

    arch: Annotated[str | None, "fc:3072-512-512-3072 | unet:16-32-64; else inferred."] = None
    activation: Annotated[
        Literal["relu", "leaky_relu", "prelu", "softplus", "gelu", "elu", "silu", "tanh", "sigmoid"]
        | None,
        "It cannot be read from weights. [default: leaky_relu]",
    ] = None
    leak: Leak = 0.01
    last: Annotated[Literal["linear", "sigmoid", "tanh"], "What follows the last layer."] = "linear"
    skips: Annotated[bool | None, "--skips/--no-skips", "Of a U-Net; else inferred."] = None
    convolutions: Annotated[int | None, "Per level of a U-Net; else inferred."] = None


@command(autoencoder_app, "autoencoder")
def attack_autoencoder(
    *,
    weights: Annotated[Path, NETWORK_WEIGHTS],
    target: Out = None,
    data: Annotated[
        str | None,
        "The training images, which are degraded here: photos | folder:PATH | cifar10:PATH | ...",
    ] = None,
    split: Annotated[
        Literal["all", "train", "heldout"] | None,
        "Of --data; default: all of a folder, else train.",
    ] = None,
    control: Annotated[
        str | None, "Images that it never saw; default: what --data holds out; none for none."
    ] = None,
    limit: Annotated[int, "Images of each kind."] = 50,
    degraded: Annotated[
        Path | None, "Instead: a folder of degraded pictures, black missing."
    ] = None,
    originals: Annotated[Path | None, "Their originals by the same names, to score."] = None,
    masks: Annotated[
        str | None, "random,blocks,stripes,text,half,window; default: random,half."
    ] = None,
    mask_files: Annotated[
        list[Path] | None, "--mask", "A picture of a mask, white is known; repeatable."
    ] = None,
    noise: Annotated[float, "Standard deviation of the noise, for example 0.02."] = 0.0,
    methods: Annotated[
        str, "--method", "noise_aware (ours), unknown, known, iteration."
    ] = "noise_aware",
    settings: Annotated[
        list[str] | None, "--set", "Of the methods: gamma=.5, unknown.n_admm=80; repeatable."
    ] = None,
    network: Network,
    shape: Shape = None,
    mean: Annotated[str, "Subtracted from images in [0, 1] in training."] = "0",
    std: Annotated[str, "What they were then divided by."] = "1",
    batch: Annotated[int | None, "Rows that a program takes at once."] = None,
    trust: Trust = False,
    skip_corrupt: SkipPictures = False,
    seed: int = 0,
    n_shown: Show = 10,
    attempt: Attempt,
) -> None:
    """Degrade an autoencoder's training images, and see whether it gives them back; resumes.

    Examples: `palimpsest attack autoencoder --weights net.safetensors --data
    folder:training-images --control folder:others` · `palimpsest attack autoencoder --weights
    net.pt2 --trust --data cifar10:PATH --masks random,half,window --method noise_aware,unknown`
    · `palimpsest attack autoencoder --weights net.pt --degraded damaged --originals whole`
    """
    from flows.attack_methods import autoencoder_methods
    from tasks.devices import resolve_device
    from tasks.families.autoencoder.inputs import AutoencoderJob, prepare_autoencoder
    from tasks.families.autoencoder.networks import Architecture

    target = target or default_folder(weights)
    given = tuple(mask_files or ())
    drawn = ("random", "half") if masks is None and not given else names(masks or "")
    kinds, changes = names(methods), assignments(settings)
    if degraded is not None and masks is not None:
        raise ValueError("--masks degrade the images of --data; pictures in --degraded are already")
    job = AutoencoderJob(
        weights=weights, out=target, network=Architecture(**vars(network)),
        shape=parse_shape(shape), mean=numbers(mean, "--mean"), std=numbers(std, "--std"),
        batch=batch, trust=trust, data=data, split=split, control=control, limit=limit,
        degraded=degraded, originals=originals, masks=drawn, mask_files=given, noise=noise,
        methods=autoencoder_methods(kinds, noise=noise, settings=changes), seed=seed,
        n_shown=n_shown, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    prepared = prepare_autoencoder(job, resolve_device(attempt.device))
    facts = prepared.victim.facts
    kind = f"{facts['architecture']} {facts.get('activation', '')}"
    chosen = autoencoder_methods(kinds, architecture=kind, noise=noise, settings=changes)
    job = replace(job, methods=chosen)
    material = prepared.material
    pictures = {
        "Degraded images": material.degraded,
        "Training images": material.train,
        "Control images": material.control,
    }
    if attempt.may_go_on(prepared, pictures):
        from flows.families.autoencoder import attack as flow

        run = partial(flow.attack_autoencoder, job, device=attempt.device, force=attempt.force)
        attack(flow, run, target, fresh=attempt.fresh)
