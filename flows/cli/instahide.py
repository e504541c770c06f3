"""`palimpsest instahide` and `attack instahide`: make a challenge, and a network that compares its
encodings; private images from such encodings. Exit codes as everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli.attack_file import Fresh, Out, Show, SkipPictures, Threads, attack, default_folder
from flows.cli.options import FAILED, Device, command, out, say, show_facts, show_images

encodings_app = typer.Typer()
OPTIONS = {"instahide": ("n_epochs", "largest"), "theory": ("noise", "normalisation", "wa", "wb")}
"""Options of one scheme alone."""

instahide_app = typer.Typer(no_args_is_help=True, help="Make and compare InstaHide encodings.")


@command(instahide_app, "encode")
def encode(
    *,
    target: Annotated[Path, "--out", "The challenge's folder, a new one."],
    data: Annotated[str, "photos | folder:PATH | cifar10:PATH ... | gaussian"] = "photos",
    scheme: Annotated[
        Literal["instahide", "theory"], "Huang et al.'s, or the model of the InstaHide paper."
    ] = "instahide",
    k_pub: Annotated[int | None, "Default: 4; theory: 2."] = None,
    n_private: int = 100,
    n_public: int = 1000,
    n_epochs: Annotated[
        int | None, "--epochs", "instahide: encodings of each private image; default: 50."
    ] = None,
    m: Annotated[int | None, "theory: encodings."] = None,
    largest: Annotated[float | None, "instahide: the largest coefficient; default: 0.65."] = None,
    noise: Annotated[float | None, "theory: standard deviation; default: 0."] = None,
    normalisation: Annotated[
        Literal["parts", "whole"] | None,
        "theory: of private and public images apart, or (default) not.",
    ] = None,
    size: Annotated[int, "Side of the images."] = 32,
    seed: int = 0,
    skip_corrupt: SkipPictures = False,
) -> None:
    """Mix private images with public ones, and hide every sign.

    Examples: `palimpsest instahide encode --data cifar10:PATH --out challenge` · `palimpsest
    instahide encode --data gaussian --scheme theory --k-pub 2 --m 1000 --out normal`
    """
    from tasks.families.instahide.encode import GAUSSIAN, EncodeJob
    from tasks.families.instahide.encode import encode as make_challenge

    own = {"n_epochs": n_epochs, "largest": largest, "noise": noise, "normalisation": normalisation}
    chosen = _scheme(scheme, k_pub, **own)
    job = EncodeJob(
        data=data, out=target, scheme=chosen, n_private=n_private, n_public=n_public, m=m,
        size=size, seed=seed, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    if data != GAUSSIAN:
        show_images("train", job.images.facts)
    made_of = f"{n_private} private and {n_public} public images"
    say(out, f"{make_challenge(job)['m']:,} encodings of {made_of}: {target.absolute()}")
    say(out, f"Next: palimpsest attack instahide {target}")


@command(instahide_app, "similarity")
def similarity(
    *,
    target: Annotated[Path, "--out", "The network's file, safetensors."],
    data: Annotated[str, "photos | folder:PATH | cifar10:PATH ...; not the secret"] = "photos",
    k_pub: Annotated[int, "Public images in an encoding."] = 4,
    largest: Annotated[float, "The largest coefficient."] = 0.65,
    size: Annotated[int, "Side of the images."] = 32,
    n_steps: Annotated[int | None, "--steps", "Default: 1200, ten minutes on one core."] = None,
    seed: int = 0,
    skip_corrupt: SkipPictures = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train the network that tells which encodings share a private image, on other images.

    Example: `palimpsest instahide similarity --data cifar10:PATH --out similarity.st` ·
    `palimpsest attack instahide challenge --no-public --similarity similarity.st`
    """
    from recon_core.attacks.instahide.mixing import InstaHide
    from tasks.devices import resolve_device, use_threads
    from tasks.families.instahide.encode import SimilarityJob, train_similarity
    from tasks.progress import stage_progress

    job = SimilarityJob(
        data=data, out=target, scheme=InstaHide(k_pub=k_pub, largest=largest), size=size,
        n_steps=n_steps, seed=seed, skip_corrupt=skip_corrupt,
    )  # fmt: skip
    show_images("train", job.images.facts)
    use_threads(threads)
    total = job.how.training.n_steps
    with stage_progress("Training", "step") as advance:
        about = train_similarity(
            job, device=resolve_device(device),
            progress=lambda share: advance(round(share * total), total),
        )  # fmt: skip
    learned = f"{about['n_steps']:,} steps on {about['n_images']:,} images"
    say(out, f"Trained for {learned}: {target.absolute()}")


@command(encodings_app, "instahide")
def attack_instahide(
    encodings: Annotated[
        Path, typer.Argument(help="A challenge's folder, a .npy, or a folder of pictures.")
    ],
    *,
    target: Out = None,
    method: Annotated[
        str,
        "auto | exact (normal pixels) | practical (photographs) | carlini (photographs, "
        "public images unknown) | both (the first two) | all (these three) | sdp (exact, by "
        "the paper's semidefinite program; at most 40 public images)",
    ] = "auto",
    public: Annotated[Path | None, "The public images: .npy or folder."] = None,
    similarity: Annotated[Path | None, "carlini: a network of `instahide similarity`."] = None,
    no_public: Annotated[bool, "Do not use the challenge's public images."] = False,
    labels: Annotated[Path | None, "Mixed labels: .npy (m, n_classes)."] = None,
    no_labels: Annotated[bool, "Do not use the challenge's labels."] = False,
    truth: Annotated[Path | None, "Folder with private.npy, to score."] = None,
    scheme: Annotated[
        Literal["instahide", "theory"] | None, "How encodings were made; a challenge says it."
    ] = None,
    k_pub: Annotated[int | None, "With --scheme."] = None,
    wa: Annotated[float | None, "theory: weight of private."] = None,
    wb: Annotated[float | None, "theory: weight of public."] = None,
    noise: Annotated[float | None, "theory: of encodings; default: 0."] = None,
    largest: Annotated[float | None, "instahide: of coefficients; default: 0.65."] = None,
    n_private: Annotated[int | None, "Private images; a challenge says it."] = None,
    n_levels: Annotated[
        int | None, "--levels", "Grey levels of a pixel; 0: any number. Default: 256."
    ] = None,
    n_rounds: Annotated[int | None, "--rounds", "practical: at most."] = None,
    seed: int = 0,
    n_shown: Show = 40,
    device: Device = "auto",
    threads: Threads = None,
    fresh: Fresh = False,
) -> None:
    """Recover the private images that InstaHide's encodings are made of.

    Examples: `palimpsest attack instahide challenge` · `palimpsest attack instahide
    encodings.npy --scheme instahide --k-pub 4 --public folder:others --n-private 100`
    """
    from tasks.devices import resolve_device
    from tasks.families.instahide.attack import InstaHideJob, prepare_challenge

    target = target or default_folder(encodings)
    own = {"largest": largest, "wa": wa, "wb": wb, "noise": noise}
    chosen = None if scheme is None else _scheme(scheme, k_pub, **own)
    for name, value in {"k-pub": k_pub, **own}.items():
        if scheme is None and value is not None:
            raise ValueError(f"--{name} needs --scheme, how the encodings were made")
    job = InstaHideJob(
        path=encodings, out=target, public=public, labels=labels, truth=truth,
        similarity=similarity, method=method, scheme=chosen, n_private=n_private,
        use_public=not no_public, use_labels=not no_labels, n_levels=n_levels, n_rounds=n_rounds,
        seed=seed, n_shown=n_shown,
    )  # fmt: skip
    resolve_device(device)
    challenge = prepare_challenge(job).challenge  # refuses before a server starts
    known = challenge.public
    read = {
        "encodings": f"{len(challenge.encodings):,} of {'x'.join(map(str, challenge.shape))}",
        "public images": "not known" if known is None else f"{len(known):,}",
        "labels": "not known" if challenge.labels is None else "known",
    }
    show_facts(str(encodings), read | dict(challenge.read))

    from flows.families.instahide import attack as flow

    run = partial(flow.attack_instahide, job, device=device, threads=threads)
    record = attack(flow, run, target, fresh=fresh, also=("images", "images.npy"))
    if record["best"] is None:
        raise typer.Exit(FAILED)


def _scheme(kind: Literal["instahide", "theory"], k_pub: int | None, **options: Any) -> Any:
    """The scheme, with those of its options that are given; ValueError for the other's."""
    from recon_core.attacks.instahide.mixing import InstaHide, Mixing

    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in OPTIONS[kind]:
            other = "instahide" if kind == "theory" else "theory"
            raise ValueError(
                f"--{name.removeprefix('n_')} is of --scheme {other}; leave it out, or change the "
                "scheme"
            )
    if kind == "instahide":
        return InstaHide(**given | ({} if k_pub is None else {"k_pub": k_pub}))
    make = Mixing.by_parts if given.pop("normalisation", None) == "parts" else Mixing.as_a_whole
    return replace(make(2 if k_pub is None else k_pub), **given)
