"""Costs of a grid study: seconds, memory and disk of every cell, before anything is run.

Operations are counted: a forward and backward pass of n images through P weights is 6 n P of them
(without the gradient in the images; in the span of the images the first layer takes 2 n^2 h), an
iteration of a search with m candidates 6 m P + 2 m^2 (d + 2 sum h), the Gram form of
`recon_core.attacks.kkt.stationarity`, one of a separation of k directions with T features each 6
k^2 T: the sources anew and their products with the score, some steps being tried twice. How fast
this machine does them, and what an epoch or iteration costs apart from that, is measured on two
small victims. An estimate, no promise: within a factor of two on the machines it was tried on
(docs/studies.md). Of another family a run is done, whole: one victim of each cell, one attack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recon_core.attacks.kkt.attacks import separation_operations
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.kkt.settings import most_directions
from recon_core.attacks.span.attack import SpanAttack
from recon_core.experiments import KKT, bytes_per_run
from recon_core.types import RunSpec, seeded_generator
from recon_core.victims.backprop import uses_span
from recon_core.victims.network import Architecture, Network
from recon_core.victims.training import Training
from tasks.families.weights.study.settings import Cell, Study, StudyPlan
from tasks.study.cost import Cost

Shape = tuple[int, int, int]
BYTES_PER_VALUE = {"float16": 2, "float32": 4, "uint8": 1}
SMALL, LARGE = (2, 16, 12), (50, 200, 32)
"""Images, width and side of the images of the two victims that are measured."""
DIRECTIONS_PER_IMAGE = 1.5
"""Directions of a separation: those that Adadelta leaves of 100 images at width 200, and more."""


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
    made, stacked = plan.study, device != "cpu"
    counted = any(isinstance(cell.experiment, KKT) for cell in made.cells)
    pace = measured_pace(device) if counted else None
    return [
        cost_of(made, cell, (c, h, w), pace, stacked=stacked)
        if pace is not None and isinstance(cell.experiment, KKT)
        else _tried(plan, number, (c, h, w), device)
        for number, cell in enumerate(made.cells)
    ]


def cost_of(study: Study, cell: Cell, shape: Shape, pace: Pace, *, stacked: bool) -> Cost:
    """The estimate of a cell of attacks on weights; `stacked`: a worker holds the runs of a part at
    once (on a GPU)."""
    experiment, n = cell.experiment, cell.images_per_run
    assert isinstance(experiment, KKT)
    training = experiment.training
    epoch = pace.epoch_s * math.ceil(n / (training.batch_size or n))
    epoch += training_operations(experiment, n, shape) / pace.training_rate
    saved = len(experiment.saved_iterations) * _candidates(experiment, n) * math.prod(shape)
    train_s, attack_s = training.epochs * epoch, attack_seconds(experiment, n, shape, pace)
    return _cost(study, cell, shape, (train_s, attack_s, saved), stacked=stacked)


def _cost(
    study: Study, cell: Cell, shape: Shape, of_run: tuple[float, float, int], *, stacked: bool
) -> Cost:
    """Of a cell; `of_run`: seconds of a training, of an attack, and numbers that this keeps."""
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


def _tried(plan: StudyPlan, number: int, shape: Shape, device: str) -> Cost:
    study, cell = plan.study, plan.study.cells[number]
    spec = plan.spec(number * study.n_victims * study.n_attacks)
    images = torch.from_numpy(plan.images.images[list(spec.image_ids)])
    where, kept = torch.device(device), _Kept()
    start = time.perf_counter()
    cell.experiment.train_victim(spec, images, device=where, victims=kept)
    trained = time.perf_counter()
    (result,) = cell.experiment.run_batch([spec], images[None], device=where, victims=kept)
    seconds = trained - start, time.perf_counter() - trained
    of_run = (*seconds, result.pairs.reconstruction.numel())
    return _cost(study, cell, shape, of_run, stacked=device != "cpu")


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
    if isinstance(attack, SpanAttack):
        k = _directions(experiment, attack, n_images)
        operations = separation_operations(attack, k, shape)
    else:
        operations = attack_operations(experiment, n_images, shape)
    return attack.n_iterations * (pace.iteration_s + operations / pace.attack_rate)


def _directions(experiment: KKT, span: SpanAttack, n_images: int) -> int:
    return min(most_directions(experiment, span), round(DIRECTIONS_PER_IMAGE * n_images))


def _candidates(experiment: KKT, n_images: int) -> int:
    """Candidates of one attack: those of a search, or both signs of every source."""
    attack = experiment.attack
    if isinstance(attack, KKTAttack):
        return attack.n_candidates
    return 2 * attack.n_sources(_directions(experiment, attack, n_images))


def attack_operations(experiment: KKT, n_images: int, shape: Shape) -> int:
    """Operations of an iteration of a search."""
    architecture = experiment.victim.on(shape, experiment.n_outputs)
    m, widths = _candidates(experiment, n_images), architecture.network.widths
    return 6 * m * sum(_products(architecture)) + 2 * m**2 * (architecture.d + 2 * sum(widths))


def _products(architecture: Architecture) -> list[int]:
    sizes = [fan_in * fan_out for fan_in, fan_out in architecture.layer_sizes]
    return [sizes[0] * architecture.n_positions, *sizes[1:]]


def measured_pace(device: str, *, epochs: int = 400, iterations: int = 100) -> Pace:
    """Speed of one worker with one thread of this machine, or of its GPU; takes some seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [_times(size, device, epochs, iterations) for size in (SMALL, LARGE)]
    finally:
        torch.set_num_threads(before)
    (epoch_s, iteration_s), (large_epoch, large_iteration) = times
    n, _width, side = LARGE
    experiment, shape = _experiment(LARGE, epochs, iterations), (3, side, side)
    tiny = 1e-9
    attacked = attack_operations(experiment, n, shape)
    return Pace(
        epoch_s=epoch_s,
        training_rate=training_operations(experiment, n, shape) / max(tiny, large_epoch - epoch_s),
        iteration_s=iteration_s,
        attack_rate=attacked / max(tiny, large_iteration - iteration_s),
    )


class _Kept(dict[int, Mapping[str, Tensor]]):
    def put(self, victim: int, tensors: Mapping[str, Tensor]) -> None:
        self[victim] = tensors


def _times(
    size: tuple[int, int, int], device: str, epochs: int, iterations: int
) -> tuple[float, float]:
    """Seconds of an epoch and of an iteration."""
    n, _width, side = size
    experiment = _experiment(size, epochs, iterations)
    pixels = torch.rand(n, 3, side, side, generator=seeded_generator(0, 0, "pace"))
    images = (pixels * 255).to(torch.uint8)
    labels = tuple(k % 2 for k in range(n))
    spec = RunSpec(run=0, root_seed=0, image_ids=tuple(range(n)), labels=labels)
    where, kept = torch.device(device), _Kept()
    experiment.train_victim(spec, images, device=where, victims=_Kept())  # warm
    start = time.perf_counter()
    experiment.train_victim(spec, images, device=where, victims=kept)
    trained = time.perf_counter()
    experiment.run_batch([spec], images[None], device=where, victims=kept)
    attacked = time.perf_counter()
    short = _experiment(size, epochs, 1)
    short.run_batch([spec], images[None], device=where, victims=kept)
    once = time.perf_counter() - attacked
    spent = max(1e-9, attacked - trained - once)
    return (trained - start) / epochs, spent / max(1, iterations - 1)


def _experiment(size: tuple[int, int, int], epochs: int, iterations: int) -> KKT:
    n, width, _side = size
    return KKT(
        augment_p=0.0,
        victim=Network(widths=(width, width)),
        training=Training(epochs=epochs),
        attack=KKTAttack(n_candidates=2 * n, save_at=(iterations,)),
    )
