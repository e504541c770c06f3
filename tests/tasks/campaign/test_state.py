"""What a store says of its campaign: control and quarantine files, counts, rates, coverage."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recon_core.balance import gini
from recon_core.experiments import KKT
from recon_core.sampling import Phase, Sampling
from storage.errors import StorageError
from storage.object_store import Location
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from tasks.campaign.plan import Campaign
from tasks.campaign.state import (
    LOG_TAIL_CHARS,
    Control,
    age_text,
    clear_quarantine,
    quarantine_path,
    read_control,
    read_quarantine,
    resume_if_stopped,
    write_control,
    write_quarantine,
)
from tasks.campaign.status import (
    campaign_status,
    coverage_curve,
    coverage_picture,
    find_recipe,
    last_phase_of,
    runs_per_hour,
    stored_sampling,
)
from tests.storage.s3_server import S3Server
from tests.storage.stores import columns, provenance, store
from tests.tasks.troubled_runs import small_images

N_IMAGES = 40
CAMPAIGN = Campaign(
    experiment=KKT(),
    sampling=Sampling(
        images_per_run=4,
        phases=(Phase(n_runs=4), Phase(sampler="least_seen", n_runs=6, pool_size=8)),
        runs_per_part=2,
        parts_per_round=1,
        lag=1,
    ),
)


def campaign_store(root: Location, parts: range, *, device: str = "cpu") -> Dataset:
    """A store with a real campaign's manifest and made-up parts of two runs each."""
    create_or_open(root, CAMPAIGN.manifest(small_images()))
    for part in parts:
        said = provenance(seconds=10.0, device=device)
        write_part(root, part, columns(seed=part), provenance=said)
    return Dataset(root)


def set_times(root: Path, seconds: dict[int, float]) -> None:
    """Says when the receipts of the parts were written."""
    for part, at in seconds.items():
        os.utime(root / "receipts" / f"part-{part:06d}.json", (at, at))


# Control


def test_a_campaign_does_as_it_is_asked_and_runs_again_when_it_is_started(tmp_path: Path) -> None:
    place = store(tmp_path, 1).place
    assert read_control(place) == Control("running", 0.0)
    assert resume_if_stopped(place) is None
    assert not (tmp_path / "control.json").exists()
    for state in ("running", "paused", "cancelled"):
        written = write_control(place, state)
        assert read_control(place) == written
        assert json.loads((tmp_path / "control.json").read_bytes()) == asdict(written)
        assert written.state == state
        assert written.since > 1e9
        if state != "running":
            assert f"was {state} 0 s ago" in (resume_if_stopped(place) or "")
        assert read_control(place).state == "running"
        assert resume_if_stopped(place) is None


def test_control_and_quarantine_work_in_a_bucket_and_are_no_part_of_the_data(s3: S3Server) -> None:
    dataset = campaign_store(s3.location("c"), range(2))
    place, content = dataset.place, dataset.content_hash
    assert read_control(place).state == "running"
    write_control(place, "paused")
    assert read_control(place).state == "paused"
    assert resume_if_stopped(place)
    assert read_quarantine(place) == []
    write_quarantine(place, 4, reason="killed", attempts=3, log="end", workers=["w"])
    assert [q.part for q in read_quarantine(place)] == [4]
    status = campaign_status(Dataset(s3.location("c")), n_runs_last_phase=6)
    assert (status.n_runs, status.n_planned, len(status.quarantined)) == (4, 10, 1)
    assert status.log_of(status.quarantined[0]) == s3.location("c/quarantine/part-000004.json")
    assert status.last_part_age_s is not None
    assert status.last_part_age_s < 60
    found = dataset.verify()
    assert (found.ok, found.orphans) == (True, ())
    assert Dataset(s3.location("c")).content_hash == content
    clear_quarantine(place, [4])
    assert read_quarantine(place) == []


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"state": "paused"}', b'{"since": 1}', b'{"state": "x", "since": 1}']
)
def test_a_damaged_control_file_is_named_and_can_be_written_again(
    tmp_path: Path, content: bytes
) -> None:
    place = store(tmp_path, 1).place
    place.replace("control.json", content)
    with pytest.raises(StorageError, match=r"control\.json (is|has) .*campaign resume"):
        read_control(place)
    with pytest.raises(ValueError, match="'stopped' is none of running, paused, cancelled"):
        write_control(place, "stopped")  # type: ignore[arg-type]
    write_control(place, "running")
    assert read_control(place).state == "running"


# Quarantine


def test_parts_that_were_given_up_are_kept_with_the_end_of_their_log(tmp_path: Path) -> None:
    place = store(tmp_path, 1).place
    write_quarantine(place, 12, reason="SIGKILL", attempts=3, log="x" * 50_000 + "last line")
    write_quarantine(place, 3, reason="out of memory", attempts=1, workers=("a", "b"))
    (tmp_path / "quarantine" / ".tmp-0123").write_bytes(b"of a killed writer")
    third, twelfth = read_quarantine(place)
    assert (third.part, third.workers, third.log) == (3, ("a", "b"), "")
    assert (twelfth.part, twelfth.reason, twelfth.attempts) == (12, "SIGKILL", 3)
    assert twelfth.log.endswith("last line")
    assert len(twelfth.log) == LOG_TAIL_CHARS
    assert (tmp_path / quarantine_path(12)).is_file()
    assert Dataset(tmp_path).verify().ok
    clear_quarantine(place, [12, 99])
    assert read_quarantine(place) == [third]
    place.replace(quarantine_path(12), b"{}")
    with pytest.raises(StorageError, match=r"part-000012\.json .*remove it"):
        read_quarantine(place)


# Status


def test_status_counts_what_the_arrays_say(tmp_path: Path) -> None:
    dataset = campaign_store(tmp_path, range(3))
    write_quarantine(dataset.place, 1, reason="made after all", attempts=3)
    write_quarantine(dataset.place, 4, reason="killed", attempts=3)
    status = campaign_status(dataset, n_runs_last_phase=6)
    ids, counts = dataset.image_counts()
    assert (status.n_runs, status.n_planned, status.n_parts, status.n_parts_planned) == (
        6,
        10,
        3,
        5,
    )
    assert (status.n_images, status.n_trained) == (N_IMAGES, len(ids))
    assert status.n_covered == (counts > 0).sum()
    assert status.n_confident == dataset.column("pairs/confident").sum()
    assert status.n_pairs == 42
    assert [q.part for q in status.quarantined] == [4]
    assert (status.outcomes["ok"], status.n_failed) == (6, 0)
    (cpu,) = status.devices
    assert (cpu.device, cpu.n_runs) == ("cpu", 6)
    assert cpu.pairs_per_hour == pytest.approx(42 * 3600 / 30, rel=0.01)
    first, second = status.phases
    assert (first.sampler, first.n_runs, first.n_planned) == ("uniform", 4, 4)
    assert (second.sampler, second.n_runs, second.n_planned) == ("least_seen", 2, 6)
    assert first.n_confident + second.n_confident == status.n_confident
    assert first.n_covered == first.n_new
    assert first.n_new + second.n_new == status.n_covered
    assert not status.is_complete


def test_without_a_recipe_the_plan_is_unknown_and_without_parts_so_are_rates(
    tmp_path: Path,
) -> None:
    status = campaign_status(campaign_store(tmp_path / "a", range(3)))
    assert (status.n_planned, status.n_parts_planned, status.remaining_s) == (None, None, None)
    assert [phase.n_planned for phase in status.phases] == [4, None]
    empty = campaign_status(campaign_store(tmp_path / "b", range(0)), n_runs_last_phase=6)
    assert (empty.n_runs, empty.n_planned, empty.runs_per_hour) == (0, 10, None)
    assert (empty.remaining_s, empty.last_part_age_s, empty.gini) == (None, None, 0.0)
    foreign = campaign_status(store(tmp_path / "c", 2))
    assert (foreign.n_runs, foreign.phases, foreign.n_images) == (4, (), None)


def test_a_store_that_has_more_runs_than_the_recipe_plans_is_complete(tmp_path: Path) -> None:
    status = campaign_status(campaign_store(tmp_path, range(6)), n_runs_last_phase=2)
    assert (status.n_runs, status.n_planned) == (12, 12)
    assert status.is_complete
    assert status.remaining_s == 0
    assert sum(phase.n_runs for phase in status.phases) == 12


def test_the_rate_is_of_the_last_hour_of_receipts_and_gives_what_is_left(tmp_path: Path) -> None:
    dataset = campaign_store(tmp_path, range(4))
    now = 1_700_000_000.0
    # A young campaign: four parts of two runs, 10 s each, from one worker.
    set_times(tmp_path, {part: now + 10 * part for part in range(4)})
    status = campaign_status(dataset, n_runs_last_phase=6, now=now + 50)
    assert status.runs_per_hour == pytest.approx(8 / 40 * 3600)
    assert status.remaining_s == pytest.approx(2 / 8 * 40)
    assert status.last_part_age_s == pytest.approx(20)
    # An old one: only the parts of the last hour count.
    set_times(tmp_path, {0: now - 90_000, 1: now - 3601, 2: now - 1800, 3: now})
    status = campaign_status(dataset, n_runs_last_phase=6, now=now - 5)
    assert status.runs_per_hour == pytest.approx(4)
    assert status.last_part_age_s == 0
    assert runs_per_hour(dataset.receipts, {}) is None


def test_the_length_of_the_last_phase_comes_from_the_recipe_of_the_job(tmp_path: Path) -> None:
    dataset = campaign_store(tmp_path / "job" / "pairs", range(1))
    assert find_recipe(str(tmp_path / "job")) is None
    recipe = {"sampling": {"phases": [{}, {"n_runs": 6}]}, "heldout": {"phases": [{"n_runs": 2}]}}
    (tmp_path / "job" / "recipe.json").write_text(json.dumps(recipe))
    for named in ("job", "job/pairs", "job/heldout"):
        assert find_recipe(str(tmp_path / named)) == recipe
    assert find_recipe("s3://bucket/job/pairs") is None
    assert last_phase_of(recipe, "train") == 6
    assert last_phase_of(recipe, "heldout") == 2
    assert last_phase_of(None, "train") is None
    assert stored_sampling(dataset.manifest, 6) == CAMPAIGN.sampling


def test_coverage_and_balance_are_those_of_the_runs_so_far(tmp_path: Path) -> None:
    dataset = campaign_store(tmp_path, range(5))
    curve = coverage_curve(dataset.receipts)
    assert curve.n_runs == (2, 4, 6, 8, 10)
    per_image = np.zeros(N_IMAGES, int)
    trained: set[int] = set()
    for k, part in enumerate(range(5)):
        read = dataset.read(part, ["targets/image_id", "pairs/target_row", "pairs/confident"])
        rows = read["pairs/target_row"][read["pairs/confident"]]
        np.add.at(per_image, read["targets/image_id"][rows], 1)
        trained |= set(read["targets/image_id"].tolist())
        covered = per_image[per_image > 0]
        assert (curve.n_trained[k], curve.n_covered[k]) == (len(trained), len(covered))
        assert curve.gini[k] == pytest.approx(gini(covered.astype(float)))
        assert curve.pairs_per_run[k] == pytest.approx(len(rows) / 2)
    thin = coverage_curve(dataset.receipts, n_points=2, also=[2])
    assert thin.n_runs == (2, 6, 10)
    assert thin.n_covered == tuple(curve.n_covered[k] for k in (0, 2, 4))
    np.testing.assert_allclose(np.dot(thin.pairs_per_run, [2, 4, 4]), per_image.sum())
    assert coverage_curve(()).n_runs == ()


def test_the_plot_is_a_picture_of_one_part_as_of_many(tmp_path: Path) -> None:
    dataset = campaign_store(tmp_path, range(3))
    status = campaign_status(dataset, n_runs_last_phase=6)
    for receipts in (dataset.receipts[:1], dataset.receipts):
        picture = Image.open(io.BytesIO(coverage_picture(status, receipts, "s")))
        assert (picture.format, picture.size) == ("PNG", (960, 720))
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 20
    with pytest.raises(ValueError, match="no part yet"):
        coverage_picture(status, (), "s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (45.2, "45 s"),
        (720, "12 min"),
        (12_000, "3 h 20 min"),
        (187_200, "2 days 4 h"),
    ],
)
def test_times_read_as_people_say_them(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
