"""Claims about a study, each decided by a rule with one of four outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from recon_core.summary import proportion_interval

R = TypeVar("R")
Verdict = tuple[str, bool | None]
"""Our numbers in words, and whether they meet the rule of a claim; None if they leave it open."""
Outcome = Literal["holds", "does not hold", "undecided", "not testable"]
"""Outcome of a claim. Undecided: the numbers leave it open. Not testable: what it is about was not
run; `ours` then says what is missing."""


AT_OUR_SIZE = "; undecided at our size: "
"""Stands between the numbers of a claim that failed and how much less than the paper we tried."""


class NotTestableError(Exception):
    """The study lacks what a claim is about, which the message names."""


@dataclass(frozen=True)
class Difference:
    """A difference of two means with its 95 % interval, and the differences of single pairs, which
    are `by` victims that share their images, or seeds."""

    value: float
    low: float
    high: float
    each: tuple[float, ...] = ()
    by: str = ""

    def above(self, margin: float = 0.0) -> bool | None:
        """As `above` of the interval."""
        return above(self.low, self.high, margin)

    def not_below(self, slack: float) -> bool | None:
        """As `not_below` of the interval."""
        return not_below(self.low, self.high, slack)

    @property
    def holds(self) -> bool | None:
        """True if above 0 beyond chance and opposed by no pair; None if that is undecided."""
        opposed = self.value <= 0 or min(self.each, default=0) < 0
        return None if self.above() and opposed else self.above()

    @property
    def holds_for_each(self) -> bool | None:
        """True if above 0 beyond chance and for each pair; None if that is undecided."""
        return None if self.above() and min(self.each, default=1) <= 0 else self.above()

    def __str__(self) -> str:
        text = f"{self.value:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"
        each = ", ".join(f"{d:+.3g}" for d in self.each)
        return f"{text} (by {self.by} {each})" if self.by else text


def above(low: float, high: float, threshold: float = 0.0) -> bool | None:
    """True: the interval is above the threshold. False: at or below it. None: it contains it."""
    return True if low > threshold else False if high <= threshold else None


def not_below(low: float, high: float, slack: float) -> bool | None:
    """True: the interval lies at -slack or above, wherever 0 is. False: all of it is below -slack.
    None: it contains -slack."""
    return True if low >= -slack else False if high < -slack else None


def share_above(n_hits: int, n: int, threshold: float) -> bool | None:
    """As `above`, for the exact interval of a share (Clopper and Pearson)."""
    return above(*proportion_interval(n_hits, n), threshold)


def share_at_most(n_hits: int, n: int, limit: float) -> bool | None:
    """True: `n_hits` of `n` are at most the limit. False: more, beyond chance. None: between."""
    if n_hits <= limit * n:
        return True
    return False if proportion_interval(n_hits, n)[0] > limit else None


def every(verdicts: Iterable[bool | None]) -> bool | None:
    """False if any is False, else None if any is None, else True."""
    found = set(verdicts)
    return False if False in found else None if None in found else True


def all_of(found: Sequence[Verdict]) -> Verdict:
    """Join several comparisons into one verdict. Raises NotTestableError without any."""
    if not found:
        raise NotTestableError("the study has nothing to compare")
    return "; ".join(text for text, _holds in found), every(holds for _text, holds in found)


def decided_by(
    found: Iterable[tuple[str, Difference]],
    holds: Callable[[Difference], bool | None] = lambda d: d.holds,
) -> Verdict:
    """Join several named differences into one verdict: whether all hold."""
    return all_of([(f"{name}: {d}", holds(d)) for name, d in found])


@dataclass(frozen=True, kw_only=True)
class Statement(Generic[R]):
    """A claim, where the paper makes it, what it found (`theirs`), and the rule that decides it.

    `check` applies the rule to the results R of a study, or raises NotTestableError. `short_of`
    says by how much our effort falls short of the paper's, None if it does not: a claim that fails
    with less effort is undecided. A question of our own has a `where` that begins with
    `tasks.page.formats.OURS`.
    """

    claim: str
    where: str
    theirs: str
    rule: str
    check: Callable[[R], Verdict]
    short_of: Callable[[R], str | None] = lambda _results: None


def outcome_of(holds: bool | None) -> Outcome:
    """The outcome of a tested claim, by the verdict of its rule."""
    return "undecided" if holds is None else "holds" if holds else "does not hold"


def decided(statements: Iterable[Statement[R]], results: R) -> list[dict[str, Any]]:
    """Decide the claims on these results, as they stand in a record."""
    found = []
    for statement in statements:
        outcome: Outcome
        try:
            ours, holds = statement.check(results)
            outcome = outcome_of(holds)
            if outcome == "does not hold" and (less := statement.short_of(results)):
                ours, outcome = f"{ours}{AT_OUR_SIZE}{less}", "undecided"
        except NotTestableError as reason:
            ours, outcome = str(reason), "not testable"
        said = {key: getattr(statement, key) for key in ("claim", "where", "theirs")}
        found.append({**said, "ours": ours, "rule": statement.rule, "outcome": outcome})
    return found
