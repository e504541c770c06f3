"""Weights that somebody else saved: a safetensors file or torch's state dict, as named arrays.

A file saved by `torch.save` is a pickle, and a pickle is a program. `torch.load(weights_only=True)`
builds tensors and plain containers and refuses every other name before it is called; nothing here
ever asks for more. What kind of file it is is read from its first bytes, not from its name.

What the arrays mean as layers is told by `storage.layers`.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")
"""Where training scripts put the state dict beside an optimiser's and an epoch."""

PREFIXES = ("module.", "_orig_mod.", "model.")
"""What torch's DataParallel, torch.compile and Lightning put before every name."""

COUNTERS = ("num_batches_tracked", "relative_position_index")
"""The only integers that belong to a network: of batch normalisations and of windowed attention."""

HOW_TO_SAVE = (
    "save the tensors alone: torch.save(net.state_dict(), 'victim.pt'), or "
    "safetensors.torch.save_file(net.state_dict(), 'victim.safetensors')"
)


class WeightsError(SourceError):
    """The weights cannot be used as asked: fix the file or the `--weights` argument."""


@dataclass(frozen=True, eq=False)
class WeightFile:
    """The tensors of one file, float32 or float64 (half precisions are widened), names cleaned.

    `kind` is "safetensors" or "torch". A torch file keeps the order in which the layers were made;
    a safetensors file is sorted and has none. `sha256` is of the file.
    """

    path: Path
    kind: str
    tensors: dict[str, npt.NDArray[Any]]
    sha256: str

    @property
    def in_order(self) -> bool:
        """Whether the order of `tensors` is that of the layers."""
        return self.kind == "torch"


def read_weights(path: Path) -> WeightFile:
    """The tensors in a safetensors file or in a state dict saved by `torch.save`.

    A dict with the state dict under "state_dict", "model_state_dict" or "model" is accepted too.
    Nothing in the file is run.

    Raises:
        WeightsError: no such file, another format, objects other than tensors, no tensors, integer
            tensors, NaN or infinite entries; the message says which and what to do.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise WeightsError(f"{path} {what}; give --weights a file of weights")
    content = path.read_bytes()
    if _is_safetensors(content):
        kind, found = "safetensors", _safetensors(content, path)
    elif content.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive; a pickle
        kind, found = "torch", _state_dict(_torch_load(content, path), path)
    else:
        raise WeightsError(
            f"{path} is neither a safetensors file nor one that torch.save wrote; {HOW_TO_SAVE}"
        )
    if not found:
        raise WeightsError(f"{path} has no tensors in it; {HOW_TO_SAVE}")
    tensors = {name: _array(name, value, path) for name, value in _without_prefixes(found).items()}
    return WeightFile(path, kind, tensors, hashlib.sha256(content).hexdigest())


def _is_safetensors(content: bytes) -> bool:
    """Eight bytes of length, then a JSON object of that length."""
    length = int.from_bytes(content[:8], "little")
    return len(content) >= 8 + length and content[8:9] == b"{"


def _safetensors(content: bytes, path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(content))
    except (SafetensorError, json.JSONDecodeError, KeyError, ValueError) as error:
        raise WeightsError(f"{path} is a damaged safetensors file ({error}); copy it again") from (
            error
        )


def _torch_load(content: bytes, path: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings():  # of old formats and of archives of programs
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path} has pickled objects in it besides tensors{_culprit(error)}, which may run any "
            f"code when they are read; they were not read. {HOW_TO_SAVE}"
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


def _culprit(error: Exception) -> str:
    """` (models.Net)`, from torch's message about the name that it refused."""
    words = str(error).partition("GLOBAL ")[2].split()
    return f" ({words[0].rstrip('.,')})" if words else ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0][:200]


def _state_dict(loaded: Any, path: Path) -> dict[str, Any]:
    """The mapping of names to tensors in what torch.load gave."""
    import torch

    if isinstance(loaded, Mapping):
        inner = [loaded[k] for k in STATE_DICT_KEYS if isinstance(loaded.get(k), Mapping)]
        loaded = inner[0] if inner else loaded
    if not isinstance(loaded, Mapping):
        raise WeightsError(f"{path} holds a {type(loaded).__name__}, no state dict; {HOW_TO_SAVE}")
    others = [f"{k} ({type(v).__name__})" for k, v in loaded.items() if not torch.is_tensor(v)]
    if others:
        raise WeightsError(
            f"{path} holds {', '.join(others[:4])}, where only tensors are accepted; {HOW_TO_SAVE}"
        )
    return {str(name): tensor for name, tensor in loaded.items()}


def _without_prefixes(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same without the prefixes that wrappers put before every single name."""
    while True:
        prefix = next((p for p in PREFIXES if all(n.startswith(p) for n in tensors)), None)
        if prefix is None:
            return tensors
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}


def _array(name: str, tensor: Any, path: Path) -> npt.NDArray[Any]:
    import torch

    if name.rpartition(".")[2] in COUNTERS:
        return np.asarray(tensor.numpy())
    if tensor.is_sparse or tensor.is_quantized or not tensor.is_floating_point():
        kind = "sparse" if tensor.is_sparse else str(tensor.dtype).removeprefix("torch.")
        raise WeightsError(
            f"{name} in {path} is {kind}; weights must be dense floating point numbers: save the "
            "network before it is quantised, and without masks and counters"
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
