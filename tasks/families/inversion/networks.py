"""Classifiers that can be cut, read from a file: torchvision's, this project's own, or a program.

* `torchvision:NAME`: any classification model of torchvision, weights by its own names. How many
  classes and channels there are is read from the shapes in the file.
* `lenet5`, `split-mlp`: the networks of `recon_core.victims.split` as one of torch's, so that the
  same cut serves all; files of this project say themselves which they are.
* a program of torch.export (.pt2): cut at the modules that it was exported with. TorchScript runs
  its modules out of reach, so such a file is taken whole: it is h, the client's half.

Weights are float32, in eval mode. Nothing in a file is run unless it is a program that is trusted.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from recon_core.torchvision_compat import import_torchvision
from recon_core.victims.split import KERNEL, LeNet5, SplitMLP
from storage.layers import natural_key
from storage.weights import WeightFile, WeightsError, check_weights_file, read_weights
from tasks.attack_file.pictures import Shape, shape_of
from tasks.attack_file.programs import own_description, program_kind, read_program

TORCHVISION = "torchvision:"
OWN = ("lenet5", "split-mlp")
OUTPUT = "output"
"""The cut after everything: h is the whole file."""
EXAMPLES = "torchvision:resnet18, lenet5 or split-mlp"
HOW_ELSE = (
    "or save the network as a program, torch.export.save(torch.export.export(net, (x,)), "
    "'net.pt2'), and give --trust"
)
CLASSES = 1000
"""Of torchvision's models by default; what has so many rows in them is the last layer."""


@dataclass(frozen=True, eq=False)
class Network:
    """A classifier of normalised images; what is None the file does not say.

    `on(shape, device)` is the network, in eval mode and without gradients of its own. `cut`: where
    the file itself says that it is cut. `batch`: rows that it takes at once, exactly.
    """

    path: Path
    sha256: str
    format: str
    text: str
    on: Callable[[Shape, str], nn.Module]
    channels: int | None = None
    shape: Shape | None = None
    n_classes: int | None = None
    n_parameters: int | None = None
    batch: int | None = None
    cut: str | None = None
    cut_inside: bool = True

    def parts(self, module: nn.Module) -> list[str]:
        """Names of the modules inside `module` that can be looked into."""
        return [name for name, _part in module.named_modules() if name and self.cut_inside]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that were read or inferred, for people."""
        found = {"file": str(self.path), "format": self.format, "sha256": self.sha256}
        optional = {"classes": self.n_classes, "parameters": self.n_parameters}
        optional |= {"rows at once": self.batch}
        return found | {
            "architecture": self.text,
            **{name: value for name, value in optional.items() if value is not None},
        }


def read_network(path: Path, architecture: str | None, *, trust: bool = False) -> Network:
    """The classifier in a file; `architecture` may be left out of what says it itself. Raises
    WeightsError if the file cannot be used, is not trusted, or does not fit the architecture,
    ValueError for an architecture that there is not."""
    check_weights_file(path)
    kind = program_kind(path)
    if kind is not None:
        if architecture is not None:
            raise ValueError(
                f"{path} is a program, which has its architecture in it; leave out --architecture"
            )
        program = read_program(path, kind, trust=trust)
        shape = program.shape if program.shape is not None and len(program.shape) == 3 else None
        modules = program.modules or (lambda device: _Whole(program.on(device)))
        return Network(
            path, program.sha256, program.kind, "a program",
            lambda _shape, device: modules(device).eval(),
            channels=None if shape is None else shape[0],
            shape=None if shape is None else (shape[0], shape[1], shape[2]),
            batch=program.batch, cut=OUTPUT if program.modules is None else None,
            cut_inside=program.modules is not None,
        )  # fmt: skip
    file = read_weights(path)
    about = own_description(file)
    if about is not None and about["network"].get("kind") not in ("lenet5", "mlp"):
        about = None
    if architecture is None and about is None:
        raise ValueError(
            f"{path} does not say which network its tensors are; give --architecture {EXAMPLES}, "
            f"{HOW_ELSE}"
        )
    if architecture is None or architecture in OWN:
        return _own(file, architecture, about)
    if architecture.startswith(TORCHVISION):
        return _torchvision(file, architecture.removeprefix(TORCHVISION))
    raise ValueError(f"unknown architecture {architecture!r}; give {EXAMPLES}, {HOW_ELSE}")


class _Whole(nn.Module):
    """A program as a module without modules."""

    def __init__(self, program: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(x)


def _torchvision(file: WeightFile, name: str) -> Network:
    models = import_torchvision().models
    known: list[str] = models.list_models(module=models)
    if name not in known:
        raise ValueError(
            f"torchvision has no classification model {name!r}; it has {', '.join(known)}"
        )
    aux = any(n.lower().startswith("aux") for n in file.tensors)
    options: dict[str, Any] = {"aux_logits": aux} if name in ("googlenet", "inception_v3") else {}
    net = _made(name, options)
    shapes = {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}
    heads = [key for key, shape in shapes.items() if shape[:1] == (CLASSES,)]
    head = file.tensors.get(heads[-1])
    n_classes = int(head.shape[0]) if head is not None and head.ndim else CLASSES
    if n_classes != CLASSES:
        net = _made(name, options | {"num_classes": n_classes})
    channels = 3
    for key, module in net.named_modules():
        if isinstance(module, nn.Conv2d):  # the first, for as many channels as the file's has
            found = file.tensors.get(f"{key}.weight")
            if found is not None and found.ndim == 4 and module.groups == 1:
                module.in_channels = int(found.shape[1])
                sides = (module.out_channels, module.in_channels, *module.kernel_size)
                module.weight = nn.Parameter(module.weight.new_empty(sides))
            channels = module.in_channels
            break
    state, wanted = {}, net.state_dict()
    for key in dict.fromkeys((heads[-1], *wanted)):  # the last layer's name is the most telling
        found, tensor = file.tensors.get(key), wanted[key]
        if found is None and key.endswith(".num_batches_tracked"):
            state[key] = torch.zeros((), dtype=torch.int64)  # it only counts steps of training
            continue
        if found is None or found.shape != tuple(tensor.shape):
            shape, what, fix = tuple(tensor.shape), "is not there", ""
            if found is not None:
                what = f"has shape {found.shape}"
            else:  # one tensor may be meant, by the end of its name or its shape
                alike = [n for n in file.tensors if n.endswith(f".{key}")]
                alike = alike or [n for n, t in file.tensors.items() if t.shape == shape]
                if len(alike) == 1:
                    fix = f"if {alike[0]} is meant, rename it to {key} and the others accordingly; "
                    fix += "or "
            raise WeightsError(
                f"{key} {what} in {file.path}, but is {shape} in torchvision's {name}; "
                f"{fix}correct --architecture, {HOW_ELSE}"
            )
        value = torch.from_numpy(found)
        state[key] = value.float() if value.is_floating_point() else value
    if left := [key for key in file.tensors if key not in wanted]:
        raise WeightsError(
            f"{file.path} has {left[0]}, which torchvision's {name} has not: it is another "
            f"network; correct --architecture, {HOW_ELSE}"
        )
    net.load_state_dict(state, assign=True)
    n_parameters = sum(p.numel() for p in net.parameters())
    return Network(
        file.path, file.sha256, file.kind, f"{TORCHVISION}{name}",
        lambda _shape, device: net.eval().requires_grad_(False).to(device),
        channels=channels, n_classes=n_classes, n_parameters=n_parameters,
    )  # fmt: skip


def _made(name: str, options: Mapping[str, Any]) -> nn.Module:
    """One of torchvision's models, where it can be without memory or a draw from the global
    generator, which its first weights would take."""
    models = import_torchvision().models
    with warnings.catch_warnings():  # of models whose first weights will change
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                net: nn.Module = models.get_model(name, weights=None, **options)
        except NotImplementedError:  # RegNet asks for numbers while it is made
            with torch.random.fork_rng(devices=[]):
                net = models.get_model(name, weights=None, **options)
    return net


def _own(file: WeightFile, architecture: str | None, about: dict[str, Any] | None) -> Network:
    """A LeNet5 or SplitMLP, by what the file says or by the shapes of its tensors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in file.tensors.items()}
    said: LeNet5 | SplitMLP | None = None
    if about is not None:
        own_kind = LeNet5 if about["network"]["kind"] == "lenet5" else SplitMLP
        try:
            said = TypeAdapter[LeNet5 | SplitMLP](own_kind).validate_python(about["network"])
        except ValidationError as error:
            raise WeightsError(
                f"the description in {file.path} cannot be read ({error.errors()[0]['msg']}); give "
                "the tensors alone with --architecture"
            ) from error
    kind = architecture or ("lenet5" if isinstance(said, LeNet5) else "split-mlp")
    if said is not None and isinstance(said, LeNet5) != (kind == "lenet5"):
        raise WeightsError(f"{file.path} says it is {said}; leave out --architecture")
    dense = sorted((n for n in shapes if re.fullmatch(r"fc\d+\.weight", n)), key=natural_key)
    first = "conv1.weight" if kind == "lenet5" else "fc1.weight"
    if not dense or len(shapes.get(first, ())) != (4 if kind == "lenet5" else 2):
        of_convolutions, of_dense = (
            [name for name, shape in shapes.items() if len(shape) == n] for n in (4, 2)
        )
        fix = ""  # the names that weights, in the order of the file, would have here
        if len(of_convolutions) == (2 if kind == "lenet5" else 0) and len(of_dense) > 1:
            names = {old: f"conv{i}.weight" for i, old in enumerate(of_convolutions, 1)}
            names |= {old: f"fc{i}.weight" for i, old in enumerate(of_dense, 1)}
            listed = ", ".join(f"{old} to {new}" for old, new in names.items() if old != new)
            fix = f"rename {listed}, their biases alike; or "
        raise WeightsError(
            f"{file.path} has tensors {', '.join(list(shapes)[:4])}, ..., which are not those of "
            f"{kind}; it needs {', '.join(dict.fromkeys([first, 'fc1.weight']))}, as this project "
            "names them: "
            f"{fix}correct --architecture, {HOW_ELSE}"
        )
    n_classes = shapes[dense[-1]][0]
    shape: Shape | None = None
    if about is not None and "shape" in about:
        c, h, w = map(int, about["shape"])
        shape = c, h, w
    if kind == "lenet5":
        network: LeNet5 | SplitMLP = said or LeNet5()
        channels = shapes["conv1.weight"][1]
    else:
        widths = tuple(shapes[name][0] for name in dense[:-1])
        network = said or SplitMLP(widths=widths, cut=min(2, len(widths)))
        shape = shape or shape_of(shapes["fc1.weight"][1])
        channels = 1 if shape is None else shape[0]

    cut = network.cut
    name = (f"conv{cut}" if cut <= 2 else f"fc{cut - 2}") if kind == "lenet5" else f"fc{cut}"
    return Network(
        file.path, file.sha256, file.kind, kind,
        partial(_own_module, file, network, n_classes),
        channels=channels, shape=shape, n_classes=n_classes,
        n_parameters=sum(tensor.size for tensor in file.tensors.values()),
        cut=None if said is None else name,
    )  # fmt: skip


def _own_module(
    file: WeightFile, network: LeNet5 | SplitMLP, n_classes: int, shape: Shape, device: str
) -> nn.Module:
    wanted = network.on(shape, n_classes).tensor_shapes
    for name, expected in wanted.items():
        found = file.tensors.get(name)
        if found is None or found.shape != expected:
            what = "is not there" if found is None else f"has shape {found.shape}"
            raise WeightsError(
                f"{name} {what} in {file.path}, but is {expected} in {network.kind} for images of "
                f"{'x'.join(map(str, shape))}; correct --size or --architecture"
            )
    with torch.device("meta"):  # with a module at each cut
        net = nn.Sequential()
        for name, padding in (("conv1", 2 if shape[1:] == (28, 28) else 0), ("conv2", 0)):
            if f"{name}.weight" in wanted:
                n_out, n_in = wanted[f"{name}.weight"][:2]
                convolution = nn.Conv2d(n_in, n_out, KERNEL, padding=padding)
                net.add_module(name, nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2)))
        net.add_module("flatten", nn.Flatten())
        *dense, last = (name for name in wanted if re.fullmatch(r"fc\d+\.weight", name))
        for name in (*dense, last):
            linear = nn.Linear(wanted[name][1], wanted[name][0])
            layer = linear if name == last else nn.Sequential(linear, nn.ReLU())
            net.add_module(name.removesuffix(".weight"), layer)
    state = {name: torch.from_numpy(file.tensors[name]).float() for name in wanted}
    inner = {n: n if n in net.state_dict() else n.replace(".", ".0.") for n in wanted}
    net.load_state_dict({inner[name]: tensor for name, tensor in state.items()}, assign=True)
    return net.eval().requires_grad_(False).to(device)
