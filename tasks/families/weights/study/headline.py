"""The words of a study's page: the first sentences, and values as its cells show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tasks.page.files import Record
from tasks.page.formats import count, percent, plural, score
from tasks.page.tables import claim_counts, whose_claims

SHOWN: dict[str, Callable[[float | None], str]] = {
    **dict.fromkeys(("good_fraction", "test_accuracy"), percent),
    **dict.fromkeys(("n_good", "n_effective", "attack_seconds"), count),
}


def measure(name: str, value: float | None) -> str:
    """The value of a figure as its cells show it."""
    return SHOWN.get(name, score)(value)


def headline(record: Record) -> dict[str, Any]:
    """Counts of claims by outcome, the best and the worst cell.

    The best is the one with the largest share of good images, then the highest mean SSIM; the worst
    is None if there is one cell, or none.
    """
    cells = [cell for cell in record["cells"] if cell["targets"]["n"]]
    ranked = sorted(cells, key=_merit, reverse=True)
    return {
        **claim_counts(record),
        "whose": whose_claims(record),
        "best": ranked[0] if ranked else None,
        "worst": ranked[-1] if len(ranked) > 1 else None,
        "any_good": any(cell["targets"]["n_good"] for cell in record["cells"]),
    }


def _merit(cell: Record) -> tuple[float, float]:
    targets = cell["targets"]
    mean = targets["mean_ssim"]
    return targets["good_fraction"] or 0.0, -1.0 if mean is None else mean


def networks(record: Record) -> str:
    """A sentence on what was trained and attacked."""
    cells = record["cells"]
    n = sum(len(cell["victims"]) for cell in cells)
    made = plural(n, "network was", "networks were")
    where = "in one cell" if len(cells) == 1 else f"in {len(cells)} cells of settings"
    attacked = plural(record["n_attacks"], "time", "times")
    return f"{made} trained {where} and attacked {attacked}{' each' if n != 1 else ''}."


def spread(values: Sequence[float | None], show: Callable[[float | None], str]) -> str:
    """`0.41 to 0.52` over the networks of a cell; empty if they do not differ as shown."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or show(min(known)) == show(max(known)):
        return ""
    return f"{show(min(known)).removesuffix(' %')} to {show(max(known))}"


percents, counts = partial(spread, show=percent), partial(spread, show=count)
