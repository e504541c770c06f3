"""Weights that somebody else saved: a safetensors file or torch's state dict, as named arrays.

A pickle is a program. `torch.load(weights_only=True)` builds tensors and plain containers and
refuses every other name before it is called; nothing here ever asks for more. A file may announce
more than it has (a header, a compressed archive, a tensor that repeats one number): all of it is
compared with the bytes that are there before anything is allocated.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import warnings
import zipfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError
from storage.files import machine_memory, open_regular

METADATA = "palimpsest"
"""The entry of a safetensors file that describes the network, as JSON, in this project's own."""

STATE_DICT_KEYS = (
    *("state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params"),
    *("ema", "model_ema", "state_dict_ema", "ema_state_dict"),
)
"""Where training scripts put the state dict beside an optimiser and an epoch, best first. Averages
over steps come last: they are no point at which a training ended."""

NOT_OF_NETWORKS = ("optim", "sched", "scaler")

DEEPEST = 4

PREFIXES = ("module.", "_orig_mod.", "model.")

COUNTERS = ("num_batches_tracked", "relative_position_index")
"""The only integers that belong to a network: of batch normalisations and of windowed attention."""

HOW_TO_SAVE = (
    "save the tensors alone: torch.save(net.state_dict(), 'victim.pt'), or "
    "safetensors.torch.save_file(net.state_dict(), 'victim.safetensors')"
)


class WeightsError(SourceError):
    """The weights cannot be used as asked: fix the file or the `--weights` argument."""


WIDENING = 16
"""A state dict has this many times its file's bytes at most: layers may share their weights."""


@dataclass(frozen=True, eq=False)
class WeightFile:
    """The tensors of one file, float32 or float64 (half precisions are widened), names cleaned.

    `kind` is "safetensors" or "torch". A torch file keeps the order in which the layers were made;
    a safetensors file is sorted and has none. `sha256` is of the file. `inside`: the keys that lead
    to the state dict in what was saved, "model.ema"; empty where it is the whole.
    """

    path: Path
    kind: str
    tensors: dict[str, npt.NDArray[Any]]
    sha256: str
    inside: str = ""

    @property
    def in_order(self) -> bool:
        """True if the order of `tensors` is that of the layers."""
        return self.kind == "torch"


def read_weights(path: Path) -> WeightFile:
    """The tensors in a safetensors file or in a state dict saved by `torch.save`.

    The state dict may lie in other dicts: under one of `STATE_DICT_KEYS`, the first that there is,
    or anywhere as the only dict of tensors. Raises WeightsError for no such file, another format,
    objects other than tensors, no tensors, integer tensors, NaN or infinite entries, more numbers
    than the file has bytes for.
    """
    content, inside = _content(path), ""
    if content.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive; a pickle
        _check_archive(content, path)
        kind, (inside, found) = "torch", _state_dict(_torch_load(content, path), path)
    elif content[8:9] == b"{":
        kind, found = "safetensors", _safetensors(content, path)
    else:
        raise WeightsError(
            f"{path} is neither a safetensors file nor one that torch.save wrote; {HOW_TO_SAVE}"
        )
    if not found:
        raise WeightsError(f"{path} has no tensors in it; {HOW_TO_SAVE}")
    found = _without_prefixes(found)
    _check_sizes(found, len(content), path)
    tensors = {name: _array(name, value, path) for name, value in found.items()}
    return WeightFile(path, kind, tensors, hashlib.sha256(content).hexdigest(), inside)


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


def _check_archive(content: bytes, path: Path) -> None:
    if not content.startswith(b"PK"):
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            n_bytes = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return  # torch says what is wrong with it
    if n_bytes > len(content):
        raise WeightsError(
            f"{path} is an archive of {len(content):,} bytes that unpacks to {n_bytes:,}, which "
            f"torch.save never writes; {HOW_TO_SAVE}"
        )


def _safetensors(content: bytes, path: Path) -> dict[str, Any]:
    """Eight bytes of length, then a JSON object of that length, then the numbers."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    length = int.from_bytes(content[:8], "little")
    if length > len(content) - 8:
        raise WeightsError(
            f"{path} announces a header of {length:,} bytes but has {len(content):,}: it is cut "
            f"off, or no safetensors file; copy it again, or {HOW_TO_SAVE}"
        )
    try:
        return dict(load(content))
    except (SafetensorError, json.JSONDecodeError, KeyError, ValueError) as error:
        raise WeightsError(
            f"{path} is a damaged safetensors file ({_first_line(error)}); copy it again, or "
            f"{HOW_TO_SAVE}"
        ) from error


def _check_sizes(tensors: Mapping[str, Any], n_bytes: int, path: Path) -> None:
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    if sum(sizes.values()) > WIDENING * n_bytes:
        shape = tuple(tensors[largest].shape)
        raise WeightsError(
            f"{path} has {n_bytes:,} bytes, but its tensors would take {sum(sizes.values()):,}, "
            f"{largest} {shape} most: they repeat few numbers (expand) or are of no device; save "
            "them whole: torch.save({k: v.clone() for k, v in net.state_dict().items()}, "
            "'victim.pt')"
        )
    empty = next((name for name, size in sizes.items() if not size), None)
    if empty is not None:
        raise WeightsError(
            f"{empty} in {path} has no numbers in it, shape {tuple(tensors[empty].shape)}; save "
            "the network without it"
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


def _state_dict(loaded: Any, path: Path) -> tuple[str, dict[str, Any]]:
    import torch

    if not isinstance(loaded, Mapping):
        raise WeightsError(f"{path} holds a {type(loaded).__name__}, no state dict; {HOW_TO_SAVE}")
    others = [f"{k} ({type(v).__name__})" for k, v in loaded.items() if not torch.is_tensor(v)]
    if not others:
        return "", {str(name): tensor for name, tensor in loaded.items()}
    found = _state_dicts(loaded)
    first = min((_rank(keys[0]) for keys in found), default=0)
    best = [keys for keys in found if _rank(keys[0]) == first]
    if len(best) == 1:
        (keys,) = best
        return ".".join(keys), {str(name): tensor for name, tensor in found[keys].items()}
    if best:
        listed = ", ".join(f"{'.'.join(k)} ({len(found[k])} tensors)" for k in best[:6])
        inner = "".join(f"[{key!r}]" for key in best[0])
        raise WeightsError(
            f"{path} holds {len(best)} dicts of tensors: {listed}; save the one that is meant, "
            f"torch.save(torch.load('{path.name}'){inner}, 'victim.pt')"
        )
    raise WeightsError(
        f"{path} holds {', '.join(others[:4])}, where only tensors are accepted, and no dict of "
        f"tensors (looked for under {', '.join(STATE_DICT_KEYS)} and everywhere else); "
        f"{HOW_TO_SAVE}"
    )


def _state_dicts(loaded: Mapping[Any, Any]) -> dict[tuple[str, ...], Mapping[Any, Any]]:
    import torch

    found: dict[tuple[str, ...], Mapping[Any, Any]] = {}
    seen = {id(loaded)}
    left: deque[tuple[tuple[str, ...], Mapping[Any, Any]]] = deque([((), loaded)])
    while left:
        above, outer = left.popleft()
        for key, inner in outer.items():
            if not isinstance(key, str) or key.lower().startswith(NOT_OF_NETWORKS):
                continue
            if not isinstance(inner, Mapping) or not inner or id(inner) in seen:
                continue
            seen.add(id(inner))
            if all(torch.is_tensor(value) for value in inner.values()):
                if any(value.dim() > 1 for value in inner.values()):
                    found[*above, key] = inner
            elif len(above) + 1 < DEEPEST:
                left.append(((*above, key), inner))
    return found


def _rank(key: str) -> int:
    return STATE_DICT_KEYS.index(key) if key in STATE_DICT_KEYS else len(STATE_DICT_KEYS)


def _without_prefixes(tensors: dict[str, Any]) -> dict[str, Any]:
    while True:
        prefix = next((p for p in PREFIXES if all(n.startswith(p) for n in tensors)), None)
        if prefix is None:
            return tensors
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}


def _array(name: str, tensor: Any, path: Path) -> npt.NDArray[Any]:
    import torch

    if name.rpartition(".")[2] in COUNTERS:
        return np.asarray(tensor.numpy())
    dense = tensor.layout == torch.strided and not tensor.is_meta
    if not dense or tensor.is_quantized or not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        if not dense:
            kind = "on no device" if tensor.is_meta else "sparse"
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
