"""Run the units of a study on Dask workers, each as soon as the units it needs are done.

A unit stores its own product, so this process and any worker may be killed at any time: the same
command goes on. A unit that fails does not stop the others; those that need it fail with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import Client

from recon_core.types import Progress
from storage.object_store import Place
from tasks.campaign.state import Pace, Watch, log_notice
from tasks.cluster.jobs import (
    Jobs,
    cpu_threads,
    own_device,
    raise_if_full,
    reason_of,
    reporting,
    this_worker,
)
from tasks.progress import Advance, Left
from tasks.study.products import Job

POLL_SECONDS = 1.0
NAMED = 4
"""Most running units that are named on the screen."""
TELLING = 0.1
"""Fraction of a unit that must be done before its time is extrapolated."""


@dataclass(frozen=True)
class Unit:
    """A piece of work: `run(job, progress)` does it and returns its facts.

    `job` has a field `device`. `needs` names the units that must be done before.
    """

    name: str
    run: Callable[[Any, Progress], dict[str, Any]]
    job: Any
    needs: frozenset[str] = frozenset()

    @property
    def kind(self) -> tuple[str, str]:
        """Kind of work and its attack: units of one kind take about as long."""
        return self.run.__qualname__, repr(getattr(self.job, "attack", ""))


Ran = tuple[dict[str, Any], float | None]
"""A unit's facts, and the seconds it took; None if its product was stored before."""


@dataclass(frozen=True)
class Outcome:
    """Facts of the units that are done, and the reasons of those that failed, by name."""

    done: dict[str, dict[str, Any]]
    failed: dict[str, str]


def run_units(
    rounds: Iterable[Sequence[Unit]],
    client: Client,
    *,
    place: Place,
    device: str,
    threads: int,
    then: Callable[[Unit, dict[str, Any]], Iterable[Unit]] = lambda _unit, _given: (),
    on_progress: Advance,
    n_units: int = 0,
) -> Outcome:
    """Run the units of each round, and those that `then` adds when one of them is done.

    A unit may need units of earlier rounds; one that needs an unknown one fails. `n_units`: about
    how many there will be. The study can be paused and cancelled at its store, `place`.

    Raises StoreFullError at once, when a worker finds the device full, and CampaignError as
    `Watch.look` does.
    """
    watch = Watch(place, client, device, Pace(), log_notice)
    with Jobs.on(client) as jobs:
        run = _Run(jobs, threads, watch, then, on_progress, n_units)
        for units in rounds:
            run.until_over(units)
    return Outcome(run.done, run.failed)


@dataclass
class _Run:
    """Units by state: waiting, running, done, failed."""

    jobs: Jobs
    threads: int
    watch: Watch
    then: Callable[[Unit, dict[str, Any]], Iterable[Unit]]
    on_progress: Advance
    n_units: int = 0
    waiting: dict[str, Unit] = field(default_factory=dict)
    running: dict[str, Unit] = field(default_factory=dict)
    reported: dict[str, tuple[float, float]] = field(default_factory=dict)
    took: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def until_over(self, units: Iterable[Unit]) -> None:
        self.waiting |= {unit.name: unit for unit in units}
        self._report()
        while self.waiting or self.running:
            self.watch.look(len(self.running), f"{len(self.done)} units are done")
            if not self.watch.is_paused:
                self._start_ready()
            self._collect()
            self._report()

    def _start_ready(self) -> None:
        n_waiting = len(self.waiting)
        for name, unit in list(self.waiting.items()):
            if lost := sorted(unit.needs & self.failed.keys()):
                del self.waiting[name]
                self.failed[name] = f"needs {lost[0]}, which failed"
            elif unit.needs <= self.done.keys():
                del self.waiting[name]
                self.running[name] = unit
                resources = self.watch.resources
                self.jobs.start(name, run_unit, unit, self.threads, resources=resources)
        if not self.running and len(self.waiting) == n_waiting:  # and nothing ever will start
            for name, unit in self.waiting.items():
                lost = sorted(unit.needs - self.done.keys())
                self.failed[name] = f"needs {lost[0]}, which no unit makes before it"
            self.waiting.clear()

    def _collect(self) -> None:
        """Handle all events so far, waiting for the first at most `POLL_SECONDS`."""
        for name, what in self.jobs.happened(POLL_SECONDS):
            if isinstance(what, dict):
                self.reported[name] = (what["fraction"], what["seconds"])
                continue
            unit = self.running.pop(name)
            self.reported.pop(name, None)
            if isinstance(what, BaseException):
                raise_if_full(name, what)
                self.failed[name] = reason_of(what)
                self.watch.on_notice(f"{name} failed, the others go on: {self.failed[name]}")
                continue
            self.done[name], seconds = what
            if seconds is not None:
                self.took.setdefault(unit.kind, []).append(seconds)
            for more in self.then(unit, self.done[name]):
                self.waiting[more.name] = more

    def _report(self) -> None:
        known = len(self.waiting) + len(self.running) + len(self.done) + len(self.failed)
        n_done = len(self.done) + sum(self.reported.get(name, (0.0,))[0] for name in self.running)
        names = [*(n for n in self.running if n in self.reported), *self.running]
        shown = list(dict.fromkeys(names))[:NAMED]  # those that have reported first
        more = len(self.running) - len(shown)
        note = ", ".join(shown) + (f" and {more} more" if more else "")
        note += f"; {len(self.failed)} failed" if self.failed else ""
        left = self._left()
        if known < self.n_units:  # later rounds have more
            left = replace(left, is_all=False)
        self.on_progress(n_done, max(known, self.n_units), note, left=left)

    def _left(self) -> Left:
        """Estimate the time left from units of the same kind, done or far enough to extrapolate."""
        running = [(unit, self.reported.get(n, (0.0, 0.0))) for n, unit in self.running.items()]
        by_kind = {kind: list(seconds) for kind, seconds in self.took.items()}
        for unit, (fraction, seconds) in running:
            if fraction >= TELLING:
                by_kind.setdefault(unit.kind, []).append(seconds / fraction)
        mean = {kind: sum(seconds) / len(seconds) for kind, seconds in by_kind.items()}
        work = sum(mean.get(unit.kind, 0.0) * (1 - fraction) for unit, (fraction, _) in running)
        work += sum(mean.get(unit.kind, 0.0) for unit in self.waiting.values())
        kinds = {unit.kind for unit, _ in running} | {unit.kind for unit in self.waiting.values()}
        return Left(work / max(1, self.watch.n_workers), is_all=kinds <= set(mean))


def run_unit(unit: Unit, threads: int) -> Ran:
    """Run a unit, on a worker or in this process."""
    began = time.monotonic()
    job = replace(unit.job, device=own_device(unit.job.device, this_worker()))
    was_there = isinstance(job, Job) and job.folder.has(job.key)
    with cpu_threads(threads):
        facts = unit.run(job, reporting(unit.name))
    return facts, None if was_there else time.monotonic() - began
