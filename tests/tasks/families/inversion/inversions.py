"""Inversion studies for tests: the smallest that are run, in this process without Prefect or Dask;
and made-up ones, of which the victims' numbers are planted and the record is the product's own."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flows.families.inversion.study import tiny
from recon_core.types import no_progress
from recon_core.victims.separability import MixCon
from tasks.families.inversion.study.page import INVERSION_PAGE
from tasks.families.inversion.study.plan import InversionPlan
from tasks.families.inversion.study.record import (
    describe_inversion,
    pictures_of,
    role_cells,
    sweet_spots,
)
from tasks.families.inversion.study.settings import (
    Cell,
    InversionSource,
    InversionStudy,
    Part,
    SourceImages,
    read_sources,
)
from tasks.families.inversion.study.tables import describe_figures
from tasks.study.executor import Unit
from tests.tasks.page.study_pages import Made, StudyPages, claims, header

LAMS, BETAS = (0.01, 0.1, 1.0, 10.0), (1e-2, 1e-4, 1e-6)
STRENGTH = {"paper": 0.75, "tuned": 0.85, "strong": 1.0, "restored": 1.04}
CHANCE = 0.49
PAGES = StudyPages(INVERSION_PAGE)
page_of, rows_of, figure_of = PAGES.page_of, PAGES.rows_of, PAGES.figure_of


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


def inversion(
    *,
    sources: int = 2,
    lams: Sequence[float] = LAMS,
    betas: Sequence[float] = BETAS,
    attacks: Sequence[str] = tuple(STRENGTH),
    n_seeds: int = 3,
    n: int = 12,
    n_shown: int = 5,
    layers: bool = True,
    unicon: bool = True,
    sweet_spots: bool = True,
) -> Made:
    """(record, pictures): a grid of `lams` and `betas` for every source, and what belongs to it.

    An image scores by how far apart a setting keeps its features. The strongest defence diverges
    with every seed, the one of the largest beta beside it with one.
    """
    made = tuple(
        InversionSource(
            name=name, title=f"{name}, 11×11", data=name, size=11, channels=channels, n_classes=2,
            n_train=1000, n_tests=400, n_inverted=n, n_public=380, lams=tuple(lams),
            betas=tuple(betas), cuts=(1, 3) if layers else (), unicon=1.0 if unicon else None,
        )
        for name, channels in (("digits", 1), ("photos", 3))[:sources]
    )  # fmt: skip
    study = InversionStudy(
        preset="test", sources=made, n_seeds=n_seeds, n_grid_seeds=n_seeds, n_shown=n_shown
    )

    def planted(cell: Cell, seed: int) -> Numbers:
        rng = np.random.default_rng(zlib.crc32(f"{cell.name} {seed}".encode()))
        defence = cell.defence
        strength = 0.0 if defence is None else 1 + math.log10(max(defence.lam, 1e-2)) / 2
        lost = False
        if isinstance(defence, MixCon):
            strength += 0.15 * (-math.log10(defence.beta) - 2)
            largest = cell.cut == 2 and defence.lam == max(lams)
            last = defence.beta == max(betas) and 0 < seed == n_seeds - 1
            lost = largest and (defence.beta == min(betas) or last)
        accuracy = 0.975 - 0.012 * strength**3 - abs(rng.normal(0, 0.002))
        distance = 0.4 * 10 ** (-1.4 * strength) * math.exp(rng.normal(0, 0.1))
        values = (accuracy, min(1.0, accuracy + 0.02), distance, distance / 300)
        names = ("accuracy", "train_accuracy", "distance", "min_distance")
        numbers = {name: math.nan if lost else v for name, v in zip(names, values, strict=True)}
        ssim = {}
        has_role = cell.cut == 2 and (defence is None or defence == made[0].mixcon(1.0, 1e-4))
        for attack in () if lost else attacks:
            if attack != "restored" or has_role:
                mean = 0.46 * STRENGTH[attack] * 0.8**strength * 0.9 ** (cell.cut - 1)
                ssim[attack] = np.clip(CHANCE + mean + rng.normal(0, 0.05, n), 0, 1)
        return numbers, ssim

    plan, body = described(study, planted)
    record = header("inversion", "inversion", "MixCon paper") | body
    record |= {"settings": {"seed": 42}, "claims": claims("table 3", "ours", "D.2")}
    if not sweet_spots:
        record["sweet_spots"] = []
        for cell in record["cells"]:
            cell["roles"] = [role for role in cell["roles"] if not role.startswith("sweet")]
    record["figures"] = describe_figures(record)
    with np.load(io.BytesIO(pictures_of(plan, record))) as arrays:
        return record, dict(arrays)


def find(record: Mapping[str, Any], name: str, source: str = "digits", cut: int = 2) -> Any:
    """The place of the cell with this name, and the cell: `find(record, "vanilla")`."""
    (found,) = [
        (k, cell)
        for k, cell in enumerate(record["cells"])
        if (cell["source"], cell["name"], cell["cut"]) == (source, name, cut)
    ]
    return found
