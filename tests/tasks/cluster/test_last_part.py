"""A worker whose batch job ends soon: it finishes its part, takes no other, and is gone."""

from __future__ import annotations

import os
import time

from distributed import Client, LocalCluster, Worker, get_worker

from tasks.cluster.last_part import VARIABLE, dask_setup

PATIENCE_S = 60.0


def slow_part(seconds: float) -> str:
    """Takes its time; the address of the worker that finished it."""
    time.sleep(seconds)
    return str(get_worker().address)


async def its_job_ends_soon(dask_worker: Worker) -> None:
    """What Dask does when a worker starts with this preload, a second before the time."""
    os.environ[VARIABLE] = str(time.time() + 1.0)
    await dask_setup(dask_worker)


def test_a_worker_whose_job_ends_soon_finishes_its_part_and_takes_no_other() -> None:
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        leaving, staying = client.scheduler_info()["workers"]
        running = client.submit(slow_part, 4.0, pure=False, workers=leaving)
        client.run(its_job_ends_soon, workers=[leaving])
        time.sleep(2.0)
        later = [client.submit(slow_part, 0.1, pure=False) for _ in range(4)]
        assert client.gather(later) == [staying] * 4
        assert leaving in client.scheduler_info()["workers"]
        assert running.result(timeout=PATIENCE_S) == leaving
        running.release()
        until = time.monotonic() + PATIENCE_S
        while set(client.scheduler_info()["workers"]) != {staying}:
            assert time.monotonic() < until, "it stays although its part is done and fetched"
            time.sleep(0.1)


def test_a_worker_without_the_variable_stays() -> None:
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.run(dask_setup_without_variable)
        time.sleep(1.0)
        assert client.submit(sum, [1, 2]).result(timeout=PATIENCE_S) == 3


async def dask_setup_without_variable(dask_worker: Worker) -> None:
    """As on a machine where no batch system set a time."""
    os.environ.pop(VARIABLE, None)
    await dask_setup(dask_worker)
