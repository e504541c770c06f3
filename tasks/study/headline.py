"""The words of a study's page: the first sentence, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.report.headline import NOTHING, interval, percent, score
from tasks.report.record import Record


def number(value: Any) -> str:
    """A number as short as it can be said exactly enough, a text as it is, a dash for None."""
    if value is None:
        return NOTHING
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, list | tuple):
        return ", ".join(number(item) for item in value) or NOTHING
    if not isinstance(value, int | float):
        return str(value)
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    mantissa, e, power = text.partition("e")
    return (f"{mantissa}e{int(power)}" if e else mantissa).replace("-", "−")


def count(value: float | None) -> str:
    """A count per network: `12`, `4.3`, a dash."""
    return NOTHING if value is None else f"{value:.1f}".removesuffix(".0")


def short(value: float | None) -> str:
    """Two significant digits, for losses: `0.0031`, `4.1e−6`."""
    return NOTHING if value is None else number(float(f"{value:.2g}"))


def measure(name: str, value: float | None) -> str:
    """The value of a figure as its cells show it."""
    if name in ("good_fraction", "test_accuracy"):
        return percent(value)
    return count(value) if name in ("n_good", "n_effective", "attack_seconds") else score(value)


def with_interval(name: str, value: float | None, low: float | None, high: float | None) -> str:
    """`4.3 [2.1, 6.4]`."""
    text = measure(name, value)
    if low is None or high is None:
        return text
    if name == "mean_ssim":
        return f"{text} {interval((low, high))}"
    return f"{text} [{measure(name, low)}, {measure(name, high)}]"


def plural(n: int, one: str, many: str) -> str:
    """`1 network`, `3 networks`."""
    return f"{n} {one if n == 1 else many}"


def claim_counts(record: Record) -> dict[str, int]:
    """How many claims there are, and how many of each outcome."""
    outcomes = [claim["outcome"] for claim in record["claims"]]
    return {
        "n_claims": len(outcomes),
        "holds": outcomes.count("holds"),
        "fails": outcomes.count("does not hold"),
        "undecided": outcomes.count("undecided"),
        "untestable": outcomes.count("not testable"),
    }


def headline(record: Record) -> dict[str, Any]:
    """What the first sentence says: counts of claims by outcome, the best and the worst cell.

    The best is the one with the largest share of good images, then the highest mean SSIM; the worst
    is None if there is one cell, or none.
    """
    ranked = sorted(
        (cell for cell in record["cells"] if cell["targets"]["n"]), key=_merit, reverse=True
    )
    return {
        **claim_counts(record),
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
    each = " each" if n != 1 else ""
    return (
        f"{made} trained {where} and attacked {plural(record['n_attacks'], 'time', 'times')}{each}."
    )


def runs(outcomes: Mapping[str, int]) -> str:
    """`24 ok, 3 unfitted`: the outcomes that occurred."""
    found = [f"{n} {name}" for name, n in outcomes.items() if n]
    return ", ".join(found) or NOTHING


def spread(values: Sequence[float | None], show: Any) -> str:
    """`0.41 to 0.52` over the networks of a cell; empty if they do not differ as shown."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or show(min(known)) == show(max(known)):
        return ""
    return f"{show(min(known)).removesuffix(' %')} to {show(max(known))}"
