"""Inputs of an attack on given weights: the network, and what may be known beside it: the mean
image that was subtracted in training, pictures to score against, and decoys."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.inputs import ChannelOrder, InputOrder, PixelOrder
from recon_core.attacks.span.rows import Source, SpanRows, joined, weight_rows
from recon_core.sampling import binary_labels
from recon_core.victims.network import (
    Activation,
    Architecture,
    Parameters,
    parse_architecture,
)
from storage.documents import read_array
from storage.errors import SourceError
from storage.layers import INPUT_MEAN, INPUT_STD, Layers, find_layers, only_named
from storage.sources.load import CIFAR_CLASSES
from storage.sources.pictures import CorruptPictureError, read_picture
from storage.weights import WeightFile, WeightsError, read_weights
from tasks.attack_file.pictures import (
    LUMA,
    SIDES,
    Named,
    Shape,
    default_split,
    picture_folder,
    read_source,
)
from tasks.families.weights.first_layer import (
    FirstLayer,
    Given,
    given_states,
    in_images,
    read_first_layer,
    read_gradients,
)

GREY = 0.5
"""The mean that is assumed when nothing is known."""
MANY_OUTPUTS = 100
"""Outputs up to which a network is a classifier, however few inputs it has."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Victim:
    """A network to be attacked: `parameters` of R = 1, on the CPU, over flat images (c, h, w) in
    RGB, whatever the `order` of its inputs, and its start, if known. `own_mean` (c, h, w) and
    `own_std` (c, 1, 1): constants in its file by which inputs are normalised. `states`: what
    optimisers remember of the first layer, `unused_state` why one in the file is of no use;
    `gradients`: of batches, in the first layer."""

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
        """What there is to be taken apart, the best first as a rule."""
        beside: dict[Source, tuple[Given, ...]] = {
            "gradients": self.gradients,
            "state": self.states,
        }
        found = {name: joined([g.rows for g in given]) for name, given in beside.items() if given}
        start = None if self.start is None else self.start.parameters
        return {**found, "weights": weight_rows(self.parameters, start)}

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
    """The network in a file; `arch` is checked against what the tensors say. `initial`: a file with
    the first layer as training started from it, or as it was earlier. `optimizers`, `checkpoints`:
    files of optimisers' states (`given_states`); `gradients`: of batches. `order`: of its inputs.
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
    start = None
    if initial is not None:
        fix = "as it was before this training: give the same network's first save"
        start = read_first_layer(initial, victim, "--initial", fix)
    states: tuple[Given, ...] = ()
    batches: tuple[Given, ...] = ()
    unused_state = ""
    if architecture.network.conv is None:
        states, unused_state = given_states(victim, optimizers, checkpoints)
        batches = read_gradients(gradients, victim)
    return replace(
        victim, parameters=in_images(parameters, victim), start=start, states=states,
        unused_state=unused_state, gradients=batches,
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
    """(a constant in the file that inputs are normalised by, as (c, h, w) in [0, 1], None if there
    is none that fits; its name). One for pixels from 0 to 255 is divided by 255."""
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


def read_pictures(
    source: str,
    shape: Shape,
    *,
    skip_corrupt: bool = False,
    of_sets: Literal["train", "heldout"] = "train",
) -> Named:
    """The pictures of a source in a victim's shape: of one that has splits the one asked for, else
    all. Raises SourceError if there are none or one cannot be read, ValueError for shapes that no
    picture has."""
    channels, height, width = shape
    if channels not in (1, 3) or 1 in (height, width):
        raise ValueError(
            f"pictures cannot be compared with images of {channels}x{height}x{width}: expected 1 "
            "or 3 channels; give --shape, or leave out --data and --decoys"
        )
    split = default_split(source, of_sets)
    return replace(read_source(source, split, shape, skip_corrupt=skip_corrupt), source=source)


def read_mean(text: str | None, truth: Named | None, shape: Shape) -> Tensor | None:
    """The mean image (c, h, w) in [0, 1] that was subtracted in training, None if unknown.

    `text`: "none" (nothing was subtracted: zeros), numbers like "0.49,0.48,0.45" per channel, an
    .npy file, or a picture; without it, the mean of the training pictures where they are given.
    Raises SourceError if it cannot be read, ValueError if it does not fit.
    """
    if text is None:
        return None if truth is None else truth.mean
    channels, height, width = shape
    if text == "none":
        return torch.zeros(shape)
    numbers = _numbers(text)
    if numbers is not None and len(numbers) in (1, channels):
        mean = torch.tensor(numbers)[:, None, None].expand(shape).contiguous()
    elif numbers is not None:
        raise ValueError(f"--mean {text} has {len(numbers)} numbers for {channels} channels")
    elif Path(text).suffix == ".npy":
        mean = _array(Path(text), shape)
    else:
        if height != width:
            raise ValueError(f"--mean {text}: for images of {height}x{width} give an .npy file")
        try:
            picture, is_resized = read_picture(Path(text), height)
        except CorruptPictureError as error:
            raise SourceError(f"--mean {text} cannot be read as a picture ({error})") from error
        if is_resized:
            raise ValueError(f"--mean {text} has another size than the inputs, {height}x{width}")
        mean = torch.from_numpy(picture.copy()).permute(2, 0, 1).float() / 255
        if channels == 1:
            mean = (mean * torch.tensor(LUMA)[:, None, None]).sum(0, keepdim=True)
    if not bool(((mean >= 0) & (mean <= 1)).all()):
        raise ValueError(f"--mean {text} has values outside [0, 1]; expected images in [0, 1]")
    return mean


def read_std(numbers: tuple[float, ...] | None, shape: Shape) -> Tensor | None:
    """The standard deviation (c, 1, 1) that inputs were divided by in training, None if unknown.

    Raises ValueError for another number of them than one or one per channel.
    """
    if numbers is None:
        return None
    if len(numbers) not in (1, shape[0]):
        raise ValueError(
            f"--std has {len(numbers)} numbers for {shape[0]} channels; give one, or one each"
        )
    return torch.tensor(numbers).expand(shape[0])[:, None, None]


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


def _numbers(text: str) -> list[float] | None:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return None


def _array(path: Path, shape: Shape) -> Tensor:
    """An .npy file as (c, h, w); (h, w, c), (h, w) and flat arrays are taken for what they are."""
    array = read_array(path, "the mean image of --mean", at_most=int(np.prod(shape)))
    channels, height, width = shape
    if array.shape == (height, width, channels) and channels != height:
        array = array.transpose(2, 0, 1)
    if array.shape not in (shape, (array.size,), (height, width)) or array.size != np.prod(shape):
        raise ValueError(f"--mean {path} has shape {array.shape}; expected {shape}")
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)).reshape(shape)
