"""Bias-free ReLU networks with one output, R of them stacked.

phi(theta; x) = w_L relu(W_{L-1} ... relu(W_1 x)), the victim of papers 001 and of Haim et al.
Without biases the network is homogeneous in its weights, which the KKT condition needs.
A stack of R networks is a tuple of L tensors (R, out, in); the last has out = 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

Weights = tuple[Tensor, ...]
"""One tensor (R, out, in) per layer."""


@dataclass(frozen=True, kw_only=True)
class MLP:
    """The architecture: hidden widths and the scale of the first layer's initial weights.

    Paper 001, section 2: two hidden layers of 1000, no biases; layer 1 ~ N(0, (1e-4)^2), the
    others Kaiming He (normal, fan in: the paper does not say which of the two variants).
    """

    widths: tuple[int, ...] = (1000, 1000)
    init_std_first: float = 1e-4
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(
                f"widths={self.widths} must name at least one hidden layer, each 1 or wider, "
                "for example (1000, 1000)"
            )
        if not (math.isfinite(self.init_std_first) and self.init_std_first > 0):
            raise ValueError(f"init_std_first={self.init_std_first} must be positive, e.g. 1e-4")

    def init(
        self, d_in: int, generators: Sequence[torch.Generator], *, dtype: torch.dtype
    ) -> Weights:
        """Initial weights, one generator per run; drawn on the CPU in float32, layer by layer."""
        sizes = (d_in, *self.widths, 1)
        stacks: list[list[Tensor]] = [[] for _ in sizes[1:]]
        for generator in generators:
            for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
                std = self.init_std_first if layer == 0 else math.sqrt(2 / fan_in)
                stacks[layer].append(torch.randn(fan_out, fan_in, generator=generator) * std)
        return tuple(torch.stack(stack).to(dtype) for stack in stacks)


def forward(
    weights: Weights, x: Float[Tensor, "r n d"]
) -> tuple[list[Tensor], list[Tensor], Float[Tensor, "r n"]]:
    """Pre-activations z_1..z_{L-1}, inputs a_0..a_{L-1} of the layers, and phi(x)."""
    a = [x]
    z = []
    for w in weights[:-1]:
        z.append(torch.bmm(a[-1], w.mT))
        a.append(torch.relu(z[-1]))
    return z, a, torch.bmm(a[-1], weights[-1].mT).squeeze(-1)


def backward(
    weights: Weights,
    z: Sequence[Tensor],
    a: Sequence[Tensor],
    output_gradient: Float[Tensor, "r n"],
) -> Weights:
    """Gradients of sum(output * output_gradient) with respect to every layer's weights."""
    d = output_gradient.unsqueeze(-1)
    gradients = [torch.bmm(d.mT, a[-1])]
    for layer in range(len(weights) - 2, -1, -1):
        d = torch.bmm(d, weights[layer + 1]) * (z[layer] > 0)
        gradients.append(torch.bmm(d.mT, a[layer]))
    return tuple(reversed(gradients))
