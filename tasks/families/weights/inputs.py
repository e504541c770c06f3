"""The network of an attack on given weights, the order of its inputs, and files beside it that hold
its first layer: as training started, in gradients, and in optimisers' states."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.inputs import (
    InputOrder,
    better_order,
    orders_of,
    shares_in_span,
    smoother_order,
)
from recon_core.attacks.span.rows import Source, SpanRows, gradient_rows, joined, weight_rows
from recon_core.sampling import binary_labels
from recon_core.victims.network import (
    Activation,
    Architecture,
    Parameters,
    parse_architecture,
)
from recon_core.victims.preflight import Finding
from storage.layers import INPUT_MEAN, INPUT_STD, Layers, find_layers, only_named
from storage.optimiser_states import OptimiserState
from storage.sources.load import CIFAR_CLASSES
from storage.weights import WeightFile, WeightsError, read_states, read_weights
from tasks.attack_file.pictures import Named, Shape, size_of

MANY_OUTPUTS = 100
"""Outputs up to which a network is a classifier, however few inputs it has."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}
RIGHT = 0.9
"""Accuracy on its training images that shows that a network sees them in the right order."""
GAP = 0.25
"""Least gain in accuracy that shows another order; 1.5 / sqrt(n) for few images."""
OF_THIS_TRAINING = "in a checkpoint of this training: give one with the same layers"
USUAL = InputOrder()
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
    order: InputOrder = USUAL
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
    arch: str | None = None,
    shape: Shape | None = None,
    activation: Activation = "relu",
    leak: float = 0.01,
    dtype: str = "float32",
    initial: Path | None = None,
    optimizers: Sequence[Path] = (),
    checkpoints: Sequence[Path] = (),
    gradients: Sequence[Path] = (),
    order: InputOrder = USUAL,
    pictures: str | None = None,
) -> Victim:
    """Read the network in a file; `arch` is checked against its tensors. `initial`: a file of the
    first layer at the start of training, or earlier. `optimizers`, `checkpoints`: files of
    optimisers' states (`_states`); `gradients`: of batches. `order`: of its inputs. `pictures`: a
    source whose pictures have the images' shape where `shape` is not given. Raises WeightsError if
    a file or its layers cannot be used or are not what `arch` says, ValueError if `arch` or `leak`
    cannot be read."""
    file = read_weights(weights)
    layers = find_layers(file, shape)
    facts: dict[str, Any] = {"activation": activation, "leak": leak, "bias": layers.bias}
    architecture = parse_architecture(layers.architecture, layers.shape, **facts)
    d, n_outputs = architecture.d, architecture.n_outputs
    if arch is None and n_outputs >= max(MANY_OUTPUTS, d / 2):
        what = "an autoencoder" if n_outputs == d else "an autoencoder or a denoiser"
        raise WeightsError(
            f"{weights} takes {d} numbers and gives {n_outputs}: {what}; for an autoencoder, "
            f"palimpsest attack autoencoder --weights {weights}; for a classifier of {n_outputs} "
            f"classes, give --arch {layers.architecture}"
        )
    if arch is not None:
        said = parse_architecture(arch, shape, **facts)
        if (said.network, said.d, said.n_outputs) != (architecture.network, d, n_outputs):
            raise WeightsError(
                f"--arch says {arch.strip()} ({said.n_parameters:,} weights), but the tensors in "
                f"{weights} make {layers.architecture}; correct --arch or leave it out"
            )
    if shape is None and pictures is not None:
        architecture = _sized_by(architecture, pictures, weights)
    state = {name: torch.from_numpy(a) for name, a in layers.in_order(file.tensors).items()}
    parameters = architecture.from_state_dict(state).map(lambda t: t.to(DTYPES[dtype]).clone())
    is_dense = architecture.network.conv is None
    if not is_dense and order.pixels != "chw":
        raise ValueError(
            f"--pixel-order {order.pixels} is of flat inputs; {weights} begins with a convolution, "
            "which takes channels, rows and columns: leave it out"
        )
    file, own_mean, own_std = _constants(file, architecture, order)
    victim = Victim(file, layers, architecture, parameters, None, order, own_mean, own_std)
    start: FirstLayer | None = None
    states: list[Given] = []
    batches: list[Given] = []
    unused_state = ""
    if initial is not None:
        fix = "as it was before this training: give the same network's first save"
        start = _first_layer(initial, victim, "--initial", fix)
    if is_dense:
        states, unused_state = _states(victim, optimizers, checkpoints)
    for path in gradients if is_dense else ():
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
    channels, *sides = architecture.shape
    height, width = size_of(source) or sides
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


def _constants(
    file: WeightFile, architecture: Architecture, order: InputOrder
) -> tuple[WeightFile, Tensor | None, Tensor | None]:
    """(the file, mean, std): constants in the file that normalise inputs, the mean as (c, h, w) and
    the deviation as (c, 1, 1), for images in [0, 1]; those for pixels from 0 to 255 are divided by
    255. Constants that do not fit are None, and listed as left out."""
    shape, shapes = architecture.shape, {n: t.shape for n, t in file.tensors.items()}

    def constant(pattern: re.Pattern[str], option: str) -> Tensor | None:
        nonlocal file
        if (name := only_named(shapes, pattern)) is None:
            return None
        values = torch.from_numpy(file.tensors[name]).float().flatten()
        values = values / 255 if float(values.max()) > 1 else values
        if bool(((values >= 0) & (values <= 1)).all()):
            if len(values) == architecture.d:
                image: Tensor = order.to_images(values, shape).unflatten(0, shape)
                if option == "--mean" or not image.std((1, 2)).any():
                    return image
            elif len(values) in (1, shape[0]):
                values = values.flip(0) if order.channels == "bgr" else values
                return values.expand(shape[0])[:, None, None].expand(shape).contiguous()
        why = f"a constant of inputs that does not fit images in [0, 1]: give {option}"
        file = replace(file, left_out=(*file.left_out, f"{name} ({why})"))
        return None

    mean, std = constant(INPUT_MEAN, "--mean"), constant(INPUT_STD, "--std")
    return file, mean, None if std is None else std[:, :1, :1]


def _first_layer(path: Path, victim: Victim, option: str, fix: str) -> FirstLayer:
    """Read the victim's first layer from a file of `option`: by its name, as the only tensor of its
    shape, or as the first of the same network's layers. Raises WeightsError, ending with the hint
    `fix`, if there is none."""
    file, first = read_weights(path, option), victim.layers.layers[0]
    with suppress(WeightsError):
        if first.weight not in file.tensors:
            own = find_layers(file).layers[0]
            if own.shape == first.shape:
                names = {first.weight: own.weight, first.bias: own.bias}
                file = replace(file, tensors={**file.tensors} | {
                    str(name): file.tensors[found] for name, found in names.items() if found
                })  # fmt: skip

    def named(name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
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
        return found

    arrays = [named(first.weight, first.shape)]
    if first.bias is not None:
        arrays.append(named(first.bias, first.shape[:1]))
    return FirstLayer(file, _first_parameters(arrays, victim))


def _states(
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
    layers = victim.layers.layers
    own = [name for layer in layers for name in (layer.weight, layer.bias) if name]
    names = list(file.tensors) if file.in_order else dict.fromkeys([*own, *file.tensors])
    shapes = {name: file.tensors[name].shape for name in names if name in file.tensors}
    wanted = {name: shapes[name] for name in (layers[0].weight, layers[0].bias) if name}
    state.check_fits(wanted, shapes)
    numbers = state.numbers(shapes)
    moments = (state.moments[numbers[name]] for name in wanted)
    gradient = _first_parameters([m for m in moments if m is not None], victim)
    decayed, decays = None, [state.decays[numbers[name]] for name in wanted]
    if any(decays):
        arrays = [file.tensors[n] * share for n, share in zip(wanted, decays, strict=True)]
        decayed = _first_parameters(arrays, victim)
    rows = gradient_rows(gradient, "state", decayed)
    return Given(state.said, sha256, rows, is_own=state.path == victim.file.path)


def _first_parameters(arrays: Sequence[npt.NDArray[Any]], victim: Victim) -> Parameters:
    """A weight and perhaps a bias as the victim's first layer, over images."""
    like = (victim.parameters.weights[0], victim.parameters.biases[0])
    weight, *bias = (
        torch.from_numpy(array).to(own.dtype).clone().reshape(own.shape)
        for array, own in zip(arrays, like, strict=False)
        if own is not None
    )
    return _in_images(Parameters((weight,), (bias[0] if bias else None,)), victim)


def _in_images(parameters: Parameters, victim: Victim) -> Parameters:
    """Parameters whose first layer is over images (c, h, w) in RGB."""
    (c, h, w), conv = victim.architecture.shape, victim.architecture.network.conv
    shape = (c, h, w) if conv is None else (c, conv.kernel, conv.kernel)
    first = victim.order.to_images(parameters.weights[0], shape)
    return Parameters((first, *parameters.weights[1:]), parameters.biases)


def check_order(
    victim: Victim,
    truth: Named | None,
    std: Tensor | None,
    directions: Float[Tensor, "k d"] | None,
    *,
    said: bool,
) -> list[Finding]:
    """Findings on the order of inputs. Raises ValueError where training images show another order
    than the usual one and the user gave none (`said`)."""
    subject, shape, taken = "order of inputs", victim.architecture.shape, victim.order
    inputs = None if directions is None else taken.to_inputs(directions, shape)
    better, why = (None, "") if truth is None else _better_order(victim, truth, std, inputs)
    if better is not None:
        options: dict[str, tuple[str, str]] = {
            "--pixel-order": (better.pixels, taken.pixels),
            "--channel-order": (better.channels, taken.channels),
        }
        fix = " ".join(f"{name} {new}" for name, (new, old) in options.items() if new != old)
        if not said:
            raise ValueError(
                f"the inputs of {victim.file.path} are {better}, not {taken}: {why}; "
                f"give {fix} (or --pixel-order {taken.pixels}, to go on as it is)"
            )
        return [
            Finding("warning", subject, f"{better} fits better than {taken}: {why}; give {fix}.")
        ]
    if inputs is not None and not said and 1 not in shape[1:]:
        smooth = smoother_order(inputs, shape, taken)
        if smooth is not None:
            text = (
                f"the first layer's directions are rough as {taken}, and pictures as {smooth}. "
                "If images were flattened so, as by Keras and numpy, give --pixel-order "
                f"{smooth.pixels}. Weights do not show transposed images or BGR (--channel-order)."
            )
            return [Finding("warning", subject, text)]
    return []


def _better_order(
    victim: Victim, truth: Named, std: Tensor | None, inputs: Float[Tensor, "k d"] | None
) -> tuple[InputOrder | None, str]:
    """The order that fits the training images better than the one taken, by the span of the first
    layer or by how many are classified right, and the numbers that show it."""
    taken, shares, why = victim.order, dict[InputOrder, Tensor](), []
    if inputs is not None:
        shares = shares_in_span(inputs, truth.images / (1.0 if std is None else std))
    better = better_order(shares, taken) if shares else None
    accuracy = _accuracies(victim, truth, std)
    if accuracy:
        best = max(accuracy, key=lambda order: accuracy[order])
        least = max(GAP, 1.5 / len(truth) ** 0.5)
        if better is not None and accuracy[taken] >= RIGHT > accuracy[better]:
            better = None
        elif better is None and accuracy[best] >= max(RIGHT, accuracy[taken] + least):
            better = best
    if better is not None and shares:
        inside, before = (float(shares[order].mean()) for order in (better, taken))
        why.append(f"so {inside:.0%} of the images' energy is in the first layer's span, else "
                   f"{before:.0%}")  # fmt: skip
    if better is not None and accuracy:
        why.append(f"{accuracy[better]:.0%} are classified right, else {accuracy[taken]:.0%}")
    return better, ", ".join(why)


def _accuracies(victim: Victim, truth: Named, std: Tensor | None) -> dict[InputOrder, float]:
    """Share of the images that the network classifies right, by the order of its inputs, whether
    their mean is subtracted or not; empty where their classes are not its own."""
    n_outputs, shape = victim.architecture.n_outputs, victim.architecture.shape
    if truth.labels is None or (n_outputs > 1 and len(truth.class_names) != n_outputs):
        return {}
    conv, weight = victim.architecture.network.conv, victim.parameters.weights[0]
    inner = shape if conv is None else (shape[0], conv.kernel, conv.kernel)
    plain, found = victim.order.to_inputs(weight, inner), {}
    for order in orders_of(shape):
        if conv is not None and order.pixels != "chw":
            continue
        weights = (order.to_images(plain, inner), *victim.parameters.weights[1:])
        parameters = Parameters(weights, victim.parameters.biases)
        right = []
        for mean in (torch.zeros(()), truth.mean):
            x = ((truth.images - mean) / (1.0 if std is None else std)).flatten(1)[None]
            output = victim.architecture.forward(parameters, x.to(weight)).output[0]
            if n_outputs > 1:
                is_right = output.argmax(1) == torch.tensor(truth.labels)
            elif (signs := binary_signs(truth, output[:, 0])[0]) is not None:
                is_right = signs * output[:, 0] > 0
            else:
                return {}
            right.append(float(is_right.float().mean()))
        found[order] = max(right)
    return found


def binary_signs(
    truth: Named, output: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " n"] | None, str]:
    """(-1 or +1 per picture, what they mean), by class; None if the classes do not say.

    Which class is +1 is nowhere written, so it is the way round that the network agrees with.
    """
    two = len(truth.class_names) == 2 or set(truth.class_names) <= set(CIFAR_CLASSES)
    if truth.labels is None or not two:
        return None, "labels are the network's own answers: the folders are not two classes"
    if len(truth.class_names) < 2:
        return None, "labels are the network's own answers: there is one class"
    labels, task = binary_labels(np.array(truth.labels), truth.class_names)
    signs = torch.from_numpy(labels).to(output.dtype) * 2 - 1
    agree = float((signs * output > 0).double().mean())
    return (signs if agree >= 0.5 else -signs), f"labels: {task}"
