"""Every update rule against `torch.optim`, run by run, at rates of their own, in any slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from recon_core import optimisers
from recon_core.optimisers import MuonAndAdamW, Optimiser, Stepper
from tests.recon_core.drawing import refuses
from tests.recon_core.victims.torch_nets import torch_optimiser

N_STEPS = 300
SHAPE = (3, 5, 7)

RULES = {
    "adadelta": Optimiser(),
    "adadelta, other constants": Optimiser(lr=0.3, rho=0.8, eps=1e-4),
    "gd": Optimiser(rule="gd", lr=0.002),
    "gd with momentum": Optimiser(rule="gd", lr=0.001, momentum=0.9),
    "adam": Optimiser(rule="adam", lr=0.01),
    "adam, other constants": Optimiser(rule="adam", lr=0.1, betas=(0.8, 0.99), eps=1e-3),
}


def gradient(parameter: Tensor, step: int) -> Tensor:
    """Of a quartic with a minimum that moves: signs change and magnitudes span decades."""
    target = torch.linspace(-2, 2, parameter.numel(), dtype=parameter.dtype) * (1 + step % 3)
    return 4 * (parameter - target.view_as(parameter)) ** 3 * 10.0 ** (-(step % 4))


def start(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype) / 4


def moved(optimiser: Optimiser, lr: Tensor | None = None) -> Tensor:
    parameter = start()
    stepper = Stepper(optimiser, parameter, lr=lr)
    for step in range(N_STEPS):
        stepper.step_(gradient(parameter, step))
    return parameter


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_torch(rule: str, dtype: torch.dtype) -> None:
    ours, theirs = start(dtype), start(dtype)
    stepper, torch_rule = Stepper(RULES[rule], ours), torch_optimiser(RULES[rule], [theirs])
    for step in range(N_STEPS):
        stepper.step_(gradient(ours, step))
        theirs.grad = gradient(theirs, step)
        torch_rule.step()
    assert (ours - start(dtype)).abs().max() > 0.1, "little moved, so little was compared"
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 8, 40, 104, 1000])
@pytest.mark.parametrize("by_run", [False, True])
def test_does_not_depend_on_the_slice_length(
    rule: str, length: int, by_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = RULES[rule].lr * torch.tensor([1.0, 0.5, 0.1]) if by_run else None
    monkeypatch.setattr(optimisers, "SLICE", 1000)
    monkeypatch.setattr(f"{__name__}.N_STEPS", 30)
    whole = moved(RULES[rule], rates)
    monkeypatch.setattr(optimisers, "SLICE", length)
    # Vectorised and scalar tails may round differently, so equal to rounding and not bitwise.
    torch.testing.assert_close(moved(RULES[rule], rates), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_every_run_may_have_its_own_rate(rule: str) -> None:
    rates = [0.5, 0.1, 1.0]
    together = moved(RULES[rule], RULES[rule].lr * torch.tensor(rates, dtype=torch.float64))
    for run, factor in enumerate(rates):
        constants = {**vars(RULES[rule]), "lr": factor * RULES[rule].lr}
        alone = moved(Optimiser(**constants))
        torch.testing.assert_close(together[run], alone[run], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(together[0], moved(RULES[rule])[0], rtol=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_a_state_goes_on_bit_for_bit(rule: str) -> None:
    parameter = start()
    first = Stepper(RULES[rule], parameter)
    for step in range(10):
        first.step_(gradient(parameter, step))
    again, saved = parameter.clone(), [t.clone() for t in first.tensors()]
    second = Stepper(RULES[rule], again)
    second.load(saved)
    for step in range(10, 20):
        first.step_(gradient(parameter, step))
        second.step_(gradient(again, step))
    assert torch.equal(parameter, again)
    for one, other in zip(first.tensors(), second.tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", RULES)
def test_some_of_the_runs_go_on_alone(rule: str) -> None:
    parameter = start()
    stepper = Stepper(RULES[rule], parameter)
    for step in range(10):
        stepper.step_(gradient(parameter, step))
    keep = torch.tensor([0, 2])
    fewer = parameter[keep]
    rest = Stepper(RULES[rule], fewer, state=stepper.rows(keep))
    for step in range(10, 20):
        g = gradient(parameter, step)
        stepper.step_(g)
        rest.step_(g[keep])
    torch.testing.assert_close(fewer, parameter[keep], rtol=1e-12, atol=1e-14)


def test_a_gradient_buffer_may_be_written_again_and_again() -> None:
    optimiser = Optimiser(rule="gd", lr=1.0)
    parameter, buffer = torch.zeros(2, 3), torch.ones(2, 3)
    stepper = Stepper(optimiser, parameter)
    for _ in range(2):
        stepper.step_(buffer)
        buffer.mul_(10)
    assert parameter.tolist() == [[-11.0] * 3] * 2


def test_a_transposed_gradient_is_read_in_its_own_order() -> None:
    parameter = torch.zeros(2, 3)
    stepper = Stepper(Optimiser(rule="gd", lr=1.0), parameter)
    g = torch.arange(6.0).view(3, 2).mT
    for _ in range(2):
        stepper.step_(g)
        g += 1
    assert parameter.tolist() == [[-1, -5, -9], [-3, -7, -11]]


def test_no_runs_at_all() -> None:
    for rule in RULES.values():
        for lr in (None, torch.ones(0)):
            stepper = Stepper(rule, torch.zeros(0, 4), lr=lr)
            stepper.step_(torch.zeros(0, 4))


@pytest.mark.parametrize("by_run", [False, True])
@pytest.mark.parametrize("rule", ["adadelta", "gd with momentum"])
def test_a_step_allocates_nothing(rule: str, by_run: bool) -> None:
    parameter, g = torch.zeros(4, 1000), torch.ones(4, 1000)
    stepper = Stepper(RULES[rule], parameter, lr=torch.arange(1.0, 5.0) if by_run else None)
    stepper.step_(g)
    assert allocated(lambda: torch.add(g, g)) > 0, "the profiler does not see allocations"
    assert allocated(lambda: stepper.step_(g)) == 0


def allocated(function: Callable[[], object]) -> int:
    """Bytes, whether given back or not."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    there = start().cuda()
    stepper = Stepper(Optimiser(), there)
    for step in range(N_STEPS):
        stepper.step_(gradient(there.cpu(), step).cuda())
    torch.testing.assert_close(there.cpu(), moved(Optimiser()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["adadelta", "gd with momentum", "adam"])
def test_refuses_another_states_tensors(rule: str) -> None:
    stepper = Stepper(RULES[rule], start())
    wrong: list[Sequence[Tensor]] = [(), [t[:2] for t in stepper.tensors()]]
    for tensors in wrong:
        refuses(r"resume with the settings and the runs", stepper.load, tensors)


def test_muon_turns_hidden_layers_and_adamw_moves_the_rest() -> None:
    """A first step of Muon is nearly a rotation of .2 sqrt(the longer side) times the rate, one of
    AdamW the rate for every weight, whatever the size of the gradients."""
    draw, lr = torch.Generator().manual_seed(3), 0.01
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Conv2d(16, 24, 3), nn.Flatten(), nn.Linear(24, 12), nn.Linear(12, 2)
    )
    refuses("a convolution is not in channels_last", MuonAndAdamW, list(net.parameters()))
    for p in net.parameters():
        if p.ndim == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    before = [p.detach().clone() for p in net.parameters()]
    optimiser = MuonAndAdamW(list(net.parameters()))
    for p in net.parameters():
        p.grad = 100 * torch.randn(p.shape, generator=draw).to(p)
    optimiser.step(lr)
    turned = []
    for old, new in zip(before, net.parameters(), strict=True):
        step = (new - old).detach()
        if turn := old.ndim > 1 and min(old.shape[:2]) > 8:
            values = torch.linalg.svdvals(step.flatten(1)) / (
                0.2 * max(step.flatten(1).shape) ** 0.5
            )
            assert 0.5 * lr < values.min()
            assert values.max() < 1.3 * lr
        else:
            assert torch.allclose(step.abs(), torch.full_like(step, lr), rtol=0.05)
        turned.append(turn)
    assert turned == [False, False, True, False, True, False, False, False]
