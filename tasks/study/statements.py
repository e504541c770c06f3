"""A claim about a study, and what its rule comes to: one of four outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from tasks.families.weights.study.checks import Verdict
from tasks.study.results import NotTestableError

R = TypeVar("R")
Outcome = Literal["holds", "does not hold", "undecided", "not testable"]
"""Of a claim. Undecided: tested, and the numbers leave it open. Not testable: its subject is not
among what was run; `ours` then says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Statement(Generic[R]):
    """A claim, where it is made, what the paper found, and the rule that `check` decides by.

    `check` gives our numbers and the verdict on the results R of a study, or raises
    NotTestableError.
    """

    claim: str
    where: str
    theirs: str
    rule: str
    check: Callable[[R], Verdict]


def outcome_of(holds: bool | None) -> Outcome:
    """The outcome of a claim that was tested, by the verdict of its rule; None: it is left open."""
    return "undecided" if holds is None else "holds" if holds else "does not hold"


def decided(statements: Iterable[Statement[R]], results: R) -> list[dict[str, Any]]:
    """What each claim comes to on these results, as it stands in a record."""
    found = []
    for statement in statements:
        outcome: Outcome
        try:
            ours, holds = statement.check(results)
            outcome = outcome_of(holds)
        except NotTestableError as reason:
            ours, outcome = str(reason), "not testable"
        found.append(
            {
                "claim": statement.claim,
                "where": statement.where,
                "theirs": statement.theirs,
                "ours": ours,
                "rule": statement.rule,
                "outcome": outcome,
            }
        )
    return found
