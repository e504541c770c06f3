"""The closed-form KKT objective against double backpropagation, and against a planted solution."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt_objective import (
    KKTAttack,
    candidate_labels,
    objective_and_gradients,
    reconstruct,
    relative_residual,
    stationarity_and_gradients,
)
from recon_core.optimisers import Optimiser
from recon_core.victims.mlp import Weights

R, M, D = 2, 6, 10
DEPTHS = [(7,), (7, 5), (7, 5, 6)]


class SurrogateReLU(torch.autograd.Function):
    """ReLU forwards, sigma(alpha z) backwards; the backward pass is differentiable again."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.alpha = alpha
        return z.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return grad_outputs[0] / (1 + torch.exp(-ctx.alpha * z)), None


def double_backprop(
    weights: Weights, x: Tensor, lam: Tensor, attack: KKTAttack
) -> tuple[Tensor, Tensor, Tensor]:
    """L, dL/dx and dL/dlam straight from the definition, one run after another."""
    x, lam = x.clone().requires_grad_(), lam.clone().requires_grad_()
    n = attack.n_candidates if attack.lam_scale == "candidates" else 1
    y = torch.tensor([-1.0] * (M // 2) + [1.0] * (M // 2), dtype=x.dtype)
    losses = []
    for run in range(R):
        theta = [w[run].clone().requires_grad_() for w in weights]
        a = x[run]
        for w in theta[:-1]:
            a = SurrogateReLU.apply(a @ w.T, attack.alpha)
        phi = (a @ theta[-1].T).squeeze(-1)
        sum_of_gradients = torch.autograd.grad(
            (lam[run] * y / n * phi).sum(), theta, create_graph=True
        )
        loss = sum(
            ((w.detach() - g) ** 2).sum() for w, g in zip(theta, sum_of_gradients, strict=True)
        )
        loss = (
            loss + ((x[run] - 1).clamp_min(0) ** 2).sum() + ((-1 - x[run]).clamp_min(0) ** 2).sum()
        )
        losses.append(loss + 5 * ((attack.lam_min - lam[run]).clamp_min(0) ** 2).sum())
    loss = torch.stack(losses)
    return (loss.detach(), *torch.autograd.grad(loss.sum(), (x, lam)))


def problem(widths: tuple[int, ...]) -> tuple[Weights, Tensor, Tensor]:
    """Weights, candidates (some outside [-1, 1]) and multipliers (some below lam_min)."""
    generator = torch.Generator().manual_seed(len(widths))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = tuple(
        normal(R, fan_out, fan_in) / fan_in**0.5
        for fan_in, fan_out in itertools.pairwise((D, *widths, 1))
    )
    lam = torch.rand(R, M, generator=generator, dtype=torch.float64)
    return weights, normal(R, M, D), lam


def theta_square(weights: Weights) -> Tensor:
    return torch.stack([w.square().sum((-1, -2)) for w in weights]).sum(0)


def relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("widths", DEPTHS, ids=["1 hidden", "2 hidden", "3 hidden"])
@pytest.mark.parametrize("lam_scale", ["candidates", "none"])
@pytest.mark.parametrize("alpha", [2.0, 20.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
def test_equals_double_backprop(
    widths: tuple[int, ...], lam_scale: Any, alpha: float, dtype: torch.dtype, tolerance: float
) -> None:
    attack = KKTAttack(n_candidates=M, alpha=alpha, lam_scale=lam_scale)
    weights, x, lam = problem(widths)
    expected = double_backprop(weights, x, lam, attack)
    assert bool((x.abs() > 1).any())
    assert bool((lam < attack.lam_min).any()), "the penalties must take part"
    narrow = tuple(w.to(dtype) for w in weights)
    ours = objective_and_gradients(
        narrow, x.to(dtype), lam.to(dtype), attack=attack, theta_square=theta_square(narrow)
    )
    for mine, reference in zip(ours, expected, strict=True):
        assert mine.dtype == dtype
        assert relative(mine, reference) < tolerance


def test_the_two_scales_are_different_problems() -> None:
    weights, x, lam = problem((7, 5))
    by_scale = [
        objective_and_gradients(
            weights,
            x,
            lam,
            attack=KKTAttack(n_candidates=M, lam_scale=scale),
            theta_square=theta_square(weights),
        )[0]
        for scale in ("candidates", "none")
    ]
    assert relative(by_scale[0], by_scale[1]) > 0.01


def test_the_gradient_is_the_slope_of_the_value_in_the_multipliers() -> None:
    # The surrogate makes dL/dx differ from the slope of L, but c enters without a ReLU.
    weights, x, lam = problem((7, 5))
    step = 1e-6 * torch.randn(R, M, generator=torch.Generator().manual_seed(0)).double()

    def at(c: Tensor) -> tuple[Tensor, Tensor]:
        value, _, gradient = stationarity_and_gradients(
            weights, x, c, alpha=20.0, theta_square=theta_square(weights)
        )
        return value, gradient

    slope = (at(lam + step)[0] - at(lam - step)[0]) / 2
    torch.testing.assert_close(slope, (at(lam)[1] * step).sum(-1), rtol=1e-7, atol=0)


def test_labels_are_balanced() -> None:
    assert candidate_labels(4, torch.zeros(1, dtype=torch.float64)).tolist() == [-1, -1, 1, 1]


def planted(depth: int, *, lam: float, d: int = 5) -> tuple[Weights, Tensor, Tensor]:
    """A network of width 1 at a KKT point of two opposite images v and -v.

    phi(v) = q^(depth+1) |v| with layers q v/|v|, q, ..., q. Only v is active, and
    theta = lam grad phi(v) holds in every layer if lam q^(depth-1) |v| = 1, so |v| follows from q.
    The multiplier of -v is free: its gradient vanishes.
    """
    q = 2.0
    norm = 1 / (lam * q ** (depth - 1))
    direction = torch.nn.functional.normalize(torch.arange(1.0, d + 1).double(), dim=0)
    layers = [q * direction[None, None]] + [torch.full((1, 1, 1), q).double()] * depth
    x = torch.stack([-direction, direction])[None] * norm
    return tuple(layers), x, torch.tensor([[0.7, lam]], dtype=torch.float64)


PLANTED = [(1, 0.75), (2, 0.9), (3, 0.6)]
STEEP = {"n_candidates": 2, "lam_scale": "none", "alpha": 2000.0}


@pytest.mark.parametrize(("depth", "lam_planted"), PLANTED)
def test_a_planted_kkt_point_has_no_residual(depth: int, lam_planted: float) -> None:
    weights, x, lam = planted(depth, lam=lam_planted)
    attack = KKTAttack(**STEEP)  # type: ignore[arg-type]
    residual = relative_residual(weights, x, lam, attack=attack)
    assert float(residual) == pytest.approx(0, abs=1e-14)
    value, gradient_x, gradient_lam = objective_and_gradients(
        weights, x, lam, attack=attack, theta_square=theta_square(weights)
    )
    for tensor in (value, gradient_x, gradient_lam):
        assert float(tensor.abs().max()) < 1e-12
    assert float(relative_residual(weights, 1.1 * x, lam, attack=attack)) > 1e-4


@pytest.mark.parametrize(("depth", "lam_planted"), PLANTED)
@pytest.mark.parametrize(
    "optimiser",
    [Optimiser(lr=0.01), Optimiser(rule="gd", lr=1e-3, momentum=0.9)],
    ids=["adadelta", "gd"],
)
def test_a_planted_kkt_point_is_a_fixed_point(
    depth: int, lam_planted: float, optimiser: Optimiser
) -> None:
    weights, x, lam = planted(depth, lam=lam_planted)
    attack = KKTAttack(**STEEP, optimiser=optimiser, save_at=(10, 50))  # type: ignore[arg-type]
    attacked = reconstruct(weights, x, lam, attack=attack)
    for saved in attacked.x.unbind(1):
        torch.testing.assert_close(saved, x, rtol=0, atol=1e-9)
    torch.testing.assert_close(attacked.lam, lam, rtol=0, atol=1e-9)
    assert float(attacked.residual) < 1e-12


def test_the_planted_image_is_found_from_nearby() -> None:
    weights, x, lam = planted(2, lam=0.9)
    attack = KKTAttack(
        **STEEP,  # type: ignore[arg-type]
        optimiser=Optimiser(rule="gd", lr=0.01, momentum=0.9),
        save_at=(800,),
    )
    noise = 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
    attacked = reconstruct(weights, x + noise, lam, attack=attack)
    found = attacked.x[0, -1, 1] * attacked.lam[0, 1]  # lam and |x| trade off: only the product
    torch.testing.assert_close(found, x[0, 1] * lam[0, 1], rtol=0, atol=1e-6)
    assert float(attacked.residual) < 1e-10


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=["f32", "f64"]
)
def test_a_run_does_not_depend_on_the_runs_beside_it(dtype: torch.dtype, tolerance: float) -> None:
    weights, x, lam = problem((7, 5))
    weights, x, lam = tuple(w.to(dtype) for w in weights), x.to(dtype) / 10, lam.to(dtype)
    attack = KKTAttack(n_candidates=M, save_at=(5, 60))
    together = reconstruct(weights, x, lam, attack=attack)
    strangers = tuple(torch.cat([w[:1], -w[1:]]) for w in weights)
    elsewhere = reconstruct(strangers, x, lam, attack=attack)
    assert torch.equal(together.x[0], elsewhere.x[0])
    assert torch.equal(together.lam[0], elsewhere.lam[0])
    assert not torch.equal(together.x[1], elsewhere.x[1])
    # At another place or in a batch of another size, other kernels run: equal to rounding only.
    for run in range(R):
        only = slice(run, run + 1)
        alone = reconstruct(tuple(w[only] for w in weights), x[only], lam[only], attack=attack)
        torch.testing.assert_close(together.x[run], alone.x[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(together.lam[run], alone.lam[0], rtol=tolerance, atol=0)
        torch.testing.assert_close(together.loss[run], alone.loss[0], rtol=tolerance, atol=0)


def test_a_diverging_run_does_not_disturb_its_neighbour() -> None:
    weights, x, lam = problem((7, 5))
    attack = KKTAttack(n_candidates=M, save_at=(20,))
    calm = reconstruct(weights, x, lam, attack=attack)
    weights[0][1] *= 1e200
    wild = reconstruct(weights, x, lam, attack=attack)
    assert not bool(wild.x[1].isfinite().all())
    assert torch.equal(wild.x[0], calm.x[0])
    assert torch.equal(wild.lam[0], calm.lam[0])


def test_the_attack_lowers_its_loss_and_reports_to_the_end() -> None:
    weights, x, lam = problem((7, 5))
    fractions: list[float] = []
    attack = KKTAttack(n_candidates=M, save_at=(1, 157))
    before = objective_and_gradients(
        weights, x, lam, attack=attack, theta_square=theta_square(weights)
    )[0]
    copies = x.clone(), lam.clone()
    attacked = reconstruct(weights, x, lam, attack=attack, progress=fractions.append)
    assert bool((attacked.loss < before).all())
    assert fractions[-1] == 1.0
    assert all(a <= b for a, b in itertools.pairwise(fractions))
    assert torch.equal(x, copies[0])
    assert torch.equal(lam, copies[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_candidates": 7}, "n_candidates=7 must be even"),
        ({"save_at": ()}, "save_at=\\(\\) must be increasing"),
        ({"save_at": (5, 5)}, "save_at=\\(5, 5\\) must be increasing"),
        ({"save_at": (0, 5)}, "must start at iteration 1"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"sigma": float("nan")}, "sigma=nan"),
        ({"lam_min": float("nan")}, "lam_min=nan"),
    ],
)
def test_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KKTAttack(**settings)
