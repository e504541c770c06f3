"""`palimpsest attack inversion`: recover images from what a given classifier's first half sends.

Exit codes as everywhere.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from flows.cli.attack_file import (
    NETWORK_WEIGHTS,
    Fresh,
    Out,
    Show,
    SkipPictures,
    Threads,
    Trust,
    assignments,
    attack,
    default_folder,
    numbers,
    show_pictures,
    show_table,
)
from flows.cli.options import Device, command, out

LIST = "list"

inversion_app = typer.Typer()


@command(inversion_app, "inversion")
def attack_inversion(
    *,
    weights: Annotated[Path, NETWORK_WEIGHTS],
    target: Out = None,
    architecture: Annotated[
        str | None,
        "torchvision:NAME | lenet5 | split-mlp; none for programs and for files that say "
        "it themselves.",
    ] = None,
    cut: Annotated[str | None, "The module whose output is sent; `list` shows all."] = None,
    data: Annotated[str | None, "What is attacked: photos | folder:PATH | cifar10:PATH ..."] = None,
    public: Annotated[
        str | None, "Other images, that the attacker has: ours tunes on them."
    ] = None,
    split: Annotated[
        Literal["all", "train", "heldout"] | None,
        "Of --data; default: all of a folder, else heldout.",
    ] = None,
    n_classes: Annotated[int | None, "Checked against the file."] = None,
    size: Annotated[int | None, "Side of the images; default: as they are."] = None,
    mean: Annotated[str, "Subtracted from images in [0, 1] before the network."] = "0",
    std: Annotated[str, "What they are then divided by."] = "1",
    n_images: Annotated[int, "To attack."] = 20,
    n_public: Annotated[int, "At most, of --public."] = 100,
    which: Annotated[
        Literal["paper", "strong", "both"], "--attack", "The MixCon paper's, ours, or both."
    ] = "both",
    n_steps: Annotated[int | None, "--steps", "Of each descent; default: 500 and 1000."] = None,
    settings: Annotated[
        list[str] | None, "--set", "Of the attacks: sgd.lr=1, strong.zeta=.03; repeatable."
    ] = None,
    perceptual: Annotated[str, "What PSIM compares: own | vgg16:PATH of its weights."] = "own",
    trust: Trust = False,
    skip_corrupt: SkipPictures = False,
    seed: int = 0,
    n_shown: Show = 20,
    device: Device = "auto",
    threads: Threads = None,
    fresh: Fresh = False,
) -> None:
    """Cut a classifier, and see whether images come back from what its first half sends.

    Examples: `palimpsest attack inversion --weights net.pt --architecture torchvision:resnet18
    --cut list` · `palimpsest attack inversion --weights net.pt --architecture
    torchvision:resnet18 --cut layer1 --data folder:my-images --public folder:others --mean
    .49,.48,.45 --std .2,.2,.2` · `palimpsest attack inversion --weights net.pt2 --trust --cut
    features.3 --data cifar10:PATH`
    """
    from flows.attack_methods import inversion_methods
    from tasks.devices import resolve_device
    from tasks.families.inversion.inputs import InversionJob, prepare_cut

    if cut == LIST:
        from tasks.families.inversion.inputs import image_shape, modules_of
        from tasks.families.inversion.networks import read_network

        network = read_network(weights, architecture, trust=trust)
        shape = image_shape(network, size, data)
        out.print(f"[bold]{escape(str(weights))}[/], images of {_times(shape)}")
        names = ("--cut", "output of one image", "numbers")
        rows = [
            (escape(name), _times(sides), f"{math.prod(sides):,}")
            for name, sides in modules_of(network, shape)
        ]
        show_table([dict(zip(names, row, strict=True)) for row in rows])
        return
    if data is None:
        raise ValueError("give --data, the images to attack, for example folder:my-images")
    target = target or default_folder(weights)
    job = InversionJob(
        weights=weights, out=target, data=data, cut=cut, architecture=architecture, public=public,
        split=split, size=size, n_classes=n_classes, mean=numbers(mean, "--mean"),
        std=numbers(std, "--std"), n_images=n_images, n_public=n_public, attack=which,
        n_steps=n_steps, settings=assignments(settings), perceptual=perceptual, trust=trust,
        seed=seed, n_shown=n_shown, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    prepared = prepare_cut(job, resolve_device(device))  # refuses before a server is started
    show_pictures({"Images": prepared.data, "Public images": prepared.public})
    inversion_methods(which, channels=prepared.shape[0], n_steps=n_steps, settings=job.settings)

    from flows.families.inversion import attack as flow

    run = partial(flow.attack_inversion, job, device=device, threads=threads)
    attack(flow, run, target, fresh=fresh)


def _times(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))
