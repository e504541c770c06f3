"""The same networks, one at a time, of torch's own layers, and their training by its optimisers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recon_core.optimisers import Optimiser
from recon_core.victims.autoencoder import Autoencoder, UNet
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.split import LeNet5, SplitNetwork
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


def leaves_of(weights: Mapping[str, Tensor], run: int = 0) -> dict[str, Tensor]:
    """The tensors of one network of a stack, which want gradients."""
    return {name: t[run].detach().clone().requires_grad_() for name, t in weights.items()}


def torch_split(
    settings: SplitNetwork, leaves: Mapping[str, Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    """h(x) and the logits of one split network."""
    a, found = x, []
    for i in (1, 2) if isinstance(settings, LeNet5) else ():
        padding = 2 if i == 1 and x.shape[2:] == (28, 28) else 0
        z = F.conv2d(a, leaves[f"conv{i}.weight"], leaves[f"conv{i}.bias"], padding=padding)
        a = F.max_pool2d(z.relu(), 2)
        found.append(a)
    a, i = a.flatten(1), 1
    while f"fc{i + 1}.weight" in leaves:
        a = F.linear(a, leaves[f"fc{i}.weight"], leaves[f"fc{i}.bias"]).relu()
        found.append(a)
        i += 1
    logits = F.linear(a, leaves[f"fc{i}.weight"], leaves[f"fc{i}.bias"])
    return found[settings.cut - 1].flatten(1), logits


def torch_autoencoder(settings: Autoencoder, leaves: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What one autoencoder makes of images."""

    def activated(z: Tensor, name: str) -> Tensor:
        if settings.activation == "softplus":
            return F.softplus(z)
        if settings.activation == "prelu":
            return F.prelu(z, leaves[f"{name}.slope"].view(1))
        return F.leaky_relu(z, settings.leak)

    def convolved(name: str, a: Tensor) -> Tensor:
        return F.conv2d(a, leaves[f"{name}.weight"], leaves[f"{name}.bias"], padding=1)

    if not isinstance(settings, UNet):
        a = x.flatten(1)
        for i in range(settings.depth):
            a = F.linear(a, leaves[f"{i}.weight"], leaves[f"{i}.bias"])
            a = activated(a, str(i)) if i < settings.depth - 1 else a
        return a.view_as(x)

    def level(name: str, a: Tensor) -> Tensor:
        for k in range(settings.convolutions):
            a = activated(convolved(f"{name}.{k}", a), f"{name}.{k}")
        return a

    seen = [level("down.0", x)]
    for i in range(1, len(settings.channels)):
        seen.append(level(f"down.{i}", F.max_pool2d(seen[-1], 2)))
    a = seen.pop()
    for i in reversed(range(len(seen))):
        a = F.interpolate(a, scale_factor=2, mode="nearest")
        a = level(f"up.{i}", torch.cat([a, seen[i]], 1) if settings.skips else a)
    return convolved("out", a)
