"""`palimpsest dataset`: look after a store of pairs, take its pairs elsewhere, make it again.

`--store` is a job's folder (with `--split`), the folder of a store, or s3://bucket/prefix. Exit
codes as everywhere.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from flows.cli.options import (
    FAILED,
    Computed,
    Json,
    Split,
    Stored,
    command,
    err,
    fact_text,
    on_this_machine,
    out,
    print_json,
    say,
    show_facts,
    show_images,
    show_rows,
    size_text,
    store_location,
    write_as_asked,
)
from flows.naming import counted, listed
from storage.pairs.dataset import Dataset
from tasks.progress import stage_progress

HOUR_SECONDS = 3600.0

dataset_app = typer.Typer(
    no_args_is_help=True, help="Look after a store of pairs, and take its pairs elsewhere."
)

UPLOAD = "give a folder of this machine, and upload what is in it"


@command(dataset_app, "info")
def dataset_info(
    stored: Stored,
    quick: Annotated[bool, "From the receipts alone: no table of iterations."] = False,
    as_json: Json = False,
) -> None:
    """Contents of a store: counts, coverage, bytes, and its pairs by saved iteration.

    Examples: `palimpsest dataset info --store runs/cifar` · `palimpsest dataset info --store
    s3://bucket/pairs --quick --json`
    """
    from recon_core.balance import gini
    from recon_core.experiments import KKT
    from storage.pairs.statistics import attacks_of, saved_iterations, summarise

    dataset = Dataset(stored.location)
    summary, counts = summarise(dataset)
    facts: dict[str, Any] = {
        "parts": summary.pop("parts"),
        "attacks": attacks_of(dataset, by_kind={KKT.family}),
        **summary,
        "gini_of_confident_pairs": round(gini(counts[counts > 0].astype(float)), 4),
    }
    iterations = None
    if not quick:
        with stage_progress("Read", "part") as on_part:
            iterations = saved_iterations(dataset, on_part=on_part)
    if as_json:
        found = None if iterations is None else [asdict(row) for row in iterations]
        print_json(out, {"store": dataset.root, **facts, "iterations": found})
        return
    facts |= {
        "attacks": ", ".join(f"{name} in {n:,}" for name, n in facts["attacks"].items()) or "-",
        "outcomes": ", ".join(f"{n:,} {name}" for name, n in facts["outcomes"].items()) or "none",
        "bytes": f"{size_text(facts['bytes'])} ({facts['bytes']:,} bytes)",
        **{name: ", ".join(facts[name]) for name in ("code", "torch", "devices")},
    }
    show_facts(out, dataset.root, facts)
    rows = [
        {
            "iteration": fact_text(row.iteration),
            "pairs": fact_text(row.n_pairs),
            "confident": fact_text(row.n_confident),
            "mean SSIM": "" if row.ssim is None else f"{row.ssim:.3f}",
            "mean SSIM of confident": ""
            if row.ssim_confident is None
            else f"{row.ssim_confident:.3f}",
        }
        for row in iterations or ()
    ]
    table = Table(title="Pairs by the iteration at which they were saved", title_justify="left")
    show_rows(out, rows, table)


@command(dataset_app, "verify")
def dataset_verify(stored: Stored, as_json: Json = False) -> None:
    """Read every file and compare it with its receipt; exit code 1 if anything is wrong.

    Examples: `palimpsest dataset verify --store runs/cifar` · `palimpsest dataset verify
    --store s3://bucket/pairs --json`
    """
    from storage.pairs.verify import verify_store

    location = stored.location
    with stage_progress("Verify", "part") as on_part:
        found = verify_store(location, on_part=on_part)
    if as_json:
        print_json(out, {"store": str(location), "ok": found.ok, **asdict(found)})
    else:
        for problem in found.problems:
            err.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
        out.print(
            f"{counted(found.n_checked, 'part')} checked: "
            f"{counted(len(found.problems), 'problem')}, "
            f"{counted(len(found.orphans), 'orphan')}, {counted(len(found.gaps), 'gap')}",
            highlight=False,
        )
        if orphans := listed(found.orphans):
            why = f"orphans, left by killed writers or of live ones: {orphans}"
            say(err, f"{why}; remove the old ones with: palimpsest dataset vacuum")
        if gaps := listed(found.gaps):
            why = f"gaps, part numbers that have no receipt: {gaps}"
            say(err, f"{why}; the generate command of this store fills them")
    if not found.ok:
        raise typer.Exit(FAILED)


@command(dataset_app, "vacuum")
def dataset_vacuum(
    stored: Stored,
    dry_run: Annotated[bool, "Only say what it would do."] = False,
    older_than_hours: Annotated[float, "--older-than", "Hours since it was last touched."] = 24.0,
    without_receipts: Annotated[bool, "Also where no part has a receipt."] = False,
) -> None:
    """Remove what killed writers left behind; never a part that has a receipt.

    Examples: `palimpsest dataset vacuum --store runs/cifar --dry-run` · `palimpsest dataset
    vacuum --store runs/cifar --older-than 1`
    """
    from storage.object_store import open_place
    from storage.pairs.verify import orphan_files, vacuum

    if not older_than_hours >= 0:
        raise ValueError(f"--older-than {older_than_hours} must be 0 hours or more")
    location = stored.location
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
    out.print(f"{counted(len(removed), 'orphan')} {verb}, {freed}", highlight=False)


@command(dataset_app, "merge")
def dataset_merge(
    sources: Annotated[
        list[str], typer.Argument(metavar="FROM...", help="Stores to copy from; never changed.")
    ],
    into: Annotated[str, "The result: a new place, or a store, also one of FROM."],
    split: Split = "train",
    mix: Annotated[bool, "Of different experiments on the same images."] = False,
) -> None:
    """One store from several, of the same experiment or mixed; continues what was interrupted.

    Examples: `palimpsest dataset merge runs/a/pairs runs/b/pairs --into runs/both` ·
    `palimpsest dataset merge s3://bucket/pairs --into runs/cifar/pairs` · `palimpsest dataset
    merge runs/kkt runs/span --mix --into runs/both/pairs`
    """
    from storage.pairs.merge import merge

    locations = [store_location(source, split) for source in sources]
    with stage_progress("Copy", "part") as on_part:
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


@command(dataset_app, "export")
def dataset_export(
    *,
    target: Annotated[str, "--out", "Folder to make."],
    format: Annotated[Literal["webdataset", "parquet", "huggingface"], "--format"],
    stored: Stored,
    confident_only: Annotated[bool, "--confident-only/--all", "Which pairs."] = True,
    min_iteration: Annotated[int, "Only pairs saved at this one or later."] = 0,
    limit: Annotated[int | None, "Only so many pairs."] = None,
    rows_per_file: Annotated[int | None, "Default: 10,000; Parquet 40,000."] = None,
    fresh: Annotated[bool, "Replace an earlier export."] = False,
) -> None:
    """Write pairs for other tools: WebDataset tars, Parquet, or a Hugging Face dataset folder.

    Examples: `palimpsest dataset export --store runs/cifar --format huggingface --out
    exports/cifar` · `palimpsest dataset export --store runs/cifar --format webdataset --out
    exports/tars --all --min-iteration 500`
    """
    from storage.export.rows import Selection
    from tasks.dataset.export import export_pairs

    selection = Selection(confident_only=confident_only, min_iteration=min_iteration, limit=limit)
    folder = on_this_machine(target, "--out", UPLOAD)
    dataset = Dataset(stored.location)
    with stage_progress("Export", "part") as on_part:
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


@command(dataset_app, "show")
def dataset_show(
    *,
    stored: Stored,
    target: Annotated[str, "--out", "The PNG file."] = "sheet.png",
    n: Annotated[int, "How many pairs."] = 12,
    seed: Annotated[int, "Of the draw of images."] = 0,
    image_id: Annotated[int | None, "Only this image: its best pairs."] = None,
) -> None:
    """Draw originals over their reconstructions by saved iteration, as a PNG.

    Examples: `palimpsest dataset show --store runs/cifar --out sheet.png` · `palimpsest dataset
    show --store runs/cifar --image-id 7 --n 6`
    """
    from tasks.dataset.pair_sheet import pair_sheet

    file = on_this_machine(target, "--out", UPLOAD)
    dataset = Dataset(stored.location)
    with stage_progress("Look", "part") as on_part:
        sheet = pair_sheet(dataset, n=n, seed=seed, image_id=image_id, on_part=on_part)
    write_as_asked(file, sheet.png, "--out")
    say(out, sheet.caption)
    out.print(str(file.absolute()), style="bold", markup=False, highlight=False, soft_wrap=True)


@command(dataset_app, "manifest")
def dataset_manifest(
    *,
    target: Annotated[Path, "--out", "The JSON file to write."],
    stored: Stored,
    data: Annotated[str | None, "Where the images are, if no recipe says it."] = None,
) -> None:
    """Describe a dataset so that it can be made again and compared: settings and hashes.

    Examples: `palimpsest dataset manifest --store runs/cifar --out manifest.json` · `palimpsest
    dataset manifest --store s3://bucket/pairs --data folder:cifar10 --out m.json`
    """
    from flows.regenerate import describe
    from storage.files import json_bytes
    from tasks.campaign.status import find_recipe

    on_this_machine(target, "--out", "give a path of this machine, and upload it afterwards")
    dataset = Dataset(stored.location)
    content = json_bytes(describe(dataset, find_recipe(stored.store), data))
    write_as_asked(target, content, "--out")
    facts = {"runs": dataset.n_runs, "bytes": size_text(len(content))}
    show_facts(out, str(target.absolute()), facts | {"dataset hash": dataset.content_hash})


@command(dataset_app, "regenerate")
def dataset_regenerate(
    manifest: Annotated[Path, typer.Argument(help="What `palimpsest dataset manifest` wrote.")],
    *,
    store: Annotated[Path, "A new job's folder."],
    data: Annotated[str | None, "The same images, if they are elsewhere now."] = None,
    pairs_at: Annotated[str | None, "Folder or s3://bucket/prefix for the pairs."] = None,
    computed: Computed,
) -> None:
    """Make a dataset again and compare; exit code 1, and in what they differ, if they do.

    Examples: `palimpsest dataset regenerate manifest.json --store runs/again` · `palimpsest
    dataset regenerate manifest.json --store runs/again --data folder:cifar10`
    """
    from flows.regenerate import foreseen, read_manifest, recipe_in, regenerate

    on_this_machine(
        store, "--store", "give a path of this machine, and use --pairs-at for the pairs"
    )
    expected = read_manifest(manifest)
    for sentence in foreseen(expected):
        say(err, sentence)
    made_of = expected["manifest"]["source"]["split"]
    show_images(out, made_of, recipe_in(expected, data).images(made_of).facts)
    facts = regenerate(manifest, store, data, pairs_at, workers=computed.workers)
    differences = facts.pop("differences")
    if facts.pop("equal"):
        show_facts(out, f"{store} is the dataset of {manifest}", facts)
        return
    show_facts(out, f"{store} is not the dataset of {manifest}", facts)
    for sentence in differences:
        say(err, sentence)
    raise typer.Exit(FAILED)
