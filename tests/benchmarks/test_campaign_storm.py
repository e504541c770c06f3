"""The storm over a campaign, at its smallest: does it kill, and would it notice another dataset?"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.campaign import storm as campaign_storm
from benchmarks.campaign.storm import (
    KINDS,
    MARK,
    Campaign,
    Kind,
    Report,
    Size,
    measure,
)

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


def test_another_dataset_ends_the_storm_with_both_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Report(content_hash="a" * 64, n_covered=3, seconds=1.0)
    monkeypatch.setattr(campaign_storm, "undisturbed", lambda *_: there)
    monkeypatch.setattr(campaign_storm, "stormy", lambda *_: replace(there, content_hash="b" * 64))
    with pytest.raises(SystemExit, match=r"adaptive-2: dataset b{12}, but a{12} without kills"):
        list(measure(TINY, tmp_path, seed=0))


def test_everything_with_the_campaigns_mark_is_found_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = Campaign(tmp_path / "c", TINY.recipe("uniform"), 1)
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours, other = (
        subprocess.Popen(program, env={MARK: mark}) for mark in (campaign.mark, "another")
    )
    try:
        assert [p.pid for p in campaign.processes()] == [ours.pid]
        rng = random.Random(0)
        assert not campaign.kill("worker", psutil.Process(ours.pid), rng)  # it has no workers
        monkeypatch.setattr(campaign, "workers", lambda coordinator: [coordinator])
        assert campaign.kill("frozen", psutil.Process(ours.pid), rng)
        assert os.WIFSTOPPED(os.waitpid(ours.pid, os.WUNTRACED)[1])
        assert campaign.kill("machine", psutil.Process(ours.pid), rng)
        assert ours.wait(timeout=30) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        campaign.log.close()
    assert campaign.report.kills == Counter(machine=1, frozen=1)
