"""Campaigns of the family `instahide`: one dataset however it is made, pairs of private images."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster

from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.instahide.natural_fit import Practical
from recon_core.attacks.instahide.run import two_sets
from recon_core.experiments import InstaHideRecovery
from recon_core.sampling import Phase, Sampling
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.campaign.generate import run_campaign
from tasks.campaign.plan import Campaign, Plan, open_store
from tasks.cluster.workers import Workers, dask_client
from tests.recon_core.tiles import photograph_tiles

N_RUNS, N_IMAGES, N_PUBLIC = 4, 8, 3
SMALL = InstaHideRecovery(
    n_public=N_PUBLIC,
    scheme=InstaHide(k_pub=1, n_epochs=10),
    attack=Practical(n_rounds=3),
    keep="all",
)
CAMPAIGN = Campaign(
    experiment=SMALL,
    sampling=Sampling(images_per_run=N_IMAGES, phases=(Phase(n_runs=N_RUNS),), runs_per_part=2),
)


def photographs() -> ImageSet:
    return ImageSet(
        name="photographs",
        split="train",
        images=photograph_tiles(16, shrink=4)[:40].numpy(),
        labels=np.arange(40) % 3,
        class_names=("a", "b", "c"),
    )


def generate(root: Path, client: Client) -> Dataset:
    images = photographs()
    dataset = open_store(root, CAMPAIGN, images)
    plan = Plan(CAMPAIGN, images)
    return run_campaign(plan, dataset, client, device="cpu", on_progress=lambda *_told: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """By a worker in this process, which saves its start."""
    cluster = LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
    )
    with cluster, Client(cluster, set_as_default=False) as client:
        return generate(tmp_path_factory.mktemp("instahide") / "s", client)


@pytest.mark.usefixtures("threads_or_processes")
def test_the_dataset_is_the_same_with_two_workers_and_in_two_attempts(
    made: Dataset, tmp_path: Path
) -> None:
    root = tmp_path / "s"
    with dask_client(Workers(n_workers=2, device="cpu"), threads=1) as client:
        two = generate(root, client)
        assert two.content_hash == made.content_hash
        (root / "receipts" / "part-000001.json").unlink()
        (kept,) = Dataset(root).receipts
        resumed = generate(root, client)
    assert made.n_runs == resumed.n_runs == N_RUNS
    assert resumed.content_hash == made.content_hash
    assert [r.group == kept.group for r in resumed.receipts] == [True, False]


def test_pairs_are_of_private_images_and_targets_of_the_source(made: Dataset) -> None:
    assert made.verify().ok
    images = photographs()
    plan = Plan(CAMPAIGN, images)
    assert plan.task == "images of any class, mixed"
    names = ["targets/image", "targets/image_id", "targets/label", "targets/run_row"]
    for part in range(2):
        read = made.read(part, ["pairs/target_row", "pairs/run_row", *names])
        image_ids, labels = read["targets/image_id"], read["targets/label"]
        np.testing.assert_array_equal(labels, images.labels[image_ids])
        np.testing.assert_array_equal(read["targets/image"], images.images[image_ids])
        private = [
            run * N_IMAGES + row
            for run, spec in enumerate(plan.part(part).specs)
            for row in two_sets(spec, N_PUBLIC)[0].tolist()
        ]
        assert sorted(read["pairs/target_row"].tolist()) == private
        runs = read["targets/run_row"][read["pairs/target_row"]]
        np.testing.assert_array_equal(runs, read["pairs/run_row"])


def test_campaigns_that_cannot_be_attacked_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="5 images of a run less n_public=3 leave 2 private"):
        replace(CAMPAIGN, sampling=replace(CAMPAIGN.sampling, images_per_run=5))
    with pytest.raises(ValueError, match="attacks_per_victim=2, but attacks on the same encodings"):
        replace(CAMPAIGN, sampling=replace(CAMPAIGN.sampling, attacks_per_victim=2))


def test_a_store_is_known_by_what_is_public_by_its_scheme_and_by_the_attack() -> None:
    images = photographs()
    others = [
        replace(SMALL, n_public=2),
        replace(SMALL, scheme=replace(SMALL.scheme, largest=0.9)),
        replace(SMALL, scheme=Mixing(k_pub=1), n_encodings=50),
        replace(SMALL, use_labels=False),
        replace(SMALL, attack=Practical()),
    ]
    prints = {replace(CAMPAIGN, experiment=one).fingerprint(images) for one in (SMALL, *others)}
    assert len(prints) == len(others) + 1
