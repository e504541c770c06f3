"""Several classes (KKT paper, eq. 12): the selector at ties, and two classes beside one."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import KKTAttack, Objective, relative_residual, settings_of
from recon_core.attacks.kkt.solver import Attacked, reconstruct
from recon_core.attacks.kkt.stationarity import Form, Stationarity
from recon_core.optimisers import Optimiser
from recon_core.victims.network import Architecture, Bias, Conv, Network, Parameters
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.planted import STEEP, planted_relu

Ties = Literal["none", "rivals", "all"]
SHAPE = (2, 3, 4)
UNEVEN = {2: 5, 3: 7, 10: 13}
FORMS: tuple[Form, ...] = ("gram", "direct")
CONVS = [None, Conv(kernel=2, channels=3)]
ALPHA = torch.tensor([3.0, 0.7], dtype=torch.float64)


def candidate_classes(n_outputs: int, n_candidates: int) -> Tensor:
    attack = KKTAttack(condition="multiclass", n_candidates=n_candidates)
    classes = attack.classes(n_outputs, torch.device("cpu"))
    assert classes is not None
    return classes


def several_classes(
    conv: Conv | None, n_outputs: int, ties: Ties
) -> tuple[Architecture, Parameters, Tensor, Tensor]:
    """Two attacks on one victim: (architecture, weights, x, c), all small multiples of 1/8.

    So every output is exact and ties are exact. Two neurons below the outputs are the same; the
    outputs weigh them differently but with the same sum, so they are equal while their gradients
    are not. With "rivals" class 0 has another weight on a third neuron, and is not part of it.
    """
    generator = torch.Generator().manual_seed(n_outputs)

    def eighths(*shape: int) -> Tensor:
        return torch.randint(-6, 7, shape, generator=generator).double() / 8

    architecture = Network(widths=(6,), conv=conv).on(SHAPE, n_outputs)
    parameters = architecture.initial([generator], dtype=torch.float64)
    parameters = parameters.map(lambda t: eighths(*t.shape))
    below, last = parameters.weights[-2], parameters.weights[-1]
    if ties != "none":
        below[:, 1] = below[:, 0]
        place = torch.arange(n_outputs) / 8
        last[:] = last[:, :1].clone()
        last[0, :, 0], last[0, :, 1] = 0.5 + place, -0.25 - place
    if ties == "rivals":
        last[0, 0, 2] += 0.5
    n_candidates = UNEVEN[n_outputs]
    return (
        architecture,
        parameters,
        eighths(2, n_candidates, architecture.d),
        eighths(2, n_candidates),
    )


def lowest_rivals(output: Tensor, classes: Tensor) -> list[int]:
    """The strongest class but the own, the lowest of equals; written without torch's max."""
    rivals = []
    for row, own in zip(output.tolist(), classes.tolist(), strict=True):
        others = [j for j in range(len(row)) if j != own]
        rivals.append(min(others, key=lambda j: (-row[j], j)))
    return rivals


def highest_of_equals(output: Tensor, classes: Tensor | None) -> Tensor:
    """phi with the other rule for ties."""
    assert classes is not None
    flipped = (output.shape[1] - 1 - classes).tolist()
    rivals = [output.shape[1] - 1 - j for j in lowest_rivals(output.flip(1), torch.tensor(flipped))]
    rows = torch.arange(len(output))
    return output[rows, classes] - output[rows, rivals]


def relative(ours: Tensor, truth: Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


@pytest.mark.parametrize("ties", ["none", "rivals", "all"])
@pytest.mark.parametrize("n_outputs", UNEVEN)
@pytest.mark.parametrize("conv", CONVS, ids=["dense", "conv"])
def test_the_selector_equals_double_backprop_also_where_classes_tie(
    conv: Conv | None, n_outputs: int, ties: Ties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runner-up classes that tie the lowest is the rival, and gets all of lam_i.

    The own class is never the rival, also where it ties with it. A tie is not averaged over: the
    objective jumps there, and the other rule for ties is another value.
    """
    architecture, parameters, x, c = several_classes(conv, n_outputs, ties)
    classes = candidate_classes(n_outputs, UNEVEN[n_outputs])
    assert len(classes.bincount().unique()) == 2, "the classes must have unequal numbers"
    expected = double_backprop.stationarity(
        architecture, parameters, x, c, alpha=ALPHA, classes=classes
    )
    for form in FORMS:
        closed = Stationarity(
            architecture,
            parameters,
            n_candidates=len(classes),
            alpha=ALPHA,
            classes=classes,
            form=form,
        )
        for ours, truth in zip(closed(x, c), expected, strict=True):
            assert ours is not None
            assert relative(ours, truth) < 1e-12
        for output, selected in zip(closed.layers[-1].u, closed.margin.d, strict=True):
            chosen = torch.zeros_like(output).scatter(1, classes[:, None], 1.0)
            chosen[torch.arange(len(classes)), lowest_rivals(output, classes)] = -1
            assert torch.equal(selected, chosen)
            if ties == "all":
                assert bool((output == output[:, :1]).all())
            if ties == "rivals":
                assert bool((output[:, 1:] == output[:, 1:2]).all())
                assert bool((output[:, 0] != output[:, 1]).any())
    monkeypatch.setattr(double_backprop, "margins", highest_of_equals)
    other = double_backprop.stationarity(
        architecture, parameters, x, c, alpha=ALPHA, classes=classes
    )
    if ties != "none" and n_outputs > 2:
        assert relative(other[0], expected[0]) > 1e-3
        assert relative(other[1], expected[1]) > 1e-3
    else:
        assert relative(other[0], expected[0]) < 1e-12


def two_outputs(parameters: Parameters, factor: float) -> Parameters:
    """The last layer W as the two rows -factor W and +factor W."""

    def pair(last: Tensor | None) -> Tensor | None:
        return None if last is None else torch.cat([-factor * last, factor * last], 1)

    weight, bias = pair(parameters.weights[-1]), pair(parameters.biases[-1])
    assert weight is not None
    return Parameters((*parameters.weights[:-1], weight), (*parameters.biases[:-1], bias))


def one_output(
    bias: Bias, conv: Conv | None, n_candidates: int = 6
) -> tuple[Network, Parameters, Tensor, Tensor]:
    """(network, weights of one victim, x and lam of two attacks)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    network = Network(widths=(7, 5), bias=bias, conv=conv)
    skeleton = network.on(SHAPE).initial([generator], dtype=torch.float64)
    parameters = skeleton.map(lambda t: normal(*t.shape) / t.shape[-1] ** 0.5)
    x = 0.3 * normal(2, n_candidates, network.on(SHAPE).d)
    return network, parameters, x, normal(2, n_candidates).abs()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("conv", CONVS, ids=["dense", "conv"])
@pytest.mark.parametrize("bias", ["none", "first", "all"])
def test_two_classes_are_one_output_split_by_the_root_of_two(
    bias: Bias, conv: Conv | None, form: Form
) -> None:
    """Two outputs of rows -b W and +b W have the KKT conditions of one only if 2 b^2 = 1.

    They make phi_1 - phi_0 = 2 b phi, so multipliers c / 2b leave the gradients below the last
    layer as they are. That layer W has S = sum_i c_i a_i and contributes

        2 b^2 || W - S / 2b^2 ||^2    instead of    || W - S ||^2,

    the same for every S only if 2 b^2 = 1. With b = 1 / sqrt(2) and c / sqrt(2), then, value,
    ||theta||^2 and gradient in x are those of one output, the gradient in c sqrt(2) times. With
    b = 1/2, where phi_1 - phi_0 = phi, the value exceeds it by ||S||^2 - ||W||^2 / 2.
    """
    network, parameters, x, lam = one_output(bias, conv)
    classes = candidate_classes(2, 6)
    y = 2 * classes.double() - 1
    architecture = network.on(SHAPE)
    one = Stationarity(architecture, parameters, n_candidates=6, alpha=ALPHA, form=form)
    value, by_x, by_c = one(x, y * lam)
    assert value is not None
    both = parameters.map(lambda t: t.expand(2, *t.shape[1:]))
    a = architecture.forward(both, x).inputs[-1]
    weighed, last = ((y * lam)[:, :, None] * a).sum(1), parameters.weights[-1][0]
    if bias == "all":
        assert parameters.biases[-1] is not None
        weighed = torch.cat([weighed, (y * lam).sum(1, keepdim=True)], 1)
        last = torch.cat([last, parameters.biases[-1]], 1)
    for factor in (0.5, 1 / math.sqrt(2), 1.3):
        split = two_outputs(parameters, factor)
        two = Stationarity(
            network.on(SHAPE, 2), split, n_candidates=6, alpha=ALPHA, classes=classes, form=form
        )
        value_2, by_x_2, by_c_2 = two(x, lam / (2 * factor))
        assert value_2 is not None
        square = 2 * factor**2
        more = square * (last - weighed / square).square().sum(1) - (last - weighed).square().sum(1)
        torch.testing.assert_close(value_2, value + more, rtol=1e-12, atol=0)
        same = factor == 1 / math.sqrt(2)
        assert (relative(value_2, value) < 1e-13) == same
        assert (relative(by_x_2, by_x) < 1e-12) == same
        assert (relative(by_c_2 * y, math.sqrt(2) * by_c) < 1e-12) == same
        assert (relative(split.squared_norm(), parameters.squared_norm()) < 1e-14) == same
        if factor == 0.5:
            half = weighed.square().sum(1) - last.square().sum() / 2
            torch.testing.assert_close(more, half, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n_hidden", [1, 2, 3])
def test_at_a_kkt_point_equal_functions_are_not_equal_conditions(n_hidden: int) -> None:
    """There all L layers have the same norm and S = W: with phi_1 - phi_0 = phi a residual of
    ||W||^2 / 2 remains, 1 / (2 L - 1) of ||theta||^2; with phi_1 - phi_0 = sqrt(2) phi none."""
    planted = planted_relu(n_hidden)
    attack = KKTAttack(
        condition="multiclass", n_candidates=planted.x.shape[1], lam_scale="none", alpha=STEEP
    )
    each = settings_of(attack, [torch.Generator()])
    for factor, left in ((0.5, 1 / (2 * n_hidden + 1)), (1 / math.sqrt(2), 0.0)):
        residual = relative_residual(
            dataclasses.replace(planted.architecture, n_outputs=2),
            two_outputs(planted.parameters, factor),
            planted.x,
            planted.c.abs() / (2 * factor),
            attack=attack,
            settings=each,
        )
        assert float(residual) == pytest.approx(left, abs=1e-14)


def pair_of_runs(lam_min: float, optimiser: Optimiser) -> tuple[Attacked, Attacked]:
    """Attacks on one output and on its two rows, lam, its rate and lam_min in proportion."""
    network, parameters, x, lam = one_output("first", None)
    root = math.sqrt(2)
    slower = 2 if optimiser.rule == "gd" else root
    binary = KKTAttack(
        n_candidates=6,
        lam_scale="none",
        lam_min=lam_min,
        optimiser=optimiser,
        lam_lr=0.02,
        save_at=(1, 10, 40),
    )
    multiclass = dataclasses.replace(
        binary, condition="multiclass", lam_min=lam_min / root, lam_lr=0.02 / slower
    )
    found = []
    for attack, of, victim, start in (
        (binary, network.on(SHAPE), parameters, lam),
        (multiclass, network.on(SHAPE, 2), two_outputs(parameters, 1 / root), lam / root),
    ):
        each = settings_of(attack, [torch.Generator()] * 2)
        found.append(reconstruct(of, victim, x, start, attack=attack, settings=each))
    return found[0], found[1]


GD = Optimiser(rule="gd", lr=0.01, momentum=0.9)
ADAM = Optimiser(rule="adam", lr=0.01, eps=1e-300)


@pytest.mark.parametrize("optimiser", [GD, ADAM], ids=["gd", "adam"])
def test_two_classes_are_attacked_along_the_path_of_one_output(optimiser: Optimiser) -> None:
    """lam / sqrt(2) is moved by the same path if its rate is that of lam over 2, or, under Adam,
    which does not see the size of a gradient, over sqrt(2); as long as lam stays above lam_min."""
    one, two = pair_of_runs(-10.0, optimiser)
    assert relative(one.x[:, 0], one.x[:, -1]) > 0.1
    assert relative(two.x, one.x) < 1e-9
    assert relative(math.sqrt(2) * two.lam, one.lam) < 1e-9
    assert relative(two.loss, one.loss) < 1e-9
    assert relative(two.residual, one.residual) < 1e-9
    below, half = pair_of_runs(1.0, optimiser)
    assert relative(half.x, below.x) > 1e-3, "the penalty of lam has half the weight"


def test_of_two_classes_the_penalty_of_lam_has_half_the_weight() -> None:
    """5 relu(lam_min - lam)^2 is quadratic in what the split divides by sqrt(2)."""
    network, parameters, x, lam = one_output("none", None)
    losses = []
    for lam_min in (-10.0, 2.0):
        attack = KKTAttack(n_candidates=6, lam_scale="none", lam_min=lam_min)
        several = dataclasses.replace(
            attack, condition="multiclass", lam_min=lam_min / math.sqrt(2)
        )
        one, two = (settings_of(some, [torch.Generator()] * 2) for some in (attack, several))
        split = two_outputs(parameters, 1 / math.sqrt(2))
        losses += [
            Objective(network.on(SHAPE), parameters, attack=attack, settings=one)(x, lam)[0],
            Objective(network.on(SHAPE, 2), split, attack=several, settings=two)(
                x, lam / math.sqrt(2)
            )[0],
        ]
    free_1, free_2, held_1, held_2 = (loss for loss in losses if loss is not None)
    torch.testing.assert_close(free_2, free_1, rtol=1e-12, atol=0)
    assert bool((held_1 - free_1 > 1).all())
    torch.testing.assert_close(held_2 - free_2, (held_1 - free_1) / 2, rtol=1e-10, atol=0)
