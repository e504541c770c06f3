"""A worker that ends before its batch job does, and finishes the part that it has begun.

Batch systems kill a job at its walltime. A worker that loads this module (`dask worker --preload
tasks.cluster.last_part`) takes no new part after the time in its environment variable
`PALIMPSEST_LAST_PART_AT` (seconds since 1970), finishes the one that it has, and ends. Dask's own
`--lifetime` throws that part away.
"""

from __future__ import annotations

import asyncio
import os
import time

from distributed import Worker

VARIABLE = "PALIMPSEST_LAST_PART_AT"
POLL_S = 0.5
FETCH_S = 60.0
"""How long the last receipt waits to be fetched; it is in the store, so its loss costs nothing."""


async def dask_setup(worker: Worker) -> None:
    """Called by Dask when the worker starts; does nothing without the variable."""
    at = os.environ.get(VARIABLE)
    if at is not None:
        worker.loop.call_later(max(0.0, float(at) - time.time()), end_after_part, worker)


async def end_after_part(worker: Worker) -> None:
    """Takes no new part, waits for the one that runs to be done and fetched, and ends."""
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
