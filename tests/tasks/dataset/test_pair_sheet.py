"""The contact sheet of a store: the right pairs, in the right places."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from tasks.dataset.export import rendered
from tasks.dataset.pair_sheet import pair_sheet
from tests.storage.stores import MANIFEST, columns, provenance

ITERATIONS = (100, 500, 2000)
N_CANDIDATES = 6


def attacked(root: Path, n_parts: int = 2, size: int = 5) -> Dataset:
    """A store as an attack fills it: every candidate saved at each iteration, with one target."""
    create_or_open(root, MANIFEST)
    for part in range(n_parts):
        given = columns(seed=part, n_images=5, n_pairs=N_CANDIDATES * len(ITERATIONS), size=size)
        rng = np.random.default_rng(part)
        n_runs = len(given["runs/run"])
        shape = (n_runs, N_CANDIDATES, len(ITERATIONS))
        within = np.broadcast_to(rng.integers(0, 5, shape[:2])[..., None], shape).reshape(-1)
        given["pairs/target_row"] = (given["pairs/run_row"] * 5 + within).astype(np.int32)
        candidate = np.arange(N_CANDIDATES, dtype=np.int32)[None, :, None]
        given["pairs/candidate"] = np.broadcast_to(candidate, shape).reshape(-1).copy()
        given["pairs/iteration"] = np.broadcast_to(np.array(ITERATIONS), shape).reshape(-1).copy()
        sure = np.broadcast_to(rng.random(shape[:2])[..., None] < 0.6, shape)
        given["pairs/confident"] = sure.reshape(-1).copy()
        write_part(root, part, given, provenance=provenance())
    return Dataset(root)


def rows_of(dataset: Dataset) -> dict[str, Any]:
    """Every pair of the store with what belongs to it, and its part."""
    names = [f"pairs/{n}" for n in ("iteration", "candidate", "run_row", "ssim_best", "confident")]
    names += ["pairs/reconstruction", "targets/image", "targets/image_id", "runs/mean_image"]
    taken = dataset.take(names, np.arange(dataset.n_pairs))
    parts = np.repeat([r.part for r in dataset.receipts], [r.n_pairs for r in dataset.receipts])
    return {**taken, "part": parts}


def test_every_tile_is_the_picture_it_stands_for(tmp_path: Path):
    dataset = attacked(tmp_path)
    sheet = pair_sheet(dataset, n=4)
    every = rows_of(dataset)
    titles = ["original", "iteration 100", "iteration 500", "iteration 2,000"]
    assert [title for title, _tiles in sheet.strips] == titles
    assert {len(tiles) for _title, tiles in sheet.strips} == {4} == {len(sheet.columns)}
    for column, shown in enumerate(sheet.columns):
        mine = (
            (every["part"] == shown.part)
            & (every["pairs/run_row"] == shown.run_row)
            & (every["pairs/candidate"] == shown.candidate)
        )
        original, *found = (tiles[column] for _title, tiles in sheet.strips)
        np.testing.assert_array_equal(original[0], every["targets/image"][mine][0])
        assert original[1] == f"image {shown.image_id}"
        for (picture, score, bold), iteration in zip(found, ITERATIONS, strict=True):
            (at,) = np.flatnonzero(mine & (every["pairs/iteration"] == iteration))
            ssim = every["pairs/ssim_best"][at]
            x, mean = (every[n][at : at + 1] for n in ("pairs/reconstruction", "runs/mean_image"))
            np.testing.assert_array_equal(picture, rendered(x, mean)[0])
            assert (score, bold) == (f"{ssim:.2f}", ssim == every["pairs/ssim_best"][mine].max())
    with Image.open(io.BytesIO(sheet.png)) as image:
        assert image.size[0] > image.size[1] > 200


def test_columns_are_the_best_confident_pairs_of_different_images_best_first(tmp_path: Path):
    dataset = attacked(tmp_path, n_parts=3)
    sheet, every = pair_sheet(dataset, n=8), rows_of(dataset)
    ids = [shown.image_id for shown in sheet.columns]
    assert len(set(ids)) == len(ids) == 8
    for shown in sheet.columns:
        of_image = (every["targets/image_id"] == shown.image_id) & every["pairs/confident"]
        assert shown.ssim == every["pairs/ssim_best"][of_image].max()
    assert [s.ssim for s in sheet.columns] == sorted((s.ssim for s in sheet.columns), reverse=True)


def test_one_image_has_its_best_candidates(tmp_path: Path):
    dataset = attacked(tmp_path, n_parts=4)
    ids, counts = dataset.image_counts()
    image = int(ids[counts.argmax()])
    sheet, every = pair_sheet(dataset, n=3, image_id=image), rows_of(dataset)
    mine = np.flatnonzero((every["targets/image_id"] == image) & every["pairs/confident"])
    best: dict[tuple[int, ...], float] = {}
    for row in mine:
        key = tuple(int(every[n][row]) for n in ("part", "pairs/run_row", "pairs/candidate"))
        best[key] = max(best.get(key, -1.0), float(every["pairs/ssim_best"][row]))
    assert [shown.ssim for shown in sheet.columns] == sorted(best.values(), reverse=True)[:3]
    assert {shown.image_id for shown in sheet.columns} == {image}
    assert f"image {image}" in sheet.caption


def test_a_missing_iteration_is_left_white(tmp_path: Path):
    create_or_open(tmp_path, MANIFEST)
    given = columns(n_runs=1, n_images=2, n_pairs=3)
    given["targets/image_id"][:] = [0, 1]
    given["pairs/target_row"][:] = [0, 0, 1]
    given["pairs/candidate"][:] = [0, 0, 1]
    given["pairs/iteration"][:] = [100, 500, 500]
    given["pairs/ssim_best"][:] = [0.5, 0.9, 0.8]
    given["pairs/confident"][:] = True
    write_part(tmp_path, 0, given, provenance=provenance())
    sheet = pair_sheet(Dataset(tmp_path))
    assert [shown.image_id for shown in sheet.columns] == [0, 1]
    picture, score, _bold = sheet.strips[1][1][1]
    assert ((picture == 255).all(), score) == (True, "")


def test_what_cannot_be_shown_is_said(tmp_path: Path):
    dataset = attacked(tmp_path / "some")
    create_or_open(tmp_path / "poor", MANIFEST)
    given = columns()
    given["pairs/confident"][:] = False
    write_part(tmp_path / "poor", 0, given, provenance=provenance())
    poor, image = Dataset(tmp_path / "poor"), int(given["targets/image_id"][0])
    cases: tuple[tuple[Dataset, dict[str, int], str], ...] = (
        (dataset, {"n": 0}, "--n 0"),
        (dataset, {"seed": -1}, "--seed -1"),
        (dataset, {"image_id": 99}, "--image-id 99 is no image that a run trained on"),
        (poor, {}, "no confident pair to show"),
        (poor, {"image_id": image}, f"--image-id {image} has no confident pair"),
    )
    for store, changes, said in cases:
        with pytest.raises(ValueError, match=said):
            pair_sheet(store, **changes)  # type: ignore[arg-type]
