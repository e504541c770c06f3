"""Inversion studies for tests: the smallest that are run, in this process without Prefect or Dask;
and made-up ones, of which the victims' numbers are planted and the record is the product's own."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flows.families.inversion.study import tiny
from recon_core.types import no_progress
from tasks.families.inversion.study.plan import InversionPlan
from tasks.families.inversion.study.record import (
    describe_inversion,
    role_cells,
    sweet_spots,
)
from tasks.families.inversion.study.settings import (
    Cell,
    InversionStudy,
    Part,
    SourceImages,
    read_sources,
)
from tasks.study.executor import Unit

CHANCE = 0.49


def small(**changes: Any) -> InversionStudy:
    """The preset `tiny` without restorers, unless they are given."""
    return replace(tiny(), **{"chain": None, **changes})


def plan_of(study: InversionStudy, root: Path) -> InversionPlan:
    return InversionPlan(study, read_sources(study), root, device="cpu")


def run(plan: InversionPlan, units: Iterable[Unit]) -> list[str]:
    """Runs units and what follows from them; their names, in order."""
    waiting, names = list(units), []
    while waiting:
        unit = waiting.pop(0)
        given = unit.run(unit.job, no_progress)
        names.append(unit.name)
        waiting = [*plan.more_units(unit, given), *waiting]
    return names


def run_all(plan: InversionPlan) -> list[str]:
    """All rounds of a study."""
    names = run(plan, plan.first_units())
    sweet = sweet_spots(plan)
    names += run(plan, plan.confirm(dict.fromkeys(sweet.values())))
    return names + run(plan, plan.restoring_units(role_cells(plan, sweet)))


Numbers = tuple[Mapping[str, float], Mapping[str, npt.NDArray[np.float64]]]
"""Accuracy and distances of a victim, and the SSIM of every image by attack."""


class Products:
    """The products of a plan, made up from the numbers of every cell and seed."""

    def __init__(self, plan: InversionPlan, planted: Callable[[Cell, int], Numbers]) -> None:
        self.kept: dict[str, Any] = {}
        for cell in plan.study.cells:
            for seed in range(plan.study.n_seeds):
                victim, (numbers, attacks) = plan.victim(cell, seed), planted(cell, seed)
                diverged = {"diverged": np.bool_(math.isnan(numbers["accuracy"]))}
                self.kept[victim.key] = dict(numbers) | diverged, {"seconds": 2.0}
                inverted: dict[str, Any] = {}
                restored: dict[str, Any] = {}
                rng = np.random.default_rng(zlib.crc32(victim.name.encode()))
                for attack, ssim in attacks.items():
                    shape = (len(ssim), *victim.shape)
                    scores = {
                        "picture": rng.integers(0, 256, shape, dtype=np.uint8),
                        "ssim": ssim,
                        "psim": 0.6 * ssim + 0.3,
                        "psnr": 30 * ssim - 6,
                        "chance": np.full(len(ssim), CHANCE),
                    }
                    found = restored if attack == "restored" else inverted
                    found |= {f"{attack}/{name}": values for name, values in scores.items()}
                about = {"seconds": 1.0, "rate": 1.0, "zeta": 0.01}
                self.kept[plan.inverting(victim).key] = inverted, about
                self.kept[plan.restoring(cell, seed).key] = restored, about

    def product(self, key: str) -> Any:
        return self.kept.get(key)


def described(
    study: InversionStudy, planted: Callable[[Cell, int], Numbers]
) -> tuple[InversionPlan, dict[str, Any]]:
    """The plan and the record of a study whose victims have these numbers."""
    images = {}
    for source in study.sources:
        rng, shape = np.random.default_rng(0), (source.channels, source.size, source.size)
        few = rng.integers(0, 256, (source.n_inverted, *shape), dtype=np.uint8)
        part = Part(few, np.arange(len(few)) % source.n_classes)
        images[source.name] = SourceImages(part, part, part, "c" * 64, (), {})
    plan = InversionPlan(study, images, Path("nowhere"), device="cpu")
    plan.folder = Products(plan, planted)  # type: ignore[assignment]
    return plan, describe_inversion(plan)
