"""Networks at an exact KKT point of known images: theta = sum_i c_i grad phi_i(theta; x_i)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.optimisers import Optimiser
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Conv, Network, Parameters
from recon_core.victims.training import Training, train
from tests.recon_core.attacks.kkt import double_backprop

STEEP = 2000.0
"""An alpha at which the surrogate is a step: 0 or 1 where the planted networks are looked at."""


@dataclass(frozen=True)
class Planted:
    """One network and m candidates, float64: `x` (1, m, d), `c` (1, m), classes for two outputs.

    `active` are the candidates whose gradient is not zero; the c of the others is of no account.
    """

    architecture: Architecture
    parameters: Parameters
    x: Tensor
    c: Tensor
    active: Tensor
    classes: Tensor | None


def planted_relu(
    n_hidden: int = 1,
    *,
    n_pairs: int = 1,
    d: int = 6,
    norm: float = 1.5,
    q: float = 1.2,
    bias: bool = False,
    conv: bool = False,
    kernel: int = 1,
    side: int = 2,
    n_outputs: int = 1,
) -> Planted:
    """Each active image has a neuron of its own in the first layer, and they share all others.

    The images have negative inner products, so a neuron is on for its own image only. The condition
    is W = c d x^T and b = c d in the first layer and w = sum_i c_i d_i a_i in the others. By
    symmetry all of it holds if every layer but the first has norm q, the first has q in weights and
    biases together, and c = q / sum_i a_i with the a of the last layer. With one hidden layer both
    labels are active. With more, a neuron that is off for an image would sit at its kink, so the
    images with y = -1 are opposite to all others and have no gradient at all.

    A convolution is planted in images of one colour, `side` pixels high and wide: its P positions
    see the same, and have weights that are 1 / sqrt(P) of those of the dense case. With two
    outputs, the last layer has w / sqrt(2) in the one and -w / sqrt(2) in the other.
    """
    deep = n_hidden > 1 or conv
    n = n_pairs if deep else 2 * n_pairs
    side, kernel, colours = (side, kernel, 3) if conv else (1, 1, d)
    n_places = (side - kernel + 1) ** 2
    corners = norm * _simplex(n + deep, colours)
    shown = torch.cat([corners[-1:].expand(n, -1), corners[:n]]) if deep else corners
    x = shown.repeat_interleave(side**2, 1) / (kernel * math.sqrt(n_places))
    sign = torch.ones(2 * n_pairs, dtype=torch.float64)
    sign[:n_pairs] = -1
    active = sign > 0 if deep else sign.isfinite()
    each = q / math.sqrt(n)
    length = math.sqrt(norm**2 + (n_places if bias else 0.0))
    first_bias = _constant(1, n, each / length * math.sqrt(n_places))
    weights = [each / length * corners[:n].repeat_interleave(kernel**2, 1) / kernel]
    if conv:
        weights.append(_constant(1, n * n_places, each / math.sqrt(n_places)))
    elif deep:
        weights.append(_constant(1, n, each))
    weights += [_constant(1, 1, q)] * (n_hidden - (1 if conv else 2))
    last = _constant(1, 1, q) if deep else each * sign[None]
    size = each**2 * length * q ** (len(weights) - 2) if deep else each * length
    c = (q / n if deep else each) / size * torch.ones_like(sign)
    if n_outputs == 1:
        c = c * sign
    else:
        last, c = torch.cat([-last, last]) / math.sqrt(2), c / math.sqrt(2)
    weights.append(last)
    network = Network(
        widths=tuple(len(w) for w in weights[1 if conv else 0 : -1]),
        conv=Conv(kernel=kernel, channels=n) if conv else None,
        bias="first" if bias else "none",
    )
    biases = (first_bias if bias else None, *(None,) * (len(weights) - 1))
    return Planted(
        architecture=network.on((colours, side, side), n_outputs),
        parameters=Parameters(tuple(w[None] for w in weights), biases),
        x=x[None].contiguous(),
        c=c[None],
        active=active,
        classes=None if n_outputs == 1 else (sign > 0).long(),
    )


PLANTED: dict[str, dict[str, Any]] = {
    "one hidden": {"n_hidden": 1, "n_pairs": 2, "d": 12, "norm": 1.4},
    "two hidden": {"n_hidden": 2},
    "three hidden": {"n_hidden": 3},
    "first-layer bias": {"n_hidden": 1, "bias": True},
    "deep with bias": {"n_hidden": 3, "bias": True},
    "two outputs": {"n_hidden": 1, "n_pairs": 2, "d": 12, "norm": 1.4, "n_outputs": 2},
    "deep, two outputs": {"n_hidden": 3, "n_outputs": 2},
    "one convolution": {"n_hidden": 1, "conv": True},
    "convolution with bias": {"n_hidden": 2, "conv": True, "bias": True, "norm": 2.05},
    "convolution, two outputs": {"n_hidden": 2, "conv": True, "n_outputs": 2},
    "one convolution, two outputs": {"n_hidden": 1, "conv": True, "n_outputs": 2},
}


def plant(name: str, **settings: Any) -> tuple[Planted, KKTAttack, Tensor]:
    """(network and images, an attack for them, its multipliers)."""
    planted = planted_relu(**PLANTED[name])
    attack = KKTAttack(
        condition="binary" if planted.classes is None else "multiclass",
        n_candidates=planted.x.shape[1],
        lam_scale="none",
        lam_min=0.1,
        **settings,
    )
    return planted, attack, planted.c * attack.signs(planted.c)


def planted_signs(signs: tuple[float, ...], *, d: int = 192) -> Planted:
    """One hidden layer with bias, a neuron for every image, and c_i of these signs.

    The bias fixes what is otherwise only known as c_i x_i: neuron i has W_i = c_i w_i x_i,
    b_i = c_i w_i and w_i = c_i a_i, so that |c_i| = 1 / sqrt(|x_i|^2 + 1), while the size of w_i is
    free. The images differ in norm and the neurons in size. The gradients of different images are
    orthogonal.
    """
    n = len(signs)
    sign = torch.tensor(signs, dtype=torch.float64)
    norms = torch.linspace(2.4, 3.2, n, dtype=torch.float64)
    sizes = torch.linspace(1.2, 0.8, n, dtype=torch.float64)
    x = norms[:, None] * _simplex(n, d)
    each = sizes / (1 + norms**2).sqrt()
    return Planted(
        architecture=Network(widths=(n,), bias="first").on((1, 1, d)),
        parameters=Parameters(
            ((each[:, None] * x)[None], (sizes * sign)[None, None]), (each[None], None)
        ),
        x=x[None],
        c=(sign / (1 + norms**2).sqrt())[None],
        active=torch.ones(n, dtype=torch.bool),
        classes=None,
    )


def decayed(
    architecture: Architecture,
    x: Tensor,
    y: Tensor,
    *,
    loss: Loss,
    decay: float,
    seed: int = 1,
    lr: float = 0.1,
    epochs: int = 3000,
) -> tuple[Parameters, Tensor]:
    """(weights, minus the gradient of the mean loss in every output over the decay, (n, outputs)).

    Trained by gradient descent with weight decay until the gradient is that of rounding. For ReLU
    this needs images that leave no neuron at its kink, where no gradient is zero: of one label
    alike, of different labels opposite.
    """
    generator = torch.Generator().manual_seed(seed)
    training = Training(
        epochs=epochs,
        optimiser=Optimiser(rule="gd", lr=lr, momentum=0.9),
        loss=loss,
        weight_decay=decay,
        stop_every=epochs,
    )
    start = architecture.initial([generator], dtype=torch.float64)
    found = train(architecture, start, x[None], y[None], training=training).parameters
    passed = architecture.forward(found, x[None])
    per_output = loss.gradient(passed.output, y[None])
    gradient = architecture.backward(found, passed, per_output)
    for slope, weight in zip(gradient.tensors(), found.tensors(), strict=True):
        assert float((slope + decay * weight).abs().max()) < 1e-12, "the training did not end"
    return found, -per_output[0] / decay


def planted_gelu(architecture: Architecture, *, n_images: int, decay: float = 0.05) -> Planted:
    """A network with one output, trained with weight decay to its end, by L-BFGS and then Newton.

    Where decay/2 ||theta||^2 + 1/2 sum_i (y_i - phi_i)^2 is stationary, the condition holds with
    c_i = (y_i - phi_i) / decay. GELU is smooth: the attack's derivatives are the network's own.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n_images, architecture.d, generator=generator, dtype=torch.float64) / 2
    y = torch.ones(n_images, dtype=torch.float64)
    y[: n_images // 2] = -1
    state = architecture.to_state_dict(architecture.initial([generator], dtype=torch.float64))
    sizes = [tensor.numel() for tensor in state.values()]

    def parts(theta: Tensor) -> list[Tensor]:
        pairs = zip(theta.split(sizes), state.values(), strict=True)
        return [part.view(tensor.shape) for part, tensor in pairs]

    def phi(theta: Tensor) -> Tensor:
        return double_backprop.outputs(architecture, parts(theta), x, 1.0)[:, 0]

    def loss(theta: Tensor) -> Tensor:
        return decay / 2 * theta.square().sum() + (y - phi(theta)).square().sum() / 2

    theta = torch.cat([tensor.flatten() for tensor in state.values()]).requires_grad_()
    optimiser = torch.optim.LBFGS([theta], max_iter=250, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(theta)
        value.backward()
        return value

    optimiser.step(closure)
    found = theta.detach()
    derivative = torch.autograd.functional
    for _ in range(6):
        gradient = derivative.jacobian(loss, found)
        if float(gradient.abs().max()) < 1e-13:
            break
        hessian = derivative.hessian(loss, found)
        found = found - torch.linalg.solve(hessian, gradient)
    assert float(derivative.jacobian(loss, found).abs().max()) < 1e-12, "the training did not end"
    return Planted(
        architecture=architecture,
        parameters=architecture.from_state_dict(dict(zip(state, parts(found), strict=True))),
        x=x[None],
        c=((y - phi(found)) / decay)[None],
        active=torch.ones(n_images, dtype=torch.bool),
        classes=None,
    )


def _constant(n_out: int, n_in: int, value: float) -> Tensor:
    return torch.full((n_out, n_in), value, dtype=torch.float64)


def _simplex(n: int, d: int) -> Tensor:
    """n unit vectors in d dimensions with equal, negative inner products; none along an axis."""
    generator = torch.Generator().manual_seed(n)
    frame = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    centred = torch.eye(n, dtype=torch.float64) - 1 / n
    corners = centred @ torch.linalg.svd(centred).Vh[: n - 1].T
    return corners / corners.norm(dim=1, keepdim=True) @ frame[: n - 1]
