"""Threads that wait use no processor, in this process and in those that it starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tasks.cluster.idle_threads import OPENBLAS, OPENMP, waiting_settings
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


@pytest.mark.parametrize("module", ["palimpsest", "flows.cli.console", "benchmarks.record"])
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
