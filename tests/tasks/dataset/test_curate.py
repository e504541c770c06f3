"""Curations and lists of near copies of training images are made once for the same question."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recon_core.balance import Curation, occurrences
from storage.sources.load import ImageSet
from tasks.dataset import curate
from tasks.dataset.curate import curate_pairs, exclude_near_duplicates
from tasks.workspace import Workspace
from tests.recon_core.tiles import photograph_tiles
from tests.storage import stores


def image_set(images: Any, split: Any) -> ImageSet:
    return ImageSet(
        name="tiles",
        split=split,
        images=images,
        labels=np.arange(len(images), dtype=np.int64) % 2,
        class_names=("even", "odd"),
    )


@pytest.fixture
def sets() -> tuple[ImageSet, ImageSet]:
    """Held-out images 1 and 3 are darker copies of training images 5 and 2, one mirrored."""
    tiles = photograph_tiles(32, shrink=2).numpy()
    tiles = tiles[tiles.std(axis=(1, 2, 3)) > 25]
    mine, train = tiles[:6].copy(), tiles[6:20]
    mine[1] = (train[5] * 0.8).astype(np.uint8)
    mine[3] = (train[2, :, :, ::-1] * 0.9).astype(np.uint8)
    return image_set(mine, "heldout"), image_set(train, "train")


def test_copies_go_out_and_the_file_says_which(
    sets: tuple[ImageSet, ImageSet], tmp_path: Path
) -> None:
    mine, train = sets
    report = tmp_path / "new" / "heldout-excluded.json"
    left = exclude_near_duplicates(mine, train, threshold=0.6, report=report)
    np.testing.assert_array_equal(left.images, mine.images[[0, 2, 4, 5]])
    assert left.labels.tolist() == [0, 0, 0, 1]
    assert left.notes == (
        "2 of 6 pictures were left out: they are near copies of training images (correlation "
        "above 0.6).",
    )
    found = json.loads(report.read_text())
    assert [(row["image_id"], row["nearest"]) for row in found["rows"]] == [(1, 5), (3, 2)]
    assert all(0.9 < row["correlation"] <= 1 for row in found["rows"])
    assert (found["threshold"], found["n"]) == (0.6, 2)
    assert found["source_hash"] == mine.content_hash
    assert found["train_hash"] == train.content_hash
    assert [path.name for path in report.parent.iterdir()] == ["heldout-excluded.json"]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The threshold of every search."""
    made: list[float] = []
    real = curate.near_duplicates

    def counted(*images: Any, **how: Any) -> Any:
        made.append(how["threshold"])
        return real(*images, **how)

    monkeypatch.setattr(curate, "near_duplicates", counted)
    return made


def test_a_search_is_not_repeated_unless_the_question_changes(
    sets: tuple[ImageSet, ImageSet], tmp_path: Path, searches: list[float]
) -> None:
    mine, train = sets
    report = tmp_path / "heldout-excluded.json"

    def excluded(threshold: float = 0.6, **changed: ImageSet) -> ImageSet:
        given = {"heldout": mine, "train": train} | changed
        return exclude_near_duplicates(**given, threshold=threshold, report=report)

    first = excluded()
    written = report.read_bytes()
    assert excluded().content_hash == first.content_hash
    assert searches == [0.6]
    assert report.read_bytes() == written
    excluded(0.5)
    assert searches == [0.6, 0.5]
    assert json.loads(report.read_text())["threshold"] == 0.5
    fewer = image_set(train.images[:5], "train")
    assert len(excluded(0.5, train=fewer)) == 5
    relabelled = dataclasses.replace(mine, labels=1 - mine.labels)
    excluded(0.5, train=fewer, heldout=relabelled)
    assert len(searches) == 4


@pytest.mark.parametrize("content", ["", "[]", '{"threshold": 0.6}', "{rows"])
def test_a_broken_file_is_replaced(
    content: str, sets: tuple[ImageSet, ImageSet], tmp_path: Path, searches: list[float]
) -> None:
    report = tmp_path / "heldout-excluded.json"
    report.write_text(content)
    assert len(exclude_near_duplicates(*sets, threshold=0.6, report=report)) == 4
    assert searches == [0.6]
    assert json.loads(report.read_text())["n"] == 2


def test_a_set_of_copies_only_is_refused(sets: tuple[ImageSet, ImageSet], tmp_path: Path) -> None:
    _mine, train = sets
    with pytest.raises(ValueError, match=r"all 14 pictures of 'tiles' .* near copies of training"):
        exclude_near_duplicates(train, train, report=tmp_path / "heldout-excluded.json")


def test_a_curation_is_made_anew_only_for_other_settings_pairs_or_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def counted(*given: Any) -> Any:
        made.append(given)
        return occurrences(*given)

    monkeypatch.setattr(curate, "occurrences", counted)
    workspace, paper = Workspace(tmp_path), Curation(n_subsets=3)
    stores.store(tmp_path / "pairs")
    first = curate_pairs(paper, workspace)
    assert curate_pairs(paper, workspace) == first
    assert len(made) == 1
    curate_pairs(Curation(n_subsets=4), workspace)
    assert len(made) == 2
    stores.write(tmp_path / "pairs", 3)
    more = curate_pairs(Curation(n_subsets=4), workspace)
    assert (len(made), more["n_pairs"] > first["n_pairs"]) == (3, True)
    workspace.curation.write_text("{}")
    assert curate_pairs(Curation(n_subsets=4), workspace) == more
    assert len(made) == 4
