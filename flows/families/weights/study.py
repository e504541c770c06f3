"""The studies of the KKT paper and of the span attack: attack all victims of a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flows.chain import score_methods
from flows.families.weights import grids, span_grid
from flows.generate import make_pairs
from flows.settings import adapter, replace_settings, validated
from flows.study_kind import Claims, StudyKind
from storage.errors import StorageError
from storage.files import write_file, write_json
from storage.pairs.dataset import Dataset
from storage.sources.load import load_images
from tasks.campaign.plan import VICTIMS, VictimsOfStore, open_store
from tasks.campaign.state import log_notice, resume_if_stopped
from tasks.cluster.workers import Workers, dask_client, device_of
from tasks.devices import resolve_device
from tasks.evaluation.pictures import KeptPictures
from tasks.evaluation.victims import find_victims
from tasks.families.weights.study import record as records
from tasks.families.weights.study.claims import check_claims
from tasks.families.weights.study.figure_specs import describe_figures, kernels_of
from tasks.families.weights.study.page import STUDY_PAGE
from tasks.families.weights.study.settings import Cell, Study, StudyPlan, costs_of
from tasks.orchestration import task
from tasks.page.study_page import StudyPage
from tasks.progress import stage_progress
from tasks.study.executor import Unit, run_units
from tasks.study.products import SETTINGS, Cost, npz_of
from tasks.workspace import Workspace

OF_EVERY_CELL = "experiment."
"""Settings that begin with this are set in the experiment of every cell."""


@dataclass(frozen=True)
class Scored:
    """A study's store, and what its pictures score and its victims know."""

    dataset: Dataset
    scored: Mapping[str, Any]
    examined: Mapping[int, records.Examined]
    seconds: Mapping[str, float]
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GridStudy(StudyKind[Study, StudyPlan]):
    """A grid of experiments, by size."""

    costs: Callable[[StudyPlan, str], list[Cost]] = costs_of
    figures: Callable[[StudyPlan, Mapping[str, Any]], Sequence[Any]] = field(
        default=lambda plan, _record: describe_figures(plan.study)
    )
    claims: Claims = check_claims
    page: StudyPage = STUDY_PAGE
    settings = Study
    parts, unit = "cells", "cell"
    products = frozenset({"timings.json", "heldout", "evaluation"})
    flow = "study"

    def size(self, study: Study) -> str:
        n = len(study.cells)
        return f"{n} cell{'s' * (n != 1)}, {study.n_runs:,} attacks"

    def replace(self, tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
        """A name that begins with `experiment.` is set in every cell."""
        of_cells = {name: v for name, v in settings.items() if name.startswith(OF_EVERY_CELL)}
        cells = adapter(Cell)

        def completed(cell: Mapping[str, Any]) -> dict[str, Any]:
            return dict(cells.dump_python(validated(Cell, cell), mode="json"))

        tree["cells"] = [replace_settings(cell, of_cells, completed) for cell in tree["cells"]]
        super().replace(tree, {name: v for name, v in settings.items() if name not in of_cells})

    def differences(self, base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        """One of all cells stands once."""
        found = super().differences(base, tree)
        of_cells: dict[str, list[Any]] = {}
        for name, value in found.items():
            start, _number, setting = name.split(".", 2) if name.count(".") > 1 else ("", "", "")
            if start == "cells" and setting.startswith(OF_EVERY_CELL):
                of_cells.setdefault(setting, []).append(value)
        everywhere = {
            setting: values[0]
            for setting, values in of_cells.items()
            if len(values) == len(tree["cells"]) and all(v == values[0] for v in values)
        }
        rest = {n: v for n, v in found.items() if n.split(".", 2)[-1] not in everywhere}
        return rest | everywhere | {"data": tree["data"]}

    def plan(self, study: Study, _store: Path, _device: str) -> StudyPlan:
        images = load_images(
            study.data, split=study.split, skip_corrupt=study.skip_corrupt, channels=study.channels
        )
        return StudyPlan(study, images)

    def facts(self, plan: StudyPlan) -> list[tuple[str, Mapping[str, str]]]:
        return [(plan.study.split, plan.images.facts)]

    def make(self, plan: StudyPlan, store: Path, workers: Workers) -> Scored:
        """Raises StorageError where parts are quarantined."""
        workspace, device, study = Workspace(store), device_of(workers), plan.study
        dataset = open_store(workspace.pairs("heldout"), study, plan.images)
        write_json(store / SETTINGS, self.to_json(study))
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
                f"others are quarantined; see {dataset.root}/quarantine, and run the same command "
                "again"
            )
        where = resolve_device(workers.device)
        with workspace.timed("score"):
            scored = score_methods(
                study.evaluation,
                dataset=dataset,
                heldout=plan.images,
                restorers={},
                out=workspace.evaluation,
                device=where,
            )
            examined = ask_victims(plan, dataset, device=where)
        return Scored(dataset, scored, examined, workspace.timings)

    def describe(self, plan: StudyPlan, ended: Scored) -> tuple[list[Any], dict[str, Any]]:
        body = records.describe_study(plan, ended.scored, ended.examined, ended.dataset)
        stages = ("train", "attack", "score") if plan.study.train_first else ("attack", "score")
        body["seconds"] = {name: round(ended.seconds.get(name, 0.0), 1) for name in stages}
        return [ended.scored["fingerprint"], plan.study.fingerprint(plan.images)], body

    def keep_pictures(
        self, store: Path, plan: StudyPlan, ended: Scored, record: Mapping[str, Any]
    ) -> None:
        """The pairs that are shown of every cell, and the kernels that have a figure."""
        evaluation = Workspace(store).evaluation
        images = plan.images
        victims = find_victims(ended.dataset, images, decoy_seed=plan.study.evaluation.decoy_seed)
        kept = KeptPictures(evaluation / "cache", victims, {records.METHOD: records.METHOD})
        runs = ended.scored["methods"][records.METHOD]["targets"]["run"]
        arrays, wanted = {}, {}
        for cell in record["cells"]:
            key = f"cell_{cell['number']:04d}"
            rows = cell["shown"]
            ids = [record["images"]["image_id"][row] for row in rows]
            arrays[f"{key}/original"] = images.images[np.array(ids, np.int64)]
            wanted[f"{key}/reconstruction"] = (
                records.METHOD,
                "targets",
                rows,
                [runs[row] for row in rows],
            )
        arrays |= kept.read(wanted, images.images.shape[1:])
        for number in kernels_of(plan.study):
            found = ended.examined[record["cells"][number]["victims"][0]].kernels
            if found is not None:
                arrays[f"kernels_{number:04d}"] = found
        write_file(store / self.pictures, npz_of(arrays))

    def rows(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
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


@task(name="train victims")
def train_first(plan: StudyPlan, dataset: Dataset, workers: Workers, device: str) -> None:
    """Every victim that is still to be attacked, on Dask workers that live as long as this task. A
    part trains again one that failed here."""
    jobs, threads = records.jobs_of(plan, dataset, device), plan.study.threads
    units = [Unit(f"victim {job.numbers[0]}", records.train_victim, job) for job in jobs]
    with (
        stage_progress("Train the victims", "victim") as advance,
        dask_client(workers, threads=threads) as client,
    ):
        run_units(
            [units], client, place=dataset.place, device=device, threads=threads,
            on_progress=advance,
        )  # fmt: skip


@task(name="ask victims")
def ask_victims(plan: StudyPlan, dataset: Dataset, *, device: str) -> dict[int, records.Examined]:
    """Asks the victims; those that are not kept are trained again."""
    study, tests = plan.study, records.unseen_images(plan, dataset)
    n_victims = len(study.cells) * study.n_victims
    receipts = {r.part * study.runs_per_part // study.n_attacks: r for r in dataset.receipts}
    fingerprint = study.victims_fingerprint(plan.images)
    kept = VictimsOfStore(Path(dataset.root) / VICTIMS, fingerprint, receipts)
    found = {}
    with stage_progress("Ask the victims", "victim") as advance:
        for victim in range(n_victims):
            advance(victim, n_victims)
            found[victim] = records.examine(plan, victim, tests=tests, device=device, victims=kept)
        advance(n_victims, n_victims)
    return found


GRIDS = tuple(
    GridStudy(
        name=name,
        title=title,
        question=question,
        paper=paper,
        presets={size: partial(grid, grids.SIZES[size]) for size in grids.SIZES},
    )
    for name, grid, title, question, paper in (
        ("multiclass", grids.multiclass, "More classes, more reconstructions",
         "Does a classifier of more classes give back more of its training images?",
         "KKT paper, section 4.2 and appendix C"),
        ("losses", grids.losses, "Losses other than cross-entropy",
         "Do networks trained by regression with weight decay give back their images, "
         "and which of them?",
         "KKT paper, section 5.2 and appendix D"),
        ("weight-decay", grids.weight_decay, "The role of weight decay",
         "Does weight decay make a network with a standard start vulnerable, and for which values?",
         "KKT paper, section 6.1 and appendix E"),
        ("cnn", grids.cnn, "Convolutional networks",
         "Do networks that begin with a convolution give back their images, and with "
         "which kernels?",
         "KKT paper, section 6.1 and appendix F"),
        ("width", grids.width, "Width against number of images",
         "How many images come back by the width of the network and the number of images?",
         "KKT paper, section 6.2"),
        ("large", grids.large, "Many images",
         "Does a wide network give back some of very many images that it learned in minibatches?",
         "KKT paper, appendix G"),
        ("span-networks", span_grid.span, "Where the span attack works",
         "From which networks does the span attack give back more than half of the "
         "images, where does it break, and what of the KKT paper stands when the start "
         "is known?",
         "ours, beside the KKT paper"),
    )
)  # fmt: skip
GRID_NAMES = tuple(kind.name for kind in GRIDS)
