"""What needs no Slurm of the Slurm benchmark: whom a node takes along, what a log shows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.slurm.cluster import SlurmCluster


@contextmanager
def process_of(cluster: SlurmCluster, node: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the environment that slurmd gives to a job."""
    process = subprocess.Popen(
        ["sleep", "60"], env={**cluster.environment, "SLURMD_NODENAME": node}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_processes_of_a_node_are_those_of_its_jobs_in_this_cluster(tmp_path: Path) -> None:
    cluster, other = SlurmCluster(tmp_path / "a"), SlurmCluster(tmp_path / "b")
    with (
        process_of(cluster, "node1") as mine,
        process_of(cluster, "node2"),
        process_of(other, "node1"),
    ):
        assert [process.pid for process in cluster._job_processes("node1")] == [mine.pid]


def test_what_cannot_be_done_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SlurmCluster(tmp_path)
    cluster._configure(2, 1000)
    with pytest.raises(ValueError, match="no node 'node9' is running; there are node1, node2"):
        cluster.kill_node("node9")
    with pytest.raises(ValueError, match="no node 'node1' is running"):
        cluster.kill_node("node1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"munged, .*benchmarks\.slurm\.cluster"):
        cluster.start()


def test_a_pid_file_that_another_process_has_inherited_is_no_daemon(tmp_path: Path) -> None:
    pid = tmp_path / "slurmd.pid"
    pid.write_text(f"{os.getpid()}\n")
    assert SlurmCluster._pid_of(pid) is None
    assert SlurmCluster._pid_of(tmp_path / "none.pid") is None
