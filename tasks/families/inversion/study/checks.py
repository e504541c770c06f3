"""Rules by which each claim of the MixCon paper is decided (`claims` has them in words): our
numbers, and the verdict; NotTestableError where the study lacks what a claim is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from recon_core.summary import proportion_interval
from tasks.families.inversion.study.results import (
    InversionResults,
    Record,
    Value,
    accuracy,
    difference,
    distance,
    score,
    trend_within,
)
from tasks.study.statements import (
    Difference,
    NotTestableError,
    Verdict,
    all_of,
    decided_by,
    not_below,
)

CLEARLY = 0.1
"""By so much more SSIM than unrelated images have, something came back."""
RANKS = 0.3
"""A rank correlation from which on a trend over the grid is one."""
UNLIKELY = 0.025
"""At most so many shuffles may give as strong a trend."""
SIMILAR = 0.05
JUDGE = "tuned"
"""The paper's attack, at the rate that is best for each victim."""
Found = list[Verdict]
Check = Callable[[InversionResults], Verdict]


def each(d: Difference) -> bool | None:
    return d.holds_for_each


def _by_source(
    r: InversionResults, compare: Callable[[Record], Iterable[tuple[str, Difference]]]
) -> Verdict:
    found = ((f"{s['title']}{what}", d) for s in r.sources for what, d in compare(s))
    return decided_by(found, each)


def vanilla_leaks(r: InversionResults) -> Verdict:
    found: Found = []
    for source in r.sources:
        scores = r.role(source, "vanilla")["attacks"].get(JUDGE)
        if scores is None:
            raise NotTestableError(f"{source['title']} was not attacked")
        ssim, chance = scores["ssim"]["mean"], scores["chance"]
        text = f"{source['title']}: {ssim:.3f}, unrelated {chance:.3f}"
        found.append((text, ssim - chance > CLEARLY))
    return all_of(found)


def distance_falls(r: InversionResults) -> Verdict:
    def compare(source: Record) -> Iterable[tuple[str, Difference]]:
        plain, sweet = r.role(source, "vanilla"), r.sweet(source, JUDGE)
        yield f", {sweet['title']}", r.compare(plain, sweet, distance)

    return _by_source(r, compare)


def mean_ssim(cell: Record) -> float | None:
    there = cell["attacks"].get(JUDGE)
    return None if there is None else there["ssim"]["mean"]


def mean_of(name: str) -> Callable[[Record], float | None]:
    return lambda cell: cell[name]["mean"]


def trend(
    r: InversionResults, axis: str, value: Callable[[Record], float | None], *, sign: int
) -> Verdict:
    """By source: rank correlations along one axis of the grid where the other is the same."""
    found: Found = []
    fixed = "beta" if axis == "lam" else "lam"
    for source in r.sources:
        rows: dict[float, list[tuple[float, float]]] = {}
        for cell in r.grid(source):
            y = value(cell)
            if y is not None:
                at = cell["defence"]
                rows.setdefault(float(at[fixed]), []).append((float(at[axis]), float(y)))
        rho, share, each = trend_within(rows[level] for level in sorted(rows))
        clear = share <= UNLIKELY
        holds = sign * rho > RANKS if clear and abs(rho) > RANKS else None
        listed = ", ".join(f"{one:+.2f}" for one in each)
        name = "lambda" if fixed == "lam" else "beta"
        text = f"{source['title']}: {rho:+.2f}, by {name} {listed}; {share:.1%} of shuffles"
        found.append((text, holds))
    return all_of(found)


def table_3(r: InversionResults, value: Value, attack: str = JUDGE) -> Verdict:
    found: Found = []
    for source in r.sources:
        plain, sweet = r.role(source, "vanilla"), r.sweet(source, attack)
        d = r.compare(plain, sweet, value, seeds=r.confirming)
        lost = r.compare(plain, sweet, accuracy, seeds=r.confirming)
        means = [float(np.mean([value(seed) for seed in cell["seeds"]])) for cell in (plain, sweet)]
        text = (
            f"{source['title']}, {sweet['title']}: {means[0]:.3f} to {means[1]:.3f}, difference "
            f"{d}, accuracy lost {lost}"
        )
        found.append((text, d.holds_for_each))
    return all_of(found)


def table_4(r: InversionResults, value: Value) -> Verdict:
    found: Found = []
    unmatched: list[str] = []
    limit = r.record["thresholds"]["accuracy_loss"]
    for source in r.sources:
        plain, mixcon = r.role(source, "vanilla"), r.role(source, "paper")
        for unicon in r.cells(source, cut=source["cut"]):
            if unicon["defence"]["kind"] != "unicon":
                continue
            lost = r.compare(plain, unicon, accuracy)
            if lost.value > limit:
                text = f"{source['title']}: UniCon loses {lost.value:.1%} of accuracy, no match"
                unmatched.append(text)
                continue
            d = r.compare(unicon, mixcon, value)
            found.append((f"{source['title']}: {d}", d.holds_for_each))
    if not found and unmatched:
        raise NotTestableError("; ".join(unmatched))
    text, holds = all_of(found)
    return "; ".join([text, *unmatched]), holds


def keeps_accuracy(r: InversionResults, kind: str, lam: float, beta: float | None) -> Verdict:
    """Accuracy lost at a setting of the paper, by the seeds of both; intervals over test images."""
    found: Found = []
    limit = float(r.record["thresholds"]["accuracy_loss"])
    for source in r.sources:
        plain = {seed["seed"]: accuracy(seed) for seed in r.role(source, "vanilla")["seeds"]}
        for cell in r.cells(source, cut=source["cut"]):
            defence = cell["defence"]
            if (defence["kind"], defence["lam"], defence["beta"]) != (kind, lam, beta):
                continue
            pairs = [(plain[s["seed"]], accuracy(s)) for s in cell["seeds"] if s["seed"] in plain]
            n = len(pairs) * int(source["n_tests"])
            before, after = (float(np.mean(values)) for values in zip(*pairs, strict=True))
            ends = [proportion_interval(round(share * n), n) for share in (before, after)]
            low, high = ends[0][0] - ends[1][1], ends[0][1] - ends[1][0]
            text = (
                f"{source['title']} ({source['n_train']:,} images), {cell['title']}: {before:.1%} "
                f"to {after:.1%}, lost {before - after:.1%} [{low:.1%}, {high:.1%}]"
            )
            if len(pairs) > 1:
                text += f" (by seed {', '.join(f'{a:.1%}' for _p, a in pairs)})"
            found.append((text, not_below(-high, -low, limit)))
    if not found:
        raise NotTestableError("no source has a network with the paper's own setting")
    return all_of(found)


def earlier_is_easier(r: InversionResults) -> Verdict:
    def compare(source: Record) -> Iterable[tuple[str, Difference]]:
        cells = [c for c in r.cells(source) if c["defence"]["kind"] == "none"]
        for one, other in pairwise(sorted(cells, key=lambda cell: int(cell["cut"]))):
            what = f", cut {one['cut']} minus {other['cut']}"
            yield what, r.compare(one, other, score(JUDGE))

    return _by_source(r, compare)


def every_cut(r: InversionResults) -> Verdict:
    def compare(source: Record) -> Iterable[tuple[str, Difference]]:
        name = r.role(source, "paper")["name"]
        plain = {c["cut"]: c for c in r.cells(source) if c["defence"]["kind"] == "none"}
        for cell in r.cells(source, name=name):
            if cell["cut"] in plain:
                d = r.compare(plain[cell["cut"]], cell, score(JUDGE))
                yield f", cut {cell['cut']}", d

    return _by_source(r, compare)


def strong_gets_more(r: InversionResults) -> Verdict:
    def compare(source: Record) -> Iterable[tuple[str, Difference]]:
        for cell in r.cells(source):
            if cell["roles"]:
                yield f", {cell['title']}", r.within(cell, score("strong"), score(JUDGE))

    return _by_source(r, compare)


def strong_undoes(r: InversionResults) -> Verdict:
    def compare(source: Record) -> Iterable[tuple[str, Difference]]:
        plain, sweet = r.role(source, "vanilla"), r.sweet(source, JUDGE)
        theirs = {seed["seed"]: score(JUDGE)(seed) for seed in plain["seeds"]}
        yield (
            f", {sweet['title']}",
            difference(
                (score("strong")(seed), theirs[seed["seed"]])
                for seed in sweet["seeds"]
                if seed["seed"] in theirs and seed["seed"] in r.confirming
            ),
        )

    return _by_source(r, compare)


def restorer_adds(r: InversionResults) -> Verdict:
    def compare(source: Record) -> Iterable[tuple[str, Difference]]:
        for cell in r.cells(source):
            if "restored" in cell["attacks"]:
                yield f", {cell['title']}", r.within(cell, score("restored"), score("strong"))

    return _by_source(r, compare)
