"""How many runs a part has: what was given, what the store has, or what the GPU has room for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recon_core.attacks.kkt.run import KKT
from recon_core.experiments import bytes_per_run
from recon_core.sampling import Phase, Sampling
from storage.sources.load import ImageSet
from tasks.campaign.plan import Campaign, open_store
from tasks.cluster import batching
from tasks.cluster.batching import batched, fitting
from tasks.cluster.workers import Workers

GIB = 2**30
SHAPE = (3, 32, 32)
PAPER = Sampling()


def batch(
    text: str, store: Path, *, sampling: Sampling = PAPER, workers: Workers | None = None
) -> int:
    campaign, workers = Campaign(sampling=sampling), workers or Workers(device="cpu")
    return batched(campaign, text, shape=SHAPE, workers=workers, store=store).runs_per_part


def test_a_number_is_taken_as_it_is(tmp_path: Path) -> None:
    assert batch("20", tmp_path) == 20
    with pytest.raises(ValueError, match="n_runs=100000 is not a multiple of runs_per_part=7"):
        batch("7", tmp_path)


@pytest.mark.parametrize("text", ["0", "-3", "many", "2.5", ""])
def test_anything_else_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"batch='{text}' must be a number of runs"):
        batch(text, tmp_path)


def test_on_a_cpu_auto_leaves_the_recipe_alone(tmp_path: Path) -> None:
    assert batch("auto", tmp_path) == PAPER.runs_per_part


def test_a_store_keeps_what_it_has(tmp_path: Path) -> None:
    sampling = Sampling(images_per_run=4, phases=(Phase(n_runs=6),), runs_per_part=3)
    images = ImageSet(
        name="noise",
        split="train",
        images=np.zeros((8, *SHAPE), np.uint8),
        labels=np.arange(8) % 2,
        class_names=("a", "b"),
    )
    open_store(tmp_path / "pairs", Campaign(sampling=sampling), images)
    assert batch("auto", tmp_path / "pairs", sampling=Sampling(phases=(Phase(n_runs=600),))) == 3


def test_a_gpu_gets_what_fits_and_divides_every_phase(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    each = bytes_per_run(KKT(), 300, SHAPE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free, expected in ((8 * GIB, 10), (24 * GIB, 25), (80 * GIB, 100), (139 * GIB, 100)):
        monkeypatch.setattr(batching, "free_bytes", lambda free=free: free)
        size = batch("auto", tmp_path, workers=Workers(device="cuda"))
        assert size == expected
        assert size * each <= 0.8 * free
        assert all(phase.n_runs % size == 0 for phase in PAPER.phases)


def test_where_no_run_fits_that_is_said_with_both_sizes() -> None:
    with pytest.raises(
        ValueError, match=r"a run needs about 4\.0 GiB and 80% of the free 2\.0 GiB"
    ):
        fitting(PAPER, 4 * GIB, 2 * GIB)


def test_gpus_of_other_machines_cannot_be_looked_at(tmp_path: Path) -> None:
    workers = Workers(cluster="tcp://127.0.0.1:9999", device="cuda")
    with pytest.raises(ValueError, match="batch='auto' cannot see the GPUs of tcp"):
        batch("auto", tmp_path, workers=workers)
