"""`palimpsest campaign`, `dataset manifest` and `dataset regenerate`: typed, read, and obeyed."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flows.generate import generate
from flows.recipe import Recipe
from flows.regenerate import compare, describe, recipe_of, regenerate
from flows.settings import to_json
from storage.errors import SourceError, StorageError, StoreMismatchError
from storage.pairs.dataset import Dataset
from tasks.campaign.state import read_control, read_quarantine, write_quarantine
from tasks.campaign.status import find_recipe
from tasks.cluster.workers import Workers
from tests.storage.stores import store
from tests.tasks.campaign.test_state import campaign_store, set_times

ONE_WORKER = Workers(n_workers=1, device="cpu")


@pytest.fixture(scope="module")
def job(tmp_path_factory, prefect_server: None, tiny: Recipe) -> Path:
    """A job's folder with both stores, made by the real flow."""
    root = tmp_path_factory.mktemp("campaign") / "job"
    for split in ("train", "heldout"):
        generate(tiny, root, split, workers=ONE_WORKER)
    return root


def manifest_of(job: Path, file: Path, **changes: Any) -> Path:
    """The manifest of the train store of `job` in `file`, with changes."""
    manifest = describe(Dataset(job / "pairs"), find_recipe(str(job)), None)
    file.write_text(json.dumps(manifest | changes))
    return file


def test_status_tells_people_and_programs_the_same(palimpsest, job: Path, tmp_path: Path) -> None:
    dataset = Dataset(job / "pairs")
    code, said, complaint = palimpsest("campaign", "status", "--store", job)
    assert (code, complaint) == (0, "")
    for pattern in (
        r"state +complete\n",
        rf"runs +{dataset.n_runs} of {dataset.n_runs}\n",
        r"quarantined +none\n",
        rf"pairs +{dataset.n_pairs:,}, of which confident",
        r"images covered +\d+ of \d+ trained on of the split's \d",
        r"pairs per worker hour +[\d,]+ \(cpu, ",
        r"runs per hour +[\d,]+ in the last hour",
        r"last part +\d+ (s|min) ago",
        r"uniform",
    ):
        assert re.search(pattern, said), pattern
    file = tmp_path / "plots" / "coverage.png"
    code, said, _ = palimpsest("campaign", "status", "--store", job, "--json", "--plot", file)
    facts = json.loads(said)
    assert (code, facts["n_runs"], facts["n_planned"]) == (0, dataset.n_runs, dataset.n_runs)
    assert (facts["state"], facts["complete"], facts["quarantined"]) == ("running", True, [])
    assert facts["n_covered"] == (dataset.image_counts()[1] > 0).sum()
    assert facts["pairs_per_worker_hour"] > 0
    with Image.open(file) as picture:
        assert picture.size == (960, 720)


def test_status_of_an_unfinished_campaign_names_what_was_given_up(
    palimpsest, job: Path, tmp_path: Path
) -> None:
    shutil.copytree(job, tmp_path / "job")
    pairs = tmp_path / "job" / "pairs"
    (pairs / "receipts" / "part-000001.json").unlink()
    write_quarantine(Dataset(pairs).place, 1, reason="killed\nthrice", attempts=3, log="secret")
    code, said, complaint = palimpsest("campaign", "status", "--store", tmp_path / "job")
    assert code == 0
    assert re.search(r"runs +2 of 4\n", said)
    assert re.search(r"quarantined +1 part: 1\n", said)
    assert re.search(r"remaining +\d+ s at that rate", said)
    assert f"3 attempts: killed thrice; its log: {pairs}/quarantine/part-000001.json" in complaint
    assert "campaign retry" in complaint
    facts = json.loads(palimpsest("campaign", "status", "--store", pairs, "--json")[1])
    (row,) = facts["quarantined"]
    assert row["log_path"] == f"{pairs}/quarantine/part-000001.json"
    assert "log" not in row


def test_a_campaign_that_brings_nothing_for_long_is_called_quiet(
    palimpsest, tmp_path: Path
) -> None:
    root = tmp_path / "job" / "pairs"
    campaign_store(root, range(3))
    recipe = {"sampling": {"phases": [{}, {"n_runs": 6}]}}
    (tmp_path / "job" / "recipe.json").write_text(json.dumps(recipe))
    words = ["campaign", "status", "--store", tmp_path / "job"]
    assert re.search(r"state +running\n", palimpsest(*words)[1])
    set_times(root, {part: time.time() - 7200 for part in range(3)})
    code, said, complaint = palimpsest(*words)
    assert (code, complaint.count("no part for 2 h 0 min")) == (0, 1)
    assert re.search(r"state +quiet", said)
    palimpsest("campaign", "pause", "--store", tmp_path / "job")
    assert "no part for" not in palimpsest(*words)[2]


def test_pause_resume_and_cancel_write_what_a_campaign_reads(palimpsest, tmp_path: Path) -> None:
    place = store(tmp_path / "job" / "pairs", 1).place
    for command, state in (("pause", "paused"), ("cancel", "cancelled"), ("resume", "running")):
        said = palimpsest.done("campaign", command, "--store", tmp_path / "job")
        assert str(place) in said
        assert read_control(place).state == state
    palimpsest.done("dataset", "verify", "--store", tmp_path / "job")


def test_retry_takes_parts_out_of_quarantine(palimpsest, tmp_path: Path) -> None:
    place = store(tmp_path, 1).place
    assert "nothing is in quarantine" in palimpsest("campaign", "retry", "--store", tmp_path)[1]
    for part in (4, 7, 9):
        write_quarantine(place, part, reason="killed", attempts=3)
    complaint = palimpsest.refused("campaign", "retry", "--store", tmp_path, "--part", 5)
    assert "--part 5 is not in quarantine; there are 4, 7, 9" in complaint
    assert "part 7" in palimpsest.done("campaign", "retry", "--store", tmp_path, "--part", 7)
    assert [q.part for q in read_quarantine(place)] == [4, 9]
    assert "parts 4, 9" in palimpsest("campaign", "retry", "--store", tmp_path)[1]
    assert read_quarantine(place) == []


def test_a_manifest_makes_the_same_dataset_again(palimpsest, job: Path, tmp_path: Path) -> None:
    file = tmp_path / "m" / "manifest.json"
    code, said, _ = palimpsest("dataset", "manifest", "--store", job, "--out", file)
    dataset = Dataset(job / "pairs")
    assert (code, dataset.content_hash in said) == (0, True)
    manifest = json.loads(file.read_bytes())
    assert manifest["n_runs"] == dataset.n_runs
    assert manifest["source_hash"] == dataset.receipts[0].source_hash
    assert (manifest["threads"], manifest["devices"]) == ([1], ["cpu"])
    words = ["--workers", 2, "--device", "cpu", "--store", tmp_path / "again"]
    code, said, complaint = palimpsest("dataset", "regenerate", file, *words)
    assert (code, "differ" in complaint) == (0, False)
    assert f"{tmp_path / 'again'} is the dataset of {file}" in said
    again = Dataset(tmp_path / "again" / "pairs")
    assert again.content_hash == dataset.content_hash
    assert {r.group for r in again.receipts}.isdisjoint(r.group for r in dataset.receipts)
    # A second time it only compares.
    palimpsest.done("dataset", "regenerate", file, *words)


def test_what_differs_is_said_with_the_machine_it_was_made_on(
    palimpsest, job: Path, tmp_path: Path
) -> None:
    dataset = Dataset(job / "pairs")
    true = describe(dataset, find_recipe(str(job)), None)
    position = true["columns"].index("pairs/reconstruction")
    hashes = true["parts"]["1"].split()
    hashes[position] = "0" * 16
    file = manifest_of(
        job,
        tmp_path / "m.json",
        content_hash="0" * 64,
        devices=["NVIDIA H200"],
        code_versions=["0.0.9+abc"],
        torch_versions=["1.0"],
        parts=true["parts"] | {"1": " ".join(hashes)},
    )
    words = ["--workers", 1, "--device", "cpu", "--store", tmp_path / "again"]
    code, said, complaint = palimpsest("dataset", "regenerate", file, *words)
    assert code == 1
    assert "is not the dataset" in said
    assert "of 2 parts, 1 differ:" in complaint
    assert "part 1: pairs/reconstruction\n" in complaint
    assert re.search(r"equal in every part: .*targets/image,", complaint)
    assert "devices: NVIDIA H200 there, cpu here" in complaint
    assert "code versions: 0.0.9+abc there" in complaint
    assert "torch versions: 1.0 there" in complaint
    assert complaint.startswith("code was 0.0.9+abc and is ")  # said before anything runs
    assert "torch was 1.0 and is " in complaint
    assert "threads" not in complaint


def test_other_images_are_refused_before_anything_runs(
    palimpsest, job: Path, tmp_path: Path
) -> None:
    file = manifest_of(job, tmp_path / "m.json")
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(12):
            Image.new("RGB", (32, 32), (k, 9, 9)).save(tmp_path / "images" / name / f"{k}.png")
    data = f"folder:{tmp_path / 'images'}"
    with pytest.raises(SourceError, match=r"are not those of .*expected [0-9a-f]{12} with"):
        regenerate(file, tmp_path / "new", data)
    assert not (tmp_path / "new").exists()
    assert "--data" in palimpsest.refused(
        "dataset", "regenerate", file, "--store", tmp_path / "new", "--data", data
    )


def test_a_dataset_is_not_compared_with_itself(job: Path, tmp_path: Path) -> None:
    file = manifest_of(job, tmp_path / "m.json")
    shutil.copytree(job, tmp_path / "copy")
    for root in (job, tmp_path / "copy"):
        with pytest.raises(StoreMismatchError, match="with themselves"):
            regenerate(file, root)


def test_what_is_no_manifest_is_refused(palimpsest, tmp_path: Path) -> None:
    words = ["--store", tmp_path / "new"]
    lacking = b'{"schema": "palimpsest-manifest/1", "recipe": {}}'
    for content in (None, b"{", b'["schema"]', b'{"schema": "other/2"}', lacking):
        if content is not None:
            (tmp_path / "m.json").write_bytes(content)
        complaint = palimpsest.refused("dataset", "regenerate", tmp_path / "m.json", *words)
        assert str(tmp_path / "m.json") in complaint
        assert complaint.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_the_recipe_of_a_store_is_what_made_it_and_not_what_was_typed_last(
    job: Path, tiny: Recipe
) -> None:
    other = replace(tiny, seed=77, threads=2, encoding="uint8", pairs_at="s3://far/away")
    base = to_json(other)
    for split, name in (("train", "pairs"), ("heldout", "heldout")):
        dataset = Dataset(job / name)
        recipe = recipe_of(dataset, base)
        assert recipe.campaign(split) == tiny.campaign(split)
        assert recipe.pairs_at is None
        assert recipe.curation == other.curation


def test_unfinished_stores_and_lost_images_are_not_described(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no campaign"):
        describe(store(tmp_path / "a", 1), None, "photos")
    with pytest.raises(StorageError, match="no part"):
        describe(campaign_store(tmp_path / "b", range(0)), None, "photos")
    with pytest.raises(StorageError, match="4 runs, which do not reach its last phase"):
        describe(campaign_store(tmp_path / "c", range(2)), None, "photos")
    campaign_store(tmp_path / "d", range(2))
    with pytest.raises(StorageError, match="not complete yet: part 2 is missing"):
        describe(campaign_store(tmp_path / "d", range(3, 5)), None, "photos")
    with pytest.raises(ValueError, match="--data folder:cifar10"):
        describe(campaign_store(tmp_path / "e", range(3)), None, None)


def test_missing_and_additional_parts_are_listed(tmp_path: Path) -> None:
    manifest = describe(campaign_store(tmp_path / "a", range(5)), None, "photos")
    found = compare(manifest, campaign_store(tmp_path / "b", range(3, 7)))
    assert "3 parts missing: 0, 1, 2" in found
    assert "2 parts too many: 5, 6" in found
    assert not any(sentence.startswith("part 3") for sentence in found)
    assert "the kind of processor" in found[-1]
