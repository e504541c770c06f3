"""Forward and backward passes of R networks in buffers that are made once.

The maths of `Architecture.forward` and `backward` without allocating anything as large as a layer.
A first layer reads what it needs of every image from `inputs`, tensors (R, n, ...): pixels, a
convolution's patches, or, in the span of the images, inner products with all of them.

In that span, under gradient descent, the first layer only ever gets multiples of the images added
to it. So

    W_t = s_t W_0 + C_t^T X,    z_1 = W_t X^T + b = s_t W_0 X^T + C_t^T (X X^T) + b,

with X (n, d) the images and C (n, h) the coordinates: the gradient in W is d_1^T X, so that in C is
d_1, and X never appears again. Weight decay shrinks W as a whole, so it acts on s and C as on any
parameter (s has no other gradient), and so does momentum. One epoch of the first layer costs
2 n^2 h operations instead of 4 n d h, and its update n h numbers instead of d h: worth while with
fewer images than pixels. The result equals direct training up to rounding. It cannot be done where
coordinates of W move at rates of their own (Adadelta, Adam), nor is it worth while for a
convolution, whose kernel is smaller than its images.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.separability import FeatureDefence

aten = torch.ops.aten
Inputs = tuple[Tensor, ...]


class Dense:
    """z = a W^T + b."""

    def __init__(self, parameters: Parameters, gradients: Parameters, layer: int) -> None:
        self.w, self.w_gradient = parameters.weights[layer], gradients.weights[layer]
        self.b, self.b_gradient = parameters.biases[layer], gradients.biases[layer]

    def forward(self, inputs: Inputs, z: Tensor) -> None:
        if self.b is None:
            torch.bmm(inputs[0], self.w.mT, out=z)
        else:
            torch.baddbmm(self.b.unsqueeze(1), inputs[0], self.w.mT, out=z)

    def backward(self, inputs: Inputs, d: Tensor, _images: Tensor | None = None) -> None:
        torch.bmm(d.mT, inputs[0], out=self.w_gradient)
        if self.b_gradient is not None:
            torch.sum(d, 1, out=self.b_gradient)

    def pull(self, d: Tensor, out: Tensor) -> None:
        torch.bmm(d, self.w, out=out)


class Convolution:
    """z = W patches + b at every position; `inputs` are the patches (R, n, c k k, positions)."""

    def __init__(self, parameters: Parameters, gradients: Parameters) -> None:
        self.w, self.w_gradient = parameters.weights[0], gradients.weights[0]
        self.b, self.b_gradient = parameters.biases[0], gradients.biases[0]

    def _maps(self, flat: Tensor) -> Tensor:
        return flat.view(*flat.shape[:2], self.w.shape[1], -1)

    def forward(self, inputs: Inputs, z: Tensor) -> None:
        maps = self._maps(z)
        torch.matmul(self.w.unsqueeze(1), inputs[0], out=maps)
        if self.b is not None:
            maps.add_(self.b[:, None, :, None])

    def backward(self, inputs: Inputs, d: Tensor, _images: Tensor | None) -> None:
        maps = self._maps(d)
        per_image = torch.bmm(maps.flatten(0, 1), inputs[0].flatten(0, 1).mT)
        torch.sum(per_image.unflatten(0, d.shape[:2]), 1, out=self.w_gradient)
        if self.b_gradient is not None:
            torch.sum(maps, (1, 3), out=self.b_gradient)


class Backprop:
    """Passes over n images per run. Gradients, of the loss plus that of a `defence`, are left in
    `gradients`."""

    def __init__(
        self,
        architecture: Architecture,
        first: Dense | Convolution | SpanLayer,
        parameters: Parameters,
        gradients: Parameters,
        n_images: int,
        *,
        defence: FeatureDefence | None = None,
    ) -> None:
        self.network, self.first, self.defence = architecture.network, first, defence
        n_layers = architecture.n_layers
        self.dense = [Dense(parameters, gradients, layer) for layer in range(1, n_layers)]
        like = parameters.weights[-1]

        def buffers() -> list[Tensor]:
            widths = [layer.w.shape[2] for layer in self.dense]
            return [like.new_empty(parameters.n_runs, n_images, width) for width in widths]

        self.z = buffers()
        self.a = buffers() if self.network.activation == "gelu" else self.z
        self.d = buffers()
        self.output = like.new_empty(parameters.n_runs, n_images, architecture.n_outputs)

    def forward(self, inputs: Inputs) -> Float[Tensor, "r n c"]:
        """The outputs; the next pass overwrites them."""
        self.first.forward(inputs, self.z[0])
        for i, layer in enumerate(self.dense):
            self._activate(i)
            layer.forward((self.a[i],), self.output if i == len(self.z) - 1 else self.z[i + 1])
        return self.output

    def backward(
        self, inputs: Inputs, output_gradient: Float[Tensor, "r n c"], images: Tensor | None = None
    ) -> None:
        """All gradients, after `forward` of the same inputs. `images`: see `SpanLayer`."""
        d = output_gradient
        for i in reversed(range(len(self.dense))):
            layer = self.dense[i]
            layer.backward((self.a[i],), d)
            layer.pull(d, self.d[i])
            d = self.d[i]
            if self.defence is not None and self.defence.layer == i:
                self.defence.add_gradient_(d, self.a[i])
            self._slope_(d, i)
        self.first.backward(inputs, d, images)

    def _activate(self, i: int) -> None:
        z = self.z[i]
        if self.network.activation == "relu":
            z.relu_()
        elif self.network.activation == "leaky_relu":
            F.leaky_relu_(z, self.network.leak)
        else:
            aten.gelu.out(z, out=self.a[i])

    def _slope_(self, d: Tensor, i: int) -> None:
        """d times f'(z), in place; of ReLU and leaky ReLU, f(z) has the sign of z."""
        z = self.z[i]
        if self.network.activation == "relu":
            aten.threshold_backward.grad_input(d, z, 0, grad_input=d)
        elif self.network.activation == "leaky_relu":
            aten.leaky_relu_backward.grad_input(d, z, self.network.leak, True, grad_input=d)
        else:
            aten.gelu_backward.grad_input(d, z, grad_input=d)


SpanSwitch = Literal["auto"] | bool


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
