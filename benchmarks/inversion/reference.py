"""The MixCon paper's networks, their training and its loss as everybody would write them with
torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recon_core.victims.autoencoder import Shape
from recon_core.victims.separability import MixCon
from recon_core.victims.split import LeNet5
from recon_core.victims.split_training import SplitTraining


class PlainLeNet5(nn.Module):
    """LeNet5 in two halves, f = g(h(x)), cut after its second block; ValueError for another cut."""

    def __init__(self, network: LeNet5, shape: Shape, n_classes: int) -> None:
        super().__init__()
        if network.cut != 2:
            raise ValueError(f"{network} is not one that the reference has; cut it at 2")
        padding = 2 if shape[1:] == (28, 28) else 0
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in shape[1:])
        self.h = nn.Sequential(
            nn.Conv2d(shape[0], 6, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.g = nn.Sequential(
            nn.Linear(16 * rows * columns, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, n_classes),
        )


class PlainMixCon:
    """MixCon paper, eq. 1, of one batch: the distances of all pairs from one product of matrices.

    In float64, which costs next to nothing here: float32 has no digits left at the paper's betas.
    """

    def __init__(self, defence: MixCon, n_classes: int) -> None:
        self.defence, self.n_classes = defence, n_classes
        self.pairs = torch.triu_indices(n_classes, n_classes, 1).unbind()

    def __call__(self, features: Tensor) -> Tensor:
        """Row i * k + c is image i of class c."""
        u = features.double()
        if self.defence.normalise:
            u = F.normalize(u, dim=1)
        u = u.unflatten(0, (-1, self.n_classes))
        gram = u @ u.mT
        norms = gram.diagonal(dim1=1, dim2=2)
        every = norms.unsqueeze(1) + norms.unsqueeze(2) - 2 * gram
        first, second = self.pairs
        dist = every[:, first, second].clamp(self.defence.eps, 1 / self.defence.eps)
        loss: Tensor = (dist + self.defence.beta / dist).mean()
        return loss.to(features.dtype)


def load(module: nn.Module, weights: Mapping[str, Tensor], network: int) -> None:
    """The tensors of one network of a stack, in the order of its layers."""
    for parameter, tensor in zip(module.parameters(), weights.values(), strict=True):
        parameter.data.copy_(tensor[network])


def plain_train(
    module: PlainLeNet5,
    batches: Sequence[Tensor],
    defence: MixCon,
    training: SplitTraining,
    *,
    channels_last: bool,
) -> None:
    """A step on each of the batches, in which row i * k + c is image i of class c."""
    if channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batches = [x.contiguous(memory_format=torch.channels_last) for x in batches]
    optimiser = torch.optim.SGD(
        module.parameters(),
        lr=training.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    last = module.g[-1]
    assert isinstance(last, nn.Linear)
    penalty = PlainMixCon(defence, last.out_features)
    for x in batches:
        labels = torch.arange(last.out_features).repeat(len(x) // last.out_features)
        features = module.h(x)
        loss = F.cross_entropy(module.g(features), labels) + defence.lam * penalty(features)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def literal_mixcon(features: Tensor, defence: MixCon) -> Tensor:
    """Eq. 1 as it is written, of one network's (p, k, m): a loop over ordered pairs of classes."""
    n_classes = features.shape[1]
    u = F.normalize(features, dim=2) if defence.normalise else features
    total = u.new_zeros(())
    for a, b in itertools.permutations(range(n_classes), 2):
        dist = (u[:, a] - u[:, b]).square().sum(1).clamp(defence.eps, 1 / defence.eps)
        total = total + (dist + defence.beta / dist).mean()
    return total / (n_classes * (n_classes - 1))
