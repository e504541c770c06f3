"""Watch of a campaign, every few seconds: requests to it, and the workers that are there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.errors import StorageError
from storage.object_store import Place
from tasks.campaign.coordinator import RETRY_DELAYS_S
from tasks.campaign.state import State, read_control

if TYPE_CHECKING:
    from distributed import Client

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
    retry_s: tuple[float, ...] = RETRY_DELAYS_S
    patience_s: float = 3600.0


def log_notice(text: str) -> None:
    """A line of the log, on stderr where nobody has set up another one."""
    logging.getLogger("palimpsest").warning(text)


class Watch:
    """State as it was seen last: `is_paused`, `n_workers`, and the `resources` that a part
    needs."""

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
        """Looks, if it is time to; `standing` says how far the campaign is.

        Raises:
            CampaignError: it was cancelled, lost its scheduler, or had no worker for too long.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.pace.look_s
        state = self._control()
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
        self._find_workers(standing)

    def _control(self) -> State:
        """What the store says is to be done; what it said before, if it cannot be read now."""
        try:
            control, unread = read_control(self.place).state, ""
        except (StorageError, OSError) as error:
            control, unread = "paused" if self.is_paused else "running", str(error)
            if unread != self._unread:
                self.on_notice(f"whether to pause cannot be read now: {unread}")
        self._unread = unread
        return control

    def _find_workers(self, standing: str) -> None:
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
