"""Whole exports: rendered pictures, the dataset card, and loading it with `datasets`."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recon_core.matching import fit_to_range
from storage.errors import StoreFullError
from storage.export.parquet import Written, dataset_card
from storage.export.rows import NUMBERS, Selection
from storage.object_store import LocalPlace
from storage.pairs.dataset import Dataset, create_or_open
from tasks.dataset import export as exporting
from tasks.dataset.export import FORMATS, Format, export_pairs, rendered
from tests.storage.stores import MANIFEST, store


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return store(tmp_path_factory.mktemp("export") / "s", 2, n_pairs=60, size=8)


def test_the_document_s_own_lines_read_a_store_and_draw_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    written = store(tmp_path / "store", 2, size=8)
    text = (Path(__file__).parents[3] / "docs" / "dataset.md").read_text()
    reading = text.partition("## Reading it")[2].partition("## Files")[0]
    blocks = re.findall(r"```python\n(.*?)```", reading, re.DOTALL)
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec("\n".join(blocks), names)
    taken = written.read(1, ["pairs/reconstruction", "runs/mean_image", "pairs/run_row"])
    x, mean = taken["pairs/reconstruction"], taken["runs/mean_image"][taken["pairs/run_row"]]
    np.testing.assert_allclose(names["x"], x, rtol=1e-6)
    assert isinstance(names["picture"], np.ndarray)
    wanted = fit_to_range(torch.from_numpy(x), torch.from_numpy(mean)).numpy()
    np.testing.assert_allclose(names["picture"], wanted, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_export_twice_is_the_same_bytes(tmp_path: Path, dataset: Dataset, format: Format):
    reports = [export_pairs(dataset, tmp_path / n, format, rows_per_file=50) for n in "ab"]
    content = [
        {p.relative_to(tmp_path / n).as_posix(): p.read_bytes()
         for p in (tmp_path / n).rglob("*") if p.is_file()}
        for n in "ab"
    ]  # fmt: skip
    assert content[0] == content[1]
    n_confident = int(dataset.column("pairs/confident").sum())
    assert reports[0].n_pairs == n_confident
    assert reports[0].n_images == np.count_nonzero(dataset.image_counts()[1])
    assert reports[0].files == {n: len(c) for n, c in content[0].items() if n in reports[0].files}
    description = json.loads(content[0]["export.json"])
    assert description["store"] == {"hash": dataset.content_hash, "manifest": dataset.manifest}
    assert description["n_pairs"] == sum(description["files"].values()) == n_confident
    assert set(description["files"]) == set(reports[0].files)
    extra = {"README.md"} if format == "huggingface" else set()
    assert set(content[0]) == set(description["files"]) | {"export.json"} | extra


@pytest.fixture
def offline_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hugging Face's library, with its cache in the test's folder and without a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def test_hugging_face_loads_the_folder_as_its_card_says(
    tmp_path: Path, dataset: Dataset, offline_datasets: Any
):
    folder = tmp_path / "hf"
    report = export_pairs(
        dataset,
        folder,
        "huggingface",
        selection=Selection(confident_only=False),
        rows_per_file=100,
    )
    loaded = offline_datasets.load_dataset(str(folder), split="train")
    assert len(loaded) == report.n_pairs == dataset.n_pairs == 240
    assert list(loaded.features) == ["original", "picture", "reconstruction", *NUMBERS]
    names = ["pairs/reconstruction", "pairs/ssim_best", "targets/image", "targets/image_id",
             "targets/augment", "runs/mean_image"]  # fmt: skip
    wanted = dataset.take(names, np.arange(dataset.n_pairs))
    pictures = rendered(wanted["pairs/reconstruction"], wanted["runs/mean_image"])
    for i in (0, 99, 100, 239):
        row = loaded[i]
        original = np.asarray(row["original"]).transpose(2, 0, 1)
        np.testing.assert_array_equal(original, wanted["targets/image"][i])
        np.testing.assert_array_equal(np.asarray(row["picture"]).transpose(2, 0, 1), pictures[i])
        x = np.array(row["reconstruction"], "f4").reshape(3, 8, 8) * np.float32(row["scale"])
        np.testing.assert_array_equal(x, wanted["pairs/reconstruction"][i])
        assert row["image_id"] == wanted["targets/image_id"][i]
        np.testing.assert_array_equal(np.float32(row["augment"]), wanted["targets/augment"][i])
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    read: dict[str, Any] = {}
    exec(code[1].replace("path/to/this/folder", str(folder)), read)
    np.testing.assert_array_equal(read["raw"], wanted["pairs/reconstruction"][0])
    assert read["original"].size == read["picture"].size == (8, 8)


def test_the_card_of_a_mixture_says_which_attack_made_what(dataset: Dataset) -> None:
    mixture = copy.copy(dataset)
    mixture.manifest = {"mixture": [{"attack": "kkt"}, {"attack": "span"}]}
    attacks = {"kkt": 3, "span": 2}
    card = dataset_card(
        mixture, Selection(), Written(), attacks=attacks, n_images=4, n_file_bytes=1
    )
    assert "| attacks | kkt (3 parts), span (2 parts); `part` modulo 2 counts" in card


def test_nothing_selected_is_an_error_and_leaves_nothing(tmp_path: Path, dataset: Dataset):
    for format in FORMATS:
        with pytest.raises(ValueError, match=r"no pair of .* is selected"):
            export_pairs(dataset, tmp_path / "o", format, selection=Selection(min_iteration=10**6))
    empty = create_or_open(tmp_path / "empty", MANIFEST)
    with pytest.raises(ValueError, match="of 0 pairs"):
        export_pairs(empty, tmp_path / "o", "huggingface")
    bad: Any = "csv"
    with pytest.raises(ValueError, match="--format csv"):
        export_pairs(dataset, tmp_path / "o", bad)
    with pytest.raises(ValueError, match="--rows-per-file 0"):
        export_pairs(dataset, tmp_path / "o", "parquet", rows_per_file=0)
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


def test_a_taken_folder_is_refused_before_anything_is_read(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine").write_text("x")

    def never(*_args: Any) -> bytes:
        raise AssertionError("it was read")

    monkeypatch.setattr(LocalPlace, "read_range", never)
    for fresh in (False, True):
        with pytest.raises(ValueError, match="not an export"):
            export_pairs(dataset, tmp_path / "o", "webdataset", fresh=fresh)
    assert (tmp_path / "o" / "mine").read_text() == "x"


def test_a_full_device_is_explained_and_an_earlier_export_stays(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
):
    export_pairs(dataset, tmp_path / "o", "webdataset", selection=Selection(limit=3))
    before = (tmp_path / "o" / "pairs-000000.tar").read_bytes()

    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_description", full)
    with pytest.raises(StoreFullError, match="no space left"):
        export_pairs(dataset, tmp_path / "o", "webdataset", fresh=True)
    assert (tmp_path / "o" / "pairs-000000.tar").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["o"]
