"""The line of every `palimpsest attack` command: reading, chances, attack, outcome; and the two
commands for autoencoders and for split classifiers.

A family adds its own options and fills in a job; its flow's module says what is shown. Exit codes
as everywhere; 2 also where preflight says that an attack cannot work.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from flows.cli.options import Device, command, out, show_facts, show_rows, start_over

REFUSED = 2
SIGNS = {"ok": "[green]ok[/]     ", "warning": "[yellow]warning[/]", "stop": "[red]stop[/]   "}
WORDS = ("mask", "method", "attack", "--cut")
"""Columns of words, not of numbers."""
SHOWN = (
    *("report.html", "reconstructions.png", "recoveries.png", "statuses.csv"),
    *("attack.json", "inversion.json", "instahide.json"),
)
ENTRIES = frozenset(
    {
        *(*SHOWN, "cache", "preflight.json"),
        *("reconstructions.safetensors", "recoveries.safetensors"),
    }
)
"""Files that every attack may write, and those of them that the screen names."""

Out = Annotated[
    Path | None,
    "--out",
    "--store",
    "Folder of what comes back; default: palimpsest-runs/attack-, and the file's name.",
]
NETWORK_WEIGHTS = "safetensors, a state dict of torch.save, TorchScript, or a .pt2 of torch.export."
SkipPictures = Annotated[bool, "--skip-corrupt", "Leave out pictures that cannot be read."]
Shape = Annotated[str | None, "Of the images: 3x32x32."]
Leak = Annotated[float, "Slope of leaky_relu below 0."]
Trust = Annotated[
    bool, "Load and run a TorchScript or .pt2 file, which may do anything you can do."
]
Show = Annotated[int, "--show", "Pictures that are shown."]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Of torch, on a CPU.")]
Fresh = Annotated[bool, "Delete earlier results first."]


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """Facts about a classifier that a file of weights lacks."""

    arch: Annotated[str | None, "mlp:3072-1000-1000-1 | conv:3x32:3072-1000-1; else inferred."] = (
        None
    )
    shape: Shape = None
    activation: Annotated[
        Literal["relu", "leaky_relu", "gelu"], "It cannot be read from weights."
    ] = "relu"
    leak: Leak = 0.01
    pixel_order: Annotated[
        Literal["chw", "hwc", "cwh", "whc", "hcw", "wch"] | None,
        "Of flat inputs, slowest axis first: hwc as Keras and numpy flatten; default chw.",
    ] = None
    channel_order: Annotated[
        Literal["rgb", "bgr"] | None, "Of inputs: bgr as OpenCV reads; default rgb."
    ] = None
    mean: Annotated[str | None, "What was subtracted: .npy | picture | 0.49,0.48,0.45 | none."] = (
        None
    )
    std: Annotated[str | None, "What inputs were then divided by, as 0.25,0.24,0.26 or 1."] = None

    def converted(self) -> dict[str, Any]:
        """All facts by name, the shape and std as numbers."""
        std = None if self.std is None else numbers(self.std, "--std")
        return {**vars(self), "shape": parse_shape(self.shape), "std": std}


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Files beside a network's weights, which tell more of the span of its images."""

    initial: Annotated[Path | None, "The weights before training, or an earlier checkpoint."] = None
    optimizer: Annotated[
        list[Path] | None, "An optimiser's state beside these weights; repeatable."
    ] = None
    checkpoint: Annotated[
        list[Path] | None, "Another checkpoint of this training, with its state; repeatable."
    ] = None
    gradients: Annotated[list[Path] | None, "Gradients of a batch; repeatable."] = None

    def files(self) -> dict[str, Any]:
        """The files as jobs take them."""
        return {
            "initial": self.initial,
            "optimizers": tuple(self.optimizer or ()),
            "checkpoints": tuple(self.checkpoint or ()),
            "gradients": tuple(self.gradients or ()),
        }


def default_folder(attacked: Path) -> Path:
    """Folder of the results unless `--out` gives one."""
    return Path("palimpsest-runs") / f"attack-{attacked.stem}"


def assignments(settings: list[str] | None) -> dict[str, str]:
    """The name=value pairs of `--set`; whatever knows all settings is loaded only if there are."""
    if not settings:
        return {}
    from flows.settings import parse_assignments

    return parse_assignments(settings)


def names(text: str) -> tuple[str, ...]:
    """Words that are separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(text: str, option: str) -> tuple[float, ...]:
    """One number, or one per channel with commas; ValueError naming the option."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} {text} is no number, nor one per channel: 0.5,0.5,0.5") from (
            error
        )


def parse_shape(text: str | None) -> tuple[int, int, int] | None:
    """`3x32x32` as channels, height, width."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--shape {text} is not of the form CxHxW, for example 3x32x32")
    channels, height, width = (int(part) for part in parts)
    return channels, height, width


def show_pictures(read: Mapping[str, Any]) -> None:
    """The reading of each source that is known, by what it is."""
    for title, pictures in read.items():
        if pictures is not None:
            show_facts(title, {"source": pictures.source} | pictures.facts)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Device of an attack, which preflight may replace."""

    device: Device = "auto"
    preflight: Annotated[bool, "Only say whether an attack can work."] = False
    force: Annotated[bool, "Attack whatever preflight says."] = False
    fresh: Fresh = False

    def may_go_on(self, prepared: Any, pictures: Mapping[str, Any]) -> bool:
        """Show what was read and preflight's findings; return False if only these are asked for.

        Exits with REFUSED where an attack cannot work, unless forced.
        """
        facts, found = dict(prepared.victim.facts), prepared.preflight
        show_facts(facts.pop("file"), facts)
        show_pictures(pictures)
        out.print("[bold]Preflight[/]")
        for finding in found.findings:
            row = Table.grid(padding=(0, 1))
            row.add_column(no_wrap=True)
            row.add_column()
            text = f"[bold]{escape(finding.subject)}[/]: {escape(finding.text)}"
            row.add_row(f"  {SIGNS[finding.level]}", text)
            out.print(row)
        out.print(f"[bold]{escape(found.verdict)}[/]")
        if found.stopped:
            out.print("Mend what is marked stop, or give --force to attack all the same.")
            if not self.force:
                raise typer.Exit(REFUSED)
        return not self.preflight


def attack(
    module: Any,
    run: Callable[..., dict[str, Any]],
    folder: Path,
    *,
    fresh: bool,
    also: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Attack, after --fresh has deleted earlier results, show the outcome, and return the record.

    `module`: a family's module of flows, which has the rows and lines of an outcome. `also`: what
    this family writes beside `ENTRIES`, which --fresh may delete, too.
    """
    from tasks.attack_file.report import COMMAND

    if fresh:
        start_over(folder, ENTRIES.union(also), option="--out")
    words = [word for word in sys.argv[1:] if word != "--fresh"]
    token = COMMAND.set(shlex.join(["palimpsest", *words]))
    try:
        record = run()
    finally:
        COMMAND.reset(token)
    show_table(module.screen_rows(record))
    for line in module.screen_lines(record):
        out.print(line, markup=False)
    for path in (folder / name for name in SHOWN):
        if path.exists():
            out.print(f"  {path.absolute()}", markup=False, soft_wrap=True)
    return record


def show_table(rows: list[dict[str, str]]) -> None:
    """Rows under their columns; nothing of no rows."""
    show_rows(rows, Table(box=None, pad_edge=False, header_style="dim"), left=WORDS)


given_app = typer.Typer()


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


@command(given_app, "autoencoder")
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


@command(given_app, "inversion")
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

    if cut == "list":
        from tasks.attack_file.networks import read_classifier
        from tasks.families.inversion.inputs import image_shape, modules_of

        network = read_classifier(weights, architecture, trust=trust)
        shape = image_shape(network, size, data)
        out.print(f"[bold]{escape(str(weights))}[/], images of {'x'.join(map(str, shape))}")
        rows = [
            {"--cut": escape(name), "output of one image": "x".join(map(str, sides)),
             "numbers": f"{math.prod(sides):,}"}
            for name, sides in modules_of(network, shape)
        ]  # fmt: skip
        show_table(rows)
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
