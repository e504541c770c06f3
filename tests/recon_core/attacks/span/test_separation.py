"""The separation itself: its derivatives, its optima on planted sources, its invariances."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from recon_core.attacks.span.features import SourceModel
from recon_core.attacks.span.lbfgs import Objective, minimise
from recon_core.attacks.span.separation import (
    Likelihood,
    ModelLikelihood,
    Sparsity,
    Stage,
    cayley,
    contrast,
    grouped_fixed_point,
    orthogonal,
    rotate,
    rotation_start,
)

K, T = 20, 10_000
STAGES = (Stage(2.0, 40), Stage(1.0, 200), Stage(0.5, 150))


def _laplacian(k: int, t: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(k, t, generator=generator, dtype=torch.float64) - 0.5
    sources = -u.sign() * (1 - 2 * u.abs()).clamp_min(1e-12).log()
    return sources / sources.square().mean(1, keepdim=True).sqrt()


def _whitened(sources: Tensor, *, seed: int) -> Tensor:
    """A random mixture, whitened."""
    mixed = (
        torch.randn(
            len(sources), len(sources), generator=torch.Generator().manual_seed(seed)
        ).double()
        @ sources
    )
    values, vectors = torch.linalg.eigh(mixed @ mixed.mT / mixed.shape[1])
    return (vectors / values.sqrt()).mT @ mixed


def _correlations(found: Tensor, sources: Tensor) -> Tensor:
    """Of each source with the row that is most like it."""
    k = len(sources)
    return torch.corrcoef(torch.cat([found.double(), sources]))[:-k, -k:].abs().amax(0)


def _start(k: int, seed: int, like: Tensor) -> Tensor:
    return rotation_start(k, torch.Generator().manual_seed(seed)).to(like)[None]


def _model(n_filters: int) -> SourceModel:
    generator = torch.Generator().manual_seed(9)
    drawn = torch.rand(5, n_filters, generator=generator, dtype=torch.float64)
    ones = torch.ones(1, 1, 1, dtype=torch.float64)
    return SourceModel(
        filters=torch.zeros(n_filters, 1, 2, 2, dtype=torch.float64),
        stride=1,
        pools=drawn,
        alpha=0.3 + drawn[:, 0],
        kappa=torch.tensor(0.4, dtype=torch.float64),
        spectrum=ones,
    )


def _precision() -> Tensor:
    half = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return half @ half.mT


@pytest.mark.parametrize(
    "objective",
    [Sparsity(0.7), Likelihood(1.5, 0.7), ModelLikelihood(_model(10), _precision(), 12)],
    ids=lambda o: type(o).__name__,
)
def test_gradients_are_those_of_autograd_in_float64(objective: Objective) -> None:
    z = _whitened(_laplacian(6, 300, seed=1), seed=2)[None]
    w = _start(6, 3, z)
    p = torch.zeros(1, 6, 6, dtype=torch.float64, requires_grad=True)
    step = p - p.mT if isinstance(objective, Sparsity) else p
    move = torch.matrix_exp(step)
    (expected,) = torch.autograd.grad(objective.loss(move @ w, move @ w @ z).sum(), p)
    found, _solve = objective.gradient(w, w @ z)
    scale = 2.0 if isinstance(objective, Sparsity) else 1.0  # its loss is twice a sum of log
    assert torch.allclose(scale * found, expected, atol=1e-9)


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
        Likelihood(1.5, 0.7).loss(turned.rotation, turned.sources)[0]
    )


def test_every_matrix_of_a_batch_ends_where_it_would_alone() -> None:
    z = torch.stack([_whitened(_laplacian(8, 2000, seed=s), seed=s) for s in (1, 2, 3)])
    starts = torch.cat([_start(8, s, z) for s in (4, 5, 6)])
    together = rotate(z, starts, STAGES)
    for r in range(3):
        alone = rotate(z[r : r + 1], starts[r : r + 1], STAGES)
        assert float(alone.objective[0]) == pytest.approx(float(together.objective[r]), abs=1e-5)
        assert torch.allclose(alone.rotation[0], together.rotation[r], atol=1e-2)


def test_rotations_stay_rotations() -> None:
    p = torch.randn(2, 7, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    turn = cayley(p - p.mT)
    eye = torch.eye(7, dtype=torch.float64).expand(2, 7, 7)
    assert torch.allclose(turn @ turn.mT, eye, atol=1e-12)
    near = orthogonal(turn + 1e-3 * p)
    assert torch.allclose(near @ near.mT, eye, atol=1e-12)
    z = _whitened(_laplacian(7, 500, seed=1), seed=2)[None].float()
    turned = rotate(z, _start(7, 3, z), STAGES).rotation
    assert torch.allclose(turned @ turned.mT, eye[:1].float(), atol=1e-5)


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
