"""Train R binary classifiers at once, full batch, on R different sets of images.

Binary cross-entropy with logits, mean over the training images (Haim et al.; paper 001, section 2).
The runs share nothing but the launch of their kernels: every product is a batched one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.types import Progress, no_progress
from recon_core.victims.mlp import Weights, backward, forward

REPORTS = 50
"""How often `train_binary` reports its progress."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long and by which rule. Defaults: paper 001, section 2 (Adadelta, 50,000 epochs)."""

    epochs: int = 50_000
    optimiser: Optimiser = field(default_factory=Optimiser)
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs={self.epochs} must be at least 1")


@dataclass(frozen=True)
class Trained:
    """R trained victims and how they ended: (R,) loss, accuracy and smallest margin y phi(x)."""

    weights: Weights
    loss: Float[Tensor, " r"]
    accuracy: Float[Tensor, " r"]
    margin_min: Float[Tensor, " r"]


def train_binary(
    weights: Weights,
    x: Float[Tensor, "r n d"],
    y: Float[Tensor, "r n"],
    *,
    training: Training,
    progress: Progress = no_progress,
) -> Trained:
    """Trained copies of `weights` on inputs `x` with labels `y` in {-1, +1}.

    A diverged run ends with NaN or infinite loss; it does not disturb the others.
    """
    weights = tuple(w.clone() for w in weights)
    states = [training.optimiser.state(w) for w in weights]
    n = x.shape[1]
    report_every = max(1, training.epochs // REPORTS)
    for epoch in range(training.epochs):
        z, a, phi = forward(weights, x)
        output_gradient = torch.sigmoid(-y * phi).mul_(y).div_(-n)
        gradients = backward(weights, z, a, output_gradient)
        for w, g, state in zip(weights, gradients, states, strict=True):
            training.optimiser.step_(w, g, state)
        if epoch % report_every == 0:
            progress(epoch / training.epochs)
    margin = y * forward(weights, x)[2]
    progress(1.0)
    return Trained(
        weights=weights,
        loss=torch.nn.functional.softplus(-margin).mean(-1),
        accuracy=(margin > 0).to(margin.dtype).mean(-1),
        margin_min=margin.amin(-1),
    )
