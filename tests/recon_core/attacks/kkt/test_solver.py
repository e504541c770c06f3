"""The attack's loop: stacks, shared weights, saves, planted points, ends, and resuming."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import SETTINGS, Condition, KKTAttack, Objective
from recon_core.attacks.kkt.solver import Attacked, Solver
from recon_core.optimisers import Optimiser
from recon_core.victims.network import Conv, Network, Parameters
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.planted import plant
from tests.recon_core.attacks.kkt.small_attacks import (
    ADADELTA,
    CONDITIONS,
    CPU,
    GD,
    MOMENTUM,
    RULES,
    Q,
    architecture,
    assert_near,
    assert_same,
    attack_with,
    attacked,
    different,
    problem,
    row,
    same,
)
from tests.recon_core.drawing import refuses
from tests.recon_core.victims.torch_nets import torch_optimiser

rules = pytest.mark.parametrize("rule", list(RULES))


@rules
@pytest.mark.parametrize("condition", CONDITIONS)
def test_equals_torchs_optimisers_on_double_backprop(condition: Condition, rule: str) -> None:
    attack = attack_with(RULES[rule], condition, save_at=(1, 5))
    of, each = architecture(condition), different(attack_with(RULES[rule]))
    parameters, x, lam = problem(of)
    signs, classes = attack.signs(lam), attack.classes(of.n_outputs, CPU)
    ours = attacked(attack, each)
    for q in range(Q):
        only = slice(q, q + 1)
        x_q, lam_q = x[only].clone().requires_grad_(), lam[only].clone().requires_grad_()
        optimisers = [
            torch_optimiser(replace(attack.optimiser, lr=float(lr[q])), [leaf])
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


@rules
def test_equal_hyperparameters_written_out_are_the_same_bits(rule: str) -> None:
    # A number for all and a number each take different paths through the kernels.
    attack = attack_with(RULES[rule])
    mixed = different(attack)
    for name in SETTINGS:
        getattr(mixed, name)[:2] = getattr(same(attack), name)[:2]
    once, each = attacked(attack), attacked(attack, mixed)
    assert_same(once, each, rows=[0, 1])
    assert not torch.equal(once.x[2], each.x[2])


@pytest.mark.parametrize("network", [None, Network(widths=(5,), conv=Conv(kernel=2, channels=3))])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_shared_weights_equal_copies_of_them(condition: Condition, network: Network | None) -> None:
    attack = attack_with(MOMENTUM, condition)
    of, each = architecture(condition, network), different(attack)
    parameters, *start = problem(of, n_runs=1)
    copies = parameters.map(lambda tensor: tensor.expand(Q, *tensor.shape[1:]).clone())
    shared, own = (attacked(attack, each, of=of, start=(w, *start)) for w in (parameters, copies))
    assert_near(shared, own, tolerance=1e-12)


def test_saves_are_what_a_rerun_that_ends_there_would_give() -> None:
    attack = attack_with(save_at=(1, 7, 30, 45))
    whole = attacked(attack)
    for index, iteration in enumerate(attack.save_at):
        part = attacked(replace(attack, save_at=(iteration,)))
        assert torch.equal(part.x[:, 0], whole.x[:, index])
        assert part.n_iterations.tolist() == [iteration] * Q
    assert torch.equal(part.lam, whole.lam)
    assert torch.equal(part.loss, whole.loss)
    assert whole.n_iterations.tolist() == [45] * Q


def test_the_loss_and_the_residual_are_those_of_the_last_candidates() -> None:
    of, attack = architecture(), attack_with(save_at=(5, 20))
    each = different(attack)
    parameters, x, lam = problem(of)
    found = attacked(attack, each)
    last, objective = found.x[:, -1], Objective(of, parameters, attack=attack, settings=each)
    before, loss = (objective(*point)[0] for point in ((x, lam), (last, found.lam)))
    assert loss is not None
    assert before is not None
    assert bool((found.loss < before).all())
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=0)
    value = double_backprop.stationarity(
        of, parameters, last, found.lam * attack.signs(lam), alpha=each.alpha
    )[0]
    expected = value / parameters.squared_norm()
    torch.testing.assert_close(found.residual, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("n_iterations", [1, 7, 49, 50, 157])
def test_progress_rises_to_one_and_nothing_is_modified(n_iterations: int) -> None:
    attack = attack_with(save_at=(n_iterations,))
    start, each = problem(architecture()), different(attack)
    given = [*start[0].tensors(), *start[1:], *(getattr(each, name) for name in SETTINGS)]
    before = [tensor.clone() for tensor in given]
    fractions: list[float] = []
    attacked(attack, each, start=start, progress=fractions.append)
    assert fractions[-1] == 1.0
    assert fractions[0] > 0
    assert all(a <= b for a, b in itertools.pairwise(fractions))
    assert len(fractions) <= 60
    for tensor, copy in zip(given, before, strict=True):
        assert torch.equal(tensor, copy)


def test_refuses_a_start_of_other_attacks() -> None:
    attack, shared = attack_with(), problem(architecture(), n_runs=1)
    ours = r"starting points of .* \(3, 2, 6, 12\) .*"
    refuses(ours + r"\(2, 2, 6, 12", attacked, attack, same(attack, 2), start=shared)
    refuses(ours + r"\(3, 2, 8, 12", attacked, replace(attack, n_candidates=8), start=shared)
    two = problem(architecture(), n_runs=2)
    refuses("settings of 3 attacks on 2 victims", attacked, attack, start=two)


FOUND = (
    *("one hidden", "three hidden", "first-layer bias", "two outputs"),
    *("one convolution", "one convolution, two outputs"),
)


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_kkt_point_is_found_from_nearby_and_not_left(name: str) -> None:
    momentum = Optimiser(rule="gd", lr=0.02, momentum=0.9)
    planted, attack, lam = plant(name, alpha=200.0, optimiser=momentum, save_at=(5, 240))
    noise = torch.randn(planted.x.shape, generator=torch.Generator().manual_seed(0)).double()
    near = planted.x + 0.05 * noise

    def run(x: Tensor, some: KKTAttack) -> Attacked:
        start = (planted.parameters, x, lam)
        return attacked(some, same(some, 1), of=planted.architecture, start=start)

    found = run(near, attack)
    assert float(found.residual) < 1e-9
    assert float(run(near, replace(attack, save_at=(1,))).residual) > 1e-4
    if "convolution" not in name:  # there only some combinations of pixels are determined
        # lam and |x| trade off: the condition knows only their product.
        product = found.x[0, -1] * found.lam[0, :, None]
        truth = planted.x[0] * lam[0, :, None]
        error = (product - truth)[planted.active].abs().max()
        assert float(error) < 1e-3 * float(truth.abs().max())
    for optimiser in (Optimiser(lr=0.01), Optimiser(rule="gd", lr=1e-3, momentum=0.9)):
        stays = run(planted.x, replace(attack, optimiser=optimiser, save_at=(10, 20)))
        for saved in stays.x.unbind(1):
            torch.testing.assert_close(saved, planted.x, rtol=0, atol=1e-8)
        torch.testing.assert_close(stays.lam, lam, rtol=0, atol=1e-8)
        assert float(stays.residual) < 1e-12


def with_one_explosive(which: int = 1) -> tuple[Parameters, Tensor, Tensor]:
    parameters, x, lam = problem(architecture())
    x = x.clone()
    x[which] *= 1e200
    return parameters, x, lam


@pytest.mark.usefixtures("often")
@rules
def test_a_diverging_attack_leaves_and_the_others_go_on(rule: str) -> None:
    attack = attack_with(RULES[rule], save_at=(4, 10, 25, 45))
    calm = attacked(attack, different(attack))
    wild = attacked(attack, different(attack), start=with_one_explosive())
    assert wild.n_iterations.tolist() == [45, 10, 45]
    assert wild.usable().tolist() == [True, False, True]
    assert not bool(wild.loss[1].isfinite())
    assert not bool(wild.residual[1].isfinite())
    assert bool(wild.x[1, 2:].isnan().all())
    for q in (0, 2):
        # Bit for bit while the stack was the same; to rounding in a smaller one.
        assert torch.equal(wild.x[q, :2], calm.x[q, :2])
        assert_near(row(wild, q), row(calm, q), 1e-12)


@rules
def test_all_attacks_may_diverge(rule: str) -> None:
    attack = attack_with(RULES[rule], save_at=(10, 400))
    parameters, x, lam = problem(architecture())
    states: list[dict[str, Tensor]] = []
    fractions: list[float] = []
    given: dict[str, Any] = {
        "start": (parameters, x * 1e200, lam),
        "progress": fractions.append,
        "on_state": lambda solver: states.append(solver.state()),
        "state_every": 100,
    }
    whole = attacked(attack, different(attack), **given)
    assert whole.n_iterations.tolist() == [100] * Q
    assert not bool(whole.usable().any())
    assert bool(whole.x[:, 1].isnan().all())
    assert fractions[-1] == 1.0
    assert [int(state["iteration"]) for state in states] == [100], "nothing is left to go on with"
    assert len(states[0]["running"]) == 0
    assert_same(attacked(attack, different(attack), state=states[0], **given), whole)


@pytest.mark.usefixtures("often")
def test_a_loss_that_stays_high_stops_an_attack() -> None:
    free = replace(attack_with(save_at=(20, 25, 45)), stop_after=21)
    each, (parameters, *_) = same(free), problem(architecture())
    each.lr[1], each.lam_lr[1] = 1e-9, 1e-9
    calm = attacked(free, each)
    relative = calm.loss / parameters.squared_norm()
    limit = float(relative[1]) * 0.99
    assert bool((relative[[0, 2]] < limit).all())
    found = attacked(replace(free, stop_above=limit), each)
    assert calm.n_iterations.tolist() == [45, 45, 45]
    assert found.n_iterations.tolist() == [45, 30, 45]
    assert found.usable().tolist() == [True, False, True]
    assert torch.equal(found.x[1, :2], calm.x[1, :2]), "what it reached is kept"
    assert bool(found.x[1, 2].isnan().all())
    assert float(found.loss[1]) > limit * float(parameters.squared_norm()[1])
    assert bool(found.residual.isfinite().all())
    for q in (0, 2):
        assert_near(row(found, q), row(calm, q), 1e-12)


@pytest.mark.usefixtures("often")
def test_the_limit_is_relative_to_the_attacks_own_victim() -> None:
    # Attack 0, whose victim is much larger than the others, has left when the limit is looked at.
    still = Optimiser(rule="gd", lr=1e-12)
    free = replace(attack_with(still, save_at=(10, 30)), stop_after=20)
    parameters, x, lam = with_one_explosive(which=0)
    larger = parameters.map(lambda t: torch.cat([100 * t[:1], t[1:]]))
    lam[1] *= 30
    calm = attacked(free, start=(larger, x, lam))
    assert calm.n_iterations.tolist() == [10, 30, 30]
    relative = calm.loss / larger.squared_norm()
    limit = float(relative[1]) / 2
    assert float(relative[2]) < limit / 10
    found = attacked(replace(free, stop_above=limit), start=(larger, x, lam))
    assert found.n_iterations.tolist() == [10, 20, 30]


def test_an_attack_whose_multipliers_overflow_last_is_not_usable() -> None:
    attack = attack_with(GD, save_at=(1, 2))
    each = same(attack)
    each.lam_min[1], each.lam_lr[1] = 1e300, 0.0
    assert attacked(attack, each).usable().tolist() == [True] * Q
    each.lam_lr[1] = 1e300
    found = attacked(replace(attack, save_at=(1,)), each)
    assert bool(found.x.isfinite().all())
    assert not bool(found.lam[1].isfinite().any())
    assert found.usable().tolist() == [True, False, True]


@pytest.mark.usefixtures("often")
def test_a_judge_is_asked_from_stop_after_on_about_those_that_run() -> None:
    attack = replace(attack_with(save_at=(10, 30, 45)), stop_after=20)
    asked: list[tuple[int, list[int]]] = []
    seen: dict[tuple[int, int], Tensor] = {}

    def judge(iteration: int, candidates: Tensor, attacks: Tensor) -> Tensor:
        asked.append((iteration, attacks.tolist()))
        for which, value in zip(attacks.tolist(), candidates, strict=True):
            seen[iteration, which] = value.clone()
        if iteration == 20:
            return attacks == 0
        return (attacks == 2) & (iteration == 40)

    found = attacked(attack, judge=judge)
    assert asked == [(20, [0, 1, 2]), (30, [1, 2]), (40, [1, 2]), (45, [1])]
    assert found.n_iterations.tolist() == [20, 45, 40]
    assert found.usable().tolist() == [False, True, False]
    assert torch.equal(seen[30, 2], found.x[2, 1])
    assert torch.equal(seen[45, 1], found.x[1, 2])
    nan = found.x.isnan().flatten(2).all(2)
    assert nan.tolist() == [[False, True, True], [False] * 3, [False, False, True]]
    everyone = attacked(attack)
    assert_near(row(found, 1), row(everyone, 1), 1e-12)
    assert torch.equal(found.x[0, 0], everyone.x[0, 0])


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [*((rule, torch.float32) for rule in RULES), ("adadelta", torch.float64)],
)
def test_resumes_from_every_state_bit_for_bit(rule: str, dtype: torch.dtype) -> None:
    attack = replace(attack_with(RULES[rule], save_at=(4, 25, 45)), stop_after=20)
    each, (parameters, x, lam) = different(attack), problem(architecture(), dtype=dtype)
    x[1] *= 1e30 if dtype == torch.float32 else 1e200
    x[2] *= 9  # outside the box
    each.lam_min[1] = 0.2

    def judge(iteration: int, _candidates: Tensor, attacks: Tensor) -> Tensor:
        return (attacks == 0) & (iteration >= 30)

    states: list[bytes] = []

    def save(solver: Solver) -> None:
        states.append(safetensors.torch.save(solver.state()))

    given: dict[str, Any] = {"start": (parameters, x, lam), "judge": judge}
    whole = attacked(attack, each, on_state=save, state_every=5, **given)
    assert whole.n_iterations.tolist() == [30, 10, 45]
    assert_same(whole, attacked(attack, each, **given))
    running = []
    for k, state in enumerate(map(safetensors.torch.load, states), start=1):
        assert int(state["iteration"]) == 5 * k
        running.append(tuple(state["running"].tolist()))
        for _twice in range(2):  # a state is not changed by going on from it
            assert_same(attacked(attack, each, state=state, **given), whole)
    assert len(states) == 9
    assert set(running) == {(0, 1, 2), (0, 2), (2,)}


def some_state(attack: KKTAttack) -> dict[str, Tensor]:
    states: list[dict[str, Tensor]] = []
    attacked(attack, on_state=lambda solver: states.append(solver.state()), state_every=5)
    return states[0]


def test_refuses_a_state_that_is_not_its_own() -> None:
    attack, adadelta = (attack_with(rule, save_at=(5, 10)) for rule in (GD, ADADELTA))
    state, other = some_state(attack), some_state(adadelta)
    ours = r"a state of .* \(3, 2, 6, 12\) do not go .*"
    refuses(ours + r"\(3, 1, 6,", attacked, replace(attack, save_at=(10,)), state=state)
    shared = problem(architecture(), n_runs=1)
    refuses(ours + r"\(2, 2, 6,", attacked, attack, same(attack, 2), start=shared, state=state)
    for rule in ("momentum", "adadelta", "adam"):
        unlike = replace(attack, optimiser=RULES[rule])
        refuses("resume with the settings", attacked, unlike, state=state)
    for name in ("x", "iteration", "saved", "moments.x.0", "moments.x.1", "moments.lam.0"):
        rest = {key: value for key, value in other.items() if key != name}
        message = "resume with the" if "moments" in name else f"of an attack: {name} missing"
        refuses(message, attacked, adadelta, state=rest)
