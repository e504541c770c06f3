"""Weight decay (KKT paper, eqs. 14, 15): multipliers of either sign, convolutions, losses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import (
    STEEP,
    Condition,
    KKTAttack,
    Objective,
    relative_residual,
    settings_of,
)
from recon_core.attacks.kkt.solver import Attacked, reconstruct
from recon_core.attacks.kkt.stationarity import Form
from recon_core.optimisers import Optimiser
from recon_core.victims.diagnostics import (
    all_rivals,
    explained,
    gram_systems,
    margin_gradients,
)
from recon_core.victims.losses import Loss
from recon_core.victims.network import Conv, Network, Parameters
from tests.recon_core.attacks.kkt import double_backprop
from tests.recon_core.attacks.kkt.planted import Planted, decayed, planted_relu, planted_signs

FORMS: tuple[Form, ...] = ("gram", "direct")
DECAY = 0.02


def residual(
    planted: Planted, lam: Tensor, attack: KKTAttack, alpha: float | None = STEEP
) -> float:
    """With ReLU's own derivative, or with the attack's surrogate of it."""
    found = relative_residual(
        planted.architecture,
        planted.parameters,
        planted.x,
        lam,
        attack=attack,
        settings=settings_of(attack, [torch.Generator()]),
        alpha=alpha,
    )
    return float(found)


def attack_on(planted: Planted, condition: Condition = "regression") -> KKTAttack:
    return KKTAttack(
        condition=condition,
        n_candidates=planted.x.shape[1],
        lam_scale="none",
        lam_min=0.1,
        alpha=200.0,
        optimiser=Optimiser(rule="gd", lr=0.003, momentum=0.9),
        save_at=(2000,),
    )


def attacked(planted: Planted, x: Tensor, lam: Tensor, attack: KKTAttack) -> Attacked:
    each = settings_of(attack, [torch.Generator()])
    return reconstruct(
        planted.architecture, planted.parameters, x, lam, attack=attack, settings=each
    )


MIXED = {"one of each wrong": (1.0, -1.0, -1.0, 1.0), "one wrong": (1.0, -1.0, 1.0, 1.0)}
ALL_WRONG = {"all wrong": (1.0, 1.0, -1.0, -1.0)}


@pytest.mark.parametrize("signs", (MIXED | ALL_WRONG).values(), ids=list(MIXED | ALL_WRONG))
def test_free_multipliers_find_planted_signs_and_the_binary_ones_cannot(
    signs: tuple[float, ...],
) -> None:
    """From small random lam, some with the wrong sign. The names say which signs are wrong for a
    binary attack, whose first half has y = -1: with its penalty it ends where lam is torn both
    ways, far above a residual of 0."""
    planted = planted_signs(signs)
    generator = torch.Generator().manual_seed(1)
    x = planted.x + 0.02 * torch.randn(planted.x.shape, generator=generator).double()
    start = 0.1 * torch.randn(planted.c.shape, generator=generator).double()
    assert bool((start * planted.c < 0).any()), "a start with a wrong sign"
    assert float((start.abs() / planted.c.abs()).max()) < 0.6
    free = attack_on(planted)
    assert residual(planted, planted.c, free) < 1e-14
    found = attacked(planted, x, start, free)
    assert float(found.residual) < 2e-5
    assert torch.equal(found.lam.sign(), planted.c.sign())
    torch.testing.assert_close(found.lam, planted.c, rtol=0.04, atol=0)
    binary = attack_on(planted, "binary")
    y = binary.signs(start)
    held = attacked(planted, x, start * y, dataclasses.replace(binary, save_at=(800,)))
    wrong = (planted.c * y < 0)[0]
    assert float(held.residual) > 500 * float(found.residual)
    assert bool((held.lam[0, wrong].abs() < 0.6 * planted.c[0, wrong].abs()).all())


@pytest.mark.parametrize("signs", (MIXED | ALL_WRONG).values(), ids=list(MIXED | ALL_WRONG))
def test_what_a_binary_attack_leaves_of_wrong_signs(signs: tuple[float, ...]) -> None:
    """The gradients of the planted images are orthogonal, so lam >= 0 leaves at least the part of
    theta that belongs to images of the other sign; with all of it wrong, all of theta. The planted
    lam itself costs 5 (lam_min + |c_i|)^2 for each."""
    planted = planted_signs(signs)
    binary = attack_on(planted, "binary")
    truth = planted.c * binary.signs(planted.c)
    wrong = truth < 0
    neurons = sum(
        t[0].square().reshape(len(signs), -1).sum(1)
        for t in (planted.parameters.tensors()[0], planted.parameters.tensors()[1])
    ) + planted.parameters.weights[1].square().view(-1)
    share = float((neurons * wrong[0]).sum() / neurons.sum())
    assert residual(planted, truth.clamp_min(0.0), binary) == pytest.approx(share, abs=1e-13)
    assert (share == 1.0) == bool(wrong.all())
    for small in (1e-6, 1e-2, 0.3):
        assert residual(planted, torch.where(wrong, small, truth), binary) > share
    steep = dataclasses.replace(binary, alpha=2000.0)
    each = settings_of(steep, [torch.Generator()])
    objective = Objective(planted.architecture, planted.parameters, attack=steep, settings=each)
    value = objective(planted.x, truth)[0]
    assert value is not None
    expected = 5 * float((steep.lam_min - truth[wrong]).square().sum())
    assert float(value) == pytest.approx(expected, rel=1e-10)


LEAKY: dict[str, Any] = {"activation": "leaky_relu", "leak": 0.1, "init_std_first": None}


def bright_and_dark(shape: tuple[int, int, int], n_images: int) -> tuple[Tensor, Tensor]:
    """Noisy images, light and dark: no patch of one is near a right angle to one of the other."""
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(n_images // 2)
    noise = torch.randn(n_images, *shape, generator=generator, dtype=torch.float64).flatten(1)
    return 0.3 * y[:, None] + 0.1 * noise, y


@functools.cache
def decayed_convolution(kernel: int) -> Planted:
    """conv(kernel, 4)-5-1, trained on 6 images of 5 x 5 until it is stationary.

    Leaky ReLU: with ReLU neurons end at exactly 0, see below.
    """
    network = Network(widths=(5,), conv=Conv(kernel=kernel, channels=4), **LEAKY)
    architecture = network.on((1, 5, 5))
    x, y = bright_and_dark(architecture.shape, 6)
    parameters, c = decayed(architecture, x, y, loss=Loss(kind="mse"), decay=DECAY)
    active = torch.ones(len(x), dtype=torch.bool)
    return Planted(architecture, parameters, x[None], c.T.contiguous(), active, None)


@functools.cache
def planted_convolution(kernel: int) -> Planted:
    """conv(kernel, 2)-1-1 on images of one colour, 5 x 5, of which the halves are idle."""
    return planted_relu(1, n_pairs=2, conv=True, kernel=kernel, side=5)


@pytest.mark.parametrize(
    ("make", "kernel", "form"),
    [
        (decayed_convolution, 3, "gram"),
        (decayed_convolution, 5, "direct"),
        (planted_convolution, 3, "direct"),
        (planted_convolution, 5, "gram"),
    ],
)
def test_a_convolutions_planted_point_has_no_residual_and_is_found(
    make: Callable[[int], Planted], kernel: int, form: Form
) -> None:
    """With a kernel of 3 and one as large as the image (KKT paper, appendix F). What is found is a
    point without residual; a convolution does not determine every pixel."""
    planted = make(kernel)
    attack = dataclasses.replace(
        attack_on(planted),
        form=form,
        alpha=2000.0,
        optimiser=Optimiser(rule="gd", lr=0.04, momentum=0.9),
        save_at=(500,),
    )
    assert residual(planted, planted.c, attack) < 1e-14
    assert residual(planted, 1.1 * planted.c, attack) > 1e-4
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(planted.x.shape, generator=generator).double()
    near = planted.x + 0.02 * noise
    start = residual(dataclasses.replace(planted, x=near), planted.c, attack)
    found = attacked(planted, near, planted.c, attack)
    assert start > 1e-4
    assert float(found.residual) < 1e-3 * start
    assert float(found.residual_relu) < 1e-3 * start


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_of_the_images_size_is_a_dense_layer(form: Form) -> None:
    """The KKT paper calls it "essentially an MLP" (appendix F): the same value and gradients."""
    planted = decayed_convolution(5)
    dense = Network(widths=(4, 5), **LEAKY).on((1, 5, 5))
    attack = dataclasses.replace(attack_on(planted), form=form, alpha=20.0)
    each = settings_of(attack, [torch.Generator()])
    x, lam = planted.x + 0.05, 1.1 * planted.c
    values = [
        list(Objective(of, planted.parameters, attack=attack, settings=each)(x, lam))
        for of in (planted.architecture, dense)
    ]
    for one, other in zip(*values, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


LOSSES = {
    "bce": Loss(),
    "mse": Loss(kind="mse"),
    "power": Loss(kind="power"),
    "huber": Loss(kind="huber", delta=0.3),
}
NETWORKS = {
    "one layer": Network(widths=(8,), init_std_first=None),
    "two layers, leaky": Network(widths=(8, 6), bias="first", **LEAKY),
    "biases": Network(widths=(8,), bias="all", init_std_first=None),
}


def derivative(loss: Loss, phi: Tensor, y: Tensor) -> Tensor:
    """l'(phi, y) of every image, by hand."""
    error = phi - y
    if loss.kind == "bce":
        return -y / (1 + torch.exp(y * phi))
    if loss.kind == "mse":
        return 2 * error
    if loss.kind == "power":
        return loss.power * error.abs() ** (loss.power - 1) * error.sign()
    return error.clamp(-loss.delta, loss.delta)


@pytest.mark.parametrize(
    ("name", "network"),
    [
        *(("mse", network) for network in NETWORKS),
        ("bce", "two layers, leaky"),
        ("power", "biases"),
        ("huber", "one layer"),
    ],
)
def test_weight_decay_makes_eq_14_exact(name: str, network: str) -> None:
    """Where loss / n + decay/2 ||theta||^2 is stationary, lam_i = -l'_i / (n decay)."""
    loss, architecture = LOSSES[name], NETWORKS[network].on((1, 4, 5))
    x, y = bright_and_dark(architecture.shape, 8)
    parameters, c = decayed(architecture, x, y, loss=loss, decay=DECAY)
    phi = architecture.forward(parameters, x[None]).output[0, :, 0]
    lam = -derivative(loss, phi, y) / (len(x) * DECAY)
    torch.testing.assert_close(c[:, 0], lam, rtol=1e-12, atol=1e-14)
    active = torch.ones(len(x), dtype=torch.bool)
    planted = Planted(architecture, parameters, x[None], lam[None], active, None)
    for form in FORMS:
        attack = dataclasses.replace(attack_on(planted), form=form)
        assert residual(planted, planted.c, attack) < 1e-12
        of_the_sum = planted.c / len(x)  # the KKT paper has the decay beside the sum: n times ours
        assert residual(planted, of_the_sum, attack) > 0.1
        assert residual(planted, planted.c.flip(1), attack) > 1e-3


def test_a_neuron_at_exactly_0_is_off_in_training_and_half_on_at_a_finite_alpha() -> None:
    """Two hidden layers of ReLU with weight decay end with neurons that no active one feeds, at 0
    for the images of the other label. With the derivative of training, 0, eq. 14 is exact; with
    sigma(alpha 0) = 1/2, whatever the alpha, half the gradient of such a neuron's weights remains:
    1/4 of one layer's ||theta||^2, a third of the whole, where all images of a label share one.
    """
    architecture = Network(widths=(8, 6), bias="first", init_std_first=None).on((1, 4, 5))
    x, y = bright_and_dark(architecture.shape, 8)
    parameters, c = decayed(architecture, x, y, loss=Loss(kind="mse"), decay=DECAY)
    pre = architecture.forward(parameters, x[None]).pre
    assert float(pre[1].abs().min()) < 1e-12
    systems = gram_systems(architecture, parameters, x, torch.ones(len(x), 1))
    gram, target = (sum(system[i] for system in systems) for i in (0, 1))
    square = float(parameters.squared_norm())
    lam = c[:, 0]
    assert abs(square - 2 * float(lam @ target) + float(lam @ gram @ lam)) / square < 1e-12
    active = torch.ones(len(x), dtype=torch.bool)
    planted = Planted(architecture, parameters, x[None], lam[None], active, None)
    attack = attack_on(planted)
    assert residual(planted, planted.c, attack) < 1e-12
    finite = dataclasses.replace(attack, alpha=1e12)
    assert residual(planted, planted.c, finite, None) == pytest.approx(1 / 12, abs=1e-9)


@functools.cache
def three_classes() -> tuple[Network, Parameters, Tensor, Tensor, Tensor]:
    """(network, weights, x, classes, minus the loss's gradient over the decay)."""
    generator = torch.Generator().manual_seed(1)
    network = Network(widths=(8,), init_std_first=None)
    corners = torch.linalg.qr(torch.randn(20, 20, generator=generator, dtype=torch.float64)).Q[:3]
    classes = torch.arange(9) % 3
    noise = torch.randn(9, 20, generator=generator, dtype=torch.float64)
    x = (corners - corners.mean(0))[classes] + 0.11 * noise
    loss = Loss(kind="ce")
    parameters, c = decayed(network.on((1, 4, 5), 3), x, classes, loss=loss, decay=0.01)
    return network, parameters, x, classes, c


def test_with_classes_eq_14_is_the_sum_over_all_rivals() -> None:
    """theta = sum_i sum_{j != y_i} p_ij / (n decay) grad (phi_{y_i} - phi_j), exactly.

    Eq. 12's single rival is then only an approximation: here both rivals of every image are equal
    to rounding, and the loss pushes against both. With three classes and nine images, measured,
    the best lam >= 0 for one rival each leaves 0.10 of ||theta||^2, and lam_i = (1 - p_i) /
    (n decay), all of it given to one, 0.12; which of the equals it is, rounding decides.
    """
    network, parameters, x, classes, c = three_classes()
    architecture = network.on((1, 4, 5), 3)
    output = architecture.forward(parameters, x[None]).output[0]
    p = torch.softmax(output, 1)
    one_hot = torch.eye(3, dtype=torch.float64)[classes]
    torch.testing.assert_close(c, (one_hot - p) / (len(x) * 0.01), rtol=1e-9, atol=1e-12)
    state = architecture.to_state_dict(parameters)
    theta = [tensor.clone().requires_grad_() for tensor in state.values()]
    phi = double_backprop.outputs(architecture, theta, x, 1e12)
    gradients = torch.autograd.grad((c * phi).sum(), theta)
    left = sum(
        float((t.detach() - g).square().sum()) for t, g in zip(theta, gradients, strict=True)
    )
    assert left / float(parameters.squared_norm()) < 1e-12
    pairs = gram_systems(
        architecture, parameters, x.repeat_interleave(2, 0), all_rivals(classes, 3)
    )
    assert explained(pairs, free_sign=False).residual < 1e-12
    single = gram_systems(architecture, parameters, x, margin_gradients(output, classes))
    best = explained(single, free_sign=False)
    strongest, other = output.scatter(1, classes[:, None], -torch.inf).topk(2, 1).values.T
    assert float((strongest - other).max()) < 1e-12
    order = classes.argsort(stable=True)
    attack = KKTAttack(condition="multiclass", n_candidates=9, lam_scale="none")
    planted = Planted(
        architecture,
        parameters,
        x[None, order],
        best.lam[None, order],
        torch.ones(9, dtype=torch.bool),
        classes[order],
    )
    natural = c.clamp_min(0.0).sum(1)[None, order]
    left_over = residual(planted, natural, attack)
    assert residual(planted, planted.c, attack) == pytest.approx(best.residual, rel=1e-9)
    assert 0.05 < best.residual < left_over < 0.2
