"""State of a training besides weights: means of the loss, validations, the best so far; in the
checkpoint `latest`, so a resumed training ends with the record it would have had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.restore import Fit
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import CorruptPartError

LATEST, BEST, MODEL = "latest", "best", "model"
CURVE_POINTS = 200
LONGEST_LOG_WINDOW = 100


@dataclass
class Curve:
    """A value, averaged over every `window` steps, as [steps done, mean]."""

    window: int
    points: list[tuple[int, float]] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> bool:
        """True if this step completes a window."""
        self.waiting.append(value)
        if len(self.waiting) < self.window:
            return False
        self.points.append((step, sum(self.waiting) / self.window))
        self.waiting = []
        return True

    def restore(self, state: Mapping[str, Any]) -> None:
        self.points = [(int(step), float(value)) for step, value in state["points"]]
        self.waiting = [float(value) for value in state["waiting"]]


@dataclass
class Record:
    """The loss for the card and for the log, validations as (steps done, SSIM), seconds."""

    curve: Curve
    log: Curve
    validations: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, n_steps: int) -> Record:
        """An empty record of a training of `n_steps` steps."""
        window = max(1, n_steps // CURVE_POINTS)
        return cls(Curve(window), Curve(min(window, LONGEST_LOG_WINDOW)))

    @property
    def best(self) -> tuple[int, float] | None:
        """The validation with the highest SSIM, the first of equals."""
        return max(self.validations, key=lambda found: found[1], default=None)

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self)
        state["log"]["points"] = []  # they are in the log's file
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.curve.restore(state["curve"])
        self.log.restore(state["log"])
        self.validations = [(int(step), float(ssim)) for step, ssim in state["validations"]]
        self.seconds = float(state["seconds"])


def save_latest(out: Path, fingerprint: str, fit: Fit, record: Record, feeds: list[Any]) -> None:
    """Replaces the checkpoint that a training resumes from; `feeds`: each rank's position."""
    meta = {
        "fingerprint": fingerprint,
        "step": fit.step,
        "feeds": feeds,
        "record": record.state_dict(),
    }
    save_checkpoint(out, LATEST, arrays(fit.state_dict()), meta)


def load_latest(out: Path, fingerprint: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """State and meta of `save_latest`, if it was of this training; else None.

    Raises CorruptPartError if the files are not as they were written.
    """
    found = load_checkpoint(out, LATEST)
    if found is None or found[1].get("fingerprint") != fingerprint:
        return None
    return {name: torch.from_numpy(array) for name, array in found[0].items()}, found[1]


def save_best(out: Path, fingerprint: str, fit: Fit, ssim: float) -> None:
    """Replaces the averaged weights of the best validation."""
    meta = {"fingerprint": fingerprint, "step": fit.step, "ssim": ssim}
    save_checkpoint(out, BEST, arrays(fit.ema.state_dict()), meta)


def load_best(out: Path, fingerprint: str, step: int) -> dict[str, npt.NDArray[Any]]:
    """The averaged weights of the validation after `step` steps.

    Raises CorruptPartError if they are not there.
    """
    found = load_checkpoint(out, BEST)
    if found is None or (found[1].get("fingerprint"), found[1].get("step")) != (fingerprint, step):
        raise CorruptPartError(
            f"{out} has no best.json of step {step}, where the validation was best; remove "
            f"{out / 'latest.json'} to train from the start"
        )
    return found[0]


def remove(out: Path, *names: str) -> None:
    """Removes checkpoints, first what names the weights."""
    for name in names:
        for file in (out / f"{name}.json", *out.glob(f"{name}-*.safetensors")):
            file.unlink(missing_ok=True)


def arrays(state: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
    return {name: value.detach().cpu().numpy() for name, value in state.items()}
