"""The numbers of the tables: on scores whose answers are known, and beside scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from recon_core.metrics import ssim_pairs
from recon_core.summary import (
    best_in_top_quarter,
    best_matches,
    bootstrap_interval,
    compare,
    detect,
    images_found,
    proportion_interval,
    rank_correlation,
    roc,
    score_matches,
    summarise,
    t_interval,
    threshold_for,
)
from tests.recon_core.drawing import refuses


def test_counts_and_means() -> None:
    ssim, haarpsi, ssim3 = ([0.4, 0.41, 0.9], [0.1, 0.2, 0.6], [0.3, 0.39, 0.6])
    summary = summarise(*map(np.array, (ssim, haarpsi, ssim3)), good_threshold=0.4)
    assert (summary["n"], summary["n_good"], summary["best_ssim"]) == (3, 2, 0.9)
    assert (summary["n_good_ssim3"], summary["mean_ssim3"]) == (1, pytest.approx(0.43))
    assert summary["mean_haarpsi"] == pytest.approx(0.3)
    nothing = summarise(*[np.array([])] * 3, good_threshold=0.4)
    assert (nothing["n_good"], nothing["good_fraction"], nothing["mean_ssim"]) == (0, None, None)


def test_the_bootstrap_interval_is_that_of_the_normal_limit() -> None:
    values = np.random.default_rng(1).normal(0.5, 0.1, 400)
    low, high = bootstrap_interval(values)
    error = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + error, abs=0.1 * error)
    assert bootstrap_interval(values) == (low, high)
    for n in (1, 40, 400):  # drawn in blocks, each mean is the one that it is drawn alone
        rng, few = np.random.default_rng(0), values[:n]
        means = [rng.choice(few, n).mean() for _ in range(2000)]
        assert bootstrap_interval(few) == pytest.approx(np.quantile(means, (0.025, 0.975)), 1e-12)
    refuses("values is empty", bootstrap_interval, np.array([]))


def test_resampling_groups_sees_what_the_values_of_a_group_share() -> None:
    rng = np.random.default_rng(2)
    groups = np.repeat(np.arange(40), 25)
    values = rng.normal(0, 0.1, 40)[groups] + rng.normal(0, 0.02, 1000)
    low, high = bootstrap_interval(values, groups=groups)
    of_group_means = values.reshape(40, 25).mean(axis=1).std() / np.sqrt(40)
    assert (high - low) / 2 == pytest.approx(1.96 * of_group_means, rel=0.1)
    alone = bootstrap_interval(values)
    assert high - low > 3 * (alone[1] - alone[0])
    shuffled = rng.permutation(1000)
    again = bootstrap_interval(values[shuffled], groups=7 * groups[shuffled])
    assert again == pytest.approx((low, high))


def test_the_exact_interval_of_a_share_covers_as_it_says() -> None:
    assert proportion_interval(0, 400) == pytest.approx((0.0, 0.00918), abs=1e-5)
    assert proportion_interval(400, 400)[1] == 1.0
    low, high = proportion_interval(7, 80)
    # The definition: at either end, so few or so many hits have a chance of 2.5 %.
    hits = np.random.default_rng(0).binomial(80, [[low], [high]], size=(2, 200_000))
    assert (hits[0] >= 7).mean() == pytest.approx(0.025, abs=0.002)
    assert (hits[1] <= 7).mean() == pytest.approx(0.025, abs=0.002)
    for bad in ((0, 0), (3, 2), (-1, 2)):
        refuses("n_hits", proportion_interval, *bad)


def test_detection_is_what_counting_pairs_and_thresholds_gives() -> None:
    rng = np.random.default_rng(3)
    scores, decoys = rng.normal(0.4, 0.1, 60).round(2), rng.normal(0.3, 0.1, 200).round(2)
    found = detect(scores, decoys)
    pairs = scores[:, None] - decoys[None]
    assert found["auc"] == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    assert found["found_at"] == {
        "0": float((scores > decoys.max()).mean()),
        "0.01": float((scores > threshold_for(decoys, 0.01)).mean()),
        "0.05": float((scores > threshold_for(decoys, 0.05)).mean()),
    }
    assert detect(scores, decoys[:0]) == {"auc": None, "found_at": None}
    for rate in (0.0, 0.013, 0.05, 0.5):
        threshold = threshold_for(decoys, rate)
        assert (decoys > threshold).mean() <= rate
        below = np.nextafter(threshold, -1)
        assert (decoys > below).mean() > rate  # no lower one would do
    refuses(r"rate=1\.0", threshold_for, decoys, 1.0)


def test_better_and_worse_need_a_noticeable_difference() -> None:
    before, after = np.array([0.5, 0.5, 0.5]), np.array([0.505, 0.6, 0.4])
    result = compare(before, after)
    assert (result["n_better"], result["n_worse"]) == (1, 1)
    assert result["mean_difference"] == pytest.approx(0.005 / 3)
    assert result["mean_difference_interval"] == bootstrap_interval(after - before)


def test_an_image_without_pictures_scores_nothing() -> None:
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = best_matches(torch.cat([image[1:], image[:1]]), image)
    assert found.row.tolist() == [1, 0]
    torch.testing.assert_close(found.ssim, torch.ones(2))
    torch.testing.assert_close(found.ssim3, torch.ones(2))
    assert found.rmse.tolist() == [0.0, 0.0]
    torch.testing.assert_close(found.haarpsi, torch.ones(2))
    none = best_matches(image[:0], image)
    assert none.row.tolist() == [-1, -1]
    assert none.ssim.tolist() == none.haarpsi.tolist() == none.ssim3.tolist() == [0.0, 0.0]
    assert none.rmse.isnan().all()


def test_the_matches_of_given_scores_are_scored_exactly() -> None:
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    scores = torch.tensor([[0.1, np.nan, np.nan], [np.nan, 0.2, np.nan]])
    found = best_matches(images[1:], images, scores=scores)
    assert found.row.tolist() == [0, 1, -1]
    torch.testing.assert_close(found.ssim, torch.tensor([0.1, 0.2, 0.0]))
    exact = score_matches(images[1:], images, found.row)
    torch.testing.assert_close(exact.ssim[:2], ssim_pairs(images[1:], images[:2]))
    error = (images[1:] - images[:2]).square().mean(dim=(1, 2, 3)).sqrt()
    torch.testing.assert_close(exact.rmse[:2], error)


def test_the_curve_has_all_its_corners_or_as_many_as_asked_for() -> None:
    curve = roc(np.array([0.9, 0.5, 0.3]), np.array([0.5, 0.1]))
    # Above .9; at .9; at .5, one of each; at .3; at .1. On the way from (0, 0) up to .9's (0, 1/3)
    # nothing bends.
    points = list(zip(curve["false_positives"], curve["found"], strict=True))
    assert points == [
        (0.0, 0.0),
        (0.0, pytest.approx(1 / 3)),
        (0.5, pytest.approx(2 / 3)),
        (0.5, 1.0),
        (1.0, 1.0),
    ]
    rng = np.random.default_rng(0)
    scores, decoys = rng.normal(0.5, 0.2, 900), rng.normal(0.3, 0.2, 900)
    long = roc(scores, decoys)
    whole = roc(scores, decoys, n_points=10_000)
    assert len(long["found"]) == 200 < len(whole["found"])
    assert (long["found"][0], long["found"][-1], long["false_positives"][-1]) == (0.0, 1.0, 1.0)
    auc = detect(scores, decoys)["auc"]
    assert np.trapezoid(whole["found"], whole["false_positives"]) == pytest.approx(auc)
    assert np.trapezoid(long["found"], long["false_positives"]) == pytest.approx(auc, abs=0.01)
    assert roc(scores, decoys[:0]) == {"false_positives": [], "found": []}


def test_the_t_interval_is_that_of_a_table() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]  # t(0.975, 4) = 2.776, standard error sqrt(2.5 / 5)
    assert t_interval(values) == pytest.approx((3 - 1.9633, 3 + 1.9633), abs=1e-3)
    assert t_interval([2.0, 2.0]) == (2.0, 2.0)
    refuses("values has 1; an interval needs at least two", t_interval, [2.0])


def test_the_coefficient_is_spearmans_with_ties() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=50).round(1)
    y = (x + rng.normal(size=50)).round(1)
    found = rank_correlation(x, y)
    assert len(np.unique(x)) < 50
    assert found["n"] == 50
    assert found["spearman"] == pytest.approx(stats.spearmanr(x, y).statistic)
    assert rank_correlation(x, 3 * np.exp(x))["spearman"] == pytest.approx(1.0)
    assert rank_correlation(x, -x)["spearman"] == pytest.approx(-1.0)


def test_the_interval_is_that_of_ranking_every_resample_anew() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=60)
    y = x + rng.normal(size=60)
    interval = rank_correlation(x, y)["interval"]
    assert interval is not None
    again = np.random.default_rng(2)
    drawn = [
        stats.spearmanr(x[rows], y[rows]).statistic for rows in again.integers(60, size=(2000, 60))
    ]
    assert interval == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)


def test_groups_of_other_levels_are_not_compared() -> None:
    rng = np.random.default_rng(3)
    groups = np.repeat([0, 1, 2], [10, 20, 30])
    truth = rng.normal(size=60)
    shifted = truth + 100 * groups  # ranks the runs of each victim perfectly
    within = rank_correlation(shifted, truth, within=groups)
    assert within["spearman"] == pytest.approx(1.0)
    assert within["interval"] == pytest.approx((1.0, 1.0))
    assert rank_correlation(shifted, truth)["spearman"] < 0.9
    one = rank_correlation(shifted[:10], truth[:10], within=groups[:10])
    assert one["spearman"] == pytest.approx(stats.spearmanr(shifted[:10], truth[:10]).statistic)


def test_whole_units_are_drawn() -> None:
    rng = np.random.default_rng(4)
    units = np.repeat(np.arange(10), 30)
    x = rng.normal(size=10)[units] + 0.1 * rng.normal(size=300)
    y = rng.normal(size=10)[units] + 0.1 * rng.normal(size=300)
    low, high = rank_correlation(x, y)["interval"] or (0.0, 0.0)
    wide = rank_correlation(x, y, units=units)["interval"] or (0.0, 0.0)
    assert wide[1] - wide[0] > 2 * (high - low)


def test_what_has_no_order_has_no_coefficient() -> None:
    some = np.arange(5.0)
    nothing = {"spearman": None, "interval": None}
    assert rank_correlation(some, np.ones(5)) == {"n": 5, **nothing}
    assert rank_correlation(some[:2], some[:2]) == {"n": 2, **nothing}
    assert rank_correlation(some[:0], some[:0]) == {"n": 0, **nothing}
    refuses("all of them finite", rank_correlation, some, np.array([1, 2, np.nan, 4, 5]))
    refuses("x has 5 and y 4 values", rank_correlation, some, some[:4])


def test_the_best_is_looked_for_in_the_top_quarter() -> None:
    truth = np.array([0.1, 0.9, 0.3, 0.2, 0.0])
    assert best_in_top_quarter(np.array([5.0, 4.0, 3.0, 2.0, 1.0]), truth)  # second of five
    assert not best_in_top_quarter(np.array([5.0, 3.0, 4.0, 2.0, 1.0]), truth)
    assert not best_in_top_quarter(np.ones(5), truth)  # a constant finds nothing
    assert best_in_top_quarter(np.ones(1), np.ones(1))
    refuses("truth is empty", best_in_top_quarter, truth[:0], truth[:0])


def test_images_found_by_the_share_of_false_pictures() -> None:
    """Ranked: 0, 1, 1 again, false, 2, false, 3. At 0 % up to the first false one; at a quarter the
    head of five has one; at a half all."""
    scores = np.full((7, 5), 0.1)
    for row, image in ((0, 0), (1, 1), (2, 1), (4, 2), (6, 3)):
        scores[row, image] = 0.9
    assert images_found(scores, false_shares=(0.0, 0.25, 0.5)) == (2, 3, 4)
    assert images_found(scores[3:4]) == (0, 0, 0)
    assert images_found(scores[:0]) == (0, 0, 0)
    assert images_found(scores, good=0.95, false_shares=(1.0,)) == (0,)
