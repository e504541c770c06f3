"""Progress of a long stage: rate and remaining time, on a screen, in a log, on Prefect's page.

On a terminal a bar that redraws; elsewhere (a log file, a scheduler) one line every ten seconds,
or every thirty where nothing is reported: a stage is never silent.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

LOG_EVERY_SECONDS = 10.0
QUIET_SECONDS = 30.0
"""After so long without a report the last line is repeated."""
ARTIFACT_EVERY_SECONDS = 5.0
WIDE = 80
"""Columns of a terminal from which a bar is long."""
SPEED_SECONDS = 600.0
"""The time left follows from what was done in so many seconds."""


@dataclass(frozen=True)
class Left:
    """Seconds of work that is left, as far as it is known; `is_all` if nothing else is left."""

    seconds: float
    is_all: bool = True

    def __str__(self) -> str:
        whole = round(self.seconds)
        text = f"{whole // 60}:{whole % 60:02d} left"
        return text if self.is_all else f"more than {text}" if whole else "? left"


class Advance(Protocol):
    """Called with what is done, the total and, if there is more to report, a note of a few words.
    `share` in [0, 1]: how much of the work that is, where not every unit takes as long. `left`: the
    time left, where it does not follow from the work done so far."""

    def __call__(
        self,
        done: float,
        total: float,
        note: str = "",
        *,
        share: float | None = None,
        left: Left | None = None,
    ) -> None: ...


class _TextColumn(ProgressColumn):
    """Count, rate, time left and note; on a narrow screen the end is cut, and no other column."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["text"], style="dim", no_wrap=True, overflow="ellipsis")


@contextmanager
def stage_progress(title: str, unit: str, *, may_end_early: bool = False) -> Iterator[Advance]:
    """Show a bar named `title` that counts `unit`s; call the value with (done, total, note="").

    What is done at the first call was there before: it does not count towards the rate. With
    `may_end_early` the total is the most that there can be, and so is the time left.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24 if console.width >= WIDE else 8),
        _TextColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task(title, total=1, text="")
    publish = _artifact(title)
    stage = _Stage(title, unit, console, may_end_early=may_end_early)
    last_artifact = time.monotonic()

    def advance(
        done: float,
        total: float,
        note: str = "",
        *,
        share: float | None = None,
        left: Left | None = None,
    ) -> None:
        nonlocal last_artifact
        part = share if share is not None else done / total if total else 0.0
        text = stage.report(done, total, part, note, left)
        bar.update(task, completed=part, text=text)
        if time.monotonic() - last_artifact >= ARTIFACT_EVERY_SECONDS:
            last_artifact = time.monotonic()
            publish(part)

    with bar, stage.never_silent():
        yield advance
    publish(1.0)


def _artifact(title: str) -> Callable[[float], None]:
    """The artifact of a flow's stage; where no flow runs, Prefect need not be loaded for one."""
    if "prefect" not in sys.modules:
        return lambda _share: None
    from tasks.artifacts import publish_progress

    return publish_progress(re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"), title)


class _Stage:
    """Reports of a stage. Where there is no terminal they are lines: at most one in ten seconds
    while it reports, and one in thirty while it does not."""

    def __init__(self, title: str, unit: str, console: Console, *, may_end_early: bool) -> None:
        self.title, self.unit, self.console = title, unit, console
        self.may_end_early = may_end_early
        self.started = self.last_line = time.monotonic()
        self.first: tuple[float, float] | None = None
        self.part, self.note, self.text = 0.0, "", "starting"
        self.points: deque[tuple[float, float]] = deque()
        self.lock = threading.Lock()

    def report(self, done: float, total: float, part: float, note: str, left: Left | None) -> str:
        """Return the text of a report, and log it if it is time for a line."""
        with self.lock:
            now = time.monotonic()
            if self.first is None:
                self.first, self.part, self.started = (done, part), part, now
            if part > self.part:
                self.points.append((now, part))
            self.part, self.note = part, note
            seconds, new = now - self.started, done - self.first[0]
            left = left or self._left(now, part)
            if left is None and part > self.first[1]:
                left = Left(seconds / (part - self.first[1]) * (1 - part))
            end = "? left" if left is None else str(left)
            if self.may_end_early and left is not None and round(left.seconds):
                end = f"at most {end}"
            rate = ""
            if new > 0 and seconds > 0:
                rate = f"{seconds / new:.1f} s/{self.unit}"
                if new >= seconds:
                    rate = f"{new / seconds:.1f} {self.unit}s/s"
            end = "finishing" if part >= 1.0 else end
            self.text = f"{done:.0f} / {total:.0f} {self.unit}s  {rate}  {end}"
            if now - self.last_line >= LOG_EVERY_SECONDS:
                self._line(note)
            return f"{self.text}  {note}"

    @contextmanager
    def never_silent(self) -> Iterator[None]:
        """While it lasts, the last line is repeated after half a minute without one."""
        if self.console.is_terminal:
            yield
            return
        over = threading.Event()

        def beat() -> None:
            while not over.wait(QUIET_SECONDS / 10):
                with self.lock:
                    if time.monotonic() - self.last_line >= QUIET_SECONDS:
                        self._line(f"{self.note}  (still at it)".lstrip())

        thread = threading.Thread(target=beat, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _line(self, note: str) -> None:
        if not self.console.is_terminal:
            self.last_line = time.monotonic()
            line = f"{self.title}  {self.text}  {note}".rstrip()
            self.console.print(line, soft_wrap=True, highlight=False)

    def _left(self, now: float, part: float) -> Left | None:
        """Estimate the time left by the speed of the last ten minutes, without the time before
        anything was done, in which workers start; None while that is unknown."""
        while len(self.points) > 2 and now - self.points[0][0] > SPEED_SECONDS:
            self.points.popleft()
        if not self.points or part <= self.points[0][1]:
            return None
        since, at = self.points[0]
        return Left((now - since) / (part - at) * (1 - part))
