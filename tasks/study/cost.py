"""Costs of a study, part by part, before anything is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


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


def total(costs: Sequence[Cost]) -> dict[str, Any]:
    """Sums over parts of seconds and disk; the largest memory."""
    return {
        "seconds": sum(cost.seconds for cost in costs),
        "memory_bytes": max(cost.memory_bytes or 0 for cost in costs),
        "disk_bytes": sum(cost.disk_bytes for cost in costs),
    }


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
