"""Autoencoders f read from the tensors of a file: dense ones of any widths, found from their
matrices (`storage.layers`), numbers beside them being slopes of PReLUs; and U-Nets of
`recon_core.victims.autoencoder`, found by their tensors' names, or given by `--arch` and taken in
the order of the file. Which activation it was is nowhere in the weights unless it is a PReLU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.victims.autoencoder import Autoencoder, UNet, single
from storage.layers import find_layers, natural_key
from storage.weights import WeightFile, WeightsError
from tasks.attack_file.pictures import Shape
from tasks.attack_file.programs import own_description

Activation = Literal[
    "relu", "leaky_relu", "prelu", "softplus", "gelu", "elu", "silu", "tanh", "sigmoid"
]
Last = Literal["linear", "sigmoid", "tanh"]
DEFAULT_ACTIVATION: Activation = "leaky_relu"
"""That of the autoencoder paper."""
UNET_ACTIVATIONS = ("relu", "leaky_relu", "prelu", "softplus")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "elu": F.elu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "linear": lambda z: z,
}
MAX_CONVOLUTIONS = 64
"""Per level of a U-Net."""
HOW_ELSE = (
    "or save it as a program, torch.export.save(torch.export.export(net, (x,)), 'net.pt2'), and "
    "give --trust"
)
EXAMPLES = "expected fc:3072-512-512-3072 or unet:16-32-64"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The user's description of a network; None is to be found out.

    `arch`: `fc:3072-512-512-3072` or `unet:16-32-64`. `skips` and `convolutions` are of a U-Net.
    """

    arch: str | None = None
    activation: Activation | None = None
    leak: float = 0.01
    last: Last = "linear"
    skips: bool | None = None
    convolutions: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.leak < 1:
            raise ValueError(f"leak={self.leak} is outside [0, 1); torch's default is 0.01")
        if self.convolutions is not None and not 1 <= self.convolutions <= MAX_CONVOLUTIONS:
            raise ValueError(
                f"convolutions={self.convolutions} must be from 1 to {MAX_CONVOLUTIONS}"
            )
        if self.arch is not None:
            parse_architecture(self.arch)


@dataclass(frozen=True, eq=False)
class Built:
    """f for a batch (b, c, h, w) on the device of its input, and what it is. `d` and `channels`:
    the number of values and channels it takes, if fixed; `guessed`: the activation is a guess."""

    text: str
    activation: Activation
    guessed: bool
    n_parameters: int
    d: int | None
    channels: int | None
    multiple: int
    on: Callable[[str, Shape], Callable[[Tensor], Tensor]]


def own_architecture(file: WeightFile) -> tuple[Architecture, Shape] | None:
    """The network and the images' shape as this project's own files of weights say it themselves
    (`tasks.study.products`); None for other files."""
    about = own_description(file)
    try:
        network, (channels, height, width) = (about or {})["network"], (about or {})["shape"]
        said = Architecture(
            activation=network["activation"], leak=network["leak"], skips=network.get("skips"),
            convolutions=network.get("convolutions"),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None
    return said, (channels, height, width)


def parse_architecture(text: str) -> tuple[str, tuple[int, ...]]:
    """("fc", widths) or ("unet", channels); ValueError if it cannot be read."""
    kind, _colon, numbers = text.strip().partition(":")
    parts = numbers.split("-")
    if kind not in ("fc", "unet") or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"--arch {text} cannot be read; {EXAMPLES}")
    sizes = tuple(int(part) for part in parts)
    if kind == "fc" and (len(sizes) < 3 or sizes[0] != sizes[-1]):
        raise ValueError(
            f"--arch {text} is no autoencoder: it needs a hidden layer and as many outputs as "
            f"inputs; {EXAMPLES}"
        )
    return kind, sizes


def build(file: WeightFile, said: Architecture) -> Built:
    """The network in a file, checked against what is said of it.

    Raises WeightsError if the tensors make no such network.
    """
    kind, sizes = (None, ()) if said.arch is None else parse_architecture(said.arch)
    has_convolutions = any(tensor.ndim == 4 for tensor in file.tensors.values())
    if kind == "unet" or (kind is None and has_convolutions):
        return _unet(file, said, sizes)
    return _dense(file, said, sizes)


def candidates(built: Built) -> tuple[Activation, ...]:
    """Other activations that a guessed one may be."""
    if not built.guessed:
        return ()
    unet = built.text.startswith("unet")
    return tuple(
        name
        for name in get_args(Activation)
        if name not in (built.activation, "prelu") and (not unet or name in UNET_ACTIVATIONS)
    )


def _dense(file: WeightFile, said: Architecture, sizes: tuple[int, ...]) -> Built:
    known = find_layers(file)
    layers = known.layers
    widths = [layers[0].n_inputs, *(layer.n_outputs for layer in layers)]
    text = "fc:" + "-".join(map(str, widths))
    if any(len(layer.shape) != 2 for layer in layers) or widths[0] != widths[-1]:
        raise WeightsError(
            f"the tensors in {file.path} make {text}, which takes {widths[0]} numbers and gives "
            f"{widths[-1]}: no autoencoder; give the whole network, {HOW_ELSE}"
        )
    if sizes and list(sizes) != widths:
        raise WeightsError(
            f"--arch says {said.arch}, but the tensors in {file.path} make {text}; correct --arch "
            "or leave it out"
        )
    names = {name for layer in layers for name in (layer.weight, layer.bias)}
    slopes = [name for name in _in_order(file) if name not in names]
    slope_shapes = [file.tensors[name].shape for name in slopes]
    fits = len(slopes) == len(widths) - 2 and all(
        shape in ((), (1,), (width,))
        for shape, width in zip(slope_shapes, widths[1:-1], strict=False)
    )
    if slopes and not fits:
        others = [one.name for one in known.unknown] or [
            f"{n} {file.tensors[n].shape}, which inputs may be normalised by" for n in slopes
        ]
        raise WeightsError(
            f"{file.path} has tensors beside its dense layers ({', '.join(others[:4])}) which "
            f"are no PReLUs; save the network without them, {HOW_ELSE}"
        )
    activation, guessed = _activation(said, bool(slopes), file)
    tensors = {name: torch.from_numpy(tensor) for name, tensor in file.tensors.items()}
    weights = [tensors[layer.weight] for layer in layers]
    biases = [None if layer.bias is None else tensors[layer.bias] for layer in layers]
    leaks = [tensors[name].reshape(-1) for name in slopes]
    leak = said.leak if activation == "leaky_relu" else None

    def on(device: str, _shape: Shape) -> Callable[[Tensor], Tensor]:
        placed = [w.to(device) for w in weights]
        shifts = [None if b is None else b.to(device) for b in biases]
        tilts = [s.to(device) for s in leaks]

        def f(x: Tensor) -> Tensor:
            a = x.flatten(1).to(placed[0].dtype)
            for i, (w, b) in enumerate(zip(placed, shifts, strict=True)):
                a = F.linear(a, w, b)
                if i < len(placed) - 1 and tilts:
                    a = F.prelu(a, tilts[i])
                elif i < len(placed) - 1:
                    a = F.leaky_relu(a, leak) if leak is not None else ACTIVATIONS[activation](a)
            return ACTIVATIONS[said.last](a).view_as(x)

        return f

    n_parameters = sum(t.numel() for t in (*weights, *leaks, *(b for b in biases if b is not None)))
    return Built(text, activation, guessed, n_parameters, widths[0], None, 1, on)


def _activation(said: Architecture, slopes: bool, file: WeightFile) -> tuple[Activation, bool]:
    """The activation, and whether it is a guess."""
    if slopes and said.activation not in (None, "prelu"):
        raise WeightsError(
            f"--activation says {said.activation}, but {file.path} has the slopes of PReLUs; leave "
            "it out"
        )
    if slopes:
        return "prelu", False
    if said.activation == "prelu":
        raise WeightsError(
            f"--activation says prelu, but {file.path} has no slopes; give the activation it had"
        )
    return said.activation or DEFAULT_ACTIVATION, said.activation is None


def _unet(file: WeightFile, said: Architecture, channels: tuple[int, ...]) -> Built:
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    own = "down.0.0.weight" in shapes and "out.weight" in shapes
    if own and not channels:
        levels = itertools.takewhile(lambda i: f"down.{i}.0.weight" in shapes, itertools.count())
        channels = tuple(int(shapes[f"down.{level}.0.weight"][0]) for level in levels)
    if not channels:
        n = sum(len(shape) == 4 for shape in shapes.values())
        raise WeightsError(
            f"{file.path} has {n} convolutions, and their names do not tell the network; give "
            f"--arch unet:16-32-64 --convolutions 2 if it is such a U-Net, {HOW_ELSE}"
        )
    # numbers that follow no convolution, whose bias they would be
    follows = itertools.pairwise(file.tensors[name].shape for name in _in_order(file))
    single_numbers = any(there in ((), (1,)) and len(before) != 4 for before, there in follows)
    slopes = any(name.endswith(".slope") for name in shapes) if own else single_numbers
    activation, guessed = _activation(said, slopes, file)
    if activation not in UNET_ACTIVATIONS or said.last != "linear":
        raise WeightsError(
            f"a U-Net with activation {activation} and output {said.last} is none of ours: they "
            f"have {', '.join(UNET_ACTIVATIONS)} and a linear output. Give another, {HOW_ELSE}"
        )
    first = next((shape for shape in shapes.values() if len(shape) == 4), (0, 0))
    n_channels = int(shapes["down.0.0.weight"][1] if own else first[1])
    up = shapes.get("up.0.0.weight")  # it takes in what the way down had, too
    skips = not own or (up is not None and int(up[1]) == sum(channels[:2]))
    of_first = sum(bool(re.fullmatch(r"down\.0\.\d+\.weight", name)) for name in shapes)
    network = UNet(
        channels=channels,
        convolutions=said.convolutions or (of_first if own else 2),
        skips=skips if said.skips is None else said.skips,
        activation="leaky_relu" if activation == "relu" else activation,  # type: ignore[arg-type]
        leak=0.0 if activation == "relu" else said.leak,
    )
    multiple = 2 ** (len(channels) - 1)
    wanted = network.on((n_channels, multiple, multiple)).tensor_shapes
    state = _state(file, wanted, network)

    def on(device: str, shape: Shape) -> Callable[[Tensor], Tensor]:
        model = network.on(shape)
        weights = {name: tensor.to(device) for name, tensor in single(model, state).items()}
        like = weights["out.weight"].dtype
        return lambda x: model.forward(weights, x.to(like).unsqueeze(0)).squeeze(0)

    text = (
        f"unet:{'-'.join(map(str, channels))}, {network.convolutions} convolutions per level, "
        f"{'with' if network.skips else 'without'} skips"
    )
    n_parameters = sum(tensor.numel() for tensor in state.values())
    return Built(text, activation, guessed, n_parameters, None, n_channels, multiple, on)


def _in_order(file: WeightFile) -> list[str]:
    return list(file.tensors) if file.in_order else sorted(file.tensors, key=natural_key)


def _state(
    file: WeightFile, wanted: Mapping[str, tuple[int, ...]], network: Autoencoder
) -> dict[str, Tensor]:
    """The file's tensors under our names: by name, or one after the other."""
    order = _in_order(file)
    theirs = list(wanted) if set(wanted) == set(file.tensors) else order
    shapes = [file.tensors[name].shape for name in theirs]
    pairs = itertools.zip_longest(shapes, wanted.values())
    for place, (there, here) in enumerate(pairs):
        if there != here and not (here == () and there == (1,)):
            found = f"{theirs[place]} is {there}" if place < len(theirs) else "nothing is left"
            ours = f"{list(wanted)[place]} is {here}" if place < len(wanted) else "nothing is left"
            raise WeightsError(
                f"the tensors in {file.path} are not those of {network}: at number {place + 1} "
                f"{found} there, {ours} in it; correct --arch, --convolutions or --skips, "
                f"{HOW_ELSE}"
            )
    return {
        ours: torch.from_numpy(file.tensors[name]).reshape(wanted[ours])
        for ours, name in zip(wanted, theirs, strict=True)
    }
