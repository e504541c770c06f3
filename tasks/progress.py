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
from dataclasses import dataclass
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
    """Called with what is done, the total and, if there is more to say, a note of a few words.
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


class _RateColumn(ProgressColumn):
    """Units per second, or seconds per unit when that reads better."""

    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self.unit = unit

    def render(self, task: Task) -> Text:
        new = task.fields["new"]
        return Text(rate_text(new, task.elapsed or 0.0, self.unit), style="dim")


class _LeftColumn(TimeRemainingColumn):
    """The time left: as it was told, or by the speed; at most that if the stage may end early."""

    def __init__(self, *, may_end_early: bool) -> None:
        super().__init__(compact=True, table_column=Column(no_wrap=True))
        self.may_end_early = may_end_early

    def render(self, task: Task) -> Text:
        told: Left | None = task.fields["left"]
        if told is not None and not task.finished:
            return Text(str(told).removesuffix(" left"), style="progress.remaining")
        known = self.may_end_early and not task.finished and task.time_remaining is not None
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
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}" + f" {unit}s"),
        _RateColumn(unit),
        _LeftColumn(may_end_early=may_end_early),
        _NoteColumn(),
        console=console,
        speed_estimate_period=SPEED_SECONDS,
        disable=not console.is_terminal,
    )
    key = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    tell = leave_progress(key, title)
    task = bar.add_task(title, total=None, start=False, new=0.0, count="0/?", note="", left=None)
    last_artifact = time.monotonic()
    before: float | None = None
    log = _Log(title, unit, console, may_end_early=may_end_early)

    def advance(
        done: float,
        total: float,
        note: str = "",
        *,
        share: float | None = None,
        left: Left | None = None,
    ) -> None:
        nonlocal last_artifact, before
        part = share if share is not None else done / total if total else 0.0
        if before is None:
            before = done
            bar.start_task(task)
        count = f"{done:.0f}/{total:.0f}"
        new = done - before
        bar.update(task, completed=part, total=1, new=new, count=count, note=note, left=left)
        if time.monotonic() - last_artifact >= ARTIFACT_EVERY_SECONDS:
            last_artifact = time.monotonic()
            tell(part)
        log.report(done, total, part, note, left)

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
        self.latest: tuple[float, float, float, str, Left | None] | None = None
        self.points: deque[tuple[float, float]] = deque()
        self.lock = threading.Lock()

    def report(self, done: float, total: float, part: float, note: str, left: Left | None) -> None:
        with self.lock:
            if self.first is None:
                self.first, self.started = (done, part), time.monotonic()
            if part > (self.first[1] if self.latest is None else self.latest[2]):
                self.points.append((time.monotonic(), part))
            self.latest = (done, total, part, note, left)
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
            done, total, part, _note, told = self.latest
            parts, left = (self.first[1], part), told or self._left(now, part)
            said = progress_line(
                self.title, self.unit, done, total, now - self.started,
                before=self.first[0], parts=parts, left=left, at_most=self.may_end_early,
            )  # fmt: skip
        self.console.print(f"{said}  {note}".rstrip(), soft_wrap=True, highlight=False)

    def _left(self, now: float, part: float) -> Left | None:
        """The time left by the speed of the last ten minutes, without the time before anything was
        done, in which workers start; None if that says nothing yet."""
        while len(self.points) > 2 and now - self.points[0][0] > SPEED_SECONDS:
            self.points.popleft()
        if not self.points or part <= self.points[0][1]:
            return None
        since, at = self.points[0]
        return Left((now - since) / (part - at) * (1 - part))


def progress_line(
    title: str,
    unit: str,
    done: float,
    total: float,
    seconds: float,
    *,
    before: float = 0.0,
    parts: tuple[float, float] | None = None,
    left: Left | None = None,
    at_most: bool = False,
) -> str:
    """`Generate  12 / 40 runs  1.2 s/run  0:34 left`; `before` of them took none of the seconds.
    `parts`: the shares of the work that were done before and are done now, if not by their
    number. `left`: the time left, if not by the mean speed; `at_most` it may end before."""
    new = done - before
    first, now = parts or (before / total, done / total)
    if left is None and now > first:
        left = Left(seconds / (now - first) * (1 - now))
    remaining = "? left" if left is None else str(left)
    if at_most and left is not None and round(left.seconds):
        remaining = f"at most {remaining}"
    if now >= 1.0:
        remaining = "finishing"
    return (
        f"{title}  {done:.0f} / {total:.0f} {unit}s  {rate_text(new, seconds, unit)}  {remaining}"
    )
