"""Interruptions: a command ends with all that it has started, and a step may be finished first.

A command starts others: Dask's workers above all. Ctrl-C and SIGTERM end them with it; after
SIGKILL, as the kernel sends it when memory runs out, some would stay for ever. So a command is
watched by a small process, which learns from a closed pipe that the command has ended, however that
was. What then still carries the command's mark is asked to end, and made to.
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
"""How long the command's own way of ending them is waited for; as long again after SIGTERM."""
MARK = "PALIMPSEST_COMMAND"
"""The variable in the environment of everything that a command starts."""
SAME_REQUEST_S = 2.0
"""Signals so soon after the first are the same request: `timeout`, systemd and Slurm tell a process
and its group, and both reach the command."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
WAITS = b"interrupted: stops after this step and keeps it; once more stops at once\n"
_CTRL_C = "ctrl-c"
"""The thread that waits for it."""
_first_request: list[float] = []
_by_ctrl_c = threading.Event()


def start_guard(*, grace_s: float = GRACE_S) -> None:
    """Marks this process's children to come, and starts the process that watches over them.

    Does nothing in a process that a command has started itself.
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
    """SIGTERM then interrupts this process, once; asked again later, it ends where it stands.

    An interrupt in the middle of the clean-up that the first one has begun would leave half of it.
    """
    _first_request.clear()
    logging.disable(logging.NOTSET)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_signal: int, _frame: Any) -> None:
    if not _first_request:
        _first_request.append(time.monotonic())
        logging.disable(logging.CRITICAL)  # what is cut off complains
        raise KeyboardInterrupt
    if time.monotonic() - _first_request[0] > SAME_REQUEST_S:
        os.write(2, b"ended at once; the same command goes on\n")
        os._exit(interrupted_code() or 1)  # what it has started is the guard's


def interrupted_code() -> int | None:
    """The exit code of a command that was asked to end, as shells have it: 130 after Ctrl-C, 143
    after SIGTERM; None if it was not asked."""
    if not _first_request:
        return None
    return 128 + (signal.SIGINT if _by_ctrl_c.is_set() else signal.SIGTERM)


def take_ctrl_c_alone() -> None:
    """Ctrl-C then ends this process as SIGTERM does, and does not reach those that it starts."""
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
    """Holds the first SIGTERM or SIGINT back until `deliver`, or the end of this context; a later
    one is delivered at once, unless it is the same request (`SAME_REQUEST_S`). Outside the main
    thread, or if not `holds`, nothing is held back."""

    def __init__(self, *, holds: bool = True) -> None:
        self._holds = holds and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Callable[..., Any] | int] = {}
        self._held: int | None = None
        self._since = 0.0

    @property
    def waits(self) -> bool:
        """True if something is held back."""
        return self._held is not None

    def deliver(self) -> None:
        """Does what the signal would have done when it came, if there was one."""
        held, self._held = self._held, None
        if held is not None:
            self._give_back()
            signal.raise_signal(held)

    def __enter__(self) -> Self:
        for number in SIGNALS if self._holds else ():
            before = signal.getsignal(number)
            if before is not None:  # else a library has set it, and could not have it back
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
        os.write(2, WAITS)  # a handler may run in the middle of somebody's print

    def _give_back(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}


def main() -> None:
    """Main function of the watching process: waits for its input's end, then ends what is left."""
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
