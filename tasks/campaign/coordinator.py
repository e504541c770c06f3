"""The state of a campaign in progress: which part is next, which wait, which are given up.

No Dask and no clock in here. Parts are started in order. A part ends in one of four ways:

- *done*: it has a receipt.
- *failed*: an error that comes again if it is repeated at once; the next invocation tries it again.
- *retried*: an error of a network or a file service. It waits for a growing delay.
- *quarantined*: three workers died while they ran it. Later invocations leave it out, until
  somebody clears it.

**What depends on a lost part.** A round of a sampler that needs counts is planned from all parts
of the rounds it may know. If one of them failed or is quarantined, the round is *blocked*: planned
without it, the dataset would depend on which worker died. Rounds of the uniform sampler go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from recon_core.sampling import Sampling
from storage.pairs.receipts import ImageTable, Receipt

MAX_KILLS = 3
"""Workers that a part may take with it."""
RETRY_DELAYS_S = (5.0, 30.0, 120.0)


@dataclass
class _Part:
    """What happened to one part so far, in this invocation."""

    started_on: list[str] = field(default_factory=list)  # workers that did not come back from it
    n_given_up: int = 0  # how often Dask gave it up for dead
    n_errors: int = 0  # transient ones


class Coordinator:
    """The bookkeeping of all parts; every operation takes constant time, amortised.

    `done` are the parts that have a receipt, `quarantined` those given up by earlier invocations.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        done: Iterable[int] = (),
        quarantined: Iterable[int] = (),
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
    ) -> None:
        self.sampling = sampling
        self.retry_delays_s = retry_delays_s
        self.done = {part for part in done if part < sampling.n_parts}
        self.quarantined = {p for p in quarantined if p < sampling.n_parts} - self.done
        self.failed: dict[int, str] = {}
        self.running: set[int] = set()
        self.n_blocked = 0
        self._states: dict[int, _Part] = {}
        self._delayed: list[tuple[float, int]] = []
        self._next = 0
        self._n_known_rounds = 0
        self._lost_round = min(
            (sampling.round_of_part(part) for part in self.quarantined), default=sampling.n_rounds
        )

    @property
    def n_delayed(self) -> int:
        """Parts that wait to be tried again."""
        return len(self._delayed)

    @property
    def is_over(self) -> bool:
        """True if nothing runs, nothing waits, and nothing more can be started."""
        return not (self.running or self._delayed or self._next < self.sampling.n_parts)

    def next_part(self, now_s: float, *, fresh: bool = True) -> int | None:
        """The part to start now, which then counts as running; None if there is none at present.

        Parts in `done` are given, too: their receipts have to be checked. Without `fresh` only
        parts that are to be repeated.
        """
        if self._delayed and self._delayed[0][0] <= now_s:
            part = heapq.heappop(self._delayed)[1]
            self.running.add(part)
            return part
        while fresh and self._next < self.sampling.n_parts:
            part = self._next
            round_index = self.sampling.round_of_part(part)
            if part in self.quarantined:
                self._next += 1
            elif self.is_ready(round_index):
                self._next += 1
                self.running.add(part)
                return part
            elif self._is_blocked(round_index):
                after = self.sampling.parts_of_round(round_index).stop
                self.n_blocked += after - part
                self._next = after
            else:
                break
        return None

    def next_retry_s(self) -> float:
        """Time at which the first of the delayed parts is due; infinity if there is none."""
        return self._delayed[0][0] if self._delayed else float("inf")

    def is_ready(self, round_index: int) -> bool:
        """True if all that the round's plan depends on is done."""
        if not self.sampling.needs_counts(round_index):
            return True
        return self.n_known_rounds() >= self.sampling.known_rounds(round_index).stop

    def n_known_rounds(self) -> int:
        """Number of rounds, from the first on, that are done as a whole."""
        while self._n_known_rounds < self.sampling.n_rounds and all(
            part in self.done for part in self.sampling.parts_of_round(self._n_known_rounds)
        ):
            self._n_known_rounds += 1
        return self._n_known_rounds

    def started(self, part: int, worker: str) -> None:
        """A worker says that it begins with the part."""
        self._state(part).started_on.append(worker)

    def finished(self, part: int) -> None:
        """The part has a receipt."""
        self._end(part)
        self.done.add(part)

    def erred(self, part: int, reason: str, now_s: float) -> float | None:
        """A transient error: the seconds until the part is tried again, None if it has failed."""
        state = self._state(part)
        state.started_on = state.started_on[:-1]  # this one came back, with an error
        state.n_errors += 1
        if state.n_errors > len(self.retry_delays_s):
            self.fail(part, f"{reason} (tried {state.n_errors} times)")
            return None
        delay_s = self.retry_delays_s[state.n_errors - 1]
        self.running.discard(part)
        heapq.heappush(self._delayed, (now_s + delay_s, part))
        return delay_s

    def fail(self, part: int, reason: str) -> None:
        """The part is not made in this invocation."""
        self._end(part)
        self.failed[part] = reason
        self._lose(part)

    def kills(self, part: int) -> list[str]:
        """The workers that began with the part and did not come back; one that runs it is last."""
        return self._state(part).started_on

    def given_up(self, part: int, now_s: float) -> bool:
        """Dask gave the part up for dead: whether it is to be quarantined.

        Dask counts the death of a worker against parts, too, that waited behind the running one.
        These are started again, unless Dask gives them up three times.
        """
        state = self._state(part)
        state.n_given_up += 1
        if len(state.started_on) >= MAX_KILLS or state.n_given_up >= MAX_KILLS:
            return True
        self.running.discard(part)
        heapq.heappush(self._delayed, (now_s, part))
        return False

    def quarantine(self, part: int) -> None:
        """The part is left out from now on."""
        self._end(part)
        self.quarantined.add(part)
        self._lose(part)

    def _state(self, part: int) -> _Part:
        return self._states.setdefault(part, _Part())

    def _end(self, part: int) -> None:
        self.running.discard(part)
        self._states.pop(part, None)

    def _lose(self, part: int) -> None:
        self._lost_round = min(self._lost_round, self.sampling.round_of_part(part))

    def _is_blocked(self, round_index: int) -> bool:
        return self._lost_round < self.sampling.known_rounds(round_index).stop


@dataclass(frozen=True)
class Sum:
    """Stands in a plan for the receipts of all rounds that it may know."""

    table: ImageTable
    part: int = 0

    def image_table(self) -> ImageTable:
        """The sum of the receipts' tables."""
        return self.table


class KnownCounts:
    """Sum of the receipts of all rounds up to one, as one receipt for the plan: unpacking every
    receipt for every part that is planned from them would be quadratic."""

    def __init__(self, sampling: Sampling, n_images: int) -> None:
        rounds = [k for k in range(sampling.n_rounds) if sampling.needs_counts(k)]
        self._n_needed = sampling.known_rounds(rounds[-1]).stop if rounds else 0
        self._n_always_known = sampling.known_rounds(rounds[0]).stop if rounds else 0
        self._sampling = sampling
        self._receipts: dict[int, Receipt] = {}
        self._n_added = 0
        self._sums: npt.NDArray[np.int64] = np.zeros((3, n_images), np.int64)
        self._summed: tuple[int, Sum] | None = None

    @property
    def n_kept(self) -> int:
        """Receipts that are not summed yet."""
        return len(self._receipts)

    def keep(self, receipt: Receipt) -> None:
        """A receipt, of any round; forgotten again if no plan needs it."""
        if self._sampling.round_of_part(receipt.part) < self._n_needed:
            self._receipts[receipt.part] = receipt

    def add(self, n_done: int) -> None:
        """So many rounds are done, from the first on; what every later plan knows is summed."""
        self._sum(min(n_done, self._n_always_known))

    def receipts(self, round_index: int) -> Iterable[Sum]:
        """One receipt that stands for all that the plan of a round may know; rounds ascending."""
        n_rounds = self._sampling.known_rounds(round_index).stop
        if not self._sampling.needs_counts(round_index) or n_rounds == 0:
            return []
        if self._summed is None or self._summed[0] != n_rounds:
            self._sum(n_rounds)
            ids = np.flatnonzero(self._sums.any(axis=0))
            self._summed = n_rounds, Sum(ImageTable(ids, *self._sums[:, ids]))
        return [self._summed[1]]

    def _sum(self, n_rounds: int) -> None:
        for round_index in range(self._n_added, n_rounds):
            for part in self._sampling.parts_of_round(round_index):
                table = self._receipts.pop(part).image_table()
                rows = np.stack([table.n_runs, table.n_back, table.n_pairs])
                self._sums[:, table.image_ids] += rows
        self._n_added = max(n_rounds, self._n_added)
