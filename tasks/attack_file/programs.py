"""A network as a black box: a TorchScript file, or a program of torch.export.

Neither can be read safely: TorchScript names operators that read and write files,
`torch.export.load` unpickles, evaluates texts, looks operators up by any dotted name, and loads
compiled libraries. So nothing of such a file is touched, beyond the list of names in the archive,
until the user says `--trust`.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from storage.weights import METADATA, WeightFile, WeightsError

Kind = Literal["torchscript", "export"]
NAMES = {"torchscript": "a TorchScript program", "export": "a program of torch.export"}


@dataclass(frozen=True, eq=False)
class Program:
    """f of a file. `flat`: it takes (b, d). `shape` of one input and `batch`, the rows it takes at
    once, are None where the file does not say (any number of rows will do, for a batch).
    `modules`: the same as a module with those that it was exported with (TorchScript: None)."""

    kind: Kind
    sha256: str
    shape: tuple[int, ...] | None
    batch: int | None
    on: Callable[[str], Callable[[Tensor], Tensor]]
    modules: Callable[[str], nn.Module] | None = None


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


def program_kind(path: Path) -> Kind | None:
    """Kind of program in a file, by the names in its archive; None if it is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
            names += archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return None
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return "export"
    return "torchscript" if "constants.pkl" in names else None


def read_program(path: Path, kind: Kind, *, trust: bool) -> Program:
    """The program in a file; WeightsError if it is not trusted, not of one input, or no program."""
    if not trust:
        raise WeightsError(
            f"{path} is {NAMES[kind]}: loading and running it can do anything that you can do on "
            "this machine. Nothing of it was run. Give --trust if you made it yourself or trust "
            "who did, or save the weights alone: torch.save(net.state_dict(), 'net.pt')"
        )
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "torchscript":
                module: Any = torch.jit.load(io.BytesIO(content), map_location="cpu").eval()

                def on(device: str) -> Callable[[Tensor], Tensor]:
                    placed = module.to(device)
                    like = next((p.dtype for p in placed.parameters()), torch.float32)
                    return lambda x: placed(x.to(like))

                return Program(kind, digest, None, None, on)
            return _exported(content, digest, path)
    except WeightsError:
        raise
    except Exception as error:  # a damaged program may fail in any way
        raise WeightsError(
            f"{path} cannot be loaded as {NAMES[kind]} ({type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0][:200]}); save it again with this version of "
            f"torch ({torch.__version__})"
        ) from error


def _exported(content: bytes, digest: str, path: Path) -> Program:
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch._export")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)  # no warnings about formats
        program = torch.export.load(io.BytesIO(content))
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
    inputs = [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
    ]
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
        raise WeightsError(
            f"{path} takes {len(inputs)} inputs; it must take one, a batch of images"
        )
    rows, *shape = inputs[0].shape
    if not all(isinstance(side, int) for side in shape):
        shape = []
    dtype = inputs[0].dtype

    def placed(device: str) -> torch.export.ExportedProgram:
        from torch.export.passes import move_to_device_pass

        return program if device == "cpu" else move_to_device_pass(program, device)

    def on(device: str) -> Callable[[Tensor], Tensor]:
        module = placed(device).module()
        return lambda x: module(x.to(dtype))

    def modules(device: str) -> nn.Module:
        with warnings.catch_warnings():  # torch's own about what it calls itself
            warnings.simplefilter("ignore")
            return torch.export.unflatten(placed(device))

    batch = rows if isinstance(rows, int) else None
    return Program("export", digest, tuple(shape) or None, batch, on, modules)


def in_rows(f: Callable[[Tensor], Tensor], batch: int | None) -> Callable[[Tensor], Tensor]:
    """f of any number of images where a program takes exactly `batch`; the last are filled up."""
    if batch is None:
        return f

    def chunk(x: Tensor) -> Tensor:
        n = len(x)
        full = x if n == batch else torch.cat([x, x[-1:].expand(batch - n, *x.shape[1:])])
        return f(full)[:n]

    return lambda x: torch.cat([chunk(part) for part in x.split(batch)])
