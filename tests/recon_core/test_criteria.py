"""Rank correlations against scipy's, their intervals, and bins of equal counts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from recon_core.criteria import (
    best_in_top_quarter,
    bin_of,
    equal_count_edges,
    images_found,
    rank_correlation,
)


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


def test_groups_of_one_size_give_their_mean_coefficient() -> None:
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(2, 3, 20))
    each = [stats.spearmanr(x[k], y[k]).statistic for k in range(3)]
    found = rank_correlation(x.ravel(), y.ravel(), within=np.repeat([5, 1, 3], 20))
    assert found["spearman"] == pytest.approx(np.mean(each))


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
    with pytest.raises(ValueError, match="all of them finite"):
        rank_correlation(some, np.array([1, 2, np.nan, 4, 5]))
    with pytest.raises(ValueError, match="x has 5 and y 4 values"):
        rank_correlation(some, some[:4])


def test_the_best_is_looked_for_in_the_top_quarter() -> None:
    truth = np.array([0.1, 0.9, 0.3, 0.2, 0.0])
    assert best_in_top_quarter(np.array([5.0, 4.0, 3.0, 2.0, 1.0]), truth)  # second of five
    assert not best_in_top_quarter(np.array([5.0, 3.0, 4.0, 2.0, 1.0]), truth)
    assert not best_in_top_quarter(np.ones(5), truth)  # a constant finds nothing
    assert best_in_top_quarter(np.ones(1), np.ones(1))
    with pytest.raises(ValueError, match="truth is empty"):
        best_in_top_quarter(truth[:0], truth[:0])


def test_bins_hold_as_many_values_and_are_open_at_the_ends() -> None:
    values = np.random.default_rng(5).permutation(100).astype(np.float64)
    edges = equal_count_edges(values)
    assert edges[0] == 0
    assert edges[-1] == 99
    assert np.bincount(bin_of(values, edges)).tolist() == [20] * 5
    assert bin_of(np.array([-7.0, 500.0, edges[1]]), edges).tolist() == [0, 4, 1]
    with pytest.raises(ValueError, match="values is empty"):
        equal_count_edges(values[:0])


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
