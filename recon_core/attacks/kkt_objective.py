"""Reconstruct training images from the KKT condition of margin maximisation.

A homogeneous network trained long enough with logistic loss points where
theta = sum_i lam_i y_i grad phi(theta; x_i) with lam_i >= 0 (paper 001, eq. 1; Haim et al. 2022).
The attack minimises, over candidates x and multipliers lam with the weights fixed (section 1.2),

    L = || theta - sum_i c_i grad phi(theta; x_i) ||^2,     c_i = lam_i y_i / N,
      + sum relu(x - 1)^2 + sum relu(-1 - x)^2 + 5 sum relu(lam_min - lam)^2,

where every derivative of ReLU is replaced by sigma(alpha z) while ReLU itself stays.

The gradient of phi in layer l is the outer product d_l a_{l-1}^T, so the square expands to
||theta||^2 - 2 sum_i c_i t_i + c^T K c with t_i = sum_l d_l . z_l and
K = sum_l (D_l D_l^T) * (A_{l-1} A_{l-1}^T): m x m matrices instead of residuals of the size of the
network. `objective_and_gradients` differentiates this Gram form in closed form.

Departure: the published formula has no N; the authors' code divides by the number of candidates.
For the same lam_min these are different problems. `lam_scale` says which; default: the code's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.types import Progress, no_progress
from recon_core.victims.mlp import Weights

SAVE_AT_PAPER = (100, 200, 300, 500, 800, 1400, 2400, 4100, 7000, 10_000, 11_900)
REPORTS = 50


@dataclass(frozen=True, kw_only=True)
class KKTAttack:
    """The attack's settings. Defaults: dataset generation of paper 001, section 2.

    `n_candidates` is m_total, half of them with y = -1. `sigma` is the standard deviation of the
    initial x; lam starts uniform in [0, 1).
    """

    n_candidates: int = 400
    sigma: float = 1e-3
    lam_min: float = 0.5
    alpha: float = 20.0
    lam_scale: Literal["candidates", "none"] = "candidates"
    optimiser: Optimiser = field(default_factory=Optimiser)
    save_at: tuple[int, ...] = SAVE_AT_PAPER
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.n_candidates < 2 or self.n_candidates % 2:
            raise ValueError(
                f"n_candidates={self.n_candidates} must be even and at least 2: half of the "
                "candidates carry the label -1, half +1"
            )
        if not self.save_at or list(self.save_at) != sorted(set(self.save_at)):
            raise ValueError(
                f"save_at={self.save_at} must be increasing iterations, e.g. (100, 800)"
            )
        if self.save_at[0] < 1:
            raise ValueError(f"save_at={self.save_at} must start at iteration 1 or later")
        for name in ("alpha", "sigma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} is not a positive number; see the defaults")
        if not math.isfinite(self.lam_min):
            raise ValueError(f"lam_min={self.lam_min} is not a number; paper 001 uses 0.5")

    @property
    def n_iterations(self) -> int:
        """The attack ends with its last saved iteration."""
        return self.save_at[-1]

    @property
    def c_per_lam(self) -> float:
        """The 1/N of c_i = lam_i y_i / N."""
        return 1.0 / self.n_candidates if self.lam_scale == "candidates" else 1.0


@dataclass(frozen=True)
class Attacked:
    """Every run's candidates at the saved iterations, in attack units, and how the attack ended."""

    x: Float[Tensor, "r s m d"]
    lam: Float[Tensor, "r m"]
    loss: Float[Tensor, " r"]
    residual: Float[Tensor, " r"]


def candidate_labels(n_candidates: int, like: Tensor) -> Float[Tensor, " m"]:
    """-1 for the first half of the candidates, +1 for the second."""
    y = torch.ones(n_candidates, dtype=like.dtype, device=like.device)
    y[: n_candidates // 2] = -1
    return y


def stationarity_and_gradients(
    weights: Weights,
    x: Float[Tensor, "r m d"],
    c: Float[Tensor, "r m"],
    *,
    alpha: float,
    theta_square: Float[Tensor, " r"],
) -> tuple[Float[Tensor, " r"], Float[Tensor, "r m d"], Float[Tensor, "r m"]]:
    """||theta - sum_i c_i grad phi(x_i)||^2 per run, and its gradients in x and in c.

    Gram form with ReLU's derivative replaced by sigma(alpha z), in the backward pass of phi and in
    the differentiation of that pass alike. `theta_square` is ||theta||^2, computed once.
    """
    # Forward: z_l = W_l a_{l-1}, s_l = sigma(alpha z_l), and the backward pass d_l of phi.
    a, z, s = [x], [], []
    for w in weights[:-1]:
        z.append(torch.bmm(a[-1], w.mT))
        s.append(torch.sigmoid(alpha * z[-1]))
        a.append(torch.relu(z[-1]))
    last = len(weights) - 1
    phi = torch.bmm(a[last], weights[last].mT)
    d: list[Tensor] = [torch.empty(0)] * last + [torch.ones_like(phi)]
    b: list[Tensor] = [torch.empty(0)] * last
    for layer in range(last - 1, -1, -1):
        b[layer] = torch.matmul(d[layer + 1], weights[layer + 1])
        d[layer] = b[layer] * s[layer]

    # The two Gram matrices of every layer, K and t.
    gram_a = [torch.bmm(v, v.mT) for v in a]
    gram_d = [torch.bmm(v, v.mT) for v in d]
    t = phi.squeeze(-1) + sum((d[i] * z[i]).sum(-1) for i in range(last))
    kernel = torch.stack([p * q for p, q in zip(gram_a, gram_d, strict=True)]).sum(0)
    kernel_c = torch.bmm(kernel, c.unsqueeze(-1)).squeeze(-1)
    value = theta_square - 2 * (c * t).sum(-1) + (c * kernel_c).sum(-1)
    gradient_c = 2 * (kernel_c - t)

    # Adjoints: of d_l bottom up, then of z_l and a_l top down. cc = c c^T; factors 2 at the end.
    cc = c.unsqueeze(-1) * c.unsqueeze(-2)
    column = c.unsqueeze(-1)
    adjoint_z = []
    adjoint_d = torch.bmm(cc * gram_a[0], d[0]) - column * z[0] if last else torch.empty(0)
    for layer in range(last):
        adjoint_b = adjoint_d * s[layer]
        adjoint_s = adjoint_d * b[layer]
        adjoint_z.append(alpha * adjoint_s * s[layer] * (1 - s[layer]) - column * d[layer])
        if layer + 1 < last:
            adjoint_d = (
                torch.bmm(cc * gram_a[layer + 1], d[layer + 1])
                - column * z[layer + 1]
                + torch.bmm(adjoint_b, weights[layer + 1].mT)
            )
    adjoint_z.append(-column)  # of phi, which only t contains
    for layer in range(last, 0, -1):
        adjoint_a = torch.bmm(cc * gram_d[layer], a[layer]) + torch.matmul(
            adjoint_z[layer], weights[layer]
        )
        adjoint_z[layer - 1] = adjoint_z[layer - 1] + adjoint_a * s[layer - 1]
    gradient_x = torch.bmm(cc * gram_d[0], a[0]) + torch.matmul(adjoint_z[0], weights[0])
    return value, 2 * gradient_x, gradient_c


def objective_and_gradients(
    weights: Weights,
    x: Float[Tensor, "r m d"],
    lam: Float[Tensor, "r m"],
    *,
    attack: KKTAttack,
    theta_square: Float[Tensor, " r"],
) -> tuple[Float[Tensor, " r"], Float[Tensor, "r m d"], Float[Tensor, "r m"]]:
    """The attack's loss L of every run, penalties included, and its gradients in x and lam."""
    signs = candidate_labels(x.shape[1], x) * attack.c_per_lam
    value, gradient_x, gradient_c = stationarity_and_gradients(
        weights, x, signs * lam, alpha=attack.alpha, theta_square=theta_square
    )
    excess = x - x.clamp(-1, 1)
    shortfall = torch.relu(attack.lam_min - lam)
    value = value + excess.square().sum((-1, -2)) + 5 * shortfall.square().sum(-1)
    return value, gradient_x + 2 * excess, gradient_c * signs - 10 * shortfall


def reconstruct(
    weights: Weights,
    x: Float[Tensor, "r m d"],
    lam: Float[Tensor, "r m"],
    *,
    attack: KKTAttack,
    progress: Progress = no_progress,
) -> Attacked:
    """Minimise L from the starting point (x, lam) of every run; nothing is modified in place.

    A diverged run ends with NaN in its own rows. `residual` is the final stationarity term over
    ||theta||^2, evaluated in float64, where the Gram form does not cancel.
    """
    theta_square = squared_norm(weights)
    x, lam = x.clone(), lam.clone()
    state_x, state_lam = attack.optimiser.state(x), attack.optimiser.state(lam)
    saved = []
    value = torch.full((x.shape[0],), torch.nan, dtype=x.dtype, device=x.device)
    report_every = max(1, attack.n_iterations // REPORTS)
    for iteration in range(1, attack.n_iterations + 1):
        value, gradient_x, gradient_lam = objective_and_gradients(
            weights, x, lam, attack=attack, theta_square=theta_square.to(x.dtype)
        )
        attack.optimiser.step_(x, gradient_x, state_x)
        attack.optimiser.step_(lam, gradient_lam, state_lam)
        if iteration in attack.save_at:
            saved.append(x.clone())
        if iteration % report_every == 0:
            progress(iteration / attack.n_iterations)
    progress(1.0)
    return Attacked(
        x=torch.stack(saved, dim=1),
        lam=lam,
        loss=value,
        residual=relative_residual(weights, x, lam, attack=attack),
    )


def squared_norm(weights: Weights) -> Float[Tensor, " r"]:
    """||theta||^2 of every run, in float64."""
    return torch.stack([w.double().square().sum((-1, -2)) for w in weights]).sum(0)


def relative_residual(
    weights: Weights,
    x: Float[Tensor, "r m d"],
    lam: Float[Tensor, "r m"],
    *,
    attack: KKTAttack,
) -> Float[Tensor, " r"]:
    """||theta - sum_i c_i grad phi(x_i)||^2 / ||theta||^2 of every run, in float64."""
    wide = tuple(w.double() for w in weights)
    theta_square = squared_norm(wide)
    c = lam.double() * candidate_labels(x.shape[1], lam.double()) * attack.c_per_lam
    value, _, _ = stationarity_and_gradients(
        wide, x.double(), c, alpha=attack.alpha, theta_square=theta_square
    )
    return value / theta_square
