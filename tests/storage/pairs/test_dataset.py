from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import CorruptPartError, StorageError, StoreMismatchError
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from storage.pairs.verify import vacuum, verify_store
from tests.storage.stores import MANIFEST, columns, provenance, store, write


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A store of three parts that no test changes."""
    return store(tmp_path_factory.mktemp("three") / "s", 3)


def test_counts_and_columns(three: Dataset):
    dataset = three
    assert (dataset.n_runs, dataset.n_targets, dataset.n_pairs) == (6, 30, 42)
    assert [receipt.part for receipt in dataset.receipts] == [0, 1, 2]
    expected = np.concatenate([columns(seed=part)["pairs/iteration"] for part in range(3)])
    np.testing.assert_array_equal(dataset.column("pairs/iteration"), expected)
    assert dataset.receipts[0].outcomes == {"ok": 2, "unfitted": 0, "nonfinite": 0, "stopped": 0}


@pytest.mark.parametrize("min_iteration", [0, 100, 101, 2000, 2001])
def test_image_counts_are_those_of_a_plain_loop(three: Dataset, min_iteration: int):
    expected: dict[int, int] = {}
    for part in range(3):
        given = columns(seed=part)
        for image_id in given["targets/image_id"]:
            expected.setdefault(int(image_id), 0)
        for row, iteration, confident in zip(
            given["pairs/target_row"],
            given["pairs/iteration"],
            given["pairs/confident"],
            strict=True,
        ):
            if confident and iteration >= min_iteration:
                expected[int(given["targets/image_id"][row])] += 1
    image_ids, counts = three.image_counts(min_iteration)
    assert dict(zip(image_ids.tolist(), counts.tolist(), strict=True)) == expected
    assert (np.diff(image_ids) > 0).all()


def test_content_hash_is_of_the_pairs_and_nothing_else(three: Dataset, tmp_path: Path):
    for part in (2, 0, 1):
        write(tmp_path / "b", part)
    backwards = Dataset(tmp_path / "b")
    assert backwards.content_hash == three.content_hash
    assert store(tmp_path / "c", 2).content_hash != three.content_hash


def test_refresh_sees_later_parts(tmp_path: Path):
    dataset = store(tmp_path / "s", 1)
    write(tmp_path / "s", 1)
    assert dataset.n_runs == 2
    dataset.refresh()
    assert dataset.n_runs == 4
    (tmp_path / "s/receipts/part-000001.json").unlink()
    write(tmp_path / "s", 1)
    vacuum(tmp_path / "s", older_than_s=-1)
    dataset.refresh()
    assert dataset.read(1, ["runs/run"])["runs/run"].tolist() == [2, 3]


def test_a_subset_is_a_store_of_its_parts_alone(tmp_path: Path):
    whole = store(tmp_path / "s", 4)
    for part in (1, 3):
        write(tmp_path / "alone", part)
    alone = create_or_open(tmp_path / "alone", MANIFEST)
    for subset in (whole.subset([3, 1]), whole.without([0, 2])):
        assert [receipt.part for receipt in subset.receipts] == [1, 3]
        assert subset.root == whole.root
        for name in ("n_runs", "n_targets", "n_pairs", "content_hash"):
            assert getattr(subset, name) == getattr(alone, name) != getattr(whole, name)
        for name in ("pairs/reconstruction", "targets/image_id"):
            np.testing.assert_array_equal(subset.column(name), alone.column(name))
        rows = [0, 20, alone.n_pairs - 1]
        taken, expected = (d.take(["runs/run", "pairs/iteration"], rows) for d in (subset, alone))
        for name, values in expected.items():
            np.testing.assert_array_equal(taken[name], values)
        for ours, theirs in zip(subset.image_counts(500), alone.image_counts(500), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        with pytest.raises(ValueError, match="rows have shape"):
            subset.take(["pairs/iteration"], [alone.n_pairs])
        with pytest.raises(ValueError, match=r"part=0 has no receipt .* there are 2 parts"):
            subset.read(0, ["pairs/iteration"])
        with pytest.raises(ValueError, match="part=2 has no receipt"):
            subset.subset([2])
    assert len(whole.receipts) == 4
    assert whole.subset([]).n_pairs == 0
    subset = whole.subset([1])
    write(tmp_path / "s", 4)  # the store grows, the subset does not
    for dataset in (subset, whole):
        dataset.refresh()
    assert [receipt.part for receipt in subset.receipts] == [1]
    assert [receipt.part for receipt in whole.receipts] == [0, 1, 2, 3, 4]
    (tmp_path / "s/receipts/part-000001.json").unlink()
    subset.refresh()
    assert subset.n_pairs == 0


def test_empty_stores(tmp_path: Path):
    dataset = create_or_open(tmp_path / "s", MANIFEST)
    for folder in ("receipts", "parts"):  # which some copies lose
        (tmp_path / "s" / folder).rmdir()
    assert dataset.n_pairs == 0
    assert dataset.column("pairs/iteration").shape == (0,)
    assert dataset.image_counts()[0].size == 0
    assert dataset.verify().ok
    with pytest.raises(ValueError, match="without parts"):
        dataset.column("targets/image")
    receipt = write(tmp_path / "s", 0, n_runs=0)
    assert (receipt.n_runs, receipt.n_pairs) == (0, 0)
    dataset.refresh()
    assert dataset.column("targets/image").shape == (0, 3, 4, 4)
    assert dataset.verify().ok


def test_wrong_questions_are_answered_with_the_value(three: Dataset):
    dataset = three
    with pytest.raises(ValueError, match="part=7 has no receipt"):
        dataset.read(7, ["pairs/iteration"])
    with pytest.raises(ValueError, match="unknown column 'pairs/x'"):
        dataset.read(0, ["pairs/x"])
    with pytest.raises(ValueError, match="several tables"):
        dataset.read(0, ["pairs/iteration", "runs/run"], slice(0, 1))
    with pytest.raises(ValueError, match="step 2"):
        dataset.read(0, ["pairs/iteration"], slice(0, 9, 2))


# the manifest


def test_the_same_manifest_opens_the_store(tmp_path: Path):
    store(tmp_path / "s", 1)
    again = create_or_open(tmp_path / "s", {"root_seed": 0, "experiment": MANIFEST["experiment"]})
    assert again.n_runs == 2
    assert again.manifest == MANIFEST
    create_or_open(tmp_path / "t", {"sizes": (1, 2)})
    assert create_or_open(tmp_path / "t", {"sizes": (1, 2)}).manifest == {"sizes": [1, 2]}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (
            MANIFEST | {"experiment": MANIFEST["experiment"] | {"width": 200}},
            "experiment.width is 20 there, 200 here; use those settings again, or another folder",
        ),
        ({"experiment": MANIFEST["experiment"]}, "root_seed is 0 there, absent here"),
        (MANIFEST | {"x": True}, "x is absent there, true here"),
        (MANIFEST, 'encoding is "float16" there, "uint8" here'),
        (
            {"a": 1, "b": 1, "c": 1},
            "experiment is .* absent here; root_seed .*; a is absent there, .* and 2 more; use",
        ),
    ],
)
def test_another_manifest_is_refused_with_the_difference(
    tmp_path: Path, manifest: dict[str, Any], message: str
):
    dataset = store(tmp_path / "s", 1)
    with pytest.raises(StoreMismatchError, match=message):
        create_or_open(
            tmp_path / "s", manifest, encoding="uint8" if manifest is MANIFEST else "float16"
        )
    with pytest.raises(ValueError, match="encoding='float8'; expected one of float16, float32"):
        create_or_open(tmp_path / "s", manifest, encoding="float8")  # type: ignore[arg-type]
    assert dataset.verify().ok


def test_what_is_no_store(tmp_path: Path):
    with pytest.raises(StorageError, match=r"has no store\.json; generate one first"):
        Dataset(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot make a store"):
        create_or_open(tmp_path / "file", MANIFEST)
    store(tmp_path / "s", 1)
    (tmp_path / "s/store.json").unlink()
    with pytest.raises(StorageError, match=r"has no store\.json"):
        create_or_open(tmp_path / "s", MANIFEST)
    (tmp_path / "s/store.json").write_text("[]")
    with pytest.raises(CorruptPartError, match=r"store\.json is a list, expected a JSON object"):
        create_or_open(tmp_path / "s", MANIFEST)


# receipts and verification


def test_vacuum_removes_old_orphans_only(tmp_path: Path):
    dataset = store(tmp_path / "s", 2)
    (tmp_path / "s/receipts/part-000001.json").unlink()
    (tmp_path / "s/receipts/.tmp-0123").write_text("")
    orphan = tmp_path / "s/parts" / dataset.receipts[1].group
    assert vacuum(tmp_path / "s", older_than_s=3600) == ()
    for path in (orphan, *orphan.rglob("*")):
        os.utime(path, (0, 0))
    assert vacuum(tmp_path / "s", older_than_s=3600) == (f"parts/{orphan.name}",)
    assert vacuum(tmp_path / "s", older_than_s=-1) == ("receipts/.tmp-0123",)
    report = Dataset(tmp_path / "s").verify()
    assert (report.ok, report.orphans, report.n_checked) == (True, (), 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("folder", "cannot be read (Is a directory); restore it"),
        ("dangling", "is listed and cannot be found: a dangling link"),
        ("", "is not JSON"),
        ("{}", "is not a receipt (it has no receipt_sha256)"),
    ],
)
def test_files_that_are_no_receipts_are_named(tmp_path: Path, content: str, said: str):
    store(tmp_path / "s", 2)
    path = tmp_path / "s/receipts/part-000005.json"
    if content == "folder":
        path.mkdir()
    elif content == "dangling":
        path.symlink_to("nowhere")
    else:
        path.write_text(content)
    (problem,) = verify_store(tmp_path / "s").problems
    assert f"part-000005.json {said}" in problem
    for use in (vacuum, Dataset)[: 1 if content == "folder" else 2]:
        with pytest.raises(CorruptPartError, match=r"part-000005\.json"):
            use(tmp_path / "s")
    if content != "dangling":
        with pytest.raises(CorruptPartError, match=r"part-000005\.json"):
            write_part(tmp_path / "s", 5, columns(), provenance=provenance())


def test_vacuum_does_not_empty_a_store_that_lost_its_receipts(tmp_path: Path):
    dataset = store(tmp_path / "s", 2)
    shutil.rmtree(tmp_path / "s/receipts")
    with pytest.raises(CorruptPartError, match=r"has 2 parts and no receipt.*restore receipts/"):
        vacuum(tmp_path / "s", older_than_s=-1)
    everything = {f"parts/{receipt.group}" for receipt in dataset.receipts}
    assert set(vacuum(tmp_path / "s", older_than_s=-1, dry_run=True)) == everything
    assert set(vacuum(tmp_path / "s", older_than_s=-1, without_receipts=True)) == everything
    assert vacuum(tmp_path / "s", older_than_s=-1) == ()


def test_receipts_say_in_how_many_runs_an_image_was_and_came_back(tmp_path: Path):
    """Image 5 is in three runs and comes back in two of them, four times; 9 is never seen again."""
    values = columns(n_runs=3, n_images=2, n_pairs=4)
    values["targets/image_id"] = np.array([5, 9, 5, 7, 5, 7])
    values["pairs/target_row"] = np.array([0, 0, 0, 1, 2, 3, 3, 3, 4, 4, 5, 5], np.int32)
    values["pairs/confident"] = np.array([1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0], bool)
    create_or_open(tmp_path / "s", MANIFEST)
    table = write_part(tmp_path / "s", 0, values, provenance=provenance()).image_table()
    assert table.image_ids.tolist() == [5, 7, 9]
    assert table.n_runs.tolist() == [3, 2, 1]
    assert table.n_back.tolist() == [2, 2, 0]
    assert table.n_pairs.tolist() == [4, 4, 0]
    assert Dataset(tmp_path / "s").verify().ok


# chosen rows, and the three encodings


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Three parts of 900, 600 and 0 pairs, so of several chunks."""
    root = tmp_path_factory.mktemp("larger") / "s"
    for part, n_pairs in enumerate((300, 200, 0)):
        write(root, part, n_runs=3, n_images=100, n_pairs=n_pairs)
    return Dataset(root)


TAKEN = ["pairs/reconstruction", "pairs/iteration", "targets/image", "runs/mean_image"]


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.integers(0, 1499), max_size=40))
def test_chosen_rows_come_in_the_order_asked_for(larger: Dataset, rows: list[int]):
    taken = larger.take(TAKEN, rows) if rows else larger.take(TAKEN[1:2], rows)
    for name in taken:
        whole = np.concatenate(
            [_joined(larger, receipt.part, name) for receipt in larger.receipts[:2]]
        )
        np.testing.assert_array_equal(taken[name], whole[rows])


def _joined(dataset: Dataset, part: int, name: str) -> Any:
    table = name.partition("/")[0]
    columns = dataset.read(part, [name, "pairs/target_row", "pairs/run_row"])
    row = {"pairs": slice(None), "targets": columns["pairs/target_row"]}
    return columns[name][row.get(table, columns["pairs/run_row"])]


@pytest.mark.parametrize("rows", [[1500], [-1], [[0]]])
def test_rows_that_are_not_there_are_refused(larger: Dataset, rows: Any):
    with pytest.raises(ValueError, match="below 1500"):
        larger.take(["pairs/iteration"], rows)
    with pytest.raises(ValueError, match="unknown column 'pairs/x'"):
        larger.take(["pairs/x"], [])


def test_the_example_of_the_documentation_reads_the_pairs(
    three: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    document = (Path(__file__).parents[3] / "docs/dataset.md").read_text()
    (tmp_path / "store").symlink_to(three.root)
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", document, re.DOTALL)
    assert code is not None
    read: dict[str, Any] = {}
    exec(code[1], read)
    last = three.receipts[-1].part
    names = ["pairs/reconstruction", "pairs/target_row", "targets/image"]
    expected = three.read(last, names)
    np.testing.assert_array_equal(read["x"], expected["pairs/reconstruction"])
    original = expected["targets/image"][expected["pairs/target_row"]]
    np.testing.assert_array_equal(read["original"], original)
