"""Plan of a study of split classifiers: its units, in rounds, and their costs.

The first round has the grid with its few seeds, and the other cuts and UniCon with all. Once the
sweet spots are known, the next rounds add their missing seeds and the restorers. For the costs a
few steps of training, of the attacks and of the restorer are timed on the study's own networks and
images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from recon_core.attacks.inversion.run import KnownClassifier
from recon_core.attacks.inversion.strong_inversion import whiten
from recon_core.restore import Fit
from recon_core.restore.examples import Examples
from recon_core.types import N_AUGMENT, seeded_generator
from recon_core.victims.split import LeNet5, initial_weights
from recon_core.victims.split_training import train_split
from tasks.families.inversion.study.settings import (
    Cell,
    InversionSource,
    InversionStudy,
    SourceImages,
    defence_json,
    defence_name,
)
from tasks.families.inversion.study.units import (
    InvertJob,
    RestoreJob,
    TrainJob,
    VictimId,
    pictures,
    run_attack,
    stacked,
)
from tasks.study.executor import Unit
from tasks.study.products import Cost, Folder, hash_of, seconds_of, write_weights

TIMED_STEPS = 3
MAX_ROLES = 4
"""Most cells of a source with a restorer: without defence, the paper's, and two sweet spots."""


class InversionPlan:
    """The units of a study in a folder."""

    def __init__(
        self,
        study: InversionStudy,
        images: Mapping[str, SourceImages],
        root: Path,
        *,
        device: str,
    ) -> None:
        self.study, self.images, self.device = study, images, device
        self.root, self.folder = str(root), Folder(root)
        self.where = {"root": self.root, "device": device}
        self.confirmed: set[Cell] = set()

    def first_units(self) -> list[Unit]:
        """The trainings of the first round."""
        maps = [self._training((v,)) for v in map(self.maps_of, self.study.sources) if v]
        return [
            *(Unit(f"classifier of {j.victims[0].source.name}", TrainJob.run, j) for j in maps),
            *self.trainings(self.study.cells),
        ]

    def more_units(self, unit: Unit, given: Mapping[str, Any]) -> Iterable[Unit]:
        """The inversions of the victims that a unit has trained."""
        del given
        if not unit.name.startswith("train "):
            return []
        has_maps = self.study.perceptual == "own"
        return [
            Unit(
                f"invert {victim.name}",
                InvertJob.run,
                self.inverting(victim),
                frozenset({f"classifier of {victim.source.name}"} if has_maps else ()),
            )
            for victim in unit.job.victims
        ]

    def confirm(self, sweet: Iterable[Cell]) -> list[Unit]:
        """Give the sweet spots all seeds; return the trainings of those that they lacked."""
        before = {cell: self.seeds(cell) for cell in sweet}
        self.confirmed |= set(before)
        return self.trainings(list(before), without=before)

    def restoring_units(self, cells: Iterable[Cell]) -> list[Unit]:
        """The restorers for the first seeds of some cells."""
        if self.study.chain is None:
            return []
        n = self.study.chain.n_seeds
        jobs = [self.restoring(cell, seed) for cell in cells for seed in self.seeds(cell)[:n]]
        return [Unit(f"restore {job.inverting.victim.name}", RestoreJob.run, job) for job in jobs]

    @property
    def n_units(self) -> int:
        """Least number of units: those of the first round."""
        return len(self.first_units()) + sum(len(self.seeds(cell)) for cell in self.study.cells)

    def seeds(self, cell: Cell) -> range:
        """The seeds of a cell: a cell of the grid has few until it is confirmed."""
        source = self.study.source(cell.source)
        chosen = cell.defence in (None, source.mixcon(*source.chosen))
        has_all = chosen or not source.in_grid(cell) or cell in self.confirmed
        return range(self.study.n_seeds if has_all else self.study.n_grid_seeds)

    def trainings(
        self, cells: Sequence[Cell], without: Mapping[Cell, range] | None = None
    ) -> list[Unit]:
        """Trainings of networks in stacks of one source, cut and seed."""
        groups: dict[tuple[str, int, int], list[VictimId]] = {}
        for cell in cells:
            for seed in self.seeds(cell):
                if seed not in (without or {}).get(cell, ()):
                    group = groups.setdefault((cell.source, cell.cut, seed), [])
                    group.append(self.victim(cell, seed))
        n = self.study.victims_at_once
        return [
            Unit(
                f"train {source}, cut {cut}, seed {seed}, {victims[k].key[:8]}",
                TrainJob.run,
                self._training(tuple(victims[k : k + n])),
            )
            for (source, cut, seed), victims in groups.items()
            for k in range(0, len(victims), n)
        ]

    def victim(self, cell: Cell, seed: int) -> VictimId:
        """The network of a cell and seed."""
        c, h, w = self.images[cell.source].train.images.shape[1:]
        return VictimId(
            source=self.study.source(cell.source),
            cut=cell.cut,
            defence=cell.defence,
            seed=seed,
            data=self._hashes[cell.source],
            shape=(c, h, w),
            root_seed=self.study.root_seed,
        )

    def maps_of(self, source: InversionSource) -> VictimId | None:
        """The classifier whose features PSIM uses, of a seed that no victim has; None for VGG16."""
        if self.study.perceptual != "own":
            return None
        return self.victim(Cell(source.name, source.cut, None), self.study.n_seeds)

    def _training(self, victims: tuple[VictimId, ...]) -> TrainJob:
        images = self.images[victims[0].source.name]
        return TrainJob(**self.where, victims=victims, train=images.train, tests=images.tests)

    @cached_property
    def _hashes(self) -> dict[str, str]:
        return {
            name: hash_of(i.train.images, i.train.labels, i.tests.images, i.tests.labels)
            for name, i in self.images.items()
        }

    def inverting(self, victim: VictimId) -> InvertJob:
        """The inversions of a victim."""
        study, images = self.study, self.images[victim.source.name]
        return InvertJob(
            **self.where,
            victim=victim,
            inverted=images.tests.first(victim.source.n_inverted),
            tuning=images.public.first(study.n_tuning),
            strong=study.strong,
            zetas=study.zetas,
            rates=study.rates,
            maps=self.maps_of(victim.source) or study.perceptual,
        )

    def restoring(self, cell: Cell, seed: int) -> RestoreJob:
        """The restorer of a cell's network, in a study that has restorers."""
        assert self.study.chain is not None
        return RestoreJob(
            **self.where,
            inverting=self.inverting(self.victim(cell, seed)),
            chain=self.study.chain,
            public=self.images[cell.source].public.after(self.study.n_tuning),
        )

    def write_victims(self, cells: Iterable[Cell]) -> list[Path]:
        """Write the stored networks of some cells' first seed as safetensors files whose metadata
        describes the network and its cut, so that `palimpsest attack inversion` reads them
        directly. Raises StoreFullError."""
        written = []
        for cell in cells:
            victim = self.victim(cell, 0)
            if (found := self.folder.product(victim.key)) is None:
                continue
            arrays, shapes = found[0], victim.model().tensor_shapes
            defence = defence_name(cell.defence).replace(" ", "-")
            name = f"victims/{cell.source}-cut{cell.cut}-{defence}.safetensors"
            about = {
                "kind": "split",
                "network": asdict(LeNet5(cut=cell.cut)),
                "shape": list(victim.shape),
                "victim": victim.name,
                "defence": defence_json(cell.defence),
                "accuracy": float(arrays["accuracy"]),
            }
            weights = {key: torch.from_numpy(arrays[f"weights/{key}"])[None] for key in shapes}
            write_weights(self.folder.root / name, weights, about)
            written.append(self.folder.root / name)
        return written


def costs_of(plan: InversionPlan, _device: str = "") -> list[Cost]:
    """Estimate the costs of every source, timed on this machine in some seconds."""
    study, costs = plan.study, []
    for source in study.sources:
        per_cut: Counter[int] = Counter()
        for cell in source.cells():
            per_cut[cell.cut] += len(plan.seeds(cell))
        per_cut[source.cut] += 2 * (study.n_seeds - study.n_grid_seeds) + 1  # sweet spots, PSIM's
        train_s = invert_s = disk = 0.0
        for cut, n in per_cut.items():
            victim = plan.victim(Cell(source.name, cut, None), 0)
            train_s += n * _training_seconds(plan, victim)
            invert_s += n * _inverting_seconds(plan, victim)
            weights = sum(torch.Size(s).numel() for s in victim.model().tensor_shapes.values())
            disk += n * (4 * weights + 3 * source.n_inverted * source.channels * source.size**2)
        costs.append(
            Cost(
                name=source.name,
                counts={"victims": per_cut.total()},
                seconds_of={
                    "training": train_s,
                    "inversion": invert_s,
                    "restorers": _restoring_seconds(plan, source),
                },
                disk_bytes=int(disk),
            )
        )
    return costs


def _training_seconds(plan: InversionPlan, victim: VictimId) -> float:
    source, device, n = victim.source, torch.device(plan.device), plan.study.victims_at_once
    per_class = source.training.per_class
    n_batches = source.n_train // source.n_classes // per_class
    few = plan.images[source.name].train.first(TIMED_STEPS * per_class * source.n_classes)
    model = victim.model()
    start = initial_weights(model, [seeded_generator(0, 0, "cost")], dtype=torch.float32)
    run = partial(
        train_split,
        model,
        stacked(start, n, device),
        pictures(few, device),
        torch.from_numpy(few.labels).to(device),
        defences=[source.mixcon(*source.chosen)] * n,
        training=replace(source.training, epochs=1),
        shuffle=lambda _stream, _epoch: seeded_generator(0, 0, "cost"),
    )
    steps = min(TIMED_STEPS, n_batches)
    return seconds_of(run, times=2) / n / steps * n_batches * source.training.epochs


def _inverting_seconds(plan: InversionPlan, victim: VictimId) -> float:
    """Seconds of all attacks on a victim and their tuning, whose steps take as long per image."""
    study, job, model = plan.study, plan.inverting(victim), victim.model()
    start = initial_weights(model, [seeded_generator(0, 0, "cost")], dtype=torch.float32)
    device = torch.device(plan.device)
    own = KnownClassifier(model, stacked(start, 1, device), 0.0, 0.0, diverged=False)
    x = pictures(job.inverted, device)
    z, drawn = own.sent(x), victim.generators(len(x), "cost")
    share, seconds = study.n_tuning / len(x), 0.0
    for method, whitening, times in (
        (victim.source.attack, None, 2 + share * len(study.rates)),
        (study.strong, whiten(z), 1 + share * len(study.zetas) / len(study.strong.starts)),
    ):
        short = replace(method, n_steps=TIMED_STEPS)
        run = partial(run_attack, (short, whitening), own, z, x, drawn)
        seconds += seconds_of(run, times=2) / TIMED_STEPS * method.n_steps * times
    return seconds


def _restoring_seconds(plan: InversionPlan, source: InversionSource) -> float:
    """Seconds of all restorers of a source: an upper bound, as two sweet spots may be one cell."""
    chain = plan.study.chain
    if chain is None:
        return 0.0
    victim = plan.victim(Cell(source.name, source.cut, None), 0)
    share = (source.n_public - plan.study.n_tuning) / source.n_inverted
    fit, n = Fit(chain.restorer, chain.training, device=plan.device), chain.training.batch_size
    noise = torch.rand((n, 3, source.size, source.size), generator=seeded_generator(0, 0, "cost"))
    x, augment = 2 * noise - 1, torch.zeros(n, N_AUGMENT)
    batch = Examples(condition=x, target=x, augment=augment)
    step = seconds_of(lambda: fit.update(batch), times=2)
    each = _inverting_seconds(plan, victim) * (1 + share) / 2 + step * chain.training.n_steps
    return MAX_ROLES * min(plan.study.n_seeds, chain.n_seeds) * each
