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

from flows.cli import options as cli
from flows.naming import counted, listed
from storage.pairs.dataset import Dataset
from tasks.progress import stage_progress

HOUR_SECONDS = 3600.0

dataset_app = typer.Typer(
    no_args_is_help=True, help="Look after a store of pairs, and take its pairs elsewhere."
)

UPLOAD = "give a folder of this machine, and upload what is in it"


@cli.command(dataset_app, "info")
def dataset_info(
    stored: cli.Stored,
    quick: Annotated[bool, "From the receipts alone: no table of iterations."] = False,
    as_json: cli.Json = False,
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
        cli.print_json({"store": dataset.root, **facts, "iterations": found})
        return
    facts |= {
        "attacks": ", ".join(f"{name} in {n:,}" for name, n in facts["attacks"].items()) or "-",
        "outcomes": ", ".join(f"{n:,} {name}" for name, n in facts["outcomes"].items()) or "none",
        "bytes": f"{cli.size_text(facts['bytes'])} ({facts['bytes']:,} bytes)",
        **{name: ", ".join(facts[name]) for name in ("code", "torch", "devices")},
    }
    cli.show_facts(dataset.root, facts)
    rows = [
        {
            "iteration": cli.fact_text(row.iteration),
            "pairs": cli.fact_text(row.n_pairs),
            "confident": cli.fact_text(row.n_confident),
            "mean SSIM": "" if row.ssim is None else f"{row.ssim:.3f}",
            "mean SSIM of confident": ""
            if row.ssim_confident is None
            else f"{row.ssim_confident:.3f}",
        }
        for row in iterations or ()
    ]
    table = Table(title="Pairs by the iteration at which they were saved", title_justify="left")
    cli.show_rows(rows, table)


@cli.command(dataset_app, "verify")
def dataset_verify(stored: cli.Stored, as_json: cli.Json = False) -> None:
    """Read every file and compare it with its receipt; exit code 1 if anything is wrong.

    Examples: `palimpsest dataset verify --store runs/cifar` · `palimpsest dataset verify
    --store s3://bucket/pairs --json`
    """
    from storage.pairs.verify import verify_store

    location = stored.location
    with stage_progress("Verify", "part") as on_part:
        found = verify_store(location, on_part=on_part)
    if as_json:
        cli.print_json({"store": str(location), "ok": found.ok, **asdict(found)})
    else:
        for problem in found.problems:
            cli.err.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
        cli.out.print(
            f"{counted(found.n_checked, 'part')} checked: "
            f"{counted(len(found.problems), 'problem')}, "
            f"{counted(len(found.orphans), 'orphan')}, {counted(len(found.gaps), 'gap')}",
            highlight=False,
        )
        if orphans := listed(found.orphans):
            why = f"orphans, left by killed writers or of live ones: {orphans}"
            cli.say(cli.err, f"{why}; remove the old ones with: palimpsest dataset vacuum")
        if gaps := listed(found.gaps):
            why = f"gaps, part numbers that have no receipt: {gaps}"
            cli.say(cli.err, f"{why}; the generate command of this store fills them")
    if not found.ok:
        raise typer.Exit(cli.FAILED)


@cli.command(dataset_app, "vacuum")
def dataset_vacuum(
    stored: cli.Stored,
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
        n_bytes = f"  {cli.size_text(sizes[name])}" if name in sizes else ""
        cli.out.print(f"  {name}{n_bytes}", markup=False, highlight=False, soft_wrap=True)
    freed = cli.size_text(sum(sizes.get(name, 0) for name in removed))
    verb = "would be removed" if dry_run else "removed"
    cli.out.print(f"{counted(len(removed), 'orphan')} {verb}, {freed}", highlight=False)


@cli.command(dataset_app, "merge")
def dataset_merge(
    sources: Annotated[
        list[str], typer.Argument(metavar="FROM...", help="Stores to copy from; never changed.")
    ],
    into: Annotated[str, "The result: a new place, or a store, also one of FROM."],
    split: cli.Split = "train",
    mix: Annotated[bool, "Of different experiments on the same images."] = False,
) -> None:
    """One store from several, of the same experiment or mixed; continues what was interrupted.

    Examples: `palimpsest dataset merge runs/a/pairs runs/b/pairs --into runs/both` ·
    `palimpsest dataset merge s3://bucket/pairs --into runs/cifar/pairs` · `palimpsest dataset
    merge runs/kkt runs/span --mix --into runs/both/pairs`
    """
    from storage.pairs.merge import merge

    locations = [cli.store_location(source, split) for source in sources]
    with stage_progress("Copy", "part") as on_part:
        report = merge(locations, cli.store_location(into, split), mix=mix, on_part=on_part)
    dataset = report.dataset
    cli.show_facts(
        dataset.root,
        {
            "parts copied": report.n_copied,
            "bytes copied": cli.size_text(report.n_bytes),
            "parts there before": report.n_present,
            "parts": len(dataset.receipts),
            "runs": dataset.n_runs,
            "pairs": dataset.n_pairs,
            "dataset hash": dataset.content_hash,
        },
    )


@cli.command(dataset_app, "export")
def dataset_export(
    *,
    target: Annotated[str, "--out", "Folder to make."],
    format: Annotated[Literal["webdataset", "parquet", "huggingface"], "--format"],
    stored: cli.Stored,
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
    folder = cli.on_this_machine(target, "--out", UPLOAD)
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
    cli.show_facts(
        str(report.folder.absolute()),
        {
            "pairs": report.n_pairs,
            "of the store's": dataset.n_pairs,
            "different images": report.n_images,
            "files": len(report.files),
            "bytes": cli.size_text(sum(report.files.values())),
            "dataset hash": dataset.content_hash,
        },
    )


@cli.command(dataset_app, "show")
def dataset_show(
    *,
    stored: cli.Stored,
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

    file = cli.on_this_machine(target, "--out", UPLOAD)
    dataset = Dataset(stored.location)
    with stage_progress("Look", "part") as on_part:
        sheet = pair_sheet(dataset, n=n, seed=seed, image_id=image_id, on_part=on_part)
    cli.write_as_asked(file, sheet.png, "--out")
    cli.say(cli.out, sheet.caption)
    cli.out.print(str(file.absolute()), style="bold", markup=False, highlight=False, soft_wrap=True)


@cli.command(dataset_app, "manifest")
def dataset_manifest(
    *,
    target: Annotated[Path, "--out", "The JSON file to write."],
    stored: cli.Stored,
    data: Annotated[str | None, "Where the images are, if no recipe says it."] = None,
) -> None:
    """Describe a dataset so that it can be made again and compared: settings and hashes.

    Examples: `palimpsest dataset manifest --store runs/cifar --out manifest.json` · `palimpsest
    dataset manifest --store s3://bucket/pairs --data folder:cifar10 --out m.json`
    """
    from flows.regenerate import describe
    from storage.files import json_bytes
    from tasks.campaign.status import find_recipe

    cli.on_this_machine(target, "--out", "give a path of this machine, and upload it afterwards")
    dataset = Dataset(stored.location)
    content = json_bytes(describe(dataset, find_recipe(stored.store), data))
    cli.write_as_asked(target, content, "--out")
    facts = {"runs": dataset.n_runs, "bytes": cli.size_text(len(content))}
    cli.show_facts(str(target.absolute()), facts | {"dataset hash": dataset.content_hash})


@cli.command(dataset_app, "regenerate")
def dataset_regenerate(
    manifest: Annotated[Path, typer.Argument(help="What `palimpsest dataset manifest` wrote.")],
    *,
    store: Annotated[Path, "A new job's folder."],
    data: Annotated[str | None, "The same images, if they are elsewhere now."] = None,
    pairs_at: Annotated[str | None, "Folder or s3://bucket/prefix for the pairs."] = None,
    computed: cli.Computed,
) -> None:
    """Make a dataset again and compare; exit code 1, and in what they differ, if they do.

    Examples: `palimpsest dataset regenerate manifest.json --store runs/again` · `palimpsest
    dataset regenerate manifest.json --store runs/again --data folder:cifar10`
    """
    from flows.regenerate import foreseen, read_manifest, recipe_in, regenerate

    cli.on_this_machine(
        store, "--store", "give a path of this machine, and use --pairs-at for the pairs"
    )
    expected = read_manifest(manifest)
    for sentence in foreseen(expected):
        cli.say(cli.err, sentence)
    made_of = expected["manifest"]["source"]["split"]
    cli.show_images(made_of, recipe_in(expected, data).images(made_of).facts)
    facts = regenerate(manifest, store, data, pairs_at, workers=computed.workers)
    differences = facts.pop("differences")
    if facts.pop("equal"):
        cli.show_facts(f"{store} is the dataset of {manifest}", facts)
        return
    cli.show_facts(f"{store} is not the dataset of {manifest}", facts)
    for sentence in differences:
        cli.say(cli.err, sentence)
    raise typer.Exit(cli.FAILED)
