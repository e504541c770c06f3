"""Costs of a study, part by part, before anything is run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

TIMED_S = 0.2
"""Seconds that are timed of a training or an attack, at least."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """An estimate of a part: counts and seconds of work by their titles; memory of a worker, None
    where it is not known, and space in the store."""

    name: str
    counts: dict[str, int]
    seconds_of: dict[str, float]
    disk_bytes: int
    memory_bytes: int | None = None

    @property
    def seconds(self) -> float:
        return sum(self.seconds_of.values())


def seconds_of(work: Callable[[], object], *, times: int = 1) -> float:
    """Seconds of some work on this machine or its GPU; of several times the fastest."""
    spent = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - started)
    return min(spent)


def in_full(work: Callable[[int], object], n: int) -> float:
    """Seconds of n steps of some work, by a line through two shorter ones."""
    work(1)  # whatever is done for the first time takes longer
    n_few = n_more = min(n, 2)
    few_s = more_s = seconds_of(partial(work, n_few))
    while n_more < n and more_s - few_s < TIMED_S:
        n_more = min(n, 4 * n_more)
        more_s = seconds_of(partial(work, n_more))
    step_s = max(0.0, more_s - few_s) / max(1, n_more - n_few)
    return more_s + (n - n_more) * step_s
