"""Errors, PSNRs and rates of recovered images, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from recon_core.recovery_scores import (
    ACCURATE,
    APPROXIMATE,
    THRESHOLDS,
    errors,
    psnr,
    rates,
)
from recon_core.summary import bootstrap_interval, proportion_interval


def mse(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_errors_are_means_over_an_image_and_in_float64() -> None:
    original = torch.zeros(3, 3, 8, 8)
    x = original.clone()
    x[1] = 0.5
    x[2, 0, 0, 0] = 1.0
    found = errors(x, original)
    assert found.dtype == torch.float64
    assert found.tolist() == [0.0, 0.25, 1 / 192]
    near = torch.full((1, 3, 8, 8), 0.7)
    assert errors(torch.nextafter(near, torch.ones(())), near)[0] == pytest.approx(
        2.0**-48, rel=1e-6
    )


def test_errors_are_refused_where_there_are_none() -> None:
    x = torch.zeros(2, 1, 4, 4)
    broken = x.clone()
    broken[1, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"images \[1\]"):
        errors(broken, x)


def test_psnr_of_the_papers_thresholds() -> None:
    assert psnr(mse(ACCURATE))[0] == pytest.approx(70.0)
    assert psnr(mse(APPROXIMATE))[0] == pytest.approx(33.0103, abs=1e-4)
    assert psnr(mse(0.0, 1e-30, 1.0)).tolist() == pytest.approx([120.0, 120.0, 0.0])


def test_rates_count_what_is_strictly_below() -> None:
    found = rates(mse(0.0, 9.9e-8, 1e-7, 9e-6, 4e-4, 5e-4, 9e-4, 0.1))
    assert (found.n, found.n_accurate, found.n_approximate) == (8, 2, 5)
    assert found.by_threshold == (7, 5, 4, 4, 3, 2)
    assert len(found.by_threshold) == len(THRESHOLDS)
    assert found.accurate == (0.25, *proportion_interval(2, 8))
    assert found.approximate == (0.625, *proportion_interval(5, 8))


def test_the_mean_psnr_is_of_psnrs_not_of_errors() -> None:
    values = [1e-2, 1e-4, 1e-6]
    mean, low, high = rates(mse(*values)).psnr
    assert mean == pytest.approx(40.0)
    expected = bootstrap_interval(np.array([-10 * math.log10(v) for v in values]))
    assert (low, high) == pytest.approx(expected)
    assert low < mean < high


def test_rates_of_nothing_recovered_and_of_everything() -> None:
    none, everything = rates(mse(0.1, 0.2)), rates(mse(0.0, 0.0))
    assert none.accurate[:2] == (0.0, 0.0)
    assert none.accurate[2] > 0.5
    assert everything.accurate[0] == everything.accurate[2] == 1.0
    assert everything.psnr == pytest.approx((120.0, 120.0, 120.0))


@pytest.mark.parametrize("values", [(), (math.nan,), (math.inf,), (-1e-9,)])
def test_rates_of_no_errors_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=f"mse has {len(values)} numbers"):
        rates(mse(*values))
