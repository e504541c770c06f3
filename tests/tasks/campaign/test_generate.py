"""Campaigns on real Dask workers: one dataset whatever the workers, and nothing is repeated."""

import ctypes
import errno
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from distributed import Client, KilledWorker, LocalCluster
from distributed.comm import CommClosedError

from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.experiments import KKT
from recon_core.sampling import Phase, Sampling
from recon_core.victims.network import Network
from recon_core.victims.training import Training
from storage.errors import (
    CorruptPartError,
    StorageError,
    StoreFullError,
    StoreMismatchError,
    UnsettledError,
)
from storage.pairs.dataset import Dataset
from storage.pairs.parts import write_part
from storage.pairs.receipts import Receipt
from tasks.campaign import part as worker_side
from tasks.campaign.generate import run_campaign
from tasks.campaign.part import PartJob, PartLog, batch_of, log_tail, run_part
from tasks.campaign.plan import Campaign, Plan, open_store
from tasks.campaign.state import (
    CampaignError,
    Pace,
    clear_quarantine,
    read_quarantine,
    write_control,
    write_quarantine,
)
from tasks.cluster import workers as cluster_workers
from tasks.cluster.jobs import reason_of, verdict
from tasks.cluster.workers import Workers, dask_client
from tests.tasks.troubled_runs import MIXED, UNIFORM, begun, no_op, small_images, troubled

# Workers are killed here, and what distributed had connected to one is closed when it is collected.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")

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


def ignore(_done: float, _total: int, _note: str) -> None:
    """Progress that nobody watches."""


def run(root: Path, campaign: Campaign, client: Client, **options: Any) -> Dataset:
    """The store at `root` with what it lacked."""
    images = small_images(16 if campaign is CAMPAIGN else 8)
    dataset = open_store(root, campaign, images)
    options = {"on_progress": ignore} | options
    return run_campaign(Plan(campaign, images), dataset, client, device="cpu", **options)


def on_workers(root: Path, campaign: Campaign, n_workers: int, **options: Any) -> Dataset:
    with dask_client(Workers(n_workers=n_workers, device="cpu"), threads=1) as client:
        return run(root, campaign, client, **options)


def stored(root: Path) -> list[int]:
    return [receipt.part for receipt in Dataset(root).receipts]


@pytest.mark.usefixtures("threads_or_processes")
def test_the_dataset_is_the_same_with_one_worker_with_two_and_in_two_attempts(
    tmp_path: Path,
) -> None:
    one = on_workers(tmp_path / "one", CAMPAIGN, 1)
    two = on_workers(tmp_path / "two", CAMPAIGN, 2)
    assert one.n_runs == two.n_runs == 8
    assert one.content_hash == two.content_hash
    assert one.verify().ok
    # A store that lost half of its parts gets the same ones again.
    for part in (1, 3):
        (tmp_path / "two" / "receipts" / f"part-{part:06d}.json").unlink()
    kept = {r.part: r.group for r in Dataset(tmp_path / "two").receipts}
    resumed = on_workers(tmp_path / "two", CAMPAIGN, 2)
    assert resumed.content_hash == one.content_hash
    assert {r.part: r.group for r in resumed.receipts if r.part in kept} == kept


@pytest.mark.parametrize(
    ("bad", "error", "raised", "match", "left"),
    [
        (1, StoreFullError("no space left"), StoreFullError, "no space left for part 1", [0]),
        (0, OSError(errno.ENOSPC, "No space left on device"), StoreFullError,
         r"part 0.*make room.*same command", []),
        # Part 1 does not depend on part 0; parts 2 and 3 are planned from its receipt.
        (0, RuntimeError("out of memory"), CampaignError,
         r"1 of 4 parts .*part 0.*out of memory.*same command", [1]),
    ],
)  # fmt: skip
def test_a_full_device_ends_a_campaign_and_another_error_its_part(
    tmp_path: Path, in_process: Client, monkeypatch: pytest.MonkeyPatch,
    bad: int, error: Exception, raised: type[Exception], match: str, left: list[int],
) -> None:  # fmt: skip
    def faulty(root: str, part: int, columns: Any, *, provenance: Any) -> Receipt:
        if part == bad:
            raise error
        return write_part(root, part, columns, provenance=provenance)

    monkeypatch.setattr("tasks.campaign.part.write_part", faulty)
    with pytest.raises(raised, match=match):
        run(tmp_path, CAMPAIGN, in_process)
    assert stored(tmp_path) == left
    assert Dataset(tmp_path).verify().ok


def test_progress_ends_at_the_number_of_runs(tmp_path: Path, in_process: Client) -> None:
    reports: list[tuple[float, int, str]] = []
    dataset = run(tmp_path, CAMPAIGN, in_process, on_progress=lambda *now: reports.append(now))
    n_covered = int((dataset.image_counts()[1] > 0).sum())
    assert 0 < n_covered < 40
    assert reports[0] == (0, 8, "0 of 40 images covered")
    assert reports[-1] == (8, 8, f"{n_covered} of 40 images covered")
    assert [done for done, _, _ in reports] == sorted(done for done, _, _ in reports)


@pytest.mark.slow
def test_a_part_that_ends_three_workers_is_quarantined_and_the_others_are_made(
    tmp_path: Path,
) -> None:
    root, notices = tmp_path / "s", list[str]()
    campaign = troubled(UNIFORM, tmp_path / "counts", deadly=(4,))  # of part 2
    on_workers(root, campaign, 2, on_notice=notices.append)
    assert stored(root) == [0, 1, 3, 4, 5]
    assert begun(tmp_path / "counts", 4) == 3
    (quarantined,) = read_quarantine(Dataset(root).place)
    assert (quarantined.part, quarantined.attempts) == (2, 3)
    assert len(quarantined.workers) == 3
    assert quarantined.log.count(" start  0%") == 3
    assert quarantined.log.count(" attack  0%") == 3
    assert any("part 2 is quarantined" in notice for notice in notices)
    assert Dataset(root).verify().ok
    # The next invocation leaves it out; once cleared, it is tried again.
    notices.clear()
    assert len(on_workers(root, campaign, 2, on_notice=notices.append).receipts) == 5
    assert begun(tmp_path / "counts", 4) == 3
    assert any("left out: 1 quarantined parts (2)" in notice for notice in notices)


def test_a_quarantined_part_blocks_the_rounds_that_may_know_it(
    tmp_path: Path, in_process: Client
) -> None:
    campaign = no_op(MIXED)
    place = open_store(tmp_path / "s", campaign, small_images()).place
    write_quarantine(place, 1, reason="it killed", attempts=3)
    with pytest.raises(CampaignError, match=r"3 of 6 parts cannot .* without part 1,.*clear"):
        run(tmp_path / "s", campaign, in_process)
    assert stored(tmp_path / "s") == [0, 2]
    clear_quarantine(place, [1])
    finished = run(tmp_path / "s", campaign, in_process)
    assert finished.content_hash == run(tmp_path / "whole", campaign, in_process).content_hash


def test_transient_errors_are_tried_again_and_counted(tmp_path: Path, in_process: Client) -> None:
    counts, notices = tmp_path / "counts", list[str]()
    campaign = troubled(UNIFORM, counts, flaky=(0,), n_failures=3)
    pace = Pace(retry_s=(0, 0, 0))
    logs = tmp_path / "logs"
    run(tmp_path / "s", campaign, in_process, on_notice=notices.append, pace=pace, logs=logs)
    assert stored(tmp_path / "s") == [*range(6)]
    assert [begun(counts, run) for run in (0, 2)] == [4, 1]
    assert sum("tried again" in notice for notice in notices) == 3
    assert log_tail(logs, 0).count("ended by UnsettledError: no answer from the bucket") == 3
    assert "no log" in log_tail(logs, 77)
    # What is in the store is not computed again.
    (tmp_path / "s" / "receipts" / "part-000003.json").unlink()
    run(tmp_path / "s", campaign, in_process)
    assert [begun(counts, run) for run in range(0, 12, 2)] == [4, 1, 1, 2, 1, 1]


def test_a_transient_error_that_stays_fails_its_part_alone(
    tmp_path: Path, in_process: Client
) -> None:
    campaign = troubled(UNIFORM, tmp_path / "counts", flaky=(0,), n_failures=9)
    with pytest.raises(CampaignError, match=r"1 of 6 parts .*no answer.*\(tried 3 times\)"):
        run(tmp_path / "s", campaign, in_process, pace=Pace(retry_s=(0, 0)))
    assert stored(tmp_path / "s") == [1, 2, 3, 4, 5]


QUICK = Pace(look_s=0.0, poll_s=0.01)


def test_a_paused_campaign_starts_nothing_and_goes_on_when_it_is_resumed(
    tmp_path: Path, in_process: Client
) -> None:
    notices, n_stored = list[str](), list[int]()
    place = open_store(tmp_path, no_op(UNIFORM), small_images()).place

    def progress(done: float, _total: int, _note: str) -> None:
        if done >= 4 and not notices:
            write_control(place, "paused")

    def notice(text: str) -> None:
        notices.append(text)
        if text.startswith("paused"):
            n_stored.append(len(stored(tmp_path)))
            write_control(place, "running")

    how = {"on_progress": progress, "on_notice": notice, "pace": QUICK}
    run(tmp_path, no_op(UNIFORM), in_process, **how)
    assert stored(tmp_path) == [*range(6)]
    assert max(n_stored) < 6
    assert notices[-1] == "the campaign goes on"


def test_a_cancelled_campaign_says_how_to_go_on_and_loses_nothing(
    tmp_path: Path, in_process: Client
) -> None:
    place = open_store(tmp_path / "s", no_op(UNIFORM), small_images()).place

    def progress(done: float, _total: int, _note: str) -> None:
        if done >= 4:
            write_control(place, "cancelled")

    with pytest.raises(CampaignError, match=r"cancelled; \d of 6 parts .*campaign resume.*same"):
        run(tmp_path / "s", no_op(UNIFORM), in_process, on_progress=progress, pace=QUICK)
    write_control(place, "running")
    resumed = run(tmp_path / "s", no_op(UNIFORM), in_process)
    whole = run(tmp_path / "whole", no_op(UNIFORM), in_process)
    assert resumed.content_hash == whole.content_hash


def part_job(campaign: Campaign, root: Path) -> PartJob:
    """The first part."""
    images = small_images()
    planned = Plan(campaign, images).part(0)
    batch = batch_of(planned.specs, images.images)
    return PartJob(str(root / "s"), planned, batch, "f", "s", "cpu", 1, logs=str(root))


def test_a_part_that_was_published_before_its_worker_died_is_not_computed_again(
    tmp_path: Path,
) -> None:
    campaign = troubled(UNIFORM, tmp_path / "counts")
    open_store(tmp_path / "s", campaign, small_images())
    job = part_job(campaign, tmp_path)
    assert run_part(job) == run_part(job)
    assert begun(tmp_path / "counts", 0) == 1
    log = (tmp_path / "part-000000-here.log").read_text()
    assert [line.split()[2] for line in log.splitlines()] == [
        "start", "attack", "write", "done", "start", "in",
    ]  # fmt: skip
    assert "100%" in log
    assert "MiB" in log


def hold_the_interpreter(job: PartJob) -> None:
    """A part in which a library keeps every other thread from running, as a deadlock would."""
    worker_side.STUCK_SECONDS = 0.5
    with PartLog.of(job, None) as log:
        log.stage("attack")
        ctypes.PyDLL(None).usleep(2_000_000)
        log.stage("done")
        time.sleep(1)  # the watch starts anew with every line
        log.stage("over")
    with Path(str(job.logs), "later").open("w"):  # most likely under the log's number
        time.sleep(1)  # and ends with the log


def test_an_interpreter_that_is_stuck_leaves_its_stack_in_the_log(tmp_path: Path) -> None:
    job = part_job(no_op(UNIFORM), tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=hold_the_interpreter, args=(job,))
    process.start()
    process.join()
    assert process.exitcode == 0
    before, after = log_tail(tmp_path, 0).split(" done ")
    assert "Timeout (0:00:00.500000)!" in before
    assert "in hold_the_interpreter" in before
    assert "Timeout" in after  # one second without a line
    assert (tmp_path / "later").read_text() == ""


@pytest.mark.slow
def test_a_part_of_a_frozen_worker_is_made_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_workers, "SILENT_S", 10)
    there = tmp_path / "frozen"
    with dask_client(Workers(n_workers=1, device="cpu"), threads=1) as client:
        (before,) = client.run(os.getpid).values()
        assert client.submit(freeze_once, str(there), pure=False).result(timeout=120) != before
    assert int(there.read_text()) == before
    assert not psutil.pid_exists(before)


def freeze_once(there: str) -> int:
    """The worker's process; the first one that comes here stops first, and does not go on."""
    try:
        with Path(there).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return os.getpid()
    os.kill(os.getpid(), signal.SIGSTOP)
    return os.getpid()


def test_without_workers_the_campaign_waits_for_the_time_that_it_says(tmp_path: Path) -> None:
    notices: list[str] = []
    pace = replace(QUICK, patience_s=0.2)
    cluster = LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0")
    with cluster, Client(cluster, set_as_default=False) as client:  # noqa: SIM117
        with pytest.raises(CampaignError, match=r"no worker was there for 0 s; 0 of 6 parts"):
            run(tmp_path, no_op(UNIFORM), client, on_notice=notices.append, pace=pace)
    assert any("no worker is there" in notice for notice in notices)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UnsettledError("no answer"), "retry"),
        (StorageError("s3 refuses"), "retry"),
        (ConnectionResetError("gone"), "retry"),
        (CommClosedError("gone"), "retry"),
        (TimeoutError("slow"), "retry"),
        (CancelledError("lost"), "retry"),
        (KilledWorker("part-1", None, 2), "killed"),
        (RuntimeError("CUDA out of memory"), "failed"),
        (MemoryError(), "failed"),
        (StoreMismatchError("another store"), "failed"),
        (StoreFullError("full"), "end"),
        (CorruptPartError("other values"), "end"),
        (OSError(errno.ENOSPC, "no space"), "end"),
        (OSError(errno.EDQUOT, "over quota"), "end"),
        (TypeError("a mistake"), "end"),
    ],
)
def test_what_an_error_means(error: BaseException, expected: str) -> None:
    assert verdict(error) == expected


def test_a_part_that_does_not_fit_the_gpu_says_what_to_do() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore text.")
    assert verdict(error) == "failed"
    reason = reason_of(error)
    assert "Tried to allocate 9 GiB" in reason
    assert "start a new store with a smaller --batch" in reason
    assert "\n" not in reason
    assert reason_of(ValueError("x is 3")) == "ValueError: x is 3"
