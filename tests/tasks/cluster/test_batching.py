"""How many runs a part has: what was given, what the store has, or what the GPU has room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recon_core.attacks.kkt.run import KKT
from recon_core.experiments import bytes_per_run
from recon_core.sampling import Phase, Sampling
from tasks.campaign.plan import Campaign, open_store
from tasks.cluster.batching import batched
from tasks.cluster.workers import Workers
from tests.tasks.troubled_runs import small_images

GIB = 2**30
SHAPE = (3, 32, 32)
PAPER = Sampling()


def batch(
    text: str, store: Path, *, sampling: Sampling = PAPER, workers: Workers | None = None
) -> int:
    campaign, workers = Campaign(sampling=sampling), workers or Workers(device="cpu")
    return batched(campaign, text, shape=SHAPE, workers=workers, store=store).runs_per_part


def test_a_number_is_taken_as_it_is_and_a_cpu_leaves_the_recipe_alone(tmp_path: Path) -> None:
    assert batch("20", tmp_path) == 20
    assert batch("auto", tmp_path) == PAPER.runs_per_part


@pytest.mark.parametrize(
    ("text", "workers", "said"),
    [
        ("7", {}, "n_runs=100000 is not a multiple of runs_per_part=7"),
        *((text, {}, f"batch='{text}' must be a number") for text in ("0", "-3", "2.5", "")),
        ("auto", {"cluster": "tcp://127.0.0.1:9999", "device": "cuda"}, "batch='auto' cannot see"),
    ],
)
def test_what_cannot_be_is_refused(text: str, workers: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        batch(text, tmp_path, workers=Workers(**{"device": "cpu"} | workers))


def test_a_store_keeps_what_it_has(tmp_path: Path) -> None:
    sampling = Sampling(images_per_run=4, phases=(Phase(n_runs=6),), runs_per_part=3)
    open_store(tmp_path / "pairs", Campaign(sampling=sampling), small_images())
    assert batch("auto", tmp_path / "pairs", sampling=Sampling(phases=(Phase(n_runs=600),))) == 3


def test_a_gpu_gets_what_fits_and_divides_every_phase(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The smallest of two GPUs decides."""
    each = bytes_per_run(KKT(), 300, SHAPE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for gib, expected in ((8, 10), (24, 25), (80, 100), (139, 100), (0.5, None)):
        free = (140 * GIB, int(gib * GIB))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda k, free=free: (free[k], 0))
        if expected is None:
            with pytest.raises(ValueError, match=r"needs about 0\.5 GiB and 80% of the free 0\.5"):
                batch("auto", tmp_path, workers=Workers(device="cuda"))
            return
        size = batch("auto", tmp_path, workers=Workers(device="cuda"))
        assert size == expected
        assert size * each <= 0.8 * gib * GIB
        assert all(phase.n_runs % size == 0 for phase in PAPER.phases)
