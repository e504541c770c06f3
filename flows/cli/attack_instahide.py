"""`palimpsest attack instahide`: private images from InstaHide's encodings.

Exit codes as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows.cli import options
from flows.cli.attack_file import attack, default_folder
from flows.cli.console import show_facts
from flows.cli.options import out

FAILED = 1

encodings_app = typer.Typer()


@encodings_app.command(
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
            "public images unknown) | both (the first two) | all (these three) | sdp (exact, by "
            "the paper's semidefinite program; at most 40 public images)",
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
    device: options.DeviceOption = "auto",
    threads: options.Threads = None,
    fresh: options.Fresh = False,
) -> None:
    """Recover the private images that InstaHide's encodings are made of."""
    from tasks.devices import resolve_device
    from tasks.families.instahide.attack import METHODS
    from tasks.families.instahide.inputs import InstaHideJob, prepare_challenge

    target = target or default_folder(encodings)
    job = InstaHideJob(
        path=encodings, out=target, public=public, labels=labels, truth=truth,
        similarity=similarity, method=method,
        scheme=_scheme(scheme, k_pub=k_pub, wa=wa, wb=wb, noise=noise, largest=largest),
        n_private=n_private, use_public=not no_public, use_labels=not no_labels, n_levels=n_levels,
        n_rounds=n_rounds, seed=seed, n_shown=n_shown,
    )  # fmt: skip
    resolve_device(device)
    challenge = prepare_challenge(
        job, tuple(METHODS)
    ).challenge  # refuses before a server is started
    known = challenge.public
    read = {
        "encodings": f"{len(challenge.encodings):,} of {'x'.join(map(str, challenge.shape))}",
        "public images": "not known" if known is None else f"{len(known):,}",
        "labels": "not known" if challenge.labels is None else "known",
    }
    show_facts(out, str(encodings), read)

    from flows.families.instahide import attack as flow

    record = attack(
        flow,
        lambda command: flow.attack_instahide(job, device=device, threads=threads, command=command),
        target,
        fresh=fresh,
    )
    if record["best"] is None:
        raise typer.Exit(FAILED)


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
        only("theory", of_theory)
        return InstaHide(
            k_pub=4 if k_pub is None else k_pub, largest=0.65 if largest is None else largest
        )
    only("instahide", {"--largest": largest})
    whole = Mixing.as_a_whole(2 if k_pub is None else k_pub)
    return Mixing(
        k_pub=whole.k_pub,
        wa=whole.wa if wa is None else wa,
        wb=whole.wb if wb is None else wb,
        noise=noise or 0.0,
    )


def only(scheme: str, options: Mapping[str, Any]) -> None:
    """Refuses options of the other scheme."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is of --scheme {scheme}; leave it out, or change the scheme")
