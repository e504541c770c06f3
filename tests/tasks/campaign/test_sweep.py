"""Sweeps as campaigns: one dataset however it is interrupted, wherever its victims come from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from recon_core.attacks.kkt.objective import KKTAttack, Search
from recon_core.experiments import KKT
from recon_core.optimisers import Optimiser
from recon_core.sampling import Phase, Sampling
from recon_core.victims.network import Network
from recon_core.victims.training import Training
from storage.pairs.dataset import Dataset
from tasks.campaign.generate import run_campaign
from tasks.campaign.plan import VICTIMS, Campaign, Plan, VictimFiles, kept_victims, open_store
from tasks.cluster.workers import Workers, dask_client
from tests.tasks.troubled_runs import small_images

SWEEP = Campaign(
    experiment=KKT(
        augment_p=0.0,
        victim=Network(widths=(16,)),
        training=Training(epochs=60),
        attack=KKTAttack(
            n_candidates=8,
            save_at=(10, 30),
            optimiser=Optimiser(rule="gd", momentum=0.9),
            search=Search(lr=(1e-3, 0.1)),
        ),
        keep="all",
    ),
    sampling=Sampling(
        images_per_run=4, phases=(Phase(n_runs=12),), runs_per_part=3, attacks_per_victim=6
    ),
)
N_CANDIDATES, N_SAVED, N_IMAGES = 8, 2, 4
pytestmark = pytest.mark.usefixtures("all_workers_in_process")


def generate(root: Path, campaign: Campaign = SWEEP, *, n_workers: int = 2) -> Dataset:
    images = small_images(16, "heldout")
    dataset = open_store(root, campaign, images)
    with dask_client(Workers(n_workers=n_workers, device="cpu"), threads=1) as client:
        return run_campaign(
            Plan(campaign, images), dataset, client, device="cpu", on_progress=lambda *_told: None
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, all_workers_in_process: None) -> Dataset:
    return generate(tmp_path_factory.mktemp("sweep") / "s")


def test_every_run_has_its_settings_and_its_victims_images(made: Dataset) -> None:
    assert made.verify().ok
    images = made.column("targets/image_id").reshape(12, N_IMAGES)
    margins = made.column("targets/margin").reshape(12, N_IMAGES)
    for victim in (slice(0, 6), slice(6, 12)):
        assert (images[victim] == images[victim][0]).all()
        assert (margins[victim] == margins[victim][0]).all()
    assert (images[0] != images[6]).any()
    assert len(np.unique(made.column("runs/lr"))) == 12
    assert (made.column("runs/n_iterations") == 30).all()
    assert np.isfinite(made.column("runs/residual_relu")).all()
    assert made.n_pairs == 12 * N_CANDIDATES * N_SAVED


def test_the_dataset_is_the_same_whoever_trains_the_victims(made: Dataset, tmp_path: Path) -> None:
    kept = Path(made.root) / VICTIMS
    assert sorted(file.stem for file in kept.glob("*.json")) == [
        "victim_00000000",
        "victim_00000001",
    ]
    again = tmp_path / "again"
    shutil.copytree(made.root, again)
    for part in (0, 3):
        (again / "receipts" / f"part-{part:06d}.json").unlink()
    shutil.rmtree(again / VICTIMS)
    assert generate(again, n_workers=1).content_hash == made.content_hash
    (again / "receipts" / "part-000001.json").unlink()
    for weights in (again / VICTIMS).glob("*.safetensors"):
        weights.write_bytes(b"no weights at all")
    assert generate(again, n_workers=1).content_hash == made.content_hash


def test_kept_victims_are_those_of_their_key_device_and_bytes(tmp_path: Path) -> None:
    tensors = {"parameters.0": torch.randn(1, 3, 4), "loss": torch.tensor([float("nan")])}
    names = [(os.fspath(tmp_path), "settings")] * 2 + [(os.fspath(tmp_path), "others")]
    devices = ("cpu", "NVIDIA H200", "cpu")
    cpu, gpu, others = (kept_victims(n, d) for n, d in zip(names, devices, strict=True))
    assert kept_victims(None, "cpu") is None
    assert cpu is not None
    assert gpu is not None
    assert others is not None
    cpu.put(3, tensors)
    got = cpu.get(3)
    assert got is not None
    for name, tensor in tensors.items():
        assert got[name].numpy().tobytes() == tensor.numpy().tobytes()
    assert [files.get(n) for files, n in ((cpu, 4), (gpu, 3), (others, 3))] == [None] * 3
    (weights,) = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert cpu.get(3) is None
    cpu.put(3, tensors)
    assert cpu.get(3) is not None
    # A folder that cannot be written keeps nothing.
    (tmp_path / "file").write_text("in the way")
    files = VictimFiles(tmp_path / "file" / "victims", "key")
    files.put(0, tensors)
    assert files.get(0) is None
