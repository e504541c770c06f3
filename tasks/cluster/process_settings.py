"""Settings of a process before its libraries are loaded: how threads wait, and freed memory.

After every parallel loop the threads of OpenMP and OpenBLAS spin until the next one comes. That
saves microseconds on a machine that has nothing else to do. Beside other programs it keeps the
cores from the very thread that is waited for: a training that made thirty steps a second on one
thread made less than one on two. The libraries read the variables when they are loaded, so they are
set before torch and numpy.

An iteration frees large tensors and allocates the same again. By default glibc's malloc returns
such blocks to the kernel, which has to clear their pages again and again; that took half of the
time of an attack on a CPU. glibc alone has these settings; elsewhere nothing is set.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Of any OpenMP, and of LLVM's and Intel's, which otherwise spin for 200 milliseconds."""
OPENMP_CHOICES = (*OPENMP, "GOMP_SPINCOUNT", "KMP_LIBRARY")
"""Whoever sets one of these has decided how OpenMP waits."""
OPENBLAS = {"OPENBLAS_THREAD_TIMEOUT": "4"}
"""Spin for 2^4 clock ticks, the least there is, not 2^26; numpy and scipy have OpenBLAS."""
KEPT_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": 1 << 30,
    "MALLOC_MMAP_THRESHOLD_": 1 << 30,
    "MALLOC_TOP_PAD_": 1 << 26,
}
"""For the environment of a process that is started; in bytes."""
_PARAMETERS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}
"""mallopt's numbers for them, from malloc.h."""
OLDER_LIMIT = 1 << 25
"""The largest threshold for mmap that older versions of glibc take (mallopt(3)); they refuse more,
and would then map every block above 128 KiB anew once another of the settings is there."""


def waiting_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that is started from this environment; the user's stay."""
    chosen = {n: environment[n] for n in (*OPENMP_CHOICES, *OPENBLAS) if n in environment}
    is_decided = any(name in chosen for name in OPENMP_CHOICES)
    return ({} if is_decided else OPENMP) | OPENBLAS | chosen


def keep_freed_memory() -> dict[str, int]:
    """Set `KEPT_MEMORY` in this process; return what was set, which may be nothing.

    Variables that are in the environment already stay as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return {}
    mallopt = ctypes.CDLL(None).mallopt
    kept = {}
    for name in KEPT_MEMORY.keys() - os.environ.keys():
        for value in (KEPT_MEMORY[name], OLDER_LIMIT):
            if mallopt(_PARAMETERS[name], value) == 1:
                kept[name] = value
                break
    return kept
