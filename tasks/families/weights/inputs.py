"""The network of an attack on given weights, and files beside it that hold its first layer: as
training started, in gradients, and in optimisers' states."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.attacks.span.inputs import ChannelOrder, InputOrder, PixelOrder
from recon_core.attacks.span.rows import Source, SpanRows, gradient_rows, joined, weight_rows
from recon_core.victims.network import (
    Activation,
    Architecture,
    Parameters,
    parse_architecture,
)
from storage.layers import INPUT_MEAN, INPUT_STD, Layers, find_layers, only_named
from storage.optimiser_states import OptimiserState
from storage.weights import WeightFile, WeightsError, read_states, read_weights
from tasks.attack_file.pictures import SIDES, Shape, picture_folder

MANY_OUTPUTS = 100
"""Outputs up to which a network is a classifier, however few inputs it has."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}
OF_THIS_TRAINING = "in a checkpoint of this training: give one with the same layers"
AMONG_GRADIENTS = "among the gradients: give those of this network, under its tensors' names"


@dataclass(frozen=True)
class FirstLayer:
    """A first layer, `parameters` (R = 1) of it alone, over flat images (c, h, w) in RGB."""

    file: WeightFile
    parameters: Parameters


@dataclass(frozen=True)
class Given:
    """Rows for the span attack from beside the weights: their origin in words, the SHA-256 of that
    file, and whether it is the file of weights itself."""

    said: str
    sha256: str
    rows: SpanRows
    is_own: bool = False


@dataclass(frozen=True)
class Victim:
    """A network to be attacked: `parameters` of R = 1, on the CPU, over flat images (c, h, w) in
    RGB, whatever the `order` of its inputs, and its start, if known. `own_mean` (c, h, w) and
    `own_std` (c, 1, 1): constants in its file by which inputs are normalised. `states`: optimisers'
    averages of the first layer's gradients, `unused_state`: why one in the file cannot be used;
    `gradients` of batches in the first layer."""

    file: WeightFile
    layers: Layers
    architecture: Architecture
    parameters: Parameters
    start: FirstLayer | None = None
    order: InputOrder = field(default_factory=InputOrder)
    own_mean: Tensor | None = None
    own_std: Tensor | None = None
    states: tuple[Given, ...] = ()
    unused_state: str = ""
    gradients: tuple[Given, ...] = ()

    @property
    def sources(self) -> dict[Source, SpanRows]:
        """Rows that the span attack can take apart, as a rule the best first."""
        start = None if self.start is None else self.start.parameters
        rows: dict[Source, SpanRows] = {}
        if self.gradients:
            rows["gradients"] = joined([part.rows for part in self.gradients])
        if self.states:
            rows["state"] = joined([part.rows for part in self.states])
        return rows | {"weights": weight_rows(self.parameters, start)}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that were read or inferred, for people."""
        network = self.architecture.network
        facts = {
            "file": str(self.file.path),
            "format": self.file.kind,
            "sha256": self.file.sha256,
            "architecture": self.layers.architecture,
            "biases": self.layers.bias,
            "activation": network.activation,
            "images": "x".join(map(str, self.architecture.shape)),
            "inputs": str(self.order),
            "parameters": self.architecture.n_parameters,
        }
        if network.activation == "leaky_relu":
            facts["leak"] = network.leak
        if self.start is not None:
            facts["start"] = str(self.start.file.path)
        for name, given in (("optimiser's state", self.states), ("gradients", self.gradients)):
            if given:
                facts[name] = "; ".join(part.said for part in given)
        for name, own in (("mean", self.own_mean), ("std", self.own_std)):
            if own is not None:
                numbers = ",".join(f"{v:.4g}" for v in own.mean((1, 2)).tolist())
                facts[f"own {name}"] = f"{numbers}, in the file (as --{name} {numbers})"
        if self.file.left_out:
            facts["left out"] = "; ".join(self.file.left_out)
        return facts | ({"note": self.layers.note} if self.layers.note else {})


def read_victim(
    weights: Path,
    *,
    arch: str | None,
    shape: Shape | None,
    activation: Activation,
    leak: float,
    dtype: str,
    initial: Path | None = None,
    optimizers: Sequence[Path] = (),
    checkpoints: Sequence[Path] = (),
    gradients: Sequence[Path] = (),
    order: InputOrder | None = None,
    pictures: str | None = None,
) -> Victim:
    """Read the network in a file; `arch` is checked against its tensors. `initial`: a file of the
    first layer at the start of training, or earlier. `optimizers`, `checkpoints`: files of
    optimisers' states (`read_given_states`); `gradients`: of batches. `order`: of its inputs.
    `pictures`: a source whose pictures have the images' shape where `shape` is not given. Raises
    WeightsError if a file or its layers cannot be used or are not what `arch` says, ValueError if
    `arch` or `leak` cannot be read."""
    file = read_weights(weights)
    layers = find_layers(file, shape)
    text = layers.architecture
    if arch is None:
        _check_classifies(weights, layers)
    else:
        given, found = parse_architecture(arch, shape), parse_architecture(text, layers.shape)
        if (given.network, given.d, given.n_outputs) != (found.network, found.d, found.n_outputs):
            raise WeightsError(
                f"--arch says {arch.strip()} ({given.n_parameters:,} weights), but the tensors in "
                f"{weights} make {text}; correct --arch or leave it out"
            )
    architecture = parse_architecture(
        text, layers.shape, activation=activation, leak=leak, bias=layers.bias
    )
    if shape is None and pictures is not None:
        architecture = _sized_by(architecture, pictures, weights)
    state = {name: torch.from_numpy(a) for name, a in layers.in_order(file.tensors).items()}
    parameters = architecture.from_state_dict(state).map(lambda t: t.to(DTYPES[dtype]).clone())
    order = order or InputOrder()
    if architecture.network.conv is not None and order.pixels != "chw":
        raise ValueError(
            f"--pixel-order {order.pixels} is of flat inputs; {weights} begins with a convolution, "
            "which takes channels, rows and columns: leave it out"
        )
    own_mean, mean_name = _constant(file, INPUT_MEAN, architecture, order)
    own_std, std_name = _constant(file, INPUT_STD, architecture, order)
    own_std = None if own_std is None or own_std.std((1, 2)).any() else own_std[:, :1, :1]
    unused = tuple(
        f"{name} (a constant of inputs that does not fit images in [0, 1]: give {option})"
        for own, name, option in ((own_mean, mean_name, "--mean"), (own_std, std_name, "--std"))
        if own is None and name
    )
    file = replace(file, left_out=(*file.left_out, *unused))
    victim = Victim(file, layers, architecture, parameters, None, order, own_mean, own_std)
    start: FirstLayer | None = None
    states: list[Given] = []
    batches: list[Given] = []
    unused_state = ""
    if initial is not None:
        fix = "as it was before this training: give the same network's first save"
        start = _first_layer(initial, victim, "--initial", fix)
    if architecture.network.conv is None:
        states, unused_state = read_given_states(victim, optimizers, checkpoints)
        for path in gradients:
            gradient = _first_layer(path, victim, "--gradients", AMONG_GRADIENTS)
            if not (gradient.parameters.isfinite() and gradient.parameters.squared_norm()):
                raise ValueError(
                    f"--gradients {path}: those of the first layer are zero or not finite; give "
                    "the gradients of a batch as they were computed"
                )
            rows = gradient_rows(gradient.parameters, "gradients")
            batches.append(Given(str(path), gradient.file.sha256, rows))
    return replace(
        victim, parameters=_in_images(parameters, victim), start=start, states=tuple(states),
        unused_state=unused_state, gradients=tuple(batches),
    )  # fmt: skip


def _sized_by(architecture: Architecture, source: str, path: Path) -> Architecture:
    """The architecture with the shape of a source's pictures, if they have as many numbers. Raises
    ValueError where a convolution's guess is not what they are."""
    kind, _colon, folder = source.partition(":")
    channels, *sides = architecture.shape
    if kind == "folder":
        height, width = picture_folder(folder, "--data").first_size()
    else:
        height = width = SIDES.get(kind, sides[0])
    if [height, width] == sides:
        return architecture
    if architecture.network.conv is not None:
        guess = "x".join(map(str, sides))
        raise ValueError(
            f"pictures of --data are {height}x{width}, but {path} takes {guess} if its convolution "
            "has stride 1 and no padding, and others this attack does not know; give --shape "
            f"{channels}x{guess} if it has"
        )
    fits = [c for c in (3, 1) if c * height * width == architecture.d]
    return replace(architecture, shape=(fits[0], height, width)) if fits else architecture


def order_said(pixels: PixelOrder | None, channels: ChannelOrder | None) -> InputOrder | None:
    """The order of inputs by the options; None if neither is given."""
    if pixels is None and channels is None:
        return None
    return InputOrder(pixels or "chw", channels or "rgb")


def _constant(
    file: WeightFile, pattern: re.Pattern[str], architecture: Architecture, order: InputOrder
) -> tuple[Tensor | None, str]:
    """(a constant in the file that normalises inputs, as (c, h, w) in [0, 1], or None if none fits;
    its name). One for pixels from 0 to 255 is divided by 255."""
    name = only_named({n: t.shape for n, t in file.tensors.items()}, pattern)
    if name is None:
        return None, ""
    values, shape = torch.from_numpy(file.tensors[name]).float().flatten(), architecture.shape
    values = values / 255 if float(values.max()) > 1 else values
    if not bool(((values >= 0) & (values <= 1)).all()):
        return None, name
    if len(values) == architecture.d:
        return order.to_images(values, shape).unflatten(0, shape), name
    if len(values) not in (1, shape[0]):
        return None, name
    values = values.flip(0) if order.channels == "bgr" else values
    return values.expand(shape[0])[:, None, None].expand(shape).contiguous(), name


def _check_classifies(path: Path, layers: Layers) -> None:
    """Raises WeightsError for a network that gives about as many numbers as it takes."""
    n_inputs = layers.layers[0].n_inputs if layers.shape is None else math.prod(layers.shape)
    n_outputs = layers.layers[-1].n_outputs
    if n_outputs < max(MANY_OUTPUTS, n_inputs / 2):
        return
    what = "an autoencoder" if n_outputs == n_inputs else "an autoencoder or a denoiser"
    raise WeightsError(
        f"{path} takes {n_inputs} numbers and gives {n_outputs}: {what}; for an autoencoder, "
        f"palimpsest attack autoencoder --weights {path}; for a classifier of {n_outputs} classes, "
        f"give --arch {layers.architecture}"
    )


def _first_layer(path: Path, victim: Victim, option: str, fix: str) -> FirstLayer:
    """Read the victim's first layer from a file of `option`: by its name, as the only tensor of its
    shape, or as the first of the same network's layers. Raises WeightsError, ending with the hint
    `fix`, if there is none."""
    file, first, parameters = read_weights(path, option), victim.layers.layers[0], victim.parameters
    with suppress(WeightsError):
        if first.weight not in file.tensors:
            own = find_layers(file).layers[0]
            if own.shape == first.shape:
                names = {first.weight: own.weight, first.bias: own.bias}
                file = replace(file, tensors={**file.tensors} | {
                    str(name): file.tensors[found] for name, found in names.items() if found
                })  # fmt: skip

    def named(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        found = file.tensors.get(name)
        alike = [a for a in file.tensors.values() if a.shape == shape]
        if found is None and len(alike) == 1:
            found = alike[0]
        if found is None or found.shape != shape:
            what = "has none" if found is None else f"has {name} {found.shape}"
            if found is None and len(alike) > 1:
                what = f"has {len(alike)} tensors of that shape, none of them called {name}"
            raise WeightsError(
                f"{option} {path} {what}; expected the first layer's {name} {shape} {fix}"
            )
        return torch.from_numpy(found).to(like.dtype).clone().reshape(like.shape)

    bias = parameters.biases[0]
    weight = named(first.weight, first.shape, parameters.weights[0])
    begun = None
    if bias is not None and first.bias is not None:
        begun = named(first.bias, first.shape[:1], bias)
    return FirstLayer(file, _in_images(Parameters((weight,), (begun,)), victim))


def read_given_states(
    victim: Victim, optimizers: Sequence[Path], checkpoints: Sequence[Path]
) -> tuple[list[Given], str]:
    """(optimisers' states of the first layer; why that in the file of weights cannot be used, or
    ""). `optimizers`: files of states beside the same weights; `checkpoints`: others of the same
    training. Raises WeightsError for files that cannot be used."""
    found, problem = [], ""
    for state in victim.file.states:
        try:
            found.append(_given(state, victim.file, victim, victim.file.sha256))
        except WeightsError as error:
            problem = str(error)
    for path in optimizers:
        sha256, states = read_states(path)
        found += [_given(state, victim.file, victim, sha256) for state in states]
    for path in checkpoints:
        file = _first_layer(path, victim, "--checkpoint", OF_THIS_TRAINING).file
        if not file.states:
            raise WeightsError(
                f"--checkpoint {path} holds no optimiser's state with averages of gradients; give "
                "one that does, or an earlier one as --initial"
            )
        found += [_given(state, file, victim, file.sha256) for state in file.states]
    return found, problem


def _given(state: OptimiserState, file: WeightFile, victim: Victim, sha256: str) -> Given:
    """The averages of the first layer's gradients in a state, less the weight decay of `file`."""
    layers = victim.layers
    own = [name for layer in layers.layers for name in (layer.weight, layer.bias) if name]
    names = list(file.tensors) if file.in_order else dict.fromkeys([*own, *file.tensors])
    shapes = {name: file.tensors[name].shape for name in names if name in file.tensors}
    first = layers.layers[0]
    wanted = {name: shapes[name] for name in (first.weight, first.bias) if name}
    state.check_fits(wanted, shapes)
    numbers = state.numbers(shapes)

    def parameters(arrays: Mapping[str, npt.NDArray[Any]]) -> Parameters:
        own = (victim.parameters.weights[0], victim.parameters.biases[0])
        like = zip(arrays.values(), (t for t in own if t is not None), strict=True)
        tensors = [torch.from_numpy(a).to(t.dtype).clone().reshape(t.shape) for a, t in like]
        bias = tensors[1] if len(tensors) > 1 else None
        return _in_images(Parameters((tensors[0],), (bias,)), victim)

    moments = {name: state.moments[numbers[name]] for name in wanted}
    gradient = parameters({name: m for name, m in moments.items() if m is not None})
    decayed = None
    if any(state.decays[numbers[name]] for name in wanted):
        decayed = parameters({n: file.tensors[n] * state.decays[numbers[n]] for n in wanted})
    rows = gradient_rows(gradient, "state", decayed)
    return Given(state.said, sha256, rows, is_own=state.path == victim.file.path)


def _in_images(parameters: Parameters, victim: Victim) -> Parameters:
    """Parameters whose first layer is over images (c, h, w) in RGB."""
    (c, h, w), conv = victim.architecture.shape, victim.architecture.network.conv
    shape = (c, h, w) if conv is None else (c, conv.kernel, conv.kernel)
    first = victim.order.to_images(parameters.weights[0], shape)
    return Parameters((first, *parameters.weights[1:]), parameters.biases)
