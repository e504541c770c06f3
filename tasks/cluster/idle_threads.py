"""Let the threads of OpenMP and OpenBLAS sleep while they wait, so that other programs can run.

After every parallel loop these threads spin until the next one comes. That saves microseconds on a
machine that has nothing else to do. Beside other programs it keeps the cores from the very thread
that is waited for: a training that made thirty steps a second on one thread made less than one on
two. The libraries read the variables when they are loaded, so they are set before torch and numpy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Of any OpenMP, and of LLVM's and Intel's, which otherwise spin for 200 milliseconds."""
OPENMP_CHOICES = (*OPENMP, "GOMP_SPINCOUNT", "KMP_LIBRARY")
"""Whoever sets one of these has decided how OpenMP waits."""
OPENBLAS = {"OPENBLAS_THREAD_TIMEOUT": "4"}
"""Spin for 2^4 clock ticks, the least there is, not 2^26; numpy and scipy have OpenBLAS."""


def waiting_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that is started from this environment; the user's stay."""
    chosen = {n: environment[n] for n in (*OPENMP_CHOICES, *OPENBLAS) if n in environment}
    is_decided = any(name in chosen for name in OPENMP_CHOICES)
    return ({} if is_decided else OPENMP) | OPENBLAS | chosen


def let_threads_sleep() -> None:
    """Set the variables in this process, and so in those that it starts.

    A library that is loaded already does not notice: in a notebook that imports torch first only
    the workers' threads sleep.
    """
    os.environ.update(waiting_settings(os.environ))
