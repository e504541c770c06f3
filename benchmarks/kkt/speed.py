"""Attack steps, training epochs and their memory: the engine beside double backpropagation.

    python -m benchmarks.kkt.speed [--quick] [--json FILE]

The reference (`kkt_reference`) is the published algorithm as everybody would write it with torch,
run by run, its `loss.backward()` included, which also differentiates with respect to the network's
parameters. A second, leaner reference asks autograd for the two gradients that are needed. Both
sides get the same threads: the reference uses all of them in every product; the engine runs several
runs side by side, one thread each, and shares the threads of a single run as the reference does.
Times are per step of all runs of a case, over blocks of steps run after run.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kkt.reference import (
    Reconstruction,
    ReferenceAttack,
    ReferenceNet,
    balanced_signs,
)
from benchmarks.kkt.reference import train as plain_train
from benchmarks.record import Measurement, compared, main, measured
from recon_core.attacks.kkt.objective import KKTAttack, settings_of, starting_points
from recon_core.attacks.kkt.solver import Solver
from recon_core.threads import side_by_side
from recon_core.types import seeded_generator
from recon_core.victims.network import Architecture, Network, Parameters
from recon_core.victims.training import Training, train

SHAPE = (3, 32, 32)
D = 3072
CPU = torch.device("cpu")
AGREEMENT = 1e-3
PUBLISHED = "double backpropagation with loss.backward() and torch.optim.Adadelta, run by run"
LEAN = "double backpropagation for x and lam alone and torch.optim.Adadelta, run by run"


@dataclass(frozen=True, kw_only=True)
class Case:
    """R victims D-width-width-1 trained on n images and attacked with m candidates each."""

    width: int
    n_runs: int
    n_images: int
    n_candidates: int
    steps: int

    def __str__(self) -> str:
        runs = f"{self.n_runs} runs" if self.n_runs > 1 else "1 run"
        return f"{D}-{self.width}-{self.width}-1, {runs}"

    @property
    def architecture(self) -> Architecture:
        return Network(widths=(self.width, self.width)).on(SHAPE)


PAPER = Case(width=1000, n_runs=1, n_images=300, n_candidates=400, steps=2)
SMALL = Case(width=200, n_runs=16, n_images=20, n_candidates=40, steps=10)


@dataclass(frozen=True)
class Start:
    """Everything a step starts from, of every run of a case."""

    victims: list[Parameters]
    x: Tensor
    lam: Tensor


def started(case: Case) -> Start:
    """Victims whose first layer has a trained one's size, and candidates a little moved."""
    network = Network(widths=(case.width, case.width), init_std_first=0.02)
    generators = [seeded_generator(0, run, "victim") for run in range(case.n_runs)]
    victims = network.on(SHAPE).initial(generators, dtype=torch.float32)
    attack = KKTAttack(n_candidates=case.n_candidates, sigma=0.05)
    draws = [seeded_generator(0, run, "attack") for run in range(case.n_runs)]
    x, lam = starting_points(attack, settings_of(attack, draws), D, draws)
    return Start([victims.rows(slice(i, i + 1)) for i in range(case.n_runs)], x, lam)


class Ours:
    """The engine: one solver per run."""

    def __init__(self, case: Case, start: Start) -> None:
        self.case = case
        attack = KKTAttack(n_candidates=case.n_candidates, save_at=(1,))
        settings = settings_of(attack, [torch.Generator()])
        self.solvers = []
        for victim, x, lam in zip(start.victims, start.x, start.lam, strict=True):
            solver = Solver(case.architecture, victim, attack, settings)
            solver.start(x[None], lam[None])
            self.solvers.append(solver)

    def steps(self) -> None:
        """A block of steps of every run."""
        side_by_side([partial(self._advance, solver) for solver in self.solvers], CPU)

    def x(self) -> Tensor:
        return torch.cat([solver.x for solver in self.solvers])

    def _advance(self, solver: Solver) -> None:
        solver.advance(solver.iteration + self.case.steps)


class Theirs:
    """The reference: one double backpropagation per run."""

    def __init__(self, case: Case, start: Start, *, lean: bool) -> None:
        self.case = case
        signs = balanced_signs(case.n_candidates, torch.float32)
        self.runs = []
        for victim, x, lam in zip(start.victims, start.x, start.lam, strict=True):
            net = ReferenceNet(SHAPE, (case.width, case.width))
            net.load(case.architecture.to_state_dict(victim))
            self.runs.append(Reconstruction(net, x, lam, signs, ReferenceAttack(lean=lean)))

    def steps(self) -> None:
        """A block of steps of every run."""
        for run in self.runs:
            for _ in range(self.case.steps):
                run.step()

    def x(self) -> Tensor:
        return torch.stack([run.x.detach() for run in self.runs])


def attack_step(case: Case, repeats: int, *, threads: int, lean: bool) -> Measurement:
    """One iteration of all runs of a case."""
    torch.set_num_threads(threads)
    start = started(case)
    check_agreement(*(side.x() for side in one_step(case, start)))
    ours, theirs = Ours(case, start), Theirs(case, start, lean=lean)
    return compared(
        "kkt",
        f"attack step, {case}, {case.n_candidates} candidates each, float32, {threads} threads",
        ours=ours.steps,
        reference=LEAN if lean else PUBLISHED,
        theirs=theirs.steps,
        repeats=repeats,
        per_call=case.steps,
    )


def one_step(case: Case, start: Start) -> tuple[Ours, Theirs]:
    """Both sides after a single step from the same point."""
    ours, theirs = Ours(case, start), Theirs(case, start, lean=False)
    for solver in ours.solvers:
        solver.advance(1)
    for run in theirs.runs:
        run.step()
    return ours, theirs


def training_epoch(case: Case, repeats: int, n_epochs: int, *, threads: int) -> Measurement:
    """One epoch of all victims of a case."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    generators = [seeded_generator(0, run, "victim") for run in range(case.n_runs)]
    victims = case.architecture.initial(generators, dtype=torch.float32)
    x = torch.rand(case.n_runs, case.n_images, D, generator=generator) - 0.5
    y = torch.tensor([-1.0, 1.0]).repeat(case.n_images // 2)
    training = Training(epochs=n_epochs)

    def one(run: int) -> Tensor:
        only = slice(run, run + 1)
        trained = train(case.architecture, victims.rows(only), x[only], y[None], training=training)
        return trained.parameters.weights[0][0]

    def plain(run: int) -> Tensor:
        net = ReferenceNet(SHAPE, (case.width, case.width))
        net.load(case.architecture.to_state_dict(victims, run))
        batches = [slice(None)] * n_epochs
        target = (y + 1) / 2
        plain_train(net, x[run], target, loss="bce", optimiser="adadelta", lr=1.0, batches=batches)
        return next(net.parameters()).detach()

    def ours() -> Tensor:
        return torch.stack(side_by_side([partial(one, r) for r in range(case.n_runs)], CPU))

    def theirs() -> Tensor:
        return torch.stack([plain(run) for run in range(case.n_runs)])

    check_agreement(ours(), theirs())
    return compared(
        "kkt",
        f"training epoch, {case}, {case.n_images} images each, float32, {threads} threads",
        ours=ours,
        reference="autograd and torch.optim.Adadelta(foreach=True), victim by victim",
        theirs=theirs,
        repeats=repeats,
        per_call=n_epochs,
    )


def peak_memory(case: Case, repeats: int) -> Measurement:
    """Memory that a few steps of one run add to that of a process that holds the starting point."""
    one = Case(
        width=case.width,
        n_runs=1,
        n_images=case.n_images,
        n_candidates=case.n_candidates,
        steps=3,
    )
    sides = [[_in_new_process(side, one) for _ in range(repeats)] for side in ("ours", "theirs")]
    ours, theirs = (statistics.median(side) for side in sides)
    return measured(
        "kkt",
        f"peak memory of an attack, {one}, {one.n_candidates} candidates, float32",
        ours,
        "MiB",
        repeats,
        reference=PUBLISHED,
        reference_value=theirs,
    )


def _in_new_process(side: str, case: Case) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_added_memory, (side, case))


def _added_memory(side: str, case: Case) -> float:
    """MiB that the peak of this process lies above what it held before the steps; Linux only."""
    start = started(case)
    torch.nn.functional.relu(torch.randn(64, 64) @ torch.randn(64, 64))  # loads the libraries
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _memory("VmRSS")
    attack: Ours | Theirs
    attack = Ours(case, start) if side == "ours" else Theirs(case, start, lean=False)
    attack.steps()
    return _memory("VmHWM") - before


def _memory(name: str) -> float:
    """An entry of /proc/self/status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {name}; peak memory is measured on Linux only")


def check_agreement(ours: Tensor, theirs: Tensor) -> None:
    """Raises ValueError if the two sides do not compute the same thing."""
    difference = float((ours - theirs).norm() / theirs.norm())
    if not difference < AGREEMENT:
        raise ValueError(
            f"the two sides differ by {difference:.2g} relative, more than {AGREEMENT}: not "
            "comparable"
        )


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds per attack step and per training epoch, and memory."""
    repeats = 3 if quick else 7
    n_threads = torch.get_num_threads()
    cases: list[Callable[[], Measurement]] = []
    for threads in sorted({1, n_threads}, reverse=True):
        for case in (SMALL, PAPER):
            cases += [
                partial(attack_step, case, repeats, threads=threads, lean=lean)
                for lean in (False, True)
            ]
        for case, n_epochs in ((SMALL, 10), (PAPER, 5)):
            cases.append(partial(training_epoch, case, repeats, n_epochs, threads=threads))
    cases += [partial(peak_memory, case, 3) for case in (SMALL, PAPER)]
    for one in cases:
        yield one()


if __name__ == "__main__":
    main(measure)
