"""The published attack the plain way: one network, differentiated twice by autograd.

Written from the papers alone (image restoration paper, sections 1.2 and 2; KKT paper, sections 3 to
5 and appendix B) and independent of the engine that is held to it. As everybody would write it with
torch: an activation whose derivative is replaced in the backward pass,
`autograd.grad(create_graph=True)` for the gradient inside the objective, one optimiser for x and
one for lam, one victim at a time.

    L = sum_l || theta_l - sum_i c_i grad_{theta_l} phi(theta; x_i) ||^2
        + sum relu(x - 1)^2 + sum relu(-1 - x)^2 + 5 sum relu(lam_min - lam)^2

with c_i = lam_i y_i / N (binary), lam_i / N and phi_i = phi_{y_i} - max_{j != y_i} phi_j
(multiclass, KKT paper, eq. 12), or lam_i / N, free in sign and without the last term
(regression, KKT paper, eq. 15). N is the number of candidates, as in the authors' code, or 1, as
in their formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["relu", "leaky_relu", "gelu"]
Loss = Literal["bce", "ce", "mse"]


class Surrogate(torch.autograd.Function):
    """(Leaky) ReLU with slope p below zero; its derivative is p + (1 - p) sigma(alpha z).

    That is differentiable in turn, so a second derivative sees the sigmoid's.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, alpha: float, leak: float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.alpha, ctx.leak = alpha, leak
        return F.leaky_relu(z, leak)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        slope = torch.sigmoid(ctx.alpha * z)
        slope = ctx.leak + (1 - ctx.leak) * slope if ctx.leak else slope
        return grad_outputs[0] * slope, None, None


class ReferenceNet(nn.Module):
    """d - widths - n_outputs on flat images (n, d) of `shape`; `conv` in front: (kernel, channels).

    `alpha` is None while training: the activation's own derivative. GELU's is never replaced.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        widths: Sequence[int],
        n_outputs: int = 1,
        *,
        conv: tuple[int, int] | None = None,
        bias: Literal["none", "first", "all"] = "none",
        activation: Activation = "relu",
        leak: float = 0.01,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        layers: list[nn.Module] = []
        fan_in = channels * height * width
        if conv is not None:
            kernel, n_maps = conv
            layers.append(nn.Conv2d(channels, n_maps, kernel, bias=bias != "none"))
            fan_in = n_maps * (height - kernel + 1) * (width - kernel + 1)
        for fan_out in (*widths, n_outputs):
            with_bias = bias == "all" or (bias == "first" and not layers)
            layers.append(nn.Linear(fan_in, fan_out, bias=with_bias))
            fan_in = fan_out
        self.layers = nn.ModuleList(layers)
        self.shape, self.activation = shape, activation
        self.leak = leak if activation == "leaky_relu" else 0.0
        self.alpha: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (n, n_outputs) of flat images (n, d)."""
        a = x.unflatten(1, self.shape) if isinstance(self.layers[0], nn.Conv2d) else x
        for layer in self.layers[:-1]:
            a = self._activate(layer(a)).flatten(1)
        return cast(Tensor, self.layers[-1](a))

    def _activate(self, z: Tensor) -> Tensor:
        if self.activation == "gelu":
            return F.gelu(z)
        if self.alpha is None:
            return F.leaky_relu(z, self.leak)
        return cast(Tensor, Surrogate.apply(z, self.alpha, self.leak))  # type: ignore[no-untyped-call]

    def load(self, state: Mapping[str, Tensor]) -> ReferenceNet:
        """Itself with the tensors of `state` as parameters, in order: weight, bias, weight, ..."""
        for parameter, tensor in zip(self.parameters(), state.values(), strict=True):
            parameter.data = tensor.detach().clone()
        return self


@dataclass(frozen=True, kw_only=True)
class ReferenceAttack:
    """The attack's settings; `lam_lr` None means the rate of x.

    `lean` asks for the two gradients that are needed; without it `loss.backward()`, as in the
    published code, differentiates with respect to the network's parameters too.
    """

    condition: Literal["binary", "multiclass", "every class", "regression"] = "binary"
    alpha: float = 20.0
    lam_min: float = 0.5
    lam_scale: Literal["candidates", "none"] = "candidates"
    optimiser: Literal["adadelta", "sgd"] = "adadelta"
    lr: float = 1.0
    lam_lr: float | None = None
    momentum: float = 0.0
    lean: bool = False


def balanced_signs(n_candidates: int, dtype: torch.dtype) -> Tensor:
    """-1 for the first half of the candidates, +1 for the second (image restoration paper, section
    1.2)."""
    return torch.where(torch.arange(n_candidates) < n_candidates // 2, -1.0, 1.0).to(dtype)


def objective(
    net: ReferenceNet, x: Tensor, lam: Tensor, y: Tensor | None, attack: ReferenceAttack
) -> Tensor:
    """L of candidates x (m, d) and multipliers lam (m,), differentiable in both.

    `y` (m,): signs for `binary`, classes for `multiclass`; None for `regression`. Under `every
    class` lam is (m, C): one for each other class (KKT paper, eq. 8); that of its own counts for
    nothing.
    """
    if (y is None) != (attack.condition == "regression"):
        raise ValueError(f"condition={attack.condition!r} and y={y}; only regression has no y")
    net.alpha = attack.alpha
    output = net(x)
    if y is None:
        phi = output.squeeze(1)
    elif attack.condition == "binary":
        phi = y * output.squeeze(1)
    else:
        own = output.gather(1, y[:, None])
        if attack.condition == "every class":
            phi = own - output
        else:
            phi = own.squeeze(1) - output.scatter(1, y[:, None], -torch.inf).amax(1)
    n = len(lam) if attack.lam_scale == "candidates" else 1
    parameters = list(net.parameters())
    summed = torch.autograd.grad((lam * phi).sum() / n, parameters, create_graph=True)
    pairs = zip(parameters, summed, strict=True)
    loss = torch.stack([(p.detach() - g).square().sum() for p, g in pairs]).sum()
    loss = loss + (x - 1).relu().square().sum() + (-1 - x).relu().square().sum()
    if attack.condition != "regression":
        loss = loss + 5 * (attack.lam_min - lam).relu().square().sum()
    return loss


class Reconstruction:
    """One attack in progress: `x`, `lam`, and `step()`."""

    def __init__(
        self, net: ReferenceNet, x: Tensor, lam: Tensor, y: Tensor | None, attack: ReferenceAttack
    ) -> None:
        self.net, self.y, self.attack = net, y, attack
        self.x, self.lam = x.clone().requires_grad_(), lam.clone().requires_grad_()
        self.optimisers: list[torch.optim.Optimizer] = []
        lam_lr = attack.lr if attack.lam_lr is None else attack.lam_lr
        for variable, lr in ((self.x, attack.lr), (self.lam, lam_lr)):
            if attack.optimiser == "adadelta":
                self.optimisers.append(torch.optim.Adadelta([variable], lr=lr))
            else:
                sgd = torch.optim.SGD([variable], lr=lr, momentum=attack.momentum)
                self.optimisers.append(sgd)

    def step(self) -> Tensor:
        """One iteration; the loss before it."""
        loss = objective(self.net, self.x, self.lam, self.y, self.attack)
        if self.attack.lean:
            self.x.grad, self.lam.grad = torch.autograd.grad(loss, (self.x, self.lam))
        else:
            self.x.grad = self.lam.grad = None
            self.net.zero_grad()
            loss.backward()
        for optimiser in self.optimisers:
            optimiser.step()
        return loss.detach()

    def run(self, save_at: Sequence[int]) -> Tensor:
        """x (s, m, d) after each of the increasing iterations `save_at`."""
        saved = []
        for iteration in range(1, save_at[-1] + 1):
            self.step()
            if iteration in save_at:
                saved.append(self.x.detach().clone())
        return torch.stack(saved)


def train(
    net: ReferenceNet,
    x: Tensor,
    target: Tensor,
    *,
    loss: Loss,
    optimiser: Literal["sgd", "adadelta"],
    lr: float,
    epochs: int,
    weight_decay: float = 0.0,
) -> ReferenceNet:
    """`net`, trained in place on the full batch; `target` is 0 or 1 for `bce`, a class for `ce`,
    else a number. `weight_decay` is that of the KKT paper, eq. 13."""
    net.alpha = None
    rule: torch.optim.Optimizer
    if optimiser == "sgd":
        rule = torch.optim.SGD(net.parameters(), lr=lr, weight_decay=weight_decay)
    else:
        rule = torch.optim.Adadelta(
            net.parameters(), lr=lr, weight_decay=weight_decay, foreach=True
        )
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "bce": F.binary_cross_entropy_with_logits, "ce": F.cross_entropy, "mse": F.mse_loss
    }  # fmt: skip
    for _epoch in range(epochs):
        rule.zero_grad()
        output = net(x)
        losses[loss](output if loss == "ce" else output.squeeze(1), target).backward()
        rule.step()
    return net
