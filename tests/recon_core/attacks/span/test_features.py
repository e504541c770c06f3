"""Filters and whitened features."""

from __future__ import annotations

import pytest
import torch

from recon_core.attacks.span.features import (
    check_features,
    colour_axes,
    cosines,
    dct_filters,
    features_of,
    n_features,
    n_filters,
    whitening,
)
from tests.recon_core.drawing import normal
from tests.recon_core.tiles import photograph_tiles


def test_cosines_are_orthonormal() -> None:
    pictures = normal(2, 3, 8, 6, seed=1)
    there = cosines(pictures)
    assert torch.allclose(cosines(there, inverse=True), pictures)
    assert float(there.square().sum()) == pytest.approx(float(pictures.square().sum()))


@pytest.mark.parametrize("channels", [1, 3])
def test_cosine_filters_are_orthonormal_and_blind_to_the_mean(channels: int) -> None:
    filters = dct_filters(channels)
    assert filters.shape == (n_filters(channels), channels, 4, 4)
    flat = filters.flatten(1)
    assert torch.allclose(flat @ flat.mT, torch.eye(len(flat), dtype=flat.dtype), atol=1e-12)
    assert float(filters.sum((2, 3)).abs().max()) < 1e-12
    axes = colour_axes(channels)
    assert torch.allclose(axes @ axes.mT, torch.eye(channels, dtype=axes.dtype), atol=1e-12)


def test_features_are_white_over_directions() -> None:
    features = features_of(photograph_tiles(16, shrink=2)[:20].double() / 255)
    z = whitening(features) @ features
    assert z.shape == (20, n_features((3, 16, 16)))
    covariance = z @ z.mT / z.shape[1]
    assert torch.allclose(covariance, torch.eye(20, dtype=covariance.dtype), atol=1e-6)


def test_pictures_that_have_too_few_features() -> None:
    with pytest.raises(ValueError, match="images of 3x16 are smaller than filters of 4x4"):
        check_features(4, (3, 3, 16))
    with pytest.raises(ValueError, match="180 features cannot tell 200 images apart"):
        check_features(200, (3, 6, 6))
