"""The estimate of a run's memory, beside a count of the tensors that are alive at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.kkt.run import KKT, kkt_bytes
from recon_core.attacks.span.attack import SpanAttack
from recon_core.types import RunSpec, no_progress
from recon_core.victims.network import Conv, Network
from recon_core.victims.training import Training

SHAPE = (3, 16, 16)


class LiveTensors(TorchDispatchMode):
    """The most bytes that were alive at once in tensors made inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn:  # only CPUs have such copies
                storage = leaf.untyped_storage()
                ref = StorageWeakRef(storage)
                self.alive[ref.cdata] = (ref, storage.nbytes())
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.most = max(self.most, sum(n for _ref, n in self.alive.values()))
        return out


def most_alive(experiment: KKT, n_images: int, n_runs: int) -> float:
    """Bytes per run of a stack of `n_runs`."""
    spec = RunSpec(
        run=0,
        root_seed=0,
        image_ids=tuple(range(n_images)),
        labels=tuple(i % 2 for i in range(n_images)),
    )
    specs = [replace(spec, run=run) for run in range(n_runs)]
    images = torch.randint(0, 256, (n_runs, n_images, *SHAPE), dtype=torch.uint8)
    with LiveTensors() as live:
        experiment.run_stack(specs, images, torch.device("cpu"), no_progress)
    return live.most / n_runs


@pytest.mark.parametrize(
    ("widths", "n_images", "n_saved", "n_runs", "conv"),
    [
        ((600, 600), 8, 2, 2, None),
        ((32, 32), 40, 6, 2, None),
        ((300,), 20, 3, 3, None),
        ((64, 64), 40, 2, 1, None),
        ((32,), 10, 2, 2, Conv(kernel=3, channels=8)),
        ((100,), 8, 1, 1, Conv(kernel=3, channels=32)),
        ((64, 64), 10, 2, 1, Conv(kernel=8, channels=16)),
    ],
)
def test_the_estimate_is_above_what_is_alive_and_not_far_above(
    widths: tuple[int, ...], n_images: int, n_saved: int, n_runs: int, conv: Conv | None
) -> None:
    experiment = KKT(
        victim=Network(widths=widths, conv=conv),
        training=Training(epochs=2),
        attack=KKTAttack(n_candidates=2 * n_images, save_at=tuple(range(1, n_saved + 1))),
    )
    estimate = kkt_bytes(experiment, n_images, SHAPE)
    assert 1.0 <= estimate / most_alive(experiment, n_images, n_runs) < 2.5


@pytest.mark.parametrize(
    ("widths", "n_images", "overcomplete"),
    [((300,), 20, 1.0), ((64, 64), 40, 1.0), ((64, 64), 40, 4.0)],
)
def test_the_estimate_of_a_separation(
    widths: tuple[int, ...], n_images: int, overcomplete: float
) -> None:
    attack = SpanAttack(n_images=n_images, n_independent=12, overcomplete=overcomplete)
    experiment = KKT(victim=Network(widths=widths), training=Training(epochs=2), attack=attack)
    estimate = kkt_bytes(experiment, n_images, SHAPE)
    assert 1.0 <= estimate / most_alive(experiment, n_images, 1) < 2.5


def test_attacks_that_go_at_once_take_memory_each_and_float64_doubles_it() -> None:
    one = KKT()
    many = kkt_bytes(replace(one, n_attacks=5), 300, (3, 32, 32))
    assert many == pytest.approx(5 * kkt_bytes(one, 300, (3, 32, 32)), rel=0.01)
    double = kkt_bytes(replace(one, dtype="float64"), 300, (3, 32, 32))
    assert double == pytest.approx(2 * kkt_bytes(one, 300, (3, 32, 32)), rel=0.01)
