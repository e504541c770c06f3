"""The matching rules of paper 001, on cases small enough to check by eye."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recon_core.matching import (
    best_and_second,
    best_per_target,
    confident_candidates,
    fit_to_range,
    min_max,
)

NAN = float("nan")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(-30, 6))
def test_fitted_pictures_touch_the_range_and_do_not_depend_on_the_scale(
    seed: int, exponent: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 3, 4, 4, generator=generator)
    mean = 0.1 + 0.8 * torch.rand(3, 4, 4, generator=generator)
    picture = fit_to_range(x, mean)
    assert picture.min() >= 0
    assert picture.max() <= 1
    gap = torch.minimum(picture, 1 - picture).flatten(1).amin(dim=1)
    assert (gap < 1e-6).all()
    torch.testing.assert_close(fit_to_range(x * 10.0**exponent, mean), picture, atol=1e-5, rtol=0)
    direction = (picture - mean) / x
    spread = direction.flatten(1)
    torch.testing.assert_close(spread, spread[:, :1].expand_as(spread), atol=1e-3, rtol=1e-3)


def test_fitting_recovers_an_image_that_touches_black_and_white() -> None:
    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    image[0, 0, 0, 0], image[0, 1, 1, 1] = 0.0, 1.0
    mean = torch.full((3, 8, 8), 0.45)
    torch.testing.assert_close(fit_to_range(1e-7 * (image - mean), mean), image)


def test_fitting_degenerate_reconstructions() -> None:
    mean = torch.full((3, 4, 4), 0.25)
    x = torch.zeros(3, 3, 4, 4)
    x[1, 0, 0, 0] = NAN
    x[2] = 1.0
    picture = fit_to_range(x, mean)
    torch.testing.assert_close(picture[0], mean)
    assert picture[1].isnan().all()
    torch.testing.assert_close(picture[2], torch.ones(3, 4, 4))
    black = torch.zeros(3, 4, 4)
    torch.testing.assert_close(fit_to_range(-x[2:], black), black[None])


def test_min_max_spans_the_range_and_a_flat_one_is_black() -> None:
    x = torch.zeros(2, 1, 1, 3)
    x[0, 0, 0] = torch.tensor([-2.0, 0.0, 2.0])
    pictures = min_max(x, torch.full((1, 1, 3), 0.5))
    assert pictures[0].flatten().tolist() == [0.0, 0.5, 1.0]
    assert pictures[1].flatten().tolist() == [0.0, 0.0, 0.0]


def test_best_and_second_by_hand() -> None:
    scores = torch.tensor(
        [[0.1, 0.7, 0.3], [0.5, 0.5, 0.2], [NAN, 0.2, NAN], [NAN, NAN, NAN], [0.4, NAN, 0.6]]
    )
    row, best, second = best_and_second(scores)
    assert row.tolist() == [1, 0, 1, 0, 2]
    torch.testing.assert_close(best, torch.tensor([0.7, 0.5, 0.2, -1.0, 0.6]))
    torch.testing.assert_close(second, torch.tensor([0.3, 0.5, -1.0, -1.0, 0.4]))


def test_one_training_image_has_no_second() -> None:
    row, best, second = best_and_second(torch.tensor([[0.3], [NAN]]))
    assert row.tolist() == [0, 0]
    torch.testing.assert_close(best, torch.tensor([0.3, -1.0]))
    assert second.tolist() == [-1.0, -1.0]
    with pytest.raises(ValueError, match="at least one training image"):
        best_and_second(torch.zeros(2, 0))


def test_the_confidence_rule_by_hand() -> None:
    """Clear; never above .4; tied; confident once and later ambiguous; on the boundary."""
    best = torch.tensor([[0.50, 0.39, 0.80, 0.45, 0.4], [0.60, 0.30, 0.90, 0.70, 0.4]])
    second = torch.tensor([[0.10, 0.00, 0.80, 0.20, 0.0], [0.20, 0.00, 0.86, 0.69, 0.0]])
    rows = torch.tensor([[1, 2, 3, 4, 0], [5, 6, 7, 8, 9]])
    confident, target = confident_candidates(rows, best, second)
    assert confident.tolist() == [True, False, False, True, False]
    assert target.tolist() == [5, 2, 7, 4, 0]


def test_the_margin_and_the_threshold_are_settings() -> None:
    one = torch.tensor([[0.35]])
    rows = torch.zeros(1, 1, dtype=torch.int64)
    assert not confident_candidates(rows, one, torch.tensor([[0.34]]))[0]
    assert confident_candidates(rows, one, torch.tensor([[0.34]]), threshold=0.3, margin=0.0)[0]
    with pytest.raises(ValueError, match="no saved iteration"):
        confident_candidates(rows[:0], one[:0], one[:0])


def test_best_candidate_of_each_image() -> None:
    scores = torch.tensor([[0.2, NAN, NAN, 0.5], [0.9, 0.1, NAN, 0.5]])
    candidate, score = best_per_target(scores)
    assert candidate.tolist() == [1, 1, -1, 0]
    torch.testing.assert_close(score, torch.tensor([0.9, 0.1, -1.0, 0.5]))
    candidate, score = best_per_target(torch.zeros(0, 2))
    assert candidate.tolist() == [-1, -1]
    assert score.tolist() == [-1.0, -1.0]
