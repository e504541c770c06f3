"""Evaluation of R split networks on images: features, accuracy, loss; in blocks of bounded
memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from recon_core.victims.autoencoder import Weights
from recon_core.victims.split import SplitModel

IMAGES_AT_ONCE = 512
NETWORKS_ON_CPU = 4
"""Networks that a CPU takes at once, with what the backward pass needs still near (a step of 56
LeNet5 on 400 images of 28x28 on one core: 1.6 s one by one or all at once, 1.2 s by 4 to 28)."""
NETWORKS_ON_GPU = 64


@dataclass(frozen=True)
class Evaluation:
    """Scores of R networks: the share of images put into their class, and the mean
    cross-entropy."""

    accuracy: Float64[Tensor, " r"]
    loss: Float64[Tensor, " r"]


@torch.no_grad()
def evaluate_split(
    model: SplitModel,
    weights: Mapping[str, Tensor],
    x: Float[Tensor, "n c h w"] | Float[Tensor, "r n c h w"],
    labels: Int64[Tensor, " n"] | Int64[Tensor, "r n"],
) -> Evaluation:
    n_networks = check_fits(model, weights, x, labels)
    labels = labels.to(x.device).expand(n_networks, -1)
    right, loss = torch.zeros(2, n_networks, dtype=torch.float64, device=x.device)
    for networks, images, part, features in _blocks(model, weights, x):
        logits, truth = model.classify(part, features), labels[networks, images]
        right[networks] += (logits.argmax(2) == truth).sum(1)
        loss[networks] += cross_entropies(logits.double(), truth).sum(1)
    return Evaluation(accuracy=right / labels.shape[1], loss=loss / labels.shape[1])


def features_of(
    model: SplitModel,
    weights: Mapping[str, Tensor],
    x: Float[Tensor, "n c h w"] | Float[Tensor, "r n c h w"],
) -> Float[Tensor, "r n m"]:
    """h(x) of R networks; beyond the result, memory is bounded. Raises ValueError for arguments
    that do not fit together."""
    n_networks = check_fits(model, weights, x)
    found = x.new_empty(n_networks, x.shape[-4], model.n_features)
    for networks, images, _part, features in _blocks(model, weights, x):
        found[networks, images] = features
    return found


def cross_entropies(
    logits: Float[Tensor, "r n k"], truth: Int64[Tensor, "r n"]
) -> Float[Tensor, "r n"]:
    losses = F.cross_entropy(logits.flatten(0, 1), truth.flatten(), reduction="none")
    return losses.view(truth.shape)


@torch.no_grad()
def _blocks(
    model: SplitModel, weights: Mapping[str, Tensor], x: Tensor
) -> Iterator[tuple[slice, slice, Weights, Tensor]]:
    n_networks, n_images = len(next(iter(weights.values()))), x.shape[-4]
    at_once = NETWORKS_ON_CPU if x.device.type == "cpu" else NETWORKS_ON_GPU
    for i in range(0, n_networks, at_once):
        networks = slice(i, min(i + at_once, n_networks))
        part = {name: tensor[networks].to(x) for name, tensor in weights.items()}
        mine = x.unsqueeze(0) if x.dim() == 4 else x[networks]
        for j in range(0, n_images, IMAGES_AT_ONCE):
            images = slice(j, min(j + IMAGES_AT_ONCE, n_images))
            yield networks, images, part, model.features(part, mine[:, images])


def check_fits(
    model: SplitModel, weights: Mapping[str, Tensor], x: Tensor, labels: Tensor | None = None
) -> int:
    """The number of networks; ValueError if weights, images and labels do not fit together."""
    n_networks = _n_networks(model, weights)
    if x.dim() not in (4, 5) or tuple(x.shape[-3:]) != tuple(model.shape):
        raise ValueError(
            f"images {tuple(x.shape)} for a network of {tuple(model.shape)}; give (n, c, h, w), or "
            "(networks, n, c, h, w), to a network .on their shape"
        )
    if x.dim() == 5 and len(x) != n_networks:
        raise ValueError(
            f"images of {len(x)} networks for {n_networks}; give (n, c, h, w) to share them"
        )
    if labels is not None:
        _check_labels(labels, n_networks, x.shape[-4], model.n_classes)
    return n_networks


def _n_networks(model: SplitModel, weights: Mapping[str, Tensor]) -> int:
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in weights.items()}
    if shapes != model.tensor_shapes:
        raise ValueError(
            f"weights of {shapes} for a network of {model.tensor_shapes}; give those that "
            "initial_weights or a training of this network gave"
        )
    sizes = {len(tensor) for tensor in weights.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"weights of {sorted(sizes)} networks; all need the same number, 1 or more"
        )
    return sizes.pop()


def _check_labels(labels: Tensor, n_networks: int, n_images: int, n_classes: int) -> None:
    shape = tuple(labels.shape)
    if shape not in {(n_images,), (n_networks, n_images)}:
        raise ValueError(
            f"labels of {shape} for {n_images} images of each of {n_networks} networks; give "
            "one per image, the same for all networks or (networks, images)"
        )
    outside = labels[(labels < 0) | (labels >= n_classes)]
    if len(outside):
        raise ValueError(
            f"label {int(outside[0])} is not one of the network's {n_classes} classes, 0 to "
            f"{n_classes - 1}"
        )
