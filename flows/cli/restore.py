"""`palimpsest restore`: restore pictures, or a store's reconstructions, from a terminal.

Exit codes as everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.console import say, show_facts
from flows.cli.options import (
    DeviceOption,
    SkipOption,
    SplitOption,
    on_this_machine,
    out,
    store_location,
)

restore_app = typer.Typer()


@restore_app.command(
    "restore",
    epilog="Examples: `palimpsest restore --weights runs/cifar/restorers/edm --input my-pictures "
    "--out restored` · `palimpsest restore --weights nlm --input runs/cifar --split heldout "
    "--out denoised --limit 100`",
)
def restore(
    *,
    weights: Annotated[
        str,
        typer.Option(
            "--weights", help="A trained restorer's folder | nlm | tv | wavelet | FILE.onnx"
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            "--input", help="Folder of pictures; or a job's folder, a store's, s3://bucket/prefix."
        ),
    ],
    target: Annotated[Path, typer.Option("--out", help="Folder of what comes out.")],
    split: SplitOption = "train",
    n_samples: Annotated[
        int, typer.Option("--samples", help="Per picture, of a generative restorer (EDM).")
    ] = 20,
    keep_samples: Annotated[
        bool, typer.Option("--keep-samples", help="Write every sample, too.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Only so many pictures, the first ones.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            help="Resize the centre of each picture to 32 x 32 pixels (32), or to height x width "
            "(24x32); default: as they are.",
        ),
    ] = None,
    skip_corrupt: SkipOption = False,
    seed: Annotated[int, typer.Option("--seed", help="Another one, other samples.")] = 0,
    batch_size: Annotated[
        int, typer.Option("--batch", help="(Sample, picture) pairs at once; changes no result.")
    ] = 256,
    onnx_range: Annotated[
        Literal["0..1", "-1..1"], typer.Option("--onnx-range", help="Of an ONNX file's pictures.")
    ] = "0..1",
    device: DeviceOption = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace an earlier restoration in --out.")
    ] = False,
) -> None:
    """Restore pictures, with a map of how sure each pixel is; resumes what was interrupted."""
    from storage.sources.picture_files import facts_of
    from tasks.restoring.folder import SHEET
    from tasks.restoring.inputs import open_inputs, parse_size
    from tasks.restoring.job import Restoration, check_restoration
    from tasks.restoring.restore import open_restorer

    config = Restoration(
        n_samples=n_samples, seed=seed, keep_samples=keep_samples, batch_size=batch_size
    )
    on_this_machine(target, "--out", "give a folder of this machine, and upload it afterwards")
    at, sides = store_location(source, split), None if size is None else parse_size(size)
    inputs = open_inputs(at, limit=limit, size=sides, skip_corrupt=skip_corrupt)
    restorer = open_restorer(weights, device=device, onnx_range=onnx_range)
    reading = check_restoration(restorer, inputs, target, config, fresh=fresh)
    show_facts(out, str(at), facts_of(len(inputs), (), reading))
    from flows import restore as flow  # Prefect, after all that may be refused

    record = flow.restore(
        weights,
        at,
        target,
        config,
        limit=limit,
        size=sides,
        skip_corrupt=skip_corrupt,
        fresh=fresh,
        onnx_range=onnx_range,
        device=device,
    )
    show_facts(out, str(target.absolute()), flow.summary(record))
    say(out, str((target / SHEET).absolute()))
