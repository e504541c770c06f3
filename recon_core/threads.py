"""Independent jobs side by side on the threads that torch was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def side_by_side(jobs: Sequence[Callable[[], Result]], device: torch.device) -> list[Result]:
    """The jobs' results, in order. On a CPU as many go at once as torch has threads, one on each.

    A job of many small products keeps a core busy by itself; two threads on every product spend
    much of their time waiting for each other. torch releases Python's lock inside its kernels. On
    a GPU, or with one thread or one job, the jobs go one after another with all threads.
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
