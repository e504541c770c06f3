"""Small attacks for the tests of the solver: three at once, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import SETTINGS, Condition, KKTAttack, Settings, settings_of
from recon_core.attacks.kkt.solver import Attacked, reconstruct
from recon_core.optimisers import Optimiser
from recon_core.victims.network import Architecture, Network, Parameters

Q, M, SHAPE = 3, 6, (1, 3, 4)
CPU = torch.device("cpu")
GD = Optimiser(rule="gd", lr=0.01)
MOMENTUM = Optimiser(rule="gd", lr=0.005, momentum=0.9)
ADAM = Optimiser(rule="adam", lr=0.02)
ADADELTA = Optimiser(lr=0.3)
RULES = {"adadelta": ADADELTA, "gd": GD, "momentum": MOMENTUM, "adam": ADAM}
CONDITIONS: list[Condition] = ["binary", "multiclass", "regression"]
DIFFERENT = {
    "lr": (1.0, 0.3, 0.6),
    "lam_lr": (0.5, 1.0, 0.2),
    "lam_min": (0.5, 0.1, 0.3),
    "alpha": (2.0, 20.0, 7.0),
}


def architecture(condition: Condition = "binary", network: Network | None = None) -> Architecture:
    some = Network(widths=(7, 5), bias="first") if network is None else network
    return some.on(SHAPE, 3 if condition == "multiclass" else 1)


def attack_with(
    optimiser: Optimiser = ADADELTA,
    condition: Condition = "binary",
    save_at: tuple[int, ...] = (8, 20),
) -> KKTAttack:
    return KKTAttack(
        condition=condition, n_candidates=M, optimiser=optimiser, save_at=save_at, lam_scale="none"
    )


def same(attack: KKTAttack, n: int = Q) -> Settings:
    return settings_of(attack, [torch.Generator()] * n)


def different(attack: KKTAttack) -> Settings:
    """Hyperparameters of every attack's own; rates in proportion to the optimiser's."""
    columns = {name: torch.tensor(v, dtype=torch.float64) for name, v in DIFFERENT.items()}
    columns["lr"] *= attack.optimiser.lr
    columns["lam_lr"] *= attack.optimiser.lr
    columns["sigma"] = torch.ones(Q, dtype=torch.float64)
    return Settings(*(columns[name] for name in SETTINGS))


def problem(
    of: Architecture, n_runs: int = Q, dtype: torch.dtype = torch.float64
) -> tuple[Parameters, Tensor, Tensor]:
    """Weights of n_runs victims, and where Q attacks start."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    skeleton = of.initial([generator], dtype=dtype)
    parameters = skeleton.map(lambda t: normal(n_runs, *t.shape[1:]) / t.shape[-1] ** 0.5)
    return parameters, 0.3 * normal(Q, M, of.d), torch.rand(Q, M, generator=generator).to(dtype)


def attacked(
    attack: KKTAttack,
    each: Settings | None = None,
    *,
    of: Architecture | None = None,
    start: tuple[Parameters, Tensor, Tensor] | None = None,
    **more: Any,
) -> Attacked:
    """All attacks, by default of the same hyperparameters, on the usual problem."""
    of = architecture(attack.condition) if of is None else of
    settings = same(attack) if each is None else each
    return reconstruct(of, *(start or problem(of)), attack=attack, settings=settings, **more)


def assert_same(one: Attacked, other: Attacked, rows: Sequence[int] | None = None) -> None:
    """Bit for bit, NaN included."""
    for name in Attacked.__dataclass_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if rows is not None:
            a, b = a[list(rows)], b[list(rows)]
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


def assert_near(one: Attacked, other: Attacked, tolerance: float) -> None:
    for name in Attacked.__dataclass_fields__:
        a, b = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def row(attacked: Attacked, q: int) -> Attacked:
    names = Attacked.__dataclass_fields__
    return Attacked(**{name: getattr(attacked, name)[q : q + 1] for name in names})
