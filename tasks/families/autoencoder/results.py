"""Recoveries scored: per mask and method, training images beside images that f never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from recon_core.attacks.plug_and_play import Ending
from recon_core.recovery_scores import (
    ACCURATE,
    APPROXIMATE,
    THRESHOLDS,
    Rates,
    errors,
    psnr,
    rates,
)
from tasks.attack_file.record import six_digits
from tasks.families.autoencoder.attack import Recovery
from tasks.families.autoencoder.inputs import AutoencoderJob

TITLES = {
    "noise_aware": "ours, mask unknown",
    "unknown": "paper, mask unknown",
    "known": "paper, mask known",
    "iteration": "f alone",
}
SIDES = {"train": "training images", "control": "control images"}


@dataclass(frozen=True, eq=False)
class Cell:
    """One recovery and its scores, where the originals are known."""

    recovery: Recovery
    mse: Float64[Tensor, " n"] | None
    rates: Rates | None

    @property
    def title(self) -> str:
        """Title of its method."""
        return TITLES[self.recovery.method.kind]

    def order(self) -> list[int]:
        """Rows, the best first: by error, or, without originals, by what f changes least."""
        by = self.recovery.residual if self.mse is None else self.mse
        return [int(row) for row in by.argsort(stable=True)]

    def label(self, row: int) -> str:
        """The score of one image, in a few characters."""
        if self.mse is None:
            return f"{float(self.recovery.residual[row]):.0e}"
        return f"{float(psnr(self.mse[row : row + 1])):.0f} dB"

    def is_accurate(self, row: int) -> bool:
        """True if it came back accurately; False where that is not known."""
        return self.mse is not None and bool(self.mse[row] < ACCURATE)


def score(recoveries: Sequence[Recovery]) -> list[Cell]:
    """A cell each."""
    return [_cell(recovery) for recovery in recoveries]


def _cell(recovery: Recovery) -> Cell:
    if recovery.case.original is None:
        return Cell(recovery, None, None)
    mse = errors(recovery.x, recovery.case.original)
    return Cell(recovery, mse, rates(mse))


def pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Cell | None]]:
    """Every cell of training images, with the control's of the same mask and method."""
    found = []
    for cell in cells:
        if cell.recovery.case.side == "train":
            same = [c for c in cells if _key(c) == _key(cell) and c.recovery.case.side != "train"]
            found.append((cell, same[0] if same else None))
    return found


def record_of_cell(cell: Cell) -> dict[str, Any]:
    """Everything but the pictures, as JSON; in the form of a cell of `recovery.json`."""
    recovery, case = cell.recovery, cell.recovery.case
    found = {
        "mask": case.mask_name,
        "split": case.side,
        "method": recovery.method.kind,
        "n": len(case.names),
        "known_share": None if case.mask is None else six_digits(float(case.mask.double().mean())),
        "images": list(case.names),
        "residual": [six_digits(value) for value in recovery.residual.tolist()],
        "n_applied": six_digits(float(recovery.n_applied.double().mean())),
        "endings": {e.name.lower(): int((recovery.ending == e).sum()) for e in Ending},
        "mask_accuracy": None
        if case.mask is None or recovery.method.kind == "iteration"
        else six_digits(float((recovery.mask == case.mask).double().mean())),
        "seconds": round(recovery.seconds, 3),
    }
    if cell.rates is None or cell.mse is None:
        empty = ("n_accurate", "n_approximate", "accurate", "approximate", "psnr", "by_threshold")
        return found | dict.fromkeys((*empty, "mse"))
    r = cell.rates
    return found | {
        "n_accurate": r.n_accurate,
        "n_approximate": r.n_approximate,
        "accurate": [six_digits(value) for value in r.accurate],
        "approximate": [six_digits(value) for value in r.approximate],
        "psnr": [six_digits(value) for value in r.psnr],
        "by_threshold": list(r.by_threshold),
        "mse": [six_digits(value) for value in cell.mse.tolist()],
    }


def conventions(job: AutoencoderJob) -> dict[str, str]:
    """Meanings of the words and numbers."""
    noise = f"Gaussian, standard deviation {job.noise:g}" if job.noise else "none"
    return {
        "accurate": f"mean square error below {ACCURATE:g}, a PSNR above 70 dB (paper 000)",
        "approximate": f"below {APPROXIMATE:g}, 33 dB",
        "thresholds": ", ".join(f"{value:g}" for value in THRESHOLDS),
        "residual": "mean square of f(x) - x of what came back; small at fixed points of f",
        "intervals": "95 %: Clopper and Pearson for shares, bootstrap over images for PSNR",
        "noise": noise,
    }


def arrays(cells: Sequence[Cell]) -> dict[str, Tensor]:
    """Arrays of what came back, by `SIDE/MASK/METHOD`; degraded and original once per case."""
    found: dict[str, Tensor] = {}
    for cell in cells:
        case = cell.recovery.case
        start = f"{case.side}/{case.mask_name}"
        found[f"{start}/degraded"] = case.y
        if case.original is not None:
            found[f"{start}/original"] = case.original
        kind = cell.recovery.method.kind
        found[f"{start}/{kind}/x"] = cell.recovery.x
        if kind != "iteration":
            found[f"{start}/{kind}/mask"] = cell.recovery.mask.to(torch.uint8)
    return found


def _key(cell: Cell) -> tuple[str, str]:
    return cell.recovery.case.mask_name, cell.recovery.method.kind
