"""Settings, plan and costs of a study: a grid over an experiment, all cells in one store, run like
a campaign.

Cells differ only in what the grid varies: the s-th victims of all cells have the same images (a
smaller training set is the first part of the larger one) and the same random numbers, and so have
the a-th attacks on them. So cells are compared image by image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.experiments import KKT, Experiment, bytes_per_run
from recon_core.sampling import History, Phase, Sampling, check_balance, plan_hash
from recon_core.strict import Count, Natural, Strict
from recon_core.types import RunSpec
from storage.pairs.layout import Encoding
from storage.sources.load import ImageSet, Split
from tasks.campaign.plan import Plan, PlannedPart, sha256_of, without_attack
from tasks.evaluation.settings import Evaluation
from tasks.study.products import Cost, in_full, seconds_of

Value = int | float | str
Shape = tuple[int, int, int]
IMAGES_OF_STUDY = 2
"""Separates the random numbers that choose a study's images from a campaign's."""
BYTES_PER_VALUE = {"float16": 2, "float32": 4, "uint8": 1}


@dataclass(frozen=True, kw_only=True)
class Axis(Strict):
    """Axis of a grid: what varies (`title`), and its values in order."""

    title: str
    values: tuple[Value, ...]
    scale: Literal["linear", "log", "category"] = "category"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "category" and any(isinstance(value, str) for value in self.values):
            raise ValueError(f"scale={self.scale!r} of values {self.values}; words need 'category'")


@dataclass(frozen=True, kw_only=True)
class Cell(Strict):
    """One point of the grid: its position (`at`), the images of a victim, and the experiment.

    Cells of one `panel` are shown together. `name` is short: "10 classes, 5 each".
    """

    name: str
    panel: str
    at: dict[str, Value]
    images_per_run: int
    experiment: Experiment

    def __post_init__(self) -> None:
        super().__post_init__()
        check_balance(self.images_per_run, self.experiment.n_labels)


@dataclass(frozen=True, kw_only=True)
class Study(Strict):
    """Settings of a study.

    Each cell has `n_victims`, its seeds, and `n_attacks` on each victim, of which `runs_per_part`
    form a part. `n_tests`: images on which victims are tested, and which none has seen. `only`: the
    common part of the cells' names, if they are not the whole grid. `train_first`: train all
    victims before the first attack, so that a cell's seconds are those of its attacks.
    """

    name: str
    preset: str
    data: str
    cells: tuple[Cell, ...]
    only: str = ""
    axes: dict[str, Axis] = field(default_factory=dict)
    split: Split = "heldout"
    skip_corrupt: bool = False
    channels: Literal[1, 3] = 3
    seed: Natural = 0
    threads: Count = 1
    encoding: Encoding = "float16"
    n_victims: Count = 3
    n_attacks: Count = 8
    runs_per_part: Count = 8
    n_tests: Natural = 1000
    train_first: bool = False
    evaluation: Evaluation = field(default_factory=lambda: Evaluation(baselines=()))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cells:
            raise ValueError("cells=() is no study; give at least one cell")
        if self.n_attacks % self.runs_per_part:
            raise ValueError(
                f"runs_per_part={self.runs_per_part} does not divide n_attacks={self.n_attacks}; a "
                "part holds attacks on one victim only: use a divisor, such as n_attacks itself"
            )
        names = [cell.name for cell in self.cells]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two cells are named {twice!r}; every cell needs a name of its own")
        for cell in self.cells:
            cell.experiment.check_sweep(max(2, self.n_attacks))

    @property
    def n_runs(self) -> int:
        return len(self.cells) * self.n_victims * self.n_attacks

    @property
    def sampling(self) -> Sampling:
        """Groups of runs as parts; the study itself chooses their images."""
        return Sampling(
            images_per_run=max(cell.images_per_run for cell in self.cells),
            phases=(Phase(n_runs=self.n_runs),),
            runs_per_part=self.runs_per_part,
            attacks_per_victim=self.n_attacks,
        )

    def cell_of(self, victim: int) -> int:
        """The number of the cell that a victim belongs to."""
        return victim // self.n_victims

    def manifest(self, images: ImageSet) -> dict[str, Any]:
        """Settings that determine the store: all but names and the evaluation."""
        cells = [
            {"experiment": asdict(cell.experiment), "images_per_run": cell.images_per_run}
            for cell in self.cells
        ]
        settings = {
            "study": self.name,
            "cells": cells,
            "n_victims": self.n_victims,
            "sampling": asdict(self.sampling),
            "root_seed": self.seed,
            "threads": self.threads,
            "encoding": self.encoding,
        }
        source = {"split": images.split, "hash": images.content_hash, "n": len(images)}
        return {"campaign": settings, "source": source}

    def fingerprint(self, images: ImageSet) -> str:
        """sha256 of the manifest."""
        return sha256_of(self.manifest(images))

    def victims_fingerprint(self, images: ImageSet) -> str:
        """sha256 of all that the v-th victim depends on; the attack is not part of it."""
        manifest = self.manifest(images)
        campaign = manifest["campaign"]
        for cell in campaign["cells"]:
            without_attack(cell["experiment"])
        kept = {name: campaign[name] for name in ("cells", "n_victims", "root_seed", "threads")}
        return sha256_of({**kept, "source": manifest["source"]})


class StudyPlan(Plan):
    """The parts of a study on a set of images.

    Raises ValueError, naming the cell, if the images cannot fill its victims.
    """

    def __init__(self, study: Study, images: ImageSet) -> None:
        self.campaign = self.study = study
        self.images = images
        self.labels = np.full(len(images), -1, np.int64)
        for cell in study.cells:
            try:
                labels = self.labels_of(cell)
                self._image_ids(cell, 0)
            except ValueError as error:
                raise ValueError(f"cell {cell.name!r}: {error}") from error
            self.labels = np.maximum(self.labels, np.minimum(labels, 0))

    def part(self, part: int, history: History | None = None) -> PlannedPart:
        """Plan one part; it does not depend on the `history`."""
        del history
        first = part * self.study.runs_per_part
        specs = tuple(self.spec(run) for run in range(first, first + self.study.runs_per_part))
        return PlannedPart(
            part=part,
            specs=specs,
            plan_hash=plan_hash(specs),
            experiment=self.cell(specs[0].victim).experiment,
        )

    def cell(self, victim: int) -> Cell:
        """The cell that a victim belongs to."""
        return self.study.cells[self.study.cell_of(victim)]

    def spec(self, run: int) -> RunSpec:
        """Describe one attack on one victim."""
        victim, attack = divmod(run, self.study.n_attacks)
        cell, seed = self.cell(victim), victim % self.study.n_victims
        ids = self._image_ids(cell, seed)
        return RunSpec(
            run=run,
            victim=victim,
            root_seed=self.study.seed,
            image_ids=tuple(ids.flatten().tolist()),
            labels=tuple(np.repeat(np.arange(len(ids)), ids.shape[1]).tolist()),
            stream=seed * self.study.n_attacks + attack,
            victim_stream=seed,
        )

    def labels_of(self, cell: Cell) -> npt.NDArray[np.int64]:
        """Labels of the source's images for the cell's victims, -1 where they have none."""
        source = self.images
        return cell.experiment.labels_of(source.labels, source.class_names)[0]

    def _image_ids(self, cell: Cell, seed: int) -> npt.NDArray[np.int64]:
        """(labels, images of each): the first of each label in the seed's order."""
        labels, n_labels = self.labels_of(cell), cell.experiment.n_labels or 1
        n_each = cell.images_per_run // n_labels
        is_binary = isinstance(cell.experiment, KKT) and cell.experiment.n_outputs == 1
        chosen = []
        for label in range(n_labels):
            members = np.flatnonzero(labels == label)
            if len(members) < n_each:
                raise ValueError(
                    f"images_per_run={cell.images_per_run} needs {n_each} images of each of the "
                    f"{n_labels} labels, but label {label} has {len(members)} in "
                    f"{self.images.name!r} ({self.images.split}); use a larger source"
                )
            entropy = (self.study.seed, IMAGES_OF_STUDY, seed, int(is_binary), label)
            order = np.random.default_rng(np.random.SeedSequence(entropy)).permutation(members)
            chosen.append(order[:n_each])
        return np.stack(chosen)


def costs_of(plan: StudyPlan, device: str) -> list[Cost]:
    """Estimate all cells from short trainings and attacks, one of each kind. An attack of a kind
    other than KKT's is run whole, on the fewest images, and scaled by their number for other
    cells."""
    before = torch.get_num_threads()
    torch.set_num_threads(plan.study.threads)
    try:
        cells, known = plan.study.cells, dict[str, tuple[float, float]]()
        order = sorted(range(len(cells)), key=lambda number: cells[number].images_per_run)
        costs = {number: _cost(plan, number, device, known) for number in order}
        return [costs[number] for number in range(len(cells))]
    finally:
        torch.set_num_threads(before)


def _cost(plan: StudyPlan, number: int, device: str, known: dict[str, tuple[float, float]]) -> Cost:
    """The estimate of a cell. `known`: seconds of trainings and attacks like those of other cells,
    and the numbers that an attack saves; of whole attacks for each image."""
    study, cell, where = plan.study, plan.study.cells[number], torch.device(device)
    experiment, n_attacks = cell.experiment, study.n_victims * study.n_attacks
    spec = plan.spec(number * n_attacks)
    images = torch.from_numpy(plan.images.images[list(spec.image_ids)])
    kept, saved, kkt = _Kept(), 0, experiment if isinstance(experiment, KKT) else None
    search = kkt.attack if kkt and isinstance(kkt.attack, KKTAttack) else None

    def train(n: int) -> None:
        kept.clear()
        few = kkt and replace(kkt, training=replace(kkt.training, epochs=n))
        (few or experiment).train_victim(spec, images, device=where, victims=kept)

    def attack(n: int) -> None:
        nonlocal saved
        short = experiment
        if kkt and search:
            short = replace(kkt, attack=replace(search, save_at=(n,)))
        (result,) = short.run_batch([spec], images[None], device=where, victims=kept)
        saved = result.pairs.reconstruction.numel() // max(1, len(short.saved_iterations))

    trained, kind = f"train {experiment!r}", f"attack {experiment!r}"
    per, n_epochs = 1 if search else len(images), 1
    if kkt is not None:
        n_epochs, training = kkt.training.epochs, replace(kkt.training, weight_decay=0.0)
        trained = repr((len(images), kkt.victim, kkt.n_outputs, training))
        alike = (len(images), kkt.victim, kkt.n_outputs, search)
        kind = repr(alike) if search else type(kkt.attack).__name__
    if trained not in known:
        known[trained] = in_full(train, n_epochs), 0
    if kind not in known:
        if not kept:
            train(1)
        attack_s = (
            in_full(attack, search.n_iterations) if search else seconds_of(partial(attack, 1))
        )
        known[kind] = attack_s / per, saved / per
    attack_s, saved = known[kind][0] * per, round(known[kind][1] * per)
    c, h, w = plan.images.images.shape[1:]
    memory = bytes_per_run(experiment, cell.images_per_run, (c, h, w))
    n_saved = max(1, len(experiment.saved_iterations))
    at_once = study.runs_per_part if device != "cpu" else 1  # a GPU's worker holds a part's runs
    train_s = study.n_victims * known[trained][0]
    return Cost(
        name=cell.name,
        counts={"images": len(images), "victims": study.n_victims, "attacks": n_attacks},
        seconds_of={"training": train_s, "attacks take": n_attacks * attack_s},
        memory_bytes=memory * at_once,
        disk_bytes=n_attacks * n_saved * saved * BYTES_PER_VALUE[study.encoding],
    )


class _Kept(dict[int, Mapping[str, Tensor]]):
    def put(self, victim: int, tensors: Mapping[str, Tensor]) -> None:
        self[victim] = tensors
