"""Topping up: one dataset however it came to its size, and a clear end for every reason."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flows.generate import generate
from flows.presets import preset
from flows.recipe import Recipe
from flows.settings import to_json
from flows.top_up import (
    Job,
    Progress,
    StopRule,
    generate_planned,
    stop_reason,
    top_up,
    waits_for_quarantined,
    with_n_runs,
)
from recon_core.sampling import Phase, Sampling
from storage.errors import StoreMismatchError
from storage.pairs.dataset import Dataset
from storage.sources.load import load_images
from tasks.campaign.generate import Pace
from tasks.campaign.state import read_control, write_control, write_quarantine
from tasks.cluster.workers import Workers

pytestmark = pytest.mark.timeout(900)  # up to twenty clusters start and end, one after another

ONE_WORKER = Workers(n_workers=1, device="cpu")
SAMPLING = Sampling(
    images_per_run=4,
    phases=(Phase(n_runs=4), Phase(sampler="adaptive", n_runs=2)),
    runs_per_part=2,
    parts_per_round=2,
    lag=1,
)
"""Three parts, so that the second round is half full: it is completed before anything is added."""
ROUND = 4
WANTED = 0.9


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of 24 tiles of photographs, few enough to be covered within seconds."""
    root = tmp_path_factory.mktemp("tiles")
    tiles = load_images("photos", split="train")
    for split in ("train", "test"):
        for k, tile in enumerate(tiles.images[:: len(tiles) // 24][:24]):
            folder = root / split / ("a" if k % 2 else "b")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(tile.transpose(1, 2, 0)).save(folder / f"{k}.png")
    return f"folder:{root}"


@pytest.fixture(scope="module")
def recipe(images: str) -> Recipe:
    return replace(preset("smoke"), data=images, sampling=SAMPLING)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: None, recipe: Recipe
) -> tuple[Path, dict[str, Any]]:
    """A store that was topped up in one go, and what was said of it."""
    root = tmp_path_factory.mktemp("topped") / "job"
    return root, top(recipe, root, n_runs_at_most=80)


def top(recipe: Recipe | str, store: Path, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"coverage": WANTED, "workers": ONE_WORKER, **changes}
    return top_up(recipe, store, **options)


def content(store: Path) -> str:
    return Dataset(store / "pairs").content_hash


def planned_in(store: Path) -> int:
    """The runs that the recipe beside the store plans."""
    phases = json.loads((store / "recipe.json").read_bytes())["sampling"]["phases"]
    return sum(int(phase["n_runs"]) for phase in phases)


def test_the_store_grows_by_whole_rounds_until_enough_images_are_covered(finished) -> None:
    root, facts = finished
    dataset = Dataset(root / "pairs")
    covered = int((dataset.image_counts()[1] > 0).sum())
    assert facts["ending"] == "reached"
    assert (facts["coverage before"], facts["runs added"]) == (0, facts["runs"])
    assert facts["coverage"] == pytest.approx(covered / 24, abs=1e-6)
    assert facts["coverage"] >= WANTED
    assert facts["runs"] == dataset.n_runs == planned_in(root) > SAMPLING.n_runs
    assert facts["runs"] % ROUND == 0
    less: set[int] = set()  # one round less would not have been enough
    for receipt in dataset.receipts[:-2]:
        table = receipt.image_table()
        less |= set(table.image_ids[table.n_pairs > 0].tolist())
    assert len(less) < WANTED * 24
    assert dataset.verify().ok


@pytest.mark.slow
def test_the_dataset_is_that_of_a_campaign_planned_at_its_final_size(
    finished, recipe: Recipe, tmp_path: Path
) -> None:
    root, facts = finished
    at_once = replace(recipe, sampling=with_n_runs(SAMPLING, facts["runs"]))
    made = generate(at_once, tmp_path / "job", workers=Workers(n_workers=2, device="cpu"))
    assert made["dataset hash"] == content(root)


@pytest.fixture
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns of this process look at their control file all the time."""
    monkeypatch.setattr("tasks.campaign.generate.Pace", partial(Pace, look_s=0.02, poll_s=0.02))


@pytest.fixture
def cancelled_when_grown(tmp_path: Path) -> Iterator[Path]:
    """A job's folder whose campaign somebody cancels as soon as its last phase has grown."""
    store, done = tmp_path / "job", threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            if (store / "recipe.json").is_file() and planned_in(store) > SAMPLING.n_runs + ROUND:
                write_control(Dataset(store / "pairs").place, "cancelled")
                return

    thread = threading.Thread(target=watch)
    thread.start()
    yield store
    done.set()
    thread.join()


@pytest.mark.slow
def test_cancelled_on_the_way_it_goes_on_to_the_same_dataset(
    finished, recipe: Recipe, attentive: None, cancelled_when_grown: Path
) -> None:
    store, (root, facts) = cancelled_when_grown, finished
    cut = top(recipe, store, n_runs_at_most=80)
    assert cut["ending"] == "cancelled"
    assert cut["runs"] < planned_in(store) <= facts["runs"]
    assert "palimpsest campaign resume" in cut["why"]
    # Whoever cancelled it is not overruled by the next night.
    held = top(recipe, store, n_runs_at_most=80)
    assert (held["ending"], held["runs added"]) == ("cancelled", 0)
    assert read_control(Dataset(store / "pairs").place).state == "cancelled"
    kept = {receipt.part: receipt.group for receipt in Dataset(store / "pairs").receipts}
    write_control(Dataset(store / "pairs").place, "running")
    on = top(recipe, store, n_runs_at_most=80)
    assert (on["ending"], on["runs"]) == ("reached", facts["runs"])
    assert on["runs added"] == facts["runs"] - cut["runs"]
    assert content(store) == content(root)
    after = {receipt.part: receipt.group for receipt in Dataset(store / "pairs").receipts}
    assert kept.items() <= after.items()


def test_a_wish_that_comes_while_a_round_is_begun_is_not_overruled(
    finished, recipe: Recipe, tmp_path: Path
) -> None:
    root, facts = finished
    shutil.copytree(root, tmp_path / "job")
    place = Dataset(tmp_path / "job" / "pairs").place
    longer = with_n_runs(SAMPLING, facts["runs"] + ROUND)
    write_control(place, "cancelled")
    generate_planned(Job(recipe, tmp_path / "job", "train").planned(longer), ONE_WORKER)
    assert read_control(place).state == "cancelled"
    assert Dataset(place).n_runs == facts["runs"]


@pytest.mark.slow
def test_killed_on_the_way_it_goes_on_to_the_same_dataset(
    finished, recipe: Recipe, images: str, tmp_path: Path
) -> None:
    """SIGKILL of the whole process group while an extension is being made."""
    store, (root, facts) = tmp_path / "job", finished
    phases = json.dumps(to_json(recipe)["sampling"]["phases"])
    words = [
        *("top-up", "--preset", "smoke", "--data", images, "--store", str(store)),
        *("--coverage", str(WANTED), "--n-runs-at-most", "80", "--workers", "1"),
        *("--device", "cpu", "--set", f"sampling.phases={phases}"),
        *("--set", "sampling.parts_per_round=2", "--set", "sampling.lag=1"),
    ]
    killed = subprocess.Popen(
        [sys.executable, "-c", "from flows.cli.main import main; main()", *words],
        env={k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        | {"PREFECT_HOME": str(tmp_path / "prefect")},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 200
    while not (store / "recipe.json").is_file() or planned_in(store) <= SAMPLING.n_runs + ROUND:
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    there = Dataset(store / "pairs").n_runs
    assert there < planned_in(store) <= facts["runs"]
    on = top(recipe, store, n_runs_at_most=80)
    assert (on["ending"], on["runs added"]) == ("reached", facts["runs"] - there)
    assert content(store) == content(root)


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "n_runs", "n_most"), [(11, 8, 11), (None, 12, 12)])
def test_the_bound_ends_it_at_the_last_whole_round(
    prefect_server, recipe: Recipe, tmp_path: Path, bound: int | None, n_runs: int, n_most: int
) -> None:
    facts = top(recipe, tmp_path / "job", coverage=1.0, n_runs_at_most=bound)
    assert (facts["ending"], facts["runs"], facts["runs at most"]) == ("bound", n_runs, n_most)


@pytest.mark.slow
def test_an_attack_that_brings_nothing_new_ends_it(
    prefect_server: None, recipe: Recipe, tmp_path: Path
) -> None:
    hopeless = replace(recipe, experiment=replace(recipe.experiment, confident_ssim=1.0))
    facts = top(hopeless, tmp_path / "job", n_runs_at_most=80, stall_rounds=3)
    assert (facts["ending"], facts["coverage"], facts["runs"]) == ("stalled", 0, 3 * ROUND)
    # Patience is counted in the store, not in the process.
    more = top(hopeless, tmp_path / "job", n_runs_at_most=80, stall_rounds=4)
    assert (more["ending"], more["runs added"]) == ("stalled", ROUND)


def test_quarantined_parts_end_it_and_other_failures_fail(
    finished, recipe: Recipe, tmp_path: Path
) -> None:
    root, facts = finished
    store = tmp_path / "job"
    shutil.copytree(root, store)
    place = Dataset(store / "pairs").place
    for part in range(2, facts["runs"] // 2):
        (store / "pairs" / "receipts" / f"part-{part:06d}.json").unlink()
    write_quarantine(place, 2, reason="killed", attempts=3)
    ended = top(recipe, store, n_runs_at_most=80)
    assert ended["ending"] == "quarantined"
    # Part 3 is of the same round: it was made; the rounds after that have to know part 2.
    assert ended["runs added"] == 2
    job = Job(recipe, store, "train").as_far_as_stored()
    assert waits_for_quarantined(job)
    (store / "pairs" / "receipts" / "part-000001.json").unlink()
    assert not waits_for_quarantined(job)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"coverage": 0.0}, r"coverage=0\.0 is outside .*0\.85"),
        ({"coverage": 85}, r"coverage=85\.0 is outside"),
        ({"coverage": float("nan")}, "coverage=nan is outside"),
        ({"step": -4}, "step=-4 must be"),
        ({"step": 6}, "step=6 is not a multiple of the 4 runs of a round; use 8"),
        ({"stall_rounds": 0}, "stall_rounds=0 must be at least 1"),
        ({"n_runs_at_most": 4}, "n_runs_at_most=4 is below the 6 runs .* use 6 or more"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_written(
    prefect_server: None, recipe: Recipe, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        top(recipe, tmp_path / "job", **options)
    assert not (tmp_path / "job").exists()


def test_again_it_repeats_nothing_never_shrinks_and_refuses_other_settings(
    finished, recipe: Recipe
) -> None:
    root, facts = finished
    before = {path: path.stat().st_mtime_ns for path in (root / "pairs").rglob("*.json")}
    again = top(recipe, root, n_runs_at_most=80)
    assert (again["ending"], again["runs added"], again["runs"]) == ("reached", 0, facts["runs"])
    assert planned_in(root) == facts["runs"]
    assert {path: path.stat().st_mtime_ns for path in (root / "pairs").rglob("*.json")} == before
    with pytest.raises(ValueError, match="n_runs_at_most"):
        top(recipe, root, n_runs_at_most=SAMPLING.n_runs)
    with pytest.raises(StoreMismatchError, match="root_seed is 0 there, 9 here"):
        top(replace(recipe, seed=9), root, coverage=1.0, n_runs_at_most=80)
    coarse = replace(recipe, sampling=replace(SAMPLING, runs_per_part=1))
    with pytest.raises(StoreMismatchError, match="runs_per_part is 2 there, 1 here"):
        top(coarse, root, coverage=1.0, n_runs_at_most=80)


def test_steps_are_whole_rounds_and_the_bound_shortens_the_last() -> None:
    goal = StopRule(coverage=1.0, n_runs_at_most=30, step=8, stall_rounds=1)
    sizes, sampling = [], SAMPLING
    while (longer := goal.grown(sampling)) is not None:
        sampling = longer
        sizes.append(sampling.n_runs)
    assert sizes == [12, 20, 28]
    assert sampling.phases[0] == SAMPLING.phases[0]
    assert sampling.phases[1] == replace(SAMPLING.phases[1], n_runs=24)


def test_what_is_wanted_is_not_missed_by_rounding() -> None:
    goal = StopRule(coverage=0.55, n_runs_at_most=1, step=0, stall_rounds=1)
    assert 0.55 * 100 > 55  # which is why
    enough = Progress(n_images=100, n_covered=55)
    assert stop_reason(enough, goal, may_grow=True) == "reached"
    assert stop_reason(replace(enough, n_covered=54), goal, may_grow=True) is None
    assert stop_reason(replace(enough, n_covered=54), goal, may_grow=False) == "bound"


def test_the_command_leaves_a_paused_campaign_alone_and_its_exit_code_tells_so(
    palimpsest, finished
) -> None:
    root, facts = finished
    words = ["top-up", "--store", str(root), "--workers", "1", "--device", "cpu"]
    palimpsest.done(*words, "--coverage", str(WANTED))
    assert "coverage=1.5" in palimpsest.refused(*words, "--coverage", "1.5")
    place = Dataset(root / "pairs").place
    write_control(place, "paused")
    try:
        assert "paused" in palimpsest.refused(*words, "--coverage", "1", code=1)
        assert planned_in(root) == facts["runs"]
    finally:
        write_control(place, "running")
