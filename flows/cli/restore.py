"""`palimpsest restore`: restore pictures, or a store's reconstructions, from a terminal.

Exit codes as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli import options as cli
from flows.cli.attack_file import Beside, numbers

if TYPE_CHECKING:
    from tasks.restoring.restore import Span

restore_app = typer.Typer()
BLURRED = (
    "the start of training blurs the span of these weights, and what is put in it may lose more "
    "than it gains; give --initial, the weights before training, if you have them"
)


@dataclass(frozen=True, kw_only=True)
class InSpan(Beside):
    """Weights that what is restored must agree with."""

    span: Annotated[
        Path | None,
        "The attacked network's weights: answers lie in the span of its first layer.",
    ] = None
    mean: Annotated[
        str | None, "What it was fed less of: .npy | picture | numbers; default: the pictures' own."
    ] = None
    std: Annotated[str | None, "What its inputs were then divided by, as 0.25,0.24,0.26."] = None
    span_steps: Annotated[
        Literal["every", "last"] | None,
        "Steps that are kept in it; default: every one, of EDM in a span that is known exactly.",
    ] = None
    span_tolerance: Annotated[
        float | None,
        "How far off it images may be, per pixel of [0, 1], at every step; default: 0.",
    ] = None
    span_rounds: Annotated[
        int | None, "Times that a restorer with one answer and the span take turns; default: 1."
    ] = None


@cli.command(restore_app, "restore")
def restore(
    *,
    weights: Annotated[str, "A trained restorer's folder | nlm | tv | wavelet | FILE.onnx"],
    source: Annotated[
        str,
        "--input",
        "Folder of pictures, or of an attack's; or a job's folder, a store's, s3://bucket/prefix.",
    ],
    target: Annotated[Path, "--out", "Folder of what comes out."],
    split: cli.Split = "train",
    n_samples: Annotated[int, "--samples", "Per picture, of a generative restorer (EDM)."] = 20,
    keep_samples: Annotated[bool, "Write every sample, too."] = False,
    limit: Annotated[int | None, "Only so many pictures, the first ones."] = None,
    size: Annotated[
        str | None,
        "Resize the centre of each picture to 32 x 32 pixels (32), or to height x width "
        "(24x32); default: as they are.",
    ] = None,
    skip_corrupt: cli.SkipFiles = False,
    seed: Annotated[int, "Another one, other samples."] = 0,
    batch_size: Annotated[
        int, "--batch", "(Sample, picture) pairs at once; changes no result."
    ] = 256,
    onnx_range: Annotated[Literal["0..1", "-1..1"], "Of an ONNX file's pictures."] = "0..1",
    in_span: InSpan,
    device: cli.Device = "auto",
    fresh: Annotated[bool, "Replace an earlier restoration in --out."] = False,
) -> None:
    """Restore pictures, with a map of how sure each pixel is; resumes what was interrupted.

    Examples: `palimpsest restore --weights runs/cifar/restorers/edm --input my-pictures --out
    restored` · `palimpsest restore --weights nlm --input runs/cifar --split heldout --out
    denoised --limit 100` · `palimpsest restore --weights nlm --span victim.pt --initial
    epoch0.pt --input attack --out restored`
    """
    from storage.sources.pictures import facts_of
    from tasks.restoring.inputs import open_inputs, parse_size
    from tasks.restoring.job import SHEET, Restoration, check_restoration
    from tasks.restoring.restore import open_restorer, open_span

    config = Restoration(
        n_samples=n_samples, seed=seed, keep_samples=keep_samples, batch_size=batch_size
    )
    cli.on_this_machine(target, "--out", "give a folder of this machine, and upload it afterwards")
    at, sides = cli.store_location(source, split), None if size is None else parse_size(size)
    inputs = open_inputs(at, limit=limit, size=sides, skip_corrupt=skip_corrupt)
    span = _span_of(in_span)
    allowed = None if span is None else open_span(span, inputs)
    restorer = open_restorer(weights, device=device, onnx_range=onnx_range, span=allowed)
    reading = check_restoration(restorer, inputs, target, config, fresh=fresh)
    cli.show_facts(str(at), facts_of(len(inputs), (), reading))
    if allowed is not None and not allowed.exact:
        cli.say(cli.err, f"{in_span.span}: {BLURRED}")
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
        span=span,
    )
    cli.show_facts(str(target.absolute()), flow.summary(record))
    cli.say(cli.out, str((target / SHEET).absolute()))


def _span_of(given: InSpan) -> Span | None:
    """The network of the options; None without one. ValueError for options of none."""
    from tasks.restoring.restore import Span

    if given.span is not None:
        return Span(
            weights=given.span,
            **given.files(),
            mean=given.mean,
            std=None if given.std is None else numbers(given.std, "--std"),
            steps=given.span_steps,
            tolerance=given.span_tolerance or 0.0,
            rounds=1 if given.span_rounds is None else given.span_rounds,
        )
    if any(value is not None for value in vars(given).values()):
        raise ValueError(
            "--initial, --optimizer, --checkpoint, --gradients, --mean, --std, --span-steps, "
            "--span-tolerance and --span-rounds are of the network of --span; give it, too"
        )
    return None
