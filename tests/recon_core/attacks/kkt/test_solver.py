"""The attack's loop: one by one or in a stack, weights shared or not, saves, planted points."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import (
    SETTINGS,
    Condition,
    KKTAttack,
    Objective,
)
from recon_core.attacks.kkt.solver import Attacked, reconstruct
from recon_core.optimisers import Optimiser
from recon_core.victims.network import Conv, Network
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.planted import planted_relu
from tests.recon_core.attacks.kkt.small_attacks import (
    CONDITIONS,
    CPU,
    MOMENTUM,
    RULES,
    Q,
    architecture,
    assert_near,
    assert_same,
    attack_with,
    different,
    problem,
    same,
)
from tests.recon_core.victims.torch_nets import torch_optimiser

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("condition", CONDITIONS)
def test_equals_torchs_optimisers_on_double_backprop(condition: Condition, rule: str) -> None:
    attack = attack_with(RULES[rule], condition, save_at=(1, 5))
    of, each = architecture(condition), different(attack_with(RULES[rule]))
    parameters, x, lam = problem(of)
    signs, classes = attack.signs(lam), attack.classes(of.n_outputs, CPU)
    ours = reconstruct(of, parameters, x, lam, attack=attack, settings=each)
    for q in range(Q):
        only = slice(q, q + 1)
        x_q, lam_q = x[only].clone().requires_grad_(), lam[only].clone().requires_grad_()
        optimisers = [
            torch_optimiser(dataclasses.replace(attack.optimiser, lr=float(lr[q])), [leaf])
            for lr, leaf in ((each.lr, x_q), (each.lam_lr, lam_q))
        ]
        for iteration in range(1, 6):
            for one in optimisers:
                one.zero_grad()
            outside = (x_q - x_q.clamp(-1, 1)).square().sum()
            short = (each.lam_min[q] - lam_q).relu().square().sum()
            (outside + 5 * short * (condition != "regression")).backward()
            c = lam_q.detach() * signs
            _, by_x, by_c = double_backprop.stationarity(
                of, parameters.rows(only), x_q.detach(), c, alpha=each.alpha[only], classes=classes
            )
            assert x_q.grad is not None
            assert lam_q.grad is not None
            x_q.grad += by_x
            lam_q.grad += by_c * signs
            for one in optimisers:
                one.step()
            if iteration in attack.save_at:
                saved = ours.x[q, attack.save_at.index(iteration)]
                torch.testing.assert_close(saved, x_q.detach()[0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(ours.lam[q], lam_q.detach()[0], rtol=1e-9, atol=1e-10)


def test_equal_hyperparameters_written_out_are_the_same_bits() -> None:
    # A number for all and a number each take different paths through the kernels.
    for rule in RULES.values():
        attack = attack_with(rule)
        of = architecture()
        parameters, x, lam = problem(of)
        once = reconstruct(of, parameters, x, lam, attack=attack, settings=same(attack))
        mixed = different(attack)
        for name in SETTINGS:
            getattr(mixed, name)[:2] = getattr(same(attack), name)[:2]
        each = reconstruct(of, parameters, x, lam, attack=attack, settings=mixed)
        assert_same(once, each, rows=[0, 1])
        assert not torch.equal(once.x[2], each.x[2])


@pytest.mark.parametrize("network", [None, Network(widths=(5,), conv=Conv(kernel=2, channels=3))])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_shared_weights_equal_copies_of_them(condition: Condition, network: Network | None) -> None:
    attack = attack_with(MOMENTUM, condition)
    of, each = architecture(condition, network), different(attack)
    parameters, x, lam = problem(of, n_runs=1)
    copies = parameters.map(lambda tensor: tensor.expand(Q, *tensor.shape[1:]).clone())
    shared = reconstruct(of, parameters, x, lam, attack=attack, settings=each)
    assert_near(
        shared, reconstruct(of, copies, x, lam, attack=attack, settings=each), tolerance=1e-12
    )


def test_saves_are_what_a_rerun_that_ends_there_would_give() -> None:
    of, attack = architecture(), attack_with(save_at=(1, 7, 30, 45))
    parameters, x, lam = problem(of)
    whole = reconstruct(of, parameters, x, lam, attack=attack, settings=same(attack))
    for index, iteration in enumerate(attack.save_at):
        short = dataclasses.replace(attack, save_at=(iteration,))
        part = reconstruct(of, parameters, x, lam, attack=short, settings=same(short))
        assert torch.equal(part.x[:, 0], whole.x[:, index])
        assert part.n_iterations.tolist() == [iteration] * Q
    assert torch.equal(part.lam, whole.lam)
    assert torch.equal(part.loss, whole.loss)
    assert whole.n_iterations.tolist() == [45] * Q


def test_the_loss_and_the_residual_are_those_of_the_last_candidates() -> None:
    of, attack = architecture(), attack_with(save_at=(5, 20))
    each = different(attack)
    parameters, x, lam = problem(of)
    before = Objective(of, parameters, attack=attack, settings=each)(x, lam)[0]
    attacked = reconstruct(of, parameters, x, lam, attack=attack, settings=each)
    last = attacked.x[:, -1]
    loss = Objective(of, parameters, attack=attack, settings=each)(last, attacked.lam)[0]
    assert loss is not None
    assert before is not None
    assert bool((attacked.loss < before).all())
    torch.testing.assert_close(attacked.loss, loss, rtol=1e-12, atol=0)
    value = double_backprop.stationarity(
        of, parameters, last, attacked.lam * attack.signs(lam), alpha=each.alpha
    )[0]
    expected = value / parameters.squared_norm()
    torch.testing.assert_close(attacked.residual, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("n_iterations", [1, 7, 49, 50, 157])
def test_progress_rises_to_one_and_nothing_is_modified(n_iterations: int) -> None:
    of, attack = architecture(), attack_with(save_at=(n_iterations,))
    parameters, x, lam = problem(of)
    each = different(attack)
    given = [x, lam, *parameters.tensors(), *(getattr(each, name) for name in SETTINGS)]
    before = [tensor.clone() for tensor in given]
    fractions: list[float] = []
    reconstruct(of, parameters, x, lam, attack=attack, settings=each, progress=fractions.append)
    assert fractions[-1] == 1.0
    assert fractions[0] > 0
    assert all(a <= b for a, b in itertools.pairwise(fractions))
    assert len(fractions) <= 60
    for tensor, copy in zip(given, before, strict=True):
        assert torch.equal(tensor, copy)


def test_refuses_a_start_of_other_attacks() -> None:
    of, attack = architecture(), attack_with()
    parameters, x, lam = problem(of, n_runs=1)
    with pytest.raises(ValueError, match=r"starting points of .* \(3, 2, 6, 12\) .*\(2, 2, 6, 12"):
        reconstruct(of, parameters, x, lam, attack=attack, settings=same(attack, 2))
    more = dataclasses.replace(attack, n_candidates=8)
    with pytest.raises(ValueError, match=r"starting points of .* \(3, 2, 6, 12\) .*\(3, 2, 8, 12"):
        reconstruct(of, parameters, x, lam, attack=more, settings=same(more))
    two, _, _ = problem(of, n_runs=2)
    with pytest.raises(ValueError, match="settings of 3 attacks on 2 victims"):
        reconstruct(of, two, x, lam, attack=attack, settings=same(attack))


PLANTED: dict[str, dict[str, Any]] = {
    "one hidden": {"n_hidden": 1, "n_pairs": 2, "d": 12, "norm": 1.4},
    "three hidden": {"n_hidden": 3},
    "bias": {"n_hidden": 1, "bias": True},
    "two outputs": {"n_hidden": 1, "n_outputs": 2},
    "convolution": {"n_hidden": 1, "conv": True},
    "convolution, two outputs": {"n_hidden": 1, "conv": True, "n_outputs": 2},
}


@pytest.mark.parametrize("name", list(PLANTED))
def test_a_planted_kkt_point_is_found_from_nearby_and_not_left(name: str) -> None:
    planted = planted_relu(**PLANTED[name])
    attack = KKTAttack(
        condition="binary" if planted.classes is None else "multiclass",
        n_candidates=planted.x.shape[1],
        lam_scale="none",
        lam_min=0.1,
        alpha=200.0,
        optimiser=Optimiser(rule="gd", lr=0.02, momentum=0.9),
        save_at=(5, 240),
    )
    lam = planted.c * attack.signs(planted.c)
    noise = torch.randn(planted.x.shape, generator=torch.Generator().manual_seed(0)).double()

    def run(x: Tensor, some: KKTAttack) -> Attacked:
        return reconstruct(
            planted.architecture, planted.parameters, x, lam, attack=some, settings=same(some, 1)
        )

    found = run(planted.x + 0.05 * noise, attack)
    assert float(found.residual) < 1e-9
    start = float(run(planted.x + 0.05 * noise, dataclasses.replace(attack, save_at=(1,))).residual)
    assert start > 1e-4
    if not name.startswith("convolution"):  # there only some combinations of pixels are determined
        # lam and |x| trade off: the condition knows only their product.
        product = found.x[0, -1] * found.lam[0, :, None]
        truth = planted.x[0] * lam[0, :, None]
        error = (product - truth)[planted.active].abs().max()
        assert float(error) < 1e-3 * float(truth.abs().max())
    for optimiser in (Optimiser(lr=0.01), Optimiser(rule="gd", lr=1e-3, momentum=0.9)):
        stays = run(planted.x, dataclasses.replace(attack, optimiser=optimiser, save_at=(10, 20)))
        for saved in stays.x.unbind(1):
            torch.testing.assert_close(saved, planted.x, rtol=0, atol=1e-8)
        torch.testing.assert_close(stays.lam, lam, rtol=0, atol=1e-8)
        assert float(stays.residual) < 1e-12
