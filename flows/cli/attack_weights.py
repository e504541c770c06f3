"""`palimpsest attack weights` and `attack kkt`: training images from a file of weights.

`weights` chooses the attack that can work; `kkt` is one of them, with all that it can be told. Exit
codes as everywhere; 2 also where preflight says that an attack cannot work.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli import options
from flows.cli.attack_file import (
    assignments,
    attack,
    default_folder,
    may_go_on,
    numbers,
    parse_shape,
)
from flows.cli.options import out

weights_app = typer.Typer()


@weights_app.command(
    "weights",
    epilog="Examples: `palimpsest attack weights --weights victim.safetensors` · "
    "`palimpsest attack weights --weights victim.pt --initial epoch0.pt --data folder:my-images "
    "--decoys folder:others`",
)
def attack_weights(
    *,
    weights: options.ClassifierWeights,
    initial: Annotated[
        Path | None,
        typer.Option("--initial", help="The weights that training started from, if known."),
    ] = None,
    method: Annotated[
        Literal["auto", "span", "kkt"],
        typer.Option(
            "--method", help="span: takes the first layer apart, in seconds; kkt: minutes to hours."
        ),
    ] = "auto",
    target: options.Out = None,
    arch: options.Arch = None,
    shape: options.Shape = None,
    activation: options.Activation = "relu",
    leak: options.Leak = 0.01,
    n_attacks: options.Attacks = None,
    n_images: Annotated[
        int | None,
        typer.Option(
            "--n-images-guess", help="Training images; default: counted in the first layer."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value, e.g. attack.n_likelihood=200; repeatable."),
    ] = None,
    data: options.Data = None,
    decoys: options.Decoys = None,
    mean: options.Mean = None,
    std: options.Std = None,
    skip_corrupt: options.SkipCorrupt = False,
    seed: options.Seed = 0,
    dtype: options.Dtype = "float32",
    n_shown: options.Show = 40,
    device: options.DeviceOption = "auto",
    preflight_only: options.Preflight = False,
    force: options.Force = False,
    fresh: options.Fresh = False,
) -> None:
    """Reconstruct training images from a file of weights, by the attack that can work; resumes."""
    from flows.families.weights.attack_plan import planned
    from recon_core.attacks.kkt.objective import KKTAttack
    from recon_core.attacks.span.settings import SpanAttack
    from tasks.families.weights.attack import WeightsJob
    from tasks.families.weights.preflight import prepare_weights

    start: Literal["known", "unknown"] = "unknown" if initial is None else "known"
    job = WeightsJob(
        weights=weights, out=target or default_folder(weights), arch=arch,
        shape=parse_shape(shape), activation=activation, leak=leak, initial=initial,
        attack=SpanAttack(start=start), data=data, decoys=decoys,
        mean=mean, std=None if std is None else numbers(std, "--std"), seed=seed, dtype=dtype,
        n_shown=n_shown, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    plan = partial(planned, n_attacks=n_attacks, n_images=n_images, settings=assignments(settings))
    chosen = plan(job, method="kkt" if method == "kkt" else "span")
    prepared = prepare_weights(chosen)
    if method == "auto" and prepared.preflight.stopped:
        instead = prepared.preflight.reason
        chosen = plan(replace(job, initial=None, attack=KKTAttack()), method="kkt")
        prepared = prepare_weights(chosen)
        out.print(f"Method: kkt, since span cannot work here: {instead}", markup=False)
    elif method == "auto":
        out.print(f"Method: span. {prepared.preflight.verdict}", markup=False)
    _attack(chosen, prepared, device, preflight_only=preflight_only, force=force, fresh=fresh)


@weights_app.command(
    "kkt",
    epilog="Examples: `palimpsest attack kkt --weights victim.safetensors` · "
    "`palimpsest attack kkt --weights victim.pt --arch mlp:3072-1000-1000-1 --n-images-guess 500 "
    "--data folder:my-images --decoys folder:others`",
)
def attack_kkt(
    *,
    weights: options.ClassifierWeights,
    target: options.Out = None,
    arch: options.Arch = None,
    shape: options.Shape = None,
    activation: options.Activation = "relu",
    leak: options.Leak = 0.01,
    condition: Annotated[
        Literal["binary", "multiclass", "regression"] | None,
        typer.Option("--condition", help="Default: by the number of outputs."),
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", help="ensemble, or an experiment of the papers.")
    ] = "ensemble",
    n_attacks: options.Attacks = None,
    n_images: Annotated[
        int | None,
        typer.Option("--n-images-guess", help="Training images; twice as many candidates."),
    ] = None,
    n_iterations: Annotated[
        int | None, typer.Option("--iterations", help="Of each attack.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value, e.g. attack.alpha=50; repeatable."),
    ] = None,
    data: options.Data = None,
    decoys: options.Decoys = None,
    mean: options.Mean = None,
    std: options.Std = None,
    skip_corrupt: options.SkipCorrupt = False,
    seed: options.Seed = 0,
    dtype: options.Dtype = "float32",
    n_shown: options.Show = 40,
    device: options.DeviceOption = "auto",
    preflight_only: options.Preflight = False,
    force: options.Force = False,
    fresh: options.Fresh = False,
) -> None:
    """Reconstruct training images by the KKT search alone, with all its settings; resumes."""
    from flows.families.weights.attack_plan import planned
    from tasks.families.weights.attack import WeightsJob
    from tasks.families.weights.preflight import prepare_weights

    job = WeightsJob(
        weights=weights, out=target or default_folder(weights), arch=arch,
        shape=parse_shape(shape), activation=activation, leak=leak, data=data, decoys=decoys,
        mean=mean, std=None if std is None else numbers(std, "--std"), seed=seed, dtype=dtype,
        n_shown=n_shown, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    job = planned(
        job, preset=preset, condition=condition, n_attacks=n_attacks, n_images=n_images,
        n_iterations=n_iterations, settings=assignments(settings),
    )  # fmt: skip
    _attack(
        job, prepare_weights(job), device, preflight_only=preflight_only, force=force, fresh=fresh
    )


def _attack(
    job: Any, prepared: Any, device: Any, *, preflight_only: bool, force: bool, fresh: bool
) -> None:
    """Shows what was read and what its chances are, and attacks if that is asked for."""
    from tasks.devices import resolve_device

    resolve_device(device)
    pictures = {"Training images": prepared.truth, "Decoys": prepared.decoys}
    if may_go_on(prepared, pictures, preflight_only=preflight_only, force=force):
        from flows.families.weights import attack as flow

        run = flow.attack_kkt if prepared.method == "kkt" else flow.attack_weights
        attack(
            flow,
            lambda command: run(job, device=device, force=force, command=command),
            job.out,
            fresh=fresh,
        )
