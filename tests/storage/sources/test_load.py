"""Subsets, photographs, digits and folders as sources."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from storage.errors import SourceError
from storage.sources import embedded
from storage.sources.load import ImageSet, load_images


def picture(path: Path, *, seed: int = 0, width: int = 32, height: int = 32) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def class_tree(root: Path, *, per_class: int = 3, classes: tuple[str, ...] = ("b", "a")) -> None:
    for number, name in enumerate(classes):
        for index in range(per_class):
            picture(root / name / f"{index}.png", seed=100 * number + index)


def numbered(n: int = 6) -> ImageSet:
    """Pictures that show their row."""
    images = np.arange(n, dtype=np.uint8)[:, None, None, None].repeat(3, axis=1)
    labels = np.arange(n, dtype=np.int64) % 2
    return ImageSet(
        name="numbered",
        split="heldout",
        images=images,
        labels=labels,
        class_names=("even", "odd"),
        notes=("First.",),
    )


# subsets


def test_without_some_rows_images_and_labels_stay_together():
    whole = numbered()
    left = whole.without([4, 1, 4], because="they are copies")
    assert left.images[:, 0, 0, 0].tolist() == [0, 2, 3, 5]
    assert left.labels.tolist() == [0, 0, 1, 1]
    assert left.notes == ("First.", "2 of 6 pictures were left out: they are copies.")
    assert (left.name, left.split, left.class_names) == ("numbered", "heldout", ("even", "odd"))
    again = ImageSet(
        name="other",
        split="heldout",
        images=left.images,
        labels=left.labels,
        class_names=left.class_names,
    )
    assert left.content_hash == again.content_hash != whole.content_hash
    assert len(whole) == 6


def test_no_set_is_left_empty():
    whole = numbered()
    assert whole.without([], because="nothing") is whole
    with pytest.raises(ValueError, match=r"all 6 pictures of 'numbered' .* left out \(copies\)"):
        whole.without(range(6), because="copies")


# photographs


def test_photographs_have_enough_tiles_of_every_class():
    train, heldout = (load_images("photos", split=split) for split in ("train", "heldout"))
    assert len(train) >= 600
    assert len(heldout) >= 300
    for images in (train, heldout):
        assert images.images.shape == (len(images), 3, 32, 32)
        assert images.images.dtype == np.uint8
        assert images.labels.dtype == np.int64
        assert set(images.labels.tolist()) == set(range(len(images.class_names)))
        grey = images.images.mean(axis=1).reshape(len(images), -1)
        assert grey.std(axis=1).min() >= embedded.MIN_CONTRAST - 1e-6
    assert train.content_hash != heldout.content_hash


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_photograph_tiles_show_only_their_region(split: str, monkeypatch: pytest.MonkeyPatch):
    """Painting the other region changes no tile."""
    before = load_images("photos", split=split)  # type: ignore[arg-type]
    other = "heldout" if split == "train" else "train"
    convert = Image.Image.convert

    def painted(self: Image.Image, *args: Any, **kwargs: Any) -> Image.Image:
        image = convert(self, *args, **kwargs)
        left, right = embedded.region(image.width, other)  # type: ignore[arg-type]
        image.paste((255, 0, 255), (left, 0, right, image.height))
        return image

    monkeypatch.setattr(Image.Image, "convert", painted)
    assert load_images("photos", split=split).content_hash == before.content_hash  # type: ignore[arg-type]


# folders


def test_folder_with_split_folders(tmp_path: Path):
    class_tree(tmp_path / "train", per_class=4)
    class_tree(tmp_path / "test", per_class=2)
    train = load_images(f"folder:{tmp_path}", split="train")
    heldout = load_images(f"folder:{tmp_path}", split="heldout")
    assert train.class_names == heldout.class_names == ("a", "b")
    assert train.labels.tolist() == [0] * 4 + [1] * 4
    assert heldout.labels.tolist() == [0] * 2 + [1] * 2
    expected = np.asarray(Image.open(tmp_path / "train/a/0.png")).transpose(2, 0, 1)
    np.testing.assert_array_equal(train.images[0], expected)
    assert train.notes == ()


def test_folder_without_splits_is_divided_by_content(tmp_path: Path):
    class_tree(tmp_path / "x", per_class=40)
    parts = [load_images(f"folder:{tmp_path / 'x'}", split=s) for s in ("train", "heldout")]  # type: ignore[arg-type]
    assert sum(map(len, parts)) == 80
    assert 4 <= len(parts[1]) <= 32
    assert not {i.tobytes() for i in parts[0].images} & {i.tobytes() for i in parts[1].images}
    assert "hash of its pixels" in parts[0].notes[-1]
    (tmp_path / "x/a/0.png").rename(tmp_path / "x/a/zz.png")  # names do not decide
    again = load_images(f"folder:{tmp_path / 'x'}", split="heldout")
    assert {i.tobytes() for i in again.images} == {i.tobytes() for i in parts[1].images}


def test_flat_folders_and_wrong_sizes_are_said(tmp_path: Path):
    for index in range(6):
        picture(tmp_path / "train" / f"{index}.png", seed=index)
    picture(tmp_path / "train/wide.png", width=100, height=40)
    picture(tmp_path / "val/small.png", width=5, height=9)
    images = load_images(f"folder:{tmp_path}", split="train")
    assert images.images.shape == (7, 3, 32, 32)
    assert images.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert images.notes[0].startswith("Resized: 1 to 32 x 32, 1 of them cropped")
    assert "no class folders" in images.notes[1]


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_one_corrupt_jpeg_is_named_with_the_fix(tmp_path: Path, damage: str):
    class_tree(tmp_path / "train")
    class_tree(tmp_path / "test")
    bad = tmp_path / "train/a/bad.jpg"
    picture(bad, seed=5)
    content = bad.read_bytes()
    bad.write_bytes(
        {"truncated": content[: len(content) // 2], "garbage": b"#" * 99, "empty": b""}[damage]
    )
    with pytest.raises(SourceError, match=r"bad\.jpg cannot be read.*--skip-corrupt") as caught:
        load_images(f"folder:{tmp_path}", split="train")
    assert "\n" not in str(caught.value)
    images = load_images(f"folder:{tmp_path}", split="train", skip_corrupt=True)
    assert len(images) == 6
    assert images.notes[0].startswith("Left out: 1 that cannot be read: train/a/bad.jpg (")


def test_folders_without_pictures(tmp_path: Path):
    with pytest.raises(SourceError, match="is not a folder"):
        load_images(f"folder:{tmp_path / 'absent'}", split="train")
    with pytest.raises(SourceError, match=r"has no pictures .*PATH/CLASS"):
        load_images(f"folder:{tmp_path}", split="train")
    picture(tmp_path / "a/0.png")
    picture(tmp_path / "1.png")
    with pytest.raises(SourceError, match="beside its class folders"):
        load_images(f"folder:{tmp_path}", split="train")


@pytest.mark.parametrize(
    "source", ["photos:/x", "digits:/x", "folder:", "folder", "mnist", "kmnist:/x", "svhn:", ""]
)
def test_unknown_sources_are_refused(source: str):
    known = (
        "use photos, digits, folder:PATH, cifar10:PATH, cifar100:PATH, mnist:PATH, "
        "fashion-mnist:PATH, svhn:PATH or tiny-imagenet:PATH"
    )
    with pytest.raises(SourceError, match=known):
        load_images(source, split="train")


def test_in_one_channel_colours_become_their_luma_and_the_notes_say_so(tmp_path: Path):
    class_tree(tmp_path / "train")
    class_tree(tmp_path / "test")
    rgb = load_images(f"folder:{tmp_path}", split="train")
    grey = load_images(f"folder:{tmp_path}", split="train", channels=1)
    assert grey.images.shape == (len(rgb), 1, 32, 32)
    assert grey.images.dtype == np.uint8
    red, green, blue = (rgb.images[:, channel].astype(float) for channel in range(3))
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    np.testing.assert_allclose(grey.images[:, 0], luma, atol=0.51)
    assert grey.notes == ("Colours were made grey: 0.299 red + 0.587 green + 0.114 blue.",)
    assert rgb.notes == ()
    assert grey.labels.tolist() == rgb.labels.tolist()
    assert grey.content_hash != rgb.content_hash


HASHES = {
    "train": "e5bf22ea03e423eb434bcd16581e6f6c2c730ab4f1f0a69cbae069eef8d82b1c",
    "heldout": "57ae0f381884f794d7c4067c81077da11a629f41e1c18f9aba5966af3e642691",
}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_content_hash_is_that_of_the_pictures(split: Any):
    assert load_images("digits", split=split, size=8).content_hash == HASHES[split]


def test_an_installation_without_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "_DIGITS", tmp_path / "digits.npz")
    with pytest.raises(SourceError, match=r"digits\.npz is missing; install palimpsest again"):
        load_images("digits", split="train")


def test_file_and_licence_are_packaged():
    root = Path(__file__).parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    assert all((root / file).is_file() for file in settings["project"]["license-files"])
    packaged = settings["tool"]["setuptools"]["package-data"]["storage.sources"]
    assert {"digits.npz", "digits.txt"} <= set(packaged)
