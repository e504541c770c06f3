"""`palimpsest instahide encode` makes a challenge, `palimpsest attack instahide` takes one.

Exit codes as everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from flows.cli import attack_options as options
from flows.cli.attack_weights import attack_app, default_folder, out, this_command
from flows.cli.console import show_facts, show_images

__all__ = ["attack_app", "instahide_app"]
FAILED = 1

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
        typer.Option("--scheme", help="Huang et al.'s, or the model of paper 004."),
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
        _only("theory", {"--noise": noise, "--normalisation": normalisation})
        chosen = InstaHide(
            k_pub=4 if k_pub is None else k_pub,
            largest=0.65 if largest is None else largest,
            n_epochs=50 if n_epochs is None else n_epochs,
        )
    else:
        _only("instahide", {"--epochs": n_epochs, "--largest": largest})
        make = Mixing.by_parts if normalisation == "parts" else Mixing.as_a_whole
        chosen = make(2 if k_pub is None else k_pub, noise=noise or 0.0)
    job = EncodeJob(
        data=data,
        out=target,
        scheme=chosen,
        n_private=n_private,
        n_public=n_public,
        m=m,
        size=size,
        standardise=standardise,
        seed=seed,
        skip_corrupt=skip_corrupt,
    )
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
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Train the network that tells which encodings share a private image, on other images."""
    from recon_core.attacks.instahide.mixing import InstaHide
    from tasks.families.instahide.similarity import SimilarityJob

    job = SimilarityJob(
        data=data,
        out=target,
        scheme=InstaHide(k_pub=k_pub, largest=largest),
        size=size,
        n_steps=n_steps,
        seed=seed,
        skip_corrupt=skip_corrupt,
    )
    show_images(out, "train", job.images.facts)
    from flows.families.instahide import attack as flow

    about = flow.train_instahide_similarity(job, device=device, threads=threads)
    out.print(
        f"Trained for {about['n_steps']:,} steps on {about['n_images']:,} images: "
        f"{target.absolute()}",
        markup=False,
        soft_wrap=True,
    )


@attack_app.command(
    "instahide",
    epilog="Examples: `palimpsest attack instahide challenge` · `palimpsest attack instahide "
    "encodings.npy --scheme instahide --k-pub 4 --public folder:others --n-private 100`",
)
def attack_instahide(
    encodings: Annotated[
        Path, typer.Argument(help="A challenge's folder, a .npy, or a folder of pictures.")
    ],
    *,
    target: options.Out = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="auto | exact (normal pixels) | practical (photographs) | carlini (photographs, "
            "public images unknown) | both (the first two) | all",
        ),
    ] = "auto",
    public: Annotated[
        Path | None, typer.Option("--public", help="The public images: .npy or folder.")
    ] = None,
    similarity: Annotated[
        Path | None,
        typer.Option("--similarity", help="carlini: a network of `instahide similarity`."),
    ] = None,
    no_public: Annotated[
        bool, typer.Option("--no-public", help="Do not use the challenge's public images.")
    ] = False,
    labels: Annotated[
        Path | None, typer.Option("--labels", help="Mixed labels: .npy (m, n_classes).")
    ] = None,
    no_labels: Annotated[
        bool, typer.Option("--no-labels", help="Do not use the challenge's labels.")
    ] = False,
    truth: Annotated[
        Path | None, typer.Option("--truth", help="Folder with private.npy, to score.")
    ] = None,
    scheme: Annotated[
        Literal["instahide", "theory"] | None,
        typer.Option("--scheme", help="How encodings were made; a challenge says it."),
    ] = None,
    k_pub: Annotated[int | None, typer.Option("--k-pub", help="With --scheme.")] = None,
    wa: Annotated[float | None, typer.Option("--wa", help="theory: weight of private.")] = None,
    wb: Annotated[float | None, typer.Option("--wb", help="theory: weight of public.")] = None,
    noise: Annotated[
        float | None, typer.Option("--noise", help="theory: of encodings; default: 0.")
    ] = None,
    largest: Annotated[
        float | None, typer.Option("--largest", help="instahide: of coefficients; default: 0.65.")
    ] = None,
    n_private: Annotated[
        int | None, typer.Option("--n-private", help="Private images; a challenge says it.")
    ] = None,
    n_levels: Annotated[
        int | None,
        typer.Option("--levels", help="Grey levels of a pixel; 0: any number. Default: 256."),
    ] = None,
    n_rounds: Annotated[int | None, typer.Option("--rounds", help="practical: at most.")] = None,
    seed: options.Seed = 0,
    n_shown: options.Show = 40,
    device: options.Device = "auto",
    threads: options.Threads = None,
    fresh: options.Fresh = False,
) -> None:
    """Recover the private images that InstaHide's encodings are made of."""
    from tasks.devices import resolve_device
    from tasks.families.instahide.attack import METHODS
    from tasks.families.instahide.inputs import AttackJob, prepare

    target = target or default_folder(encodings)
    job = AttackJob(
        path=encodings,
        out=target,
        public=public,
        labels=labels,
        truth=truth,
        similarity=similarity,
        method=method,
        scheme=_scheme(scheme, k_pub=k_pub, wa=wa, wb=wb, noise=noise, largest=largest),
        n_private=n_private,
        use_public=not no_public,
        use_labels=not no_labels,
        n_levels=n_levels,
        n_rounds=n_rounds,
        seed=seed,
        n_shown=n_shown,
    )
    resolve_device(device)
    challenge = prepare(job, tuple(METHODS)).challenge  # refuses before a server is started
    known = challenge.public
    read = {
        "encodings": f"{len(challenge.encodings):,} of {'x'.join(map(str, challenge.shape))}",
        "public images": "not known" if known is None else f"{len(known):,}",
        "labels": "not known" if challenge.labels is None else "known",
    }
    show_facts(out, str(encodings), read)

    from flows.families.instahide import attack as flow
    from flows.fresh import start_over

    if fresh:
        start_over(target, flow.ENTRIES, option="--out")
    record = flow.attack_instahide(job, device=device, threads=threads, command=this_command())
    _show(record, target)


def _scheme(
    kind: Literal["instahide", "theory"] | None,
    *,
    k_pub: int | None,
    wa: float | None,
    wb: float | None,
    noise: float | None,
    largest: float | None,
) -> Any:
    """What the options say; None if they say nothing."""
    from recon_core.attacks.instahide.mixing import InstaHide, Mixing

    of_theory = {"--wa": wa, "--wb": wb, "--noise": noise}
    if kind is None:
        given = {"--k-pub": k_pub, "--largest": largest, **of_theory}
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise ValueError(f"{named[0]} needs --scheme, how the encodings were made")
        return None
    if kind == "instahide":
        _only("theory", of_theory)
        return InstaHide(
            k_pub=4 if k_pub is None else k_pub, largest=0.65 if largest is None else largest
        )
    _only("instahide", {"--largest": largest})
    whole = Mixing.as_a_whole(2 if k_pub is None else k_pub)
    return Mixing(
        k_pub=whole.k_pub,
        wa=whole.wa if wa is None else wa,
        wb=whole.wb if wb is None else wb,
        noise=noise or 0.0,
    )


def _only(scheme: str, options: dict[str, Any]) -> None:
    """Refuses options of the other scheme."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is of --scheme {scheme}; leave it out, or change the scheme")


def _show(record: dict[str, Any], folder: Path) -> None:
    from flows.families.instahide.attack import outcome, summary_rows

    rows = summary_rows(record)
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = list(dict.fromkeys(column for row in reversed(rows) for column in row))
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    out.print(table)
    for a in record["methods"]:
        if "failure" in a:
            out.print(f"{a['title']}: {a['failure']}", markup=False)
    out.print(outcome(record), markup=False)
    for name in ("report.html", "reconstructions.png", "statuses.csv", "instahide.json"):
        if (folder / name).exists():
            out.print(f"  {(folder / name).absolute()}", markup=False, soft_wrap=True)
    if record["best"] is None:
        raise typer.Exit(FAILED)
