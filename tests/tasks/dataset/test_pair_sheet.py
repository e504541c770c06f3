"""The contact sheet of a store: the right pairs, in the right places, pixel by pixel."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from recon_core.matching import fit_to_range
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from tasks.dataset import pair_sheet as sheets
from tasks.dataset.pair_sheet import PairSheet, pair_sheet
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


def pixels(sheet: PairSheet) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(sheet.png)) as image:
        return np.asarray(image.convert("RGB"))


def tile(sheet: PairSheet, row: int, column: int, size: int) -> npt.NDArray[np.uint8]:
    """The image (3, h, w) drawn there, after checking that each of its pixels is a square."""
    x, y = sheet.corners[row][column]
    side = size * sheet.scale
    large = pixels(sheet)[y : y + side, x : x + side]
    small = large[:: sheet.scale, :: sheet.scale]
    np.testing.assert_array_equal(
        np.repeat(np.repeat(small, sheet.scale, axis=0), sheet.scale, axis=1), large
    )
    return small.transpose(2, 0, 1)


def rows_of(dataset: Dataset) -> dict[str, Any]:
    """Every pair of the store with what belongs to it, and its part."""
    names = [f"pairs/{n}" for n in ("iteration", "candidate", "run_row", "ssim_best", "confident")]
    names += ["pairs/reconstruction", "targets/image", "targets/image_id", "runs/mean_image"]
    taken = dataset.take(names, np.arange(dataset.n_pairs))
    parts = np.repeat([r.part for r in dataset.receipts], [r.n_pairs for r in dataset.receipts])
    return {**taken, "part": parts}


@pytest.mark.parametrize("size", [5, 32])
def test_every_tile_is_the_picture_it_stands_for(tmp_path: Path, size: int):
    dataset = attacked(tmp_path, size=size)
    sheet = pair_sheet(dataset, n=4)
    every = rows_of(dataset)
    assert (sheet.iterations, len(sheet.columns)) == (ITERATIONS, 4)
    assert sheet.scale == {5: 19, 32: 3}[size]
    for column, shown in enumerate(sheet.columns):
        mine = (
            (every["part"] == shown.part)
            & (every["pairs/run_row"] == shown.run_row)
            & (every["pairs/candidate"] == shown.candidate)
        )
        original = every["targets/image"][mine][0]
        np.testing.assert_array_equal(tile(sheet, 0, column, size), original)
        for row, iteration in enumerate(ITERATIONS, start=1):
            (at,) = np.flatnonzero(mine & (every["pairs/iteration"] == iteration))
            picture = fit_to_range(
                torch.from_numpy(every["pairs/reconstruction"][at : at + 1]),
                torch.from_numpy(every["runs/mean_image"][at]),
            )
            wanted = (picture[0] * 255).round().to(torch.uint8).numpy()
            np.testing.assert_array_equal(tile(sheet, row, column, size), wanted)


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


def test_a_missing_iteration_is_left_grey(tmp_path: Path):
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
    assert set(tile(sheet, 1, 1, 4).reshape(3, -1).T.reshape(-1).tolist()) <= set(sheets.EMPTY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n": 0}, "--n 0"),
        ({"seed": -1}, "--seed -1"),
        ({"image_id": 99}, "--image-id 99 is no image that a run trained on"),
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path: Path, changes: dict[str, int], said: str):
    with pytest.raises(ValueError, match=said):
        pair_sheet(attacked(tmp_path), **changes)  # type: ignore[arg-type]


def test_a_store_without_confident_pairs_has_nothing_to_show(tmp_path: Path):
    create_or_open(tmp_path, MANIFEST)
    given = columns()
    given["pairs/confident"][:] = False
    write_part(tmp_path, 0, given, provenance=provenance())
    with pytest.raises(ValueError, match="no confident pair to show"):
        pair_sheet(Dataset(tmp_path))
    image = int(given["targets/image_id"][0])
    with pytest.raises(ValueError, match=f"--image-id {image} has no confident pair"):
        pair_sheet(Dataset(tmp_path), image_id=image)
