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
from collections import Counter, defaultdict
from collections.abc import Iterable

from recon_core.sampling import History, Sampling
from storage.pairs.receipts import Receipt

MAX_KILLS = 3
"""Workers that a part may take with it."""


class Coordinator:
    """Keeps account of all parts; every operation takes constant time, amortised.

    `done` are the parts that have a receipt, `quarantined` those given up by earlier invocations.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        done: Iterable[int] = (),
        quarantined: Iterable[int] = (),
        retry_delays_s: tuple[float, ...] = (),
    ) -> None:
        self.sampling = sampling
        self.retry_delays_s = retry_delays_s
        self.done = {part for part in done if part < sampling.n_parts}
        self.quarantined = {p for p in quarantined if p < sampling.n_parts} - self.done
        self.failed: dict[int, str] = {}
        self.running: set[int] = set()
        self.n_blocked = 0
        self._started_on: defaultdict[int, list[str]] = defaultdict(list)
        """Workers that began a part and did not return; one that runs it is last."""
        self._n_given_up: Counter[int] = Counter()  # how often Dask gave a part up for dead
        self._n_errors: Counter[int] = Counter()  # transient ones
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
        """Choose the part to start now, which then counts as running; None if there is none.

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
            needed = 0  # rounds that the plan depends on
            if self.sampling.needs_counts(round_index):
                needed = self.sampling.known_rounds(round_index).stop
            if part in self.quarantined:
                self._next += 1
            elif self.n_known_rounds() >= needed:
                self._next += 1
                self.running.add(part)
                return part
            elif self._lost_round < needed:
                after = self.sampling.parts_of_round(round_index).stop
                self.n_blocked += after - part
                self._next = after
            else:
                break
        return None

    def next_retry_s(self) -> float:
        """Time at which the first of the delayed parts is due; infinity if there is none."""
        return self._delayed[0][0] if self._delayed else float("inf")

    def n_known_rounds(self) -> int:
        """Number of rounds, from the first on, that are done as a whole."""
        while self._n_known_rounds < self.sampling.n_rounds and all(
            part in self.done for part in self.sampling.parts_of_round(self._n_known_rounds)
        ):
            self._n_known_rounds += 1
        return self._n_known_rounds

    def started(self, part: int, worker: str) -> None:
        """Note that a worker begins the part."""
        self._started_on[part].append(worker)

    def finished(self, part: int) -> None:
        """Note that the part has a receipt."""
        self.running.discard(part)
        self.done.add(part)

    def erred(self, part: int, reason: str, now_s: float) -> float | None:
        """Note a transient error; return the delay before a repetition, None if it has failed."""
        del self._started_on[part][-1:]  # this one came back, with an error
        self._n_errors[part] += 1
        n_errors = self._n_errors[part]
        if n_errors > len(self.retry_delays_s):
            self.fail(part, f"{reason} (tried {n_errors} times)")
            return None
        delay_s = self.retry_delays_s[n_errors - 1]
        self.running.discard(part)
        heapq.heappush(self._delayed, (now_s + delay_s, part))
        return delay_s

    def fail(self, part: int, reason: str) -> None:
        """Give the part up for this invocation."""
        self.failed[part] = reason
        self._lose(part)

    def kills(self, part: int) -> list[str]:
        """Workers that began the part and did not return; one that runs it is last."""
        return self._started_on[part]

    def given_up(self, part: int, now_s: float) -> bool:
        """Note that Dask gave the part up for dead; return True if it is to be quarantined.

        Dask counts the death of a worker against parts, too, that waited behind the running one.
        These are started again, unless Dask gives them up three times.
        """
        self._n_given_up[part] += 1
        if max(len(self._started_on[part]), self._n_given_up[part]) >= MAX_KILLS:
            return True
        self.running.discard(part)
        heapq.heappush(self._delayed, (now_s, part))
        return False

    def quarantine(self, part: int) -> None:
        """Leave the part out from now on."""
        self.quarantined.add(part)
        self._lose(part)

    def _lose(self, part: int) -> None:
        self.running.discard(part)
        self._lost_round = min(self._lost_round, self.sampling.round_of_part(part))


class KnownCounts:
    """Counts of the images in all rounds up to one: unpacking every receipt for every part that is
    planned from them would be quadratic."""

    def __init__(self, sampling: Sampling, n_images: int) -> None:
        rounds = [k for k in range(sampling.n_rounds) if sampling.needs_counts(k)]
        self._n_needed = sampling.known_rounds(rounds[-1]).stop if rounds else 0
        self._n_always_known = sampling.known_rounds(rounds[0]).stop if rounds else 0
        self._sampling = sampling
        self._receipts: dict[int, Receipt] = {}
        self._n_added = 0
        self._history = History.empty(n_images)

    def keep(self, receipt: Receipt) -> None:
        """Keep a receipt of any round if a plan needs it."""
        if self._sampling.round_of_part(receipt.part) < self._n_needed:
            self._receipts[receipt.part] = receipt

    def add(self, n_done: int) -> None:
        """Note that the first `n_done` rounds are done, and sum what every later plan knows."""
        self._sum(min(n_done, self._n_always_known))

    def history(self, round_index: int) -> History:
        """Counts that the plan of a round may know; ask for rounds in ascending order."""
        if self._sampling.needs_counts(round_index):
            self._sum(self._sampling.known_rounds(round_index).stop)
        return self._history

    def _sum(self, n_rounds: int) -> None:
        for round_index in range(self._n_added, n_rounds):
            for part in self._sampling.parts_of_round(round_index):
                table = self._receipts.pop(part).image_table()
                self._history.n_runs[table.image_ids] += table.n_runs
                self._history.n_back[table.image_ids] += table.n_back
                self._history.n_pairs[table.image_ids] += table.n_pairs
        self._n_added = max(n_rounds, self._n_added)
