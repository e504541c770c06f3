"""A study: attack every victim of a grid, score them, and say what comes out cell by cell."""

from __future__ import annotations

import io
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flows.evaluate import score_methods
from flows.generate import make_pairs
from flows.settings import values_of
from flows.studies import OF_EVERY_CELL, SETTINGS, STUDIES, resolve, study_command, to_json
from flows.studies import study as preset_study
from storage.errors import StorageError
from storage.files import write_file, write_json
from storage.pairs.dataset import Dataset
from storage.sources.load import load_images
from tasks.artifacts import leave_link, leave_table
from tasks.campaign.generate import VICTIMS
from tasks.campaign.plan import open_store, sha256_of
from tasks.campaign.state import resume_if_stopped
from tasks.campaign.victim_files import VictimsOfStore
from tasks.campaign.watch import log_notice
from tasks.cluster.workers import Workers, dask_client, device_of, resolve_device, usable_cores
from tasks.evaluation.pictures import KeptPictures
from tasks.evaluation.victims import find_victims
from tasks.families.weights.study.claims import check_claims
from tasks.families.weights.study.figure_specs import describe_figures, kernels_of
from tasks.families.weights.study.page import STUDY_PAGE
from tasks.orchestration import flow, task
from tasks.progress import stage_progress
from tasks.study.record import (
    METHOD,
    SCHEMA,
    VERSION,
    Examined,
    created_now,
    describe_study,
    examine,
    unseen_images,
)
from tasks.study.settings import Study, StudyPlan
from tasks.study.victims import train_victims
from tasks.workspace import Workspace

RECORD = "study.json"
PICTURES = "study-pictures.npz"


@flow(name="study", flow_run_name="{store}")
def run_study(
    name: str,
    store: Path,
    preset: str | None = None,
    settings: dict[str, Any] | None = None,
    *,
    only: str = "",
    workers: Workers | None = None,
) -> Path:
    """Bring the study at `store` to its end; what is there is not repeated. Returns its page.

    `preset`, `settings` and `only` as in `flows.studies.resolve`; by default those of the store.
    1. Read the images. 2. Plan. 3. Open the store, or refuse one of other settings. 4. Train and
    attack what is missing, on the workers; with `train_first` one after the other. 5. Score with
    decoys. 6. Ask the victims. 7. Check the paper's claims. 8. Write study.json, its pictures and
    the page.
    """
    study = resolve(name, preset, settings, store, only=only)
    workers = workers or Workers()
    workspace, device = Workspace(store), device_of(workers)
    plan = plan_of(study)
    images = plan.images
    dataset = open_store(workspace.pairs("heldout"), study, images)
    write_json(store / SETTINGS, to_json(study))
    if notice := resume_if_stopped(dataset.place):
        log_notice(notice)
    if len(dataset.receipts) < plan.sampling.n_parts:
        if study.train_first:
            with workspace.timed("train"):
                train_first(plan, dataset, workers, device)
        with workspace.timed("attack"):
            dataset = make_pairs(plan, dataset, workers, device, f"Study {study.name}")
    if len(dataset.receipts) < plan.sampling.n_parts:
        raise StorageError(
            f"{dataset.root} has {len(dataset.receipts)} of {plan.sampling.n_parts} parts, the "
            f"others are quarantined; see {dataset.root}/quarantine, and run the same command again"
        )
    where = resolve_device(workers.device)
    with workspace.timed("score"):
        scored = score_methods(
            study.evaluation,
            dataset=dataset,
            heldout=images,
            restorers={},
            out=workspace.evaluation,
            device=where,
        )
        examined = ask_victims(plan, dataset, device=where)
    record = make_record(plan, scored, examined, dataset, workspace.timings)
    write_pictures(store, record, scored, plan, dataset, examined=examined)
    write_json(store / RECORD, record)
    page = STUDY_PAGE.write(store)
    leave_table("cells", cell_rows(record), f"Study {study.name}: what came back, cell by cell")
    leave_table("claims", claim_rows(record), f"Study {study.name}: the paper's claims")
    leave_link("study", page, f"The page of study {study.name}")
    return page


def plan_of(study: Study) -> StudyPlan:
    """The study's images, and which run trains on which; raises what either refuses."""
    images = load_images(
        study.data, split=study.split, skip_corrupt=study.skip_corrupt, channels=study.channels
    )
    return StudyPlan(study, images)


@task(name="train victims")
def train_first(plan: StudyPlan, dataset: Dataset, workers: Workers, device: str) -> None:
    """Every victim that is still to be attacked, on Dask workers that live as long as this task."""
    with (
        stage_progress("Train the victims", "victim") as advance,
        dask_client(workers, threads=plan.study.threads) as client,
    ):
        train_victims(plan, dataset, client, device=device, on_progress=advance)


@task(name="ask victims")
def ask_victims(plan: StudyPlan, dataset: Dataset, *, device: str) -> dict[int, Examined]:
    """What only the victims know; those that are not kept are trained again."""
    study, tests = plan.study, unseen_images(plan, dataset)
    n_victims = len(study.cells) * study.n_victims
    receipts = {r.part * study.runs_per_part // study.n_attacks: r for r in dataset.receipts}
    fingerprint = study.victims_fingerprint(plan.images)
    kept = VictimsOfStore(Path(dataset.root) / VICTIMS, fingerprint, receipts)
    found = {}
    with stage_progress("Ask the victims", "victim") as advance:
        for victim in range(n_victims):
            advance(victim, n_victims)
            found[victim] = examine(plan, victim, tests=tests, device=device, victims=kept)
        advance(n_victims, n_victims)
    return found


def make_record(
    plan: StudyPlan,
    scored: Mapping[str, Any],
    examined: Mapping[int, Examined],
    dataset: Dataset,
    timings: Mapping[str, float],
) -> dict[str, Any]:
    """study.json."""
    study = plan.study
    kind = STUDIES.get(study.name)
    stages = ("train", "attack", "score") if study.train_first else ("attack", "score")
    body = describe_study(plan, scored, examined, dataset)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "name": study.name,
        "preset": study.preset,
        "title": study.name if kind is None else kind.title,
        "question": "" if kind is None else kind.question,
        "paper": "" if kind is None else kind.paper,
        "command": command(study),
        "created": created_now(),
        "machine": f"{platform.processor() or platform.machine()}, {usable_cores()} cores",
        "fingerprint": sha256_of([scored["fingerprint"], study.fingerprint(plan.images)]),
        "settings": to_json(study),
        **body,
        "seconds": {name: round(timings.get(name, 0.0), 1) for name in stages},
        "figures": describe_figures(study),
    }
    record["claims"] = check_claims(record)
    return record


def command(made: Study) -> str:
    """The command that makes this study from nothing."""
    return study_command(made, changed_settings(made))


def changed_settings(made: Study) -> dict[str, Any]:
    """Settings that are not those of its preset, one of all cells once; empty for another study."""
    if made.name not in STUDIES:
        return {}
    base = dict(values_of(to_json(preset_study(made.name, made.preset, only=made.only))))
    found = {
        name: value
        for name, value in values_of(to_json(made))
        if name != "data" and base.get(name, ...) != value
    }
    of_cells: dict[str, list[Any]] = {}
    for name, value in found.items():
        start, _number, setting = name.split(".", 2) if name.count(".") > 1 else ("", "", "")
        if start == "cells" and setting.startswith(OF_EVERY_CELL):
            of_cells.setdefault(setting, []).append(value)
    everywhere = {
        setting: values[0]
        for setting, values in of_cells.items()
        if len(values) == len(made.cells) and all(v == values[0] for v in values)
    }
    rest = {n: v for n, v in found.items() if n.split(".", 2)[-1] not in everywhere}
    return rest | everywhere


def write_pictures(
    store: Path,
    record: Mapping[str, Any],
    scored: Mapping[str, Any],
    plan: StudyPlan,
    dataset: Dataset,
    *,
    examined: Mapping[int, Examined],
) -> None:
    """The pairs that are shown of every cell, and the kernels that have a figure."""
    evaluation = Workspace(store).evaluation
    images = plan.images
    victims = find_victims(dataset, images, decoy_seed=plan.study.evaluation.decoy_seed)
    kept = KeptPictures(evaluation / "cache", victims, {METHOD: METHOD})
    runs = scored["methods"][METHOD]["targets"]["run"]
    arrays, wanted = {}, {}
    for cell in record["cells"]:
        key = f"cell_{cell['number']:04d}"
        rows = cell["shown"]
        ids = [record["images"]["image_id"][row] for row in rows]
        arrays[f"{key}/original"] = images.images[np.array(ids, np.int64)]
        wanted[f"{key}/reconstruction"] = (METHOD, "targets", rows, [runs[row] for row in rows])
    arrays |= kept.read(wanted, images.images.shape[1:])
    for number in kernels_of(plan.study):
        found = examined[record["cells"][number]["victims"][0]].kernels
        if found is not None:
            arrays[f"kernels_{number:04d}"] = found
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_file(store / PICTURES, content.getvalue())


def cell_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per cell for a screen or a table."""
    return [
        {
            "cell": cell["name"],
            "images": cell["n_images"],
            "good": f"{cell['targets']['n_good']}/{cell['targets']['n']}",
            "decoys": f"{cell['decoys']['n_good']}/{cell['decoys']['n']}",
            "SSIM": round(cell["targets"]["mean_ssim"], 3),
            "SSIM decoys": round(cell["decoys"]["mean_ssim"], 3),
        }
        for cell in record["cells"]
    ]


def claim_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per claim."""
    return [
        {"claim": c["claim"], "here": c["outcome"], "ours": c["ours"]} for c in record["claims"]
    ]
