"""The separation: features, derivatives, optima on planted sources, Wiener's estimate of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from recon_core.attacks.span.separation import (
    check_features,
    colour_axes,
    contrast,
    cosines,
    dct_filters,
    features_of,
    fixed_point_step,
    freed,
    independent,
    n_features,
    n_filters,
    rotation_start,
    student,
    whitening,
)
from recon_core.attacks.span.sources import denoised
from tests.recon_core.drawing import generator, normal
from tests.recon_core.tiles import photograph_tiles

K, T = 20, 10_000


def _laplacian(k: int, t: int, *, seed: int) -> Tensor:
    u = torch.rand(k, t, generator=generator(seed), dtype=torch.float64) - 0.5
    sources = -u.sign() * (1 - 2 * u.abs()).clamp_min(1e-12).log()
    return sources / sources.square().mean(1, keepdim=True).sqrt()


def _whitened(sources: Tensor, *, seed: int) -> Tensor:
    """A random mixture, whitened."""
    mixed = normal(len(sources), len(sources), seed=seed) @ sources
    values, vectors = torch.linalg.eigh(mixed @ mixed.mT / mixed.shape[1])
    return (vectors / values.sqrt()).mT @ mixed


def _correlations(found: Tensor, sources: Tensor) -> Tensor:
    """Of each source with the row that is most like it."""
    k = len(sources)
    return torch.corrcoef(torch.cat([found.double(), sources]))[:-k, -k:].abs().amax(0)


def _start(k: int, seed: int, like: Tensor) -> Tensor:
    return rotation_start(k, generator(seed)).to(like)[None]


def _turned(z: Tensor, w: Tensor, n: int = 60) -> Tensor:
    for _ in range(n):
        w = fixed_point_step(w, z, n_filters=1, scale=0.4)
    return w


def test_the_score_is_the_contrasts_derivative() -> None:
    z = _whitened(_laplacian(6, T, seed=1), seed=2)[None]
    scored = student(z, 3 * _start(6, 3, z))
    y = scored.y.clone().requires_grad_()
    contrast(y).sum().backward()
    own = y.grad / (y.grad * scored.y).mean(2, keepdim=True)
    torch.testing.assert_close(scored.psi, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_planted_sources_come_back(dtype: torch.dtype) -> None:
    sources = _laplacian(K, T, seed=1)
    z = _whitened(sources, seed=2).to(dtype)[None]
    reported: list[int] = []
    found = independent(z, _start(K, 3, z), n_filters=1, n_iterations=150, report=reported.append)
    assert bool((_correlations(found.w[0] @ z[0], sources) > 0.99).all())
    assert reported == list(range(1, found.n_iterations + 1))
    assert found.settled
    assert found.n_iterations < 150


def test_more_sources_than_directions_come_back_from_a_tight_frame() -> None:
    sources = _laplacian(12, T, seed=1)
    mixing = torch.linalg.qr(normal(12, 8, seed=2))[0]
    z = (mixing.mT @ sources)[None]  # 8 directions of 12 sources
    start = rotation_start(8, generator(3), n_sources=24)
    assert torch.allclose(start.mT @ start, torch.eye(8, dtype=start.dtype))
    search = partial(independent, z, n_filters=1, n_iterations=60)
    found, turned = search(start[None]), search(_start(8, 4, z))
    w = found.w[0]
    assert torch.allclose(w.mT @ w, torch.eye(8, dtype=w.dtype))
    most = _correlations(mixing @ z[0], sources)  # what eight directions hold of each
    frame, rotation = (_correlations(d.w[0] @ z[0], sources) / most for d in (found, turned))
    assert int((frame > 0.9).sum()) > int((rotation > 0.9).sum())
    assert float(frame.mean()) > float(rotation.mean())


def test_likelihood_frees_sources_that_are_not_quite_orthogonal() -> None:
    truth = _laplacian(8, T, seed=1) ** 3
    truth[:3] += 0.5 * _laplacian(1, T, seed=2) ** 3  # what three of them share
    z = _whitened(truth, seed=2)[None]
    turned = _turned(z, _start(8, 3, z))
    ended, _n = freed(turned, partial(student, z), 60)
    before, after = (_correlations((w @ z)[0], truth) for w in (turned, ended))
    assert float(before.min()) < 0.96
    assert float(after.min()) > 0.999


def test_every_matrix_of_a_batch_ends_where_it_would_alone() -> None:
    z = torch.stack([_whitened(_laplacian(8, 2000, seed=s), seed=s) for s in (1, 2, 3)])
    starts = torch.cat([_start(8, s, z) for s in (4, 5, 6)])
    search = partial(independent, n_filters=1, n_iterations=100)
    together = search(z, starts)
    for r in range(3):
        alone = search(z[r : r + 1], starts[r : r + 1])
        assert torch.allclose(alone.sparsity[0], together.sparsity[r], atol=1e-5)
        assert torch.allclose(alone.w[0].abs(), together.w[r].abs(), atol=1e-2)


SHAPE = (3, 16, 16)
N, WIDTH, NOISE = 12, 40, 0.1


def planted(noise: float = NOISE) -> tuple[Tensor, Tensor, Tensor]:
    """(images less their mean, weights with noise, their sources by the true mixing), float64."""
    tiles = photograph_tiles(16, shrink=4)[:N].double() / 255
    images = (tiles - tiles.mean(0)).flatten(1)
    images = images / images.square().mean(1, keepdim=True).sqrt()
    mixing = normal(WIDTH, N, seed=0)
    weight = mixing @ images + noise * normal(WIDTH, images.shape[1], seed=1)
    return images, weight, torch.linalg.pinv(mixing) @ weight


def test_the_estimate_is_that_of_every_frequency_alone() -> None:
    _images, weight, x = planted()
    found = denoised(7 * x, weight, noise=NOISE, shape=SHAPE) / 7
    norm = x.square().mean(1).sqrt()
    m = torch.linalg.lstsq((x / norm[:, None]).mT, weight.mT).solution.mT
    seen = cosines(weight.unflatten(1, SHAPE))
    pooled = avg_pool2d(seen.square().mean(0) - NOISE**2, 5, 1, 2, count_include_pad=False)
    spectrum = pooled.clamp_min(1e-3 * NOISE**2).flatten()
    spectrum = spectrum / spectrum.mean()
    columns = [
        torch.linalg.solve(m.mT @ m + torch.eye(N) * NOISE**2 / spectrum[f], m.mT @ column)
        for f, column in enumerate(seen.flatten(1).mT)
    ]
    wanted = cosines(torch.stack(columns, 1).unflatten(1, SHAPE), inverse=True).flatten(1)
    torch.testing.assert_close(found, wanted * norm[:, None])


@pytest.mark.parametrize("size", [1.0, 4.0])
def test_noise_goes_and_images_stay(size: float) -> None:
    images, weight, x = planted(size)
    after = denoised(x, weight, noise=size, shape=SHAPE)
    assert float((after - images).norm()) < 0.75 * float((x - images).norm())
    assert torch.equal(denoised(x, weight, noise=0.0, shape=SHAPE), x)


def test_a_source_that_is_nothing_or_there_twice_stays_finite() -> None:
    _images, weight, x = planted()
    x[1], x[2] = 0, x[0]
    found = denoised(x, weight, noise=NOISE, shape=SHAPE)
    assert bool(found.isfinite().all())
    assert float(found[1].abs().max()) < 1e-20


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
