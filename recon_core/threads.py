"""Independent jobs side by side on the threads that torch was given, and how far they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, runtime_checkable

import torch

from recon_core.types import Progress

Result = TypeVar("Result")


@runtime_checkable
class AtOnce(Protocol):
    """Does jobs and gives their results, in order."""

    def __call__(
        self, jobs: Sequence[Callable[[], Result]], device: torch.device, /
    ) -> list[Result]: ...


def one_after_another(jobs: Sequence[Callable[[], Result]], _device: torch.device) -> list[Result]:
    """For jobs that change what is the whole process's: none may end before another."""
    return [job() for job in jobs]


def side_by_side(jobs: Sequence[Callable[[], Result]], device: torch.device) -> list[Result]:
    """The jobs' results, in order. On a CPU as many go at once as torch has threads, one on each.

    Two threads on every small product spend much of their time waiting for each other; torch
    releases Python's lock inside its kernels. On a GPU, or with one thread or one job, the jobs go
    one after another with all threads.
    """
    n_threads = torch.get_num_threads()
    if device.type != "cpu" or n_threads == 1 or len(jobs) == 1:
        return [job() for job in jobs]
    try:
        with ThreadPoolExecutor(
            min(n_threads, len(jobs)), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            return list(pool.map(lambda job: job(), jobs))
    finally:
        torch.set_num_threads(n_threads)  # the setting of torch's BLAS is the whole process's


def stack_size(device: torch.device, n_runs: int) -> int:
    return 1 if device.type == "cpu" else n_runs


class Shares:
    """Progress of jobs that go side by side, each with its share of the whole."""

    def __init__(self, progress: Progress, shares: Sequence[float]) -> None:
        self.progress, self.shares = progress, shares
        self.done = [0.0] * len(shares)
        self.lock = threading.Lock()

    def of(self, job: int) -> Progress:
        def report(fraction: float) -> None:
            with self.lock:
                self.done[job] = fraction
                whole = all(done == 1.0 for done in self.done)
                total = sum(d * share for d, share in zip(self.done, self.shares, strict=True))
                self.progress(1.0 if whole else total)

        return report


def share_of(progress: Progress, low: float, high: float) -> Progress:
    """A progress callback for the part of the work between two fractions."""
    return lambda fraction: progress(low + (high - low) * fraction)
