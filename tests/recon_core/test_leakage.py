"""Shares, their intervals and p-values, by hand, and on simulated audits with a known truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from recon_core.leakage import (
    Share,
    exchangeable_p,
    paired_difference,
    pareto_front,
    share_found,
)
from recon_core.summary import N_BOOTSTRAP, proportion_interval, t_interval, threshold_for

NAN, INF = math.nan, math.inf
Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def audit(members: Scores, decoys: Scores) -> tuple[Scores, Mask]:
    """Scores and members of victims with as many images of either kind each."""
    member = np.zeros((len(members), members.shape[1] + decoys.shape[1]), bool)
    member[:, : members.shape[1]] = True
    return np.concatenate([members, decoys], axis=1), member


def test_a_share_by_hand() -> None:
    members = np.array([[0.9, 0.5, 0.3, 0.1], [0.8, 0.7, 0.6, 0.2]])
    decoys = np.array([[0.55, 0.1, 0.0, 0.0], [0.4, 0.3, 0.2, 0.0]])
    scores, member = audit(members, decoys)
    none = share_found(scores, member, rate=0.0)  # above .55
    assert (none.each, none.mean) == ((0.25, 0.75), 0.5)
    one = share_found(scores, member, rate=0.125)  # one of eight may exceed .4
    assert (one.each, one.mean) == ((0.5, 0.75), 0.625)
    assert share_found(scores, member, rate=0.2) == one
    good = share_found(scores, member, rate=0.125, least=0.65)
    assert (good.each, good.mean) == ((0.25, 0.5), 0.375)
    assert share_found(scores, member, rate=0.125, least=0.1) == one
    assert share_found(scores, member, rate=0.0, least=0.6).each == (0.25, 0.5)  # strictly
    for share in (none, one, good):
        assert 0 <= share.interval[0] <= share.mean <= share.interval[1] <= 1
    shuffled = np.random.default_rng(0).permutation(8)
    assert share_found(scores[:, shuffled], member[:, shuffled], rate=0.125) == one


def test_scores_that_are_no_numbers_are_not_found() -> None:
    members = np.array([[NAN, -INF, INF, 0.5], [0.5, 0.5, NAN, -INF]])
    scores, member = audit(members, np.array([[0.0, NAN], [-INF, -INF]]))
    assert share_found(scores, member, rate=0.0).each == (0.5, 0.5)
    assert share_found(scores, member, rate=0.3).each == (0.5, 0.5)  # above -inf
    nothing, member = audit(np.full((2, 4), NAN), np.full((2, 4), NAN))
    assert share_found(nothing, member, rate=0.5).each == (0.0, 0.0)


def test_victims_may_have_different_numbers_of_members() -> None:
    scores = np.array([[0.9, 0.1, 0.2, 0.3], [0.9, 0.8, 0.1, 0.2]])
    member = np.array([[True, False, False, False], [True, True, True, False]])
    share = share_found(scores, member, rate=0.0)
    assert share.each == (1.0, pytest.approx(2 / 3))
    assert share.mean == pytest.approx(5 / 6)
    low, high = proportion_interval(3, 4)
    assert share.interval[0] <= low
    assert share.interval[1] >= high


def test_the_interval_is_the_union_of_four() -> None:
    rng = np.random.default_rng(0)
    levels = rng.normal(0, 1, (6, 1))
    scores, member = audit(levels + rng.normal(1, 1, (6, 30)), levels + rng.normal(0, 1, (6, 20)))
    for rate, least in ((0.05, None), (0.0, None), (0.3, 1.0)):
        share = share_found(scores, member, rate=rate, least=least)
        hits = round(sum(share.each) * 30)
        intervals = [t_interval(share.each), proportion_interval(hits, 180)]
        # Exact for as many images as would have this error (Korn and Graubard 1998).
        error = np.std(share.each, ddof=1) / math.sqrt(6)
        ratio = stats.t.ppf(0.975, 179) / stats.t.ppf(0.975, 5)
        n = min(180, share.mean * (1 - share.mean) / error**2 * ratio**2)
        k = share.mean * n
        ends = stats.beta.ppf([0.025, 0.975], [k, k + 1], [n - k + 1, n - k])
        intervals.append((float(ends[0]), float(ends[1])))
        # The bootstrap by definition: victims drawn, with their decoys, and a new threshold.
        draws = np.random.default_rng(0).integers(6, size=(N_BOOTSTRAP, 6))
        means = []
        for rows in draws:
            own, inside = scores[rows], member[rows]
            bar = max(threshold_for(own[~inside], rate), -INF if least is None else least)
            means.append(float((own[inside] > bar).mean()))
        tail = stats.norm.sf(stats.t.ppf(0.975, 5) * math.sqrt(6 / 5))
        low, high = np.quantile(means, (tail, 1 - tail))
        intervals.append((float(low), float(high)))
        expected = (min(i[0] for i in intervals), max(i[1] for i in intervals))
        assert share.interval == pytest.approx(np.clip(expected, 0, 1), abs=1e-12)


def test_shares_that_are_all_the_same_are_not_certain() -> None:
    scores, member = audit(np.zeros((12, 40)), np.ones((12, 40)))
    nothing = share_found(scores, member, rate=0.01)
    assert (nothing.mean, nothing.interval) == (0.0, proportion_interval(0, 480))
    everything = share_found(-scores, member, rate=0.01)
    assert (everything.mean, everything.interval) == (1.0, proportion_interval(480, 480))


def test_one_victim_has_the_exact_interval_alone() -> None:
    scores, member = audit(np.arange(10.0)[None], np.full((1, 5), 6.5))
    share = share_found(scores, member, rate=0.0)
    assert (share.mean, share.each) == (0.3, (0.3,))
    assert share.interval == proportion_interval(3, 10)


def coverage(simulated: Callable[[np.random.Generator], Share], truth: float, n: int) -> float:
    covered = 0
    for seed in range(n):
        low, high = simulated(np.random.default_rng(seed)).interval
        covered += low <= truth <= high
    return covered / n


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "spread"),
    [
        (0.02, 0.0),
        (0.02, 0.02),
        (0.3, 0.2),
        (0.8, 0.2),
        *(pytest.param(p, rho, marks=pytest.mark.slow) for p in (0.3, 0.8) for rho in (0, 0.05)),
    ],
)
def test_intervals_cover_the_share_that_victims_have_on_average(
    truth: float, spread: float
) -> None:
    """Twelve victims, each with its own share from a beta distribution, and forty images each;
    `spread` is the correlation of two images of a victim."""

    def simulated(rng: np.random.Generator) -> Share:
        shares = np.full(12, truth)
        if spread:
            size = (1 - spread) / spread
            shares = rng.beta(truth * size, (1 - truth) * size, 12)
        found = rng.random((12, 40)) < shares[:, None]
        return share_found(
            *audit(found.astype(float), np.full((12, 40), -1.0)), rate=0.0, least=0.4
        )

    assert coverage(simulated, truth, 200) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gain", "n"),
    [(2.5, 40), *(pytest.param(gain, 100, marks=pytest.mark.slow) for gain in (1.0, 2.5, 4.0))],
)
def test_intervals_cover_the_power_at_a_false_positive_rate(gain: float, n: int) -> None:
    """Normal scores: at 1 % false positives, Phi(gain - 2.326) of the members are found."""
    truth = float(stats.norm.cdf(gain - stats.norm.ppf(0.99)))

    def simulated(rng: np.random.Generator) -> Share:
        scores = audit(rng.normal(gain, 1, (12, n)), rng.normal(0, 1, (12, n)))
        return share_found(*scores, rate=0.01)

    assert coverage(simulated, truth, 200) >= 0.93


def test_a_share_refuses_what_has_none() -> None:
    scores, member = audit(np.zeros((2, 3)), np.zeros((2, 3)))
    member[1] = False
    with pytest.raises(ValueError, match=r"victims have \[3, 0\] members; a share needs"):
        share_found(scores, member, rate=0.0)
    with pytest.raises(ValueError, match=r"victims have \[\] members"):
        share_found(scores[:0], member[:0], rate=0.0)
    with pytest.raises(ValueError, match=r"rate=0.0 of 0 decoys"):
        share_found(scores, np.ones((2, 6), bool), rate=0.0)
    with pytest.raises(ValueError, match=r"rate=1.0 of 6 decoys"):
        share_found(*audit(np.zeros((2, 3)), np.zeros((2, 3))), rate=1.0)


def test_differences_are_of_pairs() -> None:
    mean, (low, high) = paired_difference([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])
    assert mean == pytest.approx(0.2)
    half = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert (low, high) == pytest.approx((0.2 - half, 0.2 + half))
    assert paired_difference([0.5, 0.5], [0.25, 0.25]) == (0.25, (0.25, 0.25))
    for a, b in (([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, NAN], [1.0, 2.0])):
        with pytest.raises(ValueError, match="expected as many, two or more"):
            paired_difference(a, b)


def test_a_p_value_by_hand() -> None:
    """One member above two decoys: of three permutations one is as high."""
    rng = np.random.default_rng(0)
    top = exchangeable_p(
        *audit(np.array([[3.0]]), np.array([[1.0, 2.0]])), n_draws=2999, generator=rng
    )
    assert top == pytest.approx(1 / 3, abs=0.04)
    low = exchangeable_p(*audit(np.array([[0.0]]), np.array([[1.0, 2.0]])), generator=rng)
    assert low == 1.0
    same = exchangeable_p(*audit(np.zeros((3, 4)), np.zeros((3, 4))), generator=rng)
    assert same == 1.0  # ties are as high
    far = audit(np.ones((8, 8)), np.array([[0.0, NAN, -INF, 0.5, 0.0, 0.0, 0.0, 0.0]] * 8))
    assert exchangeable_p(*far, n_draws=99, generator=rng) == 0.01
    # Two victims, a member above a decoy in each: one of four permutations is as high.
    both = audit(np.array([[1.0], [9.0]]), np.array([[0.0], [5.0]]))
    assert exchangeable_p(*both, n_draws=2999, generator=rng) == pytest.approx(0.25, abs=0.04)


def by_halves(rng: np.random.Generator, *, complementary: bool) -> Mask:
    member = rng.permuted(np.tile(np.arange(40) < 20, (12, 1)), axis=1)
    if complementary:
        member[1::2] = ~member[::2]
    return member


def test_without_a_leak_p_values_are_uniform() -> None:
    values, balanced = [], []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        scores = rng.normal(0, 1, 40) + rng.normal(0, 1, (12, 40))  # images differ
        settings = {"n_draws": 199, "generator": rng}
        values.append(exchangeable_p(scores, by_halves(rng, complementary=False), **settings))
        balanced.append(exchangeable_p(scores, by_halves(rng, complementary=True), **settings))
    most = stats.binom.ppf(0.999, 100, 0.05)
    assert sum(p <= 0.05 for p in values) <= most
    assert stats.kstest(values, "uniform").pvalue > 0.001
    assert sum(p <= 0.05 for p in balanced) <= most


def test_a_planted_leak_is_found() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        member = by_halves(rng, complementary=seed % 2 == 0)
        scores = rng.normal(0, 1, (12, 40)) + member
        assert exchangeable_p(scores, member, n_draws=199, generator=rng) <= 0.01


def test_a_p_value_needs_draws_members_and_decoys() -> None:
    scores, member = audit(np.zeros((2, 3)), np.zeros((2, 3)))
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"n_draws=0, \[3, 3\] members"):
        exchangeable_p(scores, member, n_draws=0, generator=rng)
    with pytest.raises(ValueError, match=r"\[6, 6\] members and \[0, 0\] decoys"):
        exchangeable_p(scores, member | True, generator=rng)
    with pytest.raises(ValueError, match=r"\[0, 0\] members"):
        exchangeable_p(scores, member & False, generator=rng)


def test_the_front_by_hand() -> None:
    leak, accuracy = [0.5, 0.1, 0.2, 0.2, 0.5, 0.3], [0.9, 0.6, 0.8, 0.7, 0.9, 0.8]
    assert pareto_front(leak, accuracy) == [True, True, True, False, True, False]
    assert pareto_front([], []) == []
    assert pareto_front([0.3], [0.1]) == [True]
    with pytest.raises(ValueError, match="2 leaks and 1 accuracies; expected as many"):
        pareto_front([0.1, 0.2], [0.3])
    with pytest.raises(ValueError, match="all of them finite"):
        pareto_front([NAN], [0.3])
