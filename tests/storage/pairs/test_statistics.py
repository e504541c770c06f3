"""The numbers of `dataset info`, against counting by hand over the whole arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage.errors import CorruptPartError
from storage.object_store import open_place
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from storage.pairs.statistics import saved_iterations, summarise
from tests.storage.stores import MANIFEST, columns, provenance, store


def test_the_summary_counts_what_the_arrays_hold(tmp_path: Path):
    dataset = store(tmp_path / "s", 4, n_pairs=40)
    summary = summarise(dataset)
    confident = dataset.column("pairs/confident")
    image_of_pair = np.concatenate(
        [
            part["targets/image_id"][part["pairs/target_row"]]
            for part in (
                dataset.read(r.part, ["targets/image_id", "pairs/target_row"])
                for r in dataset.receipts
            )
        ]
    )
    images = np.unique(dataset.column("targets/image_id"))
    by_hand = [int((confident & (image_of_pair == image)).sum()) for image in images]
    assert summary.confident_per_image.tolist() == by_hand
    assert summary.n_confident == confident.sum()
    assert (summary.n_images, summary.n_covered) == (len(images), np.count_nonzero(by_hand))
    assert (summary.n_parts, summary.n_runs, summary.n_targets) == (4, 8, 40)
    assert summary.n_pairs == len(confident) == 320
    assert summary.outcomes == {"ok": 8, "unfitted": 0, "nonfinite": 0, "stopped": 0}
    assert summary.worker_seconds == 6.0
    assert summary.torch_versions == ("2.13.0",)
    assert (summary.code_versions, summary.devices) == (("0.1.0",), ("cpu",))
    assert (summary.encoding, summary.content_hash) == ("float16", dataset.content_hash)


def test_bytes_are_those_of_the_data_files(tmp_path: Path):
    dataset = store(tmp_path / "s", 2)
    files = [path for path in (tmp_path / "s" / "parts").rglob("*") if path.is_file()]
    summary = summarise(dataset)
    assert summary.n_bytes == sum(path.stat().st_size for path in files)
    assert summary.bytes_per_pair == summary.n_bytes / dataset.n_pairs


def test_pairs_and_similarity_of_each_iteration_are_counted_over_all_parts(tmp_path: Path):
    dataset = store(tmp_path / "s", 3, n_pairs=50)
    iteration, ssim, confident = (
        dataset.column(f"pairs/{name}") for name in ("iteration", "ssim_best", "confident")
    )
    calls: list[tuple[int, int]] = []
    rows = saved_iterations(dataset, on_part=lambda done, n: calls.append((done, n)))
    assert [row.iteration for row in rows] == [100, 500, 2000]
    for row in rows:
        here = iteration == row.iteration
        assert (row.n_pairs, row.n_confident) == (here.sum(), (here & confident).sum())
        assert row.ssim == pytest.approx(ssim[here].mean(dtype=np.float64))
        assert row.ssim_confident == pytest.approx(ssim[here & confident].mean(dtype=np.float64))
    assert sum(row.n_pairs for row in rows) == dataset.n_pairs
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_an_iteration_without_confident_pairs_has_no_mean_of_them(tmp_path: Path):
    create_or_open(tmp_path, MANIFEST)
    given = columns()
    given["pairs/confident"] = given["pairs/iteration"] > 100
    given["runs/outcome"] = np.array([0, 1], np.uint8)
    write_part(tmp_path, 0, given, provenance=provenance())
    first, *others = saved_iterations(Dataset(tmp_path))
    assert (first.iteration, first.n_confident, first.ssim_confident) == (100, 0, None)
    assert first.ssim is not None
    assert all(row.ssim_confident is not None for row in others)
    outcomes = {"ok": 1, "unfitted": 1, "nonfinite": 0, "stopped": 0}
    assert summarise(Dataset(tmp_path)).outcomes == outcomes


def test_an_empty_store_has_zeros(tmp_path: Path):
    dataset = create_or_open(tmp_path, MANIFEST)
    summary = summarise(dataset)
    assert (summary.n_pairs, summary.n_images, summary.bytes_per_pair) == (0, 0, 0.0)
    assert saved_iterations(dataset) == ()


def test_damage_is_said_and_not_averaged(tmp_path: Path):
    dataset = store(tmp_path / "s", 2)
    place = open_place(tmp_path / "s")
    name = next(i.name for i in place.files("parts") if "pairs/ssim_best/c." in i.name)
    content = bytearray(place.read(name))
    content[30] ^= 4
    (tmp_path / "s" / name).write_bytes(content)
    with pytest.raises(CorruptPartError, match="ssim_best"):
        saved_iterations(dataset)
