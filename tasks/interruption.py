"""Interruptions: a command ends together with every process it started, after its current step.

Commands start other processes, such as Dask workers. Ctrl-C and SIGTERM end them all, but after a
SIGKILL (which the kernel sends when memory runs out) some would run for ever. So each command has a
small guard process, which notices from a closed pipe that the command has ended in any way. The
guard then terminates, and if need be kills, all processes that carry the command's mark.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

GRACE_S = 10.0
"""Seconds the guard waits before SIGTERM, and again before SIGKILL."""
MARK = "PALIMPSEST_COMMAND"
"""Environment variable of all processes that a command starts."""
SAME_REQUEST_S = 2.0
"""Seconds within which a second signal counts as the same request: `timeout`, systemd and Slurm
signal both a process and its group, so the command receives two."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
WAITS = b"interrupted: stops after this step and keeps it; once more stops at once\n"
_CTRL_C = "ctrl-c"  # name of the thread that waits for it
_first_request: list[float] = []
_by_ctrl_c = threading.Event()


def start_guard(*, grace_s: float = GRACE_S) -> None:
    """Start the guard process, and mark the processes that this one will start.

    Does nothing in a process that a command started.
    """
    if MARK in os.environ:
        return
    mark = f"{os.getpid()}-{time.time_ns()}"
    reading, _writing = os.pipe()  # the other end is inherited by nobody, and closes with this one
    subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import main; main()", mark, str(grace_s)],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the command
    ).returncode = 0  # never waited for, which is no reason for a warning
    os.close(reading)
    os.environ[MARK] = mark


def end_on_sigterm() -> None:
    """Make SIGTERM interrupt this process once; a later one ends it immediately.

    A second interrupt would stop the clean-up that the first one began half-way.
    """
    _first_request.clear()
    logging.disable(logging.NOTSET)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_signal: int, _frame: Any) -> None:
    if not _first_request:
        _first_request.append(time.monotonic())
        logging.disable(logging.CRITICAL)  # tasks that are cut off log errors
        raise KeyboardInterrupt
    if time.monotonic() - _first_request[0] > SAME_REQUEST_S:
        os.write(2, b"ended at once; the same command goes on\n")
        os._exit(interrupted_code() or 1)  # the guard ends its children


def interrupted_code() -> int | None:
    """Exit code of an interrupted command, as in shells: 130 after Ctrl-C, 143 after SIGTERM; None
    if it was not interrupted."""
    if not _first_request:
        return None
    return 128 + (signal.SIGINT if _by_ctrl_c.is_set() else signal.SIGTERM)


def take_ctrl_c_alone() -> None:
    """Make Ctrl-C act as SIGTERM on this process, and not reach its children."""
    if any(thread.name == _CTRL_C for thread in threading.enumerate()):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it

    def pass_on() -> None:
        while True:
            signal.sigwait({signal.SIGINT})
            _by_ctrl_c.set()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=pass_on, name=_CTRL_C, daemon=True).start()


class Interruption:
    """Context that delays the first SIGTERM or SIGINT until `deliver` or its end. A later signal is
    delivered at once, unless it is the same request (`SAME_REQUEST_S`). Outside the main thread, or
    with `holds=False`, signals are not delayed."""

    def __init__(self, *, holds: bool = True) -> None:
        self._holds = holds and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Callable[..., Any] | int] = {}
        self._held: int | None = None
        self._since = 0.0

    @property
    def waits(self) -> bool:
        """True if a signal is waiting."""
        return self._held is not None

    def deliver(self) -> None:
        """Raise the waiting signal, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            self._give_back()
            signal.raise_signal(held)

    def __enter__(self) -> Self:
        for number in SIGNALS if self._holds else ():
            before = signal.getsignal(number)
            if before is not None:  # else a library set it in C, and it cannot be restored
                self._before[number] = before
                signal.signal(number, self._hold)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _at: TracebackType | None,
    ) -> None:
        self._give_back()
        if kind is None or issubclass(kind, Exception):
            self.deliver()

    def _hold(self, number: int, _frame: FrameType | None) -> None:
        if self.waits:
            if time.monotonic() - self._since > SAME_REQUEST_S:
                self.deliver()
            return
        self._held, self._since = number, time.monotonic()
        os.write(2, WAITS)  # a handler may interrupt a print

    def _give_back(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}


def main() -> None:
    """Run the guard: wait for the end of standard input, then end the remaining processes."""
    mark, grace_s = sys.argv[1], float(sys.argv[2])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(mark, grace_s)


def end(mark: str, grace_s: float) -> None:
    """Wait for the processes with this mark to end, then send SIGTERM, at last SIGKILL."""
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
