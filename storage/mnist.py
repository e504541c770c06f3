"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): grey pictures of 28 x 28.

Both come as the same four files, gzipped or not: `train-images-idx3-ubyte(.gz)`,
`train-labels-idx1-ubyte(.gz)`, and `t10k-...` for the test images. An idx file is two zero bytes, 8
for uint8, the number of dimensions, each length as a big-endian 32-bit number, and the values.
Grey is repeated in three channels, as that of every other source.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError

MNIST_CLASSES = tuple("0123456789")
FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
PREFIXES = {"train": "train", "heldout": "t10k"}

Pictures = tuple[str, npt.NDArray[np.uint8], npt.NDArray[np.int64], tuple[str, ...]]
"""Name, images (n, 3, 28, 28), labels (n,) and class names."""

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
    """MNIST's training or test images.

    `path` is the folder of the files, or torchvision's that has them in MNIST/raw. The other
    split's files need not be there.

    Raises:
        SourceError: a file is missing, no idx file, not what MNIST has, or Fashion-MNIST's.
    """
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
    """The file `name` or `name`.gz, in `path` or where torchvision puts it."""
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
    """The values (n, *item) of an idx file of uint8."""
    content = _content(file, edition)
    n_dims = 1 + len(item)
    magic, header = bytes((0, 0, 8, n_dims)), 4 + 4 * n_dims
    if content[:4] != magic or len(content) < header:
        raise SourceError(
            f"{file} begins with {content[:header]!r}; an idx file of {n_dims} dimensions begins "
            f"with {magic!r} and their lengths: {_download(file, edition)}"
        )
    n, *lengths = (int(length) for length in np.frombuffer(content, ">u4", n_dims, offset=4))
    if tuple(lengths) != item or n == 0:
        raise SourceError(
            f"{file} says that it has the shape {(n, *lengths)}; expected "
            f"({', '.join(['n', *map(str, item)])}{',' if not item else ''}) with n > 0: "
            f"{_download(file, edition)}"
        )
    n_bytes = n * int(np.prod(item, dtype=np.int64))
    if len(content) - header != n_bytes:
        raise SourceError(
            f"{file} has {len(content) - header:,} bytes of values, but says that it has "
            f"{n_bytes:,}; {_download(file, edition)}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(n, *item)


def _content(file: Path, edition: _Edition) -> bytes:
    """A file's bytes, unpacked if they are gzipped, whatever its name says."""
    content = file.read_bytes()
    if not content.startswith(_GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise SourceError(
            f"{file} cannot be unpacked ({error}); {_download(file, edition)}"
        ) from error


def _download(file: Path, edition: _Edition) -> str:
    return f"download it again, from {edition.site}{file.name.removesuffix('.gz')}.gz"
