"""Data sets as their authors publish them: MNIST, Fashion-MNIST, SVHN and Tiny ImageNet.

Whatever a file announces is compared with what the data set has before memory is taken for it, and
nothing in a file is run. An error names the file, what is wrong, and where to download it again.
"""

from __future__ import annotations

import gzip
import io
import re
import struct
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError
from storage.files import open_regular, read_bounded
from storage.sources.pictures import SUFFIXES, Pictures

DIGITS = tuple("0123456789")


# MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): grey pictures of 28 x 28 in the
# same four files, gzipped or not. An idx file is two zero bytes, 8 for uint8, the number of
# dimensions, each length as a big-endian 32-bit number, and the values.

MOST_IDX_IMAGES = 500_000
_SIDE = 28
_PREFIXES = {"train": "train", "heldout": "t10k"}


class _Edition(NamedTuple):
    """Facts that tell the two apart; `counts` are the images per class of each split."""

    kind: str
    name: str
    class_names: tuple[str, ...]
    torchvision_folder: str
    site: str
    counts: dict[str, tuple[int, ...]]


_EDITIONS = {
    "mnist": _Edition(
        "mnist",
        "MNIST",
        DIGITS,
        "MNIST",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train": (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
            "heldout": (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
        },
    ),
    "fashion-mnist": _Edition(
        "fashion-mnist",
        "Fashion-MNIST",
        (
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        "FashionMNIST",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {"train": (6000,) * 10, "heldout": (1000,) * 10},
    ),
}


def mnist_pictures(path: Path, split: str, *, kind: str = "mnist") -> Pictures:
    """Training or test images in the folder of the idx files, or torchvision's that has them in
    MNIST/raw or FashionMNIST/raw. Raises SourceError if a file is missing, no idx file, not what
    the data set has, or the other one's."""
    edition = _EDITIONS[kind]
    images_file, labels_file = (
        _idx_file(path, f"{_PREFIXES[split]}-{name}-ubyte", edition)
        for name in ("images-idx3", "labels-idx1")
    )
    images = _idx_values(images_file, (_SIDE, _SIDE), edition)
    labels = _idx_values(labels_file, (), edition)
    again = _download(labels_file, edition)
    if len(images) != len(labels):
        raise SourceError(
            f"{labels_file} has {len(labels)} labels, but {images_file.name} {len(images)} images; "
            f"{again}, and the images too"
        )
    wrong = np.flatnonzero(labels > 9)
    if len(wrong):
        raise SourceError(
            f"{labels_file} has the label {labels[wrong[0]]} in row {wrong[0]}; {edition.name} has "
            f"0 to 9: {again}"
        )
    counts = tuple(np.bincount(labels, minlength=10).tolist())
    for other in _EDITIONS.values():
        if other is not edition and counts == other.counts[split]:
            raise SourceError(
                f"{labels_file} has as many labels of each class as {other.name}'s, whose files "
                f"are called the same; give {other.kind}:PATH"
            )
    rgb = np.repeat(images[:, None], 3, axis=1)
    return edition.name, rgb, labels.astype(np.int64), edition.class_names


def _idx_file(path: Path, name: str, edition: _Edition) -> Path:
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


def _idx_values(file: Path, item: tuple[int, ...], edition: _Edition) -> npt.NDArray[np.uint8]:
    n_dims, again = 1 + len(item), _download(file, edition)
    magic, header = bytes((0, 0, 8, n_dims)), 4 + 4 * n_dims
    try:
        with open_regular(file) as opened:
            is_gzip = opened.read(2) == b"\x1f\x8b"  # whatever its name says
            opened.seek(0)
            content: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=opened) if is_gzip else opened
            head = content.read(header)
            if head[:4] != magic or len(head) < header:
                raise SourceError(
                    f"{file} begins with {head!r}; an idx file of {n_dims} dimensions begins with "
                    f"{magic!r} and their lengths: {again}"
                )
            n, *lengths = (int(length) for length in np.frombuffer(head, ">u4", offset=4))
            if tuple(lengths) != item or not 0 < n <= MOST_IDX_IMAGES:
                expected = f"({', '.join(['n', *map(str, item)])}{',' if not item else ''})"
                raise SourceError(
                    f"{file} says that it has the shape {(n, *lengths)}; expected {expected} with "
                    f"n > 0, at most {MOST_IDX_IMAGES:,}: {again}"
                )
            n_bytes = n * int(np.prod(item, dtype=np.int64))
            values = content.read(n_bytes + 1)  # one more: there must not be one
    except (EOFError, OSError, zlib.error) as error:
        raise SourceError(f"{file} cannot be unpacked ({error}); {again}") from error
    if len(values) != n_bytes:
        found = f"{len(values):,}" if len(values) < n_bytes else f"more than {n_bytes:,}"
        raise SourceError(
            f"{file} has {found} bytes of values, but says that it has {n_bytes:,}; {again}"
        )
    return np.frombuffer(values, np.uint8).reshape(n, *item)


def _download(file: Path, edition: _Edition) -> str:
    return f"download it again, from {edition.site}{file.name.removesuffix('.gz')}.gz"


# The cropped digits of the Street View House Numbers (SVHN; Netzer et al., 2011). In the MATLAB
# version 5 files `X` is uint8 (32, 32, 3, n): row, column, channel, image; `y` a digit per image,
# 10 for 0. Only these two are read, once their announced kinds and shapes are what SVHN has.

SVHN_SITE = "http://ufldl.stanford.edu/housenumbers/"
MOST_SVHN_IMAGES = 600_000
MOST_SVHN_BYTES = 2**31
_COMPRESSED = 15


def svhn_pictures(path: Path, split: str) -> Pictures:
    """Images (n, 3, 32, 32) and digits (n,) of a split's file in the folder `path`. Raises
    SourceError if it is missing, no MATLAB version 5 file, or not what SVHN has."""
    from scipy.io import loadmat, whosmat

    file = path / {"train": "train_32x32.mat", "heldout": "test_32x32.mat"}[split]
    if not path.is_dir():
        raise SourceError(
            f"{path} is not a folder; give svhn:PATH to the folder that {file.name} is in, from "
            f"{SVHN_SITE}"
        )
    if not file.is_file():
        raise SourceError(
            f"{path} has no {file.name}; download it (format 2, cropped digits) from {SVHN_SITE}"
        )
    again = f"download it again, from {SVHN_SITE}"
    try:
        with open_regular(file) as content, warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # scipy warns of variables it cannot read
            if content.read(10).startswith((b"\x89HDF", b"MATLAB 7.3")):
                raise SourceError(
                    f"{file} is a MATLAB 7.3 file (HDF5), not version 5 as SVHN's are; {again}, "
                    "or save X and y with MATLAB's option -v7"
                )
            content.seek(0)
            unpacked = _unpacked_matlab(content)
            announced: dict[str, tuple[str, tuple[int, ...]]] = {
                name: (kind, shape) for name, shape, kind in whosmat(unpacked)
            }
            kind, shape = announced.get("X", ("no variable", ()))
            n = shape[3] if len(shape) == 4 else 0
            if kind != "uint8" or shape[:3] != (32, 32, 3) or not 0 < n <= MOST_SVHN_IMAGES:
                raise SourceError(
                    f"{file} has X as {kind} {shape}; expected uint8 (32, 32, 3, n) of at most "
                    f"{MOST_SVHN_IMAGES:,} images: {again}"
                )
            kind, shape = announced.get("y", ("no variable", ()))
            if not re.fullmatch("u?int\\d+|single|double", kind) or shape != (n, 1):
                raise SourceError(
                    f"{file} has y as {kind} {shape}; expected numbers ({n}, 1), one per image: "
                    f"{again}"
                )
            unpacked.seek(0)
            variables = loadmat(unpacked, variable_names=["X", "y"])
    except SourceError:
        raise
    except Exception as error:  # a broken file may fail in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SourceError(f"{file} cannot be read as a MATLAB file ({reason}); {again}") from error
    digits = variables["y"][:, 0]
    wrong = np.flatnonzero(~np.isin(digits, np.arange(1, 11)) | np.iscomplexobj(digits))
    if len(wrong):
        raise SourceError(
            f"{file} has the label {digits[wrong[0]]} in row {wrong[0]}; SVHN has 1 to 10, and 10 "
            f"is the digit 0: {again}"
        )
    images = np.ascontiguousarray(variables["X"].transpose(3, 2, 0, 1))
    return "SVHN", images, digits.astype(np.int64) % 10, DIGITS


def _unpacked_matlab(content: BinaryIO) -> io.BytesIO:
    """The file with its compressed variables unpacked, so that it is as large as it can get. After
    128 bytes of header come elements, each of two 32-bit numbers, its type and its size, and its
    content; type 15 is a compressed element. Raises ValueError beyond `MOST_SVHN_BYTES`."""
    header = content.read(128)
    order = "<" if header[126:128] == b"IM" else ">"
    made = io.BytesIO()
    made.write(header)
    while len(tag := content.read(8)) == 8:
        kind, n_bytes = struct.unpack(f"{order}II", tag)
        room = MOST_SVHN_BYTES - made.tell()
        element = content.read(min(n_bytes, room + 1))
        if kind == _COMPRESSED:
            element = zlib.decompressobj().decompress(element, room + 1)
        else:
            element = tag + element
        if len(element) > room:
            raise ValueError(f"it unpacks to more than {MOST_SVHN_BYTES:,} bytes")
        made.write(element)
    made.seek(0)
    return made


# Tiny ImageNet: 200 classes of ImageNet at 64 x 64 (Stanford's CS231n). The folder has the classes
# in `wnids.txt`, their names in `words.txt`, 500 training pictures each in `train/WNID/images`, and
# 50 validation pictures each in `val/images`, whose classes `val/val_annotations.txt` gives. Those
# in `test` have no labels and are not read.

TINY_IMAGENET = "tiny-imagenet-200"
MOST_TEXT_BYTES = 2**26
TINY_IMAGENET_SITE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_UNPACK_AGAIN = f"unpack {TINY_IMAGENET_SITE} again and give its folder {TINY_IMAGENET}"


def tiny_imagenet_files(path: Path, split: str) -> tuple[list[tuple[Path, int]], tuple[str, ...]]:
    """The split's picture files with their classes, and the names of the classes.

    `path` is the folder tiny-imagenet-200 or the one that it is in. Classes are numbered as in
    `wnids.txt`, and called by the first of their words; two of the same words are told apart by
    their ids. Raises SourceError if a file is missing, or not what Tiny ImageNet has.
    """
    if not path.is_dir():
        raise SourceError(
            f"{path} is not a folder; give tiny-imagenet:PATH to the folder {TINY_IMAGENET} in the "
            f"unpacked {TINY_IMAGENET_SITE}"
        )
    root = path / TINY_IMAGENET if (path / TINY_IMAGENET).is_dir() else path
    wnids = _lines(root / "wnids.txt")
    twice = [wnid for wnid, count in Counter(wnids).items() if count > 1]
    if twice:
        raise SourceError(f"{root / 'wnids.txt'} has {twice[0]} twice; {_UNPACK_AGAIN}")
    words = dict(line.partition("\t")[::2] for line in _lines(root / "words.txt"))
    missing = [wnid for wnid in wnids if not words.get(wnid, "").strip()]
    if missing:
        raise SourceError(
            f"{root / 'words.txt'} has no words for {missing[0]} (of {len(missing)} such classes); "
            f"{_UNPACK_AGAIN}"
        )
    first = {wnid: words[wnid].partition(",")[0].strip() for wnid in wnids}
    count = Counter(first.values())
    names = tuple(f"{n} ({wnid})" if count[n] > 1 else n for wnid, n in first.items())
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    if split == "heldout":
        return _validation_files(root, labels), names
    files = []
    for wnid, label in labels.items():
        folder = root / "train" / wnid / "images"
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        pictures = [
            (file, label)
            for file in found
            if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
        ]
        if not pictures:
            raise SourceError(f"{folder} has no pictures; {_UNPACK_AGAIN}")
        files += pictures
    return files, names


def _validation_files(root: Path, labels: dict[str, int]) -> list[tuple[Path, int]]:
    file, folder = root / "val" / "val_annotations.txt", root / "val" / "images"
    files = []
    for number, line in enumerate(_lines(file), start=1):
        name, wnid, *_box = [*line.split("\t"), ""]
        if wnid not in labels or "/" in name:
            raise SourceError(
                f"{file} has {line!r} in line {number}; expected the name of a picture and a class "
                f"of wnids.txt, with a tab between: {_UNPACK_AGAIN}"
            )
        files.append((folder / name, labels[wnid]))
    missing = [path for path, _label in files if not path.is_file()]
    if missing:
        raise SourceError(
            f"{missing[0]} is missing (of {len(missing)} pictures of {file.name}); "
            f"{_UNPACK_AGAIN}, or give folder:PATH if its pictures were sorted into class folders"
        )
    return files


def _lines(file: Path) -> list[str]:
    if not file.is_file():
        raise SourceError(f"{file.parent} has no {file.name}; {_UNPACK_AGAIN}")
    try:
        text = read_bounded(file, MOST_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{file} is not text; {_UNPACK_AGAIN}") from error
    except OSError as error:
        raise SourceError(f"{file} cannot be read ({error}); {_UNPACK_AGAIN}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise SourceError(f"{file} is empty; {_UNPACK_AGAIN}")
    return lines
