"""The chain on a GPU: time, failures and second calls; the schedule; the wheels; a rehearsal."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import chain, wheels
from benchmarks.gpu.chain import CommandError, Job, NoDeviceError, Stage, StoppedError, run_stages
from benchmarks.gpu.settings import (
    MOST_PARTS,
    OVERHEAD_S,
    PAPER,
    SMALL,
    UNKNOWN_PACE,
    Pace,
    schedule,
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folders = tmp_path / "work", tmp_path / "out"
    for folder in folders:
        folder.mkdir()
    return Job(*folders, device="cpu", data="photos", small=True)


class Clock:
    """A clock that stages move."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def stage(self, name: str, weight: float, takes: float, **named: Any) -> Stage:
        def run(_job: Job, seconds: float) -> dict[str, Any]:
            self.now += min(takes, seconds)
            if takes > seconds:
                raise StoppedError("time is up")
            return {"allowed": seconds}

        return Stage(name, weight, run, **named)


def allowed(job: Job) -> list[float]:
    return [result["numbers"]["allowed"] for result in job.record["stages"].values()]


def statuses(job: Job) -> dict[str, str]:
    return {name: result["status"] for name, result in job.record["stages"].items()}


def test_each_stage_has_its_share_of_the_time_that_is_left(job: Job) -> None:
    clock = Clock()
    stages = [clock.stage("a", 1, 40), clock.stage("b", 1, 40), clock.stage("c", 2, 40)]
    run_stages(stages, job, 400, clock=clock)
    assert allowed(job) == pytest.approx([100, 120, 320])
    assert set(statuses(job).values()) == {"done"}


def test_an_early_stage_may_take_the_time_of_later_ones(job: Job) -> None:
    clock = Clock()
    stages = [clock.stage(name, 1, takes) for name, takes in (("a", 44), ("b", 7), ("c", 7))]
    run_stages(stages, job, 60, clock=clock)
    assert allowed(job) == pytest.approx([45, 16, 9])


def test_a_stopped_or_failed_stage_ends_no_other_and_is_tried_again(job: Job) -> None:
    clock, broken = Clock(), [True]

    def failing(_job: Job, _seconds: float) -> dict[str, Any]:
        if broken:
            raise CommandError("no such package")
        return {}

    stages = [clock.stage("slow", 1, 60), Stage("broken", 1, failing), clock.stage("c", 1, 1)]
    run_stages(stages, job, 150, clock=clock)
    assert statuses(job) == {"slow": "stopped", "broken": "failed", "c": "done"}
    assert "no such package" in job.record["stages"]["broken"]["error"]
    broken.clear()
    before = dict(job.record["stages"]["c"])
    run_stages(stages, job, 200, clock=clock)
    assert set(statuses(job).values()) == {"done"}
    assert job.record["stages"]["c"] == before  # not repeated


def test_nothing_is_started_without_time_and_nothing_done_is_forgotten(job: Job) -> None:
    clock, told = Clock(), []
    stages = [clock.stage("a", 9, 40), clock.stage("b", 1, 5)]
    run_stages(stages[:1], job, 50, clock=clock)
    run_stages([clock.stage("a", 9, 1, always=True), stages[1]], job, 2.5, clock=clock)
    run_stages(stages, job, -5, clock=clock, on_stage=told.append)
    assert statuses(job) == {"a": "done", "b": "not started"}
    assert told == ["b"]


def test_without_a_device_no_further_stage_is_tried(job: Job) -> None:
    def missing(_job: Job, _seconds: float) -> dict[str, Any]:
        raise NoDeviceError("torch finds no cuda device")

    run_stages([Stage("environment", 1, missing), Clock().stage("a", 1, 1)], job, 100)
    assert statuses(job) == {"environment": "failed"}


CHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); "
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


@pytest.mark.parametrize("deaf", ["", DEAF])
def test_a_stopped_command_ends_with_its_children(
    job: Job, deaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "GRACE_S", 0.5)
    with pytest.raises(StoppedError) as stopped:
        job.run(1.5, sys.executable, "-c", f"{CHILD}{deaf}import time; time.sleep(60)")
    child = Path("/proc", str(stopped.value).split(": ")[1].strip(), "stat")
    time.sleep(0.2)
    assert not child.exists() or ") Z " in child.read_text()


def test_a_failed_command_says_why(job: Job) -> None:
    with pytest.raises(CommandError, match=r"exit code 1: (.|\n)*ValueError: because"):
        job.run(20.0, sys.executable, "-c", "raise ValueError('because')")
    assert job.run(20.0, sys.executable, "-c", "print('fine')") == "fine\n"
    assert "because" in (job.out / "log.txt").read_text()


def test_the_schedule_is_the_papers_where_two_parts_fit_and_a_share_of_it_where_not() -> None:
    pace = Pace(epoch_s=1e-3, iteration_s=2e-3)
    part = 50_000 * 1e-3 + 11_900 * 2e-3
    whole = schedule(PAPER, pace, OVERHEAD_S + 2.5 * part)
    assert (whole.n_parts, whole.share) == (2, 1.0)
    assert schedule(PAPER, pace, 1e6).n_parts == MOST_PARTS
    half = schedule(PAPER, pace, OVERHEAD_S + part)
    assert (half.n_parts, half.share) == (2, 0.5)
    assert schedule(PAPER, None, 1e6) == UNKNOWN_PACE


def test_products_come_back_in_pieces_or_not_at_all(job: Job) -> None:
    (job.work / "file").write_bytes(bytes(range(256)) * 40)
    assert "bytes in work.tar.*" in chain.pack(job, n_bytes=8000, most=4)
    pieces = sorted(job.out.glob("work.tar.*"))
    assert len(pieces) == 3
    assert max(piece.stat().st_size for piece in pieces) == 8000
    whole = job.out / "whole.tar"
    whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(whole) as archive:
        member: Any = archive.extractfile("work/file")
        assert member.read() == (job.work / "file").read_bytes()
    assert "more than 1 pieces" in chain.pack(job, n_bytes=8000, most=1)
    assert not list(job.out.glob("work.tar.*"))


def test_wheels_are_closed_under_needs_and_one_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = {
        "a": ["b>=2", "torch>=2", "c[x]; python_version >= '3.12'", "d; sys_platform == 'win32'"],
        "b": [],
        "c": ["e; extra == 'x'", "f; extra == 'y'"],
        "e": ["a"],
    }
    monkeypatch.setattr(importlib.metadata, "requires", needs.__getitem__)
    versions = dict.fromkeys("abcef", "2.0")
    assert set(wheels.closure(["a"], versions, python="3.12")) == set("abce")
    assert set(wheels.closure(["a"], versions, python="3.11")) == set("ab")
    with pytest.raises(ValueError, match="b has no version"):
        wheels.closure(["a"], {"a": "1"}, python="3.11")


def test_every_package_that_the_chain_needs_has_a_version() -> None:
    pins = wheels.closure(wheels.NEEDED, wheels.constraints(), python="3.12")
    assert set(wheels.NEEDED) <= set(pins)
    assert not set(pins) & (wheels.THERE | wheels.UNUSED)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_rehearsal_runs_every_stage_and_a_second_call_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rehearse", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert chain.main([*words, "--seconds", "2000"]) == 0, capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "chain.json").read_text())
    numbers = {name: result["numbers"] for name, result in record["stages"].items()}
    assert list(numbers) == [stage.name for stage in chain.STAGES]
    assert numbers["again"]["equal"]
    assert numbers["again"]["pairs"] > 0
    assert record["schedule"]["epochs"] == SMALL.epochs
    assert {"plain", "edm_x1", "bf_dncnn"} <= set(numbers["evaluate"])
    for name in ("report.html", "contact-sheet.png", "pairs.png", "work.tar.0", "log.txt"):
        assert (tmp_path / "out" / name).stat().st_size > 1000

    def refused(_job: Job, seconds: float, *words: str) -> str:
        raise AssertionError(words)

    monkeypatch.setattr(Job, "palimpsest", refused)
    assert chain.main([*words, "--seconds", "200"]) == 0
    assert chain.main([*words, "--data", "digits"]) == 2
