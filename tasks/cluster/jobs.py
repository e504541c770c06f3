"""Jobs on Dask workers, such as the parts of a campaign and the units of a study.

The client's side starts them by name and hears how far they are and how they ended; Dask runs a job
again whose worker died. The worker's side is what a job asks of the process that it runs in.
"""

from __future__ import annotations

import errno
import queue
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import dask.config
import torch
from distributed import Client, Future, KilledWorker, Worker, get_worker

from recon_core.types import Progress
from storage.errors import CorruptPartError, StorageError, StoreFullError, UnsettledError

TOPIC = "palimpsest-job"
REPORT_EVERY_SECONDS = 0.5
FETCH_SECONDS = 30.0
_GRAPH_WARNING = "distributed.admin.large-graph-warning-threshold"
_OF_A_JOB = (StorageError, RuntimeError, ValueError, MemoryError, ArithmeticError)
"""Errors that one job may have and another not; others are mistakes in the program."""


@dataclass
class Jobs:
    """The jobs that run, by name."""

    client: Client
    running: dict[Any, Future[Any]] = field(default_factory=dict)
    _happened: queue.SimpleQueue[tuple[Any, Any]] = field(default_factory=queue.SimpleQueue)

    @classmethod
    @contextmanager
    def on(cls, client: Client) -> Iterator[Jobs]:
        """Start with no job; those that still run at the end are cancelled."""
        jobs = cls(client)

        def report(event: Any) -> None:  # in the client's own thread
            jobs._happened.put((event[1]["job"], event[1]))

        client.subscribe_topic(TOPIC, report)
        try:
            # What a job works on, such as a part's images, makes it large; that is meant.
            with client.as_current(), dask.config.set({_GRAPH_WARNING: "1TB"}):
                yield jobs
        finally:
            client.unsubscribe_topic(TOPIC)
            for future in jobs.running.values():
                future.cancel(reason="nobody waits for it any more")

    def start(
        self, name: Any, work: Callable[..., Any], *given: Any, resources: dict[str, float]
    ) -> None:
        """Run `work(*given)` on a worker that has the resources."""
        key = f"{work.__name__}-{name}-{time.time_ns()}".replace(" ", "-")
        future = self.client.submit(work, *given, pure=False, key=key, resources=resources or None)
        self.running[name] = future
        self._watch(name, future)

    def happened(self, wait_s: float) -> Iterator[tuple[Any, Any]]:
        """Yield (name, event) since the last call, waiting for the first: reports, as dictionaries,
        and what jobs returned or raised. A job that ended is no longer in `running`."""
        try:
            name, what = self._happened.get(timeout=wait_s)
            while True:
                if isinstance(what, Future):
                    if self.running.get(name) is what:
                        outcome = _outcome_of(what)
                        if outcome is None:
                            self._watch(name, what)
                        else:
                            self.running.pop(name).release()
                            yield name, outcome
                elif name in self.running:  # a worker's last report may come after the end
                    yield name, what
                name, what = self._happened.get_nowait()
        except queue.Empty:
            return

    def _watch(self, name: Any, future: Future[Any]) -> None:
        future.add_done_callback(lambda ended: self._happened.put((name, ended)))


def _outcome_of(future: Future[Any]) -> Any:
    """Result or error of an ended future; None if Dask runs it again, as its worker has died."""
    try:
        if future.status == "error":
            return future.exception(timeout=FETCH_SECONDS)
        return future.result(timeout=FETCH_SECONDS)
    except (TimeoutError, CancelledError) as cancelled:
        return cancelled if future.cancelled() else None


def verdict(error: BaseException) -> Literal["retry", "killed", "failed", "end"]:
    """Consequence of an error for its part: see `tasks.campaign.generate`."""
    if isinstance(error, OSError):
        return "end" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "retry"
    if isinstance(error, KilledWorker):
        return "killed"
    if isinstance(error, CancelledError | UnsettledError) or type(error) is StorageError:
        return "retry"
    if isinstance(error, StoreFullError | CorruptPartError) or not isinstance(error, _OF_A_JOB):
        return "end"
    return "failed"


def raise_if_full(name: str, error: BaseException) -> None:
    """Raise StoreFullError, with the fix, if a job ended because its device is full."""
    if isinstance(error, StoreFullError) or (
        isinstance(error, OSError) and verdict(error) == "end"
    ):
        raise StoreFullError(
            f"no space left for {name} ({error}); make room and run the same command again"
        ) from error


def reason_of(error: BaseException) -> str:
    """The error in one line; with what to do, where a part is too large for its GPU."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{text.splitlines()[0]} The runs of a part do not fit into the GPU's memory at once: "
            "free it, or start a new store with a smaller --batch"
        )
    return text


def reporting(name: Any) -> Progress:
    """Report a job's progress to the client, at most twice a second; silent outside a worker."""
    worker, began = this_worker(), time.monotonic()
    reported = float("-inf")

    def report(fraction: float) -> None:
        nonlocal reported
        now = time.monotonic()
        if worker is not None and (now - reported >= REPORT_EVERY_SECONDS or fraction >= 1.0):
            reported = now
            about = {"job": name, "fraction": fraction, "seconds": now - began}
            worker.log_event(TOPIC, about)

    return report


def this_worker() -> Worker | None:
    """The worker that this code runs on, if any."""
    try:
        return get_worker()
    except ValueError:
        return None


def own_device(device: str, worker: Worker | None) -> str:
    """The GPU of this worker: one process per GPU, told apart by the local cluster's numbers.
    dask-cuda shows each process all of them, its own first."""
    is_told_apart = torch.cuda.device_count() > 1 and "dask_cuda" not in sys.modules
    if device != "cuda" or not is_told_apart or worker is None:
        return device
    number = re.search(r"\d+$", str(worker.name))
    index = int(number[0]) % torch.cuda.device_count() if number else 0
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def device_name(device: str) -> str:
    """`cpu`, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


@contextmanager
def cpu_threads(n_threads: int) -> Iterator[None]:
    """Use exactly `n_threads` in torch's CPU kernels, on which the order of their sums depends."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
