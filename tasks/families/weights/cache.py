"""Cache of attacks on given weights (`OUT/cache`): one checkpoint each, and what they are of.

`job.json` says what every outcome there depends on; attacks with other settings are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import StorageError, StoreMismatchError
from storage.pairs.dataset import manifest_differences
from tasks.attack_file.record import claimed

Ending = Literal["ok", "stopped", "diverged"]


@dataclass(frozen=True)
class AttackRun:
    """Outcome of one attack, from its checkpoint. `loss` and `residual` are None if not finite, and
    `residual` where no condition is solved (the span attack).

    `ending`: "stopped" by a rule of the attack's settings or "diverged" to NaN: no pictures left.
    """

    number: int
    ending: Ending
    n_iterations: int
    loss: float | None
    residual: float | None
    settings: dict[str, float]
    seconds: float
    threads: int


@dataclass(frozen=True)
class Candidates:
    """The candidates of one attack, raw, at every saved iteration s.

    `lam`: the multipliers of the KKT attack. `label`, `trust`: of the span attack's sources.
    """

    x: Float[Tensor, "s m d"]
    lam: Float[Tensor, " m"] | None = None
    label: Int64[Tensor, " m"] | None = None
    trust: Float[Tensor, " m"] | None = None


def claim(cache: Path, wanted: dict[str, Any]) -> None:
    """Write down what the attacks in `cache` are of, or compare with what is there.

    Raises StoreMismatchError naming the first difference.
    """
    if differences := manifest_differences(claimed(cache, wanted), wanted):
        raise StoreMismatchError(
            f"{cache.parent} holds attacks with other settings: {differences[0]}; use another "
            "--out, or --fresh to start over"
        )


def name_of(number: int) -> str:
    """The name of an attack's checkpoint."""
    return f"attack_{number:04d}"


def read_candidates(cache: Path, number: int) -> Candidates:
    """Candidates of an attack that is done. Raises StorageError if it is not there."""
    tensors, _meta = _checkpoint(cache, number)
    return Candidates(**{name: torch.from_numpy(array) for name, array in tensors.items()})


def read_run(cache: Path, number: int) -> AttackRun:
    """Outcome of an attack that is done. Raises StorageError if it is not there."""
    _tensors, meta = _checkpoint(cache, number)
    return AttackRun(number=number, **meta)


def save_run(cache: Path, run: AttackRun, arrays: Mapping[str, Tensor]) -> None:
    """Writes the checkpoint of an attack that is done."""
    meta = {name: value for name, value in asdict(run).items() if name != "number"}
    save_checkpoint(cache, name_of(run.number), {n: array(t) for n, t in arrays.items()}, meta)


def remove_checkpoint(cache: Path, name: str) -> None:
    """The JSON first: what names the tensors goes before they do."""
    (cache / f"{name}.json").unlink(missing_ok=True)
    for file in cache.glob(f"{name}-*.safetensors"):
        file.unlink(missing_ok=True)


def _checkpoint(cache: Path, number: int) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    found = load_checkpoint(cache, name_of(number))
    if found is None:
        raise StorageError(f"{cache} has no attack {number}; run the same command again")
    return found


def array(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor as a checkpoint keeps it."""
    return np.asarray(tensor.cpu().numpy())
