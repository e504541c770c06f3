"""Plan of a study of split classifiers: its units, in two rounds.

First the grid by its seeds, the cuts and UniCon by all; then, once the sweet spots are known, these
by the seeds that they lack, and the restorers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tasks.families.inversion.study.images import SourceImages
from tasks.families.inversion.study.restoring import RestoreJob
from tasks.families.inversion.study.settings import (
    Cell,
    InversionSource,
    InversionStudy,
    defence_json,
    defence_name,
)
from tasks.families.inversion.study.units import InvertJob, TrainJob, VictimId
from tasks.study.executor import Unit
from tasks.study.products import Folder, hash_of, write_weights

VICTIMS = "victims"


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
        """All trainings of the first round."""
        maps = [self._training((v,)) for v in map(self.maps_of, self.study.sources) if v]
        return [
            *(Unit(self._classifier(job.victims[0].source), TrainJob.run, job) for job in maps),
            *self.trainings(self.study.cells),
        ]

    def more_units(self, unit: Unit, given: Mapping[str, Any]) -> Iterable[Unit]:
        """The inversions of victims that have been trained."""
        del given
        if not unit.name.startswith("train "):
            return []
        has_maps = self.study.perceptual == "own"
        return [
            Unit(
                f"invert {victim.name}",
                InvertJob.run,
                self.inverting(victim),
                frozenset({self._classifier(victim.source)} if has_maps else ()),
            )
            for victim in unit.job.victims
        ]

    def confirm(self, sweet: Iterable[Cell]) -> list[Unit]:
        """From here on the sweet spots have all seeds; trainings of them by those they lacked."""
        before = {cell: self.seeds(cell) for cell in sweet}
        self.confirmed |= set(before)
        return self.trainings(list(before), without=before)

    def restoring_units(self, cells: Iterable[Cell]) -> list[Unit]:
        """The restorers, of every seed of some cells."""
        if self.study.chain is None:
            return []
        n = self.study.chain.n_seeds
        jobs = [self.restoring(cell, seed) for cell in cells for seed in self.seeds(cell)[:n]]
        return [Unit(f"restore {job.inverting.victim.name}", RestoreJob.run, job) for job in jobs]

    @property
    def n_units(self) -> int:
        """Number of units at least: those of the first round."""
        return len(self.first_units()) + sum(len(self.seeds(cell)) for cell in self.study.cells)

    def seeds(self, cell: Cell) -> range:
        """The seeds of a cell: those of the grid have few until they are confirmed."""
        source = self.study.source(cell.source)
        chosen = cell.defence in (None, source.mixcon(*source.chosen))
        has_all = chosen or not source.in_grid(cell) or cell in self.confirmed
        return range(self.study.n_seeds if has_all else self.study.n_grid_seeds)

    def trainings(
        self, cells: Sequence[Cell], without: Mapping[Cell, range] | None = None
    ) -> list[Unit]:
        """Networks of a source, cut and seed together, some at a time."""
        groups: dict[tuple[str, int, int], list[VictimId]] = {}
        for cell in cells:
            for seed in self.seeds(cell):
                if seed not in (without or {}).get(cell, ()):
                    groups.setdefault((cell.source, cell.cut, seed), []).append(
                        self.victim(cell, seed)
                    )
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
        """A cell's network of a seed."""
        images, hashed = self.images[cell.source], self._hashes[cell.source]
        c, h, w = images.train.images.shape[1:]
        return VictimId(
            source=self.study.source(cell.source),
            cut=cell.cut,
            defence=cell.defence,
            seed=seed,
            data=hashed,
            shape=(c, h, w),
            root_seed=self.study.root_seed,
        )

    def maps_of(self, source: InversionSource) -> VictimId | None:
        """The classifier whose features are PSIM's: of a seed that no victim has."""
        if self.study.perceptual != "own":
            return None
        return self.victim(Cell(source.name, source.cut, None), self.study.n_seeds)

    def _classifier(self, source: InversionSource) -> str:
        return f"classifier of {source.name}"

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
        """Inversions of a victim."""
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
        """Raises ValueError for a study without restorers."""
        if self.study.chain is None:
            raise ValueError("the study has chain=null; there is nothing to restore with")
        return RestoreJob(
            **self.where,
            inverting=self.inverting(self.victim(cell, seed)),
            chain=self.study.chain,
            public=self.images[cell.source].public.after(self.study.n_tuning),
        )

    def write_victims(self, cells: Iterable[Cell]) -> list[Path]:
        """The networks of the first seed of some cells that are there, for others: a safetensors
        file each, whose metadata says which it is and where it is cut, so that `palimpsest attack
        inversion` takes it as it is. Raises StoreFullError."""
        written = []
        for cell in cells:
            victim = self.victim(cell, 0)
            if (found := self.folder.product(victim.key)) is None:
                continue
            arrays, shapes = found[0], victim.model().tensor_shapes
            defence = defence_name(cell.defence).replace(" ", "-")
            path = self.folder.root / VICTIMS / f"{cell.source}-cut{cell.cut}-{defence}.safetensors"
            about = {
                "kind": "split",
                "network": asdict(cell.network),
                "shape": list(victim.shape),
                "victim": victim.name,
                "defence": defence_json(cell.defence),
                "accuracy": float(arrays["accuracy"]),
            }
            weights = {name: torch.from_numpy(arrays[f"weights/{name}"])[None] for name in shapes}
            write_weights(path, weights, about)
            written.append(path)
        return written
