"""The paper's generation run on one GPU: is it right, how fast is it, and does TF32 cost pairs?

    python -m benchmarks.kkt.gpu [--quick] [--json docs/results/benchmarks/kkt_gpu.json]

Needs one CUDA device. First, float64 on the GPU has to agree with float64 on the CPU, objective,
gradients and trajectories, or nothing is timed. Then a training epoch and an attack iteration are
timed at the paper's size (3072-1000-1000-1, 300 images, 400 candidates) for stacks of R runs, in
float32 and TF32, with and without CUDA graphs, and with the update rule as one kernel. A run is
50,000 epochs, 11,900 iterations and the matching of its 4,400 saved candidates (image restoration
paper, section 2), so runs an hour and the GPU hours of 150,000 runs follow, beside the paper's
5,600 A100 hours. Last, the confident candidates of complete smaller runs from the same seeds, in
both precisions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.record import Measurement, main, measured, median_seconds
from recon_core.attacks.candidate_matching import pairs_of
from recon_core.attacks.kkt.objective import KKTAttack, Objective, settings_of, starting_points
from recon_core.attacks.kkt.run import KKT
from recon_core.attacks.kkt.solver import Solver
from recon_core.precision import Precision, matmul_precision
from recon_core.sampling import History, Phase, Sampling, binary_labels, plan_part
from recon_core.types import seeded_generator
from recon_core.victims.network import Network
from recon_core.victims.training import Training, train
from storage.sources.load import load_images

_line = partial(measured, "kkt_gpu")


SHAPE = (3, 32, 32)
D = 3072
PAPER = Network()
SMALL = Network(widths=(200, 200))
N_IMAGES, N_CANDIDATES = 300, 400
N_COMPLETE = 100
COMPLETE = KKT(
    victim=PAPER,
    training=Training(epochs=10_000),
    attack=KKTAttack(n_candidates=200, save_at=(100, 200, 300, 500, 800, 1400, 2400)),
)
EPOCHS, ITERATIONS = 50_000, 11_900
RUNS = 150_000
PAPER_HOURS = 5_600.0
FLOOR_SECONDS = {"ieee": 7.5, "tf32": 2.3}
"""Arithmetic and memory traffic of a run at an H200's peak, by precision."""
PARITY = 1e-9
CPU = torch.device("cpu")
GPU = torch.device("cuda")
KINDS = {"ieee": "float32", "tf32": "TF32"}


def measure(quick: bool) -> Iterator[Measurement]:
    """Parity, speed at the paper's size, and what TF32 costs."""
    if GPU.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.kkt.gpu needs a CUDA device; benchmarks.kkt.speed is for the CPU"
        )
    yield from parity()
    precisions: tuple[Precision, ...] = ("ieee", "tf32")
    for precision in precisions:
        for n_runs in (1, 4) if quick else (1, 4, 16, 32, 64):
            for mode in MODES:
                yield from speed(n_runs, precision, mode, repeats=3 if quick else 5)
    yield from confident_pairs(n_runs=2 if quick else 16, quick=quick)


def parity() -> Iterator[Measurement]:
    """Distance of float64 on the GPU from float64 on the CPU, and float32 and TF32 from that."""
    attack = KKTAttack(n_candidates=40, save_at=(200,))
    exact = objective(attack, CPU, torch.float64, "ieee")
    cases: list[tuple[str, torch.dtype, Precision, float]] = [
        ("float64", torch.float64, "ieee", PARITY),
        ("float32", torch.float32, "ieee", 1e-4),
        ("TF32", torch.float32, "tf32", 1.0),
    ]
    for name, dtype, precision, limit in cases:
        found = objective(attack, GPU, dtype, precision)
        difference = max(map(relative, found, exact))
        yield _line(f"gradients on the GPU in {name} against float64 on the CPU", difference)
        if not difference < limit:
            raise SystemExit(f"{name} differs by {difference:.2g}, more than {limit}: not timed")
    trajectories = [trajectory(attack, device) for device in (CPU, GPU)]
    difference = relative(trajectories[1], trajectories[0])
    yield _line("x after 200 iterations in float64, GPU against CPU", difference)
    trained = [trained_weights(device) for device in (CPU, GPU)]
    difference = relative(trained[1], trained[0])
    yield _line("weights after 200 epochs in float64, GPU against CPU", difference)


def objective(
    attack: KKTAttack, device: torch.device, dtype: torch.dtype, precision: Precision
) -> tuple[Tensor, ...]:
    """Value and gradients of two attacks on victims 3072-200-200-1."""
    architecture = replace(SMALL, init_std_first=0.02).on(SHAPE)
    generators = [seeded_generator(0, run, "victim") for run in range(2)]
    victims = architecture.initial(generators, dtype=dtype).map(lambda t: t.to(device))
    settings = settings_of(attack, generators)
    x, lam = starting_points(replace(attack, sigma=0.3), settings, D, generators)
    with matmul_precision(precision, device):
        of = Objective(architecture, victims, attack=attack, settings=settings)
        value, *gradients = of(x.to(device, dtype), lam.to(device, dtype))
    assert value is not None
    return value, *gradients


def trajectory(attack: KKTAttack, device: torch.device) -> Tensor:
    """x of two attacks after the last iteration, in float64."""
    solver = solver_of(replace(SMALL, init_std_first=0.02), attack, 2, device)
    solver.advance(attack.n_iterations)
    return solver.x


def solver_of(
    network: Network,
    attack: KKTAttack,
    n_runs: int,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    *,
    graphs: bool = True,
    fused: bool = False,
) -> Solver:
    """A started attack on untrained victims, all on `device`."""
    generators = [seeded_generator(0, run, "victim") for run in range(n_runs)]
    architecture = network.on(SHAPE)
    victims = architecture.initial(generators, dtype=dtype).map(lambda t: t.to(device))
    settings = settings_of(attack, generators)
    x, lam = starting_points(attack, settings, D, generators)
    solver = Solver(architecture, victims, attack, settings, graphs=graphs, fused=fused)
    solver.start(x.to(device, dtype), lam.to(device, dtype))
    return solver


def trained_weights(device: torch.device) -> Tensor:
    """The first layer of two victims after 200 epochs, in float64."""
    architecture = SMALL.on(SHAPE)
    generators = [seeded_generator(0, run, "victim") for run in range(2)]
    victims = architecture.initial(generators, dtype=torch.float64).map(lambda t: t.to(device))
    draw = torch.Generator().manual_seed(0)
    x = (torch.rand(2, 20, D, generator=draw, dtype=torch.float64) - 0.5).to(device)
    y = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(2, 10).to(device)
    training = Training(epochs=200)
    return train(architecture, victims, x, y, training=training).parameters.weights[0]


@dataclass(frozen=True)
class Mode:
    """Launches of steps."""

    name: str
    graphs: bool
    fused: bool


MODES = (
    Mode("plain launches", graphs=False, fused=False),
    Mode("CUDA graphs", graphs=True, fused=False),
    Mode("CUDA graphs, fused Adadelta", graphs=True, fused=True),
)


def speed(n_runs: int, precision: Precision, mode: Mode, *, repeats: int) -> Iterator[Measurement]:
    """Runs an hour, from a training epoch, an attack iteration and the matching of R runs."""
    name = f"R={n_runs}, {KINDS[precision]}, {mode.name}"
    with matmul_precision(precision, GPU):
        try:
            epoch = seconds_per_epoch(n_runs, mode, repeats)
            iteration = seconds_per_iteration(n_runs, mode, repeats)
        except RuntimeError as error:  # no compiler for the fused kernel, or out of memory
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
            return
    matching = seconds_of_matching(repeats) * n_runs
    batch = EPOCHS * epoch + ITERATIONS * iteration + matching
    per_run = batch / n_runs
    yield _line(f"training epoch of all runs, {name}", epoch, "s", repeats=repeats)
    yield _line(f"attack iteration of all runs, {name}", iteration, "s", repeats=repeats)
    yield _line(f"seconds per run, {name}", per_run, "s", repeats=repeats)
    yield _line(f"runs an hour, {name}", 3600 / per_run, "runs/h", repeats=repeats)
    yield _line(
        f"times the floor of {FLOOR_SECONDS[precision]} s, {name}",
        per_run / FLOOR_SECONDS[precision],
        "times",
        repeats=repeats,
    )
    yield _line(
        f"GPU hours of {RUNS} runs, projected, {name}",
        RUNS * per_run / 3600,
        "h",
        reference="paper 001, A100 hours",
        reference_value=PAPER_HOURS,
        repeats=repeats,
    )


def seconds_per_epoch(n_runs: int, mode: Mode, repeats: int) -> float:
    """One epoch of R victims; the difference of two lengths leaves out what comes once."""
    architecture = PAPER.on(SHAPE)
    generators = [seeded_generator(0, run, "victim") for run in range(n_runs)]
    victims = architecture.initial(generators, dtype=torch.float32).map(lambda t: t.to(GPU))
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(1, N_IMAGES, D, generator=draw).expand(n_runs, -1, -1).contiguous().to(GPU) - 0.5
    y = torch.tensor([-1.0, 1.0]).repeat(n_runs, N_IMAGES // 2).to(GPU)

    def epochs(n: int) -> Callable[[], object]:
        training = Training(epochs=n, stop_every=n)
        return lambda: train(
            architecture, victims, x, y, training=training, graphs=mode.graphs, fused=mode.fused
        )

    few, many = 10, 110
    return (median_seconds(epochs(many), repeats) - median_seconds(epochs(few), repeats)) / (
        many - few
    )


def seconds_per_iteration(n_runs: int, mode: Mode, repeats: int) -> float:
    """One iteration of R attacks."""
    solver = solver_of(
        replace(PAPER, init_std_first=0.02),
        KKTAttack(n_candidates=N_CANDIDATES),
        n_runs,
        GPU,
        torch.float32,
        graphs=mode.graphs,
        fused=mode.fused,
    )
    return median_seconds(lambda: solver.advance(solver.iteration + 50), repeats) / 50


def seconds_of_matching(repeats: int) -> float:
    """The pairs of one run: all saved candidates against all its images."""
    draw = torch.Generator().manual_seed(0)
    saved = torch.rand(11, N_CANDIDATES, *SHAPE, generator=draw).to(GPU) - 0.5
    targets = torch.randint(0, 256, (N_IMAGES, *SHAPE), generator=draw, dtype=torch.uint8)
    mean = torch.full(SHAPE, 0.5, device=GPU)

    def match() -> object:
        return pairs_of(
            saved,
            targets,
            mean,
            iterations=range(11),
            keep="confident",
            threshold=0.4,
            gap=0.05,
        )

    return median_seconds(match, repeats)


def confident_pairs(n_runs: int, *, quick: bool) -> Iterator[Measurement]:
    """Confident candidates of the same runs in float32 and TF32; photographs, 100 images each."""
    images = load_images("photos", split="train")
    labels, _ = binary_labels(images.labels, images.class_names)
    sampling = Sampling(
        images_per_run=N_COMPLETE, phases=(Phase(n_runs=n_runs),), runs_per_part=n_runs
    )
    nothing = History.empty(len(labels))
    specs = plan_part(sampling, 0, labels=labels, history=nothing, root_seed=0)
    batch = torch.stack([torch.from_numpy(images.images[list(s.image_ids)]) for s in specs])
    experiment = COMPLETE if not quick else replace(COMPLETE, training=Training(epochs=500))
    counts = {}
    for precision in ("ieee", "tf32"):
        started = time.perf_counter()
        results = replace(experiment, precision=precision).run_batch(specs, batch, device=GPU)
        taken = time.perf_counter() - started
        counts[precision] = sum(len(r.pairs.candidate.unique()) for r in results)
        print(f"{KINDS[precision]}: {counts[precision]} in {taken:.1f} s", file=sys.stderr)
    yield _line(
        f"confident candidates of {n_runs} runs in TF32",
        max(counts["tf32"], 1e-9),
        "candidates",
        reference="the same runs in float32",
        reference_value=max(float(counts["ieee"]), 1e-9),
    )


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.cpu().double() - theirs.double()).norm() / theirs.double().norm())


if __name__ == "__main__":
    main(measure)
