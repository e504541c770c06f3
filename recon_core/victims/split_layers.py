"""Convolution, maximum and ReLU of R networks on a CPU, one step with a backward pass of its own.

In parts of the images: a part's convolution, its largest array, is still in the cache when its
maxima are taken. Backwards each gradient has the layout in which oneDNN is fastest (one core, 400
images of LeNet5's second convolution): the kernels' has channels last (3.4 ms, channels first 5),
the images' squares of 2x2 pixels as channels (5.5 ms, channels last 9, channels first 7.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

NETWORKS_AT_ONCE = 4
"""Networks whose convolution of the same images is one for oneDNN: its vectors are then filled (24
channels), and the pooling finds the result in the cache."""
NUMBERS_AT_ONCE = 640_000
"""What a convolution gives for one network before it goes on to the next images, at most: for 400
images of LeNet5's second one, for 134 of its first. It must not depend on how many networks there
are: gradients are sums over such parts, in their order."""


def pooled_convolution(
    weight: Float[Tensor, "r o i k k"],
    bias: Float[Tensor, "r o"],
    x: Float[Tensor, "q n i h w"],
    padding: int,
) -> Float[Tensor, "r n o y x"]:
    """ReLU of the 2x2 maxima of R networks' convolutions, of their own images (q = r) or of the
    same (q = 1); differentiable once, in everything. Each network's numbers are bit for bit the
    same whichever others there are. The result is laid out channels last."""
    result: Tensor = _PooledConvolution.apply(weight, bias, x, padding)  # type: ignore[no-untyped-call]
    return result


class _PooledConvolution(torch.autograd.Function):
    """The maximum is taken before the ReLU, of four times as many numbers; that is the same."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor, x: Tensor, padding: int
    ) -> Float[Tensor, "r n o y x"]:
        ctx.padding, ctx.places = padding, []
        r, o = bias.shape
        sides = [side + 2 * padding - weight.shape[-1] + 1 for side in x.shape[-2:]]
        result = x.new_empty(r, x.shape[1], sides[0] // 2, sides[1] // 2, o)
        for networks in _groups(r, len(x)):
            kernels = _channels_last(weight[networks].flatten(0, 1))
            images = x[networks if len(x) > 1 else slice(0, 1)][0]
            for part in _parts(x.shape[1], o * math.prod(sides)):
                z = F.conv2d(
                    _channels_last(images[part]), kernels, bias[networks].flatten(), padding=padding
                )
                maxima, places = F.max_pool2d_with_indices(z, [2, 2])
                ctx.places.append(places)
                by_network = maxima.unflatten(1, (-1, o)).permute(1, 0, 3, 4, 2)
                torch.clamp_min(by_network, 0, out=result[networks, part])
        ctx.save_for_backward(weight, x, result)
        return result.permute(0, 1, 4, 2, 3)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Float[Tensor, "r n o y x"]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, x, result = ctx.saved_tensors
        of_weight, of_bias = torch.zeros_like(weight), weight.new_zeros(weight.shape[:2])
        of_x = None
        if ctx.needs_input_grad[2]:
            of_x = x.new_zeros(*x.shape[:2], *x.shape[3:], x.shape[2]).permute(0, 1, 4, 2, 3)
        o = weight.shape[1]
        sides = [side + 2 * ctx.padding - weight.shape[-1] + 1 for side in x.shape[-2:]]
        gradient = gradient.permute(0, 1, 3, 4, 2)
        places, memory = iter(ctx.places), weight.new_empty(0)
        for networks in _groups(len(weight), len(x)):
            kernels = _channels_last(weight[networks].flatten(0, 1))
            row = networks.start if len(x) > 1 else 0
            for part in _parts(x.shape[1], o * math.prod(sides)):
                by_network = torch.ops.aten.threshold_backward(
                    gradient[networks, part], result[networks, part], 0
                )
                of_maxima = by_network.permute(1, 2, 3, 0, 4).flatten(3).permute(0, 3, 1, 2)
                n, c = of_maxima.shape[:2]
                size = n * c * math.prod(sides)
                memory = weight.new_empty(size) if len(memory) < size else memory
                of_z = memory[:size].view(n, *sides, c).permute(0, 3, 1, 2)
                torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
                    *(of_maxima, of_z, [2, 2], [2, 2], [0, 0], [1, 1], False, next(places)),
                    grad_input=of_z,
                )
                images = _channels_last(x[row, part])
                if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
                    w, b = _convolution_backward(
                        of_z, images, kernels, ctx.padding, [False, True, True]
                    )
                    of_weight[networks] += w.view_as(of_weight[networks])
                    of_bias[networks] += b.view_as(of_bias[networks])
                if of_x is not None:
                    _add_images_gradient(of_x[row, part], of_z, kernels, ctx.padding)
        return of_weight, of_bias, of_x, None


def _groups(n_networks: int, n_images: int) -> list[slice]:
    size = NETWORKS_AT_ONCE if n_images == 1 else 1
    return [slice(i, min(i + size, n_networks)) for i in range(0, n_networks, size)]


def _parts(n_images: int, numbers: int) -> list[slice]:
    n_parts = math.ceil(n_images * numbers / NUMBERS_AT_ONCE)
    size = max(1, math.ceil(n_images / max(1, n_parts)))
    return [slice(i, min(i + size, n_images)) for i in range(0, n_images, size)]


def _channels_last(a: Float[Tensor, "o i y x"]) -> Float[Tensor, "o i y x"]:
    """The same numbers with strides that say so even for one channel, where `contiguous` sees no
    difference: the convolution's result, whose pooling is then faster, follows them."""
    if a.stride() == (math.prod(a.shape[1:]), 1, a.shape[3] * a.shape[1], a.shape[1]):
        return a
    return torch.empty_like(a, memory_format=torch.channels_last).copy_(a)


def _add_images_gradient(
    of_x: Float[Tensor, "n i h w"], of_z: Float[Tensor, "n o y x"], kernels: Tensor, padding: int
) -> None:
    if padding or of_x.shape[1] == 1 or any(side % 2 for side in of_x.shape[2:]):
        (found,) = _convolution_backward(of_z, of_x, kernels, padding, [True, False, False])
        of_x += found
        return
    n, i, h, w = of_x.shape
    squares = of_z.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 2, 4, 3, 5, 1)
    squares = squares.flatten(3).permute(0, 3, 1, 2)
    like = of_x.new_empty(n, h // 2, w // 2, 4 * i).permute(0, 3, 1, 2)
    (found,) = _convolution_backward(
        squares, like, _square_kernels(kernels), 0, [True, False, False]
    )
    pixels = of_x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 2, 4, 3, 5, 1)
    pixels += found.permute(0, 2, 3, 1).unflatten(3, (2, 2, -1))


def _convolution_backward(
    of_z: Tensor, x: Tensor, kernels: Tensor, padding: int, wanted: list[bool]
) -> list[Tensor]:
    pads, ones = [padding, padding], [1, 1]
    found = torch.ops.aten.convolution_backward(
        of_z, x, kernels, [len(kernels)], ones, pads, ones, False, [0, 0], 1, wanted
    )
    return [gradient for gradient in found if gradient is not None]


def _square_kernels(kernels: Float[Tensor, "o i k k"]) -> Float[Tensor, "oo ii kk kk"]:
    """The same convolution, with 2x2 pixels as channels on both sides. Row 2Y + p of the result has
    row 2(Y + d) + q of the images times row 2d + q - p of the kernel, where there is one. For 5
    rows that is d = 0, 1, 2."""
    shifted = [F.pad(kernels, (p, 1 - p, s, 1 - s)) for s in (0, 1) for p in (0, 1)]
    k = torch.stack(shifted).unflatten(3, (-1, 2)).unflatten(5, (-1, 2))
    joined = k.permute(0, 1, 4, 6, 2, 3, 5).flatten(2, 4).flatten(0, 1)
    return _channels_last(joined)
