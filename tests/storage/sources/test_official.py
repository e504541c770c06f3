"""Published data sets in tiny files of the real formats: what is read, and what is refused."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from storage.errors import SourceError
from storage.sources.load import CIFAR_CLASSES, ImageSet, load_images
from storage.sources.official import _EDITIONS

N = {"train": 5, "heldout": 3}
FINE = [f"fine {number:02}" for number in range(100)]
WNIDS = ["n02124075", "n01443537", "n03014705"]
WORDS = "n00001740\tentity\nn01443537\tgoldfish, Carassius\nn02124075\tEgyptian cat\n"


def pixels(split: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(N[split]).integers(0, 256, (N[split], *shape), dtype=np.uint8)


def labels(split: str, n_classes: int = 10) -> list[int]:
    return [(37 * row + N[split]) % n_classes for row in range(N[split])]


# The files of each data set: a function writes those of a split, with changes by name.


def idx(values: np.ndarray, type_code: int = 8) -> bytes:
    header = bytes((0, 0, type_code, values.ndim))
    return header + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def mnist(folder: Path, split: str, *, packed: bool = True, **changes: Any) -> None:
    official = {
        "images": pixels(split, 28, 28),
        "labels": np.array(labels(split), np.uint8),
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for kind, values in official.items():
        name = f"{ {'train': 'train', 'heldout': 't10k'}[split] }-{kind}-idx{values.ndim}-ubyte"
        name = name.replace("images-idx2", "images-idx3").replace("labels-idx2", "labels-idx1")
        content = idx(values)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(
            gzip.compress(content, mtime=0) if packed else content
        )


def svhn(folder: Path, split: str, *, compressed: bool = True, **changes: Any) -> None:
    """A change to None leaves the variable out."""
    official = {
        "X": pixels(split, 3, 32, 32).transpose(2, 3, 1, 0),
        "y": np.array([label or 10 for label in labels(split)])[:, None],
        **changes,
    }
    variables = {key: value for key, value in official.items() if value is not None}
    name = {"train": "train_32x32.mat", "heldout": "test_32x32.mat"}[split]
    folder.mkdir(parents=True, exist_ok=True)
    savemat(folder / name, variables, do_compression=compressed)


def as_bytes(value: Any) -> Any:
    """What Python 2 pickles a str as."""
    if isinstance(value, dict):
        return {as_bytes(key): as_bytes(content) for key, content in value.items()}
    if isinstance(value, list):
        return [as_bytes(item) for item in value]
    return value.encode() if isinstance(value, str) else value


def cifar(
    folder: Path,
    number: int,
    split: str,
    *,
    protocol: int = 2,
    python2: bool = True,
    **changes: Any,
) -> None:
    key = "labels" if number == 10 else "fine_labels"
    batch = {
        "data": pixels(split, 3072),
        key: labels(split, number),
        "batch_label": split,
    } | changes
    batches = [f"data_batch_{k}" for k in range(1, 6)] if number == 10 else ["train"]
    names = batches if split == "train" else ["test_batch" if number == 10 else "test"]
    files: dict[str, Any] = dict.fromkeys(names, batch)
    if number == 100:
        files["meta"] = {"fine_label_names": FINE}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        made = as_bytes(content) if python2 else content
        (folder / name).write_bytes(pickle.dumps(made, protocol=protocol))


def tiny_imagenet(root: Path) -> Path:
    """The official folder: two training pictures per class and one to validate with."""
    annotations = []
    for i, wnid in enumerate(WNIDS):
        for number in range(3):
            name = f"val/images/{i}.JPEG" if number == 2 else f"train/{wnid}/images/{number}.JPEG"
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 64), (40 * i, 60 * number, 200)).save(root / name)
        annotations.append(f"{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (root / "val/val_annotations.txt").write_text("".join(reversed(annotations)))
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in WNIDS))
    (root / "words.txt").write_text(WORDS + "n03014705\tgoldfish, another\n")
    return root


def archive(path: Path, members: dict[str, bytes], *, long_name: int = 0) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1, format=tarfile.GNU_FORMAT) as made:
        for name, content in members.items():
            info = tarfile.TarInfo(name + "x" * long_name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))


# What is read


def both(source: str, **options: Any) -> list[ImageSet]:
    return [load_images(source, split=split, **options) for split in ("train", "heldout")]  # type: ignore[arg-type]


def check(read: ImageSet, images: np.ndarray, expected: list[int], name: str) -> None:
    assert (read.images.dtype, read.labels.dtype) == (np.uint8, np.int64)
    assert read.images.flags.c_contiguous
    np.testing.assert_array_equal(read.images, np.broadcast_to(images, read.images.shape))
    assert (read.labels.tolist(), read.name) == (expected, name)
    assert read.notes == (
        (f"{name}'s test images are held out.",) if read.split == "heldout" else ()
    )


@pytest.mark.parametrize(("kind", "name"), [("mnist", "MNIST"), ("fashion-mnist", "Fashion-MNIST")])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", ["", "raw", "{}/raw"])
def test_mnist_in_three_equal_channels(
    tmp_path: Path, kind: str, name: str, packed: bool, below: str
):
    folder = tmp_path / below.format(name.replace("-", ""))
    for split in N:
        mnist(folder, split, packed=packed)
    if not packed:  # some browsers unpack what they download and keep its name
        (folder / "t10k-labels-idx1-ubyte").rename(folder / "t10k-labels-idx1-ubyte.gz")
    for read in both(f"{kind}:{tmp_path}", size=28):
        check(read, pixels(read.split, 28, 28)[:, None], labels(read.split), name)
        assert read.class_names[7] == ("7" if kind == "mnist" else "Sneaker")
    grey = load_images(f"{kind}:{tmp_path}", split="train", size=28, channels=1)
    np.testing.assert_array_equal(grey.images[:, 0], pixels("train", 28, 28))
    small = load_images(f"{kind}:{tmp_path}", split="train", size=14)
    mean = pixels("train", 28, 28).reshape(-1, 14, 2, 14, 2).mean((2, 4))
    np.testing.assert_allclose(small.images[:, 1], mean, atol=1)
    assert small.notes == ("Resized: 5 to 14 x 14.",)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, ">f8"])
def test_svhn_whose_ten_is_the_digit_zero(tmp_path: Path, compressed: bool, dtype: Any):
    others = {"note": "text", "cell": np.array([{"a": 1}, "b"], dtype=object)}
    for split in N:
        y = np.array([label or 10 for label in labels(split)], dtype)[:, None]
        svhn(tmp_path, split, compressed=compressed, y=y, **others)
    for read in both(f"svhn:{tmp_path}"):
        check(read, pixels(read.split, 3, 32, 32), labels(read.split), "SVHN")
        assert read.class_names == tuple("0123456789")


@pytest.mark.parametrize("number", [10, 100])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("python2", [True, False])
def test_cifar_in_folders_and_archives(tmp_path: Path, number: int, protocol: int, python2: bool):
    folder = tmp_path / {10: "cifar-10-batches-py", 100: "cifar-100-python"}[number]
    for split in N:
        cifar(folder, number, split, protocol=protocol, python2=python2)
    packed = tmp_path / "c.tar.gz"
    archive(packed, {f"x/{path.name}": path.read_bytes() for path in folder.iterdir()})
    for path in (tmp_path, folder, packed):
        for read in both(f"cifar{number}:{path}"):
            times = 5 if (number, read.split) == (10, "train") else 1
            images = np.tile(pixels(read.split, 3, 32, 32), (times, 1, 1, 1))
            check(read, images, labels(read.split, number) * times, f"CIFAR-{number}")
            assert read.class_names == (CIFAR_CLASSES if number == 10 else tuple(FINE))
    assert "cifair" not in str(tmp_path).lower()
    folder.rename(tmp_path / f"ciFAIR-{number}")
    assert both(f"cifar{number}:{tmp_path}")[0].name == f"ciFAIR-{number}"


def test_tiny_imagenet_in_the_order_of_its_classes(tmp_path: Path):
    root = tiny_imagenet(tmp_path / "tiny-imagenet-200")
    images = root / "train" / WNIDS[0] / "images"
    (images / "Thumbs.db").write_bytes(b"x")
    (images / "._0.JPEG").write_bytes(b"x")
    train, heldout = both(f"tiny-imagenet:{tmp_path}", size=64)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert heldout.labels.tolist() == [2, 1, 0]
    colours = [(40 * i, 60 * number, 200) for i in range(3) for number in range(2)]
    np.testing.assert_allclose(train.images.mean((2, 3)), colours, atol=2)
    assert train.class_names == ("Egyptian cat", "goldfish (n01443537)", "goldfish (n03014705)")
    assert heldout.notes == ("Tiny ImageNet's validation images are held out.",)
    (images / "1.JPEG").write_bytes((images / "1.JPEG").read_bytes()[:300])
    left = load_images(f"tiny-imagenet:{root}", split="train", size=64, skip_corrupt=True)
    assert left.labels.tolist() == [0, 1, 1, 2, 2]
    assert left.notes[0].startswith("Left out: 1 that cannot be read")


def test_pictures_are_in_memory_once(tmp_path: Path):
    images = tiny_imagenet(tmp_path) / "train" / WNIDS[0] / "images"
    for number in range(2, 400):
        (images / f"{number}.JPEG").hardlink_to(images / "0.JPEG")
    tracemalloc.start()
    try:
        read = load_images(f"tiny-imagenet:{tmp_path}", split="train", size=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(read) == 404
    assert read.images.nbytes <= peak < 1.3 * read.images.nbytes


# What is refused: in one line, with the file and where to download it


def refused(source: str, message: str, *, split: Any = "heldout") -> str:
    with pytest.raises(SourceError, match=message) as caught:
        load_images(source, split=split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_the_files_of_the_asked_split_need_be_there(tmp_path: Path):
    write: dict[str, Callable[[Path], None]] = {
        "mnist": lambda folder: mnist(folder, "train"),
        "fashion-mnist": lambda folder: mnist(folder, "train"),
        "svhn": lambda folder: svhn(folder, "train"),
        "cifar10": lambda folder: cifar(folder, 10, "train"),
        "cifar100": lambda folder: cifar(folder, 100, "train"),
    }
    for kind, make in write.items():
        make(tmp_path / kind)
        assert len(load_images(f"{kind}:{tmp_path / kind}", split="train")) % 5 == 0
        refused(f"{kind}:{tmp_path / kind}", r"has no t\S+(; give| or |; download).*https?://")
        refused(
            f"{kind}:{tmp_path / 'absent'}", rf"absent (is not a folder|does not exist).*{kind}:"
        )
    (tmp_path / "cifar100" / "meta").unlink()
    refused(f"cifar100:{tmp_path / 'cifar100'}", "has no meta; .* folder", split="train")
    refused(f"tiny-imagenet:{tmp_path}", "has no wnids.txt; unpack http://cs231n")
    refused(f"tiny-imagenet:{tmp_path / 'absent'}", "absent is not a folder; give tiny-imagenet:")


GREY = pixels("heldout", 28, 28)
X = pixels("heldout", 3, 32, 32).transpose(2, 3, 1, 0)
ROWS = pixels("heldout", 3072)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("mnist", {"images": GREY[:1]}, "t10k-labels.* has 3 labels, but t10k-images.* 1 images"),
    ("mnist", {"images": GREY[:, 1:]}, r"\(3, 27, 28\); expected \(n, 28, 28\)"),
    ("mnist", {"images": GREY[:0]}, r"\(0, 28, 28\); expected .* n > 0"),
    ("mnist", {"images": GREY[0]}, r"t10k-images\S+ begins with .*of 3 dimensions"),
    ("mnist", {"labels": np.zeros(0, np.uint8)}, r"shape \(0,\); expected \(n,\)"),
    ("mnist", {"labels": np.zeros((3, 1), np.uint8)}, r"begins with .*of 1 dimensions"),
    ("mnist", {"labels": np.array([3, 10, 1], np.uint8)}, "the label 10 in row 1"),
    ("svhn", {"X": None}, "X as no variable .*; expected uint8"),
    ("svhn", {"X": X.astype(np.float64)}, r"X as double \(32, 32, 3, 3\); expected"),
    ("svhn", {"X": X.transpose(3, 0, 1, 2)}, r"X as uint8 \(3, 32, 32, 3\); expected"),
    ("svhn", {"X": X[:, :, 0]}, r"X as uint8 \(32, 32, 3\); expected"),
    ("svhn", {"X": X[..., :0]}, r"X as uint8 \(32, 32, 3, 0\); expected"),
    ("svhn", {"X": np.array([[{"a": 1}]], dtype=object)}, "X as cell"),
    ("svhn", {"y": None}, r"y as no variable .*; expected numbers \(3, 1\)"),
    ("svhn", {"y": np.array([[1]])}, r"y as int64 \(1, 1\); expected numbers \(3, 1\)"),
    ("svhn", {"y": "ab"}, "y as char"),
    ("svhn", {"y": np.array([[1j], [2], [3]])}, "the label 1j in row 0"),
    ("svhn", {"y": np.array([[1], [0], [1]])}, "the label 0 in row 1; SVHN has 1 to 10"),
    ("svhn", {"y": np.array([[1.0], [2.5], [1]])}, r"the label 2\.5 in row 1"),
    ("svhn", {"y": np.array([[np.nan], [2], [1]])}, "the label nan in row 0"),
    ("cifar100", {"data": np.zeros((3, 5), np.uint8)}, "test is not a CIFAR-100 batch"),
    ("cifar100", {"data": ROWS.astype(np.int64)}, "test is not a CIFAR-100 batch"),
    ("cifar100", {"data": [[0] * 3072] * 3}, "test is not a CIFAR-100 batch"),
    ("cifar100", {"data": ROWS[:0], "fine_labels": []}, "not a CIFAR-100 batch"),
    ("cifar100", {"fine_labels": [1, 2]}, "as many 'fine_labels'"),
    ("cifar100", {"fine_labels": None}, "as many 'fine_labels'"),
    ("cifar100", {"fine_labels": [0, 1, 100]}, "test has the label 100 in row 2; .* 0 to 99"),
    ("cifar100", {"fine_labels": [0, -1, 5]}, "test has the label -1 in row 1"),
    ("cifar100", {"fine_labels": [0.5, 1, 5]}, r"test has the label 0\.5 in row 0"),
    ("cifar100", {"fine_labels": ["x", 1, 5]}, "test has the label b'x' in row 0"),
    ("cifar10", {"labels": [0, 1, 10]}, "test_batch has the label 10 in row 2; .* 0 to 9"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG)
def test_wrong_shapes_and_labels_are_named(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
):
    if kind.startswith("cifar"):
        cifar(tmp_path, int(kind[5:]), "heldout", protocol=4, **changes)
    else:
        {"mnist": mnist, "svhn": svhn}[kind](tmp_path, "heldout", **changes)
    assert "again, from http" in refused(f"{kind}:{tmp_path}", message)


@pytest.mark.parametrize("names", [None, FINE[:99], [*FINE[:99], FINE[0]], [*FINE[:99], 1], 3])
def test_meta_without_100_fine_names_is_refused(tmp_path: Path, names: Any):
    cifar(tmp_path, 100, "heldout")
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": as_bytes(names)}))
    refused(f"cifar100:{tmp_path}", "meta is not CIFAR-100's: expected 100 different")


def cifar_archive(folder: Path, _split: str) -> None:
    cifar(folder / "c", 100, "heldout", protocol=4)
    files = {path.name: path.read_bytes() for path in (folder / "c").iterdir()}
    archive(folder / "c.tar.gz", files)


@pytest.mark.parametrize("share", [0, 0.005, 0.03, 0.3, 0.9, 0.99])
@pytest.mark.parametrize(
    ("source", "write", "file"),
    [
        ("mnist:{}", mnist, "t10k-images-idx3-ubyte.gz"),
        ("mnist:{}", lambda f, s: mnist(f, s, packed=False), "t10k-images-idx3-ubyte"),
        ("svhn:{}", svhn, "test_32x32.mat"),
        ("svhn:{}", lambda f, s: svhn(f, s, compressed=False), "test_32x32.mat"),
        ("cifar10:{}", lambda f, s: cifar(f, 10, s), "test_batch"),
        ("cifar100:{}/c.tar.gz", cifar_archive, "c.tar.gz"),
    ],
)
def test_truncated_files_are_named(
    tmp_path: Path, source: str, write: Callable[[Path, str], None], file: str, share: float
):
    write(tmp_path, "heldout")
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[: int(share * len(content))])
    refused(source.format(tmp_path), rf"{file.split('.', maxsplit=1)[0]}.*download")


@pytest.mark.parametrize(
    ("kind", "file", "content", "message"),
    [
        ("mnist", "t10k-images-idx3-ubyte", b"<!DOCTYPE html>\n<p>403</p>", "begins with b"),
        ("mnist", "t10k-images-idx3-ubyte", idx(GREY.astype(np.int8), 9), "begins with b"),
        ("mnist", "t10k-images-idx3-ubyte", b"\x80\x04\x95" + bytes(60), "begins with b"),
        ("svhn", "test_32x32.mat", b"not a MATLAB file" * 20, "cannot be read as a MATLAB"),
        ("svhn", "test_32x32.mat", bytes(2000), "cannot be read as a MATLAB"),
        ("svhn", "test_32x32.mat", b"\x89HDF\r\n\x1a\n" + bytes(64), r"MATLAB 7\.3 file.*-v7"),
        ("svhn", "test_32x32.mat", b"MATLAB 7.3 MAT-file".ljust(640), r"MATLAB 7\.3 file.*-v7"),
        ("cifar10", "test_batch", b"", "not a readable pickle"),
        ("cifar10", "test_batch", b"not a pickle", "not a readable pickle"),
        ("cifar10", "test_batch", pickle.dumps([1, 2]), "not a CIFAR-10 batch"),
        ("cifar10", "test_batch", pickle.dumps(np.array([{}], dtype=object)), ""),
    ],
)
def test_other_files_are_named(tmp_path: Path, kind: str, file: str, content: bytes, message: str):
    if kind == "mnist":
        mnist(tmp_path, "heldout", packed=False)
    (tmp_path / file).write_bytes(content)
    refused(f"{kind}:{tmp_path}", f"{file}.*{message}")


def test_damaged_archives_are_named(tmp_path: Path):
    cifar_archive(tmp_path, "")
    path = tmp_path / "c.tar.gz"
    whole = path.read_bytes()
    tar = gzip.decompress(whole)
    within = tar.index(ROWS.tobytes()) + 100
    second = gzip.compress(tar[within:])
    damaged = [
        b"PK\x03\x04 something else",
        gzip.compress(tar[:within]),  # cut before it was compressed
        gzip.compress(tar[:within]) + second[:10] + b"\xff" * 20 + second[30:],
        whole[:-8] + bytes(255 - byte for byte in whole[-8:-4]) + whole[-4:],  # the checksum
    ]
    for content in damaged:
        path.write_bytes(content)
        refused(f"cifar100:{path}", r"c\.tar\.gz is not a readable .*100-python")


class Malicious:
    where = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.mkdir, (Path(self.where),))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_before_it_runs(tmp_path: Path, protocol: int):
    Malicious.where = str(tmp_path / "owned")
    content = pickle.dumps({b"data": Malicious()}, protocol=protocol)
    (tmp_path / "test_batch").write_bytes(content)
    refused(f"cifar10:{tmp_path}", r"test_batch names \S+.*not run")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("kind", "right"), [("mnist", "fashion-mnist"), ("fashion-mnist", "mnist")]
)
def test_the_other_data_set_is_not_taken_for_this_one(tmp_path: Path, kind: str, right: str):
    """The files of the two are called the same."""
    many = np.repeat(np.arange(10, dtype=np.uint8), _EDITIONS[right].counts["heldout"])
    images = np.zeros((10000, 28, 28), np.uint8)
    mnist(tmp_path, "heldout", packed=False, images=images, labels=many)
    refused(f"{kind}:{tmp_path}", f"as many labels of each class .*; give {right}:PATH")
    assert len(load_images(f"{right}:{tmp_path}", split="heldout", size=28)) == 10000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("wnids.txt", "\n \n", "wnids.txt is empty; "),
        ("words.txt", "\xff\xfe", "words.txt is not text; "),
        ("wnids.txt", "n02124075\nn02124075\n", "wnids.txt has n02124075 twice; "),
        ("wnids.txt", "n02124075\nn09\n", r"words.txt has no words for n09 \(of 1 such classes\)"),
        ("words.txt", "n02124075\tcat\nn01443537\t \n", r"no words for n01443537 \(of 2 "),
        ("val/val_annotations.txt", "0.JPEG n02124075\n", "annotations.txt has '0.JPEG n0"),
        ("val/val_annotations.txt", "0.JPEG\tn09\t0\n", r"has '0.JPEG\\tn09\\t0' in line 1"),
        ("val/val_annotations.txt", "../0.JPEG\tn02124075\n", "expected the name of a picture"),
        ("val/val_annotations.txt", "v.JPEG\tn02124075\n", r"v\.JPEG is missing \(of 1 pictures"),
    ],
)
def test_wrong_lists_of_tiny_imagenet_are_named(tmp_path: Path, name: str, text: str, message: str):
    (tiny_imagenet(tmp_path) / name).write_text(text, "latin-1")
    assert "cs231n" in refused(f"tiny-imagenet:{tmp_path}", message)
