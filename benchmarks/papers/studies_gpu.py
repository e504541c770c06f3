"""The studies of the KKT paper on a GPU: is it right, what will they take, and the cheapest of
them.

    python -m benchmarks.papers.studies_gpu [--quick] [--json FILE]
                                     [--data SOURCE --store FOLDER [--study NAME] [--minutes M]]

First, the objectives that the studies attack with (classes, any loss with weight decay, behind a
convolution) have to agree on the device with float64 on the CPU, or nothing is timed. Then the pace
of the device is measured, and what every study takes at the paper's size follows. With `--data` and
`--store` the cheapest one (or `--study`) is run, for at most `--minutes`; run again, it goes on.
With --quick it works on a CPU too, and estimates for that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import Measurement, measured, said
from flows.families.weights.study import GRID_NAMES
from flows.study import study
from recon_core.attacks.kkt.objective import (
    KKTAttack,
    Objective,
    settings_of,
    starting_points,
)
from recon_core.types import seeded_generator
from recon_core.victims.network import Conv, Network
from tasks.families.weights.study.settings import Pace, Study, cost_of, measured_pace
from tasks.study.cost import total

_measurement = partial(measured, "studies")
SHAPE = (3, 32, 32)
CPU = torch.device("cpu")
PARITY = {"float64": 1e-9, "float32": 1e-3}
CASES: dict[str, tuple[Network, KKTAttack, int]] = {
    "classes": (Network(widths=(64, 64), bias="first"), KKTAttack(condition="multiclass"), 10),
    "any loss": (Network(widths=(64, 64), bias="first"), KKTAttack(condition="regression"), 1),
    "convolution": (
        Network(widths=(64,), bias="first", conv=Conv(kernel=3, channels=8)),
        KKTAttack(condition="regression"),
        1,
    ),
}


def measure(*, quick: bool) -> Iterator[Measurement]:
    """Parity, then seconds of every study at the paper's size on one device."""
    device = device_of(quick=quick)
    yield from parity(device)
    for name, seconds in estimates(measured_pace(device.type)).items():
        yield _measurement(f"{name} at the paper's size, estimated", seconds, "s")


def device_of(*, quick: bool) -> torch.device:
    """The GPU; SystemExit without one, unless that is meant."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if quick:
        return CPU
    raise SystemExit("benchmarks.papers.studies_gpu needs a CUDA device; --quick tries it on a CPU")


def parity(device: torch.device) -> Iterator[Measurement]:
    """Distance of value and gradients on the device from float64 on the CPU; SystemExit if far."""
    for name, (network, attack, n_outputs) in CASES.items():
        small = replace(attack, n_candidates=40, sigma=0.3)
        exact = objective(network, small, n_outputs, CPU, torch.float64)
        for dtype in (torch.float64, torch.float32):
            found = objective(network, small, n_outputs, device, dtype)
            kind = str(dtype).removeprefix("torch.")
            difference = max(
                float((a.cpu().double() - b).norm() / b.norm())
                for a, b in zip(found, exact, strict=True)
            )
            case = f"{name}: value and gradients in {kind} against float64 on the CPU"
            yield _measurement(case, max(difference, 1e-18), "relative difference")
            if not difference < PARITY[kind]:
                raise SystemExit(f"{case} differ by {difference:.2g}, more than {PARITY[kind]:g}")


def objective(
    network: Network,
    attack: KKTAttack,
    n_outputs: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Value and gradients of two attacks on untrained victims."""
    architecture = replace(network, init_std_first=0.02).on(SHAPE, n_outputs)
    generators = [seeded_generator(0, run, "victim") for run in range(2)]
    victims = architecture.initial(generators, dtype=dtype).map(lambda t: t.to(device))
    settings = settings_of(attack, generators)
    x, lam = starting_points(attack, settings, architecture.d, generators)
    of = Objective(architecture, victims, attack=attack, settings=settings)
    value, *gradients = of(x.to(device, dtype), lam.to(device, dtype))
    assert value is not None
    return value, *gradients


def estimates(pace: Pace) -> dict[str, float]:
    """Seconds of work of every study at the paper's size, the cheapest first."""
    found = {name: _seconds(study(name, "paper"), pace) for name in GRID_NAMES}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _seconds(made: Study, pace: Pace) -> float:
    costs = [cost_of(made, cell, SHAPE, pace, stacked=True) for cell in made.cells]
    return float(total(costs)["seconds"])


def command_of(name: str, data: str, store: Path) -> list[str]:
    """Command that runs a study at the paper's size on this machine's GPU, or goes on with it."""
    options = ("--preset", "paper", "--data", data, "--store", str(store), "--device", "cuda")
    return [str(Path(sys.executable).with_name("palimpsest")), "study", name, *options]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or what the study ended with. A study that was cut short is 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="also on a CPU")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    parser.add_argument("--data", help="run a study on these images: cifar10:PATH, ...")
    parser.add_argument("--store", type=Path, help="... in this folder")
    parser.add_argument("--study", choices=list(GRID_NAMES), help="default: the cheapest")
    parser.add_argument("--minutes", type=float, default=9.0, help="for at most so long")
    options = parser.parse_args(argv)
    if (options.data is None) != (options.store is None):
        parser.error("--data and --store go together")
    lines = list(said(measure(quick=options.quick), options.json))
    if options.data is None:
        return 0
    cheapest = next(m.case for m in lines if m.unit == "s").partition(" at ")[0]
    command = command_of(options.study or cheapest, options.data, options.store)
    print(" ".join(command), flush=True)
    process = subprocess.Popen(command)
    try:
        return process.wait(timeout=60 * options.minutes)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        print("time is up; the same command goes on", flush=True)
        return 0


if __name__ == "__main__":
    sys.exit(main())
