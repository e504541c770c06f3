"""The autoencoder paper's theory, in float64: theorem 1, closed forms, ADMM's rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import cvxpy as cp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.attacks.plug_and_play import admm, mask_step, x_step
from tests.recon_core.drawing import generator, normal

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "softplus": F.softplus,  # its derivative is the sigmoid
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log cosh": lambda z: (z + torch.log(torch.cosh(z))) / 2,
    "identity": lambda z: z,
}
D = 12
SHAPE = (3, 2, 2)


def weights(m: int, *, largest: float = 1.0, smallest: float = 0.0, seed: int = 0) -> Tensor:
    """W of m x D whose singular values go evenly from the smallest to the largest."""
    left, _, right = torch.linalg.svd(normal(m, D, seed=seed), full_matrices=False)
    return left @ torch.diag(torch.linspace(smallest, largest, min(m, D)).double()) @ right


def tied(w: Tensor, rho: Activation) -> Activation:
    """f(x) = W^T rho(W x), for one x or a batch of rows (autoencoder paper, eq. 15)."""
    return lambda x: rho(x @ w.T) @ w


def least_firmness(f: Activation) -> float:
    """The smallest of <f(x) - f(y), x - y> - ||f(x) - f(y)||^2 over random pairs."""
    scale = torch.logspace(-1, 1.5, 400, dtype=torch.float64).unsqueeze(1)
    x, y = scale * normal(400, D, seed=1), scale * normal(400, D, seed=2)
    outputs = f(x) - f(y)
    return float((outputs * (x - y)).sum(1).sub(outputs.square().sum(1)).min())


@pytest.mark.parametrize("m", [5, 12, 30])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_theorem_1_the_jacobian(name: str, m: int) -> None:
    f = tied(weights(m), ACTIVATIONS[name])
    for scale in (0.1, 1.0, 10.0):
        jacobian = torch.func.jacrev(f)(scale * normal(D, seed=3))
        torch.testing.assert_close(jacobian, jacobian.T, rtol=0, atol=1e-13)
        eigenvalues = torch.linalg.eigvalsh(jacobian)
        assert float(eigenvalues.min()) > -1e-12
        assert float(eigenvalues.max()) < 1 + 1e-12


@pytest.mark.parametrize("m", [5, 12, 30])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_theorem_1_a_proximity_operator_is_firmly_nonexpansive(name: str, m: int) -> None:
    assert least_firmness(tied(weights(m), ACTIVATIONS[name])) > -1e-10


def test_theorem_1_needs_its_conditions() -> None:
    steep = tied(weights(12, largest=1.5), F.softplus)
    assert (
        max(
            float(torch.linalg.eigvalsh(torch.func.jacrev(steep)(normal(D, seed=s) * 10)).max())
            for s in range(5)
        )
        > 1.1
    )
    assert least_firmness(steep) < -1
    fast = tied(weights(12), lambda z: 2 * F.softplus(z))
    assert least_firmness(fast) < -1
    w, other = weights(12), weights(12, seed=5)
    jacobian = torch.func.jacrev(lambda x: torch.tanh(x @ w.T) @ other)(normal(D))
    assert float((jacobian - jacobian.T).abs().max()) > 0.1, "not tied, not symmetric"


@pytest.mark.parametrize("gamma", [0.05, 0.5, 1.0, 7.0])
def test_the_x_step_is_the_minimiser(gamma: float) -> None:
    y, v = (normal(1, *SHAPE, seed=s) for s in (1, 2))
    theta = normal(1, *SHAPE, seed=3) > 0
    h = theta.double().flatten().numpy()
    x = cp.Variable(D)
    cost = cp.sum_squares(cp.multiply(h, x) - y.flatten().numpy())
    cost += gamma / 2 * cp.sum_squares(x - v.flatten().numpy())
    cp.Problem(cp.Minimize(cost)).solve(solver=cp.CLARABEL)
    found = x_step(v, y, theta, gamma).flatten().numpy()
    assert x.value is not None
    np.testing.assert_allclose(found, x.value, atol=1e-6)


def test_the_mask_step_is_the_best_of_all_masks() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = torch.tensor(list(itertools.product([False, True], repeat=D // 2)))
    y = torch.rand(200, 1, 2, 3, generator=generator, dtype=torch.float64)
    x = 3 * torch.rand(200, 1, 2, 3, generator=generator, dtype=torch.float64) - 1
    y[torch.rand(y.shape, generator=generator) < 0.2] = 0.0
    x[torch.rand(y.shape, generator=generator) < 0.1] = 0.0
    x = torch.where(torch.rand(y.shape, generator=generator) < 0.1, 2 * y, x)

    def cost(mask: Tensor) -> Tensor:
        return (mask * x - y).flatten(1).square().sum(1)

    lowest = torch.stack([cost(mask.view(1, 1, 2, 3)) for mask in masks]).amin(0)
    found = mask_step(x, y)
    torch.testing.assert_close(cost(found), lowest, rtol=0, atol=1e-13)
    assert 0.1 < float(found.double().mean()) < 0.9


def problem(n: int = 4) -> tuple[Tensor, Tensor]:
    theta = torch.rand(n, *SHAPE, generator=generator(4)) < 0.6
    return torch.where(theta, normal(n, *SHAPE, seed=6), 0.0), theta


def images(f: Activation) -> Activation:
    """f of flat rows, for images."""
    return lambda x: f(x.flatten(1)).view_as(x)


@pytest.mark.parametrize("m", [5, 12])
@pytest.mark.parametrize("gamma", [0.3, 1.0, 4.0])
def test_admm_comes_to_rest_at_the_minimiser(gamma: float, m: int) -> None:
    """f = W^T W is the proximity operator of g(x) = x^T (A^+ - I) x / 2 on the range of A = W^T W.

    In the autoencoder paper, eq. 13, f is that of lambda / gamma s, so what is minimised is ||H x -
    y||^2 + gamma g.
    """
    w = weights(m, smallest=0.3, largest=0.95)
    y, theta = problem()
    out = admm(images(tied(w, lambda z: z)), y, theta, gamma=gamma, n_iterations=3000)
    values, vectors = torch.linalg.eigh(w.T @ w)
    values, basis = values[-m:], vectors[:, -m:]
    for i in range(len(y)):
        h, target = theta[i].flatten().double(), y[i].flatten()
        system = 2 * basis.T @ torch.diag(h) @ basis + gamma * torch.diag(1 / values - 1)
        best = basis @ torch.linalg.solve(system, 2 * basis.T @ (h * target))
        torch.testing.assert_close(out.x[i].flatten(), best, rtol=0, atol=1e-9)
        z = cp.Variable(m)
        cost = cp.sum_squares(cp.multiply(h.numpy(), basis.numpy() @ z) - target.numpy())
        cost += gamma / 2 * cp.sum_squares(cp.multiply((1 / values - 1).sqrt().numpy(), z))
        cp.Problem(cp.Minimize(cost)).solve(solver=cp.CLARABEL)
        assert z.value is not None
        np.testing.assert_allclose(basis.numpy() @ z.value, best.numpy(), atol=1e-5)


@pytest.mark.parametrize("gamma", [0.3, 2.0])
def test_admm_solves_the_lasso(gamma: float) -> None:
    """f(x) = sign(x) max(|x| - t, 0) is the proximity operator of t |x|."""
    y, theta = problem()
    t = 0.4
    out = admm(lambda x: F.softshrink(x, t), y, theta, gamma=gamma, n_iterations=1000)
    expected = torch.where(theta, F.softshrink(y, gamma * t / 2), 0.0)
    torch.testing.assert_close(out.x, expected, rtol=0, atol=1e-9)


def test_a_nonlinear_autoencoder_comes_to_rest_where_the_gradient_is_zero() -> None:
    """f is onto with an inverse, so the gradient of its g at x is f^-1(x) - x."""
    w = weights(12, smallest=0.5, largest=0.9)
    f = tied(w, lambda z: (z + torch.tanh(z)) / 2)
    y, theta = problem()
    gamma = 0.7
    out = admm(images(f), y, theta, gamma=gamma, n_iterations=4000)
    x = out.x.flatten(1)
    before = x.clone()  # z with f(z) = x, by Newton's method
    for _ in range(50):
        jacobian = torch.func.vmap(torch.func.jacrev(f))(before)
        before = before - torch.linalg.solve(jacobian, f(before) - x)
    torch.testing.assert_close(f(before), x, rtol=0, atol=1e-11)
    h = theta.flatten(1).double()
    gradient = 2 * h * (x - y.flatten(1)) + gamma * (before - x)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-7)
