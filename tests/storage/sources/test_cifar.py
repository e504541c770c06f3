"""Both editions of CIFAR, as folders and archives; nothing in their pickles is run."""

from __future__ import annotations

import gzip
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import SourceError
from storage.sources.load import CIFAR_CLASSES, load_images

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


def test_archive_and_folder_have_the_same_content_hash(tmp_path: Path):
    folder = cifar100_folder(tmp_path / "cifar-100-python")
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)
    packed, unpacked = (load_images(f"cifar100:{at}", split="train") for at in (archive, tmp_path))
    assert packed.content_hash == unpacked.content_hash


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


# CIFAR-10


def cifar_folder(folder: Path, *, protocol: int = 2, keys: type = bytes, n: int = 4) -> None:
    folder.mkdir(parents=True)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        rng = np.random.default_rng(len(name) + ord(name[-1]))
        batch = {
            "batch_label": name,
            "data": rng.integers(0, 256, (n, 3072), dtype=np.uint8),
            "labels": rng.integers(0, 10, n).tolist(),
            "filenames": [f"{index}.png" for index in range(n)],
        }
        if keys is bytes:
            batch = {key.encode(): value for key, value in batch.items()}  # type: ignore[misc]
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("keys", [bytes, str])
def test_cifar10_folder(tmp_path: Path, protocol: int, keys: type):
    cifar_folder(tmp_path / "cifar-10-batches-py", protocol=protocol, keys=keys)
    train = load_images(f"cifar10:{tmp_path}", split="train")
    heldout = load_images(f"cifar10:{tmp_path / 'cifar-10-batches-py'}", split="heldout")
    assert train.images.shape == (20, 3, 32, 32)
    assert heldout.images.shape == (4, 3, 32, 32)
    rng = np.random.default_rng(len("test_batch") + ord("h"))
    np.testing.assert_array_equal(
        heldout.images.reshape(4, 3072), rng.integers(0, 256, (4, 3072), dtype=np.uint8)
    )
    assert train.class_names == CIFAR_CLASSES


def test_cifar10_archive_and_cifair(tmp_path: Path):
    cifar_folder(tmp_path / "ciFAIR-10")
    archive = tmp_path / "c.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "ciFAIR-10", "cifar-10-batches-py")
    packed = load_images(f"cifar10:{archive}", split="train")
    unpacked = load_images(f"cifar10:{tmp_path}", split="train")
    assert packed.content_hash == unpacked.content_hash
    assert load_images(f"cifar10:{archive}", split="heldout", size=16).images.shape[2:] == (16, 16)
    for batch in (tmp_path / "ciFAIR-10").glob("data_*"):
        batch.unlink()
    fair = load_images(f"cifar10:{tmp_path / 'ciFAIR-10'}", split="heldout")
    assert (len(fair), fair.name) == (4, "ciFAIR-10")
    with pytest.raises(SourceError, match=r"has no data_batch_1, .*cifar-10-python\.tar\.gz"):
        load_images(f"cifar10:{tmp_path / 'ciFAIR-10'}", split="train")
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(SourceError, match="not a readable"):
        load_images(f"cifar10:{archive}", split="train")


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.where,))

    where = ""


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_before_it_runs(tmp_path: Path, protocol: int):
    cifar_folder(tmp_path / "c")
    Malicious.where = str(tmp_path / "owned")
    (tmp_path / "c/test_batch").write_bytes(pickle.dumps({b"data": Malicious()}, protocol=protocol))
    with pytest.raises(SourceError, match=r"test_batch names (posix|nt)\.mkdir.*not run"):
        load_images(f"cifar10:{tmp_path / 'c'}", split="heldout")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [1, 2]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}),
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": 1})[:-4],
        b"",
        b"not a pickle",
        pickle.dumps(np.array([{}], dtype=object)),
    ],
)
def test_broken_batches_are_refused(tmp_path: Path, content: bytes):
    cifar_folder(tmp_path / "c")
    (tmp_path / "c/test_batch").write_bytes(content)
    with pytest.raises(SourceError, match="test_batch") as caught:
        load_images(f"cifar10:{tmp_path / 'c'}", split="heldout")
    assert "\n" not in str(caught.value)
