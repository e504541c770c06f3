"""Training the first layer in the span of the images: n coordinates instead of d, exactly.

Under gradient descent the first layer only ever gets multiples of the images added to it. So

    W_t = s_t W_0 + C_t^T X,    z_1 = W_t X^T + b = s_t W_0 X^T + C_t^T (X X^T) + b,

with X (n, d) the images and C (n, h) the coordinates: the gradient in W is d_1^T X, so that in C is
d_1, and X never appears again. Weight decay shrinks W as a whole, so it acts on s and C as on any
parameter (s has no other gradient), and so does momentum. One epoch of the first layer costs
2 n^2 h operations instead of 4 n d h, and its update n h numbers instead of d h: worth while with
fewer images than pixels. The result equals direct training up to rounding.

It cannot be done where coordinates of W move at rates of their own (Adadelta, Adam), nor is it
worth while for a convolution, whose kernel is smaller than its images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.victims.backprop import Inputs
from recon_core.victims.network import Architecture, Parameters

SpanSwitch = Literal["auto"] | bool


def uses_span(
    switch: SpanSwitch, architecture: Architecture, optimiser: Optimiser, n_images: int
) -> bool:
    """True if training goes in the span. ValueError if it is asked for and cannot be done."""
    reason = None
    if optimiser.rule != "gd":
        reason = f"{optimiser.rule} moves every weight at its own rate; use rule='gd'"
    elif architecture.network.conv is not None:
        reason = "the first layer is a convolution, whose kernel is smaller than the images"
    if switch is True and reason is not None:
        raise ValueError(f"span=True cannot be done: {reason}, or span=False")
    if switch == "auto":
        return reason is None and n_images < architecture.d
    return switch


@dataclass(frozen=True)
class Span:
    """The first layer of R networks before training, W_0, and their images X."""

    weight: Float[Tensor, "r h d"]
    x: Float[Tensor, "r n d"]

    def inputs(self) -> tuple[Float[Tensor, "r n n"], Float[Tensor, "r n h"]]:
        """X X^T and X W_0^T, summed in float64: what is read of every image."""
        x = self.x.double()
        return (x @ x.mT).to(self.x.dtype), (x @ self.weight.double().mT).to(self.x.dtype)

    def start(self) -> tuple[Float[Tensor, "r n h"], Float[Tensor, "r 1"]]:
        r, n, _ = self.x.shape
        return self.x.new_zeros(r, n, self.weight.shape[1]), self.x.new_ones(r, 1)

    def layer(
        self, coordinates: Float[Tensor, "r n h"], scale: Float[Tensor, "r 1"]
    ) -> Float[Tensor, "r h d"]:
        return torch.baddbmm(self.weight * scale.unsqueeze(2), coordinates.mT, self.x)

    def rows(self, index: Tensor) -> Span:
        return Span(self.weight[index], self.x[index])


class SpanLayer:
    """z_1 from rows of X X^T and X W_0^T; the gradient in C is d_1 itself."""

    def __init__(self, parameters: Parameters, gradients: Parameters, scale: Tensor) -> None:
        self.coordinates, self.gradient = parameters.weights[0], gradients.weights[0]
        self.b, self.b_gradient = parameters.biases[0], gradients.biases[0]
        self.scale = scale.unsqueeze(2)

    def forward(self, inputs: Inputs, z: Tensor) -> None:
        products, start = inputs
        torch.bmm(products, self.coordinates, out=z)
        z.addcmul_(start, self.scale)
        if self.b is not None:
            z.add_(self.b.unsqueeze(1))

    def backward(self, _inputs: Inputs, d: Tensor, images: Tensor | None) -> None:
        """`images`: rows of the stacked C that d belongs to; None if it is all of them."""
        if images is None:
            self.gradient.copy_(d)
        else:
            self.gradient.zero_()
            self.gradient.flatten(0, 1).index_copy_(0, images, d.flatten(0, 1))
        if self.b_gradient is not None:
            torch.sum(d, 1, out=self.b_gradient)
