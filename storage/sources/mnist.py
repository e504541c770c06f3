"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): grey pictures of 28 x 28.

Both come as the same four files, gzipped or not. An idx file is two zero bytes, 8 for uint8, the
number of dimensions, each length as a big-endian 32-bit number, and the values.
"""

from __future__ import annotations

import gzip
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError
from storage.files import open_regular
from storage.sources.pictures import Pictures

MNIST_CLASSES = tuple("0123456789")
FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
PREFIXES = {"train": "train", "heldout": "t10k"}


MAX_IMAGES = 500_000
_SIDE = 28
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class _Edition:
    """What tells the two data sets apart; `counts` are the images per class of each split."""

    kind: str
    name: str
    class_names: tuple[str, ...]
    torchvision_folder: str
    site: str
    counts: dict[str, tuple[int, ...]]


_MNIST = _Edition(
    "mnist",
    "MNIST",
    MNIST_CLASSES,
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train": (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        "heldout": (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    },
)
_FASHION = _Edition(
    "fashion-mnist",
    "Fashion-MNIST",
    FASHION_MNIST_CLASSES,
    "FashionMNIST",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {"train": (6000,) * 10, "heldout": (1000,) * 10},
)
_OTHER = {"mnist": _FASHION, "fashion-mnist": _MNIST}


def mnist_pictures(path: Path, split: str) -> Pictures:
    """MNIST's training or test images in the folder of the files, or torchvision's that has them in
    MNIST/raw. Raises SourceError if a file is missing, no idx file, not what MNIST has, or
    Fashion-MNIST's."""
    return _pictures(path, split, _MNIST)


def fashion_mnist_pictures(path: Path, split: str) -> Pictures:
    """Fashion-MNIST's, like `mnist_pictures`; torchvision's folder is FashionMNIST/raw."""
    return _pictures(path, split, _FASHION)


def _pictures(path: Path, split: str, edition: _Edition) -> Pictures:
    images_file = _file(path, f"{PREFIXES[split]}-images-idx3-ubyte", edition)
    labels_file = _file(path, f"{PREFIXES[split]}-labels-idx1-ubyte", edition)
    images = _values(images_file, (_SIDE, _SIDE), edition)
    labels = _values(labels_file, (), edition)
    if len(images) != len(labels):
        raise SourceError(
            f"{labels_file} has {len(labels)} labels, but {images_file.name} {len(images)} images; "
            f"{_download(labels_file, edition)}, and the images too"
        )
    wrong = np.flatnonzero(labels > 9)
    if len(wrong):
        raise SourceError(
            f"{labels_file} has the label {labels[wrong[0]]} in row {wrong[0]}; {edition.name} has "
            f"0 to 9: {_download(labels_file, edition)}"
        )
    other = _OTHER[edition.kind]
    if tuple(np.bincount(labels, minlength=10).tolist()) == other.counts[split]:
        raise SourceError(
            f"{labels_file} has as many labels of each class as {other.name}'s, whose files are "
            f"called the same; give {other.kind}:PATH"
        )
    rgb = np.repeat(images[:, None], 3, axis=1)
    return edition.name, rgb, labels.astype(np.int64), edition.class_names


def _file(path: Path, name: str, edition: _Edition) -> Path:
    if not path.is_dir():
        raise SourceError(
            f"{path} is not a folder; give {edition.kind}:PATH to the folder of {name}.gz, from "
            f"{edition.site}{name}.gz"
        )
    for folder in (path, path / "raw", path / edition.torchvision_folder / "raw"):
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    raise SourceError(
        f"{path} has no {name} or {name}.gz; download {edition.site}{name}.gz into it"
    )


def _values(file: Path, item: tuple[int, ...], edition: _Edition) -> npt.NDArray[np.uint8]:
    n_dims = 1 + len(item)
    magic, header = bytes((0, 0, 8, n_dims)), 4 + 4 * n_dims
    try:
        with ExitStack() as stack:
            content = _opened(file, stack)
            head = content.read(header)
            if head[:4] != magic or len(head) < header:
                raise SourceError(
                    f"{file} begins with {head!r}; an idx file of {n_dims} dimensions begins with "
                    f"{magic!r} and their lengths: {_download(file, edition)}"
                )
            n, *lengths = (int(length) for length in np.frombuffer(head, ">u4", offset=4))
            if tuple(lengths) != item or not 0 < n <= MAX_IMAGES:
                expected = f"({', '.join(['n', *map(str, item)])}{',' if not item else ''})"
                raise SourceError(
                    f"{file} says that it has the shape {(n, *lengths)}; expected {expected} with "
                    f"n > 0, at most {MAX_IMAGES:,}: {_download(file, edition)}"
                )
            n_bytes = n * int(np.prod(item, dtype=np.int64))
            values = content.read(n_bytes + 1)  # one more: there must not be one
    except (EOFError, OSError, zlib.error) as error:
        raise SourceError(f"{file} cannot be unpacked ({error}); {_download(file, edition)}") from (
            error
        )
    if len(values) != n_bytes:
        found = f"{len(values):,}" if len(values) < n_bytes else f"more than {n_bytes:,}"
        raise SourceError(
            f"{file} has {found} bytes of values, but says that it has {n_bytes:,}; "
            f"{_download(file, edition)}"
        )
    return np.frombuffer(values, np.uint8).reshape(n, *item)


def _opened(file: Path, stack: ExitStack) -> BinaryIO:
    """A file's bytes, unpacked as they are read if they are gzipped, whatever its name says."""
    packed = stack.enter_context(open_regular(file))
    is_gzip = packed.read(len(_GZIP)) == _GZIP
    packed.seek(0)
    return cast(BinaryIO, stack.enter_context(gzip.open(packed))) if is_gzip else packed


def _download(file: Path, edition: _Edition) -> str:
    return f"download it again, from {edition.site}{file.name.removesuffix('.gz')}.gz"
