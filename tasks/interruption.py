"""Interruptions that wait for the end of a step, so that the step can be kept."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from tasks.cluster.child_processes import SAME_REQUEST_S

SIGNALS = (signal.SIGTERM, signal.SIGINT)
WAITS = b"interrupted: stops after this step and keeps it; once more stops at once\n"


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
