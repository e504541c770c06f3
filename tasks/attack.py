"""Attack one network that is given as a file of weights: many attacks, resumable at any moment.

Every attack is a pure function of (weights, settings, seed, its number), so it does not matter
which of them were done before an interruption, or next to which others. On a CPU they go side by
side, one thread each; on a GPU many are one stack on shared weights. What is done is in
`OUT/cache`, one checkpoint per attack; a running one is saved every half minute, and when it is
stopped.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.attacks.kkt_objective import (
    SETTINGS,
    KKTAttack,
    Settings,
    settings_of,
    starting_points,
)
from recon_core.attacks.kkt_solver import Attacked, AttackState, reconstruct
from recon_core.types import seeded_generator
from recon_core.victims.network import Activation
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.dataset import manifest_differences
from storage.documents import read_document
from storage.errors import StorageError, StoreMismatchError
from storage.files import write_json
from tasks.attack_inputs import Victim

ROWS_AT_ONCE = 1 << 14
"""Candidates of one stack of attacks on a GPU."""
MAX_ATTACKS = 100_000
STATE_EVERY = 25
"""Iterations after which a running attack can be saved or stopped."""
SAVE_SECONDS = 30.0
POLL_SECONDS = 0.2

Ending = Literal["ok", "stopped", "diverged"]

OnProgress = Callable[[float, float], None]
"""Called with the attacks done, fractions included, and all attacks."""


@dataclass(frozen=True, kw_only=True)
class AttackJob:
    """An attack on given weights: everything but where it is computed.

    `arch` and `shape` (c, h, w) are checked against the file, and inferred without. `data`,
    `decoys`, `mean`, `std` are what is known beside the weights (`attack_inputs`); they change how
    results are shown and scored, never the attack. `n_shown`: pictures on the contact sheet.
    `skip_corrupt`: pictures that cannot be read are left out, and are no error.
    """

    weights: Path
    out: Path
    arch: str | None = None
    shape: tuple[int, int, int] | None = None
    activation: Activation = "relu"
    leak: float = 0.01
    attack: KKTAttack = field(default_factory=KKTAttack)
    n_attacks: int = 1
    data: str | None = None
    decoys: str | None = None
    mean: str | None = None
    std: tuple[float, ...] | None = None
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    n_shown: int = 40
    skip_corrupt: bool = False
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not 1 <= self.n_attacks <= MAX_ATTACKS:
            raise ValueError(f"n_attacks={self.n_attacks} must be from 1 to {MAX_ATTACKS:,}")
        if self.n_shown < 1:
            raise ValueError(f"n_shown={self.n_shown} must be at least 1")
        if self.decoys is not None and self.data is None:
            raise ValueError("--decoys are compared with the training images; give --data, too")
        if not all(math.isfinite(s) and s > 0 for s in self.std or ()):
            raise ValueError(f"std={self.std} must be positive and finite, as in 0.25,0.24,0.26")


@dataclass(frozen=True)
class AttackRun:
    """How one attack ended, from its checkpoint. `loss` and `residual` are None if not finite.

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


def run_attacks(
    job: AttackJob, victim: Victim, *, device: str, on_progress: OnProgress
) -> list[AttackRun]:
    """Do what is not done yet, and return how every attack ended.

    Raises:
        StoreMismatchError: `job.out` holds attacks on other weights or with other settings.
        CorruptPartError: a checkpoint is not as it was written.
    """
    cache = job.out / "cache"
    _claim(cache, job, victim, device)
    runner = _Runner(job, victim, torch.device(device), cache, on_progress)
    pieces = list(_pieces(job, runner.done(), device))
    if device == "cpu" and job.n_attacks > 1:
        _in_threads(runner, pieces)
    else:
        for piece in pieces:
            runner.run(piece, report=runner.report)
    for leftover in {file.stem for file in cache.glob("running_*.json")}:
        _remove_checkpoint(cache, leftover)
    return [_read_run(cache, number) for number in range(job.n_attacks)]


def read_candidates(cache: Path, number: int) -> tuple[Tensor, Tensor]:
    """(x (s, m, d), lam (m)) of an attack that is done, raw."""
    tensors, _meta = _checkpoint(cache, number)
    return torch.from_numpy(tensors["x"]), torch.from_numpy(tensors["lam"])


def description(job: AttackJob, victim: Victim, device: str) -> dict[str, Any]:
    """What the outcome of an attack depends on, beside its number."""
    network = victim.architecture.network
    attack = json.loads(json.dumps(asdict(job.attack)))
    del attack["kind"]  # it is the only one here, and folders of before have none
    return {
        "weights": victim.file.sha256,
        "architecture": victim.layers.architecture,
        "shape": list(victim.architecture.shape),
        "activation": network.activation,
        "leak": network.leak if network.activation == "leaky_relu" else None,
        "attack": attack,
        "seed": job.seed,
        "dtype": job.dtype,
        "device": device.partition(":")[0],
    }


class _StopAttackError(Exception):
    """Raised inside a running attack to end it where it is."""


class _Runner:
    """Does pieces of work, a piece being attacks that are computed as one stack."""

    def __init__(
        self,
        job: AttackJob,
        victim: Victim,
        device: torch.device,
        cache: Path,
        on_progress: OnProgress,
    ) -> None:
        self.job, self.victim, self.device, self.cache = job, victim, device, cache
        self.on_progress = on_progress
        self.parameters = victim.parameters.map(lambda tensor: tensor.to(device))
        self.fractions = dict.fromkeys(self.done(), 1.0)
        self.stop = threading.Event()

    def done(self) -> list[int]:
        """The attacks that have their checkpoint."""
        names = (f"{_name(n)}.json" for n in range(self.job.n_attacks))
        return [n for n, name in enumerate(names) if (self.cache / name).is_file()]

    def report(self) -> None:
        """Say how far all attacks are together."""
        self.on_progress(sum(list(self.fractions.values())), self.job.n_attacks)

    def run(self, piece: Sequence[int], report: Callable[[], None] = lambda: None) -> None:
        """Attack, from the saved state if there is one; leaves a checkpoint per attack."""
        if self.stop.is_set():
            return
        running = f"running_{piece[0]:04d}_{piece[-1]:04d}"
        saved = load_checkpoint(self.cache, running)
        generators = [seeded_generator(self.job.seed, n, "attack") for n in piece]
        settings = settings_of(self.job.attack, generators)
        x, lam = starting_points(self.job.attack, settings, self.victim.architecture.d, generators)
        like = self.parameters.weights[0]
        clock = _Clock(0.0 if saved is None else saved[1]["seconds"])

        def on_state(state: AttackState) -> None:
            fraction = state.iteration / self.job.attack.n_iterations
            self.fractions |= dict.fromkeys(piece, fraction)
            report()
            if clock.is_due() or self.stop.is_set():
                arrays = {name: np.asarray(t) for name, t in state.tensors().items()}
                save_checkpoint(self.cache, running, arrays, {"seconds": clock.seconds})
            if self.stop.is_set():
                raise _StopAttackError

        attacked = reconstruct(
            self.victim.architecture,
            self.parameters,
            x.to(like),
            lam.to(like),
            attack=self.job.attack,
            settings=settings,
            state=None if saved is None else _state(saved[0], self.device),
            on_state=on_state,
            state_every=STATE_EVERY,
        )
        self._keep(piece, attacked, settings, clock.seconds / len(piece))
        _remove_checkpoint(self.cache, running)
        self.fractions |= dict.fromkeys(piece, 1.0)
        report()

    def _keep(
        self, piece: Sequence[int], attacked: Attacked, settings: Settings, seconds: float
    ) -> None:
        for row, number in enumerate(piece):
            loss, residual = float(attacked.loss[row]), float(attacked.residual[row])
            ending: Ending = "ok" if bool(attacked.x[row, -1].isfinite().all()) else "stopped"
            if not (np.isfinite(loss) and np.isfinite(residual)):
                ending = "diverged"
            meta = {
                "ending": ending,
                "n_iterations": int(attacked.n_iterations[row]),
                "loss": loss if np.isfinite(loss) else None,
                "residual": residual if np.isfinite(residual) else None,
                "settings": {name: float(getattr(settings, name)[row]) for name in SETTINGS},
                "seconds": round(seconds, 3),
                "threads": torch.get_num_threads() if self.device.type == "cpu" else 0,
            }
            arrays = {"x": _array(attacked.x[row]), "lam": _array(attacked.lam[row])}
            save_checkpoint(self.cache, _name(number), arrays, meta)


class _Clock:
    """Seconds of work, those before an interruption included, and when to save next."""

    def __init__(self, before: float) -> None:
        self.before, self.started = before, time.perf_counter()
        self.last_saved = self.started

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def is_due(self) -> bool:
        """Whether the last save is long ago; counts as one."""
        now = time.perf_counter()
        if now - self.last_saved < SAVE_SECONDS:
            return False
        self.last_saved = now
        return True


def _in_threads(runner: _Runner, pieces: Sequence[Sequence[int]]) -> None:
    """All pieces, as many at once as torch has threads, one on each; Ctrl-C saves what runs."""
    if not pieces:
        return
    n_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            min(n_threads, len(pieces)), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            running: set[Future[None]] = {pool.submit(runner.run, piece) for piece in pieces}
            try:
                while running:
                    done, running = wait(running, POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                    runner.report()
            except BaseException:  # Ctrl-C, too: leaving the pool waits for what runs
                runner.stop.set()
                raise
    finally:
        torch.set_num_threads(n_threads)  # the setting of torch's BLAS is the whole process's


def _pieces(job: AttackJob, done: Sequence[int], device: str) -> Iterator[range]:
    """The attacks that are not done: one by one, or on a GPU in stacks with fixed borders."""
    at_once = 1 if device == "cpu" else max(1, ROWS_AT_ONCE // job.attack.n_candidates)
    for first in range(0, job.n_attacks, at_once):
        piece = range(first, min(first + at_once, job.n_attacks))
        if not set(piece) <= set(done):
            yield piece


def _claim(cache: Path, job: AttackJob, victim: Victim, device: str) -> None:
    """Write down what the attacks in `cache` are of, or compare with what is there."""
    wanted = description(job, victim, device)
    path = cache / "job.json"
    if path.exists():
        found = read_document(path, "remove it with what is beside it, or start over with --fresh")
        if differences := manifest_differences(found, wanted):
            raise StoreMismatchError(
                f"{job.out} holds attacks with other settings: {differences[0]}; use another "
                "--out, or --fresh to start over"
            )
        return
    cache.mkdir(parents=True, exist_ok=True)
    write_json(path, wanted)


def _name(number: int) -> str:
    return f"attack_{number:04d}"


def _checkpoint(cache: Path, number: int) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    found = load_checkpoint(cache, _name(number))
    if found is None:
        raise StorageError(f"{cache} has no attack {number}; run the same command again")
    return found


def _read_run(cache: Path, number: int) -> AttackRun:
    _tensors, meta = _checkpoint(cache, number)
    return AttackRun(number=number, **meta)


def _remove_checkpoint(cache: Path, name: str) -> None:
    """The JSON first: what names the tensors goes before they do."""
    (cache / f"{name}.json").unlink(missing_ok=True)
    for file in cache.glob(f"{name}-*.safetensors"):
        file.unlink(missing_ok=True)


def _state(tensors: dict[str, npt.NDArray[Any]], device: torch.device) -> AttackState:
    named = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    return AttackState.from_tensors(named, device)


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    return np.asarray(tensor.cpu().numpy())
