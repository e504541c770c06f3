from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import SourceError
from storage.sources.load import load_images

KINDS = ["mnist", "fashion-mnist"]
SITES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}
LABELS = {"train": [5, 0, 4, 1, 9], "t10k": [7, 2]}
IMAGES_FILE = "t10k-images-idx3-ubyte"
LABELS_FILE = "t10k-labels-idx1-ubyte"


def grey(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).integers(0, 256, (len(LABELS[name]), 28, 28), np.uint8)


def idx(values: np.ndarray, *, type_code: int = 8) -> bytes:
    header = bytes((0, 0, type_code, values.ndim))
    return header + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write(folder: Path, name: str, *, packed: bool = True, **changes: Any) -> None:
    """Both files of a split as the official ones are."""
    official = {"images": grey(name), "labels": np.array(LABELS[name], np.uint8)} | changes
    folder.mkdir(parents=True, exist_ok=True)
    for kind, values in official.items():
        file = folder / f"{name}-{kind}-idx{ {'images': 3, 'labels': 1}[kind] }-ubyte"
        content = idx(values)
        if packed:
            file.with_name(file.name + ".gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            file.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [True, False])
def test_both_splits_in_three_equal_channels(tmp_path: Path, kind: str, packed: bool):
    for name in LABELS:
        write(tmp_path, name, packed=packed)
    for split, name in {"train": "train", "heldout": "t10k"}.items():
        read = load_images(f"{kind}:{tmp_path}", split=split, size=28)  # type: ignore[arg-type]
        assert read.images.dtype == np.uint8
        assert read.images.flags.c_contiguous
        assert read.images.shape == (len(LABELS[name]), 3, 28, 28)
        for channel in range(3):
            np.testing.assert_array_equal(read.images[:, channel], grey(name))
        assert read.labels.dtype == np.int64
        assert read.labels.tolist() == LABELS[name]
        assert read.split == split
    assert load_images(f"{kind}:{tmp_path}", split="train", size=28).notes == ()
    name = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}[kind]
    heldout = load_images(f"{kind}:{tmp_path}", split="heldout", size=28)
    assert (heldout.name, heldout.notes) == (name, (f"{name}'s test images are held out.",))


def test_class_names(tmp_path: Path):
    write(tmp_path, "t10k")
    digits, clothes = (load_images(f"{kind}:{tmp_path}", split="heldout") for kind in KINDS)
    assert digits.class_names == tuple("0123456789")
    assert [clothes.class_names[number] for number in (0, 7, 9)] == [
        "T-shirt/top",
        "Sneaker",
        "Ankle boot",
    ]
    assert len(clothes.class_names) == 10
    assert digits.content_hash != clothes.content_hash


def test_in_grey_they_are_the_bytes_of_the_file(tmp_path: Path):
    write(tmp_path, "train")
    read = load_images(f"mnist:{tmp_path}", split="train", size=28, channels=1)
    np.testing.assert_array_equal(read.images, grey("train")[:, None])
    assert read.notes == ()


def test_other_sizes_are_resized_and_said(tmp_path: Path):
    write(tmp_path, "t10k")
    read = load_images(f"mnist:{tmp_path}", split="heldout", size=14)
    mean = grey("t10k").reshape(-1, 14, 2, 14, 2).mean((2, 4))
    np.testing.assert_allclose(read.images[:, 1], mean, atol=1)
    assert read.notes[-1] == "all 2 pictures were resized from 28 x 28 to 14 x 14."
    assert load_images(f"mnist:{tmp_path}", split="heldout").images.shape == (2, 3, 32, 32)


@pytest.mark.parametrize("below", ["raw", "MNIST/raw"])
def test_torchvisions_folder(tmp_path: Path, below: str):
    write(tmp_path / below, "t10k", packed=False)
    write(tmp_path / "FashionMNIST/raw", "t10k", labels=np.array([1, 2], np.uint8))
    mnist = load_images(f"mnist:{tmp_path}", split="heldout", size=28)
    assert mnist.labels.tolist() == LABELS["t10k"]
    if below == "MNIST/raw":
        fashion = load_images(f"fashion-mnist:{tmp_path}", split="heldout", size=28)
        assert fashion.labels.tolist() == [1, 2]


def test_the_name_does_not_say_whether_a_file_is_packed(tmp_path: Path):
    """Some browsers unpack what they download and keep its name."""
    write(tmp_path, "t10k", packed=False)
    for name in (IMAGES_FILE, LABELS_FILE):
        (tmp_path / name).rename(tmp_path / f"{name}.gz")
    assert len(load_images(f"mnist:{tmp_path}", split="heldout")) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_files_of_the_asked_split_need_be_there(tmp_path: Path, kind: str):
    write(tmp_path, "train")
    assert len(load_images(f"{kind}:{tmp_path}", split="train")) == 5
    for missing in (IMAGES_FILE, LABELS_FILE):
        with pytest.raises(SourceError, match=f"has no {missing} or {missing}.gz; download") as e:
            load_images(f"{kind}:{tmp_path}", split="heldout")
        assert f"{SITES[kind]}{missing}.gz" in str(e.value)
        write(tmp_path, "t10k")
        (tmp_path / f"{LABELS_FILE}.gz").unlink()
    for path in (tmp_path / f"{IMAGES_FILE}.gz", tmp_path / "absent"):
        with pytest.raises(SourceError, match=rf"{path.name} is not a folder; give {kind}:PATH"):
            load_images(f"{kind}:{path}", split="heldout")


@pytest.mark.parametrize(
    ("changes", "file", "message"),
    [
        ({"images": grey("t10k")[:1]}, LABELS_FILE, "2 labels, but t10k-images.* 1 images"),
        ({"images": grey("t10k")[:, 1:]}, IMAGES_FILE, r"\(2, 27, 28\); expected \(n, 28, 28\)"),
        ({"images": grey("t10k")[:0]}, IMAGES_FILE, r"\(0, 28, 28\); expected .* n > 0"),
        ({"images": grey("t10k")[0]}, IMAGES_FILE, r"begins with .*of 3 dimensions"),
        ({"labels": np.zeros(0, np.uint8)}, LABELS_FILE, r"shape \(0,\); expected \(n,\)"),
        ({"labels": np.zeros((2, 1), np.uint8)}, LABELS_FILE, r"begins with .*of 1 dimensions"),
        ({"labels": np.array([3, 10], np.uint8)}, LABELS_FILE, "the label 10 in row 1"),
    ],
)
def test_wrong_shapes_and_labels_are_named(
    tmp_path: Path, changes: dict[str, Any], file: str, message: str
):
    write(tmp_path, "t10k", **changes)
    with pytest.raises(SourceError, match=message) as caught:
        load_images(f"mnist:{tmp_path}", split="heldout")
    assert f"{file}.gz" in str(caught.value)
    assert f"download it again, from {SITES['mnist']}{file}.gz" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("share", [0, 0.005, 0.03, 0.3, 0.9, 0.999])
def test_truncated_files_are_named(tmp_path: Path, packed: bool, share: float):
    write(tmp_path, "t10k", packed=packed)
    file = tmp_path / (f"{IMAGES_FILE}.gz" if packed else IMAGES_FILE)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(SourceError, match=rf"{IMAGES_FILE}.*download it again") as caught:
        load_images(f"mnist:{tmp_path}", split="heldout")
    assert "\n" not in str(caught.value)


def test_more_values_than_the_header_says_are_refused(tmp_path: Path):
    write(tmp_path, "t10k", packed=False)
    with (tmp_path / LABELS_FILE).open("ab") as file:
        file.write(b"\x01")
    with pytest.raises(SourceError, match=r"more than 2 bytes of values, but says .* 2;"):
        load_images(f"mnist:{tmp_path}", split="heldout")


def test_a_header_may_not_promise_what_overflows(tmp_path: Path):
    write(tmp_path, "t10k", packed=False)
    (tmp_path / LABELS_FILE).write_bytes(b"\0\0\x08\x01\xff\xff\xff\xff\x01\x02")
    with pytest.raises(SourceError, match=r"shape \(4294967295,\); expected .* at most 500,000"):
        load_images(f"mnist:{tmp_path}", split="heldout")


def test_other_files_are_named(tmp_path: Path):
    """A page of errors instead of the file, swapped files, other types, pickles."""
    write(tmp_path, "t10k", packed=False)
    labels = (tmp_path / LABELS_FILE).read_bytes()
    signed = idx(grey("t10k").astype(np.int8), type_code=9)
    for wrong in (b"<!DOCTYPE html>\n<p>403</p>", labels, signed, b"\x80\x04\x95" + bytes(60)):
        (tmp_path / IMAGES_FILE).write_bytes(wrong)
        with pytest.raises(SourceError, match=f"{IMAGES_FILE} begins with b.*of 3 dim") as caught:
            load_images(f"mnist:{tmp_path}", split="heldout")
        assert "\n" not in str(caught.value)
        assert SITES["mnist"] in str(caught.value)


MNIST_COUNTS = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)


@pytest.mark.parametrize(
    ("kind", "counts", "right"),
    [("mnist", (1000,) * 10, "fashion-mnist"), ("fashion-mnist", MNIST_COUNTS, "mnist")],
)
def test_the_other_data_set_is_not_taken_for_this_one(
    tmp_path: Path, kind: str, counts: tuple[int, ...], right: str
):
    """The files of the two are called the same."""
    labels = np.repeat(np.arange(10, dtype=np.uint8), counts)
    write(tmp_path, "t10k", packed=False, images=np.zeros((10000, 28, 28), np.uint8), labels=labels)
    with pytest.raises(SourceError, match=f"as many labels of each class .*; give {right}:PATH"):
        load_images(f"{kind}:{tmp_path}", split="heldout", size=28)
    assert len(load_images(f"{right}:{tmp_path}", split="heldout", size=28)) == 10000
