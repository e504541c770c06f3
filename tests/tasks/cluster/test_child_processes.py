"""What a killed process started is ended; what belongs to others is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.interruption import MARK

PARENT = """
import subprocess, sys, time
from tasks.interruption import start_guard
start_guard(grace_s=1.0)
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
for program in ("import time; time.sleep(600)", stubborn):
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    print(process.pid, flush=True)
    process.returncode = 0
{then}
"""


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another command."""
    environment = {**os.environ, MARK: "another"}
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=environment
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(0)"], ids=["killed", "ended"])
def test_what_a_command_started_ends_after_it(
    then: str, bystander: subprocess.Popen[bytes]
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={name: value for name, value in os.environ.items() if name != MARK},
    )
    assert parent.stdout is not None
    with parent.stdout:
        started = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
    if "sleep" in then:
        started_by = psutil.Process(parent.pid).children()
        guards = [
            p for p in started_by if any("tasks.interruption" in word for word in p.cmdline())
        ]
        assert len(guards) == 1
        os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=30)
    gone, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    assert len(gone) == 2
    assert bystander.poll() is None


def test_a_guard_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.interruption import start_guard

    monkeypatch.setenv(MARK, "of the command that started this process")
    before = len(psutil.Process().children())
    start_guard()
    assert len(psutil.Process().children()) == before
    assert os.environ[MARK] == "of the command that started this process"
