"""Generate pairs, all parts of a campaign, on Dask workers.

A part is done when its receipt exists. Parts are handed to Dask through a bounded window, a round
is planned only when the rounds it depends on are done, and this process may be killed at any time:
the next one reads the receipts and goes on. An error of a part has one of four consequences:

- *retry*: a network or a file service did not answer as it should; the same again may work.
- *killed*: Dask gave the part up, because worker after worker died that it had been given to.
- *failed*: this part has it, another may not; such are out of memory, a linear system without a
  solution.
- *end*: the device is full, the store is not what it should be, or the program has a mistake:
  no other part would fare better. Numerical divergence is none of these, it is an outcome of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from distributed import Client

from storage.object_store import LocalPlace
from storage.pairs.dataset import Dataset
from storage.pairs.receipts import Receipt
from tasks.campaign.coordinator import MAX_KILLS, Coordinator, KnownCounts
from tasks.campaign.part import PartJob, batch_of, log_tail, run_part
from tasks.campaign.plan import VICTIMS, Plan, PlannedPart
from tasks.campaign.state import (
    CampaignError,
    OnNotice,
    Pace,
    Watch,
    log_notice,
    quarantine_path,
    read_quarantine,
)
from tasks.campaign.state import write_quarantine as give_up
from tasks.cluster.jobs import Jobs, raise_if_full, reason_of, verdict

WINDOW_PER_WORKER = 2
"""One that runs and one that waits; each holds its images in the memory of the scheduler."""

OnProgress = Callable[[float, int, str], None]
"""Called with the number of runs done (fractions of running ones included) and of all runs, and
with how many images are covered, in words. The first call tells what was there before."""


def run_campaign(
    plan: Plan,
    dataset: Dataset,
    client: Client,
    *,
    device: str,
    on_progress: OnProgress,
    on_notice: OnNotice = log_notice,
    logs: Path | None = None,
    pace: Pace | None = None,
    shared_victims: tuple[str, str] | None = None,
) -> Dataset:
    """Make every part of the plan that has no receipt yet, and return the dataset.

    It is complete but for quarantined parts, of which a notice is given. `logs` is the folder of
    the workers' logs; by default `logs` in the store, where that is a folder. `shared_victims`: a
    folder for victims that several campaigns attack, and the hash of what they depend on. They are
    trained before the clock starts: a receipt then has the seconds of the attack alone.

    Raises:
        StoreFullError: at once, when a worker finds the device full.
        CorruptPartError: a receipt in the store is of other runs than the plan's.
        CampaignError: parts failed, or wait for quarantined ones; all others were made first. Or
            the campaign was cancelled, or there was no worker for too long.
    """
    if logs is None and isinstance(dataset.place, LocalPlace):
        logs = Path(dataset.root) / "logs"
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    pace = pace or Pace()
    with Jobs.on(client) as jobs:
        run = _Run(plan, dataset, jobs, device, on_progress, on_notice, logs, pace, shared_victims)
        run.until_over()
    dataset.refresh()
    return dataset


@dataclass
class _Run:
    """One campaign in progress. Losing it costs only time: the parts are in the store."""

    plan: Plan
    dataset: Dataset
    jobs: Jobs
    device: str
    on_progress: OnProgress
    on_notice: OnNotice
    logs: Path | None
    pace: Pace
    victims: tuple[str, str] | None

    def __post_init__(self) -> None:
        plan, dataset = self.plan, self.dataset
        quarantined = read_quarantine(dataset.place)
        self.stored = {r.part for r in dataset.receipts}
        self.parts = Coordinator(
            plan.sampling,
            done=self.stored,
            quarantined=[q.part for q in quarantined],
            retry_delays_s=self.pace.retry_s,
        )
        if self.parts.quarantined:
            named = ", ".join(str(q.part) for q in quarantined)
            self.on_notice(f"left out: {len(quarantined)} quarantined parts ({named})")
        self.known = KnownCounts(plan.sampling, len(plan.labels))
        self.covered = np.zeros(len(plan.labels), bool)
        for receipt in dataset.receipts:
            self._take_in(receipt)
        self.fingerprint = plan.campaign.fingerprint(plan.images)
        self.train_first = self.victims is not None
        key = plan.campaign.victims_fingerprint(plan.images)
        if self.victims is None and key is not None and isinstance(dataset.place, LocalPlace):
            self.victims = (str(Path(dataset.root) / VICTIMS), key)
        self.planned: dict[int, PlannedPart] = {}
        self.fractions: dict[int, float] = {}
        self.watch = Watch(dataset.place, self.jobs.client, self.device, self.pace, self.on_notice)

    def until_over(self) -> None:
        self._report()
        while not self.parts.is_over:
            n_done, n_parts = len(self.parts.done), self.plan.sampling.n_parts
            progress = f"{n_done} of {n_parts} parts are in the store"
            self.watch.look(len(self.jobs.running), progress)
            more = not self.watch.is_paused and self._fill()
            self._collect(0.0 if more else self.pace.poll_s)
            self._report()
        self._conclude()

    def _fill(self) -> bool:
        """Start parts until the window is full; return True if more may be started at once."""
        window = WINDOW_PER_WORKER * max(1, self.watch.n_workers)
        until = time.monotonic() + self.pace.poll_s
        # Parts that wait to be repeated are bounded, too: an outage does not go through them all.
        while len(self.jobs.running) < window:
            fresh = self.parts.n_delayed < window
            part = self.parts.next_part(time.monotonic(), fresh=fresh)
            if part is None:
                return False
            self._start(part)
            if time.monotonic() > until:
                return True
        return False

    def _start(self, part: int) -> None:
        planned = self.planned.get(part)
        if planned is None:
            round_index = self.plan.sampling.round_of_part(part)
            planned = self.plan.part(part, self.known.history(round_index))
        if part in self.stored:
            planned.check(self.dataset.receipt(part))
            self._is_done(part)
            return
        self.planned[part] = planned
        images = self.plan.images
        job = PartJob(
            root=self.dataset.root,
            planned=planned,
            images=batch_of(planned.specs, images.images),
            fingerprint=self.fingerprint,
            source_hash=images.content_hash,
            device=self.device,
            threads=self.plan.campaign.threads,
            logs=None if self.logs is None else str(self.logs),
            victims=self.victims,
            train_first=self.train_first,
        )
        self.jobs.start(part, run_part, job, resources=self.watch.resources)

    def _collect(self, wait_s: float) -> None:
        """Handle all events so far, waiting for the first."""
        until_retry = self.parts.next_retry_s() - time.monotonic()
        for part, what in self.jobs.happened(max(0.001, min(wait_s, until_retry))):
            if isinstance(what, dict):
                self.fractions[part] = what["fraction"]
                if "started_on" in what:
                    self.parts.started(part, what["started_on"])
                    if len(self.parts.kills(part)) > MAX_KILLS:  # the scheduler allows more deaths
                        self.jobs.running.pop(part).cancel(reason="quarantined")
                        self._quarantine(part)
                continue
            self.fractions.pop(part, None)
            if isinstance(what, Receipt):
                self.planned[part].check(what)
                self._take_in(what)
                self._is_done(part)
            else:
                self._judge(part, what)

    def _take_in(self, receipt: Receipt) -> None:
        self.known.keep(receipt)
        table = receipt.image_table()
        self.covered[table.image_ids[table.n_pairs > 0]] = True

    def _is_done(self, part: int) -> None:
        self.parts.finished(part)
        self._forget(part)
        self.known.add(self.parts.n_known_rounds())

    def _judge(self, part: int, error: BaseException) -> None:
        reason = reason_of(error)
        now = time.monotonic()
        match verdict(error):
            case "end":
                raise_if_full(f"part {part}", error)
                raise error
            case "retry":
                delay_s = self.parts.erred(part, reason, now)
                if delay_s is None:
                    self._forget(part)
                else:
                    self.on_notice(f"part {part} is tried again in {delay_s:g} s: {reason}")
            case "killed":
                if self.parts.given_up(part, now):
                    self._quarantine(part)
            case "failed":
                self.parts.fail(part, reason)
                self._forget(part)

    def _quarantine(self, part: int) -> None:
        workers = self.parts.kills(part)[:MAX_KILLS]
        reason = f"{MAX_KILLS} workers died while they ran it"
        if len(workers) < MAX_KILLS:
            reason = f"Dask gave it up {MAX_KILLS} times, workers died before they could begin"
        give_up(
            self.dataset.place,
            part,
            reason=reason,
            attempts=MAX_KILLS,
            log=log_tail(self.logs, part),
            workers=workers,
        )
        self.parts.quarantine(part)
        self._forget(part)
        self.on_notice(
            f"part {part} is quarantined: {reason}; the log is in "
            f"{self.dataset.place}/{quarantine_path(part)}"
        )

    def _forget(self, part: int) -> None:
        self.planned.pop(part, None)
        self.fractions.pop(part, None)

    def _report(self) -> None:
        sampling = self.plan.sampling
        n_done = len(self.parts.done) + sum(self.fractions.values())
        n_usable = int((self.plan.labels >= 0).sum())
        covered = f"{self.covered.sum():,} of {n_usable:,} images covered"
        self.on_progress(n_done * sampling.runs_per_part, sampling.n_runs, covered)

    def _conclude(self) -> None:
        parts, n_parts = self.parts, self.plan.sampling.n_parts
        if parts.failed:
            part, reason = min(parts.failed.items())
            raise CampaignError(
                f"{len(parts.failed)} of {n_parts} parts failed, the first (part {part}) with: "
                f"{reason}; run the same command again to retry them"
            )
        if parts.n_blocked:
            named = ", ".join(map(str, sorted(parts.quarantined)))
            raise CampaignError(
                f"{parts.n_blocked} of {n_parts} parts cannot be planned without part {named}, "
                f"which is quarantined; see why in {self.dataset.place}/quarantine, clear it, and "
                "run the same command again"
            )
        if parts.quarantined:
            self.on_notice(f"{len(parts.done)} of {n_parts} parts are done, the rest quarantined")
