"""Savings of successive halving: iterations of a sweep beside those of a random one, as good.

    python -m benchmarks.kkt.sweep --halved STORE --random STORE [--json FILE]

Both are held-out stores of sweeps on the same victims, one with `attack.halving` and one without.
How good some attacks are: each training image's best match among their pictures by SSIM, averaged
over the images. The random sweep is read in many orders; the mean of its curves says after how many
iterations it is as good as the whole halved sweep is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.record import Measurement, measured, said
from recon_core.matching import best_per_target, fit_to_range
from recon_core.metrics import ssim_matrix
from storage.pairs.dataset import Dataset
from storage.pairs.layout import OUTCOMES

N_ORDERS = 200
FLOAT = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sweep:
    """The attacks of a store on one victim: `best` (runs, images), each one's best SSIM per image,
    0 without pictures, and `n_iterations` (runs,) what it took."""

    best: FLOAT
    n_iterations: FLOAT
    n_stopped: int

    @property
    def effort(self) -> float:
        return float(self.n_iterations.sum())

    @property
    def quality(self) -> float:
        """Mean over the images of the best of all attacks."""
        return float(self.best.max(axis=0).mean())


def read_sweep(dataset: Dataset, victim: int = 0) -> Sweep:
    """The attacks on one victim; ValueError if the store is not of sweeps."""
    sampling = dataset.manifest.get("campaign", {}).get("sampling", {})
    n = sampling.get("attacks_per_victim", 1)
    if n == 1:
        raise ValueError(f"{dataset.root} has one attack per victim; give stores of sweeps")
    best, n_iterations, n_stopped = [], [], 0
    for receipt in dataset.receipts:
        runs = dataset.read(
            receipt.part, ["runs/run", "runs/n_iterations", "runs/outcome", "runs/mean_image"]
        )
        targets = dataset.read(receipt.part, ["targets/image", "targets/run_row"])
        pairs = dataset.read(receipt.part, ["pairs/run_row", "pairs/reconstruction"])
        for row, number in enumerate(runs["runs/run"].tolist()):
            if number // n != victim:
                continue
            images = torch.from_numpy(targets["targets/image"][targets["targets/run_row"] == row])
            x = torch.from_numpy(pairs["pairs/reconstruction"][pairs["pairs/run_row"] == row])
            mean = torch.from_numpy(runs["runs/mean_image"][row])
            _rows, score = best_per_target(ssim_matrix(fit_to_range(x, mean), images.float() / 255))
            best.append(np.maximum(score.double().numpy(), 0.0))
            n_iterations.append(float(runs["runs/n_iterations"][row]))
            n_stopped += OUTCOMES[runs["runs/outcome"][row]] == "stopped"
    return Sweep(np.array(best), np.array(n_iterations), n_stopped)


def effort_to_reach(sweep: Sweep, quality: float, *, seed: int = 0) -> float | None:
    """Iterations after which a random sweep is as good, in the mean over orders; None if never."""
    rng = np.random.default_rng(seed)
    grid = np.linspace(0.0, sweep.effort, 400)
    curves = []
    for _ in range(N_ORDERS):
        order = rng.permutation(len(sweep.best))
        reached = np.maximum.accumulate(sweep.best[order], axis=0).mean(axis=1)
        efforts = np.cumsum(sweep.n_iterations[order])
        curves.append(np.concatenate([[0.0], reached])[np.searchsorted(efforts, grid, "right")])
    mean = np.mean(curves, axis=0)
    enough = np.flatnonzero(mean >= quality)
    return float(grid[enough[0]]) if len(enough) else None


def measure(halved: Sweep, random: Sweep) -> Iterator[Measurement]:
    """Iterations of the halved sweep beside those a random one needs to be as good."""
    reference = effort_to_reach(random, halved.quality)
    n, n_images = halved.best.shape
    case = (
        f"{n} attacks on {n_images} images, {halved.n_stopped} of them stopped, mean best SSIM "
        f"{halved.quality:.3f}"
    )
    said_of_random = f"{len(random.best)} random attacks in {N_ORDERS} orders, until as good"
    if reference is None:
        said_of_random += f"; all of them only reach {random.quality:.3f}, so it is more than"
        reference = random.effort
    yield measured(
        "sweep",
        case,
        halved.effort,
        "iterations",
        reference=said_of_random,
        reference_value=reference,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: reads two stores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--halved", type=Path, required=True, help="store with attack.halving")
    parser.add_argument("--random", type=Path, required=True, help="store without")
    parser.add_argument("--json", type=Path, help="also write the line to this file")
    options = parser.parse_args(argv)
    halved, random = (read_sweep(Dataset(store)) for store in (options.halved, options.random))
    for _ in said(measure(halved, random), options.json):
        pass


if __name__ == "__main__":
    main()
