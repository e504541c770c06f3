"""Log of a training, a file of JSON lines (docs/training.md).

`validation.png` shows the last validation: held-out pairs in columns, what came back over what was
restored over what it should be. A resumed training goes on where its checkpoint was: lines after
that are removed.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from PIL import Image
from torch import Tensor

from storage.files import write_file

LOG, PICTURE = "log.jsonl", "validation.png"
N_SHOWN = 16
GAP = 2
SCALE = 2


class TrainingLog:
    """Writes what a training in `out` that has done `step` steps says from there on."""

    def __init__(self, out: Path, *, step: int) -> None:
        self._out = out
        out.mkdir(parents=True, exist_ok=True)
        kept = b"".join(_lines_until(out / LOG, step)) if step else b""
        write_file(out / LOG, kept)
        self._file = (out / LOG).open("ab")
        if not step:
            (out / PICTURE).unlink(missing_ok=True)

    def scalars(self, step: int, **values: float) -> None:
        """Values after `step` steps; those of a validation begin with "validation_"."""
        line = json.dumps({"step": step, **values}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def pictures(
        self,
        inputs: Float32[Tensor, "n c h w"],
        restored: Float32[Tensor, "n c h w"],
        targets: Float32[Tensor, "n c h w"],
    ) -> None:
        """A grid of the first pairs, in [0, 1]: input, restored and target, one over the other."""
        picture = grid(torch.stack([inputs[:N_SHOWN], restored[:N_SHOWN], targets[:N_SHOWN]]))
        content = io.BytesIO()
        Image.fromarray(picture).save(content, format="PNG")
        write_file(self._out / PICTURE, content.getvalue())

    def close(self) -> None:
        self._file.close()


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
