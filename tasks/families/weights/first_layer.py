"""First layers in files beside a given network's: as training started, in gradients, and as
optimisers remember it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.attacks.span.rows import SpanRows, gradient_rows
from recon_core.victims.network import Parameters
from storage.layers import find_layers
from storage.optimiser_states import OptimiserState
from storage.weights import WeightFile, WeightsError, read_states, read_weights

if TYPE_CHECKING:
    from tasks.families.weights.inputs import Victim

OF_THIS_TRAINING = "in a checkpoint of this training: give one with the same layers"
AMONG_GRADIENTS = "among the gradients: give those of this network, under its tensors' names"


@dataclass(frozen=True)
class FirstLayer:
    """A first layer, `parameters` (R = 1) of it alone, over flat images (c, h, w) in RGB."""

    file: WeightFile
    parameters: Parameters


@dataclass(frozen=True)
class Given:
    """Rows to be taken apart, beside the weights: where they are from, for people, the SHA-256 of
    that file, and whether it is the file of weights itself."""

    said: str
    sha256: str
    rows: SpanRows
    is_own: bool = False


def read_first_layer(path: Path, victim: Victim, option: str, fix: str) -> FirstLayer:
    """The victim's first layer in a file of `option`: by its name, as the only tensor of its shape,
    or as the first of the same network's layers. Raises WeightsError, of which `fix` is the end, if
    there is none."""
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
    return FirstLayer(file, in_images(Parameters((weight,), (begun,)), victim))


def read_gradients(paths: Sequence[Path], victim: Victim) -> tuple[Given, ...]:
    """Gradients of batches in the first layer, each of a file of its own. Raises WeightsError for
    files without, ValueError for gradients that are zero or not finite."""
    found = []
    for path in paths:
        gradient = read_first_layer(path, victim, "--gradients", AMONG_GRADIENTS)
        if not bool(gradient.parameters.isfinite()) or not float(
            gradient.parameters.squared_norm()
        ):
            raise ValueError(
                f"--gradients {path}: those of the first layer are zero or not finite; give the "
                "gradients of a batch as they were computed"
            )
        rows = gradient_rows(gradient.parameters, "gradients")
        found.append(Given(str(path), gradient.file.sha256, rows))
    return tuple(found)


def given_states(
    victim: Victim, optimizers: Sequence[Path], checkpoints: Sequence[Path]
) -> tuple[tuple[Given, ...], str]:
    """(what optimisers remember of the first layer; why that in the file of weights is of no use,
    empty if it is). `optimizers`: files of theirs, beside the same weights; `checkpoints`: others
    of the same training. Raises WeightsError for files of no use."""
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
        file = read_first_layer(path, victim, "--checkpoint", OF_THIS_TRAINING).file
        if not file.states:
            raise WeightsError(
                f"--checkpoint {path} holds no optimiser's state with averages of gradients; give "
                "one that does, or an earlier one as --initial"
            )
        found += [_given(state, file, victim, file.sha256) for state in file.states]
    return tuple(found), problem


def _given(state: OptimiserState, file: WeightFile, victim: Victim, sha256: str) -> Given:
    """What an optimiser remembers of the first layer, less its weight decay in `file`."""
    layers = victim.layers
    own = [name for layer in layers.layers for name in (layer.weight, layer.bias) if name]
    names = list(file.tensors) if file.in_order else dict.fromkeys([*own, *file.tensors])
    shapes = {name: file.tensors[name].shape for name in names if name in file.tensors}
    first = layers.layers[0]
    wanted = {name: shapes[name] for name in (first.weight, first.bias) if name}
    state.check_fits(wanted, shapes)
    numbers = state.numbers(shapes)

    def parameters(arrays: Mapping[str, npt.NDArray[Any]]) -> Parameters:
        like = zip(arrays.values(), _first_tensors(victim), strict=True)
        tensors = [torch.from_numpy(a).to(t.dtype).clone().reshape(t.shape) for a, t in like]
        bias = tensors[1] if len(tensors) > 1 else None
        return in_images(Parameters((tensors[0],), (bias,)), victim)

    moments = {name: state.moments[numbers[name]] for name in wanted}
    gradient = parameters({name: m for name, m in moments.items() if m is not None})
    decayed = None
    if any(state.decays[numbers[name]] for name in wanted):
        decayed = parameters({n: file.tensors[n] * state.decays[numbers[n]] for n in wanted})
    rows = gradient_rows(gradient, "state", decayed)
    return Given(state.said, sha256, rows, is_own=state.path == victim.file.path)


def _first_tensors(victim: Victim) -> Iterator[Tensor]:
    yield victim.parameters.weights[0]
    if victim.parameters.biases[0] is not None:
        yield victim.parameters.biases[0]


def in_images(parameters: Parameters, victim: Victim) -> Parameters:
    """Parameters whose first layer is over images (c, h, w) in RGB."""
    (c, h, w), conv = victim.architecture.shape, victim.architecture.network.conv
    shape = (c, h, w) if conv is None else (c, conv.kernel, conv.kernel)
    first = victim.order.to_images(parameters.weights[0], shape)
    return Parameters((first, *parameters.weights[1:]), parameters.biases)
