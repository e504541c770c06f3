"""The objective whose minimum shows training images: the KKT condition of margin maximisation.

A homogeneous network trained long enough with logistic loss points where theta = sum_i lam_i y_i
grad phi(theta; x_i) with lam_i >= 0 (image restoration paper, eq. 1; KKT paper, eqs. 2-5; Haim et
al. 2022). Minimised over candidates x and multipliers lam is

    L = || theta - sum_i c_i grad phi_i(theta; x_i) ||^2
      + sum relu(x - 1)^2 + sum relu(-1 - x)^2 + 5 sum relu(lam_min - lam)^2,

where every derivative of the activation is a smooth surrogate (`Surrogate`). By condition:

    binary       phi_i = phi(x_i)                          c_i = y_i lam_i / N
    multiclass   phi_i = phi_{y_i} - max_{j != y_i} phi_j  c_i = lam_i / N
    regression   phi_i = phi(x_i)                          c_i = lam_i / N

(image restoration paper, section 1.2; KKT paper, eqs. 12 and 15). Under `regression`, which holds
for any loss with weight decay, lam_i takes either sign and has no penalty. The published formulas
have no N; the authors' code divides by the number of candidates, which for the same lam_min is
another problem: `lam_scale` says which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recon_core.attacks.kkt.stationarity import Form, Stationarity
from recon_core.optimisers import Optimiser
from recon_core.strict import Count, Positive, Strict, Within
from recon_core.victims.network import Architecture, Parameters

SAVE_AT_PAPER = (100, 200, 300, 500, 800, 1400, 2400, 4100, 7000, 10_000, 11_900)
Condition = Literal["binary", "multiclass", "regression"]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Search(Strict):
    """Ranges from which every attack draws its own hyperparameters; None leaves the attack's. lr,
    lam_lr and sigma are drawn log-uniformly, lam_min and alpha uniformly. Defaults: the KKT paper,
    appendix B, and the sweep of Haim et al.'s code."""

    lr: Range | None = (1e-5, 1.0)
    lam_lr: Range | None = None
    sigma: Range | None = (1e-6, 0.1)
    lam_min: Range | None = (0.01, 0.5)
    alpha: Range | None = (10.0, 500.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr", "lam_lr", "sigma", "lam_min", "alpha"):
            bounds = getattr(self, name)
            if bounds is not None and not (0 < bounds[0] <= bounds[1] < math.inf):
                raise ValueError(
                    f"search.{name}={bounds} is not a range 0 < low <= high; e.g. (0.01, 0.5)"
                )


@dataclass(frozen=True, kw_only=True)
class KKTAttack(Strict):
    """Settings of the search. Defaults: dataset generation of the image restoration paper, section
    2.

    `n_candidates` is m_total, shared equally among the labels. `sigma`: standard deviation of the
    initial x; lam starts uniform in [0, 1), or N(0, 1) under regression. `lam_lr`: the rate of lam
    where it differs from that of x. `search`: random hyperparameters for every attack.
    `stop_above`: an attack stops when its loss exceeds so many times ||theta||^2 at iteration
    `stop_after` or later; one that diverges always stops. `ncc_stop_above`: the authors' rule,
    which needs the training images: the ten best normalised distances (not divided by d) have a
    mean above this (theirs: 3300 at iteration 5000).
    """

    kind: Literal["kkt"] = "kkt"
    condition: Condition = "binary"
    n_candidates: int = 400
    sigma: Positive = 1e-3
    lam_min: Annotated[float, Within("(-inf, inf)", fix="0.5 is usual")] = 0.5
    alpha: Positive = 20.0
    lam_scale: Literal["candidates", "none"] = "candidates"
    optimiser: Optimiser = field(default_factory=Optimiser)
    lam_lr: Positive | None = None
    save_at: tuple[Count, ...] = SAVE_AT_PAPER
    form: Form = "auto"
    search: Search | None = None
    stop_after: Count = 5000
    stop_above: Positive | None = None
    ncc_stop_above: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_candidates < 2 or (self.condition == "binary" and self.n_candidates % 2):
            fix = "at least 2"
            if self.condition == "binary":
                fix = "even and at least 2: half of the candidates carry the label -1, half +1"
            raise ValueError(f"n_candidates={self.n_candidates} must be {fix}")
        if not self.save_at or list(self.save_at) != sorted(set(self.save_at)):
            raise ValueError(
                f"save_at={self.save_at} must be increasing iterations, e.g. (100, 800)"
            )

    @property
    def n_iterations(self) -> int:
        return self.save_at[-1]

    @property
    def c_per_lam(self) -> float:
        return 1.0 / self.n_candidates if self.lam_scale == "candidates" else 1.0

    def signs(self, like: Tensor) -> Float[Tensor, " m"]:
        """y_i of a binary attack, -1 for the first half of the candidates; 1 otherwise."""
        y = torch.ones(self.n_candidates, dtype=like.dtype, device=like.device)
        if self.condition == "binary":
            y[: self.n_candidates // 2] = -1
        return y

    def classes(self, n_outputs: int, device: torch.device) -> Int[Tensor, " m"] | None:
        """y_i of a multiclass attack, in blocks as equal as can be; None otherwise. Raises
        ValueError if the number of outputs does not go with the condition."""
        if (self.condition == "multiclass") != (n_outputs > 1):
            raise ValueError(
                f"condition={self.condition!r} on a network with {n_outputs} outputs; binary and "
                "regression need 1, multiclass 2 or more"
            )
        if self.condition != "multiclass":
            return None
        if self.n_candidates < n_outputs:
            raise ValueError(
                f"n_candidates={self.n_candidates} is less than one per class of {n_outputs}; "
                f"use {2 * n_outputs} or more"
            )
        place = torch.arange(self.n_candidates, device=device)
        return place * n_outputs // self.n_candidates


@dataclass(frozen=True)
class Settings:
    """The hyperparameters of Q attacks, (Q,) each, float64 on the CPU."""

    lr: Float[Tensor, " q"]
    lam_lr: Float[Tensor, " q"]
    sigma: Float[Tensor, " q"]
    lam_min: Float[Tensor, " q"]
    alpha: Float[Tensor, " q"]

    def __len__(self) -> int:
        return len(self.lr)

    def rows(self, index: Int[Tensor, " k"]) -> Settings:
        return Settings(*(getattr(self, name)[index] for name in SETTINGS))


STEEP = math.inf
"""The alpha at which the surrogate is ReLU's own derivative, 0 at 0 as in training. A trained
network has neurons at exactly 0, which sigma(alpha z) takes for half alive at any finite alpha."""

SETTINGS = ("lr", "lam_lr", "sigma", "lam_min", "alpha")


def settings_of(attack: KKTAttack, generators: Sequence[torch.Generator]) -> Settings:
    """One attack's hyperparameters per generator; drawn if there is a search, else all the same."""
    lr, search = attack.optimiser.lr, attack.search
    fixed = {name: getattr(attack, name) for name in ("sigma", "lam_min", "alpha")}
    fixed |= {"lr": lr, "lam_lr": lr if attack.lam_lr is None else attack.lam_lr}
    drawn: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for generator in generators:
        for name in SETTINGS:
            value = fixed[name]
            bounds: Range | None = None
            if search is not None:  # which draws a number even for what is fixed
                u = float(torch.rand((), generator=generator, dtype=torch.float64))
                bounds = getattr(search, name)
            if bounds is not None:
                low, high = bounds
                if name in ("lam_min", "alpha"):
                    value = low + u * (high - low)
                else:
                    value = math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
            drawn[name].append(value)
        if attack.lam_lr is None and (search is None or search.lam_lr is None):
            drawn["lam_lr"][-1] = drawn["lr"][-1]  # the same rate for both, whatever was drawn
    return Settings(*(torch.tensor(drawn[name], dtype=torch.float64) for name in SETTINGS))


def starting_points(
    attack: KKTAttack, settings: Settings, d: int, generators: Sequence[torch.Generator]
) -> tuple[Float[Tensor, "q m d"], Float[Tensor, "q m"]]:
    """Initial x ~ N(0, sigma^2) and lam of every attack, float32, each from its own generator."""
    x, lam = [], []
    for sigma, generator in zip(settings.sigma.tolist(), generators, strict=True):
        x.append(torch.randn(attack.n_candidates, d, generator=generator) * sigma)
        if attack.condition == "regression":
            lam.append(torch.randn(attack.n_candidates, generator=generator))
        else:
            lam.append(torch.rand(attack.n_candidates, generator=generator))
    return torch.stack(x), torch.stack(lam)


class Objective:
    """L of Q attacks and its gradients in x and lam; what a call returns the next overwrites."""

    def __init__(
        self,
        architecture: Architecture,
        parameters: Parameters,
        *,
        attack: KKTAttack,
        settings: Settings,
    ) -> None:
        like = parameters.weights[0]
        self.stationarity = Stationarity(
            architecture,
            parameters,
            n_candidates=attack.n_candidates,
            alpha=settings.alpha.to(like),
            classes=attack.classes(architecture.n_outputs, like.device),
            form=attack.form,
        )
        self.penalise_lam = attack.condition != "regression"
        self.lam_min = settings.lam_min.to(like).unsqueeze(1)
        self.c_per_lam = attack.signs(like) * attack.c_per_lam
        self.c = like.new_empty(len(settings), attack.n_candidates)
        self.excess = like.new_empty(len(settings), attack.n_candidates, architecture.d)
        self.shortfall = torch.empty_like(self.c)

    def __call__(
        self,
        x: Float[Tensor, "q m d"],
        lam: Float[Tensor, "q m"],
        *,
        with_value: bool = True,
    ) -> tuple[Float[Tensor, " q"] | None, Float[Tensor, "q m d"], Float[Tensor, "q m"]]:
        """(L, dL/dx, dL/dlam); L only if asked for."""
        torch.mul(lam, self.c_per_lam, out=self.c)
        torch.ops.aten.softshrink.out(x, 1.0, out=self.excess)  # x - clamp(x, -1, 1)
        outside = self.excess.square().sum((-1, -2)) if with_value else None
        value, gradient_x, gradient_lam = self.stationarity(
            x, self.c, excess=self.excess, with_value=with_value
        )
        gradient_lam.mul_(self.c_per_lam)
        if self.penalise_lam:
            torch.sub(self.lam_min, lam, out=self.shortfall).clamp_min_(0.0)
            gradient_lam.add_(self.shortfall, alpha=-10.0)
        if value is not None and outside is not None:
            value = value + outside
            if self.penalise_lam:
                value = value + 5 * self.shortfall.square().sum(-1)
        return value, gradient_x, gradient_lam


def relative_residual(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "q m d"],
    lam: Float[Tensor, "q m"],
    *,
    attack: KKTAttack,
    settings: Settings,
    alpha: float | None = None,
) -> Float[Tensor, " q"]:
    """||theta - sum_i c_i grad phi(x_i)||^2 / ||theta||^2 of every attack, in float64, with the
    attacks' own surrogate or that of one `alpha` for all. One attack at a time, so that no memory
    of the size of the stack is needed."""
    alphas = settings.alpha if alpha is None else torch.full_like(settings.alpha, alpha)
    residuals = []
    for q in range(len(x)):
        victim = slice(q, q + 1) if parameters.n_runs > 1 else slice(0, 1)
        wide = parameters.rows(victim).map(lambda tensor: tensor.double())
        stationarity = Stationarity(
            architecture,
            wide,
            n_candidates=x.shape[1],
            alpha=alphas[q : q + 1].to(x.device),
            classes=attack.classes(architecture.n_outputs, x.device),
            form=attack.form,
        )
        c = lam[q : q + 1].double() * attack.signs(lam.double()) * attack.c_per_lam
        value, _, _ = stationarity(x[q : q + 1].double(), c)
        assert value is not None
        residuals.append((value / stationarity.theta_square).clamp_min(0.0))
    return torch.cat(residuals)
