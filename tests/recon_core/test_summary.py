"""The numbers of the table, on scores whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recon_core.summary import best_matches, bootstrap_interval, compare, n_above_every, summarise


def test_counts_and_means() -> None:
    summary = summarise(np.array([0.4, 0.41, 0.9]), np.array([0.1, 0.2, 0.6]), good_threshold=0.4)
    assert (summary["n"], summary["n_good"], summary["best_ssim"]) == (3, 2, 0.9)
    assert summary["mean_haarpsi"] == pytest.approx(0.3)
    nothing = summarise(np.array([]), np.array([]), good_threshold=0.4)
    assert (nothing["n_good"], nothing["good_fraction"], nothing["mean_ssim"]) == (0, None, None)


def test_the_bootstrap_interval_is_that_of_the_normal_limit() -> None:
    values = np.random.default_rng(1).normal(0.5, 0.1, 400)
    low, high = bootstrap_interval(values)
    error = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + error, abs=0.1 * error)
    assert bootstrap_interval(values) == (low, high)
    with pytest.raises(ValueError, match="values is empty"):
        bootstrap_interval(np.array([]))


def test_better_and_worse_need_a_noticeable_difference() -> None:
    before, after = np.array([0.5, 0.5, 0.5]), np.array([0.505, 0.6, 0.4])
    result = compare(before, after)
    assert (result["n_better"], result["n_worse"]) == (1, 1)
    assert result["mean_difference"] == pytest.approx(0.005 / 3)


def test_above_every_decoy_is_strict() -> None:
    assert n_above_every(np.array([0.3, 0.5, 0.6]), np.array([0.1, 0.5])) == 1
    assert n_above_every(np.array([0.3]), np.array([])) == 1


def test_an_image_without_pictures_scores_nothing() -> None:
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = best_matches(torch.cat([image[1:], image[:1]]), image)
    assert found.row.tolist() == [1, 0]
    torch.testing.assert_close(found.ssim, torch.ones(2))
    torch.testing.assert_close(found.haarpsi, torch.ones(2))
    none = best_matches(image[:0], image)
    assert none.row.tolist() == [-1, -1]
    assert none.ssim.tolist() == none.haarpsi.tolist() == [0.0, 0.0]
