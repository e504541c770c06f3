"""Filters and whitened features."""

from __future__ import annotations

import pytest
import torch

from benchmarks.span.source_model import learned_filters
from recon_core.attacks.span.features import (
    colour_axes,
    dct_filters,
    outputs_of,
    whitened,
)
from recon_core.attacks.span.separation import rotation_start
from tests.recon_core.tiles import photograph_tiles


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


def test_luminance_alone_has_a_third_of_the_filters() -> None:
    assert len(dct_filters(3, 3, colours=False)) == 8
    with pytest.raises(ValueError, match="1x1 pixels see no difference"):
        dct_filters(1, 3)


def test_filters_learned_from_images_are_sparser_than_their_rotations() -> None:
    images = photograph_tiles(16, shrink=1).float() / 255
    generator = torch.Generator().manual_seed(0)
    learned = learned_filters(images, 4, generator=generator, n_patches=8000).double()
    assert learned.shape == (45, 3, 4, 4)
    assert float(learned.mean((2, 3)).abs().max()) < 1e-5

    def sparsity(filters: torch.Tensor) -> float:
        outputs = torch.nn.functional.conv2d(images.double(), filters).transpose(0, 1).flatten(1)
        outputs = outputs / outputs.square().mean(1, keepdim=True).sqrt()
        return float((1 + (outputs / 0.5).square()).log().mean())

    turn = rotation_start(45, torch.Generator().manual_seed(1))
    turned = torch.einsum("gf,fcij->gcij", turn, learned)
    assert sparsity(learned) < sparsity(turned) - 0.02
    with pytest.raises(ValueError, match="have no patches of 20x20"):
        learned_filters(images, 20, generator=torch.Generator())
    with pytest.raises(ValueError, match="fewer than 45 directions"):
        learned_filters(torch.ones(3, 3, 16, 16), 4, generator=torch.Generator())


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
