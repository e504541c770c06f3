"""Generate pairs: the worker's side (one part) and the coordinator's (all parts of a campaign).

A part is done when its receipt exists. The coordinator hands parts to Dask through a bounded
window, plans a round only when the rounds it depends on are done, and may be killed at any time:
the next one reads the receipts and goes on. Workers return receipts, not arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from distributed import Client, Future, KilledWorker, get_worker, wait

from recon_core.experiments import Experiment
from recon_core.types import STATS, Progress, RunResult, RunSpec
from storage.dataset import Dataset
from storage.errors import CorruptPartError, StorageError, StoreFullError
from storage.layout import OUTCOMES
from storage.parts import write_part
from storage.receipts import Provenance, Receipt
from tasks.campaign import Plan, PlannedPart, code_version

PROGRESS_TOPIC = "palimpsest-part"
WINDOW_PER_WORKER = 3
POLL_SECONDS = 0.5

OnProgress = Callable[[float, int], None]
"""Called with the number of runs done (fractions of running ones included) and of all runs."""


class CampaignError(Exception):
    """Some parts could not be made; the others are in the store."""


@dataclass(frozen=True)
class PartJob:
    """All that a worker needs for one part; images (r, n, 3, h, w) travel with it."""

    root: str
    planned: PlannedPart
    experiment: Experiment
    images: npt.NDArray[np.uint8]
    fingerprint: str
    source_hash: str
    device: str
    threads: int


def run_part(job: PartJob) -> Receipt:
    """Train and attack the part's victims and write what came back; on a worker or in-process."""
    started = time.perf_counter()
    with _cpu_threads(job.threads):
        results = job.experiment.run_batch(
            job.planned.specs,
            torch.from_numpy(job.images),
            device=torch.device(job.device),
            progress=_worker_progress(job.planned.part),
        )
    provenance = Provenance(
        run_first=job.planned.specs[0].run,
        fingerprint=job.fingerprint,
        plan_hash=job.planned.plan_hash,
        source_hash=job.source_hash,
        code_version=code_version(),
        device=device_name(job.device),
        threads=job.threads,
        seconds=round(time.perf_counter() - started, 3),
    )
    return write_part(job.root, job.planned.part, columns_of(results), provenance=provenance)


def run_campaign(
    plan: Plan,
    dataset: Dataset,
    client: Client,
    *,
    device: str,
    on_progress: OnProgress,
) -> Dataset:
    """Make every part of the plan that has no receipt yet; the dataset, complete.

    Raises:
        StoreFullError: at once, when a worker finds the device full.
        CorruptPartError: a receipt in the store is of other runs than the plan's.
        CampaignError: parts failed; all others were made first.
    """
    coordinator = _Coordinator(plan, dataset, client, device, on_progress)
    client.subscribe_topic(PROGRESS_TOPIC, coordinator.on_event)
    try:
        with client.as_current():
            coordinator.run()
    finally:
        client.unsubscribe_topic(PROGRESS_TOPIC)
        for future in coordinator.running:
            future.cancel()
    dataset.refresh()
    return dataset


class _Coordinator:
    """The state of one campaign in progress; what is lost with it is nothing but time."""

    def __init__(
        self, plan: Plan, dataset: Dataset, client: Client, device: str, on_progress: OnProgress
    ) -> None:
        self.plan, self.dataset, self.client, self.device = plan, dataset, client, device
        self.on_progress = on_progress
        self.done = {receipt.part: receipt for receipt in dataset.receipts}
        self.failed: dict[int, str] = {}
        self.running: dict[Future[Receipt], int] = {}
        self.fractions: dict[int, float] = {}

    def run(self) -> None:
        waiting = list(range(self.plan.sampling.n_parts))
        window = WINDOW_PER_WORKER * max(1, len(self.client.scheduler_info()["workers"]))
        while waiting or self.running:
            while waiting and len(self.running) < window and self._is_ready(waiting[0]):
                self._start(waiting.pop(0))
            if self.running:
                self._collect()
            elif waiting and not self._is_ready(waiting[0]):
                break  # the round it depends on has failed parts
            self._report()
        if self.failed:
            part, reason = min(self.failed.items())
            raise CampaignError(
                f"{len(self.failed)} of {self.plan.sampling.n_parts} parts failed, the first "
                f"(part {part}) with: {reason}; run the same command again to retry them"
            )

    def on_event(self, event: Any) -> None:
        _time, message = event
        self.fractions[message["part"]] = message["fraction"]

    def _is_ready(self, part: int) -> bool:
        return self.plan.is_ready(self.plan.sampling.round_of_part(part), self.done)

    def _start(self, part: int) -> None:
        planned = self.plan.part(part, self.done.values())
        if part in self.done:
            self.plan.check(planned, self.done[part])
            return
        campaign, images = self.plan.campaign, self.plan.images
        job = PartJob(
            root=self.dataset.root,
            planned=planned,
            experiment=campaign.experiment,
            images=batch_of(planned.specs, images.images),
            fingerprint=campaign.fingerprint(images),
            source_hash=images.content_hash,
            device=self.device,
            threads=campaign.threads,
        )
        future = self.client.submit(run_part, job, pure=False, key=f"part-{part}-{time.time_ns()}")
        self.running[future] = part

    def _collect(self) -> None:
        try:
            finished = wait(list(self.running), timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
        except TimeoutError:
            return
        for future in finished.done:
            part = self.running.pop(future)
            self.fractions.pop(part, None)
            try:
                self.done[part] = future.result()
            except (StoreFullError, CorruptPartError):
                raise
            except (StorageError, KilledWorker, CancelledError, RuntimeError, ValueError) as error:
                self.failed[part] = f"{type(error).__name__}: {error}"
            future.release()

    def _report(self) -> None:
        sampling = self.plan.sampling
        # Of parts that run: a worker's last message may come after its receipt.
        started = sum(self.fractions.get(part, 0.0) for part in self.running.values())
        n_done = sum(part < sampling.n_parts for part in self.done)
        self.on_progress((n_done + started) * sampling.runs_per_part, sampling.n_runs)


def columns_of(results: Sequence[RunResult]) -> dict[str, npt.NDArray[Any]]:
    """The columns of a part, from its runs' results in order."""
    n_targets = [len(r.targets) for r in results]
    n_pairs = [len(r.pairs) for r in results]
    first_target = np.cumsum([0, *n_targets[:-1]])
    rows = np.arange(len(results))

    def joined(tensors: list[torch.Tensor]) -> npt.NDArray[Any]:
        return np.asarray(torch.cat(tensors).numpy())

    pairs = [r.pairs for r in results]
    columns: dict[str, npt.NDArray[Any]] = {
        "runs/run": np.array([r.spec.run for r in results], np.int64),
        "runs/outcome": np.array([OUTCOMES.index(r.outcome) for r in results], np.uint8),
        "runs/mean_image": joined([r.mean_image[None] for r in results]),
        "targets/image": joined([r.targets for r in results]),
        "targets/image_id": np.concatenate([np.array(r.spec.image_ids, np.int64) for r in results]),
        "targets/label": np.concatenate([np.array(r.spec.labels, np.int16) for r in results]),
        "targets/run_row": np.repeat(rows, n_targets).astype(np.int32),
        "targets/augment": joined([r.augment for r in results]),
        "pairs/reconstruction": joined([p.reconstruction for p in pairs]),
        "pairs/target_row": (
            joined([p.target_row for p in pairs]) + np.repeat(first_target, n_pairs)
        ).astype(np.int32),
        "pairs/run_row": np.repeat(rows, n_pairs).astype(np.int32),
        "pairs/candidate": joined([p.candidate for p in pairs]).astype(np.int32),
        "pairs/iteration": joined([p.iteration for p in pairs]).astype(np.int32),
        "pairs/ssim_best": joined([p.ssim_best for p in pairs]),
        "pairs/ssim_second": joined([p.ssim_second for p in pairs]),
        "pairs/confident": joined([p.confident for p in pairs]),
    }
    for name in STATS:
        columns[f"runs/{name}"] = np.array([r.stats[name] for r in results], np.float32)
    return columns


def batch_of(specs: Sequence[RunSpec], images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The images (r, n, 3, h, w) of equally long runs, from the source's images (n, 3, h, w)."""
    return np.stack([images[list(spec.image_ids)] for spec in specs])


def device_name(device: str) -> str:
    """`cpu`, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


@contextmanager
def _cpu_threads(n_threads: int) -> Iterator[None]:
    """Exactly `n_threads` for torch's CPU kernels, on which the order of their sums depends."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _worker_progress(part: int) -> Progress:
    """Sends the part's progress to the coordinator; silent outside a worker."""
    try:
        worker = get_worker()
    except ValueError:
        return lambda _fraction: None
    return lambda fraction: worker.log_event(PROGRESS_TOPIC, {"part": part, "fraction": fraction})
