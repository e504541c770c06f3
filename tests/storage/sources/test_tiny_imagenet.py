from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from storage.errors import SourceError
from storage.sources.load import load_images

WNIDS = ["n02124075", "n01443537", "n03014705"]
WORDS = {
    "n00001740": "entity",
    "n01443537": "goldfish, Carassius auratus",
    "n02124075": "Egyptian cat",
    "n03014705": "chest",
}
FIX = r"unpack http://cs231n\S+\.zip again and give its folder tiny-imagenet-200"


def colour(wnid: str, number: int) -> tuple[int, int, int]:
    return (40 * WNIDS.index(wnid) + 20, 60 * number + 30, 200)


def save(file: Path, colour: tuple[int, int, int] | int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", (64, 64), colour).save(file, "JPEG")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The official folder: two training pictures per class and one to validate with."""
    root = tmp_path / "tiny-imagenet-200"
    annotations = []
    for i, wnid in enumerate(WNIDS):
        for number in range(2):
            save(root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", colour(wnid, number))
        boxes = "".join(f"{wnid}_{number}.JPEG\t0\t10\t63\t58\n" for number in range(2))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(boxes)
        save(root / "val" / "images" / f"val_{i}.JPEG", colour(wnid, 2))
        annotations.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(reversed(annotations)))
    save(root / "test" / "images" / "test_0.JPEG", 255)
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in WNIDS))
    (root / "words.txt").write_text("".join(f"{wnid}\t{w}\n" for wnid, w in WORDS.items()))
    return root


def assert_colours(images: np.ndarray, expected: list[tuple[int, int, int]]) -> None:
    np.testing.assert_allclose(images.mean((2, 3)), expected, atol=2)


def test_both_splits_in_the_order_of_the_classes(root: Path):
    train = load_images(f"tiny-imagenet:{root}", split="train", size=64)
    assert train.images.dtype == np.uint8
    assert train.images.shape == (6, 3, 64, 64)
    assert train.labels.dtype == np.int64
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert train.class_names == ("Egyptian cat", "goldfish", "chest")
    assert_colours(train.images, [colour(wnid, number) for wnid in WNIDS for number in range(2)])
    assert (train.name, train.split, train.notes) == ("Tiny ImageNet", "train", ())
    heldout = load_images(f"tiny-imagenet:{root}", split="heldout", size=64)
    assert heldout.labels.tolist() == [2, 1, 0]
    assert_colours(heldout.images, [colour(wnid, 2) for wnid in reversed(WNIDS)])
    assert heldout.notes == ("Tiny ImageNet's validation images are held out.",)
    assert heldout.class_names == train.class_names


def test_the_folder_above_will_do(root: Path):
    above = load_images(f"tiny-imagenet:{root.parent}", split="train", size=64)
    assert (
        above.content_hash
        == load_images(f"tiny-imagenet:{root}", split="train", size=64).content_hash
    )


def test_grey_pictures_become_rgb_and_other_files_are_not_read(root: Path):
    images = root / "train" / WNIDS[0] / "images"
    save(images / f"{WNIDS[0]}_0.JPEG", 77)
    (images / "Thumbs.db").write_bytes(b"x")
    (images / f"._{WNIDS[0]}_0.JPEG").write_bytes(b"x")
    read = load_images(f"tiny-imagenet:{root}", split="train", size=64)
    assert len(read) == 6
    assert (read.images[0] == 77).all()


def test_classes_of_one_name_are_told_apart(root: Path):
    words = (root / "words.txt").read_text()
    (root / "words.txt").write_text(words.replace("chest", "goldfish, another"))
    read = load_images(f"tiny-imagenet:{root}", split="train", size=64)
    assert read.class_names == ("Egyptian cat", "goldfish (n01443537)", "goldfish (n03014705)")


def test_only_the_asked_split_need_be_there(root: Path):
    shutil.rmtree(root / "val")
    assert len(load_images(f"tiny-imagenet:{root}", split="train", size=64)) == 6
    with pytest.raises(SourceError, match=f"val has no val_annotations.txt; {FIX}"):
        load_images(f"tiny-imagenet:{root}", split="heldout", size=64)


def test_pictures_are_held_once(root: Path):
    images = root / "train" / WNIDS[0] / "images"
    for number in range(2, 400):
        (images / f"{number}.JPEG").hardlink_to(images / f"{WNIDS[0]}_0.JPEG")
    tracemalloc.start()
    try:
        read = load_images(f"tiny-imagenet:{root}", split="train", size=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(read) == 404
    assert read.images.nbytes <= peak < 1.3 * read.images.nbytes


def test_a_path_without_the_folder_is_refused(tmp_path: Path):
    archive = tmp_path / "tiny-imagenet-200.zip"
    archive.write_bytes(b"PK")
    for path in (archive, tmp_path / "absent"):
        with pytest.raises(SourceError, match=f"{path.name} is not a folder; give tiny-imagenet:"):
            load_images(f"tiny-imagenet:{path}", split="train")
    with pytest.raises(SourceError, match=f"{tmp_path} has no wnids.txt; {FIX}"):
        load_images(f"tiny-imagenet:{tmp_path}", split="train")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("wnids.txt", "\n \n", "wnids.txt is empty; "),
        ("words.txt", "\xff\xfe", "words.txt is not text; "),
        ("wnids.txt", "n02124075\nn02124075\n", "wnids.txt has n02124075 twice; "),
        (
            "wnids.txt",
            "n02124075\nn09\n",
            r"words.txt has no words for n09 \(of 1 such classes\); ",
        ),
        ("words.txt", "n02124075\tEgyptian cat\nn01443537\n", r"no words for n01443537 \(of 2 "),
        ("words.txt", "n02124075\tEgyptian cat\nn01443537\t \n", r"no words for n01443537 \(of 2 "),
        ("val/val_annotations.txt", "val_0.JPEG n02124075\n", "annotations.txt has 'val_0.JPEG n0"),
        (
            "val/val_annotations.txt",
            "val_0.JPEG\tn09\t0\n",
            r"has 'val_0.JPEG\\tn09\\t0' in line 1",
        ),
        ("val/val_annotations.txt", "../val_0.JPEG\tn02124075\n", "expected the name of a picture"),
        ("val/val_annotations.txt", "v.JPEG\tn02124075\n", r"v\.JPEG is missing \(of 1 pictures"),
    ],
)
def test_wrong_lists_are_named(root: Path, name: str, text: str, message: str):
    (root / name).write_text(text, "latin-1")
    with pytest.raises(SourceError, match=message) as caught:
        load_images(f"tiny-imagenet:{root}", split="heldout", size=64)
    assert "cs231n" in str(caught.value)


def test_sorted_validation_pictures_are_pointed_to_folder(root: Path):
    (root / "val" / WNIDS[0]).mkdir()
    (root / "val" / "images" / "val_0.JPEG").rename(root / "val" / WNIDS[0] / "val_0.JPEG")
    with pytest.raises(SourceError, match=r"val_0\.JPEG is missing .*, or give folder:PATH if"):
        load_images(f"tiny-imagenet:{root}", split="heldout", size=64)


@pytest.mark.parametrize("emptied", [True, False])
def test_a_class_without_pictures_is_named(root: Path, emptied: bool):
    folder = root / "train" / WNIDS[1] / "images"
    shutil.rmtree(folder)
    if emptied:
        folder.mkdir()
    with pytest.raises(SourceError, match=rf"{WNIDS[1]}/images has no pictures; {FIX}"):
        load_images(f"tiny-imagenet:{root}", split="train", size=64)


def test_corrupt_pictures_are_named_or_left_out(root: Path):
    file = root / "train" / WNIDS[1] / "images" / f"{WNIDS[1]}_1.JPEG"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(SourceError, match=rf"{file.name} cannot be read as a picture .*remove it"):
        load_images(f"tiny-imagenet:{root}", split="train", size=64)
    read = load_images(f"tiny-imagenet:{root}", split="train", size=64, skip_corrupt=True)
    assert read.labels.tolist() == [0, 0, 1, 2, 2]
    left_out = file.relative_to(root).as_posix()
    assert read.notes == (f"1 of 6 files could not be read and were left out: {left_out}.",)
