"""Claims of the image restoration paper on the growth of its dataset, checked on real campaigns of
another size.

The numbers are those that `benchmarks.coverage.real` left in
docs/results/benchmarks/coverage_real.json: the same victims' images sampled uniformly, and
uniformly first and then from the least seen. Campaigns with other seeds must agree; where they do
not, a claim is undecided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.record import Claim, Measurement
from tasks.study.statements import outcome_of

UNEQUAL = 0.5
"""A Gini coefficient at which two images differ by as many pairs, on average, as an image has."""
THEIRS = "uniform, then least seen"
COMMAND = "python -m benchmarks.coverage.real --data folder:cifar10"

Verdict = tuple[str, bool | None]


@dataclass(frozen=True)
class Campaigns:
    """End of campaigns of one sampler, a number for every seed."""

    n_runs: int
    n_images: int
    covered: tuple[float, ...]
    gini: tuple[float, ...]


def last_of(measurements: Iterable[Measurement], sampler: str) -> Campaigns:
    """The campaigns of `sampler` after all their runs. Raises ValueError if there are none."""
    pattern = re.compile(rf"{sampler} after (\d+) runs on (\d+) images: (.+) \((.+)\)")
    found: dict[tuple[int, int], dict[str, tuple[float, ...]]] = {}
    for measured in measurements:
        if match := pattern.fullmatch(measured.case):
            at = found.setdefault((int(match[1]), int(match[2])), {})
            at[match[3]] = tuple(float(number) for number in match[4].split(", "))
    if not found:
        raise ValueError(f"no campaign of the sampler {sampler!r} was measured; run {COMMAND}")
    n_runs, n_images = max(found)
    numbers = found[n_runs, n_images]
    return Campaigns(n_runs, n_images, numbers["images covered"], numbers["Gini of their pairs"])


def some_come_back_more(uniform: Campaigns, _theirs: Campaigns) -> Verdict:
    missing = ", ".join(f"{uniform.n_images - n:g}" for n in uniform.covered)
    ours = (
        f"after {uniform.n_runs} runs that draw uniformly from {uniform.n_images} images: Gini "
        f"coefficients {_listed(uniform.gini)}; never came back {missing}"
    )
    return ours, _agreed([gini > UNEQUAL for gini in uniform.gini])


def least_seen_covers_more(uniform: Campaigns, theirs: Campaigns) -> Verdict:
    ours = (
        f"after {uniform.n_runs} runs {_listed(uniform.covered)} of {uniform.n_images} images, "
        f"{_listed(theirs.covered)} if the last third draws from the least seen; then Gini "
        f"coefficients {_listed(theirs.gini)}"
    )
    more = [one > other for one in theirs.covered for other in uniform.covered]
    remains = _agreed([gini > UNEQUAL for gini in theirs.gini])
    verdicts = {_agreed(more), remains}
    return ours, False if False in verdicts else None if None in verdicts else True


def _listed(numbers: Sequence[float]) -> str:
    return " and ".join(f"{number:g}" for number in numbers)


def _agreed(verdicts: Sequence[bool]) -> bool | None:
    """What all seeds say; None if they differ."""
    return verdicts[0] if len(set(verdicts)) == 1 else None


STATEMENTS: tuple[tuple[str, str, str, str, Callable[[Campaigns, Campaigns], Verdict]], ...] = (
    (
        "Some images are much more likely to come back than others",
        "section 2",
        "big imbalances; many of 50,000 images never came back in 100,000 uniform runs",
        f"the Gini coefficient of the pairs of the images that came back is above {UNEQUAL:g}, at "
        "which two images differ by as many pairs, on average, as an image has, with every seed",
        some_come_back_more,
    ),
    (
        "Sampling from the least-seen images covers more of them, and imbalances remain",
        "section 2",
        "42,707 of 50,000 images after 50,000 more runs; uniform runs alone were not compared",
        "images covered in as many runs: more than by uniform sampling with every pair of seeds, "
        f"and Gini coefficients still above {UNEQUAL:g}",
        least_seen_covers_more,
    ),
)


def coverage_claims(measurements: Sequence[Measurement], *, name: str) -> Iterator[Claim]:
    """The claims on these campaigns; `name` stands before our numbers."""
    uniform, theirs = (last_of(measurements, sampler) for sampler in ("uniform", THEIRS))
    for claim, where, their_numbers, rule, check in STATEMENTS:
        ours, holds = check(uniform, theirs)
        yield Claim(
            claim=claim,
            where=where,
            theirs=their_numbers,
            ours=f"{name}: {ours}",
            outcome=outcome_of(holds),
            rule=rule,
            command=COMMAND,
            seconds=None,
            hardware=measurements[0].hardware,
        )
