"""A worker whose batch job ends soon: it finishes its part, takes no other, and is gone."""

from __future__ import annotations

import time

import pytest
from distributed import Client, LocalCluster, Worker, get_worker

from tasks.cluster.batch_jobs import VARIABLE, dask_setup

PATIENCE_S = 60.0


def slow_part(seconds: float) -> str:
    """Takes its time; the address of the worker that finished it."""
    time.sleep(seconds)
    return str(get_worker().address)


async def preload(dask_worker: Worker) -> None:
    """What Dask does when a worker starts with this preload."""
    await dask_setup(dask_worker)


def cluster_of(n_workers: int) -> LocalCluster:
    """Of threads: they go as processes do, and need not start."""
    return LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
    )


def test_a_worker_whose_job_ends_soon_finishes_its_part_and_takes_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cluster_of(2) as cluster, Client(cluster, set_as_default=False) as client:
        leaving, staying = client.scheduler_info()["workers"]
        running = client.submit(slow_part, 4.0, pure=False, workers=leaving)
        monkeypatch.setenv(VARIABLE, str(time.time() + 1.0))
        client.run(preload, workers=[leaving])
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
    with cluster_of(1) as cluster, Client(cluster, set_as_default=False) as client:
        client.run(preload)
        time.sleep(1.0)
        assert client.submit(sum, [1, 2]).result(timeout=PATIENCE_S) == 3
