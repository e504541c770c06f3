"""The official CIFAR-10 and CIFAR-100 in Python's format, or ciFAIR, which has the same layout.

Both are pickles in a .tar.gz: CIFAR-10 five files of training images and one of test images,
CIFAR-100 one of each and `meta`, which names the classes. CIFAR-100's 100 fine labels are taken,
not its 20 coarse ones.

A pickle is a program. The batches need only dicts, lists, strings and one uint8 array, so
`restricted_load` resolves the five names that numpy's arrays are pickled with and refuses every
other one before it is called. Nor can a small file take much memory: the unpickler written in
Python allocates nothing by a number in the file, and what may be called is called only as often,
and on as much text, as the file itself can hold once.
"""

from __future__ import annotations

import gzip
import io
import pickle
import re
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError
from storage.files import open_regular, read_bounded
from storage.sources.pictures import Pictures

CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CIFAR_SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"

MAX_IMAGES = 100_000
MAX_FILE = 2**29
MAX_ARCHIVE = 2**30
"""Bytes of one file of images, and of an archive unpacked: three and six times the official."""
MAX_ARRAYS = 8
"""In one file; CIFAR's have one."""
_OFFICIAL_IS = f"CIFAR's has far fewer: download the archive again, from {CIFAR_SITE}"


class _Edition(NamedTuple):
    number: int
    folders: tuple[str, str]
    label_key: str

    @property
    def archive(self) -> str:
        return f"cifar-{self.number}-python.tar.gz"


_CIFAR10 = _Edition(10, ("cifar-10-batches-py", "ciFAIR-10"), "labels")
_CIFAR100 = _Edition(100, ("cifar-100-python", "ciFAIR-100"), "fine_labels")


def cifar10_pictures(path: Path, split: str) -> Pictures:
    """CIFAR-10's training or test images, of the archive or the folder in it. Raises SourceError if
    a file is missing, no pickle, or not what CIFAR-10 has."""
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    name, files = _files(path, _CIFAR10, ["test_batch"] if split == "heldout" else batches)
    read = [_batch(content, file, _CIFAR10) for file, content in files.items()]
    images, labels = (np.concatenate(arrays) for arrays in zip(*read, strict=True))
    return name, images, labels, CIFAR_CLASSES


def cifar100_pictures(path: Path, split: str) -> Pictures:
    """CIFAR-100's training or test images with their fine labels, like `cifar10_pictures`."""
    file = "test" if split == "heldout" else "train"
    name, files = _files(path, _CIFAR100, [file, "meta"])
    found = _dictionary(files["meta"], "meta").get("fine_label_names")
    names = [_text(one) for one in found] if isinstance(found, list) else []
    if not all(isinstance(one, str) for one in names) or not len(set(names)) == len(names) == 100:
        raise SourceError(
            "meta is not CIFAR-100's: expected 100 different 'fine_label_names'; download "
            f"{_CIFAR100.archive} again, from {CIFAR_SITE}"
        )
    images, labels = _batch(files[file], file, _CIFAR100)
    return name, images, labels, tuple(names)


def _files(path: Path, edition: _Edition, names: list[str]) -> tuple[str, dict[str, bytes]]:
    """What the data set is called, and its files of these names, in that order."""
    folder = next((path / sub for sub in edition.folders if (path / sub).is_dir()), path)
    give = f"give cifar{edition.number}:PATH to {edition.archive}"
    found: dict[str, bytes] = {}
    if path.is_dir():
        for name in names:
            file = folder / name
            try:
                if file.is_file():
                    found[name] = read_bounded(file, MAX_FILE)
            except OSError as error:
                raise SourceError(f"{file} cannot be read ({error}); {_OFFICIAL_IS}") from error
    elif path.is_file():
        found = _members(path, edition, names)
    else:
        raise SourceError(f"{path} does not exist; {give}, from {CIFAR_SITE}")
    missing = [name for name in names if name not in found]
    if missing:
        raise SourceError(
            f"{path} has no {', '.join(missing)}; {give} or to the folder {edition.folders[0]} in "
            f"it, from {CIFAR_SITE}"
        )
    kind = "ciFAIR" if "cifair" in folder.as_posix().lower() else "CIFAR"
    return f"{kind}-{edition.number}", {name: found[name] for name in names}


def _members(path: Path, edition: _Edition, names: list[str]) -> dict[str, bytes]:
    """The files of these names in an archive, which is unpacked as far as it may be long: the
    module tarfile's own unpacking would read whatever length a header announces."""
    found: dict[str, bytes] = {}
    try:
        with open_regular(path) as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            packed: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=file) if is_gzip else file
            unpacked = io.BytesIO()
            while (piece := packed.read(2**20)) and unpacked.tell() <= MAX_ARCHIVE:
                unpacked.write(piece)  # to the end, where gzip's checksum is
        if unpacked.tell() > MAX_ARCHIVE:
            raise SourceError(f"{path} unpacks to more than {MAX_ARCHIVE:,} bytes; {_OFFICIAL_IS}")
        unpacked.seek(0)
        with tarfile.open(fileobj=unpacked, mode="r:") as archive:
            for member in archive:
                name = re.split("[/\\\\]", member.name)[-1]
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None and name in names:
                    if member.size > MAX_FILE:
                        raise SourceError(
                            f"{name} in {path} has {member.size:,} bytes; {_OFFICIAL_IS}"
                        )
                    found[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        reason = " ".join(str(error).split())  # tarfile's have several lines
        raise SourceError(
            f"{path} is not a readable .tar.gz ({reason}); download {edition.archive} again, from "
            f"{CIFAR_SITE}, or unpack it and give its folder"
        ) from error
    return found


def _batch(
    content: bytes, name: str, edition: _Edition
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    batch = _dictionary(content, name)
    rows, labels = batch.get("data"), batch.get(edition.label_key)
    if (
        not isinstance(rows, np.ndarray)
        or rows.dtype != np.uint8
        or rows.shape[1:] != (3072,)
        or not isinstance(labels, list)
        or not len(labels) == len(rows) > 0
        or len(rows) > MAX_IMAGES
    ):
        raise SourceError(
            f"{name} is not a CIFAR-{edition.number} batch: expected 'data' uint8 (n, 3072), at "
            f"most {MAX_IMAGES:,}, and as many '{edition.label_key}'; download {edition.archive} "
            f"again, from {CIFAR_SITE}"
        )
    for row, label in enumerate(labels):
        if not isinstance(label, int) or not 0 <= label < edition.number:
            raise SourceError(
                f"{name} has the label {label!r} in row {row}; CIFAR-{edition.number} has 0 to "
                f"{edition.number - 1}: download {edition.archive} again, from {CIFAR_SITE}"
            )
    images = np.ascontiguousarray(rows).reshape(-1, 3, 32, 32)
    return images, np.array(labels, np.int64)


def _dictionary(content: bytes, name: str) -> dict[Any, Any]:
    loaded = restricted_load(content, name)
    return {_text(key): value for key, value in loaded.items()} if isinstance(loaded, dict) else {}


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def restricted_load(content: bytes, name: str) -> Any:
    """The object in `content`: dicts, lists, numbers, strings (as bytes) and numpy arrays. Raises
    SourceError, which calls the file `name`, if `content` is no pickle or names anything else."""
    try:
        return _RestrictedUnpickler(content, name).load()
    except SourceError:
        raise
    except Exception as error:  # a broken pickle may fail in any way
        raise SourceError(
            f"{name} is not a readable pickle ({type(error).__name__}: {error}); "
            "download the archive again"
        ) from error


class _RestrictedUnpickler(pickle._Unpickler):
    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._name = name
        self._n_arrays = 0
        self._text_left = len(content)

    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is None:
            raise SourceError(
                f"{self._name} names {module}.{name}, which a CIFAR batch has no use for; "
                "it was not run: download the archive from its official site"
            )
        return getattr(self, allowed) if isinstance(allowed, str) else allowed

    def _reconstruct(self, kind: Any, shape: tuple[int, ...], _typecode: Any) -> npt.NDArray[Any]:
        """Stands for numpy's `_reconstruct`: an empty array that the pickle fills afterwards."""
        self._n_arrays += 1
        if self._n_arrays > MAX_ARRAYS:
            raise ValueError(f"more than {MAX_ARRAYS} arrays")
        if kind is not _NdArray or shape != (0,):
            raise ValueError(f"array of kind {kind!r} and initial shape {shape!r}")
        return np.ndarray((0,), np.int8)

    def _encode(self, text: str, encoding: str) -> bytes:
        """Stands for `_codecs.encode`, with which Python 3 pickles bytes in protocol 2."""
        self._text_left -= len(text)
        if self._text_left < 0:
            raise ValueError("more text than is in the file")
        if encoding not in ("latin1", b"latin1"):
            raise ValueError(f"text encoding {encoding!r}")
        return text.encode("latin1")


class _NdArray:
    """Stands for numpy's ndarray, which is only named: called, it would allocate any shape."""


def _frombuffer(
    buffer: Any, dtype: np.dtype[Any], shape: Any, order: str, axis_order: Any = None
) -> npt.NDArray[Any]:
    """Stands for numpy's `_frombuffer`, of pickle protocol 5."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject or axis_order is not None:
        raise ValueError(f"array of dtype {dtype!r}")
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order="F" if order == "F" else "C")


_ALLOWED: dict[tuple[str, str], str | Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): "_reconstruct",
    ("numpy._core.multiarray", "_reconstruct"): "_reconstruct",
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("numpy", "ndarray"): _NdArray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): "_encode",
}
