"""The attack's activation, its derivative and the derivative of that, against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.attacks.kkt.layers import Surrogate
from recon_core.victims.network import Activation, Network

ALPHAS = torch.tensor([2.0, 20.0, 300.0], dtype=torch.float64)
LEAK = 0.2
ACTIVATIONS: list[Activation] = ["relu", "leaky_relu", "gelu"]


def surrogate(activation: Activation, alpha: Tensor, leak: float = LEAK) -> Surrogate:
    return Surrogate(Network(widths=(3,), activation=activation, leak=leak), alpha)


def arguments(dtype: torch.dtype = torch.float64) -> Tensor:
    """(3, 4, 50) from far below the kink to far above it, 0 included."""
    z = torch.randn(3, 4, 49, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([z, torch.zeros(3, 4, 1, dtype=torch.float64)], 2).to(dtype)


def parts(of: Surrogate, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f, s and s', each in memory that held NaN."""
    f, s = torch.full_like(z, torch.nan), torch.full_like(z, torch.nan)
    of.activate_(z, f)
    of.slope_(z, s)
    curvature = torch.ones_like(z)
    of.times_curvature_(curvature, z, s)
    return f, s, curvature


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_formulas(activation: Activation) -> None:
    z = arguments().requires_grad_()
    leak = LEAK if activation == "leaky_relu" else 0.0
    if activation == "gelu":
        value = F.gelu(z)
        (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    else:
        value = torch.where(z > 0, z, leak * z)
        slope = leak + (1 - leak) * torch.sigmoid(ALPHAS[:, None, None] * z)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    ours = parts(surrogate(activation, ALPHAS), z.detach())
    for mine, truth in zip(ours, (value, slope, curvature), strict=True):
        torch.testing.assert_close(mine, truth.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_attacks_with_different_alphas_are_attacks_of_their_own(
    activation: Activation, dtype: torch.dtype
) -> None:
    z, alpha = arguments(dtype), ALPHAS.to(dtype)
    together = parts(surrogate(activation, alpha), z)
    for q in range(3):
        alone = parts(surrogate(activation, alpha[q : q + 1]), z[q : q + 1])
        for mine, theirs in zip(together, alone, strict=True):
            # Wide vector units treat the last elements of a row apart, which may round otherwise.
            rtol = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(mine[q : q + 1], theirs, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_has_float32s_digits(activation: Activation) -> None:
    narrow, z = surrogate(activation, ALPHAS.float()), arguments(torch.float32)
    exact = parts(surrogate(activation, ALPHAS), z.double())
    for mine, truth in zip(parts(narrow, z), exact, strict=True):
        scale = truth.abs().amax((1, 2), keepdim=True)
        assert float(((mine - truth) / scale).abs().max()) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_steep_surrogate_is_the_step(dtype: torch.dtype) -> None:
    z = torch.tensor([-1e4, -1.0, -0.01, 0.0, 0.01, 1.0, 1e4], dtype=dtype)[None, None]
    for activation, low in (("relu", 0.0), ("leaky_relu", LEAK)):
        steep = surrogate(activation, torch.tensor([1e6], dtype=dtype))  # type: ignore[arg-type]
        _, slope, curvature = parts(steep, z)
        expected = [low] * 3 + [low + (1 - low) / 2] + [1.0] * 3
        torch.testing.assert_close(slope.flatten(), torch.tensor(expected, dtype=dtype))
        assert bool((curvature.flatten()[[0, 1, 2, 4, 5, 6]] == 0).all())
        torch.testing.assert_close(curvature.flatten()[3], (1 - low) * z.new_tensor(1e6 / 4))


def test_a_leaky_relu_without_a_leak_is_a_relu() -> None:
    z = arguments()
    leaky = parts(surrogate("leaky_relu", ALPHAS, leak=0.0), z)
    for mine, theirs in zip(leaky, parts(surrogate("relu", ALPHAS), z), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_gelu_knows_no_alpha() -> None:
    z = arguments()
    one, other = surrogate("gelu", ALPHAS), surrogate("gelu", ALPHAS * 7)
    for mine, theirs in zip(parts(one, z), parts(other, z), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_it_is_given_is_not_modified(activation: Activation) -> None:
    z, alpha = arguments(), ALPHAS.clone()
    some = surrogate(activation, alpha)
    _, slope, _ = parts(some, z)
    kept = slope.clone()
    some.times_curvature_(torch.ones_like(z), z, slope)
    assert torch.equal(slope, kept)
    assert torch.equal(z, arguments())
    assert torch.equal(alpha, ALPHAS)
