"""A study: a grid over an experiment, all of its cells in one store, run like a campaign; its plan,
and what it costs.

Cells differ in nothing but what the grid varies: the s-th victims of all cells have the same images
(of a smaller training set, the first of the larger one's), start from the same random numbers, and
so do the a-th attacks on them. So cells are compared image by image.

Costs are estimated before anything is run. Operations are counted: a forward and backward pass of n
images through P weights is 6 n P of them (without the gradient in the images; in the span of the
images the first layer takes 2 n^2 h), an iteration of a search with m candidates 6 m P + 2 m^2 (d +
2 sum h), the Gram form of `recon_core.attacks.kkt.stationarity`, one of a separation of k
directions with T features each 6 k^2 T: the sources anew and their products with the score, some
steps being tried twice. How fast this machine does them, and what an epoch or iteration costs apart
from that, is measured on two small victims: within a factor of two on the machines it was tried on
(docs/studies.md). For another family a whole run is timed: one victim of each cell, one attack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.attacks.kkt.attacks import separation_operations
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.kkt.settings import most_directions
from recon_core.experiments import KKT, Experiment, bytes_per_run
from recon_core.sampling import Phase, Sampling, check_balance, plan_hash
from recon_core.strict import Count, Natural, Strict
from recon_core.types import RunSpec, seeded_generator
from recon_core.victims.backprop import uses_span
from recon_core.victims.network import Architecture, Network
from recon_core.victims.training import Training
from storage.pairs.layout import Encoding
from storage.pairs.receipts import Receipt
from storage.sources.load import ImageSet, Split
from tasks.campaign.plan import PlannedPart, sha256_of, without_attack
from tasks.evaluation.settings import Evaluation
from tasks.study.cost import Cost

Value = int | float | str
Shape = tuple[int, int, int]
IMAGES_OF_STUDY = 2
"""Keeps the random numbers that choose a study's images apart from a campaign's."""
BYTES_PER_VALUE = {"float16": 2, "float32": 4, "uint8": 1}
SMALL, LARGE = (2, 16, 12), (50, 200, 32)
"""Images, width and side of the images of the two victims that are measured."""
DIRECTIONS_PER_IMAGE = 1.5
"""Directions of a separation: those that Adadelta leaves of 100 images at width 200, and more."""


@dataclass(frozen=True, kw_only=True)
class Axis(Strict):
    """Axis of a grid: what varies, in words, and its values in order."""

    title: str
    values: tuple[Value, ...]
    scale: Literal["linear", "log", "category"] = "category"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "category" and any(isinstance(value, str) for value in self.values):
            raise ValueError(f"scale={self.scale!r} of values {self.values}; words need 'category'")


@dataclass(frozen=True, kw_only=True)
class Cell(Strict):
    """One point of the grid: where it is, how many images a victim has, and the experiment.

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
    """Every setting of a study.

    `n_victims` per cell, which are its seeds; `n_attacks` on each, of which `runs_per_part` are one
    part. `n_tests`: images that no victim of the study has seen, on which each is tested. What a
    cell shares with the others and where its experiment differs is in `cells`. `only`: what the
    names of its cells have in common, if these are not all of the grid. `train_first`: all victims
    are trained before the first attack, so that a cell's seconds are those of its attacks.
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
        """Groups of runs as parts; which images they have is the study's own business."""
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
        """Settings that the store is made from: all but names, and how it is scored."""
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
        """sha256 of what the v-th victim depends on, which is not how it is attacked."""
        manifest = self.manifest(images)
        campaign = manifest["campaign"]
        for cell in campaign["cells"]:
            without_attack(cell["experiment"])
        kept = {name: campaign[name] for name in ("cells", "n_victims", "root_seed", "threads")}
        return sha256_of({**kept, "source": manifest["source"]})


class StudyPlan:
    """The parts of a study on a set of images.

    Raises ValueError, naming the cell, if the images cannot fill its victims.
    """

    def __init__(self, study: Study, images: ImageSet) -> None:
        self.campaign = self.study = study
        self.images = images
        self.labels: npt.NDArray[np.int64] = np.full(len(images), -1, np.int64)
        for cell in study.cells:
            try:
                labels = self.labels_of(cell)
                self._image_ids(cell, 0)
            except ValueError as error:
                raise ValueError(f"cell {cell.name!r}: {error}") from error
            self.labels = np.maximum(self.labels, np.minimum(labels, 0))

    @cached_property
    def sampling(self) -> Sampling:
        return self.study.sampling

    def part(self, part: int, receipts: Iterable[Receipt]) -> PlannedPart:
        """The plan of one part, which does not depend on `receipts`."""
        del receipts
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
        """One attack on one victim."""
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
        """Labels of the source's images by the cell's victims, -1 where they know none."""
        source = self.images
        return cell.experiment.labels_of(source.labels, source.class_names)[0]

    def _image_ids(self, cell: Cell, seed: int) -> npt.NDArray[np.int64]:
        """(labels, images of each): the first of each label in an order of the seed's."""
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


@dataclass(frozen=True)
class Pace:
    """Speed of a machine: seconds of an epoch or an iteration that computes next to nothing, and
    operations a second that either does on top."""

    epoch_s: float
    training_rate: float
    iteration_s: float
    attack_rate: float


def costs_of(plan: StudyPlan, device: str) -> list[Cost]:
    """The estimates of all cells, measured on this machine."""
    c, h, w = plan.images.images.shape[1:]
    study, stacked = plan.study, device != "cpu"
    pace: Pace | None = None
    costs: list[Cost] = []
    for number, cell in enumerate(study.cells):
        if isinstance(cell.experiment, KKT):
            pace = pace or measured_pace(device)
            costs.append(cost_of(study, cell, (c, h, w), pace, stacked=stacked))
            continue
        spec = plan.spec(number * study.n_victims * study.n_attacks)
        images = torch.from_numpy(plan.images.images[list(spec.image_ids)])
        where, kept = torch.device(device), _Kept()
        start = time.perf_counter()
        cell.experiment.train_victim(spec, images, device=where, victims=kept)
        trained = time.perf_counter()
        (result,) = cell.experiment.run_batch([spec], images[None], device=where, victims=kept)
        seconds = trained - start, time.perf_counter() - trained
        saved = result.pairs.reconstruction.numel()
        costs.append(_cost(study, cell, (c, h, w), (*seconds, saved), stacked=stacked))
    return costs


def cost_of(study: Study, cell: Cell, shape: Shape, pace: Pace, *, stacked: bool) -> Cost:
    """The estimate of a cell of attacks on weights; `stacked`: a worker holds the runs of a part at
    once (on a GPU)."""
    experiment, n = cell.experiment, cell.images_per_run
    assert isinstance(experiment, KKT)
    training = experiment.training
    epoch = pace.epoch_s * math.ceil(n / (training.batch_size or n))
    epoch += training_operations(experiment, n, shape) / pace.training_rate
    attack = experiment.attack
    if isinstance(attack, KKTAttack):
        n_candidates = attack.n_candidates
    else:  # both signs of every source
        n_candidates = 2 * attack.n_sources(_directions(experiment, n))
    saved = len(experiment.saved_iterations) * n_candidates * math.prod(shape)
    train_s, attack_s = training.epochs * epoch, attack_seconds(experiment, n, shape, pace)
    return _cost(study, cell, shape, (train_s, attack_s, saved), stacked=stacked)


def _cost(
    study: Study, cell: Cell, shape: Shape, of_run: tuple[float, float, int], *, stacked: bool
) -> Cost:
    """`of_run`: seconds of a training and of an attack, and the numbers that the attack saves."""
    n, n_attacks = cell.images_per_run, study.n_victims * study.n_attacks
    train_s, attack_s, saved = of_run
    return Cost(
        name=cell.name,
        counts={"images": n, "victims": study.n_victims, "attacks": n_attacks},
        seconds_of={"training": study.n_victims * train_s, "attacks take": n_attacks * attack_s},
        memory_bytes=bytes_per_run(cell.experiment, n, shape)
        * (study.runs_per_part if stacked else 1),
        disk_bytes=n_attacks * saved * BYTES_PER_VALUE[study.encoding],
    )


def training_operations(experiment: KKT, n_images: int, shape: Shape) -> int:
    """Operations of an epoch."""
    architecture = experiment.victim.on(shape, experiment.n_outputs)
    first, *rest = _products(architecture)
    in_span = uses_span(
        experiment.training.span, architecture, experiment.training.optimiser, n_images
    )
    if in_span:
        width = architecture.layer_sizes[0][1]
        return 2 * n_images**2 * width + 6 * n_images * sum(rest)
    return n_images * (4 * first + 6 * sum(rest))


def attack_seconds(experiment: KKT, n_images: int, shape: Shape, pace: Pace) -> float:
    """Seconds of an attack on one victim."""
    attack = experiment.attack
    if isinstance(attack, KKTAttack):
        operations = attack_operations(experiment, shape)
    else:
        operations = separation_operations(attack, _directions(experiment, n_images), shape)
    return attack.n_iterations * (pace.iteration_s + operations / pace.attack_rate)


def _directions(experiment: KKT, n_images: int) -> int:
    """Directions that a separation takes apart."""
    assert not isinstance(experiment.attack, KKTAttack)
    most = most_directions(experiment, experiment.attack)
    return min(most, round(DIRECTIONS_PER_IMAGE * n_images))


def attack_operations(experiment: KKT, shape: Shape) -> int:
    """Operations of an iteration of a search."""
    architecture, attack = experiment.victim.on(shape, experiment.n_outputs), experiment.attack
    assert isinstance(attack, KKTAttack)
    m, widths = attack.n_candidates, architecture.network.widths
    return 6 * m * sum(_products(architecture)) + 2 * m**2 * (architecture.d + 2 * sum(widths))


def _products(architecture: Architecture) -> list[int]:
    sizes = [fan_in * fan_out for fan_in, fan_out in architecture.layer_sizes]
    return [sizes[0] * architecture.n_positions, *sizes[1:]]


def measured_pace(device: str, *, epochs: int = 400, iterations: int = 100) -> Pace:
    """Speed of one worker with one thread of this machine, or of its GPU; takes some seconds."""
    before, tiny, where = torch.get_num_threads(), 1e-9, torch.device(device)
    torch.set_num_threads(1)
    times: list[tuple[float, float]] = []
    try:
        for n, width, side in (SMALL, LARGE):
            long, short = (
                KKT(
                    augment_p=0.0,
                    victim=Network(widths=(width, width)),
                    training=Training(epochs=epochs),
                    attack=KKTAttack(n_candidates=2 * n, save_at=(end,)),
                )
                for end in (iterations, 1)
            )
            pixels = torch.rand(n, 3, side, side, generator=seeded_generator(0, 0, "pace"))
            images = (pixels * 255).to(torch.uint8)
            labels = tuple(k % 2 for k in range(n))
            spec = RunSpec(run=0, root_seed=0, image_ids=tuple(range(n)), labels=labels)
            long.train_victim(spec, images, device=where, victims=_Kept())  # warm
            kept, clock = _Kept(), [time.perf_counter()]
            long.train_victim(spec, images, device=where, victims=kept)
            clock.append(time.perf_counter())
            for experiment in (long, short):
                experiment.run_batch([spec], images[None], device=where, victims=kept)
                clock.append(time.perf_counter())
            trained, attacked, once = np.diff(clock).tolist()
            times.append((trained / epochs, max(tiny, attacked - once) / max(1, iterations - 1)))
    finally:
        torch.set_num_threads(before)
    (epoch_s, iteration_s), (large_epoch, large_iteration) = times
    shape = (3, side, side)  # of the larger one
    return Pace(
        epoch_s=epoch_s,
        training_rate=training_operations(long, n, shape) / max(tiny, large_epoch - epoch_s),
        iteration_s=iteration_s,
        attack_rate=attack_operations(long, shape) / max(tiny, large_iteration - iteration_s),
    )


class _Kept(dict[int, Mapping[str, Tensor]]):
    def put(self, victim: int, tensors: Mapping[str, Tensor]) -> None:
        self[victim] = tensors
