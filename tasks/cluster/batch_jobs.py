"""Batch jobs that are replaced when they end, and workers that end before their job does.

dask-jobqueue does not submit a job again that died before its worker had come (a dead node, an
error in the prologue, a cancelled job). This looks at the queue, too, and submits such jobs again
after a growing delay, so that a mistake in the settings does not flood it.

Batch systems kill a job at its walltime. A worker that loads this module (`dask worker --preload
tasks.cluster.batch_jobs`) takes no new part after the time in its environment variable
`PALIMPSEST_LAST_PART_AT` (seconds since 1970), finishes the one that it has, and ends. Dask's own
`--lifetime` throws that part away.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from distributed import Worker
from distributed.deploy.adaptive import Adaptive

LOOK_S = 5.0
QUEUE_S = 30.0
"""Between looks at Slurm's queue, which has other users, too."""
MAX_DELAY_S = 600.0
VARIABLE = "PALIMPSEST_LAST_PART_AT"
POLL_S = 0.5
FETCH_S = 60.0
"""How long the last receipt waits to be fetched; it is in the store, so its loss costs nothing."""

log = logging.getLogger("palimpsest")


class KeepJobs(Adaptive):
    """For `SLURMCluster.adapt(Adaptive=KeepJobs, ...)`: as many jobs as were asked for, always."""

    def __init__(self, cluster: Any, *, hint: str = "", **arguments: Any) -> None:
        super().__init__(cluster, interval=LOOK_S, **arguments)
        self.jobs: dict[str, Any] = cluster.workers
        self.hint = hint
        self.n_without_worker = 0
        self._next_look = 0.0
        self._submitted: dict[str, str] = {}
        self._with_worker: set[str] = set()

    async def adapt(self) -> None:
        """Forget dead jobs; Dask then submits what is missing."""
        here = self.observed
        self._with_worker.update(job.job_id for name, job in self.jobs.items() if name in here)
        now = time.monotonic()
        if now >= self._next_look and not self._adapting:
            self._next_look = now + QUEUE_S
            dead = await self._dead_jobs()
            barren = [job for job in dead.values() if job.job_id not in self._with_worker]
            if barren:
                self._next_look = now + min(MAX_DELAY_S, QUEUE_S * 2**self.n_without_worker)
                self.n_without_worker += 1
                ids = ", ".join(sorted(job.job_id or "not submitted" for job in barren))
                log.warning(
                    f"jobs ended before their worker came, {self.n_without_worker} times in a row "
                    f"(now {ids}){self.hint}"
                )
            elif here:
                self.n_without_worker = 0
            for name, job in dead.items():
                self.jobs.pop(name, None)
                await job.close()
        await super().adapt()
        for name, job in self.jobs.items():
            before = self._submitted.get(name)
            if job.job_id is not None and job.job_id != before:
                if before is not None:
                    log.warning("job %s is gone; job %s is in its place", before, job.job_id)
                self._submitted[name] = job.job_id

    async def _dead_jobs(self) -> dict[str, Any]:
        """The jobs that have no worker and will not bring one: they are not in the queue."""
        expected = {name: job for name, job in self.jobs.items() if name not in self.observed}
        queued = await jobs_in_queue() if expected else set()
        if queued is None:
            return {}
        return {name: job for name, job in expected.items() if job.job_id not in queued}


async def jobs_in_queue() -> set[str] | None:
    """The ids of this user's jobs that wait or run; None if Slurm does not answer now."""
    process = await asyncio.create_subprocess_exec(
        "squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%A %t",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    printed, _ = await process.communicate()
    if process.returncode:
        return None
    rows = (line.split() for line in printed.decode().splitlines())
    return {job for job, state in rows if state != "CG"}


async def dask_setup(worker: Worker) -> None:
    """Called by Dask when the worker starts; does nothing without the variable."""
    at = os.environ.get(VARIABLE)
    if at is not None:
        worker.loop.call_later(max(0.0, float(at) - time.time()), end_after_part, worker)


async def end_after_part(worker: Worker) -> None:
    """Take no new part, wait until the running one is done and fetched, and end."""
    address = worker.address
    # Parts that wait here are started elsewhere once the scheduler has let this worker go. It does
    # not while it finds no other place for a receipt that has not been fetched.
    while address not in await worker.scheduler.retire_workers(
        workers=[address], close_workers=False, remove=False
    ):
        await asyncio.sleep(POLL_S)
    while worker.state.executing:
        await asyncio.sleep(POLL_S)
    until = time.monotonic() + FETCH_S
    while worker.data and time.monotonic() < until:
        await asyncio.sleep(POLL_S)
    await worker.scheduler.retire_workers(workers=[address], close_workers=False, remove=True)
    await worker.close(reason="its batch job ends soon")


def check_script(script: str) -> None:
    """Ask Slurm whether it would take a job, without submitting it; ValueError with Slurm's own
    words if not, or if there is none here."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        try:
            subprocess.run(
                ["sbatch", "--test-only", Path(file.name)],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise ValueError(
                "there is no sbatch on this machine; run the command where jobs are submitted, "
                "or use --cluster local"
            ) from error
        except subprocess.CalledProcessError as error:
            said = " ".join(error.stderr.split())
            raise ValueError(
                f"Slurm refuses the job ({said}); change the site's settings: queue, account, "
                "cores, memory, walltime, directives"
            ) from error
