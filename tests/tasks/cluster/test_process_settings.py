"""Threads that wait use no processor, and freed blocks stay mapped, here and in workers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tasks.cluster import process_settings
from tasks.cluster.process_settings import (
    KEPT_MEMORY,
    OPENBLAS,
    OPENMP,
    keep_freed_memory,
    waiting_settings,
)
from tasks.cluster.workers import worker_environment

SPINNING = """
import {module}
import time, torch
torch.set_num_threads(2)
x = torch.rand(1 << 20)
def busy():
    start = time.process_time()
    for _ in range(60):
        x.add_(1)
        time.sleep(.005)
    return time.process_time() - start
busy()
print(busy(), torch.get_num_threads())
"""


def seconds_of_processor(module: str, **chosen: str) -> float:
    """Of sixty parallel loops with pauses of 5 ms between them."""
    environment = {k: v for k, v in os.environ.items() if k not in (*OPENMP, *OPENBLAS)}
    finished = subprocess.run(
        [sys.executable, "-c", SPINNING.format(module=module)],
        env=environment | chosen | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, n_threads = finished.stdout.split()
    assert n_threads == "2"
    return float(seconds)


@pytest.mark.parametrize("module", ["palimpsest", "flows.cli.options", "benchmarks.record"])
def test_threads_sleep_between_loops(module: str) -> None:
    assert seconds_of_processor(module) < 0.12


def test_who_wants_them_to_spin_has_them_spin() -> None:
    spinning = seconds_of_processor("palimpsest", OMP_WAIT_POLICY="ACTIVE")
    assert spinning > 0.15


def test_what_the_user_set_stays() -> None:
    assert waiting_settings({}) == OPENMP | OPENBLAS
    assert waiting_settings({"GOMP_SPINCOUNT": "100"}) == {"GOMP_SPINCOUNT": "100"} | OPENBLAS
    own = {"OPENBLAS_THREAD_TIMEOUT": "10", "KMP_BLOCKTIME": "1", "PATH": "/"}
    assert waiting_settings(own) == {"OPENBLAS_THREAD_TIMEOUT": "10", "KMP_BLOCKTIME": "1"}


def test_workers_elsewhere_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OPENMP, *OPENBLAS):
        monkeypatch.delenv(name, raising=False)
    told = worker_environment(3)
    assert OPENMP.items() | OPENBLAS.items() <= told.items()
    assert {told[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {3}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert worker_environment(3)["OMP_WAIT_POLICY"] == "ACTIVE"


PAGES = """
import resource, sys
from tasks.cluster.process_settings import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
import numpy as np
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def blocks(): return [np.ones(3 << 20) for _ in range(8)]
blocks()
before = faults()
for _ in range(5):
    blocks()
print(faults() - before)
"""
"""Page faults of five times eight blocks of 24 MiB: below any glibc's limit for a block,
and together more than the top's padding, which serves a single block whatever the threshold is."""
GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")


def page_faults(*, keep: bool) -> int:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    finished = subprocess.run(
        [sys.executable, "-c", PAGES, "keep" if keep else "default"],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(finished.stdout)


@GLIBC
def test_blocks_are_mapped_once() -> None:
    default, kept = page_faults(keep=False), page_faults(keep=True)
    assert default > 100  # huge pages or small, each block anew
    assert kept < default / 4


@GLIBC
def test_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEPT_MEMORY:
        monkeypatch.setenv(name, "131072")
    assert keep_freed_memory() == {}


def test_an_older_glibc_gets_the_most_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def mallopt(parameter: int, value: int) -> int:
        asked.append((parameter, value))
        return int(parameter != -3 or value <= 32 << 20)

    for name in KEPT_MEMORY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process_settings.platform, "libc_ver", lambda: ("glibc", "2.28"))
    monkeypatch.setattr(process_settings.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert keep_freed_memory() == KEPT_MEMORY | {"MALLOC_MMAP_THRESHOLD_": 32 << 20}
    assert sorted(asked) == [(-3, 32 << 20), (-3, 1 << 30), (-2, 1 << 26), (-1, 1 << 30)]


def test_elsewhere_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_settings.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(process_settings.ctypes, "CDLL", lambda _: pytest.fail("asked for malloc"))
    assert keep_freed_memory() == {}
