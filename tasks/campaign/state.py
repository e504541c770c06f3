"""State of a campaign in its store, beside its parts: the wish to pause, and parts that were given
up; and the look at it and at the workers that a campaign takes every few seconds.

`control.json` is how `palimpsest campaign pause`, `resume` and `cancel` reach a coordinator on any
machine. `quarantine/part-000012.json` is a part that ended its workers again and again, with the
end of their log.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import TypeAdapter

from storage.documents import parse_document, understood
from storage.errors import DocumentError, StorageError
from storage.files import json_bytes, reason_of
from storage.object_store import Place

if TYPE_CHECKING:
    from distributed import Client

CONTROL_FILE = "control.json"
QUARANTINE_FOLDER = "quarantine"
CONTROL_FIX = "write it again with palimpsest campaign resume, or remove it"
QUARANTINE_FIX = "remove it, and the part is tried again"
LOG_TAIL_CHARS = 20_000
_QUARANTINE_PATTERN = re.compile(r"part-(\d{6,})\.json")

State = Literal["running", "paused", "cancelled"]
"""paused: start no new part, let the running ones finish. cancelled: stop at once, lose them."""


@dataclass(frozen=True)
class Control:
    """Request to a campaign, and its time (seconds since 1970; 0 if never asked)."""

    state: State = "running"
    since: float = 0.0

    def __post_init__(self) -> None:
        if self.state not in get_args(State):
            raise ValueError(
                f"state {self.state!r} is none of {', '.join(get_args(State))}; write one of them, "
                "for example with palimpsest campaign resume"
            )


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A part that is not tried again: why, how often it was, on which workers, and their log."""

    part: int
    reason: str
    attempts: int
    log: str
    workers: tuple[str, ...]
    since: float


_QUARANTINED = TypeAdapter(Quarantined)


def read_control(place: Place) -> Control:
    """Request to the campaign of the store at `place`; running if nobody asked. StorageError if the
    file cannot be read, or says anything else."""
    asked = _read(place, CONTROL_FILE, CONTROL_FIX)
    if asked is None:
        return Control()
    with understood(f"{place}/{CONTROL_FILE}", CONTROL_FIX):
        return Control(asked["state"], float(asked["since"]))


def write_control(place: Place, state: State) -> Control:
    """Ask the campaign to run, to pause or to stop; ValueError for anything else."""
    control = Control(state, round(time.time(), 3))
    place.replace(CONTROL_FILE, json_bytes(asdict(control)))
    return control


def resume_if_stopped(place: Place) -> str | None:
    """Set a paused or cancelled campaign to running, and return a sentence on it; else None."""
    before = read_control(place)
    if before.state == "running":
        return None
    write_control(place, "running")
    ago = age_text(time.time() - before.since)
    return f"the campaign was {before.state} {ago} ago and goes on now"


def read_quarantine(place: Place) -> list[Quarantined]:
    """Parts that were given up, ascending; StorageError for files of anything else."""
    found = []
    for name in place.children(QUARANTINE_FOLDER):
        if not _QUARANTINE_PATTERN.fullmatch(name):
            continue  # what a killed writer left
        path = f"{QUARANTINE_FOLDER}/{name}"
        if (body := _read(place, path, QUARANTINE_FIX)) is not None:
            with understood(f"{place}/{path}", QUARANTINE_FIX):
                found.append(_QUARANTINED.validate_python(body))
    return sorted(found, key=lambda quarantined: quarantined.part)


def write_quarantine(
    place: Place,
    part: int,
    *,
    reason: str,
    attempts: int,
    log: str = "",
    workers: Sequence[str] = (),
) -> Quarantined:
    """Give up a part, keeping the end of its workers' `log`; replaces an earlier note."""
    quarantined = Quarantined(
        part=part, reason=reason, attempts=attempts, log=log[-LOG_TAIL_CHARS:],
        workers=tuple(workers), since=round(time.time(), 3),
    )  # fmt: skip
    place.make_folders([QUARANTINE_FOLDER])
    place.replace(quarantine_path(part), json_bytes(asdict(quarantined)))
    return quarantined


def clear_quarantine(place: Place, parts: Iterable[int]) -> None:
    """Let the next campaign try `parts` again."""
    for part in parts:
        place.remove(quarantine_path(part))


def quarantine_path(part: int) -> str:
    """Path in the store of the note that a part was given up, with its log."""
    return f"{QUARANTINE_FOLDER}/part-{part:06d}.json"


def age_text(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `2 days 4 h`; a clock that is ahead gives `0 s`."""
    seconds = max(0.0, seconds)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h"


def _read(place: Place, path: str, fix: str) -> dict[str, Any] | None:
    """The document at `path`; None without one. Raises DocumentError."""
    where = f"{place}/{path}"
    try:
        return parse_document(place.read(path), where, fix)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DocumentError(f"{where} cannot be read ({reason_of(error)}); {fix}") from error


OnNotice = Callable[[str], None]
"""Called with a sentence about what the campaign waits for, repeats or gives up."""


class CampaignError(Exception):
    """Some parts could not be made, or the campaign was stopped; the others are in the store."""


@dataclass(frozen=True)
class Pace:
    """Seconds between looks at the control file and at the workers, between reports of progress,
    before each repetition of a part after a transient error, and without any worker at all."""

    look_s: float = 5.0
    poll_s: float = 0.5
    retry_s: tuple[float, ...] = (5.0, 30.0, 120.0)
    patience_s: float = 3600.0


def log_notice(text: str) -> None:
    """Write a line to the log, which is stderr by default."""
    logging.getLogger("palimpsest").warning(text)


class Watch:
    """The state when last looked at: `is_paused`, `n_workers`, `resources` that a part needs."""

    def __init__(
        self, place: Place, client: Client, device: str, pace: Pace, on_notice: OnNotice
    ) -> None:
        self.place, self.client, self.device = place, client, device
        self.pace, self.on_notice = pace, on_notice
        self.is_paused = False
        self.n_workers = 0
        self.resources: dict[str, float] = {}
        self._unread = ""
        self._without_workers_since: float | None = None
        self._next_look = float("-inf")

    def look(self, n_running: int, standing: str) -> None:
        """Look, if it is time to; `standing` is the progress in words.

        Raises:
            CampaignError: it was cancelled, lost its scheduler, or had no worker for too long.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.pace.look_s
        try:
            state, unread = read_control(self.place).state, ""
        except (StorageError, OSError) as error:  # then as before
            state, unread = "paused" if self.is_paused else "running", str(error)
            if unread != self._unread:
                self.on_notice(f"whether to pause cannot be read now: {unread}")
        self._unread = unread
        if state == "cancelled":
            raise CampaignError(
                f"the campaign was cancelled; {standing}. `palimpsest campaign resume` and the "
                "same command go on from there"
            )
        if self.is_paused and state == "running":
            self.on_notice("the campaign goes on")
        if state == "paused" and not self.is_paused:
            self.on_notice(
                f"paused: no new part is started, {n_running} are finished first; `palimpsest "
                "campaign resume` goes on"
            )
        self.is_paused = state == "paused"
        if self.client.status != "running":
            raise CampaignError(
                f"the connection to the scheduler is {self.client.status}; {standing}; run the "
                "same command again"
            )
        workers = self.client.scheduler_info()["workers"]
        has_gpus = any("GPU" in worker.get("resources", {}) for worker in workers.values())
        self.resources = {"GPU": 1} if has_gpus and self.device.startswith("cuda") else {}
        self.n_workers = len(self.client.nthreads())
        if self.n_workers:
            if self._without_workers_since is not None:
                self.on_notice(f"workers are there: {self.n_workers}")
            self._without_workers_since = None
            return
        now, patience = time.monotonic(), f"{self.pace.patience_s:.0f} s"
        if self._without_workers_since is None:
            self._without_workers_since = now
            self.on_notice(f"no worker is there; waiting up to {patience} for one")
        if now - self._without_workers_since >= self.pace.patience_s:
            raise CampaignError(
                f"no worker was there for {patience}; {standing}; start workers and run the same "
                "command again"
            )
