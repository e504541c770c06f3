"""Autoencoders f read from the tensors of a file: dense ones of any widths, found from their
matrices (`storage.layers`), numbers beside them being slopes of PReLUs; and U-Nets of
`recon_core.victims.autoencoder`, found by their tensors' names, or given by `--arch` and taken in
the order of the file. Which activation it was is nowhere in the weights unless it is a PReLU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

import torch
from torch import nn

from recon_core.strict import Strict, Within
from recon_core.victims.autoencoder import UNet, single
from storage.layers import find_layers, natural_key
from storage.weights import WeightFile, WeightsError
from tasks.attack_file.networks import HOW_ELSE, Network, Whole, own_description
from tasks.attack_file.pictures import Shape

Activation = Literal[
    "relu", "leaky_relu", "prelu", "softplus", "gelu", "elu", "silu", "tanh", "sigmoid"
]
Last = Literal["linear", "sigmoid", "tanh"]
DEFAULT_ACTIVATION: Activation = "leaky_relu"
"""That of the autoencoder paper."""
UNET_ACTIVATIONS = ("relu", "leaky_relu", "prelu", "softplus")

MODULES: dict[str, Callable[[], nn.Module]] = {
    **{"relu": nn.ReLU, "softplus": nn.Softplus, "gelu": nn.GELU, "elu": nn.ELU, "silu": nn.SiLU},
    **{"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "linear": nn.Identity},
}
MAX_CONVOLUTIONS = 64
"""Per level of a U-Net."""
EXAMPLES = "expected fc:3072-512-512-3072 or unet:16-32-64"


@dataclass(frozen=True, kw_only=True)
class Architecture(Strict):
    """The user's description of a network; None is to be found out.

    `arch`: `fc:3072-512-512-3072` or `unet:16-32-64`. `skips` and `convolutions` are of a U-Net.
    """

    arch: str | None = None
    activation: Activation | None = None
    leak: Annotated[float, Within("[0, 1)", fix="torch's default is 0.01")] = 0.01
    last: Last = "linear"
    skips: bool | None = None
    convolutions: Annotated[int | None, Within(f"[1, {MAX_CONVOLUTIONS}]")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arch is not None:
            parse_architecture(self.arch)


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


def build(file: WeightFile, said: Architecture) -> tuple[Network, dict[str, Network]]:
    """The network in a file, checked against the user's description; and, where its activation is
    a guess, the same network with each other activation.

    Raises WeightsError if the tensors make no such network.
    """
    kind, sizes = (None, ()) if said.arch is None else parse_architecture(said.arch)
    has_convolutions = any(tensor.ndim == 4 for tensor in file.tensors.values())
    is_unet = kind == "unet" or (kind is None and has_convolutions)
    make = _unet if is_unet else _dense
    names: tuple[Any, ...] = UNET_ACTIVATIONS if is_unet else get_args(Activation)
    network, others = make(file, said, sizes), dict[str, Network]()
    if said.activation is None and network.about["activation"] == DEFAULT_ACTIVATION:
        others = {
            name: make(file, replace(said, activation=name), sizes)
            for name in names
            if name not in (DEFAULT_ACTIVATION, "prelu")
        }
        guess = f"{DEFAULT_ACTIVATION} (a guess; --activation says otherwise)"
        network = replace(network, about={**network.about, "activation": guess})
    return network, others


def _dense(file: WeightFile, said: Architecture, sizes: tuple[int, ...]) -> Network:
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
    shapes = [file.tensors[name].shape for name in slopes]
    if slopes and (
        len(slopes) != len(widths) - 2
        or any(s not in ((), (1,), (w,)) for s, w in zip(shapes, widths[1:-1], strict=True))
    ):
        others = [one.name for one in known.unknown] or [
            f"{n} {file.tensors[n].shape}, which inputs may be normalised by" for n in slopes
        ]
        raise WeightsError(
            f"{file.path} has tensors beside its dense layers ({', '.join(others[:4])}) which "
            f"are no PReLUs; save the network without them, {HOW_ELSE}"
        )
    activation, tensors = _activation(said, bool(slopes), file), file.tensors
    net = nn.Sequential()
    for i, layer in enumerate(layers):
        with torch.device("meta"):
            linear = nn.Linear(layer.n_inputs, layer.n_outputs, bias=layer.bias is not None)
        linear.weight = nn.Parameter(torch.from_numpy(tensors[layer.weight]))
        if layer.bias is not None:
            linear.bias = nn.Parameter(torch.from_numpy(tensors[layer.bias]))
        net.append(linear)
        if i == len(layers) - 1:
            net.append(MODULES[said.last]())
        elif slopes:
            slope = nn.PReLU()
            slope.weight = nn.Parameter(torch.from_numpy(tensors[slopes[i]].reshape(-1)))
            net.append(slope)
        else:
            leaky = activation == "leaky_relu"
            net.append(nn.LeakyReLU(said.leak) if leaky else MODULES[activation]())
    dtype = next(net.parameters()).dtype
    net.requires_grad_(False)

    def on(_shape: Shape, device: str) -> nn.Module:
        placed = net.to(device)
        return Whole(lambda x: placed(x.to(dtype)))

    return Network(
        file.path, file.sha256, file.kind, text, on, shape=(widths[0],),
        n_parameters=sum(p.numel() for p in net.parameters()), about=_about(said, activation),
    )  # fmt: skip


def _activation(said: Architecture, slopes: bool, file: WeightFile) -> Activation:
    """The activation that the user named, or the default."""
    if slopes and said.activation not in (None, "prelu"):
        raise WeightsError(
            f"--activation says {said.activation}, but {file.path} has the slopes of PReLUs; leave "
            "it out"
        )
    if not slopes and said.activation == "prelu":
        raise WeightsError(
            f"--activation says prelu, but {file.path} has no slopes; give the activation it had"
        )
    return "prelu" if slopes else said.activation or DEFAULT_ACTIVATION


def _about(said: Architecture, activation: Activation) -> dict[str, object]:
    leak = {"leak": said.leak} if activation == "leaky_relu" else {}
    return {"activation": activation, "output": said.last, **leak}


def _unet(file: WeightFile, said: Architecture, channels: tuple[int, ...]) -> Network:
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
    order = _in_order(file)
    # numbers that follow no convolution, whose bias they would be
    follows = itertools.pairwise(shapes[name] for name in order)
    single_numbers = any(there in ((), (1,)) and len(before) != 4 for before, there in follows)
    slopes = any(name.endswith(".slope") for name in shapes) if own else single_numbers
    activation = _activation(said, slopes, file)
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
    theirs = list(wanted) if set(wanted) == set(shapes) else order  # by name, or in order
    pairs = itertools.zip_longest((shapes[name] for name in theirs), wanted.values())
    for place, (there, here) in enumerate(pairs):
        if there != here and not (here == () and there == (1,)):
            found = f"{theirs[place]} is {there}" if place < len(theirs) else "nothing is left"
            ours = f"{list(wanted)[place]} is {here}" if place < len(wanted) else "nothing is left"
            raise WeightsError(
                f"the tensors in {file.path} are not those of {network}: at number {place + 1} "
                f"{found} there, {ours} in it; correct --arch, --convolutions or --skips, "
                f"{HOW_ELSE}"
            )
    state = {
        ours: torch.from_numpy(file.tensors[name]).reshape(wanted[ours])
        for ours, name in zip(wanted, theirs, strict=True)
    }

    def on(shape: Shape, device: str) -> nn.Module:
        model = network.on(shape)
        weights = {name: tensor.to(device) for name, tensor in single(model, state).items()}
        like = weights["out.weight"].dtype
        return Whole(lambda x: model.forward(weights, x.to(like).unsqueeze(0)).squeeze(0))

    text = (
        f"unet:{'-'.join(map(str, channels))}, {network.convolutions} convolutions per level, "
        f"{'with' if network.skips else 'without'} skips"
    )
    return Network(
        file.path, file.sha256, file.kind, text, on, channels=n_channels, multiple=multiple,
        n_parameters=sum(tensor.numel() for tensor in state.values()),
        about=_about(said, activation),
    )  # fmt: skip


def _in_order(file: WeightFile) -> list[str]:
    return list(file.tensors) if file.in_order else sorted(file.tensors, key=natural_key)
