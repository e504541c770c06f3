"""The line of every `palimpsest attack` command: reading, chances, attack, outcome.

A family adds its own options and fills in a job; its flow's module says what is shown.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from flows.cli.options import Device, out, show_facts, show_rows, start_over

REFUSED = 2
SIGNS = {"ok": "[green]ok[/]     ", "warning": "[yellow]warning[/]", "stop": "[red]stop[/]   "}
WORDS = ("mask", "method", "attack", "--cut")
"""Columns of words, not of numbers."""

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
            show_facts(out, title, {"source": pictures.source} | pictures.facts)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Device of an attack, which preflight may replace."""

    device: Device = "auto"
    preflight: Annotated[bool, "Only say whether an attack can work."] = False
    force: Annotated[bool, "Attack whatever preflight says."] = False
    fresh: Fresh = False

    def may_go_on(self, prepared: Any, pictures: Mapping[str, Any]) -> bool:
        """Shows what was read and what preflight says of it; False if no more is asked for.

        Exits with REFUSED where an attack cannot work, unless forced.
        """
        facts, found = prepared.victim.facts, prepared.preflight
        out.print(f"[bold]{escape(facts['file'])}[/]")
        width = max(len(name) for name in facts) + 2
        for name, value in facts.items():
            if name != "file":
                text = f"{value:,}" if isinstance(value, int) else str(value)
                out.print(f"  {name:{width}}{text}", markup=False, highlight=False, soft_wrap=True)
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
    module: Any, run: Callable[..., dict[str, Any]], folder: Path, *, fresh: bool
) -> dict[str, Any]:
    """Attacks, after --fresh has deleted earlier results, and shows the outcome; the record.

    `module`: a family's module of flows, which has the names that it writes into a folder
    (`ENTRIES`), the files that are shown (`FILES`), and the rows and lines of an outcome.
    """
    from tasks.attack_file.report import COMMAND

    if fresh:
        start_over(folder, module.ENTRIES, option="--out")
    words = [word for word in sys.argv[1:] if word != "--fresh"]
    token = COMMAND.set(shlex.join(["palimpsest", *words]))
    try:
        record = run()
    finally:
        COMMAND.reset(token)
    show_table(module.screen_rows(record))
    for line in module.screen_lines(record):
        out.print(line, markup=False)
    for path in (folder / name for name in module.FILES):
        if path.exists():
            out.print(f"  {path.absolute()}", markup=False, soft_wrap=True)
    return record


def show_table(rows: list[dict[str, str]]) -> None:
    """Rows under their columns; nothing of no rows."""
    show_rows(out, rows, Table(box=None, pad_edge=False, header_style="dim"), left=WORDS)
