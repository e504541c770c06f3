"""`palimpsest attack weights` and `attack kkt`: training images from a file of weights.

`weights` chooses the attack that can work; `kkt` is one of them, with all that it can be told. Exit
codes as everywhere; 2 also where preflight says that an attack cannot work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli import attack_file
from flows.cli import options as cli

weights_app = typer.Typer()
Weights = Annotated[Path, "safetensors, or a state dict of torch.save."]
Attacks = Annotated[int | None, "--attacks", "How many."]
SEPARATOR = "attack.separator"


@dataclass(frozen=True, kw_only=True)
class Known:
    """Facts beside the weights, and how results are drawn and shown."""

    data: Annotated[str | None, "folder:PATH of the training images, to score what comes back."] = (
        None
    )
    decoys: Annotated[str | None, "folder:PATH of images it never saw."] = None
    skip_corrupt: attack_file.SkipPictures = False
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    n_shown: attack_file.Show = 40


@cli.command(weights_app, "weights")
def attack_weights(
    *,
    weights: Weights,
    target: attack_file.Out = None,
    beside: attack_file.Beside,
    source: Annotated[
        Literal["auto", "weights", "state", "gradients"],
        "What is taken apart; default: gradients if given, else what shows most images.",
    ] = "auto",
    method: Annotated[
        Literal["auto", "span", "kkt"],
        "span: takes the first layer apart, in seconds; kkt: minutes to hours.",
    ] = "auto",
    separator: cli.SeparatorFile = None,
    network: attack_file.NetworkFacts,
    n_attacks: Attacks = None,
    n_images: Annotated[
        int | None, "--n-images-guess", "Training images; default: counted in the first layer."
    ] = None,
    settings: Annotated[
        list[str] | None, "--set", "name=value, e.g. attack.n_independent=400; repeatable."
    ] = None,
    known: Known,
    attempt: attack_file.Attempt,
) -> None:
    """Reconstruct training images from a file of weights, by the attack that can work; resumes.

    Examples: `palimpsest attack weights --weights victim.safetensors` · `palimpsest attack
    weights --weights victim.pt --initial epoch0.pt --data folder:my-images --decoys
    folder:others`
    """
    from flows.families.weights.attack_plan import prepared_by
    from recon_core.attacks.span.search import SpanAttack

    span = SpanAttack(start="unknown" if beside.initial is None else "known")
    changed = attack_file.assignments(settings) | (
        {} if separator is None else {SEPARATOR: separator}
    )
    job = _job(weights, target, network, known, **beside.files(), attack=span)
    chosen, prepared, why = prepared_by(
        job, method, source=source, n_attacks=n_attacks, n_images=n_images, settings=changed
    )
    if why:
        cli.out.print(f"Method: {why}", markup=False)
    _attack(chosen, prepared, attempt)


@cli.command(weights_app, "kkt")
def attack_kkt(
    *,
    weights: Weights,
    target: attack_file.Out = None,
    network: attack_file.NetworkFacts,
    condition: Annotated[
        Literal["binary", "multiclass", "regression"] | None, "Default: by the number of outputs."
    ] = None,
    preset: Annotated[str, "ensemble, or an experiment of the papers."] = "ensemble",
    n_attacks: Attacks = None,
    n_images: Annotated[
        int | None, "--n-images-guess", "Training images; twice as many candidates."
    ] = None,
    n_iterations: Annotated[int | None, "--iterations", "Of each attack."] = None,
    settings: Annotated[
        list[str] | None, "--set", "name=value, e.g. attack.alpha=50; repeatable."
    ] = None,
    known: Known,
    attempt: attack_file.Attempt,
) -> None:
    """Reconstruct training images by the KKT search alone, with all its settings; resumes.

    Examples: `palimpsest attack kkt --weights victim.safetensors` · `palimpsest attack kkt
    --weights victim.pt --arch mlp:3072-1000-1000-1 --n-images-guess 500 --data folder:my-images
    --decoys folder:others`
    """
    from flows.families.weights.attack_plan import planned
    from tasks.families.weights.preflight import prepare_weights

    job = planned(
        _job(weights, target, network, known), preset=preset, condition=condition,
        n_attacks=n_attacks, n_images=n_images, n_iterations=n_iterations,
        settings=attack_file.assignments(settings),
    )  # fmt: skip
    _attack(job, prepare_weights(job), attempt)


def _job(
    weights: Path,
    target: Path | None,
    network: attack_file.NetworkFacts,
    known: Known,
    **attack: Any,
) -> Any:
    from tasks.families.weights.attack import WeightsJob

    facts = {**network.converted(), **vars(known), **attack}
    return WeightsJob(weights=weights, out=target or attack_file.default_folder(weights), **facts)


def _attack(job: Any, prepared: Any, attempt: attack_file.Attempt) -> None:
    """Shows what was read and what its chances are, and attacks if that is asked for."""
    from tasks.devices import resolve_device

    resolve_device(attempt.device)
    pictures = {"Training images": prepared.truth, "Decoys": prepared.decoys}
    if attempt.may_go_on(prepared, pictures):
        from flows.families.weights import attack as flow

        search = flow.attack_kkt if prepared.method == "kkt" else flow.attack_weights
        run = partial(search, job, device=attempt.device, force=attempt.force)
        attack_file.attack(flow, run, job.out, fresh=attempt.fresh)


train_app = typer.Typer()


@cli.command(train_app, "separator")
def train_separator(
    *,
    data: Annotated[str, "folder:PATH of public pictures, or another source; some are held out."],
    target: Annotated[Path, "--out", "File of the separator."],
    shape: Annotated[str, "Of the attacked images: 1x28x28."] = "3x32x32",
    minutes: Annotated[float, "Of learning; more is better."] = 5.0,
    n_steps: Annotated[int | None, "--steps", "In place of minutes: as many steps."] = None,
    large: Annotated[bool, "Three million parameters: an hour or two on a CPU."] = False,
    centred: Annotated[
        bool, "--centred/--as-they-are", "See pictures less their mean; as they are: on black."
    ] = True,
    mirrored: Annotated[
        bool | None, "--mirrored/--not-mirrored", "Learn mirror images; default: if they fit."
    ] = None,
    shifted: Annotated[int | None, "By so many pixels; default: 2 of few pictures."] = None,
    floor: Annotated[float | None, "Least variance of a direction, as a share of the mean."] = None,
    seed: int = 0,
    skip_corrupt: cli.SkipFiles = False,
    device: cli.Device = "auto",
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

    cli.on_this_machine(target, "--out", "give a file of this machine")
    sides = attack_file.parse_shape(shape)
    assert sides is not None
    job = SeparatorJob(
        data=data, shape=sides, minutes=minutes, n_steps=n_steps, large=large, floor=floor,
        centred=centred, mirrored=mirrored, shifted=shifted, seed=seed, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    with stage_progress("Learn separator", "step") as advance:
        card = learn(job, target, device=resolve_device(device), advance=advance)
    cli.show_facts(str(target), {
        "learned from": f"{card.n_pictures:,} pictures ({card.source})",
        "mirror images": "learned" if card.mirrored else "not learned",
        "steps": f"{card.n_steps:,}",
        **{f"of {n} held-out pictures": f"{ours} identified, {theirs} by plain filters"
           for n, ours, theirs in card.separated},
    })  # fmt: skip
    cli.say(cli.out, str(target.absolute()))
