"""The smallest studies of split classifiers, run in this process without Prefect or Dask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.families.inversion.grids import tiny
from recon_core.types import no_progress
from tasks.families.inversion.study.images import read_sources
from tasks.families.inversion.study.plan import InversionPlan
from tasks.families.inversion.study.record import role_cells, sweet_spots
from tasks.families.inversion.study.settings import InversionStudy
from tasks.study.executor import Unit


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
