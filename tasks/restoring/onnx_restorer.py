"""A restorer of the user's own: an ONNX file, run by onnxruntime. It takes float32 pictures (n, 3,
h, w), RGB, in [0, 1] or in [-1, 1], and gives as many of the same size in the same range; n, h and
w may be fixed. A model may hold any computation: run those that you trust."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recon_core.types import Progress, no_progress
from storage.errors import StorageError
from tasks.devices import Device

OnnxRange = Literal["0..1", "-1..1"]
ONNX_RANGES: tuple[OnnxRange, ...] = get_args(OnnxRange)
_LOCATION = re.compile(rb"\x0a\x08location\x12([\x80-\xff]?[\x00-\x7f])", re.DOTALL)
"""Protobuf's fields 1, the text "location", and 2, a text of the length that is the group."""
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class OnnxRestorer:
    """A restorer with the `restore` method of the others; one answer per picture. `resolution` is
    (h, w) where the file fixes it, else None for each; `device` is where it runs.

    Raises ValueError for an unknown range, a device that onnxruntime lacks, or a model whose input
    or output is not a batch of RGB pictures in float32; StorageError if onnxruntime is missing, or
    cannot read the file.
    """

    def __init__(
        self, path: Path, *, value_range: OnnxRange = "0..1", device: Device = "auto"
    ) -> None:
        if value_range not in ONNX_RANGES:
            raise ValueError(f"onnx_range={value_range!r}; choose one of {', '.join(ONNX_RANGES)}")
        self.path = path
        self.value_range = value_range
        self.session, self.device = _session(path, device)
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            raise ValueError(
                f"{path} has the inputs {_names(inputs)} and the outputs {_names(outputs)}; export "
                "a model with one of each, pictures in and pictures out"
            )
        self._input, self._output = inputs[0].name, outputs[0].name
        _check_pictures(path, "input", inputs[0], inputs[0].shape)
        _check_pictures(path, "output", outputs[0], outputs[0].shape or inputs[0].shape)
        n, _channels, height, width = inputs[0].shape
        self._n_fixed = _fixed(n)
        self.resolution = (_fixed(height), _fixed(width))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file, and of those beside it in which it keeps its weights."""
        content = self.path.read_bytes()
        digest = hashlib.sha256(content)
        for file in weight_files(self.path.parent, content):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def restore(
        self,
        net: nn.Module,
        condition: Tensor,
        *,
        n_samples: int,
        seeds: Tensor,
        progress: Progress = no_progress,
        batch_size: int = 256,
    ) -> Tensor:
        """The one answer for each picture, (1, n, 3, h, w) in [0, 1], on the device of `condition`.

        Raises ValueError if the model gives something else than one finite picture for each.
        """
        del net, n_samples, seeds
        given = condition.detach().cpu().numpy()
        if self.value_range == "-1..1":
            given = 2 * given - 1
        size = self._n_fixed or batch_size
        restored = np.empty_like(given)
        for start in range(0, len(given), size):
            part = given[start : start + size]
            restored[start : start + size] = self._run(part, size)[: len(part)]
            progress(min(1.0, (start + size) / len(given)))
        if self.value_range == "-1..1":
            restored = (restored + 1) / 2
        pictures = torch.from_numpy(restored.clip(0, 1).astype(np.float32, copy=False))
        return pictures.to(condition.device).unsqueeze(0)

    def _run(self, part: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
        """The model's answer for one batch, filled up with black where its size is fixed."""
        if self._n_fixed is not None and len(part) < size:
            part = np.concatenate([part, np.zeros((size - len(part), *part.shape[1:]), part.dtype)])
        part = np.ascontiguousarray(part, np.float32)
        try:
            (answer,) = self.session.run([self._output], {self._input: part})
        except _errors() as error:
            raise ValueError(
                f"{self.path} fails on pictures of shape {tuple(part.shape)}: "
                f"{_first_line(error)}; if it takes certain sizes only, --size makes them"
            ) from error
        if answer.shape != part.shape:
            raise ValueError(
                f"{self.path} makes {tuple(answer.shape)} of pictures {tuple(part.shape)}; it has "
                "to give one picture of the same size for each"
            )
        if not np.isfinite(answer).all():
            raise ValueError(
                f"{self.path} gave values that are not finite; check --onnx-range "
                f"({self.value_range})"
            )
        result: npt.NDArray[np.float32] = answer
        return result


def weight_files(folder: Path, content: bytes) -> list[Path]:
    """The files in `folder` that the ONNX model `content` names for its weights, sorted: values of
    the key "location", as Protobuf writes it, of which those in a model's remarks name no file that
    is there."""
    names = set()
    for found in _LOCATION.finditer(content):
        length = sum((byte & 0x7F) << 7 * k for k, byte in enumerate(found[1]))
        names.add(os.fsdecode(content[found.end() : found.end() + length]))
    return [folder / name for name in sorted(names) if (folder / name).is_file()]


def _session(path: Path, device: Device) -> tuple[Any, str]:
    """An onnxruntime session and the device that it is on."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise StorageError(f"{path} needs onnxruntime; install it with: pip install '.[onnx]'")
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give the ONNX file of your restorer")
    runtime = importlib.import_module("onnxruntime")
    if device == "cuda" and CUDA not in runtime.get_available_providers():
        raise ValueError(
            "device='cuda' but this onnxruntime has no CUDA; install onnxruntime-gpu in place of "
            "onnxruntime, or use --device cpu"
        )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    wanted = [CPU] if device == "cpu" else [CUDA, CPU]
    providers = [name for name in wanted if name in runtime.get_available_providers()]
    try:
        session = runtime.InferenceSession(str(path), options, providers=providers)
    except _errors() as error:
        raise StorageError(
            f"{path} is not a model that onnxruntime can run ({_first_line(error)}); export it "
            "again, with its weights in the file"
        ) from error
    on_cuda = CUDA in session.get_providers()
    if device == "cuda" and not on_cuda:
        raise ValueError(
            "device='cuda' but onnxruntime could not start CUDA; install the CUDA and cuDNN of "
            "its version, or use --device cpu"
        )
    return session, "cuda" if on_cuda else "cpu"


def _check_pictures(path: Path, what: str, value: Any, shape: Sequence[Any]) -> None:
    """Dimensions that the file leaves open are None or a name; an output may have no shape."""
    pictures = len(shape) == 4 and (shape[1] == 3 or not isinstance(shape[1], int))
    if value.type != "tensor(float)" or not pictures:
        raise ValueError(
            f"the {what} {value.name!r} of {path} is {value.type} {shape}; it has to be float32 "
            "pictures (n, 3, h, w)"
        )


def _fixed(size: Any) -> int | None:
    """A dimension's size where the file has one."""
    return size if isinstance(size, int) else None


def _names(values: Sequence[Any]) -> str:
    return ", ".join(value.name for value in values) or "(none)"


def _errors() -> tuple[type[Exception], ...]:
    """What onnxruntime raises: one class for each of its status codes, without a common one."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    found = (value for value in vars(state).values() if isinstance(value, type))
    return (RuntimeError, *(cls for cls in found if issubclass(cls, Exception)))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
