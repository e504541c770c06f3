"""A storm of kills over a store: what it is, and how to run one from outside.

Writers and a reader that are killed at random moments and replaced; see `storm_coordinator` for how
and `storm_processes` for what they do. Runs in a process of its own, because it forks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

N_WRITERS = 4
READER = N_WRITERS
STAGES = ("reading", "encoding", "writing", "syncing", "written", "publishing", "linked", "done")
"""What a writer does, in order: looks which parts are missing; compresses; writes the arrays; syncs
them; all of them are there; writes the receipt under a temporary name or sends it; its name is
there (local); the receipt is published."""


@dataclass(frozen=True, kw_only=True)
class Storm:
    """One storm: "spread" gives the writers different parts, "race" two writers every part.

    `expected` is a JSON file with what an undisturbed campaign gives; it is made if it is absent.
    """

    variant: str
    location: str
    expected: str
    scratch: str
    n_parts: int
    n_kills: int
    seed: int = 0
    mean_s: float = 0.0
    """Mean seconds between two kills; 0: a quarter of what a writer needs for a part."""


def run_apart(storm: Storm, environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """The report of `storm`, see `storm_coordinator.run`; none of its processes is left after it.

    Raises:
        RuntimeError: it broke off. Faults of the store are in the report's `faults` instead.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.storm_coordinator", json.dumps(asdict(storm))],
        cwd=Path(__file__).parents[2],
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, _err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        faults = Path(storm.scratch, "faults.txt")
        raise RuntimeError(
            f"the storm ended with code {process.returncode}: "
            f"{faults.read_text() if faults.exists() else ''}"
        )
    report: dict[str, Any] = json.loads(out)
    return report
