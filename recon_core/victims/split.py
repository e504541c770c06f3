"""Classifiers that are split at a layer: the client computes h(x), the server g(h); R of them.

MixCon paper: f = g(h(x)), and the attack inverts what is sent, z = h(x), at the *cut* (section 2):
what the layer gives after its ReLU (and pooling), as one vector. Images that all R networks share
come with a leading dimension of 1. `CutClassifier` cuts any one classifier of torch's at a module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from recon_core.strict import Strict, Within
from recon_core.victims.autoencoder import Shape, Weights, has_onednn, stacked
from recon_core.victims.split_layers import pooled_convolution

LENET_CUTS = 4
KERNEL = 5


@dataclass(frozen=True, kw_only=True)
class LeNet5(Strict):
    """conv 6@5x5, pool 2, conv 16@5x5, pool 2, dense 120, 84, C (LeCun et al. 1998), as it is used
    today: ReLU, maxima, all channels seen by all, and linear logits.

    The MixCon paper names no variant. `cut`: after the 1st or 2nd convolution block or the 1st or
    2nd dense layer. Images of 28x28 are padded to 32x32 in the first convolution, so that both have
    400 features at the paper's cut. Other sizes are not padded.
    """

    kind: Literal["lenet5"] = "lenet5"
    cut: Annotated[int, Within(f"[1, {LENET_CUTS}]", fix="others are no hidden layer")] = 2

    def on(self, shape: Shape, n_classes: int) -> SplitModel:
        return SplitModel(self, shape, n_classes)


@dataclass(frozen=True, kw_only=True)
class SplitMLP(Strict):
    """Dense layers with ReLU and biases; the images, or vectors as (1, 1, d), flattened.

    Defaults: the MixCon paper, section 4.2, 10-500-2-100-2, cut after the second layer; its
    "deeper" network has widths (500, 2, 100, 100, 100), its "wider" one (500, 2, 2048). `init`:
    "paper" draws each entry of W_k and b_k from N(u_k, 1) with one u_k ~ N(0, alpha) for the layer;
    the value of `alpha` is not given there. "torch" is the default of torch's layers.
    """

    kind: Literal["mlp"] = "mlp"
    widths: tuple[int, ...] = (500, 2, 100)
    cut: int = 2
    init: Literal["paper", "torch"] = "paper"
    alpha: Annotated[float, Within("[0, inf)", fix="it is a variance")] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.widths or min(self.widths) < 1:
            raise ValueError(
                f"widths={self.widths} must name at least one hidden layer, each 1 or wider, for "
                "example (500, 2, 100)"
            )
        if not 1 <= self.cut <= len(self.widths):
            raise ValueError(
                f"cut={self.cut} is no hidden layer of this network; give 1 to {len(self.widths)}"
            )

    def on(self, shape: Shape, n_classes: int) -> SplitModel:
        return SplitModel(self, shape, n_classes)


SplitNetwork = LeNet5 | SplitMLP


@dataclass(frozen=True)
class SplitModel:
    """Convolution blocks `conv1`, ... and dense layers `fc1`, ..., with `.weight` and `.bias`, on
    images of one shape; the last one gives the logits."""

    network: SplitNetwork
    shape: Shape
    n_classes: int

    def __post_init__(self) -> None:
        if self.n_classes < 2:
            raise ValueError(f"n_classes={self.n_classes}; a classifier needs at least 2")
        if self.maps and min(self.maps[1][1:]) < 1:
            raise ValueError(
                f"images of {self.shape[1]}x{self.shape[2]} are too small for two convolutions of "
                f"{KERNEL}x{KERNEL} and two poolings; give 16x16 or larger (the paper's are 28x28 "
                "and 32x32)"
            )

    @property
    def _padding(self) -> int:
        return 2 if self.shape[1:] == (28, 28) else 0

    @cached_property
    def maps(self) -> tuple[Shape, ...]:
        """Shapes of what the convolution blocks give."""
        if isinstance(self.network, SplitMLP):
            return ()
        first = [(side + 2 * self._padding - KERNEL + 1) // 2 for side in self.shape[1:]]
        second = [(side - KERNEL + 1) // 2 for side in first]
        return (6, first[0], first[1]), (16, second[0], second[1])

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """What the first dense layer takes, and what each gives."""
        hidden = self.network.widths if isinstance(self.network, SplitMLP) else (120, 84)
        return math.prod((self.shape, *self.maps)[-1]), *hidden, self.n_classes

    @property
    def n_features(self) -> int:
        return (*map(math.prod, self.maps), *self.widths[1:])[self.network.cut - 1]

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for i, (seen, made) in enumerate(itertools.pairwise((self.shape, *self.maps)), start=1):
            shapes[f"conv{i}.weight"] = (made[0], seen[0], KERNEL, KERNEL)
            shapes[f"conv{i}.bias"] = (made[0],)
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(self.widths), start=1):
            shapes |= {f"fc{i}.weight": (fan_out, fan_in), f"fc{i}.bias": (fan_out,)}
        return shapes

    def features(
        self, weights: Mapping[str, Tensor], x: Float[Tensor, "q n c h w"]
    ) -> Float[Tensor, "r n m"]:
        """h(x) of R networks on their own n images (q = r), or on the same (q = 1)."""
        return self._layers(weights, x, 0, self.network.cut).flatten(2)

    def classify(
        self, weights: Mapping[str, Tensor], features: Float[Tensor, "r n m"]
    ) -> Float[Tensor, "r n k"]:
        cut, a = self.network.cut, features
        if cut < len(self.maps):
            a = features.unflatten(2, self.maps[cut - 1])
        return self._layers(weights, a, cut, len(self.maps) + len(self.widths) - 1)

    def _layers(self, weights: Mapping[str, Tensor], a: Tensor, start: int, stop: int) -> Tensor:
        """Layers from number `start`, each with its ReLU but the last of all."""
        last = len(self.maps) + len(self.widths) - 2
        for i in range(start, stop):
            is_block = i < len(self.maps)
            name = f"conv{i + 1}" if is_block else f"fc{i + 1 - len(self.maps)}"
            weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
            if is_block:
                a = _block(weight, bias, a, padding=0 if i else self._padding)
                continue
            a = a.flatten(2).expand(len(weight), -1, -1)
            z = torch.baddbmm(bias.unsqueeze(1), a, weight.mT)
            a = z if i == last else z.relu()
        return a


@dataclass(frozen=True)
class CutClassifier:
    """h(x) of one classifier of torch's, cut after the module called `name` in `named_modules()`.
    What comes after the cut is not computed. A module that is called several times for an image
    cuts where it is called first."""

    classifier: nn.Module
    name: str

    def __post_init__(self) -> None:
        names = [name for name, _ in self.classifier.named_modules() if name]
        if self.name not in names:
            raise ValueError(f"no module is called {self.name!r}; there are {', '.join(names)}")

    def __call__(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b m"]:
        """The module's output, one vector per image; differentiable in x. ValueError if the
        classifier is in training mode, or its module gives no tensor with a row per image."""
        if self.classifier.training:
            raise ValueError(
                "the classifier is in training mode, where h(x) depends on the other images or on "
                "chance; call its eval() first"
            )

        def stop(_module: nn.Module, _inputs: object, output: object) -> None:
            raise _Reached(output)

        hook = self.classifier.get_submodule(self.name).register_forward_hook(stop)
        try:
            self.classifier(x)
        except _Reached as reached:
            h = reached.output
        else:
            raise ValueError(f"the classifier never calls its module {self.name!r}; name another")
        finally:
            hook.remove()
        if not isinstance(h, Tensor) or h.dim() < 2 or len(h) != len(x):
            raise ValueError(
                f"the module {self.name!r} does not give one tensor with a row per image; cut at "
                "another"
            )
        return h.flatten(1)


class _Reached(Exception):
    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output


def initial_weights(
    model: SplitModel, generators: Sequence[torch.Generator], *, dtype: torch.dtype
) -> Weights:
    """Starts of R trainings, one generator each: as torch's own layers do, uniform in
    +-1/sqrt(fan in), or as the settings of a `SplitMLP` say. Drawn on the CPU in float32, layer by
    layer."""
    network, networks = model.network, []
    for generator in generators:
        shift, scale = 0.0, 1.0
        weights: Weights = {}
        for name, shape in model.tensor_shapes.items():
            starts_layer = name.endswith(".weight")
            if isinstance(network, SplitMLP) and network.init == "paper":
                if starts_layer:
                    u = torch.randn((), generator=generator)
                    shift = math.sqrt(network.alpha) * float(u)
                weights[name] = shift + torch.randn(shape, generator=generator)
                continue
            if starts_layer:
                scale = 1 / math.sqrt(math.prod(shape[1:]))
            weights[name] = (torch.rand(shape, generator=generator) * 2 - 1) * scale
        networks.append(weights)
    return stacked(networks, dtype)


def _block(
    weight: Tensor, bias: Tensor, x: Float[Tensor, "q n c h w"], *, padding: int
) -> Float[Tensor, "r n o y x"]:
    """ReLU of the pooled convolutions of R networks, of their own images or of the same (q = 1)."""
    if has_onednn(x):
        return pooled_convolution(weight, bias, x, padding)
    a = x.transpose(0, 1).flatten(1, 2)
    z = F.conv2d(a, weight.flatten(0, 1), bias.flatten(), padding=padding, groups=len(x))
    pooled: Tensor = F.max_pool2d(z, 2).relu().unflatten(1, weight.shape[:2])
    return pooled.transpose(0, 1)


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
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in weights.items()}
    if shapes != model.tensor_shapes:
        raise ValueError(
            f"weights of {shapes} for a network of {model.tensor_shapes}; give those that "
            "initial_weights or a training of this network gave"
        )
    sizes = sorted({len(tensor) for tensor in weights.values()})
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"weights of {sizes} networks; all need the same number, 1 or more")
    n_networks = sizes[0]
    if x.dim() not in (4, 5) or tuple(x.shape[-3:]) != tuple(model.shape):
        raise ValueError(
            f"images {tuple(x.shape)} for a network of {tuple(model.shape)}; give (n, c, h, w), or "
            "(networks, n, c, h, w), to a network .on their shape"
        )
    if x.dim() == 5 and len(x) != n_networks:
        raise ValueError(
            f"images of {len(x)} networks for {n_networks}; give (n, c, h, w) to share them"
        )
    if labels is None:
        return n_networks
    shape, n_images, n_classes = tuple(labels.shape), x.shape[-4], model.n_classes
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
    return n_networks
