"""Shares, intervals, p-values and likelihood ratios, by hand and with a planted leak."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torch import Tensor

from recon_core.leakage import (
    complementary_halves,
    confidence,
    exchangeable_p,
    likelihood_ratio,
    paired_difference,
    pareto_front,
    share_found,
)
from recon_core.summary import N_BOOTSTRAP, detect, proportion_interval, t_interval, threshold_for
from recon_core.types import seeded_generator
from recon_core.victims.losses import Loss
from tests.recon_core.drawing import refuses

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


def beta_shares(rng: np.random.Generator, truth: float, spread: float) -> tuple[Scores, Scores]:
    """Twelve victims, each with its own share from a beta distribution, and forty images each;
    `spread` is the correlation of two images of a victim. All decoys score less."""
    shares = np.full(12, truth)
    if spread:
        size = (1 - spread) / spread
        shares = rng.beta(truth * size, (1 - truth) * size, 12)
    return (rng.random((12, 40)) < shares[:, None]) - 0.5, np.full((12, 40), -1.0)


def normal_scores(rng: np.random.Generator, gain: float, n: float) -> tuple[Scores, Scores]:
    return rng.normal(gain, 1, (12, int(n))), rng.normal(0, 1, (12, int(n)))


COVERED = [
    *((beta_shares, 0.02, rho, 0.0, 0.4, 0.02) for rho in (0.0, 0.02, 0.05)),  # at .2 80 % of them
    *((beta_shares, p, rho, 0.0, 0.4, p) for p in (0.3, 0.8) for rho in (0.0, 0.05, 0.2)),
    # At 1 % false positives, Phi(gain - 2.326) of the members are found.
    *(
        (normal_scores, gain, n, 0.01, None, float(stats.norm.cdf(gain - stats.norm.ppf(0.99))))
        for gain, n in ((2.5, 40), (1.0, 100), (2.5, 100), (4.0, 100))
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scores", "a", "b", "rate", "least", "truth"), COVERED)
def test_intervals_cover_what_victims_have_on_average(
    scores: Callable[[np.random.Generator, float, float], tuple[Scores, Scores]],
    a: float,
    b: float,
    rate: float,
    least: float | None,
    truth: float,
) -> None:
    covered = 0
    for seed in range(200):
        given = audit(*scores(np.random.default_rng(seed), a, b))
        low, high = share_found(*given, rate=rate, least=least).interval
        covered += low <= truth <= high
    assert covered / 200 >= 0.93


def test_a_share_refuses_what_has_none() -> None:
    scores, member = audit(np.zeros((2, 3)), np.zeros((2, 3)))
    member[1] = False
    refuses(r"victims have \[3, 0\] members; a share needs", share_found, scores, member, rate=0.0)
    refuses(r"rate=0.0 of 0 decoys", share_found, scores[:0], member[:0], rate=0.0)
    refuses(r"rate=0.0 of 0 decoys", share_found, scores, np.ones((2, 6), bool), rate=0.0)
    refuses(r"rate=1.0 of 6", share_found, *audit(np.zeros((2, 3)), np.zeros((2, 3))), rate=1.0)


def test_differences_are_of_pairs() -> None:
    mean, (low, high) = paired_difference([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])
    assert mean == pytest.approx(0.2)
    half = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert (low, high) == pytest.approx((0.2 - half, 0.2 + half))
    assert paired_difference([0.5, 0.5], [0.25, 0.25]) == (0.25, (0.25, 0.25))
    for a, b in (([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, NAN], [1.0, 2.0])):
        refuses("expected as many, two or more", paired_difference, a, b)


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
    refuses(r"n_draws=0, \[3, 3\]", exchangeable_p, scores, member, n_draws=0, generator=rng)
    refuses(r"\[6, 6\] members and \[0, 0\]", exchangeable_p, scores, member | True, generator=rng)
    refuses(r"\[0, 0\] members", exchangeable_p, scores, member & False, generator=rng)


def test_the_front_by_hand() -> None:
    leak, accuracy = [0.5, 0.1, 0.2, 0.2, 0.5, 0.3], [0.9, 0.6, 0.8, 0.7, 0.9, 0.8]
    assert pareto_front(leak, accuracy) == [True, True, True, False, True, False]
    assert pareto_front([], []) == []
    assert pareto_front([0.3], [0.1]) == [True]
    refuses("2 leaks and 1 accuracies; expected as many", pareto_front, [0.1, 0.2], [0.3])
    refuses("all of them finite", pareto_front, [NAN], [0.3])


def halves(n_victims: int, n: int, seed: int = 0) -> Tensor:
    labels = np.arange(n) % 2
    return complementary_halves(labels, n_victims, seeded_generator(seed, 0, "halves"))


def planted(member: Tensor, gain: float, *, difficulty: float = 0.0, seed: int = 0) -> Tensor:
    """Confidences with deviation 1 about an image's own level, `gain` higher for members."""
    generator = seeded_generator(seed, 0, "confidence")
    level = difficulty * torch.randn(member.shape[1], generator=generator)
    return (level + gain * member + torch.randn(member.shape, generator=generator)).double()


def auc(scores: Tensor, member: Tensor) -> float:
    found = detect(scores[member].numpy(), scores[~member].numpy())["auc"]
    assert found is not None
    return found


def found_at_1_percent(scores: Tensor, member: Tensor) -> float:
    found = detect(scores[member].numpy(), scores[~member].numpy())["found_at"]
    assert found is not None
    return found["0.01"]


@pytest.mark.parametrize("kind", ["bce", "ce"])
def test_confidence_is_the_logit_of_the_labels_probability(kind: str) -> None:
    generator = seeded_generator(0, 0, "outputs")
    n_outputs = 3 if kind == "ce" else 1
    phi = torch.randn(2, 5, n_outputs, generator=generator).double()
    y = torch.arange(10).view(2, 5) % 3 if kind == "ce" else torch.ones(2, 5).double()
    if kind == "bce":
        y[:, ::2] = -1
    own = Loss(kind=kind)  # type: ignore[arg-type]
    for run in range(2):
        for i in range(5):
            p = math.exp(
                -float(own.value(phi[run : run + 1, i : i + 1], y[run : run + 1, i : i + 1]))
            )
            found = float(confidence(phi, y, kind)[run, i])  # type: ignore[arg-type]
            assert found == pytest.approx(math.log(p / (1 - p)), rel=1e-9)
    sure = confidence(60 * y.unsqueeze(2), y, "bce") if kind == "bce" else None
    assert sure is None or sure.tolist() == [[60.0] * 5] * 2


@pytest.mark.parametrize("kind", ["mse", "power", "huber"])
def test_confidence_of_regression_is_minus_the_squared_error(kind: str) -> None:
    phi, y = torch.tensor([[[0.5], [-3.0]]]), torch.tensor([[1.0, -1.0]])
    assert confidence(phi, y, kind).tolist() == [[-0.25, -4.0]]  # type: ignore[arg-type]
    refuses("needs -1 and", confidence, phi, 2 * y, kind)


def by_the_book(c: Tensor, member: Tensor) -> np.ndarray:
    """Victim by victim, image by image, with scipy's density."""
    n_victims, n = c.shape
    rows = range(n_victims)
    expected = np.full((n_victims, n), np.nan)
    for v in rows:
        partner = [u for u in rows if bool((member[u] == ~member[v]).all())]
        spread = []
        for inside in (True, False):
            squares, freedom = 0.0, 0
            for i in range(n):
                own = [float(c[u, i]) for u in rows if u != v and bool(member[u, i]) == inside]
                if len(own) > 1:
                    squares += float(np.var(own, ddof=1)) * (len(own) - 1)
                    freedom += len(own) - 1
            spread.append(math.sqrt(squares / freedom))
        for i in range(n):
            logs = []
            for inside, s in zip((True, False), spread, strict=True):
                shadows = [u for u in rows if u not in (v, *partner)]
                mean = np.mean([float(c[u, i]) for u in shadows if bool(member[u, i]) == inside])
                logs.append(stats.norm.logpdf(float(c[v, i]), mean, s))
            expected[v, i] = logs[0] - logs[1]
    return expected


@pytest.mark.parametrize("n_victims", [4, 6, 10])
def test_the_ratio_is_that_of_scipys_densities(n_victims: int) -> None:
    member = halves(n_victims, 12)
    c = planted(member, 1.0, difficulty=2.0)
    ratio = likelihood_ratio(c, member)
    assert ratio.dtype == torch.float64
    np.testing.assert_allclose(ratio.numpy(), by_the_book(c, member), rtol=1e-9, atol=1e-9)
    alike = likelihood_ratio(c.float(), member)
    torch.testing.assert_close(alike, ratio, rtol=1e-4, atol=1e-4)


def test_a_victim_without_a_complement_leaves_out_itself_alone() -> None:
    odd = torch.cat([halves(6, 12), halves(2, 12, 7)[:1]])
    c = planted(odd, 1.0)
    np.testing.assert_allclose(
        likelihood_ratio(c, odd).numpy(), by_the_book(c, odd), rtol=1e-9, atol=1e-9
    )


def test_a_planted_gain_is_found_as_often_as_it_can_be() -> None:
    """With deviation 1, members `gain` higher have an area of Phi(gain / sqrt 2)."""
    member = halves(40, 400)
    for gain in (0.5, 1.0, 2.0):
        c = planted(member, gain, difficulty=3.0)
        found = auc(likelihood_ratio(c, member), member)
        best = stats.norm.cdf(gain / math.sqrt(2))
        assert best - 0.03 < found < best + 0.01  # 19 shadows a side do not know the mean exactly


@pytest.mark.parametrize("n_victims", [4, 6, 16])
def test_without_a_leak_members_look_like_decoys(n_victims: int) -> None:
    """With few shadows too, of which more have an image where the victim has not."""
    areas = []
    for seed in range(20):
        member = halves(n_victims, 200, seed)
        c = planted(member, 0.0, difficulty=1.0, seed=seed)
        areas.append(auc(likelihood_ratio(c, member), member))
    error = np.std(areas, ddof=1) / math.sqrt(len(areas))
    assert error < 0.01
    assert np.mean(areas) == pytest.approx(0.5, abs=4 * error)


def test_the_ratio_sees_more_than_the_loss_where_images_differ_in_difficulty() -> None:
    member = halves(16, 400)
    c = planted(member, 2.0, difficulty=3.0)
    ratio, loss = (found_at_1_percent(s, member) for s in (likelihood_ratio(c, member), c))
    assert loss < 0.08
    assert ratio > 4 * loss
    assert auc(likelihood_ratio(c, member), member) > auc(c, member) + 0.1


def test_a_diverged_victim_is_no_shadow_and_finds_nothing() -> None:
    member = halves(8, 12)
    c = planted(member, 1.0)
    for bad in (math.nan, math.inf, -math.inf):
        broken = c.clone()
        broken[2, 5] = bad
        scores = likelihood_ratio(broken, member)
        assert scores[2].tolist() == [-math.inf] * 12
        rest = [v for v in range(8) if v != 2]
        assert bool(scores[rest].isfinite().all())
        expected = by_the_book(c[rest], member[rest])
        # Its complement has none among the rest, and leaves out nobody but itself.
        np.testing.assert_allclose(scores[rest].numpy(), expected, rtol=1e-9, atol=1e-9)
    # With four victims, the shadows of a pair are both of the other.
    few = halves(4, 12)
    c = planted(few, 1.0)
    c[3, 0] = math.nan
    scores = likelihood_ratio(c, few)
    assert bool((scores[[0, 1, 3]] == -math.inf).all())
    assert bool(scores[2].isfinite().all())
    c[:] = math.nan
    assert bool((likelihood_ratio(c, few) == -math.inf).all())


def test_confidences_that_are_all_the_same_say_nothing() -> None:
    member = halves(6, 12)
    assert likelihood_ratio(torch.full((6, 12), 2.5), member).tolist() == [[0.0] * 12] * 6
    sure = likelihood_ratio(10.0 * member, member)
    assert bool((sure[member] > 1e6).all())
    assert bool((sure[~member] < -1e6).all())


def test_halves_are_complementary_and_balanced() -> None:
    labels = np.array([0, 3, 0, 3, 0, 3, 0, 3, 7, 7])
    member = complementary_halves(labels, 6, seeded_generator(0, 0, "halves"))
    assert (member.dtype, member.shape) == (torch.bool, (6, 10))
    assert torch.equal(member[::2], ~member[1::2])
    assert member.sum(0).tolist() == [3] * 10
    for label, n in ((0, 2), (3, 2), (7, 1)):
        assert member[:, torch.from_numpy(labels == label)].sum(1).tolist() == [n] * 6
    assert torch.equal(member, complementary_halves(labels, 6, seeded_generator(0, 0, "halves")))
    many = complementary_halves(labels, 4000, seeded_generator(1, 0, "halves"))[::2]
    assert bool(((many.double().mean(0) - 0.5).abs() < 5 * 0.5 / math.sqrt(2000)).all())
    together = (many[:, 0] & many[:, 2]).double().mean()  # two of four: 1/6
    assert float(together) == pytest.approx(1 / 6, abs=0.05)


def test_refuses_what_cannot_be_halved_or_has_no_shadows() -> None:
    labels, generator = np.array([0, 0, 5, 5, 5]), seeded_generator(0, 0, "halves")
    refuses("label 5 has 3 images, which cannot be", complementary_halves, labels, 4, generator)
    for n_victims in (0, 3):
        refuses(f"n_victims={n_victims}", complementary_halves, labels[:4], n_victims, generator)
    pair = halves(2, 12)
    refuses(r"of 2 victims.*at least 4 victims in", likelihood_ratio, planted(pair, 0.0), pair)
    everywhere = halves(6, 12)
    everywhere[:, 4] = True
    refuses("image 4 is in none or in all", likelihood_ratio, planted(everywhere, 0.0), everywhere)
