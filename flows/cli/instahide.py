"""`palimpsest instahide`: make a challenge, and a network that compares its encodings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli import options
from flows.cli.attack_instahide import only
from flows.cli.console import show_images
from flows.cli.options import out

instahide_app = typer.Typer(no_args_is_help=True, help="Make and compare InstaHide encodings.")


@instahide_app.callback()
def _instahide() -> None:
    """Make and compare InstaHide encodings."""


@instahide_app.command(
    "encode",
    epilog="Examples: `palimpsest instahide encode --data cifar10:PATH --out challenge` · "
    "`palimpsest instahide encode --data gaussian --scheme theory --k-pub 2 --m 1000 --out normal`",
)
def encode(
    *,
    target: Annotated[Path, typer.Option("--out", help="The challenge's folder, a new one.")],
    data: Annotated[
        str, typer.Option("--data", help="photos | folder:PATH | cifar10:PATH ... | gaussian")
    ] = "photos",
    scheme: Annotated[
        Literal["instahide", "theory"],
        typer.Option("--scheme", help="Huang et al.'s, or the model of the InstaHide paper."),
    ] = "instahide",
    k_pub: Annotated[int | None, typer.Option("--k-pub", help="Default: 4; theory: 2.")] = None,
    n_private: Annotated[int, typer.Option("--n-private")] = 100,
    n_public: Annotated[int, typer.Option("--n-public")] = 1000,
    n_epochs: Annotated[
        int | None,
        typer.Option("--epochs", help="instahide: encodings of each private image; default: 50."),
    ] = None,
    m: Annotated[int | None, typer.Option("--m", help="theory: encodings.")] = None,
    largest: Annotated[
        float | None,
        typer.Option("--largest", help="instahide: the largest coefficient; default: 0.65."),
    ] = None,
    noise: Annotated[
        float | None, typer.Option("--noise", help="theory: standard deviation; default: 0.")
    ] = None,
    normalisation: Annotated[
        Literal["parts", "whole"] | None,
        typer.Option(
            "--normalisation", help="theory: of private and public images apart, or (default) not."
        ),
    ] = None,
    standardise: Annotated[
        bool,
        typer.Option("--standardise", help="theory: less their mean, over their deviation."),
    ] = False,
    size: Annotated[int, typer.Option("--size", help="Side of the images.")] = 32,
    seed: options.Seed = 0,
    skip_corrupt: options.SkipCorrupt = False,
) -> None:
    """Mix private images with public ones, and hide every sign."""
    from recon_core.attacks.instahide.mixing import InstaHide, Mixing, Scheme
    from tasks.families.instahide.encode import GAUSSIAN, EncodeJob

    chosen: Scheme
    if scheme == "instahide":
        only("theory", {"--noise": noise, "--normalisation": normalisation})
        chosen = InstaHide(
            k_pub=4 if k_pub is None else k_pub,
            largest=0.65 if largest is None else largest,
            n_epochs=50 if n_epochs is None else n_epochs,
        )
    else:
        only("instahide", {"--epochs": n_epochs, "--largest": largest})
        make = Mixing.by_parts if normalisation == "parts" else Mixing.as_a_whole
        chosen = make(2 if k_pub is None else k_pub, noise=noise or 0.0)
    job = EncodeJob(
        data=data, out=target, scheme=chosen, n_private=n_private, n_public=n_public, m=m,
        size=size, standardise=standardise, seed=seed, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    if data != GAUSSIAN:
        show_images(out, "train", job.images.facts)
    from flows.families.instahide import attack as flow

    facts = flow.encode_instahide(job)
    out.print(
        f"{facts['m']:,} encodings of {n_private} private and {n_public} public images: "
        f"{target.absolute()}",
        markup=False,
        soft_wrap=True,
    )
    out.print(f"Next: palimpsest attack instahide {target}", markup=False, soft_wrap=True)


@instahide_app.command(
    "similarity",
    epilog="Example: `palimpsest instahide similarity --data cifar10:PATH --out similarity.st` · "
    "`palimpsest attack instahide challenge --no-public --similarity similarity.st`",
)
def similarity(
    *,
    target: Annotated[Path, typer.Option("--out", help="The network's file, safetensors.")],
    data: Annotated[
        str, typer.Option("--data", help="photos | folder:PATH | cifar10:PATH ...; not the secret")
    ] = "photos",
    k_pub: Annotated[int, typer.Option("--k-pub", help="Public images in an encoding.")] = 4,
    largest: Annotated[float, typer.Option("--largest", help="The largest coefficient.")] = 0.65,
    size: Annotated[int, typer.Option("--size", help="Side of the images.")] = 32,
    n_steps: Annotated[
        int | None, typer.Option("--steps", help="Default: 1200, ten minutes on one core.")
    ] = None,
    seed: options.Seed = 0,
    skip_corrupt: options.SkipCorrupt = False,
    device: options.DeviceOption = "auto",
    threads: options.Threads = None,
) -> None:
    """Train the network that tells which encodings share a private image, on other images."""
    from recon_core.attacks.instahide.mixing import InstaHide
    from tasks.families.instahide.encode import SimilarityJob

    job = SimilarityJob(
        data=data, out=target, scheme=InstaHide(k_pub=k_pub, largest=largest), size=size,
        n_steps=n_steps, seed=seed, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    show_images(out, "train", job.images.facts)
    from flows.families.instahide import attack as flow

    about = flow.train_instahide_similarity(job, device=device, threads=threads)
    out.print(
        f"Trained for {about['n_steps']:,} steps on {about['n_images']:,} images: "
        f"{target.absolute()}",
        markup=False,
        soft_wrap=True,
    )
