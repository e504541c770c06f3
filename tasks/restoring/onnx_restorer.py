"""A restorer of the user's own: an ONNX file, run by onnxruntime. It takes float32 pictures (n, 3,
h, w), RGB, in [0, 1] or in [-1, 1], and gives as many of the same size in the same range; n, h and
w may be fixed. A model may hold any computation: run those that you trust."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from recon_core.types import Progress, no_progress
from storage.errors import StorageError
from tasks.devices import Device

OnnxRange = Literal["0..1", "-1..1"]
ONNX_RANGES: tuple[OnnxRange, ...] = get_args(OnnxRange)
LOCATION = re.compile(rb"\x0a\x08location\x12([\x80-\xff]?[\x00-\x7f])", re.DOTALL)
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
        if importlib.util.find_spec("onnxruntime") is None:
            raise StorageError(f"{path} needs onnxruntime; install it with: pip install '.[onnx]'")
        if not path.is_file():
            raise ValueError(f"{path} is not a file; give the ONNX file of your restorer")
        runtime: Any = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
        there = [name for name in (CUDA, CPU) if name in runtime.get_available_providers()]
        there = [CPU] if device == "cpu" else there
        try:
            session = runtime.InferenceSession(str(path), options, providers=there)
        except Exception as error:
            raise StorageError(
                f"{path} is not a model that onnxruntime can run ({_first_line(error)}); export it "
                "again, with its weights in the file"
            ) from error
        self.device = "cuda" if CUDA in session.get_providers() else "cpu"
        if device == "cuda" and self.device == "cpu":
            raise ValueError(
                "device='cuda' but this onnxruntime could not start CUDA; install onnxruntime-gpu "
                "in place of onnxruntime, with the CUDA and cuDNN of its version, or use "
                "--device cpu"
            )
        inputs, outputs = session.get_inputs(), session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            names = [", ".join(v.name for v in some) or "(none)" for some in (inputs, outputs)]
            raise ValueError(
                f"{path} has the inputs {names[0]} and the outputs {names[1]}; export a model with "
                "one of each, pictures in and pictures out"
            )
        shape = inputs[0].shape  # sizes that the file leaves open are None or a name
        for what, value in (("input", inputs[0]), ("output", outputs[0])):
            sizes = value.shape or shape  # an output may have none
            pictures = len(sizes) == 4 and (sizes[1] == 3 or not isinstance(sizes[1], int))
            if value.type != "tensor(float)" or not pictures:
                raise ValueError(
                    f"the {what} {value.name!r} of {path} is {value.type} {sizes}; it has to be "
                    "float32 pictures (n, 3, h, w)"
                )
        n, _channels, *sides = (size if isinstance(size, int) else None for size in shape)
        self._n_fixed, self.resolution = n, (sides[0], sides[1])
        self.path, self.value_range, self.session = path, value_range, session

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file, and of those beside it in which it keeps its weights: the values of
        its keys "location", of which those in a model's remarks name no file that is there."""
        content = self.path.read_bytes()
        digest, names = hashlib.sha256(content), set()
        for match in LOCATION.finditer(content):
            length = sum((byte & 0x7F) << 7 * k for k, byte in enumerate(match[1]))
            names.add(os.fsdecode(content[match.end() : match.end() + length]))
        for file in (self.path.parent / name for name in sorted(names)):
            if file.is_file():
                digest.update(hashlib.sha256(file.read_bytes()).digest())
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

        A batch of fixed size is filled up with black. Raises ValueError if the model gives
        something else than one finite picture for each.
        """
        del net, n_samples, seeds
        is_signed = self.value_range == "-1..1"
        pictures = condition.detach().cpu().numpy()
        pictures = 2 * pictures - 1 if is_signed else pictures
        restored = np.empty_like(pictures)
        size = self._n_fixed or batch_size
        for start in range(0, len(pictures), size):
            rows = slice(start, start + size)
            n = len(pictures[rows])
            part = np.zeros((self._n_fixed or n, *pictures.shape[1:]), np.float32)
            part[:n] = pictures[rows]
            try:
                (answer,) = self.session.run(None, {self.session.get_inputs()[0].name: part})
            except Exception as error:
                raise ValueError(
                    f"{self.path} fails on pictures of shape {part.shape}: {_first_line(error)}; "
                    "if it takes certain sizes only, --size makes them"
                ) from error
            if answer.shape != part.shape:
                raise ValueError(
                    f"{self.path} makes {tuple(answer.shape)} of pictures {part.shape}; it has to "
                    "give one picture of the same size for each"
                )
            if not np.isfinite(answer).all():
                raise ValueError(
                    f"{self.path} gave values that are not finite; check --onnx-range "
                    f"({self.value_range})"
                )
            restored[rows] = answer[:n]
            progress(min(1.0, (start + size) / len(pictures)))
        restored = (restored + 1) / 2 if is_signed else restored
        answers = torch.from_numpy(restored.clip(0, 1).astype(np.float32, copy=False))
        return answers.to(condition.device).unsqueeze(0)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
