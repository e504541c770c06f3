"""Weights that somebody else saved: a safetensors file or torch's state dict, as named arrays.

A pickle is a program. `torch.load(weights_only=True)` builds tensors and plain containers and
refuses every other name before it is called; nothing here ever asks for more. A file may announce
more than it has (a header, a compressed archive, a tensor that repeats one number): all of it is
compared with the bytes that are there before anything is allocated.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import WeightsError
from storage.files import machine_memory, open_regular
from storage.optimiser_states import OptimiserState, states_in
from storage.state_dicts import (
    COUNTERS,
    HOW_TO_SAVE,
    HOW_TO_SAVE_GRADIENTS,
    HOW_TO_SAVE_STATE,
    MEMBERS,
    check_sizes,
    refuse_formats,
    refuse_tensors,
    state_dict_in,
    weights_alone,
)

__all__ = [
    "METADATA",
    "WeightFile",
    "WeightsError",
    "check_weights_file",
    "read_states",
    "read_weights",
]

METADATA = "palimpsest"
"""The entry of a safetensors file that describes the network, as JSON, in this project's own."""


@dataclass(frozen=True, eq=False)
class WeightFile:
    """The tensors of one file, float32 or float64 (half precisions are widened), names cleaned.

    `kind` is "safetensors" or "torch". A torch file keeps the order in which the layers were made;
    a safetensors file is sorted and has none. `sha256` is of the file. `left_out`: what was read
    and is no weight, each with its reason. `states`: what optimisers beside it remember.
    """

    path: Path
    kind: str
    tensors: dict[str, npt.NDArray[Any]]
    sha256: str
    left_out: tuple[str, ...] = ()
    states: tuple[OptimiserState, ...] = ()

    @property
    def in_order(self) -> bool:
        """True if the order of `tensors` is that of the layers."""
        return self.kind == "torch"


def read_weights(path: Path, option: str = "--weights") -> WeightFile:
    """The tensors in a safetensors file or in a state dict saved by `torch.save`.

    The state dict may lie in other dicts: under one of `STATE_DICT_KEYS`, the first that there is,
    or anywhere as the only dict of tensors. Counters, indices and masks are left out, and averages
    over steps beside their network. Raises WeightsError, with advice about `option`, for no such
    file, another format, objects other than tensors, no tensors, quantised ones, adapters without
    their network, NaN or infinite entries, more numbers than the file has bytes for.
    """
    try:
        return _read(path)
    except WeightsError as error:
        text = str(error).replace("--weights", option)
        if option == "--gradients":
            text = text.replace(HOW_TO_SAVE, HOW_TO_SAVE_GRADIENTS)
        raise WeightsError(text) from error


def read_states(path: Path) -> tuple[str, tuple[OptimiserState, ...]]:
    """(SHA-256 of the file, what optimisers in it remember), of a file that torch.save wrote, such
    as accelerate's optimizer.bin. Raises WeightsError as `read_weights` does, and for none."""
    try:
        content = _content(path)
        if not content.startswith((b"PK\x03\x04", b"\x80")):
            raise WeightsError(f"{path} is no file that torch.save wrote; {HOW_TO_SAVE_STATE}")
        found, others = states_in(_torch_load(content, path), len(content), path)
    except WeightsError as error:
        text = str(error).replace("--weights", "--optimizer")
        raise WeightsError(text.replace(HOW_TO_SAVE, HOW_TO_SAVE_STATE)) from error
    if not found:
        what = f"only {others[0]}" if others else "no optimiser's state"
        raise WeightsError(f"--optimizer {path} holds {what}; {HOW_TO_SAVE_STATE}")
    return hashlib.sha256(content).hexdigest(), tuple(found)


def _read(path: Path) -> WeightFile:
    import safetensors.torch
    from safetensors import SafetensorError

    content = _content(path)
    left_out: list[str] = []
    states: tuple[OptimiserState, ...] = ()
    length = int.from_bytes(content[:8], "little")
    is_safe = content[8:9] == b"{"
    kind = "torch"
    if is_safe and (length <= len(content) or not content.startswith(b"\x80")):
        kind = "safetensors"
    refuse_formats(b"" if kind == "safetensors" else content, path)
    if kind == "safetensors":
        if length > len(content) - 8:  # eight bytes of length, a JSON object of it, the numbers
            raise WeightsError(
                f"{path} announces a header of {length:,} bytes but has {len(content):,}: it is "
                f"cut off, or no safetensors file; copy it again, or {HOW_TO_SAVE}"
            )
        try:
            found: dict[str, Any] = dict(safetensors.torch.load(content))
        except (SafetensorError, json.JSONDecodeError, KeyError, ValueError) as error:
            raise WeightsError(
                f"{path} is a damaged safetensors file ({_first_line(error)}); copy it again, or "
                f"{HOW_TO_SAVE}"
            ) from error
    elif content.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive; a pickle
        loaded = _torch_load(content, path)
        found, left_out = state_dict_in(loaded, path)
        own, others = states_in(loaded, len(content), path)
        states, left_out = tuple(own), [*left_out, *others]
    else:
        raise WeightsError(
            f"{path} is neither a safetensors file nor one that torch.save wrote; {HOW_TO_SAVE}"
        )
    if not found:
        raise WeightsError(f"{path} has no tensors in it; {HOW_TO_SAVE}")
    refuse_tensors(found, path)
    check_sizes(found, len(content), path)
    weights, more = weights_alone(found, path)
    tensors = {name: _array(name, value, path) for name, value in weights.items()}
    sha256 = hashlib.sha256(content).hexdigest()
    return WeightFile(path, kind, tensors, sha256, (*left_out, *more), states)


def check_weights_file(path: Path) -> int:
    """Bytes of a file that may be read as weights; WeightsError if it is absent, no regular file,
    cannot be opened, or is larger than the memory of this machine."""
    try:
        with open_regular(path) as file:
            n_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise WeightsError(f"{path} does not exist; give --weights a file of weights") from None
    except IsADirectoryError:
        raise WeightsError(f"{path} is a folder; give --weights a file of weights") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise WeightsError(f"{path} cannot be read: {why}; give --weights a file") from error
    memory = machine_memory()
    if n_bytes > memory:
        raise WeightsError(
            f"{path} has {n_bytes / 1e9:,.0f} GB, more than the memory of this machine "
            f"({memory / 1e9:,.0f} GB); give --weights the file of a network that fits"
        )
    return n_bytes


def _content(path: Path) -> bytes:
    check_weights_file(path)
    with open_regular(path) as file:
        return file.read()


def _torch_load(content: bytes, path: Path) -> Any:
    import torch

    names, n_bytes = [], 0
    with contextlib.suppress(zipfile.BadZipFile, ValueError, NotImplementedError):  # told by torch
        if content.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                names = archive.namelist()
                n_bytes = sum(member.file_size for member in archive.infolist())
    for end, what, fix in MEMBERS:
        if any(name.endswith(end) for name in names):
            raise WeightsError(f"{path} is {what}; {fix}")
    if n_bytes > len(content):
        raise WeightsError(
            f"{path} is an archive of {len(content):,} bytes that unpacks to {n_bytes:,}, which "
            f"torch.save never writes; {HOW_TO_SAVE}"
        )
    try:
        with warnings.catch_warnings():  # of old formats and of archives of programs
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = str(error).partition("GLOBAL ")[2].split()  # torch names what it refused
        culprit = f" ({refused[0].rstrip('.,')})" if refused else ""
        raise WeightsError(
            f"{path} has pickled objects in it besides tensors{culprit}, which may run any code "
            f"when they are read; they were not read. {HOW_TO_SAVE}"
        ) from error
    except Exception as error:  # a damaged archive may fail in any way
        if "TorchScript" in str(error):
            raise WeightsError(
                f"{path} is a TorchScript program, of which nothing was run; {HOW_TO_SAVE}"
            ) from error
        raise WeightsError(
            f"{path} cannot be read as a file of torch.save ({type(error).__name__}: "
            f"{_first_line(error)}); copy it again, or {HOW_TO_SAVE}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0][:200]


def _array(name: str, tensor: Any, path: Path) -> npt.NDArray[Any]:
    import torch

    if name.rpartition(".")[2] in COUNTERS:
        return np.asarray(tensor.numpy())
    dense = tensor.layout == torch.strided and not tensor.is_meta
    if not dense or not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        if not dense:
            kind = "on no device" if tensor.is_meta else "sparse"
        raise WeightsError(
            f"{name} in {path} is {kind}; weights must be dense floating point numbers: save the "
            "network without it, or as such numbers"
        )
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    array = np.asarray(wide.detach().contiguous().numpy())
    n_bad = int(array.size - np.isfinite(array).sum())
    if n_bad:
        raise WeightsError(
            f"{name} in {path} has {n_bad} of {array.size} entries that are NaN or infinite: the "
            "training diverged, and nothing can be read from such weights; use an earlier save"
        )
    return array
