"""Evaluate: score the attack and every restorer on victims whose images no restorer has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.generate import generate_part, images_of
from flows.recipe import Recipe
from flows.settings import resolve, to_json
from storage.errors import StorageError
from storage.files import write_file, write_json
from storage.pairs.dataset import Dataset, is_store
from tasks.artifacts import publish_picture, publish_table
from tasks.cluster.workers import Workers
from tasks.devices import Device, resolve_device
from tasks.evaluation.evaluate import evaluate as score
from tasks.evaluation.evaluate import open_elsewhere, read_excluded
from tasks.orchestration import flow, task
from tasks.progress import stage_progress
from tasks.report.image_grids import attacks_sheet, contact_sheet
from tasks.workspace import Workspace

score_methods = task(name="score methods")(score)


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
    open_elsewhere(recipe.evaluation, heldout, "cpu")  # refused before anything is attacked
    workers = workers or Workers(device=device)
    dataset = _attacked(recipe, store, workers)
    further: dict[str, Dataset] = {
        attack.kind: _attacked(recipe, store, workers, attack.kind)
        for attack in recipe.further_attacks
    }
    restorers = {
        name: workspace.restorer(name) / "model.json"
        for name in recipe.restorers
        if (workspace.restorer(name) / "model.json").is_file()
    }
    leaves_out = recipe.near_duplicates is not None
    with workspace.timed("evaluate"), stage_progress("Evaluate", "step") as advance:
        record = score_methods(
            recipe.evaluation,
            dataset=dataset,
            further=further,
            heldout=heldout,
            restorers=restorers,
            out=workspace.evaluation,
            device=resolve_device(device),
            excluded=read_excluded(workspace.evaluation) if leaves_out else None,
            on_progress=lambda done, total, message, share: advance(
                done / 100, total / 100, message, share=share
            ),
        )
    write_json(workspace.recipe, to_json(recipe))
    sheet = contact_sheet(workspace.evaluation)
    write_file(workspace.evaluation / "contact-sheet.png", sheet)
    publish_picture("best-images", sheet, "Best-scored images: originals over every method's")
    compared = attacks_sheet(workspace.evaluation)
    if compared is not None:
        write_file(workspace.evaluation / "attacks.png", compared)
        publish_picture(
            "attacks", compared, "One victim's images, and what each attack gave of them"
        )
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
            row[f"SSIM{suffix}"] = rounded(summary["mean_ssim"])
            row[f"HaarPSI{suffix}"] = rounded(summary["mean_haarpsi"])
        closed = record.get("span", {}).get("headroom_closed", {}).get(name)
        if closed is not None:
            row["headroom"] = rounded(closed)
        rows.append(row)
    return rows


def rounded(value: float | None) -> float | None:
    """Three decimals; None where there was nothing to average."""
    return None if value is None else round(value, 3)
