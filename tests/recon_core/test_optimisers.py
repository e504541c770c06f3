"""Both update rules against `torch.optim`, run by run, whatever the slice length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recon_core import optimisers
from recon_core.optimisers import Optimiser

N_STEPS = 30
SHAPE = (3, 5, 7)

RULES = {
    "adadelta": Optimiser(),
    "adadelta, other constants": Optimiser(lr=0.3, rho=0.8, eps=1e-4),
    "gd": Optimiser(rule="gd", lr=0.002),
    "gd with momentum": Optimiser(rule="gd", lr=0.001, momentum=0.9),
}


def torch_optimiser(optimiser: Optimiser, parameter: Tensor) -> torch.optim.Optimizer:
    if optimiser.rule == "adadelta":
        return torch.optim.Adadelta(
            [parameter], lr=optimiser.lr, rho=optimiser.rho, eps=optimiser.eps
        )
    return torch.optim.SGD([parameter], lr=optimiser.lr, momentum=optimiser.momentum)


def gradient(parameter: Tensor, step: int) -> Tensor:
    """Of a quartic with a minimum that moves: signs change and magnitudes span decades."""
    target = torch.linspace(-2, 2, parameter.numel(), dtype=parameter.dtype) * (1 + step % 3)
    return 4 * (parameter - target.view_as(parameter)) ** 3 * 10.0 ** (-(step % 4))


def start(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype) / 4


def moved(optimiser: Optimiser, parameter: Tensor) -> Tensor:
    parameter = parameter.clone()
    state = optimiser.state(parameter)
    for step in range(N_STEPS):
        optimiser.step_(parameter, gradient(parameter, step), state)
    return parameter


@pytest.mark.parametrize("rule", RULES)
def test_equals_torch(rule: str) -> None:
    ours = moved(RULES[rule], start())
    theirs = start()
    torch_rule = torch_optimiser(RULES[rule], theirs)
    for step in range(N_STEPS):
        theirs.grad = gradient(theirs, step)
        torch_rule.step()
    assert (ours - start()).abs().max() > 1e-3, "nothing moved, so nothing was compared"
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 8, 104, 1000])
def test_does_not_depend_on_the_slice_length(
    rule: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = moved(RULES[rule], start())
    monkeypatch.setattr(optimisers, "SLICE", length)
    sliced = moved(RULES[rule], start())
    # Vectorised and scalar tails may round differently, so equal to rounding and not bitwise.
    torch.testing.assert_close(sliced, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_stacked_runs_move_as_separate_ones(rule: str) -> None:
    optimiser, parameter = RULES[rule], start()
    together, state = parameter.clone(), optimiser.state(parameter)
    apart = [p.clone() for p in parameter]
    states = [optimiser.state(p) for p in apart]
    for step in range(N_STEPS):
        g = gradient(together, step)
        optimiser.step_(together, g, state)
        for run, single in enumerate(apart):
            optimiser.step_(single, g[run].contiguous(), states[run])
    torch.testing.assert_close(together, torch.stack(apart), rtol=1e-12, atol=1e-14)


def test_a_transposed_gradient_is_read_in_its_own_order() -> None:
    optimiser = Optimiser(rule="gd", lr=1.0)
    parameter = torch.zeros(2, 3)
    optimiser.step_(parameter, torch.arange(6.0).view(3, 2).mT, ())
    assert parameter.tolist() == [[0, -2, -4], [-1, -3, -5]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr=0.0 is not a positive number"),
        ({"lr": float("nan")}, "lr=nan is not a positive number"),
        ({"rule": "gd", "momentum": 1.0}, "momentum=1.0 is outside"),
        ({"momentum": 0.9}, "momentum=0.9 has no meaning for adadelta"),
        ({"rho": 1.0}, "rho=1.0 is outside"),
        ({"eps": 0.0}, "eps=0.0 is not a positive number"),
    ],
)
def test_refuses(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimiser(**settings)  # type: ignore[arg-type]
