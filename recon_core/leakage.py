"""Numbers of an audit: how much V victims leak of a pool of n images, and how sure that is.

Every victim gives every image of the pool a score, of a picture or of membership. Its *members* are
what it was trained on; its *decoys*, the rest, show what scores are worth that nothing leaked into.
Victims differ, and images of one victim share its fate, so that intervals speak of the next victim:
they are unions of several, which makes them too wide rather than too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64, Int64

from recon_core.summary import N_BOOTSTRAP, TAILS, proportion_interval, t_interval, threshold_for

AT_ONCE = 1 << 22
"""Most numbers that a bootstrap holds at a time."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share in [0, 1] over victims: its mean, the mean's interval of 95 %, each victim's."""

    mean: float
    interval: tuple[float, float]
    each: tuple[float, ...]


def share_found(
    scores: Float64[np.ndarray, "v n"],
    member: Bool[np.ndarray, "v n"],
    *,
    rate: float,
    least: float | None = None,
) -> Share:
    """Share of its members that a victim gives away, averaged over victims: those that score above
    the lowest threshold that at most the share `rate`, in [0, 1), of all victims' decoys exceeds,
    and above `least`. Both strictly; a score of NaN or -inf is not found.

    The interval is the union of four: Student's over the victims' shares; the exact one over all
    images (Clopper and Pearson 1934), which knows that shares that are all 0 are not certain; the
    same over the fewer independent images that a spread between victims leaves (Korn and Graubard
    1998), as where a rare victim gives away much Student's is too short; and an expanded percentile
    bootstrap over victims (Hesterberg 2015) that draws the threshold anew. It cannot see what no
    victim shows: of a share of .02 that a rare victim gives away almost whole, twelve victims tell
    too little (simulated: 79 % of such intervals cover it). One victim has the exact one alone,
    which speaks of its images and not of the next victim. Raises ValueError for a rate out of
    range, without decoys, and for a victim without members.
    """
    scores = np.where(np.isnan(scores), -np.inf, scores)
    _check_members(member)
    threshold = threshold_for(scores[~member], rate)
    bar = threshold if least is None else max(threshold, least)
    found = share_of(scores > bar, member)
    if len(scores) == 1:
        return found
    low, high = _bootstrap(scores, member, rate=rate, least=least)
    return replace(found, interval=(max(0.0, min(found.interval[0], low)),
                                    min(1.0, max(found.interval[1], high))))  # fmt: skip


def share_of(hits: Bool[np.ndarray, "v n"], member: Bool[np.ndarray, "v n"]) -> Share:
    """Share of its members that are hits, averaged over victims, with the intervals of
    `share_found` but for the bootstrap. Raises ValueError for a victim without members."""
    _check_members(member)
    counts, n_hits = member.sum(axis=1), (hits & member).sum(axis=1)
    each = n_hits / counts
    intervals = [proportion_interval(int(n_hits.sum()), int(counts.sum()))]
    if len(each) > 1:
        intervals += [t_interval(each.tolist()), _effective_interval(each, int(counts.sum()))]
    low, high = (min(i[0] for i in intervals), max(i[1] for i in intervals))
    return Share(
        mean=float(each.mean()),
        interval=(max(0.0, low), min(1.0, high)),
        each=tuple(each.tolist()),
    )


def _check_members(member: Bool[np.ndarray, "v n"]) -> None:
    counts = member.sum(axis=1)
    if not len(member) or not counts.all():
        raise ValueError(
            f"victims have {counts.tolist()} members; a share needs one or more victims, each with "
            "at least one member"
        )


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Mean of a - b over victims that are the same, or have the same images, on both sides, and
    Student's interval of 95 %. Raises ValueError unless there are as many, two or more, all
    finite."""
    if len(a) != len(b) or len(a) < 2 or not np.isfinite([*a, *b]).all():
        raise ValueError(
            f"a has {len(a)} and b {len(b)} values; expected as many, two or more, all of them "
            "finite, for pairs of victims"
        )
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return float(difference.mean()), t_interval(difference.tolist())


def exchangeable_p(
    scores: Float64[np.ndarray, "v n"],
    member: Bool[np.ndarray, "v n"],
    *,
    n_draws: int = 999,
    generator: np.random.Generator,
) -> float:
    """The p-value, in (0, 1], of "members score no higher than decoys": if nothing leaks, members
    and decoys of a victim are exchangeable.

    The statistic is the difference of the mean ranks of members and decoys among the victim's
    images, averaged over victims; equal scores share their mean rank, NaN counts as -inf. It is
    compared with that of `n_draws` permutations within every victim, (1 + number at least as high)
    / (1 + n_draws), which is exact (Phipson and Smyth 2010) where every victim's members were drawn
    by themselves, and errs on the side of no leak where they are balanced by label or the
    complement of another's. It does not hold for victims with the same members. Raises ValueError
    for n_draws < 1 and for a victim without members or without decoys.
    """
    from scipy import stats  # half a second, which a front does without

    n_members, n_decoys = member.sum(axis=1), (~member).sum(axis=1)
    if n_draws < 1 or not len(scores) or not (n_members.all() and n_decoys.all()):
        raise ValueError(
            f"n_draws={n_draws}, {n_members.tolist()} members and {n_decoys.tolist()} decoys; "
            "expected at least one draw, and of both at least one for every victim"
        )
    ranks = stats.rankdata(np.where(np.isnan(scores), -np.inf, scores), axis=1)
    weights = np.where(member, 1 / n_members[:, None], -1 / n_decoys[:, None]) / len(scores)
    observed = float(np.sum(weights * ranks))
    least = observed - 1e-9 * scores.shape[1]  # rounding makes no permutation lower than its equal
    drawn = [float((weights * generator.permuted(ranks, axis=1)).sum()) for _ in range(n_draws)]
    n_as_high: int = sum(value >= least for value in drawn)
    return (1 + n_as_high) / (1 + n_draws)


def pareto_front(leak: Sequence[float], accuracy: Sequence[float]) -> list[bool]:
    """True for a point that none beats: no other leaks as little or less and is as accurate or
    more, one of them strictly. Points that are the same do not beat each other. Raises ValueError
    unless there are as many leaks as accuracies, all finite."""
    if len(leak) != len(accuracy) or not np.isfinite([*leak, *accuracy]).all():
        raise ValueError(
            f"{len(leak)} leaks and {len(accuracy)} accuracies; expected as many, all of them "
            "finite"
        )
    points = list(zip(leak, accuracy, strict=True))
    return [
        not any(
            other_leak <= own_leak
            and other_accuracy >= own_accuracy
            and (other_leak, other_accuracy) != (own_leak, own_accuracy)
            for other_leak, other_accuracy in points
        )
        for own_leak, own_accuracy in points
    ]


def _effective_interval(each: Float64[np.ndarray, " v"], n: int) -> tuple[float, float]:
    """Exact interval with the number of independent images whose share would be as uncertain as
    that of these victims, for few victims smaller by a ratio of squared Student quantiles (Korn and
    Graubard 1998); at most n."""
    from scipy import stats  # half a second, which a front does without

    share, error = float(each.mean()), float(stats.sem(each))
    if error > 0:
        quantile, of_few = stats.t.ppf(TAILS[1], [n - 1, len(each) - 1])
        n = min(n, share * (1 - share) / error**2 * (quantile / of_few) ** 2)
    hits = share * n
    low = stats.beta.ppf(TAILS[0], hits, n - hits + 1) if hits > 0 else 0.0
    high = stats.beta.ppf(TAILS[1], hits + 1, n - hits) if hits < n else 1.0
    return float(low), float(high)


def _bootstrap(
    scores: Float64[np.ndarray, "v n"],
    member: Bool[np.ndarray, "v n"],
    *,
    rate: float,
    least: float | None,
) -> tuple[float, float]:
    """Interval of the mean share over victims that are drawn again, with their decoys: percentiles
    so far out that of normal means they are Student's interval, which plain ones fall short of with
    few victims.

    Every threshold is the score of a decoy, so that shares are looked up: decoys are sorted, the
    highest first, and a decoy of a victim that is drawn k times counts k times.
    """
    from scipy import stats  # half a second, which a front does without

    owner, _column = np.nonzero(~member)
    order = np.argsort(-scores[~member], kind="stable")
    owner, bars = owner[order], scores[~member][order]
    if least is not None:
        bars = np.maximum(bars, least)
    shares = np.stack(
        [_shares_above(own[chosen], bars) for own, chosen in zip(scores, member, strict=True)]
    )
    rng, n_victims = np.random.default_rng(0), len(scores)
    drawn = rng.integers(n_victims, size=(N_BOOTSTRAP, n_victims))
    times = np.stack([(drawn == victim).sum(axis=1) for victim in range(n_victims)], axis=1)
    rows = max(1, AT_ONCE // len(bars))
    means = [
        (part * shares[:, _thresholds(part, owner, rate)].T).sum(axis=1) / n_victims
        for part in np.split(times, range(rows, N_BOOTSTRAP, rows))
    ]
    student = stats.t.ppf(TAILS[1], n_victims - 1) * np.sqrt(n_victims / (n_victims - 1))
    tail = stats.norm.sf(student)
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return float(low), float(high)


def _shares_above(
    own: Float64[np.ndarray, " m"], bars: Float64[np.ndarray, " k"]
) -> Float64[np.ndarray, " k"]:
    """The share of a victim's members that scores above each bar."""
    return 1 - np.searchsorted(np.sort(own), bars, side="right") / len(own)


def _thresholds(
    times: Int64[np.ndarray, "b v"], owner: Int64[np.ndarray, " k"], rate: float
) -> Int64[np.ndarray, " b"]:
    """The place, among sorted decoys, of each draw's threshold: the first with more than the share
    `rate` of the decoys drawn at it or above, as `summary.threshold_for` has it."""
    up_to = np.cumsum(times[:, owner], axis=1)
    n_allowed = np.floor(rate * up_to[:, -1] + 1e-9)
    places: Int64[np.ndarray, " b"] = (up_to > n_allowed[:, None]).argmax(axis=1)
    return places
