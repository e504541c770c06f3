"""Studies that are units, each with a product of its own: made on workers, then described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from flows.study_kind import S, StudyKind
from storage.files import write_json
from storage.object_store import open_place
from tasks.campaign.state import resume_if_stopped
from tasks.campaign.watch import Pace, Watch, log_notice
from tasks.cluster.workers import Workers, dask_client
from tasks.orchestration import task
from tasks.progress import stage_progress
from tasks.study.executor import Outcome, Unit, run_units
from tasks.study.products import SETTINGS, Folder


class UnitPlan(Protocol):
    """Units, and those that follow from one that is done."""

    study: Any
    root: str
    device: str

    @property
    def folder(self) -> Folder: ...

    @property
    def n_units(self) -> int: ...

    def first_units(self) -> list[Unit]: ...

    def more_units(self, unit: Unit, given: Mapping[str, Any]) -> Iterable[Unit]: ...


U = TypeVar("U", bound=UnitPlan)


class UnitStudy(StudyKind[S, U], Generic[S, U]):
    """A study whose plan is units, made in rounds."""

    def rounds(self, plan: U) -> Iterator[list[Unit]]:
        """Units, of which a later round may depend on the products of those before."""
        yield plan.first_units()

    def make(self, plan: U, store: Path, workers: Workers) -> Outcome:
        store.mkdir(parents=True, exist_ok=True)
        write_json(store / SETTINGS, self.to_json(plan.study))
        if notice := resume_if_stopped(open_place(str(store))):
            log_notice(notice)
        return make_products(plan, self.rounds, f"Study {self.name}", workers)


@task(name="make products")
def make_products(
    plan: UnitPlan,
    rounds: Callable[[Any], Iterable[list[Unit]]],
    title: str,
    workers: Workers,
) -> Outcome:
    """Every unit's product, on Dask workers that live as long as this task."""
    if n_products := len(list(plan.folder.place.glob("*.json"))):
        log_notice(
            f"{title}: goes on, {n_products:,} products are kept, of some {plan.n_units:,} units"
        )
    so_far = Outcome({}, {})
    with (
        stage_progress(title, "unit") as advance,
        dask_client(workers, threads=plan.study.threads) as client,
    ):

        def report(done: float, total: float, note: str = "") -> None:
            n_before = len(so_far.done) + len(so_far.failed)
            advance(n_before + done, max(n_before + total, plan.n_units), note)

        for units in rounds(plan):
            place, notice = open_place(plan.root), log_notice
            outcome = run_units(
                units,
                client,
                threads=plan.study.threads,
                watch=Watch(place, client, device=plan.device, pace=Pace(), on_notice=notice),
                then=plan.more_units,
                on_progress=report,
                earlier=so_far,
            )
            so_far = Outcome(so_far.done | outcome.done, so_far.failed | outcome.failed)
    return so_far
