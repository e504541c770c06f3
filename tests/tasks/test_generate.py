"""Campaigns on real Dask workers: one dataset whatever the workers, and nothing is repeated."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from distributed import Client, LocalCluster

from recon_core.attacks.kkt_objective import KKTAttack
from recon_core.experiments import KKT
from recon_core.sampling import Phase, Sampling
from recon_core.victims.network import Network
from recon_core.victims.training import Training
from storage.dataset import Dataset
from storage.errors import StoreFullError
from storage.parts import write_part
from storage.receipts import Receipt
from storage.sources import ImageSet
from tasks.campaign import Campaign, Plan, open_store
from tasks.generate import CampaignError, _Coordinator, batch_of, columns_of, run_campaign
from tasks.workers import Workers, dask_client, resolve_device

CAMPAIGN = Campaign(
    experiment=KKT(
        victim=Network(widths=(16,)),
        training=Training(epochs=60),
        attack=KKTAttack(n_candidates=8, save_at=(10, 30)),
        keep="all",
    ),
    sampling=Sampling(
        images_per_run=4,
        phases=(Phase(n_runs=4), Phase(sampler="least_seen", n_runs=4, pool_size=8)),
        runs_per_part=2,
        parts_per_round=1,
        lag=1,
    ),
)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    rng = np.random.default_rng(1)
    return ImageSet(
        name="noise",
        split="train",
        images=rng.integers(0, 256, (40, 3, 16, 16), dtype=np.uint8),
        labels=np.arange(40) % 2,
        class_names=("a", "b"),
    )


@pytest.fixture(scope="module")
def in_process() -> Iterator[Client]:
    """A Dask cluster of one thread in this process, so that tests can make its work fail."""
    with (
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=False,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def ignore(_done: float, _total: int) -> None:
    """Progress that nobody watches."""


def generate(root: Path, images: ImageSet, n_workers: int) -> Dataset:
    plan = Plan(CAMPAIGN, images)
    dataset = open_store(root, CAMPAIGN, images)
    with dask_client(Workers(n_workers=n_workers, device="cpu"), threads=1) as client:
        return run_campaign(plan, dataset, client, device="cpu", on_progress=ignore)


def test_the_dataset_is_the_same_with_one_worker_with_two_and_in_two_attempts(
    images: ImageSet, tmp_path: Path
) -> None:
    one = generate(tmp_path / "one", images, 1)
    two = generate(tmp_path / "two", images, 2)
    assert one.n_runs == two.n_runs == 8
    assert one.content_hash == two.content_hash
    assert one.verify().ok
    # A store that lost half of its parts gets the same ones again.
    for part in (1, 3):
        (tmp_path / "two" / "receipts" / f"part-{part:06d}.json").unlink()
    kept = {r.part: r.group for r in Dataset(tmp_path / "two").receipts}
    resumed = generate(tmp_path / "two", images, 2)
    assert resumed.content_hash == one.content_hash
    assert {r.part: r.group for r in resumed.receipts if r.part in kept} == kept


def test_other_seeds_give_another_dataset(
    images: ImageSet, tmp_path: Path, in_process: Client
) -> None:
    short = replace(CAMPAIGN, sampling=replace(CAMPAIGN.sampling, phases=(Phase(n_runs=2),)))
    hashes = set()
    for seed in (0, 1):
        campaign = replace(short, root_seed=seed)
        dataset = open_store(tmp_path / str(seed), campaign, images)
        plan = Plan(campaign, images)
        run_campaign(plan, dataset, in_process, device="cpu", on_progress=ignore)
        hashes.add(dataset.content_hash)
    assert len(hashes) == 2


def test_a_full_device_stops_the_campaign_at_once_and_the_store_verifies(
    images: ImageSet, tmp_path: Path, in_process: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def first_only(root: Path, part: int, columns, *, provenance) -> Receipt:
        if written:
            raise StoreFullError(f"no space left for part {part}")
        written.append(part)
        return write_part(root, part, columns, provenance=provenance)

    monkeypatch.setattr("tasks.generate.write_part", first_only)
    dataset = open_store(tmp_path / "s", CAMPAIGN, images)
    plan = Plan(CAMPAIGN, images)
    with pytest.raises(StoreFullError, match="no space left for part 1"):
        run_campaign(plan, dataset, in_process, device="cpu", on_progress=ignore)
    stored = Dataset(tmp_path / "s")
    assert stored.verify().ok
    assert [r.part for r in stored.receipts] == [0]


def test_failed_parts_are_named_after_the_others_were_made(
    images: ImageSet, tmp_path: Path, in_process: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_part_zero(root: Path, part: int, columns, *, provenance) -> Receipt:
        if part == 0:
            raise RuntimeError("out of memory")
        return write_part(root, part, columns, provenance=provenance)

    monkeypatch.setattr("tasks.generate.write_part", not_part_zero)
    dataset = open_store(tmp_path / "s", CAMPAIGN, images)
    plan = Plan(CAMPAIGN, images)
    with pytest.raises(CampaignError, match=r"1 of 4 parts .*part 0.*out of memory.*same command"):
        run_campaign(plan, dataset, in_process, device="cpu", on_progress=ignore)
    # Part 1 does not depend on part 0; parts 2 and 3 are planned from its receipt.
    assert [r.part for r in Dataset(tmp_path / "s").receipts] == [1]


def test_progress_ends_at_the_number_of_runs(
    images: ImageSet, tmp_path: Path, in_process: Client
) -> None:
    reports: list[tuple[float, int]] = []
    dataset = open_store(tmp_path / "s", CAMPAIGN, images)
    run_campaign(
        Plan(CAMPAIGN, images),
        dataset,
        in_process,
        device="cpu",
        on_progress=lambda done, total: reports.append((done, total)),
    )
    assert reports[-1] == (8, 8)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_a_message_that_comes_after_its_parts_receipt_is_not_counted(
    images: ImageSet, tmp_path: Path, in_process: Client
) -> None:
    reports: list[tuple[float, int]] = []
    dataset = open_store(tmp_path / "s", CAMPAIGN, images)
    coordinator = _Coordinator(
        Plan(CAMPAIGN, images), dataset, in_process, "cpu", lambda *told: reports.append(told)
    )
    coordinator.on_event((0.0, {"part": 0, "fraction": 1.0}))
    coordinator._report()
    assert reports == [(0.0, 8)]


def test_columns_refer_to_rows_of_the_part(images: ImageSet) -> None:
    plan = Plan(CAMPAIGN, images)
    specs = plan.part(0, []).specs
    results = CAMPAIGN.experiment.run_batch(
        specs, torch.from_numpy(batch_of(specs, images.images)), device=torch.device("cpu")
    )
    columns = columns_of(results)
    assert columns["pairs/reconstruction"].shape == (2 * 8 * 2, 3, 16, 16)
    run_of_target = columns["targets/run_row"][columns["pairs/target_row"]]
    np.testing.assert_array_equal(run_of_target, columns["pairs/run_row"])
    np.testing.assert_array_equal(
        columns["targets/image_id"], [i for spec in specs for i in spec.image_ids]
    )
    np.testing.assert_array_equal(columns["runs/run"], [0, 1])


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ValueError, match="--device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize("settings", [{"cluster": "slurn"}, {"n_workers": -1}])
def test_bad_worker_settings_are_refused(settings) -> None:
    with pytest.raises(ValueError, match=str(next(iter(settings.values())))):
        Workers(**settings)


def listening() -> set[tuple[str, int]]:
    """Addresses that this process and its children listen on."""
    me = psutil.Process()
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_a_local_cluster_listens_on_loopback_only_beside_another_one() -> None:
    workers = Workers(n_workers=1, device="cpu")
    before = listening()
    with dask_client(workers, threads=1), dask_client(workers, threads=1) as second:
        assert second.submit(sum, [1, 2]).result() == 3
        opened = listening() - before
    assert {ip for ip, _port in opened} == {"127.0.0.1"}
