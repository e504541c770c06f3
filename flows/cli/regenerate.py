"""`palimpsest dataset manifest` and `regenerate`: what a dataset is, and making it again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.console import say, show_facts, show_images, size_text
from flows.cli.options import (
    DEFAULT_STORE,
    ClusterOption,
    DeviceOption,
    PlaceOption,
    SplitOption,
    WorkersOption,
    err,
    on_this_machine,
    out,
    store_location,
)
from storage.errors import StorageError
from storage.pairs.dataset import Dataset

FAILED = 1

regenerate_app = typer.Typer()


@regenerate_app.command(
    "manifest",
    epilog="Examples: `palimpsest dataset manifest --store runs/cifar --out manifest.json` · "
    "`palimpsest dataset manifest --store s3://bucket/pairs --data folder:cifar10 --out m.json`",
)
def dataset_manifest(
    *,
    target: Annotated[Path, typer.Option("--out", help="The JSON file to write.")],
    store: PlaceOption = str(DEFAULT_STORE),
    split: SplitOption = "train",
    data: Annotated[
        str | None, typer.Option("--data", help="Where the images are, if no recipe says it.")
    ] = None,
) -> None:
    """Describe a dataset so that it can be made again and compared: settings and hashes."""
    from flows.regenerate import describe
    from storage.files import json_bytes, write_file
    from tasks.campaign.status import find_recipe

    on_this_machine(target, "--out", "give a path of this machine, and upload it afterwards")
    dataset = Dataset(store_location(store, split))
    content = json_bytes(describe(dataset, find_recipe(store), data))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, content)
    except OSError as error:
        raise StorageError(
            f"cannot write {target} ({error.strerror}); choose another --out"
        ) from error
    facts = {"runs": dataset.n_runs, "bytes": size_text(len(content))}
    show_facts(out, str(target.absolute()), facts | {"dataset hash": dataset.content_hash})


@regenerate_app.command(
    "regenerate",
    epilog="Examples: `palimpsest dataset regenerate manifest.json --store runs/again` · "
    "`palimpsest dataset regenerate manifest.json --store runs/again --data folder:cifar10`",
)
def dataset_regenerate(
    manifest: Annotated[Path, typer.Argument(help="What `palimpsest dataset manifest` wrote.")],
    *,
    store: Annotated[Path, typer.Option("--store", help="A new job's folder.")],
    data: Annotated[
        str | None, typer.Option("--data", help="The same images, if they are elsewhere now.")
    ] = None,
    pairs_at: Annotated[
        str | None, typer.Option("--pairs-at", help="Folder or s3://bucket/prefix for the pairs.")
    ] = None,
    device: DeviceOption = "auto",
    n_workers: WorkersOption = 0,
    cluster: ClusterOption = "local",
) -> None:
    """Make a dataset again and compare; exit code 1, and in what they differ, if they do."""
    from flows.regenerate import foreseen, read_manifest, recipe_in, regenerate
    from tasks.cluster.workers import Workers

    on_this_machine(
        store, "--store", "give a path of this machine, and use --pairs-at for the pairs"
    )
    expected = read_manifest(manifest)
    for sentence in foreseen(expected):
        say(err, sentence)
    made_of = expected["manifest"]["source"]["split"]
    show_images(out, made_of, recipe_in(expected, data).images(made_of).facts)
    workers = Workers(cluster=cluster, n_workers=n_workers, device=device)
    facts = regenerate(manifest, store, data, pairs_at, workers=workers)
    differences = facts.pop("differences")
    if facts.pop("equal"):
        show_facts(out, f"{store} is the dataset of {manifest}", facts)
        return
    show_facts(out, f"{store} is not the dataset of {manifest}", facts)
    for sentence in differences:
        say(err, sentence)
    raise typer.Exit(FAILED)
