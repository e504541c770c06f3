"""Progress bars with rate and remaining time, shared by every long stage.

On a terminal a bar that redraws; elsewhere (a log file, a scheduler) one line every ten seconds.
Also the source of Prefect's progress artifacts, so that a run can be watched from its page.
"""

from __future__ import annotations

import re
import time
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
def stage_progress(title: str, unit: str) -> Iterator[Advance]:
    """A bar named `title` that counts `unit`s; the value to call with (done, total, note="").

    What is done at the first call was there before: it does not count towards the rate.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}" + f" {unit}s"),
        _RateColumn(unit),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        _NoteColumn(),
        console=console,
        speed_estimate_period=SPEED_SECONDS,
        disable=not console.is_terminal,
    )
    key = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    tell = leave_progress(key, title)
    task = bar.add_task(title, total=None, start=False, new=0.0, count="0/?", note="")
    started = last_log = last_artifact = time.monotonic()
    before: tuple[float, float] | None = None

    def advance(done: float, total: float, note: str = "", *, share: float | None = None) -> None:
        nonlocal started, last_log, last_artifact, before
        now = time.monotonic()
        part = share if share is not None else done / total if total else 0.0
        if before is None:
            before, started = (done, part), now
            bar.start_task(task)
        count = f"{done:.0f}/{total:.0f}"
        bar.update(task, completed=part, total=1, new=done - before[0], count=count, note=note)
        if now - last_artifact >= ARTIFACT_EVERY_SECONDS:
            last_artifact = now
            tell(part)
        if not console.is_terminal and now - last_log >= LOG_EVERY_SECONDS:
            last_log = now
            parts = (before[1], part)
            line = progress_line(
                title, unit, done, total, now - started, before=before[0], parts=parts
            )
            console.print(f"{line}  {note}".rstrip(), soft_wrap=True, highlight=False)

    with bar:
        yield advance
    tell(1.0)


def progress_line(
    title: str,
    unit: str,
    done: float,
    total: float,
    seconds: float,
    *,
    before: float = 0.0,
    parts: tuple[float, float] | None = None,
) -> str:
    """`Generate  12 / 40 runs  1.2 s/run  0:34 left`; `before` of them took none of the seconds.
    `parts`: the shares of the work that were done before and are done now, if not by their
    number."""
    new = done - before
    first, now = parts or (before / total, done / total)
    left = round(seconds / (now - first) * (1 - now)) if now > first else None
    remaining = "? left" if left is None else f"{left // 60}:{left % 60:02d} left"
    return (
        f"{title}  {done:.0f} / {total:.0f} {unit}s  {rate_text(new, seconds, unit)}  {remaining}"
    )
