"""State of a campaign in its store, beside its parts: the wish to pause, and parts that were given
up.

`control.json` is how `palimpsest campaign pause`, `resume` and `cancel` reach a coordinator on any
machine. `quarantine/part-000012.json` is a part that ended its workers again and again, with the
end of their log.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from storage.documents import parse_document, understood
from storage.errors import DocumentError
from storage.files import json_bytes, reason_of
from storage.object_store import Place

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
    """Asks the campaign to run, to pause or to stop; ValueError for anything else."""
    control = Control(state, round(time.time(), 3))
    place.replace(CONTROL_FILE, json_bytes(asdict(control)))
    return control


def resume_if_stopped(place: Place) -> str | None:
    """Sets a paused or cancelled campaign to running and says so in one sentence, else None."""
    before = read_control(place)
    if before.state == "running":
        return None
    write_control(place, "running")
    ago = age_text(time.time() - before.since)
    return f"the campaign was {before.state} {ago} ago and goes on now"


def read_quarantine(place: Place) -> list[Quarantined]:
    """The parts that were given up, ascending; StorageError for files that say anything else."""
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
    """Gives up a part, keeping the end of its workers' `log`; replaces what was said before."""
    quarantined = Quarantined(
        part=part, reason=reason, attempts=attempts, log=log[-LOG_TAIL_CHARS:],
        workers=tuple(workers), since=round(time.time(), 3),
    )  # fmt: skip
    place.make_folders([QUARANTINE_FOLDER])
    place.replace(quarantine_path(part), json_bytes(asdict(quarantined)))
    return quarantined


def clear_quarantine(place: Place, parts: Iterable[int]) -> None:
    """Lets the next campaign try `parts` again."""
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
