"""The paper's generation run on one GPU: is it right, and how fast is it?

    python -m benchmarks.kkt.gpu [--quick] [--json docs/results/benchmarks/kkt_gpu.json]

Needs one CUDA device. First, float64 on the GPU has to agree with float64 on the CPU, objective,
gradients and trajectories, or nothing is timed. Then a training epoch and an attack iteration are
timed at the paper's size (3072-1000-1000-1, 300 images, 400 candidates) for stacks of R runs, in
float32 and TF32. A run is 50,000 epochs, 11,900 iterations and the matching of its 4,400 saved
candidates (image restoration paper, section 2), so runs an hour and the GPU hours of 150,000 runs
follow, beside the paper's 5,600 A100 hours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.record import Measurement, main, measured, median_seconds, relative
from recon_core.attacks.candidate_matching import pairs_of
from recon_core.attacks.kkt.objective import KKTAttack, Objective, settings_of, starting_points
from recon_core.attacks.kkt.solver import Solver
from recon_core.precision import Precision, matmul_precision
from recon_core.types import seeded_generator
from recon_core.victims.network import Architecture, Network, Parameters
from recon_core.victims.training import Training, train

_line = partial(measured, "kkt_gpu")

SHAPE = (3, 32, 32)
D = 3072
PAPER = Network()
SMALL = Network(widths=(200, 200))
TRAINED_STD = 0.02
"""Standard deviation of a first layer of the size of a trained one."""
N_IMAGES, N_CANDIDATES = 300, 400
EPOCHS, ITERATIONS = 50_000, 11_900
RUNS = 150_000
PAPER_HOURS = 5_600.0
FLOOR_SECONDS = {"ieee": 7.5, "tf32": 2.3}
"""Arithmetic and memory traffic of a run at an H200's peak, by precision."""
PARITY = 1e-9
CPU = torch.device("cpu")
GPU = torch.device("cuda")
KINDS: dict[Precision, str] = {"ieee": "float32", "tf32": "TF32"}


def measure(quick: bool) -> Iterator[Measurement]:
    """Parity, and speed at the paper's size."""
    if GPU.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.kkt.gpu needs a CUDA device; benchmarks.kkt.speed is for the CPU"
        )
    yield from parity()
    for precision in KINDS:
        for n_runs in (1, 4) if quick else (1, 4, 16, 32, 64):
            yield from speed(n_runs, precision, repeats=3 if quick else 5)


def victims(
    network: Network, n_runs: int, device: torch.device, dtype: torch.dtype
) -> tuple[Architecture, Parameters, list[torch.Generator]]:
    """Untrained victims on `device`, and a generator for each."""
    generators = [seeded_generator(0, run, "victim") for run in range(n_runs)]
    architecture = network.on(SHAPE)
    weights = architecture.initial(generators, dtype=dtype).map(lambda t: t.to(device))
    return architecture, weights, generators


def solver_of(
    network: Network, attack: KKTAttack, n_runs: int, device: torch.device, dtype: torch.dtype
) -> Solver:
    """A started attack on untrained victims."""
    architecture, weights, generators = victims(network, n_runs, device, dtype)
    settings = settings_of(attack, generators)
    x, lam = starting_points(attack, settings, D, generators)
    solver = Solver(architecture, weights, attack, settings)
    solver.start(x.to(device, dtype), lam.to(device, dtype))
    return solver


def parity() -> Iterator[Measurement]:
    """Distance of float64 on the GPU from float64 on the CPU, and float32 and TF32 from that."""
    attack, network = (
        KKTAttack(n_candidates=40, save_at=(200,)),
        replace(SMALL, init_std_first=TRAINED_STD),
    )

    def gradients(device: torch.device, dtype: torch.dtype, precision: Precision) -> list[Tensor]:
        """Value and gradients of two attacks."""
        architecture, weights, generators = victims(network, 2, device, dtype)
        settings = settings_of(attack, generators)
        x, lam = starting_points(replace(attack, sigma=0.3), settings, D, generators)
        with matmul_precision(precision, device):
            objective = Objective(architecture, weights, attack=attack, settings=settings)
            value, *found = objective(x.to(device, dtype), lam.to(device, dtype))
        assert value is not None
        return [value, *found]

    exact = gradients(CPU, torch.float64, "ieee")
    cases: list[tuple[str, torch.dtype, Precision, float]] = [
        ("float64", torch.float64, "ieee", PARITY),
        ("float32", torch.float32, "ieee", 1e-4),
        ("TF32", torch.float32, "tf32", 1.0),
    ]
    for name, dtype, precision, limit in cases:
        difference = max(map(relative, gradients(GPU, dtype, precision), exact))
        yield _line(f"gradients on the GPU in {name} against float64 on the CPU", difference)
        if not difference < limit:
            raise SystemExit(f"{name} differs by {difference:.2g}, more than {limit}: not timed")
    moved, trained = [], []
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(2, 20, D, generator=draw, dtype=torch.float64) - 0.5
    labels = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(2, 10)
    for device in (GPU, CPU):
        solver = solver_of(network, attack, 2, device, torch.float64)
        solver.advance(attack.n_iterations)
        moved.append(solver.x)
        architecture, weights, _generators = victims(SMALL, 2, device, torch.float64)
        x, y, training = images.to(device), labels.to(device), Training(epochs=200)
        ended = train(architecture, weights, x, y, training=training)
        trained.append(ended.parameters.weights[0])
    yield _line("x after 200 iterations in float64, GPU against CPU", relative(*moved))
    yield _line("weights after 200 epochs in float64, GPU against CPU", relative(*trained))


def speed(n_runs: int, precision: Precision, repeats: int) -> Iterator[Measurement]:
    """Runs an hour, from a training epoch, an attack iteration and the matching of R runs."""
    name = f"R={n_runs}, {KINDS[precision]}"
    with matmul_precision(precision, GPU):
        try:
            architecture, weights, _generators = victims(PAPER, n_runs, GPU, torch.float32)
            draw = torch.Generator().manual_seed(0)
            x = torch.rand(1, N_IMAGES, D, generator=draw).expand(n_runs, -1, -1) - 0.5
            x, y = x.contiguous().to(GPU), torch.tensor([-1.0, 1.0]).to(GPU)
            y = y.repeat(n_runs, N_IMAGES // 2)

            def epochs(n: int) -> object:
                training = Training(epochs=n, stop_every=n)
                return train(architecture, weights, x, y, training=training)

            # the difference of two lengths leaves out what comes once
            long, short = (median_seconds(partial(epochs, n), repeats) for n in (110, 10))
            epoch = (long - short) / 100
            network, attack = (
                replace(PAPER, init_std_first=TRAINED_STD),
                KKTAttack(n_candidates=N_CANDIDATES),
            )
            solver = solver_of(network, attack, n_runs, GPU, torch.float32)
            iteration = median_seconds(lambda: solver.advance(solver.iteration + 50), repeats) / 50
        except RuntimeError as error:  # out of memory
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
            return
    draw = torch.Generator().manual_seed(0)  # all saved candidates of a run against its images
    saved = torch.rand(11, N_CANDIDATES, *SHAPE, generator=draw).to(GPU) - 0.5
    targets = torch.randint(0, 256, (N_IMAGES, *SHAPE), generator=draw, dtype=torch.uint8)
    match = partial(
        pairs_of, saved, targets, torch.full(SHAPE, 0.5, device=GPU), iterations=range(11),
        keep="confident", threshold=0.4, gap=0.05,
    )  # fmt: skip
    per_run = (EPOCHS * epoch + ITERATIONS * iteration) / n_runs + median_seconds(match, repeats)
    line = partial(_line, repeats=repeats)
    yield line(f"training epoch of all runs, {name}", epoch, "s")
    yield line(f"attack iteration of all runs, {name}", iteration, "s")
    yield line(f"seconds per run, {name}", per_run, "s")
    yield line(f"runs an hour, {name}", 3600 / per_run, "runs/h")
    floor = FLOOR_SECONDS[precision]
    yield line(f"times the floor of {floor} s, {name}", per_run / floor, "times")
    yield line(
        f"GPU hours of {RUNS} runs, projected, {name}",
        RUNS * per_run / 3600,
        "h",
        reference="image restoration paper, A100 hours",
        reference_value=PAPER_HOURS,
    )


if __name__ == "__main__":
    main(measure)
