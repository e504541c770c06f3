"""Small runs of the kkt family for its tests: tiny pictures, tiny victims."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.kkt.run import KKT
from recon_core.optimisers import Optimiser
from recon_core.types import RunResult, RunSpec
from recon_core.victims.network import Network
from recon_core.victims.training import Training
from tests.recon_core.tiles import photograph_tiles

N, SIDE, R = 8, 16, 3
SAVED = (80, 300)
THRESHOLD, GAP = 0.5, 0.35  # stricter than the paper, so that some candidates fail either
CPU = torch.device("cpu")
SMALL = KKT(
    augment_p=0.0,
    victim=Network(widths=(64, 64)),
    training=Training(epochs=400),
    attack=KKTAttack(n_candidates=2 * N, save_at=SAVED),
    confident_ssim=THRESHOLD,
    confident_gap=GAP,
)
QUICK = dataclasses.replace(
    SMALL,
    victim=Network(widths=(16, 16)),
    training=Training(epochs=25),
    attack=KKTAttack(n_candidates=2 * N, save_at=(5, 15)),
)
ALL = dataclasses.replace(SMALL, keep="all")
QUICK_ALL = dataclasses.replace(QUICK, keep="all")
TILES = photograph_tiles(SIDE, shrink=4)
FROZEN = Optimiser(rule="gd", lr=1e-12)


def specs(n_runs: int = R, *, n: int = N, n_classes: int = 2) -> list[RunSpec]:
    labels = tuple(i * n_classes // n for i in range(n))
    return [
        RunSpec(run=run, root_seed=0, image_ids=tuple(range(run * n, (run + 1) * n)), labels=labels)
        for run in range(n_runs)
    ]


def images(some: Sequence[RunSpec] | None = None) -> Tensor:
    return torch.stack([TILES[list(spec.image_ids)] for spec in some or specs()])


def run(experiment: KKT, some: Sequence[RunSpec] | None = None) -> list[RunResult]:
    chosen = specs() if some is None else some
    return experiment.run_batch(chosen, images(chosen), device=CPU)


def with_attack(experiment: KKT, **changes: Any) -> KKT:
    attack = dataclasses.replace(experiment.attack, **changes)
    return dataclasses.replace(experiment, attack=attack)


def assert_equal_results(one: RunResult, other: RunResult, *, tolerance: float = 0.0) -> None:
    assert one.spec == other.spec
    assert one.outcome is other.outcome
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.augment, other.augment)
    assert one.stats == pytest.approx(other.stats, rel=tolerance, abs=tolerance, nan_ok=True)
    assert vars(one.pairs).keys() == vars(other.pairs).keys()
    for name, value in vars(one.pairs).items():
        theirs = getattr(other.pairs, name)
        torch.testing.assert_close(value, theirs, rtol=tolerance, atol=tolerance)


def assert_all_equal(
    ones: Sequence[RunResult], others: Sequence[RunResult], *, tolerance: float = 0.0
) -> None:
    for one, other in zip(ones, others, strict=True):
        assert_equal_results(one, other, tolerance=tolerance)


class Kept(dict[int, Mapping[str, Tensor]]):
    """Victims in memory, each put there once."""

    def put(self, victim: int, tensors: Mapping[str, Tensor]) -> None:
        assert victim not in self
        self[victim] = tensors
