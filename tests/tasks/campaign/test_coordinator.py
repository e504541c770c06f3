"""The bookkeeping of a campaign: what is next, what waits, what is given up, what that blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recon_core.sampling import Phase
from storage.pairs.receipts import (
    ImageTable,
)
from tasks.campaign.coordinator import Coordinator, KnownCounts, Sum
from tasks.campaign.plan import Plan
from tests.tasks.troubled_runs import MIXED, UNIFORM, no_op, small_images


def taken(parts: Coordinator, now_s: float = 0.0) -> list[int]:
    """All parts that can be started now."""
    found = []
    while (part := parts.next_part(now_s)) is not None:
        found.append(part)
    return found


def receipt_of(part: int, seed: int) -> Any:
    """What plans read of a receipt."""
    rng = np.random.default_rng((seed, part))
    ids = np.sort(rng.choice(40, 8, replace=False))
    pairs = rng.integers(0, 9, 8)
    return Sum(ImageTable(ids, np.ones(8, np.int64), np.minimum(pairs, 1), pairs), part)


def test_a_round_that_needs_counts_waits_for_the_rounds_that_it_may_know() -> None:
    parts = Coordinator(MIXED)  # one part a round, lag 1: part 3 knows 0, 1, 2 and 3 waits for them
    assert taken(parts) == [0, 1, 2]
    parts.finished(2)
    parts.finished(0)
    assert taken(parts) == []
    parts.finished(1)
    assert taken(parts) == [3]


def test_a_transient_error_waits_for_a_growing_delay_and_others_go_on() -> None:
    parts = Coordinator(UNIFORM, retry_delays_s=(5.0, 30.0))
    assert [parts.next_part(0.0) for _ in range(2)] == [0, 1]
    assert parts.erred(0, "no answer", 0.0) == 5.0
    assert parts.next_retry_s() == 5.0
    assert parts.next_part(4.9) == 2
    assert parts.next_part(5.0) == 0
    assert parts.erred(0, "no answer", 10.0) == 30.0
    assert parts.next_part(39.0) == 3
    assert parts.next_part(40.0) == 0
    assert parts.erred(0, "no answer", 40.0) is None
    assert parts.failed == {0: "no answer (tried 3 times)"}
    assert 0 not in taken(parts, 1e9)


def test_the_part_that_ran_in_three_deaths_is_quarantined_and_not_the_one_behind_it() -> None:
    parts = Coordinator(UNIFORM)
    assert [parts.next_part(0.0), parts.next_part(0.0)] == [0, 1]
    for worker in ("a", "b", "c"):
        parts.started(0, worker)
    assert not parts.given_up(1, 0.0)  # Dask counts the deaths against both
    assert parts.next_part(0.0) == 1
    assert parts.given_up(0, 0.0)
    assert parts.kills(0) == ["a", "b", "c"]
    parts.quarantine(0)
    parts.finished(1)
    assert taken(parts) == [2, 3, 4, 5]


def test_a_worker_that_came_back_with_an_error_was_not_killed() -> None:
    parts = Coordinator(UNIFORM, retry_delays_s=(0.0,) * 9)
    parts.next_part(0.0)
    for _ in range(4):
        parts.started(0, "a")
        parts.erred(0, "no answer", 0.0)
        parts.next_part(0.0)
    assert parts.kills(0) == []


def test_a_part_that_no_worker_could_begin_is_quarantined_in_the_end() -> None:
    parts = Coordinator(UNIFORM)
    parts.next_part(0.0)
    assert [parts.given_up(0, 0.0) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("lose", ["quarantine", "fail", "earlier"])
def test_a_lost_part_blocks_the_rounds_that_may_know_it_and_no_uniform_one(lose: str) -> None:
    phases = (*MIXED.phases, Phase(n_runs=4))
    sampling = replace(MIXED, phases=phases, lag=2)  # part 3 knows 0 and 1; part 4 also 2
    parts = Coordinator(sampling, quarantined=[2] if lose == "earlier" else [])
    started = taken(parts)
    assert started == ([0, 1] if lose == "earlier" else [0, 1, 2])
    if lose == "quarantine":
        parts.quarantine(2)
    if lose == "fail":
        parts.fail(2, "out of memory")
    parts.finished(0)
    parts.finished(1)
    assert taken(parts) == [3, 6, 7]
    assert parts.n_blocked == 2
    for part in (3, 6, 7):
        parts.finished(part)
    assert parts.is_over


def test_what_is_in_the_store_is_given_out_to_be_checked_and_quarantined_parts_are_not() -> None:
    parts = Coordinator(UNIFORM, done=[1, 99], quarantined=[3, 1])
    assert taken(parts) == [0, 1, 2, 4, 5]
    assert parts.done == {1}
    assert parts.quarantined == {3}


@pytest.mark.parametrize("sampler", ["least_seen", "adaptive"])
def test_summed_receipts_give_the_plan_that_all_of_them_give(sampler) -> None:
    later = replace(MIXED.phases[1], sampler=sampler, n_runs=12)
    sampling = replace(MIXED, phases=(MIXED.phases[0], later), lag=2)
    plan = Plan(no_op(sampling), small_images())
    receipts = [receipt_of(part, seed=3) for part in range(sampling.n_parts)]
    known = KnownCounts(sampling, len(plan.labels))
    plans = set()
    for part in range(sampling.n_parts):
        summed = list(known.receipts(sampling.round_of_part(part)))
        assert plan.part(part, summed) == plan.part(part, receipts)
        plans.add(plan.part(part, summed).plan_hash == plan.part(part, []).plan_hash)
        known.keep(receipts[part])
        known.add(part + 1)
    assert plans == {True, False}  # counts have mattered
