"""Filters and whitened features."""

from __future__ import annotations

import pytest
import torch

from recon_core.attacks.span.features import (
    colour_axes,
    cosines,
    dct_filters,
    outputs_of,
    whitened,
)
from tests.recon_core.drawing import generator
from tests.recon_core.tiles import photograph_tiles


def test_cosines_are_orthonormal() -> None:
    pictures = torch.randn(2, 3, 8, 6, generator=generator(1)).double()
    there = cosines(pictures)
    assert torch.allclose(cosines(there, inverse=True), pictures)
    assert float(there.square().sum()) == pytest.approx(float(pictures.square().sum()))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_cosine_filters_are_orthonormal_and_blind_to_the_mean(size: int, channels: int) -> None:
    filters = dct_filters(size, channels)
    assert filters.shape == (channels * (size**2 - 1), channels, size, size)
    flat = filters.flatten(1)
    assert torch.allclose(flat @ flat.mT, torch.eye(len(flat), dtype=flat.dtype), atol=1e-12)
    assert float(filters.sum((2, 3)).abs().max()) < 1e-12
    axes = colour_axes(channels)
    assert torch.allclose(axes @ axes.mT, torch.eye(channels, dtype=axes.dtype), atol=1e-12)


def test_features_are_white_over_directions() -> None:
    pictures = photograph_tiles(16, shrink=2)[:20].double() / 255
    outputs = outputs_of(pictures, dct_filters(4, 3), stride=2)
    z, whiten = whitened(outputs)
    assert z.shape == (20, 45 * 49)
    assert torch.allclose(whiten @ outputs, z)
    covariance = z @ z.mT / z.shape[1]
    assert torch.allclose(covariance, torch.eye(20, dtype=covariance.dtype), atol=1e-6)


@pytest.mark.parametrize(
    ("n", "size", "stride", "message"),
    [
        (4, 17, 1, "images of 16x16 are smaller than filters of 17x17"),
        (200, 4, 7, "180 features cannot tell 200 images apart"),
    ],
)
def test_pictures_that_have_too_few_features(n: int, size: int, stride: int, message: str) -> None:
    pictures = photograph_tiles(16, shrink=1).double().repeat(2, 1, 1, 1)[:n]
    with pytest.raises(ValueError, match=message):
        whitened(outputs_of(pictures, dct_filters(size, 3), stride=stride))
