"""`palimpsest attack inversion`: recover images from what a given classifier's first half sends.

Exit codes as everywhere.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from flows.cli import options
from flows.cli.attack_file import (
    assignments,
    attack,
    default_folder,
    numbers,
    show_pictures,
    show_table,
)
from flows.cli.options import out

LIST = "list"

inversion_app = typer.Typer()


@inversion_app.command(
    "inversion",
    epilog="Examples: `palimpsest attack inversion --weights net.pt --architecture "
    "torchvision:resnet18 --cut list` · `palimpsest attack inversion --weights net.pt "
    "--architecture torchvision:resnet18 --cut layer1 --data folder:my-images --public "
    "folder:others --mean .49,.48,.45 --std .2,.2,.2` · "
    "`palimpsest attack inversion --weights net.pt2 --trust --cut features.3 --data cifar10:PATH`",
)
def attack_inversion(
    positional: Annotated[
        Path | None, typer.Argument(metavar="[WEIGHTS]", help="As --weights; the older spelling.")
    ] = None,
    *,
    weights: Annotated[Path | None, options.NETWORK_WEIGHTS] = None,
    target: options.Out = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            "--architecture",
            help="torchvision:NAME | lenet5 | split-mlp; none for programs and for files that say "
            "it themselves.",
        ),
    ] = None,
    cut: Annotated[
        str | None,
        typer.Option("--cut", help="The module whose output is sent; `list` shows all."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="What is attacked: photos | folder:PATH | cifar10:PATH ..."),
    ] = None,
    public: Annotated[
        str | None,
        typer.Option("--public", help="Other images, that the attacker has: ours tunes on them."),
    ] = None,
    split: Annotated[
        Literal["all", "train", "heldout"] | None,
        typer.Option("--split", help="Of --data; default: all of a folder, else heldout."),
    ] = None,
    n_classes: Annotated[
        int | None, typer.Option("--n-classes", help="Checked against the file.")
    ] = None,
    size: Annotated[
        int | None, typer.Option("--size", help="Side of the images; default: as they are.")
    ] = None,
    mean: Annotated[
        str, typer.Option("--mean", help="Subtracted from images in [0, 1] before the network.")
    ] = "0",
    std: Annotated[str, typer.Option("--std", help="What they are then divided by.")] = "1",
    n_images: Annotated[int, typer.Option("--n-images", help="To attack.")] = 20,
    n_public: Annotated[int, typer.Option("--n-public", help="At most, of --public.")] = 100,
    which: Annotated[
        Literal["paper", "strong", "both"],
        typer.Option("--attack", help="The MixCon paper's, ours, or both."),
    ] = "both",
    n_steps: Annotated[
        int | None, typer.Option("--steps", help="Of each descent; default: 500 and 1000.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of the attacks: sgd.lr=1, strong.zeta=.03; repeatable."),
    ] = None,
    perceptual: Annotated[
        str,
        typer.Option("--perceptual", help="What PSIM compares: own | vgg16:PATH of its weights."),
    ] = "own",
    trust: options.Trust = False,
    skip_corrupt: options.SkipCorrupt = False,
    seed: options.Seed = 0,
    n_shown: options.Show = 20,
    device: options.DeviceOption = "auto",
    threads: options.Threads = None,
    fresh: options.Fresh = False,
) -> None:
    """Cut a classifier, and see whether images come back from what its first half sends."""
    from flows.families.inversion.methods import inversion_methods
    from tasks.devices import resolve_device
    from tasks.families.inversion.inputs import InversionJob, prepare_cut

    if (weights is None) == (positional is None):
        raise ValueError("give the network once, as --weights FILE")
    weights = weights or positional
    assert weights is not None
    if cut == LIST:
        _list(weights, architecture, size, data, trust=trust)
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

    attack(
        flow,
        lambda command: flow.attack_inversion(job, device=device, threads=threads, command=command),
        target,
        fresh=fresh,
    )


def _list(
    weights: Path, architecture: str | None, size: int | None, data: str | None, *, trust: bool
) -> None:
    """The places where the network can be cut."""
    from tasks.families.inversion.cuts import image_shape, modules_of
    from tasks.families.inversion.networks import read_network

    network = read_network(weights, architecture, trust=trust)
    shape = image_shape(network, size, data)
    out.print(f"[bold]{escape(str(weights))}[/], images of {_times(shape)}")
    show_table(
        [
            {
                "--cut": escape(name),
                "output of one image": _times(sides),
                "numbers": f"{math.prod(sides):,}",
            }
            for name, sides in modules_of(network, shape)
        ]
    )


def _times(sides: tuple[int, ...]) -> str:
    return "x".join(map(str, sides))
