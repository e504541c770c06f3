"""Recover degraded images from an autoencoder in pieces: some images of one case by one method, a
function of f, the images, the method and their own random numbers. Each leaves a checkpoint in
`OUT/cache`, named by a hash of all that it depends on, so that none is done again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from recon_core.attacks.autoencoder.preflight import reconstruction_errors
from recon_core.attacks.plug_and_play import Degraded, Function, KnownMask
from recon_core.types import seeded_generator
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import StoreMismatchError
from tasks.attack_file.record import claimed
from tasks.families.autoencoder.inputs import AutoencoderJob, AutoencoderVictim, Method
from tasks.families.autoencoder.material import Case

PIECE = 32
"""Images of one piece."""
OnProgress = Callable[[float, float], None]


@dataclass(frozen=True, eq=False)
class Recovery:
    """One method's images of one case; `residual`: the mean square of f(x) - x, which needs no
    original. `mask`: the estimate of H."""

    case: Case
    method: Method
    x: Float[Tensor, "n c h w"]
    mask: Bool[Tensor, "n c h w"]
    n_applied: Int64[Tensor, " n"]
    ending: Int64[Tensor, " n"]
    residual: Float64[Tensor, " n"]
    seconds: float


def recover_all(
    job: AutoencoderJob,
    victim: AutoencoderVictim,
    cases: tuple[Case, ...],
    *,
    device: str,
    on_progress: OnProgress,
) -> list[Recovery]:
    """Every case by every method; raises StoreMismatchError if `job.out` is of other weights.

    CorruptPartError if a checkpoint is not as it was written.
    """
    cache = job.out / "cache"
    wanted = {"weights": victim.sha256}
    if claimed(cache, wanted) != wanted:
        raise StoreMismatchError(
            f"{job.out} holds an attack on other weights; use another --out, or --fresh to start "
            "over"
        )
    pieces = _Pieces(job, victim, cache, device)
    pairs = [(case, method) for case in cases for method in job.methods]
    total = sum(len(case.names) for case, _method in pairs)
    done = 0
    found = []
    for case, method in pairs:
        parts = []
        for rows in _rows(case):
            on_progress(done, total)
            parts.append(pieces.done(case, method, rows))
            done += len(rows)
        found.append(_joined(case, method, parts))
    on_progress(done, total)
    return found


Part = tuple[dict[str, Tensor], float]
"""A piece's tensors and seconds."""


class _Pieces:
    """Does pieces, or reads what was done."""

    def __init__(
        self, job: AutoencoderJob, victim: AutoencoderVictim, cache: Path, device: str
    ) -> None:
        self.job, self.victim, self.cache, self.device = job, victim, cache, device
        self.f: Function = victim.function(device)

    def done(self, case: Case, method: Method, rows: range) -> Part:
        """A piece from its checkpoint, or computed and saved."""
        name = f"{method.kind}_{self.digest(case, method, rows)}"
        saved = load_checkpoint(self.cache, name)
        if saved is not None:
            arrays, meta = saved
            return {key: torch.from_numpy(a.copy()) for key, a in arrays.items()}, meta["seconds"]
        started = time.perf_counter()
        tensors = self.compute(case, method, rows)
        seconds = round(time.perf_counter() - started, 3)
        arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        save_checkpoint(self.cache, name, arrays, {"seconds": seconds})
        return tensors, seconds

    def compute(self, case: Case, method: Method, rows: range) -> dict[str, Tensor]:
        """Images that the method makes of these rows."""
        chosen = slice(rows.start, rows.stop)
        told = case.mask if isinstance(method, KnownMask) else None
        purpose = f"start {case.mask_name} {case.side}"
        degraded = Degraded(
            y=case.y[chosen].to(self.device),
            mask=None if told is None else told[chosen].to(self.device),
            sigma=_told_noise(self.job),
            generators=tuple(seeded_generator(self.job.seed, row, purpose) for row in rows),
        )
        result = method.recover(self.f, degraded)
        tensors = {
            "x": result.x,
            "mask": result.mask,
            "n_applied": result.n_applied,
            "ending": result.ending,
            "residual": reconstruction_errors(self.f, result.x).nan_to_num(nan=torch.inf),
        }
        return {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}

    def digest(self, case: Case, method: Method, rows: range) -> str:
        """Hash of everything that a piece depends on."""
        facts = {name: value for name, value in self.victim.facts.items() if name != "file"}
        purpose = [self.job.seed, case.mask_name, case.side, rows.start, rows.stop]
        told = [_told_noise(self.job), self.device.partition(":")[0]]
        text = json.dumps([facts, asdict(method), purpose, told], sort_keys=True)
        digest = hashlib.sha256(text.encode())
        chosen = slice(rows.start, rows.stop)
        digest.update(case.y[chosen].numpy().tobytes())
        if case.mask is not None and isinstance(method, KnownMask):
            digest.update(case.mask[chosen].numpy().tobytes())
        return digest.hexdigest()[:24]


def _told_noise(job: AutoencoderJob) -> float | None:
    """What the methods are told of the noise: its level only where the user says it of pictures
    that are degraded already; eight bits have no negative values to measure it on."""
    return job.noise if job.degraded is not None and job.noise else None


def _rows(case: Case) -> Iterator[range]:
    n = len(case.names)
    for first in range(0, n, PIECE):
        yield range(first, min(first + PIECE, n))


def _joined(case: Case, method: Method, parts: list[Part]) -> Recovery:
    tensors = {key: torch.cat([part[key] for part, _s in parts]) for key in parts[0][0]}
    return Recovery(case, method, seconds=sum(seconds for _part, seconds in parts), **tensors)
