"""Somebody else's network, read from a file as one of torch's modules.

* A program of torch.export (.pt2) has the modules that it was exported with; TorchScript runs its
  modules out of reach. Neither can be read safely: TorchScript names operators that read and write
  files, `torch.export.load` unpickles, evaluates texts, looks operators up by any dotted name, and
  loads compiled libraries. So nothing of such a file is touched, beyond the list of names in the
  archive, until the user says `--trust`.
* `torchvision:NAME`: any classification model of torchvision, weights by its own names. How many
  classes and channels there are is read from the shapes in the file.
* `lenet5`, `split-mlp`: the networks of `recon_core.victims.split` as one of torch's, so that the
  same cut serves all; files of this project say themselves which they are.

A classifier's weights are float32. Nothing in a file of weights is run.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recon_core.torchvision_compat import import_torchvision
from recon_core.victims.split import KERNEL, LeNet5, SplitMLP
from storage.layers import natural_key
from storage.weights import METADATA, WeightFile, WeightsError, check_weights_file, read_weights
from tasks.attack_file.pictures import Shape, shape_of

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
"""Classes of torchvision's models by default: the tensor with so many rows is the last layer's."""


@dataclass(frozen=True, eq=False)
class Network:
    """A network of normalised images; what is None the file does not say.

    `on(shape, device)` is the network, in eval mode and without gradients of its own. `shape`: of
    one input, (d,) where it takes vectors. Sides of images are of a `multiple`. `cut`: where the
    file itself says that it is cut. `cut_inside`: its modules can be looked into. `batch`: rows
    that it takes at once, exactly. `about`: what else was read or guessed, for people.
    """

    path: Path
    sha256: str
    format: str
    text: str
    on: Callable[[Shape, str], nn.Module]
    channels: int | None = None
    shape: tuple[int, ...] | None = None
    multiple: int = 1
    n_classes: int | None = None
    n_parameters: int | None = None
    batch: int | None = None
    cut: str | None = None
    cut_inside: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)

    def parts(self, module: nn.Module) -> list[str]:
        """Names of the modules inside `module` that can be looked into."""
        return [name for name, _part in module.named_modules() if name and self.cut_inside]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that were read or inferred, for people."""
        facts: dict[str, Any] = {
            "file": str(self.path),
            "format": self.format,
            "sha256": self.sha256,
        }
        facts |= {"architecture": self.text, "classes": self.n_classes, **self.about}
        facts |= {"parameters": self.n_parameters, "rows at once": self.batch}
        return {name: value for name, value in facts.items() if value is not None}


class Whole(nn.Module):
    """A function of images as a module without modules."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def batches(x: Tensor, batch: int) -> Iterator[tuple[Tensor, int]]:
    """Rows of x in batches of exactly so many, and how many count; the last is filled up."""
    for part in x.split(batch):
        n = len(part)
        yield torch.cat([part, part[-1:].expand(batch - n, *part.shape[1:])]), n


def in_rows(f: Callable[[Tensor], Tensor], batch: int | None) -> Callable[[Tensor], Tensor]:
    """f of any number of images where a network takes exactly `batch`."""
    return f if batch is None else lambda x: torch.cat([f(y)[:n] for y, n in batches(x, batch)])


def read_program(path: Path, *, trust: bool, whole: bool = False) -> Network | None:
    """The program in a file; None if it holds none. `whole`: as one function, which is faster than
    the modules that it was exported with. Raises WeightsError if it is not trusted, takes more than
    one input, or cannot be loaded."""
    check_weights_file(path)
    names: set[str] = set()
    with suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:
        names = {part for name in archive.namelist() for part in (name, name.partition("/")[2])}
    is_export = bool(names & {"archive_format", "serialized_exported_program.json"})
    if not is_export and "constants.pkl" not in names:
        return None
    what = "a program of torch.export" if is_export else "a TorchScript program"
    if not trust:
        raise WeightsError(
            f"{path} is {what}: loading and running it can do anything that you can do on "
            "this machine. Nothing of it was run. Give --trust if you made it yourself or trust "
            "who did, or save the weights alone: torch.save(net.state_dict(), 'net.pt')"
        )
    content = path.read_bytes()
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch._export")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():  # torch's own, of formats, as its log has them
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            load = torch.export.load if is_export else partial(torch.jit.load, map_location="cpu")
            program: Any = load(io.BytesIO(content))
    except Exception as error:  # a damaged program may fail in any way
        raise WeightsError(
            f"{path} cannot be loaded as {what} ({type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0][:200]}); save it again with this version of "
            f"torch ({torch.__version__})"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    sha256 = hashlib.sha256(content).hexdigest()
    if not is_export:
        script = program.eval()
        like = next((p.dtype for p in script.parameters()), torch.float32)

        def run(_shape: Shape, device: str) -> nn.Module:
            placed = script.to(device)
            return Whole(lambda x: placed(x.to(like)))

        return Network(path, sha256, "torchscript", "a program", run, cut=OUTPUT, cut_inside=False)
    inputs = [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
    ]
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
        raise WeightsError(
            f"{path} takes {len(inputs)} inputs; it must take one, a batch of images"
        )
    rows, *sides = inputs[0].shape
    dtype = inputs[0].dtype

    def on(_shape: Shape, device: str) -> nn.Module:
        from torch.export.passes import move_to_device_pass

        placed = program if device == "cpu" else move_to_device_pass(program, device)
        if whole:
            module = placed.module()
            return Whole(lambda x: module(x.to(dtype)))
        with warnings.catch_warnings():  # torch's own about what it calls itself
            warnings.simplefilter("ignore")
            return torch.export.unflatten(placed).eval()

    shape = tuple(sides) if sides and all(isinstance(side, int) for side in sides) else None
    batch = rows if isinstance(rows, int) else None
    return Network(path, sha256, "export", "a program", on, shape=shape, batch=batch)


def own_description(file: WeightFile) -> dict[str, Any] | None:
    """Description of the network in this project's own files of weights; None for other files."""
    if file.kind != "safetensors":
        return None
    try:
        with safe_open(file.path, "np") as opened:
            about = json.loads((opened.metadata() or {}).get(METADATA, "null"))
    except (SafetensorError, ValueError, RecursionError):
        return None
    return about if isinstance(about, dict) and isinstance(about.get("network"), dict) else None


def read_classifier(path: Path, architecture: str | None, *, trust: bool = False) -> Network:
    """The classifier in a file; `architecture` may be left out of what says it itself. Raises
    WeightsError if the file cannot be used, is not trusted, or does not fit the architecture,
    ValueError for an architecture that there is not."""
    if (program := read_program(path, trust=trust)) is not None:
        if architecture is not None:
            raise ValueError(
                f"{path} is a program, which has its architecture in it; leave out --architecture"
            )
        return program
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


def _check_tensors(file: WeightFile, wanted: Mapping[str, Tensor], of: str, fix: str) -> None:
    """Raises WeightsError, ending with the hint `fix`, unless the file has all tensors of a network
    in their shapes."""
    for name, tensor in wanted.items():
        found, shape = file.tensors.get(name), tuple(tensor.shape)
        if found is not None and found.shape == shape:
            continue
        what, renaming = "is not there", ""
        if found is not None:
            what = f"has shape {found.shape}"
        else:  # one tensor may be meant, by the end of its name or its shape
            alike = [n for n in file.tensors if n.endswith(f".{name}")]
            alike = alike or [n for n, t in file.tensors.items() if t.shape == shape]
            if len(alike) == 1:
                renaming = f"if {alike[0]} is meant, rename it to {name} and the others "
                renaming += "accordingly; or "
        raise WeightsError(
            f"{name} {what} in {file.path}, but is {shape} in {of}; {renaming}correct {fix}"
        )


def _torchvision(file: WeightFile, name: str) -> Network:
    models = import_torchvision().models
    known: list[str] = models.list_models(module=models)
    if name not in known:
        raise ValueError(
            f"torchvision has no classification model {name!r}; it has {', '.join(known)}"
        )

    def made(**options: Any) -> nn.Module:
        """The model, where it can be without memory or a draw from the global generator, which its
        first weights would take."""
        if name in ("googlenet", "inception_v3"):
            options["aux_logits"] = any(n.lower().startswith("aux") for n in file.tensors)
        with warnings.catch_warnings():  # of models whose first weights will change
            warnings.simplefilter("ignore")
            try:
                with torch.device("meta"):
                    net: nn.Module = models.get_model(name, weights=None, **options)
            except NotImplementedError:  # RegNet asks for numbers while it is made
                with torch.random.fork_rng(devices=[]):
                    net = models.get_model(name, weights=None, **options)
        return net

    net = made()
    last = [key for key, tensor in net.state_dict().items() if tensor.shape[:1] == (CLASSES,)][-1]
    head = file.tensors.get(last)
    n_classes = int(head.shape[0]) if head is not None and head.ndim else CLASSES
    if n_classes != CLASSES:
        net = made(num_classes=n_classes)
    key, first = next((k, m) for k, m in net.named_modules() if isinstance(m, nn.Conv2d))
    found = file.tensors.get(f"{key}.weight")
    if found is not None and found.ndim == 4 and first.groups == 1:  # as many channels as there
        first.in_channels = int(found.shape[1])
        sides = (first.out_channels, first.in_channels, *first.kernel_size)
        first.weight = nn.Parameter(first.weight.new_empty(sides))
    wanted = net.state_dict()
    # counters of steps of training may be left out
    state = {n: torch.zeros((), dtype=torch.int64) for n in wanted if n.endswith("batches_tracked")}
    tensors = {n: wanted[n] for n in (last, *wanted) if n in file.tensors or n not in state}
    _check_tensors(file, tensors, f"torchvision's {name}", f"--architecture, {HOW_ELSE}")
    if left := [n for n in file.tensors if n not in wanted]:
        raise WeightsError(
            f"{file.path} has {left[0]}, which torchvision's {name} has not: it is another "
            f"network; correct --architecture, {HOW_ELSE}"
        )
    for n in tensors:
        value = torch.from_numpy(file.tensors[n])
        state[n] = value.float() if value.is_floating_point() else value
    net.load_state_dict(state, assign=True)
    return Network(
        file.path, file.sha256, file.kind, f"{TORCHVISION}{name}",
        lambda _shape, device: net.eval().requires_grad_(False).to(device),
        channels=first.in_channels, n_classes=n_classes,
        n_parameters=sum(p.numel() for p in net.parameters()),
    )  # fmt: skip


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
    is_lenet = kind == "lenet5"
    if said is not None and isinstance(said, LeNet5) != is_lenet:
        raise WeightsError(f"{file.path} says it is {said}; leave out --architecture")
    dense = sorted((n for n in shapes if re.fullmatch(r"fc\d+\.weight", n)), key=natural_key)
    first = "conv1.weight" if is_lenet else "fc1.weight"
    if not dense or len(shapes.get(first, ())) != (4 if is_lenet else 2):
        theirs = {n: [name for name, shape in shapes.items() if len(shape) == n] for n in (2, 4)}
        fix = ""  # the names that weights, in the order of the file, would have here
        if len(theirs[4]) == (2 if is_lenet else 0) and len(theirs[2]) > 1:
            names = {old: f"conv{i}.weight" for i, old in enumerate(theirs[4], 1)}
            names |= {old: f"fc{i}.weight" for i, old in enumerate(theirs[2], 1)}
            listed = ", ".join(f"{old} to {new}" for old, new in names.items() if old != new)
            fix = f"rename {listed}, their biases alike; or "
        raise WeightsError(
            f"{file.path} has tensors {', '.join(list(shapes)[:4])}, ..., which are not those of "
            f"{kind}; it needs {', '.join(dict.fromkeys([first, 'fc1.weight']))}, as this project "
            f"names them: {fix}correct --architecture, {HOW_ELSE}"
        )
    shape: Shape | None = None
    if about is not None and "shape" in about:
        c, h, w = map(int, about["shape"])
        shape = c, h, w
    if is_lenet:
        network: LeNet5 | SplitMLP = said or LeNet5()
        channels = shapes["conv1.weight"][1]
    else:
        widths = tuple(shapes[name][0] for name in dense[:-1])
        network = said or SplitMLP(widths=widths, cut=min(2, len(widths)))
        shape = shape or shape_of(shapes["fc1.weight"][1])
        channels = 1 if shape is None else shape[0]
    cut = network.cut
    name = f"fc{cut}" if not is_lenet else f"conv{cut}" if cut <= 2 else f"fc{cut - 2}"
    n_classes = shapes[dense[-1]][0]
    return Network(
        file.path, file.sha256, file.kind, kind, partial(_own_module, file, network, n_classes),
        channels=channels, shape=shape, n_classes=n_classes,
        n_parameters=sum(tensor.size for tensor in file.tensors.values()),
        cut=None if said is None else name,
    )  # fmt: skip


def _own_module(
    file: WeightFile, network: LeNet5 | SplitMLP, n_classes: int, shape: Shape, device: str
) -> nn.Module:
    """One of this project's networks with a module at each cut."""
    wanted = network.on(shape, n_classes).tensor_shapes
    images = f"{network.kind} for images of {'x'.join(map(str, shape))}"
    with torch.device("meta"):
        empty = {name: torch.empty(sides) for name, sides in wanted.items()}
        _check_tensors(file, empty, images, "--size or --architecture")
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
    own = net.state_dict()
    state = {n if n in own else n.replace(".", ".0."): file.tensors[n] for n in wanted}
    net.load_state_dict({n: torch.from_numpy(t).float() for n, t in state.items()}, assign=True)
    return net.eval().requires_grad_(False).to(device)
