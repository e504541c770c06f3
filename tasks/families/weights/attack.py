"""Attack one network that is given as a file of weights: many attacks, resumable at any moment.

Every attack is a pure function of (weights, settings, seed, its number). On a CPU they go side by
side, one thread each; on a GPU many are one stack on shared weights. What is done is in
`OUT/cache`, one checkpoint per attack; a running one is saved every half minute, and when it is
stopped. The span attack takes seconds, and is done as a whole or not at all.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import (
    SETTINGS,
    KKTAttack,
    Settings,
    settings_of,
    starting_points,
)
from recon_core.attacks.kkt.solver import Attacked, AttackState, reconstruct
from recon_core.attacks.span.attack import Separated, separate
from recon_core.attacks.span.inputs import ChannelOrder, InputOrder, PixelOrder
from recon_core.attacks.span.settings import SpanAttack
from recon_core.strict import Count, Strict, Within
from recon_core.types import seeded_generator
from recon_core.victims.network import Activation
from storage.checkpoints import load_checkpoint, save_checkpoint
from tasks.attack_file.record import check_std
from tasks.families.weights.cache import (
    AttackRun,
    Ending,
    claim,
    name_of,
    read_run,
    remove_checkpoint,
    save_run,
)
from tasks.families.weights.inputs import Victim, order_said
from tasks.families.weights.separators import given_separator

ROWS_AT_ONCE = 1 << 14
"""Candidates of one stack of attacks on a GPU."""
MAX_ATTACKS = 100_000
STATE_EVERY = 25
"""Iterations after which a running attack can be saved or stopped."""
SAVE_SECONDS = 30.0
POLL_SECONDS = 0.2

OnProgress = Callable[[float, float], None]
"""Called with the attacks done, fractions included, and all attacks."""


@dataclass(frozen=True, kw_only=True)
class WeightsJob(Strict):
    """An attack on given weights: everything but where it is computed.

    `arch` and `shape` (c, h, w) are checked against the file, and inferred without. `pixel_order`
    and `channel_order` of its inputs are chw and rgb where neither is given. `initial`: a
    file of the weights before training, which the span attack takes off the first layer.
    `optimizers`, `checkpoints`, `gradients`: files of optimisers' states and of gradients, for the
    span attack with that `source`. `data`,
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
    std: tuple[float, ...] | None = None
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    n_shown: Count = 40
    skip_corrupt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_std(self.std or ())
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
    def order(self) -> InputOrder | None:
        """The order of inputs that was given."""
        return order_said(self.pixel_order, self.channel_order)


def run_attacks(
    job: WeightsJob, victim: Victim, *, device: str, on_progress: OnProgress
) -> list[AttackRun]:
    """Do what is not done yet, and return how every attack ended. Raises StoreMismatchError if
    `job.out` holds attacks on other weights or with other settings, CorruptPartError if a
    checkpoint is not as it was written."""
    cache = job.out / "cache"
    claim(cache, description(job, victim, device))
    runner = _Runner(job, victim, torch.device(device), cache, on_progress)
    pieces = list(_pieces(job, runner.done(), device))
    if device == "cpu" and job.n_attacks > 1:
        _in_threads(runner, pieces)
    else:
        for piece in pieces:
            runner.run(piece, report=runner.report)
    for leftover in {file.stem for file in cache.glob("running_*.json")}:
        remove_checkpoint(cache, leftover)
    return [read_run(cache, number) for number in range(job.n_attacks)]


def description(job: WeightsJob, victim: Victim, device: str) -> dict[str, Any]:
    """Everything that the outcome of an attack depends on, beside its number."""
    network = victim.architecture.network
    beside: dict[str, Any] = {}
    source = job.attack.source if isinstance(job.attack, SpanAttack) else "weights"
    if source != "weights":
        given = victim.states if source == "state" else victim.gradients
        beside["rows"] = [part.sha256 for part in given]
    elif victim.start is not None:
        beside["initial"] = victim.start.file.sha256
    attack = json.loads(json.dumps(asdict(job.attack)))
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
    """Does pieces of work, a piece being attacks that are computed as one stack."""

    def __init__(
        self,
        job: WeightsJob,
        victim: Victim,
        device: torch.device,
        cache: Path,
        on_progress: OnProgress,
    ) -> None:
        self.job, self.victim, self.device, self.cache = job, victim, device, cache
        self.on_progress = on_progress
        self.parameters = victim.parameters.map(lambda tensor: tensor.to(device))
        given = given_separator(job.attack)
        self.separator = None if given is None else given[0].to(device)
        self.fractions = dict.fromkeys(self.done(), 1.0)
        self.stop = threading.Event()

    def done(self) -> list[int]:
        """The attacks that have their checkpoint."""
        names = (f"{name_of(n)}.json" for n in range(self.job.n_attacks))
        return [n for n, name in enumerate(names) if (self.cache / name).is_file()]

    def report(self) -> None:
        """Say how far all attacks are together."""
        self.on_progress(sum(list(self.fractions.values())), self.job.n_attacks)

    def run(self, piece: Sequence[int], report: Callable[[], None] = lambda: None) -> None:
        """Attack, from the saved state if there is one; leaves a checkpoint per attack."""
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
        clock = _Clock(0.0)

        def on_progress(fraction: float) -> None:
            self.fractions[number] = fraction
            report()
            if self.stop.is_set():
                raise _StopAttackError

        found = separate(
            attack,
            self.victim.architecture,
            self.parameters,
            [seeded_generator(self.job.seed, number, "attack")],
            rows=[self.victim.sources[attack.source].to(self.device)],
            separator=self.separator,
            progress=on_progress,
        )
        self._keep_sources(number, found[0], clock.seconds)

    def _solve(self, attack: KKTAttack, piece: Sequence[int], report: Callable[[], None]) -> None:
        running = f"running_{piece[0]:04d}_{piece[-1]:04d}"
        saved = load_checkpoint(self.cache, running)
        generators = [seeded_generator(self.job.seed, n, "attack") for n in piece]
        settings = settings_of(attack, generators)
        x, lam = starting_points(attack, settings, self.victim.architecture.d, generators)
        like = self.parameters.weights[0]
        clock = _Clock(0.0 if saved is None else saved[1]["seconds"])

        def on_state(state: AttackState) -> None:
            fraction = state.iteration / attack.n_iterations
            self.fractions |= dict.fromkeys(piece, fraction)
            report()
            if clock.is_due() or self.stop.is_set():
                arrays = {name: np.asarray(t) for name, t in state.tensors().items()}
                save_checkpoint(self.cache, running, arrays, {"seconds": clock.seconds})
            if self.stop.is_set():
                raise _StopAttackError

        attacked = reconstruct(
            self.victim.architecture, self.parameters, x.to(like), lam.to(like), attack=attack,
            settings=settings, state=None if saved is None else _state(saved[0], self.device),
            on_state=on_state, state_every=STATE_EVERY,
        )  # fmt: skip
        self._keep(piece, attacked, settings, clock.seconds / len(piece))
        remove_checkpoint(self.cache, running)

    def _keep(
        self, piece: Sequence[int], attacked: Attacked, settings: Settings, seconds: float
    ) -> None:
        for row, number in enumerate(piece):
            loss, residual = float(attacked.loss[row]), float(attacked.residual[row])
            ending: Ending = "ok" if bool(attacked.x[row, -1].isfinite().all()) else "stopped"
            if not (math.isfinite(loss) and math.isfinite(residual)):
                ending = "diverged"
            arrays = {"x": attacked.x[row], "lam": attacked.lam[row]}
            self._save(
                number, arrays, seconds, ending=ending, losses=(loss, residual),
                n_iterations=int(attacked.n_iterations[row]),
                settings={name: float(getattr(settings, name)[row]) for name in SETTINGS},
            )  # fmt: skip

    def _keep_sources(self, number: int, found: Separated, seconds: float) -> None:
        finite = math.isfinite(found.objective) and bool(found.sources.x.isfinite().all())
        of = found.sources
        arrays = {"x": of.x[None], "label": of.label, "trust": of.trust}
        self._save(
            number, arrays, seconds, ending="ok" if finite else "diverged",
            n_iterations=found.n_iterations, settings={"settled": float(found.settled)},
            losses=(found.objective if finite else math.nan, math.nan),
        )  # fmt: skip

    def _save(
        self,
        number: int,
        arrays: Mapping[str, Tensor],
        seconds: float,
        *,
        ending: Ending,
        n_iterations: int,
        losses: tuple[float, float],
        settings: dict[str, float],
    ) -> None:
        loss, residual = (value if math.isfinite(value) else None for value in losses)
        threads = torch.get_num_threads() if self.device.type == "cpu" else 0
        run = AttackRun(
            number, ending, n_iterations, loss, residual, settings, round(seconds, 3), threads
        )
        save_run(self.cache, run, arrays)


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


def _pieces(job: WeightsJob, done: Sequence[int], device: str) -> Iterator[range]:
    """The attacks that are not done: one by one, or on a GPU in stacks with fixed borders."""
    at_once = 1
    if device != "cpu" and isinstance(job.attack, KKTAttack):
        at_once = max(1, ROWS_AT_ONCE // job.attack.n_candidates)
    for first in range(0, job.n_attacks, at_once):
        piece = range(first, min(first + at_once, job.n_attacks))
        if not set(piece) <= set(done):
            yield piece


def _state(tensors: dict[str, npt.NDArray[Any]], device: torch.device) -> AttackState:
    named = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    return AttackState.from_tensors(named, device)
