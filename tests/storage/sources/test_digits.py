from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import SourceError
from storage.sources import digits
from storage.sources.load import ImageSet, load_images

FIRST = [  # a zero, as scikit-learn prints it
    [0, 0, 5, 13, 9, 1, 0, 0],
    [0, 0, 13, 15, 10, 15, 5, 0],
    [0, 3, 15, 2, 0, 11, 8, 0],
    [0, 4, 12, 0, 0, 8, 8, 0],
    [0, 5, 8, 0, 0, 9, 8, 0],
    [0, 4, 11, 0, 1, 12, 7, 0],
    [0, 2, 14, 5, 10, 12, 0, 0],
    [0, 0, 6, 13, 10, 0, 0, 0],
]
CLASSES = {
    "train": [143, 146, 142, 146, 144, 145, 144, 143, 141, 143],
    "heldout": [35, 36, 35, 37, 37, 37, 37, 36, 33, 37],
}
HASHES = {
    "train": "e5bf22ea03e423eb434bcd16581e6f6c2c730ab4f1f0a69cbae069eef8d82b1c",
    "heldout": "57ae0f381884f794d7c4067c81077da11a629f41e1c18f9aba5966af3e642691",
}


def both(**options: Any) -> tuple[ImageSet, ImageSet]:
    return load_images("digits", split="train", **options), load_images(
        "digits", split="heldout", **options
    )


def test_counts_classes_and_notes_of_both_splits():
    for read in both(size=8):
        assert read.images.shape == (sum(CLASSES[read.split]), 3, 8, 8)
        assert read.images.dtype == np.uint8
        assert read.images.flags.c_contiguous
        assert read.labels.dtype == np.int64
        assert np.bincount(read.labels).tolist() == CLASSES[read.split]
        assert read.class_names == tuple("0123456789")
        assert read.name == "digits"
    train, heldout = both(size=8)
    assert (len(train), len(heldout)) == (1437, 360)
    assert train.notes == (
        "Handwritten digits of 8 x 8 (UCI, Optical Recognition of Handwritten Digits, CC BY 4.0): "
        "the first 1,437 of its test set.",
    )
    assert heldout.notes[0].endswith("the last 360 of its test set.")


def test_values_fill_the_range_and_the_first_image_is_the_known_one():
    train, heldout = both(size=8)
    steps = [round(value * 255 / 16 + 1e-9) for value in range(17)]
    for read in (train, heldout):
        assert np.unique(read.images).tolist() == steps
        assert (read.images == read.images[:, :1]).all()
    assert (steps[0], steps[-1]) == (0, 255)
    np.testing.assert_array_equal(train.images[0, 0], np.array(steps)[FIRST])
    assert train.labels[:10].tolist() == list(range(10))
    assert heldout.labels[:10].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 0, 9]


def test_no_picture_is_twice_there():
    pixels = np.concatenate([read.images for read in both(size=8)])
    assert len(np.unique(pixels.reshape(len(pixels), -1), axis=0)) == 1797


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_content_hash_is_that_of_the_pictures(split: Any):
    assert load_images("digits", split=split, size=8).content_hash == HASHES[split]


def test_the_values_are_those_of_ucis_file():
    """The hash is that of optdigits.tes: 64 values and the class, a line each."""
    with np.load(digits._FILE, allow_pickle=False) as file:
        rows = np.column_stack([file["pixels"].reshape(-1, 64), file["labels"]])
    text = "".join(",".join(map(str, row)) + "\n" for row in rows.tolist())
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
    )


def test_an_installation_without_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(digits, "_FILE", tmp_path / "digits.npz")
    with pytest.raises(SourceError, match=r"digits\.npz is missing; install palimpsest again"):
        load_images("digits", split="train")


def test_the_licence_lies_beside_the_file():
    text = digits._FILE.with_suffix(".txt").read_text()
    assert "https://creativecommons.org/licenses/by/4.0/" in text
    assert "https://doi.org/10.24432/C50P49" in text


def test_file_and_licence_are_packaged():
    root = Path(__file__).parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    assert all((root / file).is_file() for file in settings["project"]["license-files"])
    packaged = settings["tool"]["setuptools"]["package-data"]["storage.sources"]
    assert {"digits.npz", "digits.txt"} <= set(packaged)
