"""Wiener's estimate of separated sources."""

from __future__ import annotations

import pytest
import torch

from recon_core.attacks.span.features import cosines
from recon_core.attacks.span.sources import denoised, image_spectrum
from tests.recon_core.tiles import photograph_tiles

SHAPE = (3, 16, 16)
N, WIDTH, NOISE = 12, 40, 0.1


def planted() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(images less their mean, mixing, weights with noise), float64."""
    tiles = photograph_tiles(16, shrink=4)[:N].double() / 255
    images = (tiles - tiles.mean(0)).flatten(1)
    images = images / images.square().mean(1, keepdim=True).sqrt()
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(WIDTH, N, generator=generator, dtype=torch.float64)
    start = torch.randn(WIDTH, images.shape[1], generator=generator, dtype=torch.float64)
    return images, mixing, mixing @ images + NOISE * start


def test_the_estimate_is_that_of_every_frequency_alone() -> None:
    _images, mixing, weight = planted()
    x = torch.linalg.pinv(mixing) @ weight
    found = denoised(7 * x, weight, noise=NOISE, shape=SHAPE) / 7
    norm = x.square().mean(1).sqrt()
    m = torch.linalg.lstsq((x / norm[:, None]).mT, weight.mT).solution.mT
    seen = cosines(weight.unflatten(1, SHAPE))
    spectrum = image_spectrum(seen, NOISE).flatten()
    columns = [
        torch.linalg.solve(m.mT @ m + torch.eye(N) * NOISE**2 / spectrum[f], m.mT @ column)
        for f, column in enumerate(seen.flatten(1).mT)
    ]
    wanted = cosines(torch.stack(columns, 1).unflatten(1, SHAPE), inverse=True).flatten(1)
    torch.testing.assert_close(found, wanted * norm[:, None])


@pytest.mark.parametrize("size", [1.0, 4.0])
def test_noise_goes_and_images_stay(size: float) -> None:
    images, mixing, _weight = planted()
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(WIDTH, images.shape[1], generator=generator, dtype=torch.float64)
    weight = mixing @ images + size * noise
    x = torch.linalg.pinv(mixing) @ weight
    before, after = (
        float((some - images).square().mean().sqrt())
        for some in (x, denoised(x, weight, noise=size, shape=SHAPE))
    )
    assert after < 0.75 * before
    assert torch.equal(denoised(x, weight, noise=0.0, shape=SHAPE), x)


def test_a_source_that_is_nothing_or_there_twice_stays_finite() -> None:
    _images, mixing, weight = planted()
    x = torch.linalg.pinv(mixing) @ weight
    x[1], x[2] = 0, x[0]
    found = denoised(x, weight, noise=NOISE, shape=SHAPE)
    assert bool(found.isfinite().all())
    assert float(found[1].abs().max()) < 1e-20


def test_the_spectrum_is_one_on_the_average_and_falls() -> None:
    images, _mixing, weight = planted()
    spectrum = image_spectrum(cosines(weight.unflatten(1, SHAPE)), NOISE)
    assert float(spectrum.mean()) == pytest.approx(1)
    assert bool((spectrum > 0).all())
    assert torch.equal(spectrum[:, 0, 3], spectrum[:, 3, 0])  # of one ring
    assert bool((spectrum[:, 0, 1] > 10 * spectrum[:, 12, 12]).all())
    alone = cosines(images.unflatten(1, SHAPE)).square().mean(0)
    low = spectrum[0, :4, :4].sum() / spectrum.sum()
    assert float(low) == pytest.approx(float(alone[0, :4, :4].sum() / alone.sum()), abs=0.1)
