"""Run the units of a study on Dask workers, each as soon as the units it needs are done.

A unit stores its own product, so this process and any worker may be killed at any time: the same
command goes on. A unit that fails does not stop the others; those that need it fail with it.
"""

from __future__ import annotations

import errno
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import dask.config
from distributed import Client, Future

from recon_core.types import Progress
from storage.errors import StoreFullError
from tasks.campaign.generate import outcome_of, reason_of
from tasks.campaign.part import cpu_threads, own_device, this_worker
from tasks.campaign.watch import Watch
from tasks.progress import Advance, Left
from tasks.study.products import Job

TOPIC = "palimpsest-study"
REPORT_EVERY_SECONDS = 0.5
POLL_SECONDS = 1.0
NAMED = 4
"""Most running units that are named on the screen."""
TELLING = 0.1
"""Fraction of a unit that must be done before its time is extrapolated."""
_GRAPH_WARNING = "distributed.admin.large-graph-warning-threshold"


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
    units: Sequence[Unit],
    client: Client,
    *,
    threads: int,
    watch: Watch | None = None,
    then: Callable[[Unit, dict[str, Any]], Iterable[Unit]] = lambda _unit, _given: (),
    on_progress: Advance,
    earlier: Outcome | None = None,
) -> Outcome:
    """Run all units, and those that `then` adds when one of them is done.

    `earlier`: the outcome of earlier rounds, whose units these may need; a unit that needs an
    unknown one fails. `watch` checks the workers, and whether the study is paused or cancelled.

    Raises StoreFullError at once, when a worker finds the device full, and CampaignError as
    `Watch.look` does.
    """
    before = earlier or Outcome({}, {})
    run = _Run(client, threads, watch, then, on_progress, before)
    client.subscribe_topic(TOPIC, run.on_event)
    try:
        with client.as_current(), dask.config.set({_GRAPH_WARNING: "1TB"}):
            run.until_over(units)
    finally:
        client.unsubscribe_topic(TOPIC)
        for _unit, future in run.running.values():
            future.cancel(reason="the study ended")
    return Outcome(run.done, run.failed)


@dataclass
class _Run:
    """Units by state: waiting, running, done, failed."""

    client: Client
    threads: int
    watch: Watch | None
    then: Callable[[Unit, dict[str, Any]], Iterable[Unit]]
    on_progress: Advance
    earlier: Outcome
    waiting: dict[str, Unit] = field(default_factory=dict)
    running: dict[str, tuple[Unit, Future[Any]]] = field(default_factory=dict)
    reported: dict[str, tuple[float, float]] = field(default_factory=dict)
    took: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    n_workers: int = 1
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    happened: queue.SimpleQueue[tuple[str, Any]] = field(default_factory=queue.SimpleQueue)

    def until_over(self, units: Iterable[Unit]) -> None:
        self.waiting |= {unit.name: unit for unit in units}
        self.n_workers = max(1, len(self.client.nthreads()))
        self._report()
        while self.waiting or self.running:
            if self.watch is not None:
                standing = f"{len(self.done)} units are done"
                self.watch.look(len(self.running), standing)
            if self.watch is None or not self.watch.is_paused:
                self._start_ready()
            self._collect()
            self._report()

    def on_event(self, event: Any) -> None:
        """Queue a worker's message; called in the client's own thread."""
        self.happened.put(("reported", event[1]))

    def _start_ready(self) -> None:
        done, failed = {*self.done, *self.earlier.done}, {*self.failed, *self.earlier.failed}
        n_waiting = len(self.waiting)
        for name, unit in list(self.waiting.items()):
            if lost := sorted(unit.needs & failed):
                del self.waiting[name]
                self.failed[name] = f"needs {lost[0]}, which failed"
            elif unit.needs <= done:
                del self.waiting[name]
                key = f"{name.replace(' ', '-')}-{time.time_ns()}"
                resources = None if self.watch is None else self.watch.resources or None
                future = self.client.submit(
                    run_unit, unit, self.threads, pure=False, key=key, resources=resources
                )
                self.running[name] = (unit, future)
                self._watch(name, future)
        if not self.running and len(self.waiting) == n_waiting:  # and nothing ever will start
            for name, unit in self.waiting.items():
                lost = sorted(unit.needs - done)
                self.failed[name] = f"needs {lost[0]}, which no unit makes before it"
            self.waiting.clear()

    def _watch(self, name: str, future: Future[Any]) -> None:
        future.add_done_callback(lambda ended: self.happened.put(("ended", (name, ended))))

    def _collect(self) -> None:
        """Handle all events so far, waiting for the first at most `POLL_SECONDS`."""
        try:
            what, about = self.happened.get(timeout=POLL_SECONDS)
            while True:
                if what == "reported":
                    self.reported[about["unit"]] = (about["fraction"], about["seconds"])
                else:
                    self._settle(*about)
                what, about = self.happened.get_nowait()
        except queue.Empty:
            return

    def _settle(self, name: str, future: Future[Any]) -> None:
        if name not in self.running or self.running[name][1] is not future:
            return
        outcome = cast(Ran | BaseException | None, outcome_of(future))
        if outcome is None:  # its worker died, and Dask runs it again
            self._watch(name, future)
            return
        unit, _future = self.running.pop(name)
        self.reported.pop(name, None)
        future.release()
        self.n_workers = max(1, len(self.client.nthreads()))
        if isinstance(outcome, BaseException):
            is_full = isinstance(outcome, OSError) and outcome.errno in (errno.ENOSPC, errno.EDQUOT)
            if is_full or isinstance(outcome, StoreFullError):
                raise StoreFullError(
                    f"no space left for {name} ({outcome}); make room and run the same command "
                    "again"
                ) from outcome
            self.failed[name] = reason_of(outcome)
            if self.watch is not None:
                self.watch.on_notice(f"{name} failed, the others go on: {self.failed[name]}")
            return
        self.done[name], seconds = outcome
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
        self.on_progress(n_done, known, note, left=self._left())

    def _left(self) -> Left:
        """Estimate the time left from units of the same kind, done or far enough to extrapolate."""
        running = [
            (unit, self.reported.get(name, (0.0, 0.0))) for name, (unit, _) in self.running.items()
        ]
        by_kind = {kind: list(seconds) for kind, seconds in self.took.items()}
        for unit, (fraction, seconds) in running:
            if fraction >= TELLING:
                by_kind.setdefault(unit.kind, []).append(seconds / fraction)
        mean = {kind: sum(seconds) / len(seconds) for kind, seconds in by_kind.items()}
        work = sum(mean.get(unit.kind, 0.0) * (1 - fraction) for unit, (fraction, _) in running)
        work += sum(mean.get(unit.kind, 0.0) for unit in self.waiting.values())
        kinds = {unit.kind for unit, _ in running} | {unit.kind for unit in self.waiting.values()}
        return Left(work / self.n_workers, is_all=kinds <= set(mean))


def run_unit(unit: Unit, threads: int) -> Ran:
    """Run a unit, on a worker or in this process."""
    worker, began = this_worker(), time.monotonic()
    job = replace(unit.job, device=own_device(unit.job.device, worker))
    was_there = isinstance(job, Job) and job.folder.has(job.key)
    last_report = float("-inf")

    def report(fraction: float) -> None:
        """Report to the coordinator at most twice a second; silent outside a worker."""
        nonlocal last_report
        now = time.monotonic()
        if worker is not None and now - last_report >= REPORT_EVERY_SECONDS:
            last_report = now
            about = {"unit": unit.name, "fraction": fraction, "seconds": now - began}
            worker.log_event(TOPIC, about)

    with cpu_threads(threads):
        facts = unit.run(job, report)
    return facts, None if was_there else time.monotonic() - began
