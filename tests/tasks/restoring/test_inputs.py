"""What is restored: pictures in their own size or resized, and the reconstructions of a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from storage.errors import SourceError
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from tasks.dataset.export import rendered
from tasks.restoring.inputs import open_inputs, parse_size, resized, size_text
from tasks.restoring.restore import OpenRestorer, open_restorer
from tests.storage import stores
from tests.tasks.restoring.restorers import (
    SIZE,
    TINY_BF_DNCNN,
    identity,
    picture_folder,
    pixels,
    read,
    trained,
)
from tests.tasks.restoring.test_job import edm, restore

__all__ = ["edm"]


def test_a_picture_keeps_its_size_and_shape(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "in", pixels(1, size=60)[:, :, :35, :51])
    turned = Image.fromarray(pixels(1, seed=1)[0].transpose(1, 2, 0)[:5])
    exif = turned.getexif()
    exif[0x0112] = 6  # it lies on its side
    turned.save(folder / "turned.png", exif=exif)
    record = restore(identity(), folder, tmp_path / "stored")
    lying = pixels(1, seed=1)[0, :, :5]
    np.testing.assert_array_equal(read(tmp_path / "stored/mean/turned.png"), lying)
    assert record["read"]["n_orientation_ignored"] == 1
    record = restore(identity(), f"{folder}?orientation=exif", tmp_path / "out")
    assert record["read"]["n_turned"] == 1
    np.testing.assert_array_equal(
        read(tmp_path / "out/mean/p00.png"), pixels(1, size=60)[0, :, :35, :51]
    )
    upright = np.rot90(pixels(1, seed=1)[0, :, :5], -1, axes=(1, 2))
    np.testing.assert_array_equal(read(tmp_path / "out/mean/turned.png"), upright)
    assert read(tmp_path / "out/disagreement/p00.png").shape == (35, 51)
    assert record["settings"]["input"]["size"] is None
    bf_dncnn = open_restorer(trained(tmp_path / "bf", TINY_BF_DNCNN), device="cpu")
    restore(bf_dncnn, folder, tmp_path / "odd")
    assert read(tmp_path / "odd/mean/p00.png").shape == (3, 35, 51)


def test_a_picture_of_another_shape_says_how_to_get_the_one_that_is_needed(
    tmp_path: Path, edm: OpenRestorer
) -> None:
    folder = picture_folder(tmp_path / "in", pixels(1, size=12)[:, :, :6])
    with pytest.raises(
        SourceError, match=r"p00.png is 6 x 12, but edm works at 8 x 8; add --size 8,"
    ):
        restore(edm, folder, tmp_path / "out")
    wide = replace(identity(), resolution=(4, 10))
    with pytest.raises(
        SourceError, match=r"6 x 12, but identity works at 4 x 10; add --size 4x10,"
    ):
        restore(wide, folder, tmp_path / "out")
    tall = replace(identity(), resolution=(8, None))
    with pytest.raises(SourceError, match=r"but identity works at 8 x any; add --size 8x12,"):
        restore(tall, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    record = restore(wide, folder, tmp_path / "out", size=(4, 10))
    assert record["settings"]["input"]["size"] == [4, 10]
    assert read(tmp_path / "out/mean/p00.png").shape == (3, 4, 10)
    record = restore(identity(), folder, tmp_path / "square", size=6)
    np.testing.assert_array_equal(
        read(tmp_path / "square/mean/p00.png"), pixels(1, size=12)[0, :, :6, 3:9]
    )
    assert record["settings"]["input"]["size"] == 6


@pytest.mark.parametrize(
    ("given", "size", "rows", "columns"),
    [
        ((8, 12), (8, 8), slice(0, 8), slice(2, 10)),
        ((8, 12), (4, 3), slice(0, 8), slice(3, 9)),
        ((12, 8), (2, 4), slice(4, 8), slice(0, 8)),
        ((8, 12), (2, 6), slice(2, 6), slice(0, 12)),
        ((8, 12), (16, 24), slice(0, 8), slice(0, 12)),
    ],
)
def test_resizing_keeps_the_centre_and_the_proportions(
    given: tuple[int, int], size: tuple[int, int], rows: slice, columns: slice
) -> None:
    picture = pixels(1, size=12)[0].transpose(1, 2, 0)[: given[0], : given[1]]
    way = Image.Resampling.BOX if size[0] <= given[0] else Image.Resampling.BICUBIC
    centre = Image.fromarray(np.ascontiguousarray(picture[rows, columns]))
    expected = np.asarray(centre.resize(size[::-1], way)).astype(int)
    assert np.abs(resized(picture, *size) - expected).max() <= 1


def test_a_size_is_read_from_words() -> None:
    assert parse_size("32") == (32, 32)
    assert parse_size("24x32") == (24, 32)
    assert parse_size(size_text(24, 32)) == (24, 32)
    assert parse_size(size_text(8, 8)) == (8, 8)
    for words in ("", "x", "3x", "big", "3x4x5", "1.5"):
        with pytest.raises(ValueError, match=f"--size '{words}' is no size; give"):
            parse_size(words)


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n", None])
def test_a_file_that_is_no_picture_is_named_before_anything_is_done(
    tmp_path: Path, content: bytes | None
) -> None:
    folder = picture_folder(tmp_path / "in", pixels(3))
    whole = (folder / "p01.png").read_bytes()
    (folder / "p01.png").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(SourceError, match=r"p01.png cannot be read as a picture \(.+\); remove"):
        restore(identity(), folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_to_restore_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"no picture .* and is no store"):
        open_inputs(tmp_path / "empty")
    with pytest.raises(SourceError, match="neither a folder of pictures nor a store"):
        open_inputs(tmp_path / "nowhere")
    folder = picture_folder(tmp_path / "in", pixels(1))
    (folder / "p00.jpg").write_bytes((folder / "p00.png").read_bytes())
    with pytest.raises(SourceError, match=r"p00.jpg and .*p00.png would be .*; rename one"):
        open_inputs(folder)
    for bad in ({"limit": 0}, {"size": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            open_inputs(folder, **bad)


def test_the_last_confident_reconstructions_of_a_store_are_restored(tmp_path: Path) -> None:
    create_or_open(tmp_path / "pairs", stores.MANIFEST)
    expected: dict[str, np.ndarray[Any, Any]] = {}
    for part in range(2):
        columns = stores.columns(seed=part, n_pairs=6, size=SIZE)
        columns["pairs/candidate"] = np.tile(np.repeat([3, 7], 3), 2).astype(np.int32)
        columns["pairs/iteration"] = np.tile([100, 2000, 500], 4)
        columns["pairs/confident"] = np.repeat([True, True, False, True], 3)
        write_part(tmp_path / "pairs", part, columns, provenance=stores.provenance())
    dataset = Dataset(tmp_path / "pairs")
    for part in range(2):
        x = dataset.read(part, ["pairs/reconstruction"])["pairs/reconstruction"]
        means = dataset.read(part, ["runs/mean_image"])["runs/mean_image"]
        for row, run_row, candidate in ((1, 0, 3), (4, 0, 7), (10, 1, 7)):
            name = f"part-{part:06d}-run-{2 * part + run_row:08d}-candidate-{candidate:05d}"
            expected[name] = rendered(x[row : row + 1], means[run_row][None])[0]
    record = restore(identity(), tmp_path / "pairs", tmp_path / "out")
    assert [picture["name"] for picture in record["pictures"]] == list(expected)
    assert {picture["iteration"] for picture in record["pictures"]} == {2000}
    for name, picture in expected.items():
        np.testing.assert_array_equal(read(tmp_path / f"out/mean/{name}.png"), picture)
    assert record["settings"]["input"]["content_hash"] == dataset.content_hash
    limited = restore(identity(), tmp_path / "pairs", tmp_path / "some", limit=4)
    assert [picture["name"] for picture in limited["pictures"]] == list(expected)[:4]


def test_a_store_of_another_size_or_without_confident_pairs_is_refused(
    tmp_path: Path, edm: OpenRestorer
) -> None:
    stores.store(tmp_path / "pairs", 1, size=4)
    with pytest.raises(SourceError, match=r"candidate-\d+ is 4 x 4, but edm works at 8 x 8; use a"):
        restore(edm, tmp_path / "pairs", tmp_path / "out")
    with pytest.raises(ValueError, match="--size 8 is for folders"):
        open_inputs(tmp_path / "pairs", size=8)
    create_or_open(tmp_path / "poor", stores.MANIFEST)
    columns = stores.columns()
    columns["pairs/confident"][:] = False
    write_part(tmp_path / "poor", 0, columns, provenance=stores.provenance())
    with pytest.raises(SourceError, match="no confident reconstruction"):
        open_inputs(tmp_path / "poor")


def test_pictures_of_an_attack_come_in_their_ranks(tmp_path: Path) -> None:
    pictures = np.stack([np.full((1, 4, 6), level, np.float32) for level in (0.2, 0.6, 1.5)])
    (tmp_path / "attack").mkdir()
    file = tmp_path / "attack" / "reconstructions.safetensors"
    save_file({"x": pictures * 9, "picture": pictures}, file)
    inputs = open_inputs(tmp_path / "attack", limit=2)
    assert len(inputs) == 2
    found = list(open_inputs(tmp_path / "attack"))
    assert [p.name for p in found] == ["rank-00001", "rank-00002", "rank-00003"]
    assert [p.facts for p in found] == [{"rank": k} for k in (1, 2, 3)]
    assert [p.pixels.shape for p in found] == [(3, 4, 6)] * 3
    assert [int(p.pixels.max()) for p in found] == [51, 153, 255]
    assert inputs.description == {"kind": "attack"}
    with pytest.raises(ValueError, match=r"--size 8 is for folders of pictures; those of the att"):
        open_inputs(tmp_path / "attack", size=8)
    for content, said in (
        ({"x": pictures}, r"has no pictures in colour or grey"),
        ({"picture": pictures.repeat(2, axis=1)}, r"no pictures in colour or grey \(\(3, 2, 4, 6"),
        (None, "cannot be read"),
    ):
        file.write_bytes(b"nothing") if content is None else save_file(content, file)
        with pytest.raises(SourceError, match=said):
            open_inputs(tmp_path / "attack")
