"""The same networks and their training with torch's own layers, autograd and optimisers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recon_core.optimisers import Optimiser
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.training import Training


def torch_net(architecture: Architecture, parameters: Parameters, run: int = 0) -> nn.Sequential:
    """One of the networks, from flat images to outputs."""
    network = architecture.network
    activation: type[nn.Module] | nn.Module = nn.ReLU()
    if network.activation == "leaky_relu":
        activation = nn.LeakyReLU(network.leak)
    if network.activation == "gelu":
        activation = nn.GELU()
    layers: list[nn.Module] = []
    sizes = architecture.layer_sizes
    for i, (fan_in, fan_out) in enumerate(sizes):
        bias = network.bias == "all" or (network.bias == "first" and i == 0)
        if i == 0 and network.conv is not None:
            conv = nn.Conv2d(architecture.shape[0], fan_out, network.conv.kernel, bias=bias)
            layers += [nn.Unflatten(1, architecture.shape), conv, activation, nn.Flatten()]
        else:
            layers.append(nn.Linear(fan_in, fan_out, bias=bias))
            layers += [activation] if i < len(sizes) - 1 else []
    net = nn.Sequential(*layers).to(parameters.weights[0].dtype)
    for leaf, value in zip(net.parameters(), parameters.tensors(), strict=True):
        leaf.data.copy_(value[run].view_as(leaf))
    return net


def torch_loss(loss: Loss, phi: Tensor, y: Tensor) -> Tensor:
    """The mean over the images of one network; phi (n, outputs), y (n)."""
    if loss.kind == "ce":
        return F.cross_entropy(phi, y)
    phi = phi.squeeze(1)
    if loss.kind == "bce":
        return F.binary_cross_entropy_with_logits(phi, (y + 1) / 2)
    if loss.kind == "power":
        return (phi - y).abs().pow(loss.power).mean()
    return F.mse_loss(phi, y) if loss.kind == "mse" else F.huber_loss(phi, y, delta=loss.delta)


def torch_gradients(
    architecture: Architecture, parameters: Parameters, x: Tensor, y: Tensor, loss: Loss
) -> list[Tensor]:
    """Of every network's loss, stacked, in the order and shapes of `Parameters.tensors`."""
    stacks: list[list[Tensor]] = []
    for run in range(len(x)):
        net = torch_net(architecture, parameters, run)
        stacks.append(
            list(torch.autograd.grad(torch_loss(loss, net(x[run]), y[run]), net.parameters()))
        )
    return [
        torch.stack(gradients).view_as(tensor)
        for gradients, tensor in zip(zip(*stacks, strict=True), parameters.tensors(), strict=True)
    ]


def torch_optimiser(
    rule: Optimiser, parameters: Iterable[Tensor], *, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Torch's own, with its own eps where the rule leaves it open."""
    given: dict[str, Any] = {"lr": rule.lr, "weight_decay": weight_decay}
    if rule.rule == "gd":
        return torch.optim.SGD(parameters, momentum=rule.momentum, **given)
    if rule.eps is not None:
        given["eps"] = rule.eps
    if rule.rule == "adadelta":
        return torch.optim.Adadelta(parameters, rho=rule.rho, **given)
    return torch.optim.Adam(parameters, betas=rule.betas, **given)


def torch_trained(
    architecture: Architecture,
    parameters: Parameters,
    x: Tensor,
    y: Tensor,
    training: Training,
    generators: list[torch.Generator],
) -> Parameters:
    """Every network trained alone; `generators` draw the order of minibatches."""
    stacks = []
    n = x.shape[1]
    for run, generator in enumerate(generators):
        net = torch_net(architecture, parameters, run)
        decay = training.weight_decay
        optimiser = torch_optimiser(training.optimiser, net.parameters(), weight_decay=decay)
        for _ in range(training.epochs):
            order = torch.arange(n)
            if training.batch_size is not None:
                order = torch.randperm(n, generator=generator)
            for batch in order.split(training.batch_size or n):
                optimiser.zero_grad()
                torch_loss(training.loss, net(x[run, batch]), y[run, batch]).backward()
                optimiser.step()
        stacks.append([leaf.detach() for leaf in net.parameters()])
    return parameters.like(
        [
            torch.stack(leaves).view_as(tensor)
            for leaves, tensor in zip(zip(*stacks, strict=True), parameters.tensors(), strict=True)
        ]
    )
