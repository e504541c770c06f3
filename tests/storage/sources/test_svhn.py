from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from storage.errors import SourceError
from storage.sources.load import load_images

SITE = "http://ufldl.stanford.edu/housenumbers/"
DIGITS = {"train": [1, 10, 9, 2, 10], "test": [3, 10]}


def cropped(name: str) -> np.ndarray:
    """X of a file: row, column, channel, image."""
    rng = np.random.default_rng(len(name))
    return rng.integers(0, 256, (32, 32, 3, len(DIGITS[name])), dtype=np.uint8)


def write(
    folder: Path, name: str, *, compressed: bool = True, format: str = "5", **changes: Any
) -> Path:
    """A file as the official ones are; a change to None leaves the variable out."""
    official = {"X": cropped(name), "y": np.array(DIGITS[name], np.uint8)[:, None]}
    variables = {key: value for key, value in (official | changes).items() if value is not None}
    file = folder / f"{name}_32x32.mat"
    folder.mkdir(parents=True, exist_ok=True)
    savemat(file, variables, format=format, do_compression=compressed)
    return file


@pytest.mark.parametrize("compressed", [True, False])
def test_both_splits_and_ten_is_the_digit_zero(tmp_path: Path, compressed: bool):
    for name in DIGITS:
        write(tmp_path, name, compressed=compressed)
    for split, name in {"train": "train", "heldout": "test"}.items():
        read = load_images(f"svhn:{tmp_path}", split=split)  # type: ignore[arg-type]
        assert read.images.dtype == np.uint8
        assert read.images.flags.c_contiguous
        X = cropped(name)
        assert read.images.shape == (X.shape[3], 3, 32, 32)
        for row, image in enumerate(read.images):
            np.testing.assert_array_equal(image.transpose(1, 2, 0), X[:, :, :, row])
        assert read.labels.dtype == np.int64
        assert read.labels.tolist() == [digit % 10 for digit in DIGITS[name]]
        assert [read.class_names[label] for label in read.labels[:2]] == [str(DIGITS[name][0]), "0"]
        assert (read.name, read.split) == ("SVHN", split)
    assert load_images(f"svhn:{tmp_path}", split="train").notes == ()
    heldout = load_images(f"svhn:{tmp_path}", split="heldout")
    assert heldout.notes == ("SVHN's test images are held out.",)
    assert heldout.class_names == ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, ">f8"])
def test_labels_of_any_number_type(tmp_path: Path, dtype: Any):
    write(tmp_path, "test", y=np.array([[10], [7]], dtype))
    assert load_images(f"svhn:{tmp_path}", split="heldout").labels.tolist() == [0, 7]


def test_other_variables_are_not_read(tmp_path: Path):
    write(tmp_path, "test", note="text", cell=np.array([{"a": 1}, "b"], dtype=object))
    assert len(load_images(f"svhn:{tmp_path}", split="heldout")) == 2


def test_only_the_file_of_the_asked_split_need_be_there(tmp_path: Path):
    write(tmp_path, "train")
    write(tmp_path, "test").rename(tmp_path / "extra_32x32.mat")
    assert len(load_images(f"svhn:{tmp_path}", split="train")) == 5
    with pytest.raises(SourceError, match=r"has no test_32x32\.mat; download it .*cropped") as e:
        load_images(f"svhn:{tmp_path}", split="heldout")
    assert SITE in str(e.value)
    for path in (tmp_path / "train_32x32.mat", tmp_path / "absent"):
        with pytest.raises(SourceError, match=rf"{path.name} is not a folder; .*test_32x32\.mat"):
            load_images(f"svhn:{path}", split="heldout")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"X": None}, "has no variable X; expected uint8"),
        ({"X": cropped("test").astype(np.float64)}, r"X as float64 \(32, 32, 3, 2\); expected"),
        ({"X": cropped("test").transpose(3, 0, 1, 2)}, r"X as uint8 \(2, 32, 32, 3\); expected"),
        ({"X": cropped("test")[:, :, 0]}, r"X as uint8 \(32, 32, 2\); expected"),
        ({"X": cropped("test")[..., :0]}, r"X as uint8 \(32, 32, 3, 0\); expected"),
        ({"X": np.array([[{"a": 1}]], dtype=object)}, r"X as cell"),
        ({"y": None}, r"has no variable y; expected numbers \(2, 1\)"),
        ({"y": np.array([[1]])}, r"y as int64 \(1, 1\); expected numbers \(2, 1\)"),
        ({"y": "ab"}, r"y as char"),
        ({"y": np.array([[1j], [2]])}, r"y as complex128 \(2, 1\)"),
        ({"y": np.array([[1], [0]])}, r"the label 0 in row 1; SVHN has 1 to 10"),
        ({"y": np.array([[11], [1]])}, r"the label 11 in row 0"),
        ({"y": np.array([[1.0], [2.5]])}, r"the label 2\.5 in row 1"),
        ({"y": np.array([[np.nan], [2]])}, r"the label nan in row 0"),
    ],
)
def test_wrong_shapes_and_labels_are_named(tmp_path: Path, changes: dict[str, Any], message: str):
    write(tmp_path, "test", **changes)
    with pytest.raises(SourceError, match=message) as caught:
        load_images(f"svhn:{tmp_path}", split="heldout")
    assert "test_32x32.mat has " in str(caught.value)
    assert f"download it again, from {SITE}" in str(caught.value)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("share", [0, 0.005, 0.03, 0.3, 0.9, 0.99])
def test_truncated_files_are_named(tmp_path: Path, compressed: bool, share: float):
    file = write(tmp_path, "test", compressed=compressed)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(SourceError, match=r"test_32x32\.mat (cannot be|has no).*download") as e:
        load_images(f"svhn:{tmp_path}", split="heldout")
    assert "\n" not in str(e.value)


def test_other_files_are_named(tmp_path: Path):
    file = write(tmp_path, "test")
    content = bytearray(file.read_bytes())
    content[300:364] = bytes(255 - byte for byte in content[300:364])
    for wrong in (b"not a MATLAB file" * 20, bytes(2000), bytes(content)):
        file.write_bytes(wrong)
        with pytest.raises(SourceError, match=r"test_32x32\.mat cannot be read as a MATLAB") as e:
            load_images(f"svhn:{tmp_path}", split="heldout")
        assert "\n" not in str(e.value)
        assert SITE in str(e.value)


def test_version_73_is_refused_with_the_option_that_helps(tmp_path: Path):
    file = write(tmp_path, "test")
    hdf5 = b"\x89HDF\r\n\x1a\n" + bytes(64)
    header = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    for content in (header.ljust(512, b"\x00") + hdf5, hdf5):
        file.write_bytes(content)
        with pytest.raises(SourceError, match=r"test_32x32\.mat is a MATLAB 7\.3 file.*-v7"):
            load_images(f"svhn:{tmp_path}", split="heldout")


def test_two_variables_of_one_name_are_refused(tmp_path: Path):
    parts = [write(tmp_path, "test", y=None).read_bytes() for _copy in range(2)]
    file = write(tmp_path, "test", X=None)
    file.write_bytes(parts[0] + parts[1][128:] + file.read_bytes()[128:])
    with pytest.raises(SourceError, match=r"cannot be read as a MATLAB file .*Duplicate"):
        load_images(f"svhn:{tmp_path}", split="heldout")
