"""`palimpsest dataset`: what a user types, reads and gets; exit codes; errors in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image

from flows.cli.options import size_text, store_location
from storage.pairs.dataset import Dataset
from tests.storage.s3_server import S3Server
from tests.storage.stores import store, write


@pytest.fixture
def palimpsest(palimpsest):
    """Runs `palimpsest dataset words...`."""
    return palimpsest.of("dataset")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def orphan(root: Path, *, hours: float) -> Path:
    """A group that a killed writer left so long ago."""
    write(root, 9)
    (root / "receipts" / "part-000009.json").unlink()
    group = next((root / "parts").glob("part-000009-*"))
    for path in (group, *group.rglob("*")):
        os.utime(path, (time.time() - hours * 3600,) * 2)
    return group


@pytest.mark.parametrize(
    "words",
    ["info", "verify", "vacuum", "export --format webdataset --out o", "show", "status", "pause",
     "resume", "cancel", "retry"],
)  # fmt: skip
def test_no_store_is_one_line_and_a_fix(palimpsest, tmp_path: Path, words: str) -> None:
    command = palimpsest
    if words in ("status", "pause", "resume", "cancel", "retry"):
        command = type(palimpsest)(palimpsest.run, "campaign")
    complaint = command.refused(*words.split(), "--store", tmp_path / "nowhere", code=1)
    assert complaint.startswith(f"error: {tmp_path / 'nowhere'} is not a store")
    assert "generate one first" in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "nowhere").exists()


def test_a_store_is_named_by_its_folder_its_job_or_its_bucket(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    assert store_location(str(tmp_path / "job"), "train") == tmp_path / "job"
    store(tmp_path / "job" / "pairs", 1)
    assert store_location(str(tmp_path / "job"), "train") == tmp_path / "job" / "pairs"
    assert store_location(str(tmp_path / "job"), "heldout") == tmp_path / "job" / "heldout"
    assert store_location(str(tmp_path / "job/pairs"), "heldout") == tmp_path / "job" / "pairs"
    assert store_location("s3://bucket/a//b", "train") == "s3://bucket/a//b"
    (tmp_path / "job" / "recipe.json").write_text('{"pairs_at": "s3://bucket/far"}')
    assert store_location(str(tmp_path / "job"), "heldout") == "s3://bucket/far/heldout"


def test_info_says_what_is_there_to_people_and_to_programs(palimpsest, tmp_path: Path) -> None:
    dataset = store(tmp_path / "job" / "pairs", 3, n_pairs=40)
    said = palimpsest.done("info", "--store", tmp_path / "job")
    assert re.search(r"pairs +240\n", said)
    assert re.search(r"iteration.*pairs.*confident.*mean SSIM", said)
    assert dataset.content_hash in said
    code, said, _ = palimpsest("info", "--store", tmp_path / "job", "--json")
    facts = json.loads(said)
    assert (code, facts["pairs"], facts["dataset_hash"]) == (0, 240, dataset.content_hash)
    assert [row["iteration"] for row in facts["iterations"]] == [100, 500, 2000]
    assert sum(row["n_pairs"] for row in facts["iterations"]) == 240
    confident = int(dataset.column("pairs/confident").sum())
    assert facts["confident_pairs"] == confident
    _ids, counts = dataset.image_counts()
    assert facts["images_trained_on"] == len(counts)
    assert facts["images_with_a_confident_pair"] == (counts > 0).sum()
    assert 0 < facts["gini_of_confident_pairs"] < 1
    shutil.rmtree(tmp_path / "job" / "pairs" / "parts")  # which --quick does not read
    code, said, _ = palimpsest("info", "--store", tmp_path / "job", "--quick", "--json")
    assert (code, json.loads(said)["iterations"]) == (0, None)
    assert palimpsest("info", "--store", tmp_path / "job")[0] == 1


def test_verify_names_what_is_wrong_and_what_to_do(palimpsest, tmp_path: Path) -> None:
    words = ["verify", "--store", tmp_path / "s"]
    store(tmp_path / "s", 4)
    said = palimpsest.done(*words)
    assert said == "4 parts checked: 0 problems, 0 orphans, 0 gaps\n"
    assert json.loads(palimpsest.done(*words, "--json"))["ok"] is True
    flip(next((tmp_path / "s" / "parts").glob("part-000003*/pairs/ssim_best/c.*")))
    (tmp_path / "s" / "receipts" / "part-000001.json").unlink()
    code, said, complaint = palimpsest(*words)
    assert code == 1
    assert re.search(r"3 parts checked: \d+ problems?, 1 orphan, 1 gap\n", said)
    assert "ssim_best" in complaint
    assert re.search(r"orphans.*: parts/part-000001-.*dataset vacuum", complaint)
    assert re.search(r"gaps.*: 1; the generate", complaint)
    code, said, _ = palimpsest(*words, "--json")
    report = json.loads(said)
    assert (code, report["ok"], report["gaps"]) == (1, False, [1])


def test_vacuum_says_what_it_would_do_and_then_does_it(palimpsest, tmp_path: Path) -> None:
    root = tmp_path / "s"
    content_hash = store(root, 2).content_hash
    old = orphan(root, hours=30)
    n_bytes = sum(path.stat().st_size for path in old.rglob("*") if path.is_file())
    write(root, 5)
    (root / "receipts" / "part-000005.json").unlink()
    young = next((root / "parts").glob("part-000005-*"))
    said = palimpsest.done("vacuum", "--store", root, "--dry-run")
    assert said.splitlines() == [
        f"  parts/{old.name}  {size_text(n_bytes)}",
        f"1 orphan would be removed, {size_text(n_bytes)}",
    ]
    assert old.is_dir()
    code, said, _ = palimpsest("vacuum", "--store", root)
    assert (code, said.splitlines()[-1]) == (0, f"1 orphan removed, {size_text(n_bytes)}")
    assert not old.exists()
    assert young.is_dir()
    palimpsest.done("vacuum", "--store", root, "--older-than", 0)
    assert not young.exists()
    assert Dataset(root).content_hash == content_hash
    assert palimpsest("vacuum", "--store", root)[1] == "0 orphans removed, 0 bytes\n"


def test_vacuum_refuses_bad_hours_and_unreadable_receipts(palimpsest, tmp_path: Path) -> None:
    store(tmp_path / "s", 1)
    for hours in ("-1", "nan"):
        assert "--older-than" in palimpsest.refused(
            "vacuum", "--store", tmp_path / "s", "--older-than", hours
        )
    (tmp_path / "s" / "receipts" / "part-000000.json").write_text("{}")
    assert "part-000000.json" in palimpsest.refused(
        "vacuum", "--store", tmp_path / "s", "--older-than", 0, code=1
    )
    assert len(list((tmp_path / "s" / "parts").iterdir())) == 1


def test_merge_of_two_jobs(palimpsest, tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / ("a" if part else "b") / "pairs", part)
    words = ["merge", tmp_path / "a", tmp_path / "b", "--into", tmp_path / "m"]
    said = palimpsest.done(*words)
    assert re.search(r"parts copied +3\n", said)
    assert store(tmp_path / "whole", 3).content_hash in said
    assert re.search(r"parts copied +0\n(.*\n)*.*there before +3\n", palimpsest(*words)[1])


@pytest.mark.parametrize("format", ["webdataset", "parquet", "huggingface"])
def test_export_makes_a_folder_and_says_what_is_in_it(
    palimpsest, tmp_path: Path, format: str
) -> None:
    dataset = store(tmp_path / "s", 2, n_pairs=30)
    words = ["export", "--store", tmp_path / "s", "--format", format, "--out", tmp_path / "o"]
    said = palimpsest.done(*words, "--all", "--rows-per-file", 50)
    assert re.search(r"pairs +120\n", said)
    assert re.search(r"files +3\n", said)
    assert str(tmp_path / "o") in said
    assert dataset.content_hash in said
    assert "--fresh" in palimpsest.refused(*words)
    code, said, _ = palimpsest(*words, "--fresh", "--limit", 10, "--min-iteration", 500)
    assert (code, bool(re.search(r"pairs +10\n", said))) == (0, True)
    description = json.loads((tmp_path / "o" / "export.json").read_bytes())
    assert description["selection"] == {"confident_only": True, "min_iteration": 500, "limit": 10}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "csv"], "csv"),
        (["--format", "parquet", "--limit", "0"], "limit=0"),
        (["--format", "parquet", "--min-iteration", "99999"], "no pair of"),
        ([], "--format"),
    ],
)
def test_a_bad_export_is_bad_usage(palimpsest, tmp_path: Path, words: list[str], said: str) -> None:
    store(tmp_path / "s", 1)
    out = tmp_path / "o"
    assert said in palimpsest.refused("export", "--store", tmp_path / "s", "--out", out, *words)
    assert not out.exists()


def test_show_writes_a_picture_and_its_path(palimpsest, tmp_path: Path) -> None:
    store(tmp_path / "s", 2)
    target = tmp_path / "new" / "sheet.png"
    said = palimpsest.done("show", "--store", tmp_path / "s", "--out", target, "--n", 3)
    assert said.splitlines()[-1] == str(target)
    assert "3 images, drawn at random (seed 0)" in said
    with Image.open(target) as image:
        assert image.width > 500
    first = target.read_bytes()
    palimpsest.done("show", "--store", tmp_path / "s", "--out", target, "--n", 3)
    assert target.read_bytes() == first


def test_show_of_what_is_not_there(palimpsest, tmp_path: Path) -> None:
    store(tmp_path / "s", 1)
    words = ["show", "--store", tmp_path / "s", "--out", tmp_path / "sheet.png"]
    assert "--image-id 99" in palimpsest.refused(*words, "--image-id", 99)
    (tmp_path / "file").write_text("")
    assert "choose another --out" in palimpsest.refused(
        *words[:3], "--out", tmp_path / "file" / "sheet.png", code=1
    )


def test_a_bucket_is_used_like_a_folder(palimpsest, tmp_path: Path, s3: S3Server) -> None:
    dataset, bucket = store(tmp_path / "s", 2), s3.location("a/pairs")
    palimpsest.done("merge", tmp_path / "s", "--into", bucket)
    code, said, _ = palimpsest("info", "--store", bucket, "--json")
    facts = json.loads(said)
    assert (code, facts["store"], facts["dataset_hash"]) == (0, bucket, dataset.content_hash)
    palimpsest.done("verify", "--store", bucket)
    out = tmp_path / "o"
    words = ["export", "--store", bucket, "--format", "webdataset", "--out", out]
    palimpsest.done(*words)
    palimpsest.done("show", "--store", bucket, "--out", tmp_path / "a.png", "--n", 2)
    assert palimpsest("vacuum", "--store", bucket)[1] == "0 orphans removed, 0 bytes\n"
    assert "is not a store" in palimpsest.refused("info", "--store", s3.location("nothing"), code=1)
    code, _, complaint = palimpsest(*words[:-1], "s3://bucket/exports")
    assert (code, "upload" in complaint, Path("s3:").exists()) == (2, True, False)
    assert "s3://bucket/prefix" in palimpsest.refused("info", "--store", "gs://bucket/pairs")
