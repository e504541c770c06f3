"""Options that several commands have, each declared once, and the recipe that they add up to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli.console import Screen, show_images
from flows.naming import PRESET_HELP
from storage.pairs.store_file import STORE_FILE
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from flows.recipe import Recipe

out = Screen()
err = Screen(stderr=True)
DEFAULT_STORE = Path("palimpsest-runs/demo")

StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the job's products.")]
PresetOption = Annotated[str | None, typer.Option("--preset", help=PRESET_HELP)]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="photos | digits | folder:PATH | cifar10:PATH | cifar100:PATH | mnist:PATH | "
        "fashion-mnist:PATH | svhn:PATH | tiny-imagenet:PATH",
    ),
]
SkipOption = Annotated[
    bool, typer.Option("--skip-corrupt", help="Leave out files of a folder that cannot be read.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="name=value, any setting of the recipe; repeatable."),
]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device")]
WorkersOption = Annotated[int, typer.Option("--workers", help="0: one per core, or per GPU.")]
ClusterOption = Annotated[
    str,
    typer.Option("--cluster", help="local | cuda | slurm:YAML | kubernetes:YAML | tcp://HOST:PORT"),
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Delete the store's products first.")]
SplitOption = Annotated[
    Literal["train", "heldout"], typer.Option("--split", help="Which store of a job's folder.")
]
PlaceOption = Annotated[
    str, typer.Option("--store", help="A job's folder, a store's, or s3://bucket/prefix.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]

# Of the attacks on something that is given as a file.
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--store",
        help="Folder of what comes back; default: palimpsest-runs/attack-, and the file's name.",
    ),
]
"""Where every attack leaves its results."""
SkipCorrupt = Annotated[
    bool, typer.Option("--skip-corrupt", help="Leave out pictures that cannot be read.")
]
Seed = Annotated[int, typer.Option("--seed")]
Show = Annotated[int, typer.Option("--show", help="Pictures that are shown.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Of torch, on a CPU.")]
Preflight = Annotated[
    bool, typer.Option("--preflight", help="Only say whether an attack can work.")
]
Force = Annotated[bool, typer.Option("--force", help="Attack whatever preflight says.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete earlier results first.")]
Leak = Annotated[float, typer.Option("--leak", help="Slope of leaky_relu below 0.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Load and run a TorchScript or .pt2 file, which may do anything you can do."
    ),
]

NETWORK_WEIGHTS = typer.Option(
    "--weights",
    help="safetensors, a state dict of torch.save, TorchScript, or a .pt2 of torch.export.",
)
Shape = Annotated[str | None, typer.Option("--shape", help="Of the images: 3x32x32.")]

# Of classifiers that are given as a file of weights.
ClassifierWeights = Annotated[
    Path, typer.Option("--weights", help="safetensors, or a state dict of torch.save.")
]
Arch = Annotated[
    str | None,
    typer.Option("--arch", help="mlp:3072-1000-1000-1 | conv:3x32:3072-1000-1; else inferred."),
]
Activation = Annotated[
    Literal["relu", "leaky_relu", "gelu"],
    typer.Option("--activation", help="It cannot be read from weights."),
]
Attacks = Annotated[int | None, typer.Option("--attacks", help="How many.")]
Data = Annotated[
    str | None,
    typer.Option("--data", help="folder:PATH of the training images, to score what comes back."),
]
Decoys = Annotated[str | None, typer.Option("--decoys", help="folder:PATH of images it never saw.")]
Mean = Annotated[
    str | None,
    typer.Option("--mean", help="What was subtracted: .npy | picture | 0.49,0.48,0.45 | none."),
]
Std = Annotated[
    str | None,
    typer.Option("--std", help="What inputs were then divided by, as 0.25,0.24,0.26 or 1."),
]
Dtype = Annotated[Literal["float32", "float64"], typer.Option("--dtype")]


def recipe_of(
    store: Path,
    preset: str | None,
    data: str | None,
    settings: list[str] | None,
    *,
    skip_corrupt: bool = False,
) -> Recipe:
    """The preset asked for, else the recipe found in the store, else the demo; then the changes."""
    from flows.settings import parse_assignments, read_recipe, resolve

    changes = parse_assignments(settings or [])
    if data is not None:
        changes["data"] = data
    if skip_corrupt:
        changes["skip_corrupt"] = "true"
    found = read_recipe(Workspace(store)) if preset is None else None
    return resolve(found or preset or "demo", changes)


@contextmanager
def images_shown(recipe: Recipe, *splits: Literal["train", "heldout"]) -> Iterator[None]:
    """Says what is read of a recipe's images, so that what cannot be is refused before any work
    starts, and holds them, so that they are read once. Of the held-out ones near copies of the
    others are left out, so these are read, too."""
    if recipe.near_duplicates is not None and "heldout" in splits:
        splits = ("train", "heldout")
    held = {split: recipe.images(split) for split in splits}
    for split, images in held.items():
        show_images(out, split, images.facts)
    yield


def store_location(text: str, split: str) -> str | Path:
    """Place of the store that `text` names; a job has one for each split, maybe elsewhere."""
    if "://" in text or text.startswith("s3:/"):
        return text
    folder = Path(text)
    stores = [folder / name for name in ("pairs", "heldout")]
    is_job = (folder / "recipe.json").is_file() or any((s / STORE_FILE).is_file() for s in stores)
    if (folder / STORE_FILE).is_file() or not is_job:
        return folder
    return Workspace.found(folder).pairs(split)


def on_this_machine(path: str | Path, option: str, fix: str) -> Path:
    """The path, if it is of this machine; ValueError naming the option and the fix."""
    if "://" in str(path) or str(path).startswith("s3:"):
        raise ValueError(f"{option} {path}: {fix}")
    return Path(path)
