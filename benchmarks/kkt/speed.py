"""Attack steps, training epochs and their memory: the engine beside double backpropagation.

    python -m benchmarks.kkt.speed [--quick] [--json FILE]

The reference (`benchmarks.kkt.reference`) is the published algorithm as everybody would write it
with torch, run by run, its `loss.backward()` included, which also differentiates with respect to
the network's parameters. A second, leaner reference asks autograd for the two gradients that are
needed. Both sides get the same threads: the reference uses all of them in every product; the engine
runs several runs side by side, one thread each, and shares the threads of a single run as the
reference does. Times are per step of all runs of a case, over blocks of steps run after run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from benchmarks.kkt.reference import (
    Reconstruction,
    ReferenceAttack,
    ReferenceNet,
    balanced_signs,
)
from benchmarks.kkt.reference import train as plain_train
from benchmarks.record import (
    Measurement,
    added_memory,
    check_agreement,
    compared,
    in_new_processes,
    main,
    measured,
)
from recon_core.attacks.kkt.objective import KKTAttack, settings_of, starting_points
from recon_core.attacks.kkt.solver import Solver
from recon_core.threads import side_by_side
from recon_core.types import seeded_generator
from recon_core.victims.network import Network
from recon_core.victims.training import Training, train

SHAPE = (3, 32, 32)
D = 3072
CPU = torch.device("cpu")
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
    def network(self) -> Network:
        return Network(widths=(self.width, self.width))


PAPER = Case(width=1000, n_runs=1, n_images=300, n_candidates=400, steps=2)
SMALL = Case(width=200, n_runs=16, n_images=20, n_candidates=40, steps=10)


class Sides:
    """The engine and the reference on every run of a case, from the same start: victims whose first
    layer has a trained one's size, and candidates a little moved."""

    def __init__(self, case: Case, *, lean: bool = False) -> None:
        self.case, self.lean = case, lean
        network = replace(case.network, init_std_first=0.02).on(SHAPE)
        generators = [seeded_generator(0, run, "victim") for run in range(case.n_runs)]
        victims = network.initial(generators, dtype=torch.float32)
        attack = KKTAttack(n_candidates=case.n_candidates, sigma=0.05)
        draws = [seeded_generator(0, run, "attack") for run in range(case.n_runs)]
        x, lam = starting_points(attack, settings_of(attack, draws), D, draws)
        each = [victims.rows(slice(run, run + 1)) for run in range(case.n_runs)]
        self.starts = list(zip(each, x, lam, strict=True))

    @cached_property
    def solvers(self) -> list[Solver]:
        attack = KKTAttack(n_candidates=self.case.n_candidates, save_at=(1,))
        settings = settings_of(attack, [torch.Generator()])
        solvers: list[Solver] = []
        for victim, x, lam in self.starts:
            solvers.append(Solver(self.case.network.on(SHAPE), victim, attack, settings))
            solvers[-1].start(x[None], lam[None])
        return solvers

    @cached_property
    def runs(self) -> list[Reconstruction]:
        signs = balanced_signs(self.case.n_candidates, torch.float32)
        runs: list[Reconstruction] = []
        for victim, x, lam in self.starts:
            net = ReferenceNet(SHAPE, self.case.network.widths)
            net.load(self.case.network.on(SHAPE).to_state_dict(victim))
            runs.append(Reconstruction(net, x, lam, signs, ReferenceAttack(lean=self.lean)))
        return runs

    def ours(self, steps: int | None = None) -> Tensor:
        """x after a block of steps of every run, several runs side by side."""
        n = steps or self.case.steps
        jobs = [partial(solver.advance, solver.iteration + n) for solver in self.solvers]
        side_by_side(jobs, CPU)
        return torch.cat([solver.x for solver in self.solvers])

    def theirs(self, steps: int | None = None) -> Tensor:
        """The same by the reference, run by run."""
        for run in self.runs:
            for _ in range(steps or self.case.steps):
                run.step()
        return torch.stack([run.x.detach() for run in self.runs])


def attack_step(case: Case, repeats: int, *, threads: int, lean: bool) -> Measurement:
    """One iteration of all runs of a case."""
    torch.set_num_threads(threads)
    first = Sides(case)
    check_agreement(first.ours(1), first.theirs(1))
    sides = Sides(case, lean=lean)
    return compared(
        "kkt",
        f"attack step, {case}, {case.n_candidates} candidates each, float32, {threads} threads",
        ours=sides.ours,
        reference=LEAN if lean else PUBLISHED,
        theirs=sides.theirs,
        repeats=repeats,
        per_call=case.steps,
    )


def training_epoch(case: Case, repeats: int, n_epochs: int, *, threads: int) -> Measurement:
    """One epoch of all victims of a case."""
    torch.set_num_threads(threads)
    architecture = case.network.on(SHAPE)
    generator = torch.Generator().manual_seed(0)
    generators = [seeded_generator(0, run, "victim") for run in range(case.n_runs)]
    victims = architecture.initial(generators, dtype=torch.float32)
    x = torch.rand(case.n_runs, case.n_images, D, generator=generator) - 0.5
    y = torch.tensor([-1.0, 1.0]).repeat(case.n_images // 2)
    training = Training(epochs=n_epochs)

    def one(run: int) -> Tensor:
        only = slice(run, run + 1)
        trained = train(architecture, victims.rows(only), x[only], y[None], training=training)
        return trained.parameters.weights[0][0]

    def plain(run: int) -> Tensor:
        net = ReferenceNet(SHAPE, case.network.widths)
        net.load(architecture.to_state_dict(victims, run))
        target = (y + 1) / 2
        plain_train(net, x[run], target, loss="bce", optimiser="adadelta", lr=1.0, epochs=n_epochs)
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
    one = replace(case, n_runs=1, steps=3)
    sides = [
        in_new_processes(_added_memory, (side, one), repeats=repeats) for side in ("ours", "theirs")
    ]
    return measured(
        "kkt",
        f"peak memory of an attack, {one}, {one.n_candidates} candidates, float32",
        sides[0],
        "MiB",
        repeats,
        reference=PUBLISHED,
        reference_value=sides[1],
    )


def _added_memory(side: str, case: Case) -> float:
    sides = Sides(case)
    return added_memory(
        lambda: torch.nn.functional.relu(torch.randn(64, 64) @ torch.randn(64, 64)),
        sides.ours if side == "ours" else sides.theirs,
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
