"""Jobs that die are replaced, whether their worker had come or not; a worker whose job ends soon
finishes its part, takes no other, and is gone.

The queue is a folder of job ids and a `squeue` that lists it; the jobs, the scheduler and Dask's
adapting are real. `benchmarks.slurm.campaign` does the same with a real Slurm.
"""

from __future__ import annotations

import asyncio
import getpass
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dask.config
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker, get_worker
from distributed.deploy.spec import ProcessInterface, SpecCluster

from tasks.cluster import batch_jobs
from tasks.cluster.batch_jobs import VARIABLE, KeepJobs, check_script, dask_setup, jobs_in_queue

PATIENCE_S = 60.0


class Job(ProcessInterface):
    """As dask-jobqueue's: submitted and forgotten. The first ones of a `doomed` queue vanish."""

    def __init__(self, scheduler: str, name: str, queue: Path, doomed: int) -> None:
        super().__init__()
        self.address_of_scheduler, self.name = scheduler, name
        self.queue, self.doomed = queue, doomed
        self.job_id: str | None = None
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        number = len(list(self.queue.glob("job-*"))) + 1
        (self.queue / f"job-{number}").touch()
        self.job_id = str(number)
        if number > self.doomed:
            (self.queue / self.job_id).touch()
            words = ["--name", self.name, "--nthreads", "1"]
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "distributed.cli.dask_worker",
                    self.address_of_scheduler,
                    *words,
                ],
                stderr=subprocess.DEVNULL,
            )
        await super().start()

    async def close(self) -> None:
        (self.queue / str(self.job_id)).unlink(missing_ok=True)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        await super().close()


def executable(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `squeue` lists: every file that is a number is a job that runs."""
    jobs = tmp_path / "queue"
    jobs.mkdir()
    executable(
        tmp_path,
        "squeue",
        f'test "$2" = "--user={getpass.getuser()}" || exit 1\n'
        f'cd {jobs} && for job in [0-9]*; do test -f "$job" && echo "$job R"; done; exit 0',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return jobs


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batch_jobs, "LOOK_S", 0.2)
    monkeypatch.setattr(batch_jobs, "QUEUE_S", 0.5)
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "0.5s"}):
        yield


class JobCluster(SpecCluster):
    """As dask-jobqueue's: its workers have names, not numbers."""

    def _new_worker_name(self, worker_number: int) -> str:
        return f"job-{worker_number}"


def cluster_of(queue: Path, *, doomed: int) -> JobCluster:
    scheduler = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    return JobCluster(
        scheduler={"cls": Scheduler, "options": scheduler},
        worker={"cls": Job, "options": {"queue": queue, "doomed": doomed}},
    )


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until
        time.sleep(0.1)


def workers(cluster: JobCluster) -> int:
    return len(cluster.scheduler_info["workers"])


@pytest.mark.usefixtures("quick")
def test_jobs_are_replaced_that_die_before_or_after_their_worker_came(
    queue: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster_of(queue, doomed=2) as cluster:
        cluster.adapt(Adaptive=KeepJobs, minimum=1, maximum=1, hint="; see FILE")
        wait_for(lambda: workers(cluster) == 1)
        assert {path.name for path in queue.glob("[0-9]*")} == {"3"}
        job = next(iter(cluster.workers.values()))
        job.process.kill()
        wait_for(lambda: (queue / "4").exists() and workers(cluster) == 1)
    said = [record.getMessage() for record in caplog.records if record.name == "palimpsest"]
    assert said == [
        "jobs ended before their worker came, 1 times in a row (now 1); see FILE",
        "job 1 is gone; job 2 is in its place",
        "jobs ended before their worker came, 2 times in a row (now 2); see FILE",
        "job 2 is gone; job 3 is in its place",
        "job 3 is gone; job 4 is in its place",
    ]


def test_a_queue_that_does_not_answer_is_no_empty_one(
    queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (queue / "7").touch()
    assert asyncio.run(jobs_in_queue()) == {"7"}
    (queue / "7").unlink()
    assert asyncio.run(jobs_in_queue()) == set()
    executable(queue, "squeue", "exit 1")
    monkeypatch.setenv("PATH", f"{queue}:/usr/bin:/bin")
    assert asyncio.run(jobs_in_queue()) is None


def test_what_slurm_says_of_a_job_that_it_refuses_is_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no sbatch on this machine"):
        check_script("#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    executable(
        tmp_path,
        "sbatch",
        'test "$1" = --test-only || exit 2\n'
        'grep -q "SBATCH -p cpu" "$2" || { echo "invalid partition" >&2; exit 1; }',
    )
    check_script("#!/bin/sh\n#SBATCH -p cpu\n")
    with pytest.raises(ValueError, match=r"refuses the job \(invalid partition\)"):
        check_script("#!/bin/sh\n#SBATCH -p gpu\n")


def slow_part(seconds: float) -> str:
    """Takes its time; the address of the worker that finished it."""
    time.sleep(seconds)
    return str(get_worker().address)


async def preload(dask_worker: Worker) -> None:
    """What Dask does when a worker starts with this preload."""
    await dask_setup(dask_worker)


def threads_of(n_workers: int) -> LocalCluster:
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
    with threads_of(2) as cluster, Client(cluster, set_as_default=False) as client:
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
    with threads_of(1) as cluster, Client(cluster, set_as_default=False) as client:
        client.run(preload)
        time.sleep(1.0)
        assert client.submit(sum, [1, 2]).result(timeout=PATIENCE_S) == 3
