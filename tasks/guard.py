"""What becomes of the processes that a command starts when it is interrupted or killed.

A command starts others: Prefect's temporary server, Dask's workers. Ctrl-C and SIGTERM end them
with it; after SIGKILL, as the kernel sends it when memory runs out, the server would stay for ever.
So a command is watched by a small process, which learns from a closed pipe that the command has
ended, however that was. What then still carries the command's mark is asked to end, and made to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 10.0
"""How long the command's own way of ending them is waited for; as long again after SIGTERM."""
MARK = "PALIMPSEST_COMMAND"
"""The variable in the environment of everything that a command starts."""


def start_guard(*, grace_s: float = GRACE_S) -> None:
    """Marks this process's children to come, and starts the process that watches over them.

    Does nothing in a process that a command has started itself.
    """
    if MARK in os.environ:
        return
    mark = f"{os.getpid()}-{time.time_ns()}"
    reading, _writing = os.pipe()  # the other end is inherited by nobody, and closes with this one
    subprocess.Popen(
        [sys.executable, "-P", "-c", "from tasks.guard import main; main()", mark, str(grace_s)],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the command
    ).returncode = 0  # never waited for, which is no reason for a warning
    os.close(reading)
    os.environ[MARK] = mark


def take_ctrl_c_alone() -> None:
    """Ctrl-C then ends this process as SIGTERM does, and does not reach those that it starts.

    A terminal sends SIGINT to a command and to its children. Prefect's server would be gone before
    the command could tell it that the run is over, and the command would wait for it for ever.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it
    threading.Thread(target=_pass_on, name="ctrl-c", daemon=True).start()


def _pass_on() -> None:
    while True:
        signal.sigwait({signal.SIGINT})
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """What the watching process does: waits for the end of its input, then ends what is left."""
    mark, grace_s = sys.argv[1], float(sys.argv[2])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(mark, grace_s)


def end(mark: str, grace_s: float) -> None:
    """Waits for the processes with this mark to end; then SIGTERM, and SIGKILL in the end."""
    import psutil

    def left() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == mark and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:  # another user's, or just gone
                continue
        return found

    for ask in (psutil.Process.terminate, psutil.Process.kill):
        until = time.monotonic() + grace_s
        while left():
            if time.monotonic() > until:
                for process in left():
                    try:
                        ask(process)
                    except psutil.Error:
                        continue
                break
            time.sleep(0.2)
