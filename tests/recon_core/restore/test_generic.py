"""The denoisers that learn nothing: less noise, flat pictures untouched, each picture alone."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recon_core.restore.generic import (
    GENERIC_RESTORERS,
    NonLocalMeans,
    TotalVariation,
    Wavelet,
    estimate_noise,
)

needs_wavelets = pytest.mark.skipif(
    importlib.util.find_spec("pywt") is None,
    reason="PyWavelets is not installed; pip install PyWavelets",
)
NOISE = 0.1
KINDS = [pytest.param("nlm"), pytest.param("tv"), pytest.param("wavelet", marks=needs_wavelets)]


def smooth(n: int = 1, size: int = 24) -> Tensor:
    """`n` pictures without edges, each channel different."""
    y, x = np.mgrid[0:size, 0:size] / (size - 1)
    channels = [0.3 + 0.4 * x, 0.3 + 0.4 * y, 0.5 + 0.3 * np.sin(3 * x) * np.cos(3 * y)]
    return torch.tensor(np.stack([channels] * n), dtype=torch.float32)


def noisy(pictures: Tensor, sigma: float = NOISE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (pictures + sigma * torch.randn(pictures.shape, generator=generator)).clamp(0, 1)


def restored(restorer: NonLocalMeans | TotalVariation | Wavelet, pictures: Tensor) -> Tensor:
    seeds = torch.zeros(len(pictures), dtype=torch.int64)
    samples = restorer.restore(nn.Identity(), pictures, n_samples=7, seeds=seeds)
    assert samples.shape == (1, *pictures.shape)
    return samples[0]


def error(a: Tensor, b: Tensor) -> float:
    return (a - b).square().mean().sqrt().item()


@pytest.mark.parametrize("kind", KINDS)
def test_noise_on_a_smooth_picture_is_reduced_in_every_channel(kind: str) -> None:
    clean = smooth()
    given = noisy(clean)
    result = restored(GENERIC_RESTORERS[kind](sigma=NOISE), given)
    for channel in range(3):
        before = error(given[:, channel], clean[:, channel])
        assert error(result[:, channel], clean[:, channel]) < 0.6 * before
    assert 0 <= result.min() <= result.max() <= 1


@needs_wavelets
@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_is_estimated_per_picture(kind: str) -> None:
    clean = smooth(2)
    given = torch.cat([noisy(clean[:1], 0.02), noisy(clean[1:], 0.15)])
    result = restored(GENERIC_RESTORERS[kind](), given)
    for row in range(2):
        assert error(result[row], clean[row]) < 0.7 * error(given[row], clean[row])
        alone = restored(GENERIC_RESTORERS[kind](), given[row : row + 1])
        assert torch.equal(alone[0], result[row])


@needs_wavelets
@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_the_estimate_is_the_noise_that_was_added(sigma: float) -> None:
    given = 0.5 + 0 * smooth(1, 48)
    estimate = estimate_noise(noisy(given, sigma)[0].double().numpy().transpose(1, 2, 0))
    assert estimate == pytest.approx(sigma, rel=0.15)


@needs_wavelets
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_without_noise_is_given_back_as_it_is(kind: str) -> None:
    flat = torch.tensor([0.2, 0.5, 0.9])[:, None, None].expand(3, 16, 16)
    stripes = (torch.arange(16) % 4 / 4).expand(3, 16, 16)
    given = torch.stack([flat, stripes, torch.zeros(3, 16, 16)])
    assert torch.equal(restored(GENERIC_RESTORERS[kind](), given), given)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flat_picture_stays_flat_however_strong_the_noise_is_said_to_be(kind: str) -> None:
    flat = torch.tensor([0.2, 0.5, 0.9])[:, None, None].expand(1, 3, 16, 16).contiguous()
    result = restored(GENERIC_RESTORERS[kind](sigma=0.3), flat)
    torch.testing.assert_close(result, flat, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_need_not_be_square_and_progress_is_told(kind: str) -> None:
    told: list[float] = []
    given = noisy(smooth(4))[..., 4:18]
    GENERIC_RESTORERS[kind](sigma=NOISE).restore(
        nn.Identity(),
        given,
        n_samples=1,
        seeds=torch.zeros(4, dtype=torch.int64),
        progress=told.append,
    )
    assert told == [0.25, 0.5, 0.75, 1.0]


def test_a_missing_package_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install PyWavelets"):
        restored(NonLocalMeans(), smooth())
