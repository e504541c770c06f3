"""`palimpsest train separator`: a network that tells an image from others mixed into it, learned
from public pictures of the same kind. Exit codes as everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.attack_file import parse_shape
from flows.cli.console import say, show_facts
from flows.cli.options import Device, SkipFiles, command, on_this_machine, out

train_app = typer.Typer()


@command(train_app, "separator")
def train_separator(
    *,
    data: Annotated[str, "folder:PATH of public pictures, or another source; some are held out."],
    target: Annotated[Path, "--out", "File of the separator."],
    shape: Annotated[str, "Of the attacked images: 1x28x28."] = "3x32x32",
    minutes: Annotated[float, "Of learning; more is better."] = 5.0,
    n_steps: Annotated[int | None, "--steps", "In place of minutes: as many steps."] = None,
    large: Annotated[bool, "A network of three million parameters, for a GPU."] = False,
    centred: Annotated[
        bool, "--centred/--as-they-are", "See pictures less their mean; as they are: on black."
    ] = True,
    mirrored: Annotated[
        bool | None, "--mirrored/--not-mirrored", "Learn mirror images; default: if they fit."
    ] = None,
    shifted: Annotated[int | None, "By so many pixels; default: 2 of few pictures."] = None,
    floor: Annotated[float | None, "Least variance of a direction, as a share of the mean."] = None,
    seed: int = 0,
    skip_corrupt: SkipFiles = False,
    device: Device = "auto",
) -> None:
    """Learn a separator for the span attack from public pictures like those that are attacked.

    Faces, scans and digits come apart better by a network that has seen others of their kind. Give
    the file to `palimpsest attack weights` or `palimpsest audit` as --separator.

    Examples: `palimpsest train separator --data folder:faces --shape 1x32x32 --out
    faces.safetensors` · `palimpsest train separator --data folder:digits --shape 1x28x28
    --as-they-are --minutes 10 --out digits.safetensors`
    """
    from tasks.devices import resolve_device
    from tasks.families.weights.separators import SeparatorJob
    from tasks.families.weights.separators import train_separator as learn
    from tasks.progress import stage_progress

    on_this_machine(target, "--out", "give a file of this machine")
    sides = parse_shape(shape)
    assert sides is not None
    job = SeparatorJob(
        data=data, shape=sides, minutes=minutes, n_steps=n_steps, large=large, floor=floor,
        centred=centred, mirrored=mirrored, shifted=shifted, seed=seed, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    with stage_progress("Learn separator", "step") as advance:
        card = learn(job, target, device=resolve_device(device), advance=advance)
    show_facts(out, str(target), {
        "learned from": f"{card.n_pictures:,} pictures ({card.source})",
        "mirror images": "learned" if card.mirrored else "not learned",
        "steps": f"{card.n_steps:,}",
        **{f"of {n} held-out pictures": f"{ours} identified, {theirs} by plain filters"
           for n, ours, theirs in card.separated},
    })  # fmt: skip
    say(out, str(target.absolute()))
