"""Benchmarks of whole campaigns, at their smallest; of Slurm what needs none."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.campaign.machinery import run_here
from benchmarks.campaign.storm import KINDS, Kind, Size, measure
from benchmarks.coverage import real
from benchmarks.record import in_new_process
from benchmarks.slurm.cluster import SlurmCluster


@pytest.mark.slow
def test_a_campaign_in_a_process_of_its_own_says_what_it_took(tmp_path: Path) -> None:
    facts = in_new_process(run_here, tmp_path, 40, 1, 40)
    assert facts["n_runs"] == 40
    assert facts["n_parts"] == 20
    assert 0 < facts["first_half_s"] < facts["seconds"]
    assert 0 < facts["before_gib"] <= facts["halfway_gib"] <= facts["peak_gib"] < 2
    assert len(facts["content_hash"]) == 64


TINY = Size(n_runs=24, runs_per_part=2, n_kills=2, workers=(2,), samplers=("adaptive",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "n_kills"), [(KINDS, 2), (("group",), 2), (("server",), 1)], ids=str
)
def test_a_killed_campaign_ends_as_one_that_nobody_disturbed(
    tmp_path: Path, kinds: tuple[Kind, ...], n_kills: int
) -> None:
    lines = list(measure(replace(TINY, kinds=kinds, n_kills=n_kills), tmp_path, seed=3))
    (survived,) = [line for line in lines if "kills survived" in line.case]
    assert survived.value == n_kills
    assert (tmp_path / "adaptive-2" / "pairs" / "receipts" / "part-000011.json").exists()


@pytest.mark.slow
def test_the_command_runs_every_sampler_and_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--workers", "1", "--folder", str(tmp_path / "runs")]
    real.main([*words, "--json", str(tmp_path / "one.json"), "--plot", str(tmp_path / "plot.png")])
    first = [json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()]
    receipts = sorted(tmp_path.glob("runs/*/receipts/*.json"))
    written = [path.stat().st_mtime_ns for path in receipts]
    assert len(receipts) == 3 * 8
    real.main(words)
    assert [json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()] == first
    assert [path.stat().st_mtime_ns for path in receipts] == written


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


def test_a_pid_file_that_another_process_has_inherited_is_no_daemon(tmp_path: Path) -> None:
    pid = tmp_path / "slurmd.pid"
    pid.write_text(f"{os.getpid()}\n")
    assert SlurmCluster._pid_of(pid) is None
    assert SlurmCluster._pid_of(tmp_path / "none.pid") is None
