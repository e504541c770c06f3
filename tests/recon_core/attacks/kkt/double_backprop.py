"""The KKT objective straight from its definition, by autograd: what the closed form is held to.

One attack at a time, with torch's own layers; nothing is shared with the engine but the containers
of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.victims.network import Architecture, Parameters


class Surrogate(torch.autograd.Function):
    """(Leaky) ReLU forwards, p + (1 - p) sigma(alpha z) backwards, which has a derivative again."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, alpha: float, leak: float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.alpha, ctx.leak = alpha, leak
        return torch.where(z > 0, z, leak * z)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        sigma = torch.sigmoid(ctx.alpha * z)
        return grad_outputs[0] * (ctx.leak + (1 - ctx.leak) * sigma), None, None


def outputs(architecture: Architecture, theta: list[Tensor], x: Tensor, alpha: float) -> Tensor:
    """Outputs (m, C) of one network, with weights in torch's shapes, on images (m, d)."""
    network, rest = architecture.network, list(theta)
    a = x
    for layer in range(architecture.n_layers):
        weight = rest.pop(0)
        bias = rest.pop(0) if architecture.has_bias(layer) else None
        if weight.dim() == 4:
            z = F.conv2d(a.view(-1, *architecture.shape), weight, bias).flatten(1)
        else:
            z = F.linear(a, weight, bias)
        if layer == architecture.n_layers - 1:
            return z
        leak = network.leak if network.activation == "leaky_relu" else 0.0
        a = F.gelu(z) if network.activation == "gelu" else Surrogate.apply(z, alpha, leak)
    raise AssertionError("a network has a last layer")


def margins(output: Tensor, classes: Tensor | None) -> Tensor:
    """phi (m,): the one output, or phi_y - max_{j != y} phi_j; of equal maxima the first."""
    if classes is None:
        return output[:, 0]
    rows = zip(output, classes.tolist(), strict=True)
    return torch.stack(
        [row[y] - torch.cat([row[:y], row[y + 1 :]]).max(0).values for row, y in rows]
    )


def stationarity(
    architecture: Architecture,
    parameters: Parameters,
    x: Tensor,
    c: Tensor,
    *,
    alpha: Tensor,
    classes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """|| theta - sum_i c_i grad phi_i ||^2 and its gradients in x and c, attack after attack."""
    results = []
    for q in range(len(x)):
        run = q if parameters.n_runs > 1 else 0
        state = architecture.to_state_dict(parameters, run)
        theta = [tensor.detach().clone().requires_grad_() for tensor in state.values()]
        x_q, c_q = x[q].detach().clone().requires_grad_(), c[q].detach().clone().requires_grad_()
        phi = margins(outputs(architecture, theta, x_q, float(alpha[q])), classes)
        summed = torch.autograd.grad((c_q * phi).sum(), theta, create_graph=True)
        pairs = zip(theta, summed, strict=True)
        value = torch.stack([(t.detach() - g).square().sum() for t, g in pairs]).sum()
        results.append((value.detach(), *torch.autograd.grad(value, (x_q, c_q))))
    values, gradients_x, gradients_c = zip(*results, strict=True)
    return torch.stack(values), torch.stack(gradients_x), torch.stack(gradients_c)
