"""Scores of recovered images: against scikit-image, piq, plain loops and numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recon_core.similarity import (
    ACCURATE,
    APPROXIMATE,
    THRESHOLDS,
    errors,
    perceptual_similarity,
    psnr,
    rates,
    similarities,
    spread,
    unit_ssim,
)
from recon_core.summary import bootstrap_interval, proportion_interval
from recon_core.torchvision_compat import import_piq
from tests.recon_core.drawing import refuses
from tests.recon_core.test_metrics import skimage_ssim

N = 5


def images(seed: int, n: int = N, channels: int = 3, side: int = 16) -> Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Sequential:
    """Two layers of maps, the second not negative."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2), nn.ReLU())
    for parameter in net.parameters():
        parameter.requires_grad_(False).copy_(
            torch.randn(parameter.shape, generator=generator) * 0.3
        )
    return net


def maps(x: Tensor, layers: tuple[str, ...] = ("1", "3")) -> list[Tensor]:
    found = []
    for name, module in network().named_children():
        x = module(x)
        if name in layers:
            found.append(x)
    return found


def test_unit_ssim_is_that_of_scikit_image_from_0_to_1() -> None:
    x, y = images(0), (images(0) + images(1)) / 2
    expected = [skimage_ssim(a, b) for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(
        unit_ssim(x, y), (torch.tensor(expected, dtype=torch.float64) + 1) / 2, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(unit_ssim(x, x), torch.ones(N, dtype=torch.float64))
    checked = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(8, 8).expand(1, 1, 16, 16)
    assert float(unit_ssim(checked, 1 - checked)) < 0.01


@pytest.mark.parametrize("layers", [("1",), ("3",), ("1", "3")])
def test_perceptual_similarity_is_one_less_the_content_loss_of_piq(layers: tuple[str, ...]) -> None:
    x, y = images(0), images(1)
    piq_loss = import_piq().ContentLoss(
        feature_extractor=network(),
        layers=layers,
        weights=[0.5 / len(layers)] * len(layers),
        mean=[0.0] * 3,
        std=[1.0] * 3,
        normalize_features=True,
        reduction="none",
    )(x, y)
    found = perceptual_similarity(maps(x, layers), maps(y, layers))
    torch.testing.assert_close(found, 1 - piq_loss.double(), atol=1e-6, rtol=0)


def test_perceptual_similarity_knows_its_range() -> None:
    f = [torch.rand(N, 4, 3, 3), torch.rand(N, 7)]
    ones = torch.ones(N, dtype=torch.float64)
    torch.testing.assert_close(perceptual_similarity(f, f), ones)
    torch.testing.assert_close(perceptual_similarity(f, [5 * a for a in f]), ones)
    torch.testing.assert_close(perceptual_similarity(f, [-a for a in f]), -ones)
    nothing = [torch.zeros_like(a) for a in f]
    torch.testing.assert_close(perceptual_similarity(nothing, nothing), ones)
    torch.testing.assert_close(perceptual_similarity(f, nothing), ones / 2)
    one, other = torch.zeros(1, 2), torch.zeros(1, 2)
    one[0, 0] = other[0, 1] = 1.0
    assert float(perceptual_similarity([one], [other])) == pytest.approx(0.0, abs=1e-9)


def test_all_scores_at_once() -> None:
    x, y = images(0), images(1)
    found = similarities(x, y, recovered_maps=maps(x), original_maps=maps(y))
    for i in range(N):
        mse = float(sum((a - b) ** 2 for a, b in zip(x[i].flatten(), y[i].flatten(), strict=True)))
        mse /= x[i].numel()
        assert float(found.mse[i]) == pytest.approx(mse, rel=1e-5)
        assert float(found.psnr[i]) == pytest.approx(-10 * math.log10(mse), rel=1e-5)
    torch.testing.assert_close(found.ssim, unit_ssim(x, y))
    torch.testing.assert_close(found.psim, perceptual_similarity(maps(x), maps(y)))
    same = similarities(x, x, convention="gaussian3")
    assert same.psim is None
    assert same.psnr.tolist() == pytest.approx([120.0] * N)
    assert same.mse.tolist() == [0.0] * N


def test_the_worst_case_is_the_image_recovered_best() -> None:
    scores = torch.tensor([0.2, 0.8, 0.5])
    found = spread(scores)
    assert (found.n, found.worst_row) == (3, 1)
    assert found.mean == pytest.approx(0.5)
    assert found.std == pytest.approx(math.sqrt((0.09 + 0.09 + 0.0) / 3))
    assert found.worst == pytest.approx(0.8)
    errors = spread(scores, higher_is_alike=False)
    assert (errors.worst_row, errors.worst) == (0, pytest.approx(0.2))
    assert spread(torch.tensor([0.3])).std == 0.0


one, two, nothing = torch.rand(2, 1, 1, 1), torch.rand(2, 3), torch.empty(0)


@pytest.mark.parametrize(
    ("message", "function", "given"),
    [
        ("smaller than the 11x11 window", similarities, (images(0, side=8), images(0, side=8))),
        ("1 and 0 layers", perceptual_similarity, ([two], [])),
        (
            r"layer 1 are \(2, 3\) and \(2, 4\)",
            perceptual_similarity,
            ([two, two], [two, torch.rand(2, 4)]),
        ),
        ("layer 0 are not finite", perceptual_similarity, ([two * torch.nan], [two])),
        ("0 scores", spread, (nothing,)),
        ("all of them finite", spread, (torch.tensor([0.1, torch.nan]),)),
        (r"images \[1\]", errors, (torch.tensor([0, torch.nan]).view(2, 1, 1, 1), one)),
        ("mse has 0 numbers", rates, (nothing.double(),)),
        *(
            ("mse has 1 numbers", rates, (torch.tensor([bad]).double(),))
            for bad in (math.nan, math.inf, -1e-9)
        ),
    ],
)
def test_bad_input_is_told(
    message: str, function: Callable[..., object], given: tuple[Any, ...]
) -> None:
    refuses(message, function, *given)


def test_maps_are_of_both_and_of_all_images() -> None:
    x = images(0)
    refuses("one side only", similarities, x, x, recovered_maps=maps(x))
    few = {"recovered_maps": maps(x[:4]), "original_maps": maps(x[:4])}
    refuses("maps are of 4 images, not 5", similarities, x, x, **few)


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
