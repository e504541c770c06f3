"""Dask workers for the length of a flow: started here, or an existing scheduler's.

One process per worker and one part at a time per process; on a machine with GPUs one worker per
GPU. Everything listens on loopback only, unless an address of a running scheduler is given.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import dask.config
import torch
from distributed import Client, LocalCluster

Device = Literal["auto", "cpu", "cuda"]


KEEP_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": 1 << 30,
    "MALLOC_MMAP_THRESHOLD_": 1 << 30,
    "MALLOC_TOP_PAD_": 1 << 26,
}
"""Dask makes its workers' malloc return every freed block to the system; the temporaries of each
iteration are then mapped and cleared anew, which doubled the time of a part on a CPU. Such settings
only count in the environment that a process starts with."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Where parts are computed; no setting here changes what is computed.

    `cluster`: `local`, or the address `tcp://host:port` of a Dask scheduler. `n_workers`: 0 means
    one per GPU, else one per core.
    """

    cluster: str = "local"
    n_workers: int = 0
    device: Device = "auto"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.cluster != "local" and "://" not in self.cluster:
            raise ValueError(
                f"cluster={self.cluster!r} is neither 'local' nor an address like "
                "tcp://127.0.0.1:8786"
            )
        if self.n_workers < 0:
            raise ValueError(f"n_workers={self.n_workers} must be 0 (one per core) or more")


def resolve_device(device: Device) -> str:
    """`cuda` or `cpu`; ValueError if CUDA is asked for and not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' but torch sees no CUDA device; use --device cpu or auto")
    return device


@contextmanager
def dask_client(workers: Workers, *, threads: int) -> Iterator[Client]:
    """A client of `workers`, each with `threads` CPU threads; a local cluster ends with it."""
    if workers.cluster != "local":
        with Client(workers.cluster, set_as_default=False) as client:
            yield client
        return
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **KEEP_FREED_MEMORY}
    with (
        dask.config.set({"distributed.nanny.pre-spawn-environ": environment}),
        LocalCluster(
            n_workers=workers.n_workers or _default_workers(workers.device, threads),
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def usable_cores() -> int:
    """The cores this process may use, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _default_workers(device: Device, threads: int) -> int:
    if resolve_device(device) == "cuda":
        return torch.cuda.device_count()
    return max(1, usable_cores() // threads)
