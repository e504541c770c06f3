"""The networks that get attacked: dense layers, or a convolution before them; R of them stacked.

    phi(theta; x) = W_L f(W_{L-1} ... f(W_1 x + b_1) ... + b_{L-1}) + b_L

with f = ReLU, leaky ReLU or GELU. Papers: D-1000-1000-1 without biases (image restoration paper,
section 2), with a bias in the first layer only (Haim et al. 2022), with C outputs (KKT paper,
section 4), and Conv(k, channels)-1000-1 (KKT paper, section 6.1; stride 1 and no padding). With
ReLU and no bias beyond the first layer phi(c theta) = c^L phi(theta), which the theory of the
attack needs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recon_core.strict import Count, Strict, Within

Bias = Literal["none", "first", "all"]
Activation = Literal["relu", "leaky_relu", "gelu"]
Shape = tuple[int, int, int]
SQRT_2 = math.sqrt(2)
SQRT_2_PI = math.sqrt(2 * math.pi)


@dataclass(frozen=True, kw_only=True)
class Conv(Strict):
    """A first layer of `channels` kernels of side `kernel`; stride 1, no padding."""

    kernel: Count = 3
    channels: Count = 32


@dataclass(frozen=True, kw_only=True)
class Network(Strict):
    """Settings of an architecture. Defaults: the image restoration paper, section 2.

    `widths`: the hidden dense layers. `init_std_first`: the first layer, weights and bias, starts
    from N(0, s^2); None starts it like the rest. `init_rest`: "kaiming" is He's normal by fan in
    with biases 0 (the image restoration paper names He without the variant), "torch" the default of
    torch's layers, uniform in +-1/sqrt(fan_in) (Haim et al.'s code; KKT paper with weight decay).
    """

    widths: tuple[int, ...] = (1000, 1000)
    conv: Conv | None = None
    bias: Bias = "none"
    activation: Activation = "relu"
    leak: Annotated[float, Within("[0, 1)", fix="torch's default is 0.01")] = 0.01
    init_rest: Literal["kaiming", "torch"] = "kaiming"
    init_std_first: Annotated[float | None, Within("(0, inf)", fix="usual: 1e-4")] = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.widths or min(self.widths) < 1:
            raise ValueError(
                f"widths={self.widths} must name at least one hidden layer, each 1 or wider, "
                "for example (1000, 1000)"
            )

    def on(self, shape: Shape, n_outputs: int = 1) -> Architecture:
        """This network for images (c, h, w); ValueError if a kernel does not fit in them."""
        return Architecture(self, shape, n_outputs)


@dataclass(frozen=True)
class Parameters:
    """Weights (R, out, in), of a convolution (R, channels, c * k * k), and biases (R, out) or None,
    per layer."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    @property
    def n_runs(self) -> int:
        return len(self.weights[0])

    def tensors(self) -> tuple[Tensor, ...]:
        """w_0, b_0, w_1, ...: those that exist."""
        pairs = itertools.chain.from_iterable(zip(self.weights, self.biases, strict=True))
        return tuple(tensor for tensor in pairs if tensor is not None)

    def like(self, tensors: Sequence[Tensor]) -> Parameters:
        """Parameters of the same structure from the tensors, in the order of `tensors()`."""
        rest = iter(tensors)
        weights, biases = [], []
        for bias in self.biases:
            weights.append(next(rest))
            biases.append(None if bias is None else next(rest))
        return Parameters(tuple(weights), tuple(biases))

    def map(self, function: Callable[[Tensor], Tensor]) -> Parameters:
        return self.like([function(tensor) for tensor in self.tensors()])

    def rows(self, index: slice | Tensor) -> Parameters:
        return self.map(lambda tensor: tensor[index])

    def isfinite(self) -> Tensor:
        return torch.stack([t.isfinite().flatten(1).all(1) for t in self.tensors()]).all(0)

    def squared_norm(self) -> Float[Tensor, " r"]:
        """||theta||^2 of every network, in float64."""
        return torch.stack([t.double().square().flatten(1).sum(1) for t in self.tensors()]).sum(0)


@dataclass(frozen=True)
class Pass:
    """Results of a forward pass: inputs a_0..a_{L-1} of the layers (a convolution's patches (R, n,
    c * k * k, positions)), z_1..z_{L-1}, the output."""

    inputs: tuple[Tensor, ...]
    pre: tuple[Tensor, ...]
    output: Float[Tensor, "r n o"]


@dataclass(frozen=True)
class Architecture:
    """A network on images (c, h, w), with `n_outputs` outputs (1 for binary and regression)."""

    network: Network
    shape: Shape
    n_outputs: int = 1

    def __post_init__(self) -> None:
        conv = self.network.conv
        if conv is not None and conv.kernel > min(self.shape[1:]):
            raise ValueError(
                f"kernel={conv.kernel} does not fit in images of {self.shape[1]}x{self.shape[2]}"
            )
        if self.n_outputs < 1:
            raise ValueError(f"n_outputs={self.n_outputs} must be at least 1")

    @property
    def d(self) -> int:
        return math.prod(self.shape)

    @property
    def n_positions(self) -> int:
        """Places that a convolution's kernel takes; 1 without a convolution."""
        conv = self.network.conv
        if conv is None:
            return 1
        return math.prod(side - conv.kernel + 1 for side in self.shape[1:])

    @cached_property
    def layer_sizes(self) -> tuple[tuple[int, int], ...]:
        """(fan in, fan out) of every layer; a convolution's are those of its kernel."""
        conv = self.network.conv
        first = self.d if conv is None else conv.channels * self.n_positions
        dense = tuple(itertools.pairwise((first, *self.network.widths, self.n_outputs)))
        if conv is None:
            return dense
        return ((self.shape[0] * conv.kernel**2, conv.channels), *dense)

    @property
    def n_layers(self) -> int:
        return len(self.layer_sizes)

    @property
    def n_parameters(self) -> int:
        with_bias = sum(
            fan_out for i, (_, fan_out) in enumerate(self.layer_sizes) if self.has_bias(i)
        )
        return with_bias + sum(fan_in * fan_out for fan_in, fan_out in self.layer_sizes)

    @property
    def homogeneous(self) -> bool:
        """phi(c theta) = c^L phi(theta) for c > 0: true with a bias in the first layer, too."""
        return self.network.activation != "gelu" and self.network.bias != "all"

    def has_bias(self, layer: int) -> bool:
        return self.network.bias == "all" or (self.network.bias == "first" and layer == 0)

    def initial(self, generators: Sequence[torch.Generator], *, dtype: torch.dtype) -> Parameters:
        """Initial weights, one generator per run; drawn on the CPU in float32, layer by layer."""
        network, n_layers = self.network, self.n_layers
        leak = network.leak if network.activation == "leaky_relu" else 0.0
        weights: list[list[Tensor]] = [[] for _ in range(n_layers)]
        biases: list[list[Tensor]] = [[] for _ in range(n_layers)]
        for generator, layer in itertools.product(generators, range(n_layers)):
            fan_in, fan_out = self.layer_sizes[layer]
            for kept, shape in ((weights, (fan_out, fan_in)), (biases, (fan_out,))):
                if kept is biases and not self.has_bias(layer):
                    continue
                if layer == 0 and network.init_std_first is not None:
                    drawn = torch.randn(shape, generator=generator) * network.init_std_first
                elif network.init_rest == "torch":
                    drawn = torch.rand(shape, generator=generator) * 2 - 1
                    drawn = drawn / math.sqrt(fan_in)
                elif kept is biases:
                    drawn = torch.zeros(fan_out)
                else:
                    drawn = torch.randn(shape, generator=generator)
                    drawn = drawn * math.sqrt(2 / (1 + leak**2) / fan_in)
                kept[layer].append(drawn)
        return Parameters(
            tuple(torch.stack(own).to(dtype) for own in weights),
            tuple(torch.stack(own).to(dtype) if own else None for own in biases),
        )

    def patches(self, x: Float[Tensor, "r n d"]) -> Float[Tensor, "r n k p"]:
        """Patches that the kernel sees, by position."""
        assert self.network.conv is not None
        images = x.reshape(-1, *self.shape)
        patches: Tensor = F.unfold(images, self.network.conv.kernel)
        return patches.view(*x.shape[:2], *patches.shape[1:])

    def fold(self, patches: Float[Tensor, "r n k p"]) -> Float[Tensor, "r n d"]:
        """The transpose of `patches`: every pixel sums what its places in the patches hold."""
        assert self.network.conv is not None
        flat = patches.flatten(0, 1)
        images: Tensor = F.fold(flat, self.shape[1:], self.network.conv.kernel)
        return images.view(*patches.shape[:2], self.d)

    def activate(self, z: Tensor) -> Tensor:
        if self.network.activation == "relu":
            return torch.relu(z)
        if self.network.activation == "leaky_relu":
            return F.leaky_relu(z, self.network.leak)
        return F.gelu(z)

    def slope(self, z: Tensor) -> Tensor:
        """f'(z), as training uses it; at 0 the left derivative, as torch has it."""
        if self.network.activation == "relu":
            return (z > 0).to(z.dtype)
        if self.network.activation == "leaky_relu":
            return (z > 0).to(z.dtype).mul_(1 - self.network.leak).add_(self.network.leak)
        return gelu_slope(z)

    def forward(
        self, parameters: Parameters, x: Float[Tensor, "r n d"], masks: Sequence[Tensor] = ()
    ) -> Pass:
        """The outputs of R networks on their own n images, and what `backward` needs. `masks`:
        factors (R, n, width) of the units of every hidden layer, if any."""
        inputs: list[Tensor] = []
        pre: list[Tensor] = []
        a = x
        for layer in range(self.n_layers):
            seen, z = self._layer(parameters, layer, a)
            inputs.append(seen)
            if layer < self.n_layers - 1:
                pre.append(z)
                a = self.activate(z) * masks[layer] if masks else self.activate(z)
        return Pass(tuple(inputs), tuple(pre), z)

    def features(
        self, parameters: Parameters, x: Float[Tensor, "r n d"], layer: int
    ) -> Float[Tensor, "r n m"]:
        """Activations of the hidden layer with that number, from 1; a convolution is the first."""
        for k in range(layer):
            _seen, z = self._layer(parameters, k, x)
            x = self.activate(z)
        return x

    def classify(
        self, parameters: Parameters, features: Float[Tensor, "r n m"], layer: int
    ) -> Float[Tensor, "r n o"]:
        """Outputs from the features of a hidden layer."""
        z = features
        for k in range(layer, self.n_layers):
            _seen, z = self._layer(parameters, k, features)
            features = self.activate(z)
        return z

    def _layer(self, parameters: Parameters, layer: int, a: Tensor) -> tuple[Tensor, Tensor]:
        """(what the layer sees of `a`: a convolution, its patches; what comes out of it)."""
        w, b = parameters.weights[layer], parameters.biases[layer]
        if layer == 0 and self.network.conv is not None:
            a = self.patches(a)
            z = w.unsqueeze(1) @ a
            return a, (z if b is None else z + b[:, None, :, None]).flatten(2)
        return a, torch.bmm(a, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), a, w.mT)

    def errors(
        self,
        parameters: Parameters,
        passed: Pass,
        output_gradient: Float[Tensor, "r n o"],
        masks: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """Derivatives of sum(output * output_gradient) with respect to the outputs of every layer,
        before the activation: d_1 .. d_L, each (R, n, width)."""
        errors = [output_gradient]
        for layer in range(self.n_layers - 2, -1, -1):
            d = torch.bmm(errors[-1], parameters.weights[layer + 1])
            d = d.mul_(self.slope(passed.pre[layer]))
            errors.append(d.mul_(masks[layer]) if masks else d)
        return tuple(reversed(errors))

    def summed(self, passed: Pass, errors: Sequence[Tensor]) -> Parameters:
        """Gradients with respect to weights and biases from `errors`, summed over the images."""
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        for layer, (a, d) in enumerate(zip(passed.inputs, errors, strict=True)):
            if layer == 0 and self.network.conv is not None:
                maps = d.unflatten(2, (-1, self.n_positions))
                weights.append(torch.einsum("rncp,rnkp->rck", maps, a))
                biases.append(maps.sum((1, 3)) if self.has_bias(0) else None)
            else:
                weights.append(torch.bmm(d.mT, a))
                biases.append(d.sum(1) if self.has_bias(layer) else None)
        return Parameters(tuple(weights), tuple(biases))

    def backward(
        self, parameters: Parameters, passed: Pass, output_gradient: Float[Tensor, "r n o"]
    ) -> Parameters:
        """Gradients of sum(output * output_gradient) with respect to weights and biases."""
        return self.summed(passed, self.errors(parameters, passed, output_gradient))

    def to_state_dict(self, parameters: Parameters, run: int = 0) -> dict[str, Tensor]:
        """One network's weights as torch's layers hold them: `0.weight`, `0.bias`, `1.weight`..."""
        state = {}
        for layer, (w, b) in enumerate(zip(parameters.weights, parameters.biases, strict=True)):
            state[f"{layer}.weight"] = w[run].reshape(self._torch_shape(layer)).contiguous()
            if b is not None:
                state[f"{layer}.bias"] = b[run].contiguous()
        return state

    def from_state_dict(self, state: Mapping[str, Tensor]) -> Parameters:
        """One network (R = 1) from tensors in layer order, whatever their names are. Layers are
        taken in the order of the mapping, or, where shapes do not fit that way, in natural order of
        their names. Raises ValueError naming what was expected and what is there."""
        expected = []
        for layer in range(self.n_layers):
            expected.append(self._torch_shape(layer))
            if self.has_bias(layer):
                expected.append((self.layer_sizes[layer][1],))
        for names in (list(state), sorted(state, key=_natural)):
            if [tuple(state[name].shape) for name in names] == expected:
                tensors = [
                    state[name].reshape(shape[0], -1)[None] if len(shape) > 1 else state[name][None]
                    for name, shape in zip(names, expected, strict=True)
                ]
                skeleton = self.initial([torch.Generator()], dtype=torch.float32)
                return skeleton.like(tensors)
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        raise ValueError(
            f"the weights are {found}, but this architecture needs, in this order, {expected}; "
            "correct the architecture, or leave out tensors that are no layers of it"
        )

    def _torch_shape(self, layer: int) -> tuple[int, ...]:
        fan_in, fan_out = self.layer_sizes[layer]
        conv = self.network.conv
        if layer == 0 and conv is not None:
            return (fan_out, self.shape[0], conv.kernel, conv.kernel)
        return (fan_out, fan_in)


def gelu_slope(z: Tensor) -> Tensor:
    """GELU'(z) = Phi(z) + z phi(z), with the standard normal's distribution and density."""
    return 0.5 * (1 + torch.erf(z / SQRT_2)) + z * torch.exp(-z.square() / 2) / SQRT_2_PI


def gelu_curvature(z: Tensor) -> Tensor:
    """GELU''(z) = phi(z) (2 - z^2)."""
    return torch.exp(-z.square() / 2) / SQRT_2_PI * (2 - z.square())


def parse_architecture(
    text: str,
    shape: Shape | None = None,
    *,
    activation: Activation = "relu",
    leak: float = 0.01,
    bias: Bias = "none",
) -> Architecture:
    """`mlp:3072-1000-1000-1` or `conv:3x32:3072-1000-1` (kernel x channels) as an architecture. The
    first number is d = c h w; without `shape`, d = 3 s^2 is read as a colour image, d = s^2 as a
    grey one, anything else as a row of numbers. Raises ValueError naming the fix."""
    match = re.fullmatch(r"(?:mlp:|conv:(\d+)x(\d+):)(\d+(?:-\d+)+)", text.strip())
    if match is None or len(sizes := [int(n) for n in match[3].split("-")]) < 3:
        raise ValueError(
            f"architecture {text!r} is not of the form mlp:3072-1000-1000-1 or "
            "conv:3x32:3072-1000-1 (input, hidden layers, outputs)"
        )
    d, *widths, n_outputs = sizes
    if shape is not None and math.prod(shape) != d:
        raise ValueError(
            f"architecture {text!r} has {d} inputs, but images of {shape} have {math.prod(shape)}"
        )
    network = Network(
        widths=tuple(widths),
        conv=Conv(kernel=int(match[1]), channels=int(match[2])) if match[1] else None,
        bias=bias,
        activation=activation,
        leak=leak,
    )
    if shape is None:
        sides = {channels: math.isqrt(d // channels) for channels in (3, 1)}
        square = [(c, side, side) for c, side in sides.items() if c * side**2 == d]
        shape = square[0] if square else (1, 1, d)
    return network.on(shape, n_outputs)


def _natural(name: str) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", name)
    # "weight" before "bias", as torch registers them.
    ranked = [part.replace("weight", "a").replace("bias", "b") for part in parts]
    return [(0, int(part)) if part.isdigit() else (1, part) for part in ranked]


INT8_MAX = 127


@dataclass(frozen=True, kw_only=True)
class Released(Strict):
    """Handover of a victim's weights.

    `precision`: "full" is that of the training; "float16" rounds to half precision; "int8" rounds
    the weights of every neuron to 255 steps between minus and plus their largest size, as torch's
    per-channel quantisation does, and a layer's biases likewise. `noise`: the standard deviation of
    normal noise on every weight, in units of the root mean square of its tensor.
    """

    precision: Literal["full", "float16", "int8"] = "full"
    noise: Annotated[float, Within("[0, inf)", fix="0.01 is 1 % of a weight's usual size")] = 0.0

    def of(self, parameters: Parameters, generators: Sequence[torch.Generator]) -> Parameters:
        """The weights of R victims as they are given away; noise from a generator of each victim,
        on the CPU, which is advanced. The weights themselves where nothing is changed."""
        given = parameters
        if self.noise:

            def noisy(tensor: Tensor) -> Tensor:
                size = tensor.flatten(1).square().mean(1).sqrt()
                drawn = [torch.randn(tensor.shape[1:], generator=g) for g in generators]
                wide = size.view(-1, *[1] * (tensor.dim() - 1))
                return tensor + self.noise * wide * torch.stack(drawn).to(tensor)

            given = given.map(noisy)
        if self.precision == "float16":
            return given.map(lambda tensor: tensor.half().to(tensor))
        if self.precision == "int8":

            def in_steps(tensor: Tensor) -> Tensor:
                step = tensor.abs().amax(-1, keepdim=True) / INT8_MAX
                return torch.where(step > 0, (tensor / step).round() * step, tensor)  # 0 stays 0

            return given.map(in_steps)
        return given
