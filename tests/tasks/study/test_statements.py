"""Rules of claims as tables of (values, verdict): inside a tolerance, beyond it, and in doubt."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.evaluation.evaluated import Difference as EvaluatedDifference
from tasks.page.formats import is_ours
from tasks.study.statements import (
    Difference,
    Statement,
    above,
    all_of,
    decided,
    every,
    not_below,
    share_above,
    share_at_most,
)

SLACK = 0.02
BELOW = [
    ((-0.002, -0.001), True),  # below 0 beyond chance, and within the tolerance
    ((-0.02, 0.01), True),
    ((0.1, 0.2), True),
    ((-0.03, 0.01), None),
    ((-0.03, -0.001), None),  # holds the tolerance
    ((-0.05, -0.02), None),
    ((-0.05, -0.021), False),
]
ABOVE = [((0.01, 0.2), True), ((0.0, 0.2), None), ((-0.1, 0.1), None), ((-0.1, 0.0), False),
         ((-0.2, -0.1), False), ((0.0, 0.0), False)]  # fmt: skip


@pytest.mark.parametrize(("ends", "verdict"), BELOW)
def test_not_below_asks_for_the_tolerance_first(
    ends: tuple[float, float], verdict: bool | None
) -> None:
    assert not_below(*ends, SLACK) is verdict
    middle = sum(ends) / 2
    assert Difference(middle, *ends).not_below(SLACK) is verdict
    assert EvaluatedDifference(middle, *ends).not_below(SLACK) is verdict


@pytest.mark.parametrize(("ends", "verdict"), ABOVE)
def test_above_asks_for_the_whole_interval(ends: tuple[float, float], verdict: bool | None) -> None:
    moved = [end + 0.3 for end in ends]
    assert above(*moved, 0.3) is verdict
    middle = sum(ends) / 2
    assert Difference(middle, *ends).above() is verdict
    assert EvaluatedDifference(middle, *ends).above() is verdict
    assert Difference(middle, *ends).holds is verdict
    assert Difference(middle, *ends).holds_for_each is verdict


@pytest.mark.parametrize(
    ("each", "holds", "for_each"),
    [((0.1, 0.3), True, True), ((0.0, 0.4), True, None), ((-0.1, 0.5), None, None)],
)
def test_a_pair_that_says_otherwise_leaves_it_open(
    each: tuple[float, ...], holds: bool | None, for_each: bool | None
) -> None:
    d = Difference(0.2, 0.1, 0.3, each)
    assert (d.holds, d.holds_for_each) == (holds, for_each)


@pytest.mark.parametrize(
    ("n_hits", "n", "at_most", "more_than"),
    [
        (0, 100, True, False),
        (5, 100, True, None),  # at the limit of 5 %, which the interval holds
        (8, 150, None, None),  # 5.3 % [2.3, 10.2]
        (30, 150, False, True),
        (1, 10, None, None),
        (10, 10, False, True),
    ],
)
def test_shares_are_judged_by_their_exact_interval(
    n_hits: int, n: int, at_most: bool | None, more_than: bool | None
) -> None:
    assert share_at_most(n_hits, n, 0.05) is at_most
    assert share_above(n_hits, n, 0.05) is more_than


@pytest.mark.parametrize(
    ("verdicts", "found"),
    [([True], True), ([True, None], None), ([None, False], False), ([], True)],
)
def test_every(verdicts: list[bool | None], found: bool | None) -> None:
    assert every(verdicts) is found
    if verdicts:
        assert all_of([("", verdict) for verdict in verdicts])[1] is found


@pytest.mark.parametrize(
    ("holds", "short_of", "outcome"),
    [
        (False, None, "does not hold"),
        (False, "4 attacks (theirs 100)", "undecided"),
        (True, "4 attacks (theirs 100)", "holds"),
        (None, "4 attacks (theirs 100)", "undecided"),
    ],
)
def test_less_effort_than_the_papers_refutes_nothing(
    holds: bool | None, short_of: str | None, outcome: str
) -> None:
    statement: Statement[Any] = Statement(
        claim="c", where="w", theirs="t", rule="r",
        check=lambda _results: ("1 of 9", holds), short_of=lambda _results: short_of,
    )  # fmt: skip
    (found,) = decided([statement], None)
    assert found["outcome"] == outcome
    said = "1 of 9; undecided at our size: 4 attacks (theirs 100)"
    assert found["ours"] == (said if holds is False and short_of else "1 of 9")


def test_questions_of_ours_are_told_by_their_place() -> None:
    assert is_ours("ours; beside section 5.1.1")
    assert not is_ours("section 5.1.1")
