"""No damage goes unnoticed: verify names it with the fix, and no reader returns wrong values."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from storage.errors import CorruptPartError, StorageError, StoreMismatchError
from storage.object_store import open_place
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import COLUMNS, ENCODINGS, Encoding
from storage.pairs.parts import write_part
from storage.pairs.verify import vacuum, verify_store
from tests.storage.damage import Bytes, Known, damage, flipped, reseal, reseal_store, truncated
from tests.storage.s3_server import S3Server
from tests.storage.stores import MANIFEST, columns, provenance, store


@pytest.fixture(scope="module", params=ENCODINGS)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(tmp_path_factory.mktemp("known") / "s", cast(Encoding, request.param))


@pytest.mark.parametrize(
    ("harm", "n"),
    [(flipped, 150), (truncated, 100), pytest.param(flipped, 1000, marks=pytest.mark.slow)],
    ids=["flips", "truncations", "many flips"],
)
def test_damage_to_any_file_is_found_and_never_returned(
    known: Known, harm: Callable[[bytes, random.Random], bytes], n: int
):
    """A third of all in each encoding, half of them in shards and half in any file."""
    names = known.bytes.names()
    shards = [name for name in names if known.column_of(name)]
    assert len(names) - len(shards) == len(COLUMNS) + 4
    each = -(-n // len(ENCODINGS) // 2)
    tally = damage(known, names, harm, each) + damage(known, shards, harm, each)
    assert tally["refused"] > n / 6


@pytest.mark.slow
def test_damage_on_s3_is_found_and_never_returned(s3: S3Server):
    known = Known(s3.location("s"), "float16")
    shards = [name for name in known.bytes.names() if known.column_of(name)]
    metadata = sorted(set(known.bytes.names()) - set(shards))
    assert damage(known, shards, flipped, 4)["refused"]
    assert damage(known, metadata, flipped, 2) == {"metadata": 2}
    assert damage(known, shards, truncated, 4)["refused"] > 1


def test_flips_in_receipts(tmp_path: Path):
    """Either the store is refused by name, or nothing that is read from it has changed."""
    intact = store(tmp_path / "s", 2)
    files = Bytes(tmp_path / "s")
    rng = random.Random(0)
    receipts = files.names("receipts")
    for number in range(250):
        name = rng.choice(receipts)
        harm = truncated if number < 50 else flipped
        with files.damaged(name, harm(files.get(name), rng)):
            try:
                dataset = Dataset(tmp_path / "s")
            except CorruptPartError:
                problems = verify_store(tmp_path / "s").problems
                assert any(name in problem for problem in problems)
                with pytest.raises(CorruptPartError):
                    vacuum(tmp_path / "s", older_than_s=0)
            else:
                assert dataset.receipts == intact.receipts
    assert intact.verify().ok


# what is gone, edited, renamed or foreign


@pytest.fixture
def three(tmp_path: Path) -> Dataset:
    return store(tmp_path / "s", 3)


def problem(dataset: Dataset, *words: str) -> str:
    """The one problem that verify finds; it has all the words."""
    report = dataset.verify()
    assert len(report.problems) == 1, report.problems
    assert not report.ok
    for word in words:
        assert word in report.problems[0], report.problems[0]
    assert "\n" not in report.problems[0]
    return report.problems[0]


@pytest.mark.parametrize("name", ["pairs/reconstruction", "pairs/confident", "runs/run", ""])
def test_a_deleted_shard_or_group(three: Dataset, name: str):
    root, group = Path(three.root), Path(three.root, "parts", three.receipts[1].group)
    gone = next((group / name).glob("c.*")) if name else group
    gone.unlink() if name else shutil.rmtree(gone)
    problem(three, "part 1", str(gone), "is missing", "remove its receipt and generate it again")
    for dataset in (three, Dataset(root)):
        with pytest.raises(CorruptPartError, match=rf"part 1: .*{name}.*generate it again"):
            dataset.stored(1, name or "pairs/iteration")
        with pytest.raises(CorruptPartError):
            dataset.column(name or "pairs/iteration")
        np.testing.assert_array_equal(dataset.read(2, ["runs/run"])["runs/run"], [4, 5])


def test_a_receipt_of_a_newer_version(three: Dataset):
    """Sealed by whoever wrote it, and still refused by name."""
    name = reseal(three.root, lambda body: body.update(schema="palimpsest-pairs/2"), part=1)
    problem(three, name, "'palimpsest-pairs/2'", "'palimpsest-pairs/1'", "version of palimpsest")
    with pytest.raises(CorruptPartError, match="schema 'palimpsest-pairs/2'"):
        Dataset(three.root)


def test_a_renamed_receipt_or_a_copy_of_one(three: Dataset):
    folder = Path(three.root, "receipts")
    shutil.copy(folder / "part-000001.json", folder / "part-000003.json")
    problem(three, "part-000003.json", "is the receipt of part 1", "remove it")
    (folder / "part-000003.json").unlink()
    assert three.verify().ok
    (folder / "part-000001.json").rename(folder / "part-000007.json")
    problem(three, "part-000007.json", "is the receipt of part 1", "remove it")
    with pytest.raises(CorruptPartError, match="is the receipt of part 1"):
        Dataset(three.root)
    with pytest.raises(CorruptPartError):
        vacuum(three.root, older_than_s=0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("parts/{group}/pairs/extra", ("part 1", "does not belong there", "remove it")),
        ("parts/{group}/pairs/iteration/c.1", ("part 1", "does not belong there", "remove it")),
        ("parts/notes.txt", ("does not belong", "remove it")),
        ("receipts/notes.txt", ("does not belong", "remove it")),
        ("receipts/part-1.json", ("does not belong", "remove it")),
        ("receipts/part-000001.json.bak", ("does not belong", "remove it")),
    ],
)
def test_foreign_files(three: Dataset, name: str, words: tuple[str, ...]):
    path = Path(three.root, name.format(group=three.receipts[1].group))
    path.write_text("")
    problem(three, str(path), *words)
    assert vacuum(three.root, older_than_s=0) == ()
    assert path.exists()
    assert Dataset(three.root).content_hash == three.content_hash


def test_the_group_of_another_part(three: Dataset):
    groups = [Path(three.root, "parts", receipt.group) for receipt in three.receipts]
    shutil.rmtree(groups[1])
    shutil.copytree(groups[2], groups[1])
    report = three.verify()
    assert not report.ok
    assert all(text.startswith("part 1: ") for text in report.problems)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "'palimpsest-pairs' version 2.*version 1; use the release"),
        ({"version": "1"}, "version '1'"),
        ({"schema": "other-pairs"}, "schema 'other-pairs'"),
        ({"encoding": "float64"}, "encoding is 'float64'.*'float16', 'float32' or 'uint8'"),
        ({"encoding": None}, "encoding is None"),
        ({"manifest": []}, "manifest is"),
    ],
)
def test_other_schemas_are_refused_by_name(three: Dataset, change: dict[str, Any], words: str):
    reseal_store(three.root, lambda body: body.update(change))
    for use in (
        lambda: Dataset(three.root),
        lambda: create_or_open(three.root, MANIFEST),
        lambda: write_part(three.root, 3, columns(seed=3), provenance=provenance()),
    ):
        with pytest.raises((StoreMismatchError, CorruptPartError), match=words):
            use()


def test_damage_on_s3_is_named(s3: S3Server):
    """What is gone from a bucket is named as it is in a folder."""
    dataset = store(s3.location("s"), 2)
    files = Bytes(s3.location("s"))
    place = open_place(s3.location("s"))
    folder = f"parts/{dataset.receipts[1].group}/targets/image/c."
    shard = next(name for name in files.names() if name.startswith(folder))
    content = files.get(shard)
    place.remove(shard)
    problem(dataset, "part 1", shard, "is missing", "generate it again")
    with pytest.raises(CorruptPartError, match="is missing"):
        Dataset(s3.location("s")).stored(1, "targets/image")
    files.put(shard, content)
    assert dataset.verify().ok
    receipt = "receipts/part-000001.json"
    with files.damaged(receipt, files.get(receipt).replace(b'"cpu"', b'"gpu"')):
        problem(dataset, receipt, "was edited")
        with pytest.raises(CorruptPartError, match="was edited"):
            Dataset(s3.location("s"))
    files.put("receipts/notes.txt", b"")
    problem(dataset, "notes.txt", "does not belong")
    place.remove("receipts/notes.txt")
    with pytest.raises(StorageError, match=r"has no store\.json"):
        Dataset(s3.location("elsewhere"))
