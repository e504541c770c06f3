"""`palimpsest dataset`: look after a store of pairs, and take its pairs elsewhere.

`--store` is a job's folder (with `--split`), the folder of a store, or s3://bucket/prefix. Exit
codes as everywhere.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from flows.cli.console import counting, fact_text, print_json, say, show_facts, size_text
from flows.cli.options import (
    DEFAULT_STORE,
    JsonOption,
    PlaceOption,
    SplitOption,
    err,
    on_this_machine,
    out,
    store_location,
)
from storage.errors import StorageError
from storage.pairs.dataset import Dataset

FAILED = 1
HOUR_SECONDS = 3600.0
N_SHOWN = 5

dataset_app = typer.Typer(
    no_args_is_help=True, help="Look after a store of pairs, and take its pairs elsewhere."
)

FreshOption = Annotated[bool, typer.Option("--fresh", help="Replace an earlier export.")]


@dataset_app.command(
    "info",
    epilog="Examples: `palimpsest dataset info --store runs/cifar` · "
    "`palimpsest dataset info --store s3://bucket/pairs --quick --json`",
)
def dataset_info(
    store: PlaceOption = str(DEFAULT_STORE),
    split: SplitOption = "train",
    quick: Annotated[
        bool, typer.Option("--quick", help="From the receipts alone: no table of iterations.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Contents of a store: counts, coverage, bytes, and its pairs by saved iteration."""
    from recon_core.balance import gini
    from storage.pairs.statistics import attacks_of, saved_iterations, summarise

    dataset = Dataset(store_location(store, split))
    summary = summarise(dataset)
    counts = summary.confident_per_image
    facts: dict[str, Any] = {
        "parts": summary.n_parts,
        "attacks": attacks_of(dataset),
        "runs": summary.n_runs,
        "outcomes": {name: n for name, n in summary.outcomes.items() if n},
        "targets": summary.n_targets,
        "pairs": summary.n_pairs,
        "confident_pairs": summary.n_confident,
        "images_trained_on": summary.n_images,
        "images_with_a_confident_pair": summary.n_covered,
        "gini_of_confident_pairs": round(gini(counts[counts > 0].astype(float)), 4),
        "encoding": summary.encoding,
        "bytes": summary.n_bytes,
        "bytes_per_pair": round(summary.bytes_per_pair, 1),
        "worker_seconds": round(summary.worker_seconds, 1),
        "code": list(summary.code_versions),
        "torch": list(summary.torch_versions),
        "devices": list(summary.devices),
        "dataset_hash": summary.content_hash,
    }
    iterations = None
    if not quick:
        with counting("Read", "part") as on_part:
            iterations = saved_iterations(dataset, on_part=on_part)
    if as_json:
        rows = None if iterations is None else [asdict(row) for row in iterations]
        print_json(out, {"store": dataset.root, **facts, "iterations": rows})
        return
    facts |= {
        "attacks": ", ".join(f"{name} in {n:,}" for name, n in facts["attacks"].items()) or "-",
        "outcomes": ", ".join(f"{n:,} {name}" for name, n in facts["outcomes"].items()) or "none",
        "bytes": f"{size_text(summary.n_bytes)} ({summary.n_bytes:,} bytes)",
        "code": ", ".join(summary.code_versions),
        "torch": ", ".join(summary.torch_versions),
        "devices": ", ".join(summary.devices),
    }
    show_facts(out, dataset.root, facts)
    if iterations:
        _show_iterations(iterations)


@dataset_app.command(
    "verify",
    epilog="Examples: `palimpsest dataset verify --store runs/cifar` · "
    "`palimpsest dataset verify --store s3://bucket/pairs --json`",
)
def dataset_verify(
    store: PlaceOption = str(DEFAULT_STORE),
    split: SplitOption = "train",
    as_json: JsonOption = False,
) -> None:
    """Read every file and compare it with its receipt; exit code 1 if anything is wrong."""
    from storage.pairs.verify import verify_store

    location = store_location(store, split)
    with counting("Verify", "part") as on_part:
        found = verify_store(location, on_part=on_part)
    if as_json:
        print_json(out, {"store": str(location), "ok": found.ok, **asdict(found)})
    else:
        for problem in found.problems:
            err.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
        out.print(
            f"{_count(found.n_checked, 'part')} checked: {_count(len(found.problems), 'problem')}, "
            f"{_count(len(found.orphans), 'orphan')}, {_count(len(found.gaps), 'gap')}",
            highlight=False,
        )
        for note in found.notes:
            say(err, note)
        if found.orphans:
            say(
                err,
                f"orphans, left by killed writers or of live ones: {_first(found.orphans)}; "
                "remove the old ones with: palimpsest dataset vacuum",
            )
        if found.gaps:
            say(
                err,
                f"gaps, part numbers that have no receipt: {_first(found.gaps)}; the generate "
                "command of this store fills them",
            )
    if not found.ok:
        raise typer.Exit(FAILED)


@dataset_app.command(
    "vacuum",
    epilog="Examples: `palimpsest dataset vacuum --store runs/cifar --dry-run` · "
    "`palimpsest dataset vacuum --store runs/cifar --older-than 1`",
)
def dataset_vacuum(
    store: PlaceOption = str(DEFAULT_STORE),
    split: SplitOption = "train",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would do.")] = False,
    older_than_hours: Annotated[
        float, typer.Option("--older-than", help="Hours since it was last touched.")
    ] = 24.0,
    without_receipts: Annotated[
        bool, typer.Option("--without-receipts", help="Also where no part has a receipt.")
    ] = False,
) -> None:
    """Remove what killed writers left behind; never a part that has a receipt."""
    from storage.object_store import open_place
    from storage.pairs.verify import orphan_files, vacuum

    if not older_than_hours >= 0:
        raise ValueError(f"--older-than {older_than_hours} must be 0 hours or more")
    location = store_location(store, split)
    place = open_place(location)
    seconds = older_than_hours * HOUR_SECONDS
    planned = vacuum(location, older_than_s=seconds, dry_run=True)
    sizes = {name: sum(info.size for info in orphan_files(place, name)) for name in planned}
    removed = planned
    if not dry_run:
        removed = vacuum(location, older_than_s=seconds, without_receipts=without_receipts)
    for name in removed:
        n_bytes = f"  {size_text(sizes[name])}" if name in sizes else ""
        out.print(f"  {name}{n_bytes}", markup=False, highlight=False, soft_wrap=True)
    freed = size_text(sum(sizes.get(name, 0) for name in removed))
    verb = "would be removed" if dry_run else "removed"
    out.print(f"{_count(len(removed), 'orphan')} {verb}, {freed}", highlight=False)


@dataset_app.command(
    "merge",
    epilog="Examples: `palimpsest dataset merge runs/a/pairs runs/b/pairs --into runs/both` · "
    "`palimpsest dataset merge s3://bucket/pairs --into runs/cifar/pairs` · "
    "`palimpsest dataset merge runs/kkt runs/span --mix --into runs/both/pairs`",
)
def dataset_merge(
    sources: Annotated[
        list[str], typer.Argument(metavar="FROM...", help="Stores to copy from; never changed.")
    ],
    into: Annotated[
        str, typer.Option("--into", help="The result: a new place, or a store, also one of FROM.")
    ],
    split: SplitOption = "train",
    mix: Annotated[
        bool, typer.Option("--mix", help="Of different experiments on the same images.")
    ] = False,
) -> None:
    """One store from several, of the same experiment or mixed; continues what was interrupted."""
    from storage.pairs.merge import merge

    locations = [store_location(source, split) for source in sources]
    with counting("Copy", "part") as on_part:
        report = merge(locations, store_location(into, split), mix=mix, on_part=on_part)
    dataset = report.dataset
    show_facts(
        out,
        dataset.root,
        {
            "parts copied": report.n_copied,
            "bytes copied": size_text(report.n_bytes),
            "parts there before": report.n_present,
            "parts": len(dataset.receipts),
            "runs": dataset.n_runs,
            "pairs": dataset.n_pairs,
            "dataset hash": dataset.content_hash,
        },
    )


@dataset_app.command(
    "export",
    epilog="Examples: `palimpsest dataset export --store runs/cifar --format huggingface "
    "--out exports/cifar` · `palimpsest dataset export --store runs/cifar --format webdataset "
    "--out exports/tars --all --min-iteration 500`",
)
def dataset_export(
    *,
    target: Annotated[str, typer.Option("--out", help="Folder to make.")],
    format: Annotated[Literal["webdataset", "parquet", "huggingface"], typer.Option("--format")],
    store: PlaceOption = str(DEFAULT_STORE),
    split: SplitOption = "train",
    confident_only: Annotated[
        bool, typer.Option("--confident-only/--all", help="Which pairs.")
    ] = True,
    min_iteration: Annotated[
        int, typer.Option("--min-iteration", help="Only pairs saved at this one or later.")
    ] = 0,
    limit: Annotated[int | None, typer.Option("--limit", help="Only so many pairs.")] = None,
    rows_per_file: Annotated[
        int | None, typer.Option("--rows-per-file", help="Default: 10,000; Parquet 40,000.")
    ] = None,
    fresh: FreshOption = False,
) -> None:
    """Write pairs for other tools: WebDataset tars, Parquet, or a Hugging Face dataset folder."""
    from storage.export.rows import Selection
    from tasks.dataset.export import export_pairs

    selection = Selection(confident_only=confident_only, min_iteration=min_iteration, limit=limit)
    folder = on_this_machine(
        target, "--out", "give a folder of this machine, and upload what is in it"
    )
    dataset = Dataset(store_location(store, split))
    with counting("Export", "part") as on_part:
        report = export_pairs(
            dataset,
            folder,
            format,
            selection=selection,
            rows_per_file=rows_per_file,
            fresh=fresh,
            on_part=on_part,
        )
    show_facts(
        out,
        str(report.folder.absolute()),
        {
            "pairs": report.n_pairs,
            "of the store's": dataset.n_pairs,
            "different images": report.n_images,
            "files": len(report.files),
            "bytes": size_text(sum(report.files.values())),
            "dataset hash": dataset.content_hash,
        },
    )


@dataset_app.command(
    "show",
    epilog="Examples: `palimpsest dataset show --store runs/cifar --out sheet.png` · "
    "`palimpsest dataset show --store runs/cifar --image-id 7 --n 6`",
)
def dataset_show(
    *,
    store: PlaceOption = str(DEFAULT_STORE),
    split: SplitOption = "train",
    target: Annotated[str, typer.Option("--out", help="The PNG file.")] = "sheet.png",
    n: Annotated[int, typer.Option("--n", help="How many pairs.")] = 12,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw of images.")] = 0,
    image_id: Annotated[
        int | None, typer.Option("--image-id", help="Only this image: its best pairs.")
    ] = None,
) -> None:
    """Draw originals over their reconstructions by saved iteration, as a PNG."""
    from storage.files import write_file
    from tasks.dataset.pair_sheet import pair_sheet

    file = on_this_machine(
        target, "--out", "give a folder of this machine, and upload what is in it"
    )
    dataset = Dataset(store_location(store, split))
    with counting("Look", "part") as on_part:
        sheet = pair_sheet(dataset, n=n, seed=seed, image_id=image_id, on_part=on_part)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, sheet.png)
    except OSError as error:
        raise StorageError(
            f"cannot write {file} ({error.strerror}); choose another --out"
        ) from error
    say(out, sheet.caption)
    out.print(str(file.absolute()), style="bold", markup=False, highlight=False, soft_wrap=True)


def _show_iterations(iterations: Any) -> None:
    table = Table(title="Pairs by the iteration at which they were saved", title_justify="left")
    for name in ("iteration", "pairs", "confident", "mean SSIM", "mean SSIM of confident"):
        table.add_column(name, justify="right")
    for row in iterations:
        means = ["" if v is None else f"{v:.3f}" for v in (row.ssim, row.ssim_confident)]
        counts = [fact_text(v) for v in (row.iteration, row.n_pairs, row.n_confident)]
        table.add_row(*counts, *means)
    out.print(table)


def _count(n: int, name: str) -> str:
    return f"{n:,} {name}" + ("s" if n != 1 else "")


def _first(things: Any) -> str:
    shown = ", ".join(map(str, things[:N_SHOWN]))
    return shown + (f" and {len(things) - N_SHOWN:,} more" if len(things) > N_SHOWN else "")
