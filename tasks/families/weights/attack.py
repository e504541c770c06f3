"""Attack one network that is given as a file of weights: many attacks, resumable at any moment.

Every attack is a pure function of (weights, settings, seed, its number). On a CPU attacks run side
by side, one thread each; on a GPU many are one stack on shared weights. `OUT/cache` has a
checkpoint for each attack that is done, and `job.json`, which names everything that outcomes depend
on: attacks with other settings are refused. A running attack is saved every half minute and when it
is stopped. The span attack takes seconds and is not saved half-way.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import (
    SETTINGS,
    KKTAttack,
    settings_of,
    starting_points,
)
from recon_core.attacks.kkt.solver import Solver, reconstruct
from recon_core.attacks.span.attack import separate
from recon_core.attacks.span.inputs import ChannelOrder, InputOrder, PixelOrder
from recon_core.attacks.span.search import SpanAttack
from recon_core.strict import Count, Positive, Strict, Within
from recon_core.types import seeded_generator
from recon_core.victims.network import Activation
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import StorageError, StoreMismatchError
from storage.pairs.dataset import manifest_differences
from tasks.attack_file.comparison import claimed, plain
from tasks.families.weights.inputs import Victim
from tasks.families.weights.separators import given_separator

ROWS_AT_ONCE = 1 << 14
"""Candidates of one stack of attacks on a GPU."""
MAX_ATTACKS = 100_000
STATE_EVERY = 25
"""Iterations after which a running attack can be saved or stopped."""
SAVE_SECONDS = 30.0
POLL_SECONDS = 0.2

OnProgress = Callable[[float, float], None]
"""Called with the number of attacks done, fractions included, and of all attacks."""
Ending = Literal["ok", "stopped", "diverged"]


@dataclass(frozen=True, kw_only=True)
class WeightsJob(Strict):
    """An attack on given weights: everything but where it is computed.

    `arch` and `shape` (c, h, w) are checked against the file, or inferred from it. `pixel_order`
    and `channel_order` of its inputs default to chw and rgb. `initial`: a file of the weights
    before training, which the span attack subtracts from the first layer. `optimizers`,
    `checkpoints`, `gradients`: files of optimisers' states and of gradients, for the span attack
    with that `source`. `data`, `decoys`, `mean`, `std` are known beside the weights; they change
    how results are shown and scored, never the attack. `n_shown`: pictures on the contact sheet.
    `skip_corrupt`: leave out pictures that cannot be read.
    """

    weights: Path
    out: Path
    arch: str | None = None
    shape: tuple[int, int, int] | None = None
    activation: Activation = "relu"
    leak: float = 0.01
    pixel_order: PixelOrder | None = None
    channel_order: ChannelOrder | None = None
    initial: Path | None = None
    optimizers: tuple[Path, ...] = ()
    checkpoints: tuple[Path, ...] = ()
    gradients: tuple[Path, ...] = ()
    attack: KKTAttack | SpanAttack = field(default_factory=KKTAttack)
    n_attacks: Annotated[int, Within(f"[1, {MAX_ATTACKS}]")] = 1
    data: str | None = None
    decoys: str | None = None
    mean: str | None = None
    std: tuple[Positive, ...] | None = None
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    n_shown: Count = 40
    skip_corrupt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        span = self.attack if isinstance(self.attack, SpanAttack) else None
        if span is not None and span.source == "weights":
            if span.start == "known" and self.initial is None:
                raise ValueError(
                    "attack.start='known' needs the weights before training: --initial"
                )
            if self.initial is not None and span.start != "known":
                raise ValueError(
                    "--initial is taken off the first layer by the span attack with a known start; "
                    "leave it out, or attack with attack.start=known"
                )
        if span is None and (self.initial or self.optimizers or self.checkpoints or self.gradients):
            raise ValueError(
                "--initial, --optimizer, --checkpoint and --gradients are of the span attack; "
                "leave them out, or attack with --method span"
            )
        if self.decoys is not None and self.data is None:
            raise ValueError("--decoys are compared with the training images; give --data, too")

    @property
    def order(self) -> InputOrder:
        """The order of inputs, as it is given or usual."""
        return InputOrder(self.pixel_order or "chw", self.channel_order or "rgb")


@dataclass(frozen=True)
class AttackRun:
    """Outcome of one attack, from its checkpoint.

    `loss` and `residual` are None if not finite; the span attack has no residual. `ending`:
    "stopped" by a rule of the settings or "diverged" to NaN leaves no pictures.
    """

    number: int
    ending: Ending
    n_iterations: int
    loss: float | None
    residual: float | None
    settings: dict[str, float]
    seconds: float
    threads: int


def name_of(number: int) -> str:
    """The name of an attack's checkpoint."""
    return f"attack_{number:04d}"


def read_attack(cache: Path, number: int) -> tuple[AttackRun, dict[str, Tensor]]:
    """Outcome of an attack that is done, and its raw candidates: `x` (s, m, d) at every saved
    iteration s, and (m,) each `lam` of the KKT attack, or `label` and `trust` of the span attack's
    sources. Raises StorageError if it is missing."""
    checkpoint = load_checkpoint(cache, name_of(number))
    if checkpoint is None:
        raise StorageError(f"{cache} has no attack {number}; run the same command again")
    tensors, meta = checkpoint
    candidates = {name: torch.from_numpy(array) for name, array in tensors.items()}
    return AttackRun(number=number, **meta), candidates


def run_attacks(
    job: WeightsJob, victim: Victim, *, device: str, on_progress: OnProgress
) -> list[AttackRun]:
    """Do what is not done yet, and return the outcome of every attack.

    Raises StoreMismatchError if `job.out` holds attacks on other weights or with other settings,
    CorruptPartError if a checkpoint is corrupt.
    """
    cache, wanted = job.out / "cache", description(job, victim, device)
    if differences := manifest_differences(claimed(cache, wanted), wanted):
        raise StoreMismatchError(
            f"{job.out} holds attacks with other settings: {differences[0]}; use another --out, or "
            "--fresh to start over"
        )
    runner = _Runner(job, victim, device, on_progress)
    at_once, done = 1, set(runner.fractions)
    if device != "cpu" and isinstance(job.attack, KKTAttack):
        at_once = max(1, ROWS_AT_ONCE // job.attack.n_candidates)
    stacks = [  # with fixed borders, so that one that was interrupted is found again
        range(first, min(first + at_once, job.n_attacks))
        for first in range(0, job.n_attacks, at_once)
    ]
    pieces = [stack for stack in stacks if not done.issuperset(stack)]
    if device == "cpu" and job.n_attacks > 1 and pieces:
        _in_threads(runner, pieces)
    else:
        for piece in pieces:
            runner.run(piece, report=runner.report)
    for leftover in {file.stem for file in cache.glob("running_*.json")}:
        remove_checkpoint(cache, leftover)
    return [read_attack(cache, number)[0] for number in range(job.n_attacks)]


def description(job: WeightsJob, victim: Victim, device: str) -> dict[str, Any]:
    """Everything that the outcome of an attack depends on, beside its number."""
    network = victim.architecture.network
    beside: dict[str, Any] = {}
    source = job.attack.source if isinstance(job.attack, SpanAttack) else "weights"
    if source != "weights":
        files = victim.states if source == "state" else victim.gradients
        beside["rows"] = [part.sha256 for part in files]
    elif victim.start is not None:
        beside["initial"] = victim.start.file.sha256
    attack = plain(job.attack)
    if (separator := given_separator(job.attack)) is not None:
        attack["separator"] = separator[1]
    return {
        "weights": victim.file.sha256,
        **beside,
        "architecture": victim.layers.architecture,
        "inputs": str(victim.order),
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
    """Runs pieces of work, a piece being attacks that are computed as one stack."""

    def __init__(
        self, job: WeightsJob, victim: Victim, device: str, on_progress: OnProgress
    ) -> None:
        self.job, self.victim, self.device = job, victim, torch.device(device)
        self.cache, self.on_progress = job.out / "cache", on_progress
        self.parameters = victim.parameters.map(lambda tensor: tensor.to(self.device))
        given = given_separator(job.attack)
        self.separator = None if given is None else given[0].to(self.device)
        names = enumerate(map(name_of, range(job.n_attacks)))
        self.fractions = {n: 1.0 for n, name in names if (self.cache / f"{name}.json").is_file()}
        self.stop = threading.Event()

    def report(self) -> None:
        """Report how far all attacks are together."""
        self.on_progress(sum(list(self.fractions.values())), self.job.n_attacks)

    def run(self, piece: Sequence[int], report: Callable[[], None] = lambda: None) -> None:
        """Attack, from the saved state if there is one, and save a checkpoint per attack."""
        if self.stop.is_set():
            return
        if isinstance(self.job.attack, SpanAttack):
            for number in piece:
                self._separate(self.job.attack, number, report)
        else:
            self._solve(self.job.attack, piece, report)
        self.fractions |= dict.fromkeys(piece, 1.0)
        report()

    def _separate(self, attack: SpanAttack, number: int, report: Callable[[], None]) -> None:
        started = time.perf_counter()

        def on_progress(fraction: float) -> None:
            self.fractions[number] = fraction
            report()
            if self.stop.is_set():
                raise _StopAttackError

        (found,) = separate(
            attack, self.victim.architecture, self.parameters,
            [seeded_generator(self.job.seed, number, "attack")],
            rows=[self.victim.sources[attack.source].to(self.device)],
            separator=self.separator, progress=on_progress,
        )  # fmt: skip
        sources, loss, seconds = found.sources, found.objective, time.perf_counter() - started
        is_finite = math.isfinite(loss) and bool(sources.x.isfinite().all())
        run = AttackRun(
            number, "ok" if is_finite else "diverged", found.n_iterations,
            loss if is_finite else None, None, {"settled": float(found.settled)},
            round(seconds, 3), self.threads,
        )  # fmt: skip
        self._save(run, {"x": sources.x[None], "label": sources.label, "trust": sources.trust})

    def _solve(self, attack: KKTAttack, piece: Sequence[int], report: Callable[[], None]) -> None:
        running = f"running_{piece[0]:04d}_{piece[-1]:04d}"
        generators = [seeded_generator(self.job.seed, n, "attack") for n in piece]
        settings = settings_of(attack, generators)
        x, lam = starting_points(attack, settings, self.victim.architecture.d, generators)
        like = self.parameters.weights[0]
        last_saved = started = time.perf_counter()
        state = None
        if (saved := load_checkpoint(self.cache, running)) is not None:  # its seconds count, too
            started -= saved[1]["seconds"]
            state = {name: torch.from_numpy(array.copy()) for name, array in saved[0].items()}

        def on_state(solver: Solver) -> None:
            nonlocal last_saved
            self.fractions |= dict.fromkeys(piece, solver.iteration / attack.n_iterations)
            report()
            now, stopping = time.perf_counter(), self.stop.is_set()
            if stopping or now - last_saved >= SAVE_SECONDS:
                last_saved = now
                arrays = {name: t.numpy() for name, t in solver.state().items()}
                save_checkpoint(self.cache, running, arrays, {"seconds": now - started})
            if stopping:
                raise _StopAttackError

        attacked = reconstruct(
            self.victim.architecture, self.parameters, x.to(like), lam.to(like), attack=attack,
            settings=settings, state=state, on_state=on_state, state_every=STATE_EVERY,
        )  # fmt: skip
        seconds = (time.perf_counter() - started) / len(piece)
        for row, number in enumerate(piece):
            losses = float(attacked.loss[row]), float(attacked.residual[row])
            loss, residual = (value if math.isfinite(value) else None for value in losses)
            ending: Ending = "ok" if bool(attacked.x[row, -1].isfinite().all()) else "stopped"
            run = AttackRun(
                number, "diverged" if None in (loss, residual) else ending,
                int(attacked.n_iterations[row]), loss, residual,
                {name: float(getattr(settings, name)[row]) for name in SETTINGS},
                round(seconds, 3), self.threads,
            )  # fmt: skip
            self._save(run, {"x": attacked.x[row], "lam": attacked.lam[row]})
        remove_checkpoint(self.cache, running)

    @property
    def threads(self) -> int:
        """Threads of this thread's attack; 0 on a GPU."""
        return torch.get_num_threads() if self.device.type == "cpu" else 0

    def _save(self, run: AttackRun, arrays: Mapping[str, Tensor]) -> None:
        meta = {name: value for name, value in vars(run).items() if name != "number"}
        saved = {name: np.asarray(tensor.cpu().numpy()) for name, tensor in arrays.items()}
        save_checkpoint(self.cache, name_of(run.number), saved, meta)


def remove_checkpoint(cache: Path, name: str) -> None:
    """Delete the JSON first: what names the tensors goes before they do."""
    (cache / f"{name}.json").unlink(missing_ok=True)
    for file in cache.glob(f"{name}-*.safetensors"):
        file.unlink(missing_ok=True)


def _in_threads(runner: _Runner, pieces: Sequence[Sequence[int]]) -> None:
    """Run all pieces, as many at once as torch has threads, one on each; Ctrl-C saves what runs."""
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
