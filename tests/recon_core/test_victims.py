"""Stacked networks against autograd, their training against `torch.optim`, and divergence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.types import seeded_generator
from recon_core.victims.mlp import MLP, Weights, backward, forward
from recon_core.victims.training import Trained, Training, train_binary

R, N, D = 3, 8, 12
DEPTHS = [(7,), (7, 5), (7, 5, 6)]
GD = Optimiser(rule="gd", lr=0.05)


def networks(widths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Weights:
    mlp = MLP(widths=widths, init_std_first=0.3)
    return mlp.init(D, [seeded_generator(0, run, "victim") for run in range(R)], dtype=dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and labels of R runs; one blob per label, well apart."""
    generator = torch.Generator().manual_seed(1)
    y = torch.tensor([-1.0, 1.0]).repeat(N // 2).expand(R, N)
    x = torch.randn(R, N, D, generator=generator) / 4
    x[..., 0] += y
    return x.to(dtype), y.to(dtype)


def row(weights: Weights, run: int) -> Weights:
    return tuple(w[run : run + 1] for w in weights)


def loss_of(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    """The definition, with torch's own layers: one run at a time, summed over the runs."""
    total = torch.zeros((), dtype=x.dtype)
    for run in range(len(x)):
        a = x[run]
        for w in weights[:-1]:
            a = torch.relu(torch.nn.functional.linear(a, w[run]))
        phi = torch.nn.functional.linear(a, weights[-1][run]).squeeze(-1)
        total = total + torch.nn.functional.binary_cross_entropy_with_logits(phi, (y[run] + 1) / 2)
    return total


@pytest.mark.parametrize("widths", DEPTHS)
def test_gradients_equal_autograd(widths: tuple[int, ...]) -> None:
    weights, (x, y) = networks(widths), data()
    leaves = tuple(w.clone().requires_grad_() for w in weights)
    expected = torch.autograd.grad(loss_of(leaves, x, y), leaves)
    z, a, phi = forward(weights, x)
    ours = backward(weights, z, a, -y * torch.sigmoid(-y * phi) / N)
    for mine, theirs in zip(ours, expected, strict=True):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-14)


def test_networks_are_homogeneous_in_their_weights() -> None:
    weights, (x, _) = networks((7, 5)), data()
    _, _, phi = forward(weights, x)
    _, _, scaled = forward(tuple(2 * w for w in weights), x)
    torch.testing.assert_close(scaled, 8 * phi, rtol=1e-12, atol=0)


def test_initial_weights_have_the_papers_scales() -> None:
    mlp = MLP(widths=(200, 100), init_std_first=1e-4)
    weights = mlp.init(300, [seeded_generator(0, 0, "victim")], dtype=torch.float32)
    assert [tuple(w.shape) for w in weights] == [(1, 200, 300), (1, 100, 200), (1, 1, 100)]
    for w, std in zip(weights, (1e-4, math.sqrt(2 / 200), math.sqrt(2 / 100)), strict=True):
        assert float(w.std()) == pytest.approx(std, rel=4 / math.sqrt(w.numel()))


def test_initial_weights_do_not_depend_on_the_batch_or_the_dtype() -> None:
    mlp = MLP(widths=(7, 5))
    alone = mlp.init(D, [seeded_generator(0, 2, "victim")], dtype=torch.float64)
    generators = [seeded_generator(0, run, "victim") for run in range(R)]
    together = mlp.init(D, generators, dtype=torch.float32)
    for single, stack in zip(alone, together, strict=True):
        assert torch.equal(single[0].float(), stack[2])


@pytest.mark.parametrize("optimiser", [Optimiser(), GD], ids=["adadelta", "gd"])
def test_training_equals_torch(optimiser: Optimiser) -> None:
    epochs = 40
    weights, (x, y) = networks((7, 5)), data()
    ours = train_binary(weights, x, y, training=Training(epochs=epochs, optimiser=optimiser))
    leaves = [w.clone().requires_grad_() for w in weights]
    theirs: torch.optim.Optimizer = torch.optim.SGD(leaves, lr=optimiser.lr)
    if optimiser.rule == "adadelta":
        theirs = torch.optim.Adadelta(leaves, lr=1.0)
    for _ in range(epochs):
        theirs.zero_grad()
        torch.autograd.backward(loss_of(tuple(leaves), x, y))
        theirs.step()
    for mine, start, leaf in zip(ours.weights, weights, leaves, strict=True):
        assert (mine - start).abs().max() > 1e-3
        torch.testing.assert_close(mine, leaf.detach(), rtol=1e-9, atol=1e-12)


def test_training_separates_the_classes() -> None:
    weights, (x, y) = networks((7, 5), torch.float32), data(torch.float32)
    trained = train_binary(weights, x, y, training=Training(epochs=400))
    assert trained.accuracy.tolist() == [1.0] * R
    assert bool((trained.margin_min > 1).all())
    margins = y * forward(trained.weights, x)[2]
    torch.testing.assert_close(trained.margin_min, margins.amin(-1))
    torch.testing.assert_close(trained.loss, torch.log1p(torch.exp(-margins)).mean(-1))


def test_training_leaves_its_arguments_alone() -> None:
    weights, (x, y) = networks((7,)), data()
    copies = [t.clone() for t in (*weights, x, y)]
    train_binary(weights, x, y, training=Training(epochs=3))
    for copy, tensor in zip(copies, (*weights, x, y), strict=True):
        assert torch.equal(copy, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_does_not_depend_on_the_runs_beside_it(dtype: torch.dtype) -> None:
    weights, (x, y) = networks((7, 5), dtype), data(dtype)
    training = Training(epochs=50)
    together = train_binary(weights, x, y, training=training)
    strangers = tuple(torch.cat([-w[:1], w[1:2], 2 * w[2:]]) for w in weights)
    elsewhere = train_binary(strangers, x, y, training=training)
    for stack, other in zip(together.weights, elsewhere.weights, strict=True):
        assert torch.equal(stack[1], other[1])
        assert not torch.equal(stack[2], other[2])
    # At another place or in a batch of another size, other kernels run: equal to rounding only.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    for run in range(R):
        only = slice(run, run + 1)
        alone = train_binary(row(weights, run), x[only], y[only], training=training)
        for stack, single in zip(together.weights, alone.weights, strict=True):
            torch.testing.assert_close(stack[run], single[0], rtol=tolerance, atol=tolerance)


def test_a_diverging_run_does_not_disturb_its_neighbours() -> None:
    weights, (x, y) = networks((7, 5), torch.float32), data(torch.float32)
    training = Training(epochs=30, optimiser=GD)
    calm = train_binary(weights, x, y, training=training)
    wild_weights = tuple(w.clone() for w in weights)
    wild_weights[0][1] *= 1e30
    wild = train_binary(wild_weights, x, y, training=training)
    assert not all(bool(w[1].isfinite().all()) for w in wild.weights)
    for run in (0, 2):
        assert_same_run(wild, calm, run)


def assert_same_run(one: Trained, other: Trained, run: int) -> None:
    for a, b in zip(one.weights, other.weights, strict=True):
        assert torch.equal(a[run], b[run])
    assert one.loss[run] == other.loss[run]


def test_a_huge_rate_gives_no_finite_weights() -> None:
    weights, (x, y) = networks((7, 5), torch.float32), data(torch.float32)
    huge = Training(epochs=30, optimiser=Optimiser(rule="gd", lr=1e20))
    trained = train_binary(weights, x, y, training=huge)
    for run in range(R):
        assert not all(bool(w[run].isfinite().all()) for w in trained.weights)


def test_progress_rises_to_one() -> None:
    weights, (x, y) = networks((7,)), data()
    fractions: list[float] = []
    train_binary(weights, x, y, training=Training(epochs=130), progress=fractions.append)
    assert fractions[-1] == 1.0
    assert all(a <= b for a, b in itertools.pairwise(fractions))


@pytest.mark.parametrize(
    ("widths", "std", "message"),
    [((), 1e-4, "widths=\\(\\)"), ((5, 0), 1e-4, "widths=\\(5, 0\\)"), ((5,), 0.0, "=0.0 must be")],
)
def test_refuses(widths: tuple[int, ...], std: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLP(widths=widths, init_std_first=std)


def test_refuses_no_epochs() -> None:
    with pytest.raises(ValueError, match="epochs=0"):
        Training(epochs=0)
