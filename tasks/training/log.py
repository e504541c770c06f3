"""Log of a training, a file of JSON lines (docs/training.md), and TensorBoard where it is
installed. `validation.png` shows the last validation: held-out pairs in columns, what came back
over what was restored over what it should be. A resumed training goes on where its checkpoint was:
lines and events after that are removed."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float32
from PIL import Image
from torch import Tensor

from storage.files import write_file

LOG, PICTURE, TENSORBOARD = "log.jsonl", "validation.png", "tensorboard"
N_SHOWN = 16
GAP = 2
SCALE = 2

TensorBoard = Literal["auto", "on", "off"]
"""Write for TensorBoard: if it is installed, or in any case, or not."""


class TrainingLog:
    """Writes what a training in `out` that has done `step` steps says from there on.

    Raises ValueError if TensorBoard is asked for and not installed.
    """

    def __init__(self, out: Path, *, step: int, tensorboard: TensorBoard = "auto") -> None:
        self._out = out
        writer = summary_writer(tensorboard)
        out.mkdir(parents=True, exist_ok=True)
        kept = b"".join(_lines_until(out / LOG, step)) if step else b""
        write_file(out / LOG, kept)
        self._file = (out / LOG).open("ab")
        if not step:
            for events in (out / TENSORBOARD).glob("events.out.*"):
                events.unlink()
            (out / PICTURE).unlink(missing_ok=True)
        self._writer: Any = None
        if writer is not None:  # it drops events from its first step on
            purge = step + 1 if step else None
            self._writer = writer(str(out / TENSORBOARD), purge_step=purge)

    def scalars(self, step: int, **values: float) -> None:
        """Values after `step` steps; those of a validation begin with "validation_"."""
        line = json.dumps({"step": step, **values}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(_tag(name), value, step)

    def pictures(
        self,
        step: int,
        inputs: Float32[Tensor, "n c h w"],
        restored: Float32[Tensor, "n c h w"],
        targets: Float32[Tensor, "n c h w"],
    ) -> None:
        """A grid of the first pairs, in [0, 1]: input, restored and target, one over the other."""
        picture = grid(torch.stack([inputs[:N_SHOWN], restored[:N_SHOWN], targets[:N_SHOWN]]))
        content = io.BytesIO()
        Image.fromarray(picture).save(content, format="PNG")
        write_file(self._out / PICTURE, content.getvalue())
        if self._writer is not None:
            self._writer.add_image("validation/pairs", picture, step, dataformats="HWC")
            self._writer.flush()

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def grid(pictures: Float32[Tensor, "rows n c h w"]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pictures in rows and columns on white, uint8 (height, width, 3), each pixel a square."""
    values = (pictures * 255).round().clamp(0, 255).byte().cpu().numpy()
    n_rows, n_columns, n_channels, height, width = values.shape
    values = np.broadcast_to(values, (n_rows, n_columns, max(3, n_channels), height, width))
    values = values.repeat(SCALE, axis=3).repeat(SCALE, axis=4)
    edges = ((0, 0), (0, 0), (0, 0), (GAP, GAP), (GAP, GAP))
    padded = np.pad(values, edges, constant_values=255)
    rows_columns = padded.transpose(0, 3, 1, 4, 2)
    tall, wide = n_rows * padded.shape[3], n_columns * padded.shape[4]
    return np.ascontiguousarray(rows_columns.reshape(tall, wide, 3))


def _lines_until(path: Path, step: int) -> list[bytes]:
    """The whole lines up to `step`.

    The log is not synced: a kill leaves half a line at its end, a power failure maybe zeros in it.
    """
    if not path.is_file():
        return []
    return [
        line
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n") and _step_of(line) <= step
    ]


def _step_of(line: bytes) -> float:
    """The step of a line; infinite for what is no line of the log."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _tag(name: str) -> str:
    group, _, rest = name.partition("validation_")
    return f"validation/{rest}" if not group and rest else f"train/{name}"


def summary_writer(tensorboard: TensorBoard) -> Any:
    """torch's SummaryWriter, or None if there is to be none; ValueError if it cannot be had."""
    if tensorboard == "off":
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except (ImportError, AttributeError, TypeError) as error:  # the latter two: of its protobuf
        if tensorboard == "auto":
            return None
        raise ValueError(
            f"tensorboard='on' but it cannot be imported ({error}); pip install "
            "'.[tensorboard]', or use 'auto' or 'off'"
        ) from error
    return SummaryWriter
