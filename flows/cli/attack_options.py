"""Options that several `palimpsest attack` commands have, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device")]
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

# Of classifiers that are given as a file of weights.
Weights = Annotated[
    Path, typer.Option("--weights", help="safetensors, or a state dict of torch.save.")
]
Arch = Annotated[
    str | None,
    typer.Option("--arch", help="mlp:3072-1000-1000-1 | conv:3x32:3072-1000-1; else inferred."),
]
Shape = Annotated[str | None, typer.Option("--shape", help="Of the images: 3x32x32.")]
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
