"""The separation: its derivatives, its optima on planted sources, Wiener's estimate of them."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from recon_core.attacks.span.features import cosines
from recon_core.attacks.span.lbfgs import Derivatives, Memory, Objective, Solve, minimise
from recon_core.attacks.span.separation import (
    Likelihood,
    Sparsity,
    Stage,
    contrast,
    grouped_fixed_point,
    rotate,
    rotation_start,
)
from recon_core.attacks.span.sources import denoised, image_spectrum
from tests.recon_core.drawing import generator
from tests.recon_core.tiles import photograph_tiles

K, T = 20, 10_000
STAGES = (Stage(2.0, 40), Stage(1.0, 200), Stage(0.5, 150))


def _laplacian(k: int, t: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(k, t, generator=generator, dtype=torch.float64) - 0.5
    sources = -u.sign() * (1 - 2 * u.abs()).clamp_min(1e-12).log()
    return sources / sources.square().mean(1, keepdim=True).sqrt()


def _whitened(sources: Tensor, *, seed: int) -> Tensor:
    """A random mixture, whitened."""
    mixed = torch.randn(len(sources), len(sources), generator=generator(seed)).double() @ sources
    values, vectors = torch.linalg.eigh(mixed @ mixed.mT / mixed.shape[1])
    return (vectors / values.sqrt()).mT @ mixed


def _correlations(found: Tensor, sources: Tensor) -> Tensor:
    """Of each source with the row that is most like it."""
    k = len(sources)
    return torch.corrcoef(torch.cat([found.double(), sources]))[:-k, -k:].abs().amax(0)


def _start(k: int, seed: int, like: Tensor) -> Tensor:
    return rotation_start(k, generator(seed)).to(like)[None]


@pytest.mark.parametrize(
    "objective",
    [
        Sparsity(0.7),
        Likelihood(1.5, 0.7),
    ],
    ids=["sparsity", "likelihood"],
)
def test_gradients_are_those_of_autograd_in_float64(objective: Objective) -> None:
    z = _whitened(_laplacian(6, 300, seed=1), seed=2)[None]
    w = _start(6, 3, z)
    p = torch.zeros(1, 6, 6, dtype=torch.float64, requires_grad=True)
    step = p - p.mT if isinstance(objective, Sparsity) else p
    move = torch.matrix_exp(step)
    (expected,) = torch.autograd.grad(objective.at(move @ w, move @ w @ z)[0].sum(), p)
    found, _solve = objective.at(w, w @ z)[1]()
    scale = 2.0 if isinstance(objective, Sparsity) else 1.0  # its loss is twice a sum of log
    assert torch.allclose(scale * found, expected, atol=1e-9)


class TooLong(Likelihood):
    """A likelihood that thinks it bends a quarter as much as it does, and counts its values."""

    values = 0

    def at(self, w: Tensor, y: Tensor) -> tuple[Tensor, Derivatives]:
        TooLong.values += 1
        value, derivatives = super().at(w, y)

        def long() -> tuple[Tensor, Solve]:
            gradient, solve = derivatives()
            return gradient, lambda v: 4 * solve(v)

        return value, long


def test_a_step_is_not_tried_again_at_the_length_that_failed() -> None:
    z = torch.stack([_whitened(_laplacian(8, 2000, seed=s), seed=s) for s in (1, 2)])
    starts = torch.cat([_start(8, s, z) for s in (4, 5)])
    search = partial(minimise, TooLong(1.5, 0.7), n_iterations=20, tolerance=0.0)
    TooLong.values = 0
    together = search(z, starts)
    assert TooLong.values < 35  # 63, were every step tried at full length first
    right = minimise(Likelihood(1.5, 0.7), z, starts, n_iterations=200, tolerance=1e-9)
    assert torch.allclose(together.objective, right.objective, atol=1e-3)
    for r in range(2):
        alone = search(z[r : r + 1], starts[r : r + 1])
        assert torch.allclose(alone.rotation[0], together.rotation[r], atol=1e-3)


def test_a_matrix_that_finds_nothing_lower_forgets_its_curvature_and_no_other_does() -> None:
    memory = Memory()
    for seed in range(3):
        step, noise = (torch.randn(2, 4, 4, generator=generator(seed + s)) for s in (0, 10))
        memory.add(step, step + 0.1 * noise)
    gradient = torch.randn(2, 4, 4, generator=generator(5))
    before = memory.direction(gradient, lambda v: v / 2)
    memory.forget(torch.tensor([True, False]))
    after = memory.direction(gradient, lambda v: v / 2)
    assert torch.equal(after[0], -gradient[0] / 2)
    assert not torch.allclose(before[0], after[0], atol=1e-2)
    assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_planted_sources_come_back(dtype: torch.dtype) -> None:
    sources = _laplacian(K, T, seed=1)
    z = _whitened(sources, seed=2).to(dtype)[None]
    turned = rotate(z, _start(K, 3, z), STAGES)
    assert turned.settled
    assert bool((_correlations(turned.sources[0], sources) > 0.99).all())
    freed = minimise(Likelihood(1.5, 0.7), z, turned.rotation, n_iterations=60, tolerance=1e-6)
    assert bool((_correlations(freed.sources[0], sources) > 0.99).all())
    grouped = grouped_fixed_point(z, turned.rotation, n_filters=1, scale=0.4, n_iterations=5)
    assert bool((_correlations(grouped.sources[0], sources) > 0.99).all())


def test_more_sources_than_directions_come_back_from_a_tight_frame() -> None:
    sources = _laplacian(12, T, seed=1)
    mixing = torch.linalg.qr(torch.randn(12, 8, generator=generator(2), dtype=torch.float64))[0]
    z = (mixing.mT @ sources)[None]  # 8 directions of 12 sources
    start = rotation_start(8, generator(3), n_sources=24)
    assert torch.allclose(start.mT @ start, torch.eye(8, dtype=start.dtype))
    found = grouped_fixed_point(z, start[None], n_filters=1, scale=0.4, n_iterations=60)
    w = found.rotation[0]
    assert torch.allclose(w.mT @ w, torch.eye(8, dtype=w.dtype))
    assert torch.allclose(found.sources[0], w @ z[0])
    most = _correlations(mixing.double() @ z[0], sources)  # what eight directions hold of each
    turned = rotate(z, _start(8, 4, z), STAGES)
    frame, rotation = (_correlations(d.sources[0], sources) / most for d in (found, turned))
    assert int((frame > 0.9).sum()) > int((rotation > 0.9).sum())
    assert float(frame.mean()) > float(rotation.mean())


def test_likelihood_finds_sources_that_are_not_quite_orthogonal() -> None:
    sources = _laplacian(8, T, seed=1)
    sources[1] += 0.4 * sources[0]
    z = _whitened(sources, seed=2)[None]
    turned = rotate(z, _start(8, 3, z), STAGES)
    freed = minimise(Likelihood(1.5, 0.7), z, turned.rotation, n_iterations=100, tolerance=1e-6)
    truth = _laplacian(8, T, seed=1)
    assert float(_correlations(freed.sources[0], truth).min()) > 0.99
    assert freed.settled
    assert float(freed.objective[0]) < float(
        Likelihood(1.5, 0.7).at(turned.rotation, turned.sources)[0]
    )


def test_every_matrix_of_a_batch_ends_where_it_would_alone() -> None:
    z = torch.stack([_whitened(_laplacian(8, 2000, seed=s), seed=s) for s in (1, 2, 3)])
    starts = torch.cat([_start(8, s, z) for s in (4, 5, 6)])
    together = rotate(z, starts, STAGES)
    for r in range(3):
        alone = rotate(z[r : r + 1], starts[r : r + 1], STAGES)
        assert float(alone.objective[0]) == pytest.approx(float(together.objective[r]), abs=1e-5)
        assert torch.allclose(alone.rotation[0], together.rotation[r], atol=1e-2)


def test_the_objective_never_rises() -> None:
    z = _whitened(_laplacian(6, 400, seed=1), seed=2)[None]
    start = _start(6, 3, z)
    before = float(contrast(start @ z, 1.0).sum())
    values = [
        float(minimise(Sparsity(1.0), z, start, n_iterations=n, tolerance=0.0).objective)
        for n in range(6)
    ]
    assert values[0] == pytest.approx(before)
    assert all(b < a for a, b in itertools.pairwise(values))


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
