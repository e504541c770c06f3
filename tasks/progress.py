"""Progress bars with rate and remaining time, shared by every long stage.

On a terminal a bar that redraws; elsewhere (a log file, a scheduler) one line every ten seconds,
or every thirty where nothing is reported: a stage is never silent.
Also the source of Prefect's progress artifacts, so that a run can be watched from its page.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from tasks.artifacts import leave_progress

LOG_EVERY_SECONDS = 10.0
QUIET_SECONDS = 30.0
"""After so long without a report the last line is said again, with the time since."""
ARTIFACT_EVERY_SECONDS = 5.0
SPEED_SECONDS = 600.0
"""The time left follows from what was done in so many seconds."""


class Advance(Protocol):
    """Called with what is done, the total and, if there is more to say, a note of a few words.
    `share` in [0, 1]: how much of the work that is, where not every unit takes as long."""

    def __call__(
        self, done: float, total: float, note: str = "", *, share: float | None = None
    ) -> None: ...


class _RateColumn(ProgressColumn):
    """Units per second, or seconds per unit when that reads better."""

    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self.unit = unit

    def render(self, task: Task) -> Text:
        new = task.fields["new"]
        return Text(rate_text(new, task.elapsed or 0.0, self.unit), style="dim")


class _AtMostColumn(TimeRemainingColumn):
    """The time left of a stage that may end early."""

    def render(self, task: Task) -> Text:
        known = not task.finished and task.time_remaining is not None
        return Text("at most " if known else "").append(super().render(task))


class _NoteColumn(ProgressColumn):
    """The note in the room that is left: on a narrow screen it is cut, and no other column."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], style="dim", no_wrap=True, overflow="ellipsis")


def rate_text(done: float, seconds: float, unit: str) -> str:
    """`3.2 runs/s`, or `4.1 s/run` below one per second; empty before anything is done."""
    if done <= 0 or seconds <= 0:
        return ""
    if done >= seconds:
        return f"{done / seconds:.1f} {unit}s/s"
    return f"{seconds / done:.1f} s/{unit}"


@contextmanager
def stage_progress(title: str, unit: str, *, may_end_early: bool = False) -> Iterator[Advance]:
    """A bar named `title` that counts `unit`s; the value to call with (done, total, note="").

    What is done at the first call was there before: it does not count towards the rate. With
    `may_end_early` the total is the most that there can be, and so is the time left.
    """
    remaining = _AtMostColumn if may_end_early else TimeRemainingColumn
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}" + f" {unit}s"),
        _RateColumn(unit),
        remaining(compact=True, table_column=Column(no_wrap=True)),
        _NoteColumn(),
        console=console,
        speed_estimate_period=SPEED_SECONDS,
        disable=not console.is_terminal,
    )
    key = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    tell = leave_progress(key, title)
    task = bar.add_task(title, total=None, start=False, new=0.0, count="0/?", note="")
    last_artifact = time.monotonic()
    before: float | None = None
    log = _Log(title, unit, console, may_end_early=may_end_early)

    def advance(done: float, total: float, note: str = "", *, share: float | None = None) -> None:
        nonlocal last_artifact, before
        part = share if share is not None else done / total if total else 0.0
        if before is None:
            before = done
            bar.start_task(task)
        count = f"{done:.0f}/{total:.0f}"
        bar.update(task, completed=part, total=1, new=done - before, count=count, note=note)
        if time.monotonic() - last_artifact >= ARTIFACT_EVERY_SECONDS:
            last_artifact = time.monotonic()
            tell(part)
        log.report(done, total, part, note)

    with bar, log.never_silent():
        yield advance
    tell(1.0)


class _Log:
    """Lines of a stage where there is no terminal: at most one in ten seconds while it reports, and
    one in thirty while it does not."""

    def __init__(self, title: str, unit: str, console: Console, *, may_end_early: bool) -> None:
        self.may_end_early = may_end_early
        self.title, self.unit, self.console = title, unit, console
        self.started = self.last_line = time.monotonic()
        self.first: tuple[float, float] | None = None
        self.latest: tuple[float, float, float, str] | None = None
        self.points: deque[tuple[float, float]] = deque()
        self.lock = threading.Lock()

    def report(self, done: float, total: float, part: float, note: str) -> None:
        with self.lock:
            if self.first is None:
                self.first, self.started = (done, part), time.monotonic()
            if part > (self.first[1] if self.latest is None else self.latest[2]):
                self.points.append((time.monotonic(), part))
            self.latest = (done, total, part, note)
            if time.monotonic() - self.last_line >= LOG_EVERY_SECONDS:
                self._line(note)

    @contextmanager
    def never_silent(self) -> Iterator[None]:
        """While it lasts, the last line is said again after half a minute without one."""
        if self.console.is_terminal:
            yield
            return
        over = threading.Event()
        beat = threading.Thread(target=self._beat, args=(over,), name="progress", daemon=True)
        beat.start()
        try:
            yield
        finally:
            over.set()
            beat.join()

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(QUIET_SECONDS / 10):
            with self.lock:
                silent = time.monotonic() - self.last_line
                if silent >= QUIET_SECONDS:
                    note = "" if self.latest is None else self.latest[3]
                    self._line(f"{note}  (still at it)".lstrip())

    def _line(self, note: str) -> None:
        if self.console.is_terminal:
            return
        now = self.last_line = time.monotonic()
        if self.latest is None or self.first is None:
            said = f"{self.title}  starting"
        else:
            done, total, part, _note = self.latest
            parts = (self.first[1], part)
            said = progress_line(
                self.title, self.unit, done, total, now - self.started,
                before=self.first[0], parts=parts, left_s=self._left(now, part),
                at_most=self.may_end_early,
            )  # fmt: skip
        self.console.print(f"{said}  {note}".rstrip(), soft_wrap=True, highlight=False)

    def _left(self, now: float, part: float) -> float | None:
        """Seconds left by the speed of the last ten minutes, without the time before anything was
        done, in which workers start; None if that says nothing yet."""
        while len(self.points) > 2 and now - self.points[0][0] > SPEED_SECONDS:
            self.points.popleft()
        if not self.points or part <= self.points[0][1]:
            return None
        since, at = self.points[0]
        return (now - since) / (part - at) * (1 - part)


def progress_line(
    title: str,
    unit: str,
    done: float,
    total: float,
    seconds: float,
    *,
    before: float = 0.0,
    parts: tuple[float, float] | None = None,
    left_s: float | None = None,
    at_most: bool = False,
) -> str:
    """`Generate  12 / 40 runs  1.2 s/run  0:34 left`; `before` of them took none of the seconds.
    `parts`: the shares of the work that were done before and are done now, if not by their
    number. `left_s`: the time left, if not by the mean speed; `at_most` it may end before."""
    new = done - before
    first, now = parts or (before / total, done / total)
    if left_s is None and now > first:
        left_s = seconds / (now - first) * (1 - now)
    left = None if left_s is None else round(left_s)
    remaining = "? left" if left is None else f"{left // 60}:{left % 60:02d} left"
    if at_most and left:
        remaining = f"at most {remaining}"
    if now >= 1.0:
        remaining = "finishing"
    return (
        f"{title}  {done:.0f} / {total:.0f} {unit}s  {rate_text(new, seconds, unit)}  {remaining}"
    )
