"""Claims of the MixCon paper and questions of our own, and the rules that decide them by the record
of a study.

A rule returns our numbers and its verdict, or raises NotTestableError where the study lacks what
the claim is about. Two cells are compared seed by seed, on the same images, starts and orders, with
Student's 95 % interval over seeds. Sweet spots are chosen by the first seeds; claims about them are
judged by the others, if there are any. Trends are sought where only lambda or beta differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

from recon_core.summary import proportion_interval, t_interval
from tasks.page.formats import OURS
from tasks.study.statements import (
    Difference,
    NotTestableError,
    Statement,
    Verdict,
    all_of,
    decided,
    decided_by,
    not_below,
)

Record = Mapping[str, Any]
Value = Callable[[Record], float]
CLEARLY = 0.1
"""Something came back if its SSIM exceeds that of unrelated images by more than this."""
RANKS = 0.3
"""Least rank correlation of a trend over the grid."""
UNLIKELY = 0.025
"""Largest share of shuffles that may give as strong a trend."""
MIN_ROW = 3
"""Least settings of a row of the grid for a trend: two are ordered by chance."""
N_SHUFFLES = 10_000
JUDGE = "tuned"
"""The paper's attack, at the best rate for each victim."""


def difference(pairs: Iterable[tuple[float, float]]) -> Difference:
    """The first of each pair minus the second. Raises NotTestableError for less than two pairs."""
    by_seed = tuple(a - b for a, b in pairs)
    if len(by_seed) < 2:
        raise NotTestableError(f"{len(by_seed)} seeds have no interval; two at least are needed")
    return Difference(float(np.mean(by_seed)), *t_interval(by_seed), by_seed)


class InversionResults:
    """A record's cells by source, cut, defence and role."""

    def __init__(self, record: Record) -> None:
        self.record = record

    @property
    def sources(self) -> list[Record]:
        if not self.record["sources"]:
            raise NotTestableError("the study has no images")
        return list(self.record["sources"])

    def cells(self, source: Record, **where: Any) -> list[Record]:
        """Cells of a source that have these entries and at least one victim."""
        wanted = {"source": source["name"], **where}
        return [
            cell
            for cell in self.record["cells"]
            if cell["seeds"] and all(cell[key] == value for key, value in wanted.items())
        ]

    def role(self, source: Record, role: str) -> Record:
        """The cell with a role; NotTestableError if there is none."""
        for cell in self.cells(source):
            if role in cell["roles"]:
                return cell
        raise NotTestableError(f"{source['title']} has no cell that is the {role!r}")

    def sweet(self, source: Record, attack: str) -> Record:
        """The sweet spot. Raises NotTestableError if that is the network without a defence."""
        cell = self.role(source, f"sweet spot {attack}")
        if cell["defence"]["kind"] == "none":
            raise NotTestableError(
                f"{source['title']}: no defence of the grid leaks less within the accuracy that "
                "may be lost"
            )
        return cell

    @property
    def confirming(self) -> set[int]:
        """Seeds that did not choose the sweet spots; all seeds if there are no others."""
        every = set(range(self.record["n_seeds"]))
        return every - set(range(self.record["n_grid_seeds"])) or every


def compare(
    one: Record,
    other: Record,
    value: Value,
    theirs: Value | None = None,
    seeds: set[int] | None = None,
) -> Difference:
    """Difference of `value` between two cells, by the seeds of both; `theirs` is the value of the
    other cell, if it is not the same."""
    wanted = {s["seed"]: s for s in other["seeds"] if seeds is None or s["seed"] in seeds}
    return difference(
        (value(seed), (theirs or value)(wanted[seed["seed"]]))
        for seed in one["seeds"]
        if seed["seed"] in wanted
    )


def accuracy(seed: Record) -> float:
    return float(seed["accuracy"])


def score(attack: str, name: str = "ssim", *, best: bool = False) -> Value:
    """The mean score of a seed's images under an attack, or the score of the best recovered image,
    the worst case in the paper's tables. Raises NotTestableError where the attack was not run."""

    def value(seed: Record) -> float:
        if attack not in seed["attacks"]:
            raise NotTestableError(f"attack {attack!r} was not run everywhere")
        scores = seed["attacks"][attack][name]
        return float(np.max(scores) if best else np.mean(scores))

    return value


def trend_within(
    rows: Iterable[Sequence[tuple[float, float]]],
) -> tuple[float, float, list[float]]:
    """The mean rank correlation of the rows, the share of shuffles within rows that give as strong
    a mean of the same sign, and the correlation of each row.

    Rows with fewer than MIN_ROW pairs, or whose values do not vary, are left out. Raises
    NotTestableError if none is left.
    """
    usable = [np.array(row) for row in rows if len(row) >= MIN_ROW]
    ranked = [stats.rankdata(row, axis=0) for row in usable if np.ptp(row, axis=0).all()]
    if not ranked:
        raise NotTestableError(f"no {MIN_ROW} settings differ in one of lambda and beta alone")
    scaled = [(rank - rank.mean(0)) / (rank.std(0) * np.sqrt(len(rank))) for rank in ranked]
    each = [float(x @ y) for x, y in (one.T for one in scaled)]
    rho = float(np.mean(each))
    rng = np.random.default_rng(0)
    shuffled = np.zeros(N_SHUFFLES)
    for x, y in (one.T for one in scaled):
        shuffled += rng.permuted(np.tile(x, (N_SHUFFLES, 1)), axis=1) @ y / len(scaled)
    share = float(np.mean(shuffled * np.sign(rho) >= abs(rho) - 1e-9))
    return rho, share, each


Compare = Callable[[InversionResults, Record], Iterator[tuple[str, Difference]]]


def of_each_source(compare: Compare) -> Callable[[InversionResults], Verdict]:
    """Make a rule of a comparison within a source: it must hold for every source and seed."""

    @wraps(compare)
    def check(r: InversionResults) -> Verdict:
        found = ((f"{s['title']}, {what}", d) for s in r.sources for what, d in compare(r, s))
        return decided_by(found, lambda d: d.holds_for_each)

    return check


def vanilla_leaks(r: InversionResults) -> Verdict:
    found: list[Verdict] = []
    for source in r.sources:
        scores = r.role(source, "vanilla")["attacks"].get(JUDGE)
        if scores is None:
            raise NotTestableError(f"{source['title']} was not attacked")
        ssim, chance = scores["ssim"]["mean"], scores["chance"]
        text = f"{source['title']}: {ssim:.3f}, unrelated {chance:.3f}"
        found.append((text, ssim - chance > CLEARLY))
    return all_of(found)


@of_each_source
def distance_falls(r: InversionResults, source: Record) -> Iterator[tuple[str, Difference]]:
    plain, sweet = r.role(source, "vanilla"), r.sweet(source, JUDGE)
    yield sweet["title"], compare(plain, sweet, lambda seed: float(seed["distance"]))


def trend(r: InversionResults, axis: str, value: str, *, sign: int) -> Verdict:
    """Rank correlations along one axis of the grid at each value of the other, by source; of an
    estimate of the cells, or of their SSIM."""
    found: list[Verdict] = []
    fixed, name = ("beta", "beta") if axis == "lam" else ("lam", "lambda")
    for source in r.sources:
        cells = [c for c in r.cells(source, in_grid=True) if c["defence"]["kind"] == "mixcon"]
        if len(cells) < 4:
            raise NotTestableError(f"the grid of {source['title']} has {len(cells)} cells")
        rows: dict[float, list[tuple[float, float]]] = {}
        for cell in cells:
            estimates = cell if value != "ssim" else cell["attacks"].get(JUDGE)
            if estimates is not None and (y := estimates[value]["mean"]) is not None:
                at = cell["defence"]
                rows.setdefault(float(at[fixed]), []).append((float(at[axis]), float(y)))
        rho, share, each = trend_within(rows[level] for level in sorted(rows))
        holds = sign * rho > RANKS if share <= UNLIKELY and abs(rho) > RANKS else None
        listed = ", ".join(f"{one:+.2f}" for one in each)
        text = f"{source['title']}: {rho:+.2f}, by {name} {listed}; {share:.1%} of shuffles"
        found.append((text, holds))
    return all_of(found)


def table_3(r: InversionResults, value: Value, attack: str = JUDGE) -> Verdict:
    found: list[Verdict] = []
    for source in r.sources:
        plain, sweet = r.role(source, "vanilla"), r.sweet(source, attack)
        d, lost = (compare(plain, sweet, of, seeds=r.confirming) for of in (value, accuracy))
        means = [float(np.mean([value(seed) for seed in cell["seeds"]])) for cell in (plain, sweet)]
        text = (
            f"{source['title']}, {sweet['title']}: {means[0]:.3f} to {means[1]:.3f}, difference "
            f"{d}, accuracy lost {lost}"
        )
        found.append((text, d.holds_for_each))
    return all_of(found)


def table_4(r: InversionResults, value: Value) -> Verdict:
    found: list[Verdict] = []
    unmatched: list[str] = []
    limit = r.record["thresholds"]["accuracy_loss"]
    for source in r.sources:
        plain, mixcon = r.role(source, "vanilla"), r.role(source, "paper")
        for unicon in r.cells(source, cut=source["cut"]):
            if unicon["defence"]["kind"] != "unicon":
                continue
            lost = compare(plain, unicon, accuracy)
            if lost.value > limit:
                text = f"{source['title']}: UniCon loses {lost.value:.1%} of accuracy, no match"
                unmatched.append(text)
                continue
            d = compare(unicon, mixcon, value)
            found.append((f"{source['title']}: {d}", d.holds_for_each))
    if not found and unmatched:
        raise NotTestableError("; ".join(unmatched))
    text, holds = all_of(found)
    return "; ".join([text, *unmatched]), holds


def keeps_accuracy(r: InversionResults, kind: str, lam: float, beta: float | None) -> Verdict:
    """Accuracy lost at one of the paper's settings, by the seeds of both, with intervals over test
    images."""
    found: list[Verdict] = []
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


@of_each_source
def earlier_is_easier(r: InversionResults, source: Record) -> Iterator[tuple[str, Difference]]:
    cells = [c for c in r.cells(source) if c["defence"]["kind"] == "none"]
    for one, other in pairwise(sorted(cells, key=lambda cell: int(cell["cut"]))):
        yield f"cut {one['cut']} minus {other['cut']}", compare(one, other, score(JUDGE))


@of_each_source
def every_cut(r: InversionResults, source: Record) -> Iterator[tuple[str, Difference]]:
    plain = {c["cut"]: c for c in r.cells(source) if c["defence"]["kind"] == "none"}
    for cell in r.cells(source, name=r.role(source, "paper")["name"]):
        if cell["cut"] in plain:
            yield f"cut {cell['cut']}", compare(plain[cell["cut"]], cell, score(JUDGE))


@of_each_source
def strong_gets_more(r: InversionResults, source: Record) -> Iterator[tuple[str, Difference]]:
    for cell in r.cells(source):
        if cell["roles"]:
            yield cell["title"], _within(cell, "strong", JUDGE)


@of_each_source
def strong_undoes(r: InversionResults, source: Record) -> Iterator[tuple[str, Difference]]:
    plain, sweet = r.role(source, "vanilla"), r.sweet(source, JUDGE)
    d = compare(sweet, plain, score("strong"), score(JUDGE), seeds=r.confirming)
    yield sweet["title"], d


@of_each_source
def restorer_adds(r: InversionResults, source: Record) -> Iterator[tuple[str, Difference]]:
    for cell in r.cells(source):
        if "restored" in cell["attacks"]:
            yield cell["title"], _within(cell, "restored", "strong")


def _within(cell: Record, one: str, other: str) -> Difference:
    """Difference of two attacks on one cell, by the seeds that have both."""
    seeds = [seed for seed in cell["seeds"] if {one, other} <= set(seed["attacks"])]
    return difference((score(one)(seed), score(other)(seed)) for seed in seeds)


TREND = (
    f"the mean over these rows is {{}} {RANKS:g}, and at most {UNLIKELY:.1%} of "
    "shuffles within the rows give as strong a trend; false if it is so the other way round"
)
BELOW, ABOVE = TREND.format("below minus"), TREND.format("above")
KEPT = (
    "at most the share that a sweet spot may lose, with an interval over test images, on every "
    "source; false if all of it is above that"
)
TRENDS = (
    ("A larger lambda costs accuracy", ", figure 3", "larger lambda, lower accuracy",
     "lambda and accuracy at each beta", "lam", "accuracy", -1),
    ("A smaller beta costs accuracy", ", figure 3",
     "smaller beta, smaller bound of the distance, lower accuracy",
     "beta and accuracy at each lambda", "beta", "accuracy", 1),
    ("A smaller beta gives a smaller minimal distance", "",
     "beta bounds the minimal pairwise distance",
     "beta and the smallest distance at each lambda", "beta", "min_distance", 1),
    ("With the same lambda, a smaller beta gives worse recoveries", ", figure 4",
     "columns C3 to C5", "beta and SSIM by the paper's descent (tuned) at each lambda",
     "beta", "ssim", 1),
    ("With the same beta, a larger lambda gives worse recoveries", ", figure 4",
     "columns C3 and C6 to C8", "lambda and SSIM by the paper's descent (tuned) at each beta",
     "lam", "ssim", -1),
)  # fmt: skip
"""Claims about the grid: claim, place in the paper, the paper's words, what is correlated, and the
trend's axis, value and sign."""
EACH = "above 0 with the interval and for every seed, on every source"
DESCENT = "SSIM by the paper's descent at its best rate, no defence"
_of_ours = partial(Statement[InversionResults], where=OURS, theirs="not in the paper")
STATEMENTS: tuple[Statement[InversionResults], ...] = (
    Statement(
        claim="Without a defence, images come back from their features",
        where="section 4.3, figure 4 and table 3",
        theirs="SSIM .64, .43 and .76 (MNIST, FashionMNIST, SVHN)",
        rule=f"by the paper's descent at its best rate, mean SSIM is above that of unrelated "
        f"images by more than {CLEARLY:g} on every source",
        check=vanilla_leaks,
    ),
    Statement(
        claim="MixCon brings the features of different images together",
        where="section 4.3, figure 3",
        theirs="mean pairwise distances fall",
        rule=f"mean distance, no defence minus the sweet spots': {EACH}",
        check=distance_falls,
    ),
    *(
        Statement[InversionResults](
            claim=claim,
            where=f"section 4.3{figure}",
            theirs=theirs,
            rule=f"rank correlation of {words}: {BELOW if sign < 0 else ABOVE}",
            check=partial(trend, axis=axis, value=value, sign=sign),
        )
        for claim, figure, theirs, words, axis, value, sign in TRENDS
    ),
    Statement(
        claim="At matched accuracy MixCon lowers SSIM",
        where="section 4.3, table 3",
        theirs=".64 to .14, .43 to .17, .76 to .61",
        rule=f"{DESCENT} minus its sweet spot: {EACH}",
        check=partial(table_3, value=score(JUDGE)),
    ),
    Statement(
        claim="... and perceptual similarity",
        where="section 4.3, table 3",
        theirs=".78 to .44, .71 to .42, .69 to .59",
        rule="the same for PSIM",
        check=partial(table_3, value=score(JUDGE, "psim")),
    ),
    Statement(
        claim="... and the SSIM of the image that is recovered best",
        where="section 4.3, table 3, worst case in parentheses",
        theirs=".83 to .48, .78 to .52, .92 to .84",
        rule="the same for the largest SSIM of a seed's images",
        check=partial(table_3, value=score(JUDGE, best=True)),
    ),
    Statement(
        claim="... and the perceptual similarity of the image that is recovered best",
        where="section 4.3, table 3, worst case in parentheses",
        theirs=".88 to .69, .92 to .66, .81 to .72",
        rule="the same for the largest PSIM of a seed's images",
        check=partial(table_3, value=score(JUDGE, "psim", best=True)),
    ),
    Statement(
        claim="At the paper's own setting MixCon costs next to no accuracy",
        where="section 4.3, table 3",
        theirs="(1, 1e-4): 99.1 to 98.6 % (MNIST), 89.8 to 88.9 % (FashionMNIST); (0.5, 1e-4): "
        "88.4 to 88.2 % (SVHN)",
        rule="accuracy without defence minus that with MixCon (1, 1e-4), of the seeds of both: "
        f"{KEPT}",
        check=partial(keeps_accuracy, kind="mixcon", lam=1.0, beta=1e-4),
    ),
    Statement(
        claim="... and UniCon with lambda 1 none",
        where="appendix D.1, table 4",
        theirs="99.1 to 99.2 % (MNIST), 89.8 to 89.6 % (FashionMNIST)",
        rule=f"the same with UniCon (1): {KEPT}",
        check=partial(keeps_accuracy, kind="unicon", lam=1.0, beta=None),
    ),
    Statement(
        claim="UniCon hides less than MixCon",
        where="appendix D.1, table 4",
        theirs="SSIM .19 against .17 (FashionMNIST), .67 against .61 (SVHN)",
        rule="SSIM by the paper's descent at its best rate, UniCon minus MixCon at the setting of "
        "the study: above 0 with the interval and for every seed, on every source where UniCon is "
        "no more than the sweet spot's share less accurate",
        check=partial(table_4, value=score(JUDGE)),
    ),
    Statement(
        claim="UniCon hides less of the image that is recovered best, too",
        where="appendix D.1, table 4, worst case in parentheses",
        theirs="SSIM .59 against .48, .53 against .52, .91 against .84",
        rule="the same for the largest SSIM of a seed's images",
        check=partial(table_4, value=score(JUDGE, best=True)),
    ),
    Statement(
        claim="The earlier the cut, the easier the inversion",
        where="appendix D.2, figures 6 to 17",
        theirs="SSIM falls from cut to cut",
        rule=f"{DESCENT}, each cut minus the next: {EACH}; false if one is below",
        check=earlier_is_easier,
    ),
    Statement(
        claim="MixCon can be put at any cut and hides something there",
        where="appendix D.2",
        theirs="SSIM lower than without defence at every cut",
        rule="the same, no defence minus MixCon at the setting of the study, at every cut",
        check=every_cut,
    ),
    _of_ours(
        claim="Ours: a better attacker gets more, with and without a defence",
        rule="SSIM of our attack minus that of the paper's descent at its best rate: above 0 with "
        "the interval, for no defence, the study's setting and the sweet spots, on every source",
        check=strong_gets_more,
    ),
    _of_ours(
        claim="Ours: ... and undoes the defence: it gets from the sweet spot at least what the "
        "paper's attack gets without any",
        rule="SSIM of our attack on the sweet spot (of the paper's descent), minus that of the "
        "paper's descent without defence: above 0 with the interval, on every source",
        check=strong_undoes,
    ),
    _of_ours(
        claim="Ours: against the better attacker, MixCon still lowers SSIM at matched accuracy",
        rule=f"SSIM of our attack, no defence minus its own sweet spot: {EACH}",
        check=partial(table_3, value=score("strong"), attack="strong"),
    ),
    _of_ours(
        claim="Ours: a restorer of the attack's own pairs adds to it",
        rule="SSIM after the restorer minus before: above 0 with the interval, for every cell that "
        "has one",
        check=restorer_adds,
    ),
)


def check_inversion(record: Record) -> list[dict[str, Any]]:
    """Decide every claim about the study of this record."""
    return decided(STATEMENTS, InversionResults(record))
