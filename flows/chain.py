"""The whole chain from images to a report, and its stations after generation.

Curate the pairs, train restorers on the balanced stream, score every method on victims whose images
no restorer has seen, and write one page. Each is resumable by itself.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from flows.generate import generate, generate_part, images_of
from flows.naming import unknown_name
from flows.recipe import Recipe
from flows.settings import command, portable, resolve, to_json
from recon_core.precision import require_precision
from storage.checkpoints import read_meta
from storage.errors import StorageError
from storage.files import write_file, write_json
from storage.pairs.dataset import Dataset, is_store
from storage.sources.load import Split
from tasks.artifacts import publish_facts, publish_link, publish_picture, publish_table
from tasks.campaign.plan import Plan, made_with
from tasks.cluster.workers import Workers, check_workers
from tasks.dataset.curate import curate_pairs
from tasks.devices import Device, resolve_device
from tasks.evaluation import evaluate as scoring
from tasks.evaluation.settings import check_names
from tasks.evaluation.victims import check_decoys
from tasks.orchestration import flow, task
from tasks.progress import Advance, stage_progress
from tasks.report.image_grids import attacks_sheet, contact_sheet
from tasks.report.page import write_report
from tasks.training.loop import MODEL
from tasks.training.train import train_restorer
from tasks.workspace import Workspace

SPLITS: tuple[Split, ...] = ("train", "heldout")
SHOWN_VERSIONS = ("palimpsest", "torch", "numpy", "zarr", "dask", "prefect", "scikit-image", "piq")

train_one = task(name="train restorer")(train_restorer)
score_methods = task(name="score methods")(scoring.evaluate)


@flow(name="chain", flow_run_name="{store}")
def chain(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    settings: dict[str, Any] | None = None,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Everything, in order; what is finished is not repeated.

    1. Victims trained and attacked, their pairs stored. 2. Pairs balanced over the images.
    3. Restorers trained on them. 4. Other victims, on images no restorer has seen, attacked.
    5. Every method scored, on targets and on decoys. 6. The report.

    Args:
        recipe: A preset's name, such as `demo`, or a whole recipe.
        store: The job's folder.
        settings: Single settings by dotted name, as `--set` takes them.
        workers: Where parts are computed: cluster, number of workers, device.
    """
    recipe = resolve(recipe, settings)
    workers = workers or Workers()
    _cached = [recipe.images(split) for split in SPLITS]  # kept alive: the stages share them
    check_decoys(Plan(recipe.campaign("heldout"), recipe.images("heldout")))
    return {
        "pairs": generate(recipe, store, "train", workers=workers),
        "balance": curate(recipe, store),
        "restorers": train(recipe, store, device=workers.device),
        "heldout": generate(recipe, store, "heldout", workers=workers),
        "evaluation": evaluate(recipe, store, device=workers.device, workers=workers),
        "report": report(recipe, store),
    }


def check_chain(recipe: Recipe, workers: Workers) -> None:
    """Check settings, images, device and cluster before anything is started or deleted.

    Raises what the stages would raise, and writes nothing.
    """
    check_workers(workers)
    here = resolve_device(workers.device)
    images = {split: recipe.images(split) for split in SPLITS}
    for split, found in images.items():
        Plan(recipe.campaign(split), found)
    check_decoys(Plan(recipe.campaign("heldout"), images["heldout"]))
    for campaign in recipe.further_campaigns().values():
        Plan(campaign, images["heldout"])
    for plan in recipe.restorers.values():
        require_precision(plan.training.precision, torch.device(here))
    check_names(recipe.restorers, taken=recipe.evaluation.external)
    scoring.open_elsewhere(recipe.evaluation, images["heldout"], here)


@flow(name="curate", flow_run_name="{store}")
def curate(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Balance the pairs of the train store (image restoration paper, section 3).

    1. Count the confident pairs of every image. 2. Weigh them, so that no image dominates.
    3. Write the curation beside the store. Raises NothingToLearnError if no pair is confident.

    Args:
        recipe: A preset's name, such as `demo`, or a whole recipe.
        store: The job's folder.
        settings: Single settings by dotted name, as `--set` takes them.
    """
    recipe = resolve(recipe, settings)
    workspace = Workspace(store, recipe.pairs_at)
    with stage_progress("Curate", "step"):
        facts = curate_pairs(recipe.curation, workspace)
    write_json(workspace.recipe, to_json(recipe))
    publish_facts("curation", facts, "How the pairs are balanced over the images")
    return facts


@flow(name="train", flow_run_name="{store}")
def train(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    only: str | None = None,
    settings: dict[str, Any] | None = None,
    device: Device = "auto",
) -> dict[str, Any]:
    """Train the recipe's restorers, or the one called `only`; finished ones are not repeated.

    1. Make sure the pairs are curated. 2. Train one restorer after the other, each on the whole
    machine. 3. Say what was learned. Raises ValueError for an unknown restorer.

    Args:
        recipe: A preset's name, such as `demo`, or a whole recipe.
        store: The job's folder.
        only: The one restorer to train, by its name in the recipe.
        settings: Single settings by dotted name, as `--set` takes them.
        device: Where to train: `auto`, `cpu` or `cuda`.
    """
    recipe = resolve(recipe, settings)
    workspace = Workspace(store, recipe.pairs_at)
    if only is not None and only not in recipe.restorers:
        raise ValueError(unknown_name("restorer", only, recipe.restorers))
    curate(recipe, store)
    dataset = Dataset(workspace.pairs("train"))
    images = recipe.images("train").images
    cards = {}
    for name, plan in recipe.restorers.items():
        if only in (None, name):
            with (
                workspace.timed(f"train {name}"),
                stage_progress(f"Train {name}", "step") as advance,
            ):
                cards[name] = train_one(
                    plan.restorer,
                    plan.training,
                    dataset=dataset,
                    curation=recipe.curation,
                    images_for_noise=images,
                    out=workspace.restorer(name),
                    device=resolve_device(device),
                    validation=plan.validation,
                    on_step=partial(_advance, advance),
                )
            publish_facts(f"restorer-{name.replace('_', '-')}", cards[name], f"Restorer {name}")
    write_json(workspace.recipe, to_json(recipe))
    return cards


def _advance(advance: Advance, done: int, n_steps: int, loss: float) -> None:
    advance(done, n_steps, f"loss {loss:.4g}")


@flow(name="evaluate", flow_run_name="{store}")
def evaluate(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    settings: dict[str, Any] | None = None,
    device: Device = "auto",
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Score every method on targets and on decoys (image restoration paper, section 5).

    1. Train and attack the held-out victims that are missing, on the workers, and make the further
    attacks on them. 2. Find the trained restorers. 3. Score, on `device`. 4. Say it. Raises as
    `generate` and `tasks.evaluation.evaluate`; StorageError if parts are quarantined.

    Args:
        recipe: A preset's name, such as `demo`, or a whole recipe.
        store: The job's folder.
        settings: Single settings by dotted name, as `--set` takes them.
        device: Where restorers run: `auto`, `cpu` or `cuda`.
        workers: Where missing victims are attacked; by default here, on `device`.
    """
    recipe = resolve(recipe, settings)
    workspace = Workspace(store, recipe.pairs_at)
    heldout = images_of(recipe, "heldout", store)
    scoring.open_elsewhere(recipe.evaluation, heldout, "cpu")  # refused before anything is attacked
    workers = workers or Workers(device=device)
    dataset = _attacked(recipe, store, workers)
    kinds: list[str] = [attack.kind for attack in recipe.further_attacks]
    further = {kind: _attacked(recipe, store, workers, kind) for kind in kinds}
    cards = {name: workspace.restorer(name) / "model.json" for name in recipe.restorers}
    leaves_out = recipe.near_duplicates is not None
    with workspace.timed("evaluate"), stage_progress("Evaluate", "step") as advance:
        record = score_methods(
            recipe.evaluation,
            dataset=dataset,
            further=further,
            heldout=heldout,
            restorers={name: card for name, card in cards.items() if card.is_file()},
            out=workspace.evaluation,
            device=resolve_device(device),
            excluded=scoring.read_excluded(workspace.evaluation) if leaves_out else None,
            on_progress=lambda done, total, message, share: advance(
                done / 100, total / 100, message, share=share
            ),
        )
    write_json(workspace.recipe, to_json(recipe))
    sheet = contact_sheet(workspace.evaluation)
    write_file(workspace.evaluation / "contact-sheet.png", sheet)
    publish_picture("best-images", sheet, "Best-scored images: originals over every method's")
    if (compared := attacks_sheet(workspace.evaluation)) is not None:
        write_file(workspace.evaluation / "attacks.png", compared)
        about = "One victim's images, and what each attack reconstructed of them"
        publish_picture("attacks", compared, about)
    publish_table("scores", summary_rows(record), "Every method on targets and on decoys")
    return record


def _attacked(recipe: Recipe, store: Path, workers: Workers, further: str | None = None) -> Dataset:
    """The store of the held-out victims with all its runs, or that of a further attack on them."""
    place = Workspace(store, recipe.pairs_at).pairs("heldout", further)
    if not is_store(place) or Dataset(place).n_runs < recipe.heldout.n_runs:
        generate_part(recipe, store, "heldout", workers, further=further)
    dataset = Dataset(place)
    if dataset.n_runs < recipe.heldout.n_runs:
        where = f"--split heldout --store {store}" if further is None else f"--store {place}"
        raise StorageError(
            f"{dataset.root} has {dataset.n_runs} of {recipe.heldout.n_runs} runs, the others are "
            f"quarantined; see: palimpsest campaign status {where}"
        )
    return dataset


def summary_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per method: good counts and means, targets and decoys side by side, and with a span
    the share of the headroom that is closed."""
    rows = []
    for name, method in record["methods"].items():
        row: dict[str, Any] = {"method": name}
        for side, suffix in (("targets", ""), ("decoys", " decoys")):
            summary = method[side]["summary"]
            row[f"good{suffix}"] = f"{summary['n_good']}/{summary['n']}"
            row[f"identified{suffix}"] = f"{summary['n_identified']}/{summary['n']}"
            for column, mean in (("SSIM", "mean_ssim"), ("HaarPSI", "mean_haarpsi")):
                value = summary[mean]  # None where there was nothing to average
                row[column + suffix] = None if value is None else round(value, 3)
        closed = record.get("span", {}).get("headroom_closed", {}).get(name)
        if closed is not None:
            row["headroom"] = round(closed, 3)
        rows.append(row)
    return rows


@flow(name="report", flow_run_name="{store}")
def report(
    recipe: Recipe | str = "demo",
    store: Path = Path("palimpsest-runs/demo"),
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write the report of a finished evaluation; needs nothing but the workspace.

    1. Gather what was run, with which settings and for how long. 2. Write the page. 3. Leave on the
    flow's page where it is, and the best pictures. Raises StorageError if there is no evaluation
    yet.
    """
    recipe = resolve(recipe, settings)
    workspace = Workspace(store, recipe.pairs_at)
    folder, train_store = workspace.evaluation, workspace.pairs("train")
    if not (folder / "evaluation.json").is_file():
        raise StorageError(
            f"{folder} has no evaluation.json; run: palimpsest evaluate --store {store}"
        )
    pairs: dict[str, Any] = {}
    if is_store(train_store):
        dataset = Dataset(train_store)
        names = ("n_runs", "n_pairs", "n_targets", "content_hash")
        pairs = {name: getattr(dataset, name) for name in names}
    cards = {name: read_meta(workspace.restorer(name), MODEL) for name in recipe.restorers}
    context: dict[str, Any] = {
        "recipe": portable(to_json(recipe)),
        "seeds": {
            "victims of the restorers": recipe.campaign("train").root_seed,
            "held-out victims": recipe.campaign("heldout").root_seed,
            "curation": recipe.curation.seed,
            "decoys": recipe.evaluation.decoy_seed,
        },
        "stages": [{"name": k, "seconds": v} for k, v in workspace.timings.items()],
        "pairs": pairs,
        "restorers": {name: card for name, card in cards.items() if card is not None},
        "command": portable(command(recipe, workspace.root)),
        **made_with(SHOWN_VERSIONS),
    }
    with stage_progress("Report", "step"):
        page = write_report(folder, context)
    publish_link("report", page, "The report, one self-contained HTML file")
    publish_picture("report-best-images", contact_sheet(folder), "Best images of every method")
    return page
