"""Runs that do nothing, and some that meet trouble; importable by worker processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.campaign.machinery import NoOp
from recon_core.sampling import Phase, Sampling
from recon_core.types import Progress, RunResult, RunSpec, Victims, no_progress
from storage.errors import UnsettledError
from storage.sources.load import ImageSet, Split
from tasks.campaign.plan import Campaign

UNIFORM = Sampling(
    images_per_run=4, phases=(Phase(n_runs=12),), runs_per_part=2, parts_per_round=1, lag=1
)
MIXED = replace(
    UNIFORM, phases=(Phase(n_runs=6), Phase(sampler="least_seen", n_runs=6, pool_size=8))
)


@dataclass(frozen=True, kw_only=True)
class Troubled(NoOp):
    """`deadly` runs end the process that runs them; `flaky` ones fail `n_failures` times.

    `counts` is a folder with a file per run, of a letter for each time that it was begun.
    """

    counts: str
    deadly: tuple[int, ...] = ()
    flaky: tuple[int, ...] = ()
    n_failures: int = 2

    def run_batch(
        self,
        specs: Sequence[RunSpec],
        images: Tensor,
        *,
        device: torch.device,
        progress: Progress = no_progress,
        victims: Victims | None = None,
    ) -> list[RunResult]:
        for spec in specs:
            with Path(self.counts, str(spec.run)).open("a") as file:
                file.write("x")
            if spec.run in self.deadly:
                os._exit(9)
            if spec.run in self.flaky and begun(self.counts, spec.run) <= self.n_failures:
                raise UnsettledError("no answer from the bucket")
        return super().run_batch(specs, images, device=device, progress=progress, victims=victims)


def begun(counts: str | Path, run: int) -> int:
    """How often a run was begun."""
    path = Path(counts, str(run))
    return len(path.read_text()) if path.is_file() else 0


def no_op(sampling: Sampling) -> Campaign:
    return Campaign(experiment=NoOp(), sampling=sampling)


def troubled(sampling: Sampling, counts: Path, **trouble: object) -> Campaign:
    counts.mkdir(exist_ok=True)
    experiment = Troubled(counts=str(counts), **trouble)
    return Campaign(experiment=experiment, sampling=sampling)


def small_images(side: int = 8, split: Split = "train", seed: int = 1) -> ImageSet:
    """Forty pictures of noise, half of them of each class."""
    rng = np.random.default_rng(seed)
    return ImageSet(
        name="noise",
        split=split,
        images=rng.integers(0, 256, (40, 3, side, side), dtype=np.uint8),
        labels=np.arange(40) % 2,
        class_names=("a", "b"),
    )
