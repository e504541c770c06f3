"""Freed blocks stay mapped: the kernel clears the memory of many iterations once."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tasks.cluster import freed_memory
from tasks.cluster.freed_memory import SETTINGS, keep_freed_memory

PAGES = """
import resource, sys
from tasks.cluster.freed_memory import keep_freed_memory
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
    for name in SETTINGS:
        monkeypatch.setenv(name, "131072")
    assert keep_freed_memory() == {}


def test_an_older_glibc_gets_the_most_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def mallopt(parameter: int, value: int) -> int:
        asked.append((parameter, value))
        return int(parameter != -3 or value <= 32 << 20)

    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(freed_memory.platform, "libc_ver", lambda: ("glibc", "2.28"))
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert keep_freed_memory() == SETTINGS | {"MALLOC_MMAP_THRESHOLD_": 32 << 20}
    assert sorted(asked) == [(-3, 32 << 20), (-3, 1 << 30), (-2, 1 << 26), (-1, 1 << 30)]


def test_elsewhere_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: pytest.fail("asked for malloc"))
    assert keep_freed_memory() == {}
