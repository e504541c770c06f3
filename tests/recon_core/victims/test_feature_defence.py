"""MixCon in the training of classifiers: gradients, effects, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Conv, Parameters
from recon_core.victims.separability import (
    MixCon,
    defence_gradient,
    feature_defence,
    mixcon,
)
from recon_core.victims.training import Trained, Training, train
from tests.recon_core.drawing import refuses
from tests.recon_core.victims.small_victims import (
    GD,
    architecture,
    assert_close,
    assert_same,
    data,
    of,
    trained,
    victims,
    wild,
)
from tests.recon_core.victims.torch_nets import torch_loss, torch_net

STEP = Optimiser(rule="gd")
DEFENCES = {
    "mixcon": MixCon(lam=0.7, beta=0.01),
    "mixcon, cut off": MixCon(lam=0.7, beta=1.0, eps=0.9),
    "mixcon of h itself": MixCon(lam=0.7, beta=0.01, normalise=False),
}


def penalty(defence: MixCon, h: Tensor, classes: Tensor) -> Tensor:
    """The mean of eq. 1 over all pairs of images (n, m) of different classes, by `mixcon`."""
    first, second = (classes[:, None] != classes).triu().nonzero().unbind(1)
    pairs = torch.stack([h[first], h[second]], 1)[None]
    beta = torch.full((1,), defence.beta, dtype=h.dtype)
    return mixcon(pairs, beta, normalise=defence.normalise, eps=defence.eps)[0]


@pytest.mark.parametrize("n_classes", [2, 5])
@pytest.mark.parametrize("case", DEFENCES)
def test_the_gradient_is_that_of_the_loss(case: str, n_classes: int) -> None:
    """Also where classes are of different sizes."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(3, 17, 6, generator=generator, dtype=torch.float64).relu()
    h[0, 1] = 0.0  # a ReLU layer can be all 0
    h[2, :4] *= 1e-9
    classes = torch.arange(17) % n_classes
    classes = torch.stack([classes, classes.flip(0), (classes * classes) % n_classes])
    leaf = h.clone().requires_grad_()
    total = sum(penalty(DEFENCES[case], *own) for own in zip(leaf, classes, strict=True))
    (expected,) = torch.autograd.grad(total, leaf)  # type: ignore[arg-type]
    norms = h.norm(dim=-1, keepdim=True)
    scale = torch.where(norms > 0, norms, 1)  # the gradient is as large as a feature is small
    ours = defence_gradient(DEFENCES[case], h, classes[:, :, None] != classes[:, None])
    torch.testing.assert_close(ours * scale, expected * scale, rtol=1e-9, atol=1e-12)


def test_where_distances_are_cut_off_there_is_no_gradient() -> None:
    """Features that have collapsed, or are further apart than 1 / eps."""
    across = ~torch.eye(2, dtype=torch.bool)[None]
    u = torch.nn.functional.normalize(torch.rand(1, 1, 5, dtype=torch.float64), dim=2)
    collapsed = u.expand(1, 2, 5) + 1e-6 * torch.rand(1, 2, 5, dtype=torch.float64)
    assert not bool(defence_gradient(MixCon(eps=1e-8), collapsed, across).any())
    assert bool(defence_gradient(MixCon(eps=1e-13), collapsed, across).any())
    apart = torch.tensor([[[3.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    for eps, moves in ((0.2, False), (0.1, True)):
        defence = MixCon(beta=1.0, eps=eps, normalise=False)
        assert bool(defence_gradient(defence, apart, across).any()) == moves


def torch_step(
    arch: Architecture, parameters: Parameters, x: Tensor, y: Tensor, loss: Loss,
    defence: MixCon, layer: int,
) -> list[Tensor]:  # fmt: skip
    """The gradient of the whole of it by autograd through torch's own layers."""
    stacks = []
    for row in range(len(x)):
        net, a, hidden = torch_net(arch, parameters, row), x[row], list[Tensor]()
        for module in net:  # a convolution has a Flatten behind its activation
            a = module(a)
            if isinstance(module, (torch.nn.ReLU, torch.nn.LeakyReLU, torch.nn.GELU)):
                hidden.append(a.flatten(1))
        classes = y[row] if arch.n_outputs > 1 else (y[row] > 0).long()
        extra = defence.lam * penalty(defence, hidden[layer - 1], classes)
        total = torch_loss(loss, a, y[row]) + extra
        stacks.append(torch.autograd.grad(total, list(net.parameters())))
    pairs = zip(zip(*stacks, strict=True), parameters.tensors(), strict=True)
    return [torch.stack(gradients).view_as(tensor) for gradients, tensor in pairs]


@pytest.mark.parametrize("kind", ["bce", "ce", "huber"])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu"])
@pytest.mark.parametrize("conv", [None, Conv(kernel=3, channels=3)], ids=["dense", "conv"])
def test_a_step_is_the_gradient_of_both_losses(
    conv: Conv | None, activation: str, kind: str
) -> None:
    """With gradient descent at rate 1, one epoch moves the weights by the gradient. Every victim
    has its labels, and so its pairs, in another order."""
    loss = Loss(kind=kind)  # type: ignore[arg-type]
    n_outputs = 3 if kind == "ce" else 1
    arch = architecture(n_outputs, bias="all", activation=activation, conv=conv)
    parameters, (x, y) = victims(arch), data(n_outputs)
    y = torch.stack([y[0], y[1].flip(0), y[2].sort().values])
    training = Training(epochs=1, optimiser=STEP, loss=loss)
    defence, n_hidden = DEFENCES["mixcon"], arch.n_layers - 1
    plain = train(arch, parameters, x, y, training=training).parameters
    for layer in range(1, n_hidden + 1):
        trained = train(
            arch, parameters, x, y, training=training, defence=defence, defence_layer=layer
        ).parameters
        expected = torch_step(arch, parameters, x, y, loss, defence, layer)
        tensors = (parameters.tensors(), trained.tensors(), plain.tensors(), expected)
        for place, (before, after, without, gradient) in enumerate(zip(*tensors, strict=True)):
            torch.testing.assert_close(before - after, gradient, rtol=1e-7, atol=1e-12)
            if place < 2 * layer:
                assert (after - without).abs().max() > 1e-6, "nothing was added"
            else:
                assert torch.equal(after, without), "layers above the features have no part"
    last = train(arch, parameters, x, y, training=training, defence=defence).parameters
    assert torch.equal(last.weights[0], trained.weights[0]), "the last layer is the default"


@pytest.mark.parametrize("conv", [None, Conv(kernel=3, channels=3)], ids=["dense", "conv"])
def test_lam_of_0_is_no_defence_bit_for_bit(conv: Conv | None) -> None:
    arch = architecture(conv=conv)
    plain, none, some = (
        trained(arch, Training(epochs=30), parameters=victims(arch, torch.float32), defence=defence)
        for defence in (None, MixCon(lam=0.0), MixCon())
    )
    assert_same(plain, none)
    assert not torch.equal(plain.parameters.weights[0], some.parameters.weights[0])


def test_in_the_span_of_the_images_it_is_the_same_training() -> None:
    arch, training = architecture(bias="all"), Training(epochs=50, optimiser=GD, weight_decay=0.01)
    direct, spanned = (
        trained(arch, replace(training, span=span), defence=DEFENCES["mixcon"]).parameters
        for span in (False, True)
    )
    assert_close(spanned, direct, 1e-9)


def test_defended_victims_go_on_as_they_are_alone_after_others_have_left() -> None:
    arch = architecture(bias="all")
    parameters, (x, y) = wild(victims(arch, torch.float32)), data(dtype=torch.float32)

    def of_rows(rows: slice = slice(None)) -> Trained:
        given: dict[str, Any] = {"parameters": parameters.rows(rows), "given": (x[rows], y[rows])}
        training = Training(epochs=20, stop_every=5)
        return trained(arch, training, defence=DEFENCES["mixcon"], **given)

    whole = of_rows()
    assert whole.diverged.tolist() == [False, True, False]
    # Each is, to rounding, what it is alone: pairs stay with their victim when another leaves.
    for row in (0, 2):
        alone = of_rows(slice(row, row + 1)).parameters
        for stack, single in zip(of(whole, row).tensors(), alone.tensors(), strict=True):
            torch.testing.assert_close(stack, single, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("case", DEFENCES)
def test_on_a_gpu_alone_and_as_a_graph(case: str, graphs: bool) -> None:
    arch = architecture(bias="all")
    how: dict[str, Any] = {"defence": DEFENCES[case]}
    here, (x, y) = trained(arch, Training(epochs=60), **how).parameters, data()
    cuda = {"parameters": victims(arch).map(lambda t: t.cuda()), "given": (x.cuda(), y.cuda())}
    there = trained(arch, Training(epochs=60), graphs=graphs, **cuda, **how).parameters
    assert_close(there.map(lambda t: t.cpu()), here, 1e-8)


def test_nothing_in_a_step_looks_at_a_number() -> None:
    """Else a CUDA graph could not hold it: on meta tensors there are no numbers to look at."""
    h = torch.empty(2, 4, 5, dtype=torch.float64, device="meta")
    across = torch.empty(2, 4, 4, dtype=torch.bool, device="meta")
    for defence in DEFENCES.values():
        assert defence_gradient(defence, h, across).shape == h.shape


def test_victims_of_one_class_are_refused() -> None:
    y = torch.tensor([[-1.0, 1.0], [1.0, 1.0]])
    refuses("of one class", feature_defence, architecture(), y, MixCon(), None, None)
