from __future__ import annotations

import gzip
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import SourceError
from storage.sources.load import load_images

FINE = [f"fine {number:02}" for number in range(100)]
COARSE = [f"coarse {number:02}" for number in range(20)]
SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"
N = {"train": 6, "test": 3}


def pixels(name: str) -> np.ndarray:
    """Rows of 3072 bytes as the official files have them: red, green, blue, each row by row."""
    return np.random.default_rng(len(name)).integers(0, 256, (N[name], 3072), dtype=np.uint8)


def fine_labels(name: str) -> list[int]:
    return [(37 * row + len(name)) % 100 for row in range(N[name])]


def batch(name: str, **changes: Any) -> dict[str, Any]:
    official = {
        "filenames": [f"{row}.png" for row in range(N[name])],
        "batch_label": name,
        "fine_labels": fine_labels(name),
        "coarse_labels": [label // 5 for label in fine_labels(name)],
        "data": pixels(name),
    }
    return official | changes


def meta(**changes: Any) -> dict[str, Any]:
    return {"fine_label_names": FINE, "coarse_label_names": COARSE} | changes


def as_bytes(value: Any) -> Any:
    """What Python 2 pickles a str as."""
    if isinstance(value, dict):
        return {as_bytes(key): as_bytes(content) for key, content in value.items()}
    if isinstance(value, list):
        return [as_bytes(item) for item in value]
    return value.encode() if isinstance(value, str) else value


def write(path: Path, content: Any, *, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=protocol))


def cifar100_folder(folder: Path, *, protocol: int = 2, python2: bool = True) -> Path:
    for name, content in {"train": batch("train"), "test": batch("test"), "meta": meta()}.items():
        write(folder / name, as_bytes(content) if python2 else content, protocol=protocol)
    return folder


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("python2", [True, False])
def test_both_splits_with_their_fine_labels(tmp_path: Path, protocol: int, python2: bool):
    folder = cifar100_folder(tmp_path / "cifar-100-python", protocol=protocol, python2=python2)
    splits = {"train": "train", "heldout": "test"}
    for split, name in splits.items():
        for path in (tmp_path, folder):
            read = load_images(f"cifar100:{path}", split=split)  # type: ignore[arg-type]
            assert read.images.dtype == np.uint8
            assert read.images.flags.c_contiguous
            np.testing.assert_array_equal(read.images.reshape(N[name], 3072), pixels(name))
            assert read.labels.dtype == np.int64
            assert read.labels.tolist() == fine_labels(name)
            assert read.class_names == tuple(FINE)
            assert (read.name, read.split) == ("CIFAR-100", split)
    train = load_images(f"cifar100:{tmp_path}", split="train")
    assert train.notes == ()
    heldout = load_images(f"cifar100:{tmp_path}", split="heldout")
    assert heldout.notes == ("CIFAR-100's test images are held out.",)


def test_rows_of_pixels_are_rows_of_the_picture(tmp_path: Path):
    folder = cifar100_folder(tmp_path / "c")
    picture = np.zeros((3, 32, 32), np.uint8)
    picture[1, 2, 30] = 200
    rows = np.stack([np.zeros(3072, np.uint8), picture.ravel()])
    write(folder / "test", as_bytes(batch("test", data=rows, fine_labels=[99, 0])))
    read = load_images(f"cifar100:{folder}", split="heldout")
    assert np.argwhere(read.images).tolist() == [[1, 1, 2, 30]]
    assert read.labels.tolist() == [99, 0]


def test_archive_and_folder_have_the_same_content_hash(tmp_path: Path):
    folder = cifar100_folder(tmp_path / "cifar-100-python")
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)
    for split, expected in HASHES.items():
        packed, unpacked = (
            load_images(f"cifar100:{path}", split=split)  # type: ignore[arg-type]
            for path in (archive, tmp_path)
        )
        assert packed.content_hash == unpacked.content_hash == expected


HASHES = {
    "train": "81db0265144bd5434f79f8f88f42c54bffd80f7cc710da301678e0445a6f5244",
    "heldout": "58742ef4534cbcadeefab28cfc5f7062e787b7291d1dc5502c7bd048e944ef3e",
}


def test_other_sizes_are_resized_and_said(tmp_path: Path):
    read = load_images(f"cifar100:{cifar100_folder(tmp_path / 'c')}", split="heldout", size=16)
    assert read.images.shape == (3, 3, 16, 16)
    mean = pixels("test").reshape(3, 3, 16, 2, 16, 2).mean((3, 5))
    np.testing.assert_allclose(read.images, mean, atol=1)
    assert read.notes[-1] == "all 3 pictures were resized from 32 x 32 to 16 x 16."


def test_the_edition_without_duplicates_is_called_so(tmp_path: Path):
    assert "cifair" not in str(tmp_path).lower()
    cifar100_folder(tmp_path / "ciFAIR-100", python2=False, protocol=4)
    read = load_images(f"cifar100:{tmp_path}", split="heldout")
    assert (read.name, len(read)) == ("ciFAIR-100", 3)
    assert read.notes == ("ciFAIR-100's test images are held out.",)


def test_only_the_asked_split_and_meta_need_be_there(tmp_path: Path):
    folder = cifar100_folder(tmp_path / "c")
    (folder / "test").unlink()
    assert len(load_images(f"cifar100:{folder}", split="train")) == 6
    with pytest.raises(SourceError, match=r"has no test; give cifar100:PATH to cifar-100-python\."):
        load_images(f"cifar100:{folder}", split="heldout")
    (folder / "meta").unlink()
    with pytest.raises(SourceError, match=r"c has no meta; .* folder cifar-100-python in it") as e:
        load_images(f"cifar100:{folder}", split="train")
    assert SITE in str(e.value)


def test_paths_and_archives_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(SourceError, match=r"absent does not exist; give cifar100:PATH .*kriz"):
        load_images(f"cifar100:{tmp_path / 'absent'}", split="train")
    archive = tmp_path / "c.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(cifar100_folder(tmp_path / "c", protocol=4), "cifar-100-python")
    whole = archive.read_bytes()
    tar = gzip.decompress(whole)
    within = tar.index(pixels("train").tobytes()) + 100
    second = gzip.compress(tar[within:])
    no_deflate = second[:10] + b"\xff" * 20 + second[30:]
    damaged = {
        "cut": whole[: len(whole) // 2],
        "not an archive": b"PK\x03\x04 something else",
        "cut before it was compressed": gzip.compress(tar[:within]),
        "garbled": gzip.compress(tar[:within]) + no_deflate,
        "another checksum": whole[:-8] + bytes(255 - byte for byte in whole[-8:-4]) + whole[-4:],
    }
    for content in damaged.values():
        archive.write_bytes(content)
        with pytest.raises(SourceError, match=r"c\.tar\.gz is not a readable .*100-python") as e:
            load_images(f"cifar100:{archive}", split="train")
        assert "\n" not in str(e.value)


def test_cifar_10_is_not_taken_for_cifar_100(tmp_path: Path):
    rows = np.zeros((2, 3072), np.uint8)
    for name in ("data_batch_1", "test_batch"):
        write(tmp_path / "c" / name, {b"data": rows, b"labels": [0, 1]})
    with pytest.raises(SourceError, match="has no train, meta; give cifar100:PATH"):
        load_images(f"cifar100:{tmp_path / 'c'}", split="train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((3, 5), np.uint8)}, "test is not a CIFAR-100 batch"),
        ({"data": np.zeros((3, 3072), np.int64)}, "test is not a CIFAR-100 batch"),
        ({"data": [[0] * 3072] * 3}, "test is not a CIFAR-100 batch"),
        ({"data": np.zeros((0, 3072), np.uint8), "fine_labels": []}, "not a CIFAR-100 batch"),
        ({"fine_labels": [1, 2]}, "as many 'fine_labels'"),
        ({"fine_labels": None}, "as many 'fine_labels'"),
        ({"fine_labels": [0, 1, 100]}, r"test has the label 100 in row 2; .* 0 to 99"),
        ({"fine_labels": [0, -1, 5]}, r"test has the label -1 in row 1"),
        ({"fine_labels": [0.5, 1, 5]}, r"test has the label 0\.5 in row 0"),
        ({"fine_labels": ["x", 1, 5]}, r"test has the label b'x' in row 0"),
    ],
)
def test_wrong_shapes_and_labels_are_named(tmp_path: Path, changes: dict[str, Any], message: str):
    folder = cifar100_folder(tmp_path / "c")
    write(folder / "test", as_bytes(batch("test", **changes)), protocol=4)
    with pytest.raises(SourceError, match=message) as caught:
        load_images(f"cifar100:{folder}", split="heldout")
    assert "download cifar-100-python.tar.gz again" in str(caught.value)


@pytest.mark.parametrize(
    "names", [None, FINE[:99], COARSE, [*FINE[:99], FINE[0]], [*FINE[:99], 1], [*FINE[:99], []], 3]
)
def test_meta_without_100_fine_names_is_refused(tmp_path: Path, names: Any):
    folder = cifar100_folder(tmp_path / "c")
    write(folder / "meta", as_bytes(meta(fine_label_names=names)))
    with pytest.raises(SourceError, match="meta is not CIFAR-100's: expected 100 different"):
        load_images(f"cifar100:{folder}", split="train")


@pytest.mark.parametrize("name", ["test", "meta"])
@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps(batch("test"))[:-40]])
def test_truncated_pickles_are_named(tmp_path: Path, name: str, content: bytes):
    folder = cifar100_folder(tmp_path / "c")
    (folder / name).write_bytes(content)
    with pytest.raises(SourceError, match=f"{name} is not a readable pickle") as caught:
        load_images(f"cifar100:{folder}", split="heldout")
    assert "\n" not in str(caught.value)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["test", "meta"])
def test_nothing_in_a_file_is_run(tmp_path: Path, name: str):
    folder = cifar100_folder(tmp_path / "c")
    write(folder / name, {"fine_label_names": Malicious(tmp_path / "owned")}, protocol=4)
    with pytest.raises(SourceError, match=f"{name} names .*not run"):
        load_images(f"cifar100:{folder}", split="heldout")
    assert not (tmp_path / "owned").exists()
