"""The official CIFAR-10 and CIFAR-100 in Python's format, or ciFAIR, which has the same layout.

Both are pickles in a .tar.gz: CIFAR-10 five files of training images and one of test images,
CIFAR-100 one of each and `meta`, which names the classes. `storage.sources.pickles` reads them
without running what is in them. CIFAR-100's 100 fine labels are taken, not its 20 coarse ones.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError
from storage.files import open_regular, read_bounded
from storage.sources.pickles import restricted_load
from storage.sources.pictures import Pictures

CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CIFAR_FOLDERS = ("cifar-10-batches-py", "ciFAIR-10")
CIFAR100_FOLDERS = ("cifar-100-python", "ciFAIR-100")
CIFAR_SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"

MAX_IMAGES = 100_000
MAX_FILE = 2**29
MAX_ARCHIVE = 2**30
"""Bytes of one file of images, and of an archive unpacked: three and six times the official."""


@dataclass(frozen=True)
class _Edition:
    number: int
    folders: tuple[str, str]
    label_key: str

    @property
    def archive(self) -> str:
        return f"cifar-{self.number}-python.tar.gz"


_CIFAR10 = _Edition(10, CIFAR_FOLDERS, "labels")
_CIFAR100 = _Edition(100, CIFAR100_FOLDERS, "fine_labels")


def cifar10_pictures(path: Path, split: str) -> Pictures:
    """CIFAR-10's training or test images, of the archive or the folder in it. Raises SourceError if
    a file is missing, no pickle, or not what CIFAR-10 has."""
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    names = ["test_batch"] if split == "heldout" else batches
    files = _files(path, _CIFAR10, names)
    read = [_batch(files[name], name, _CIFAR10) for name in names]
    images = np.concatenate([images for images, _labels in read])
    labels = np.concatenate([labels for _images, labels in read])
    return _name(path, _CIFAR10), images, labels, CIFAR_CLASSES


def cifar100_pictures(path: Path, split: str) -> Pictures:
    """CIFAR-100's training or test images with their fine labels, like `cifar10_pictures`."""
    name = "test" if split == "heldout" else "train"
    files = _files(path, _CIFAR100, [name, "meta"])
    class_names = _fine_label_names(files["meta"])
    images, labels = _batch(files[name], name, _CIFAR100)
    return _name(path, _CIFAR100), images, labels, class_names


def _folder(path: Path, edition: _Edition) -> Path:
    return next((path / sub for sub in edition.folders if (path / sub).is_dir()), path)


def _name(path: Path, edition: _Edition) -> str:
    fair = "cifair" in _folder(path, edition).as_posix().lower()
    return f"{'ciFAIR' if fair else 'CIFAR'}-{edition.number}"


def _files(path: Path, edition: _Edition, names: list[str]) -> dict[str, bytes]:
    give = f"give cifar{edition.number}:PATH to {edition.archive}"
    if path.is_dir():
        folder = _folder(path, edition)
        found = {name: _content(folder / name) for name in names if (folder / name).is_file()}
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
    return found


def _content(file: Path) -> bytes:
    try:
        return read_bounded(file, MAX_FILE)
    except OSError as error:
        raise SourceError(f"{file} cannot be read ({error}); {_official_is()}") from error


def _members(path: Path, edition: _Edition, names: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with (
            open_regular(path) as file,
            _Unpacked(file, path) as unpacked,
            tarfile.open(fileobj=unpacked, mode="r:") as archive,
        ):
            for member in archive:
                name = re.split("[/\\\\]", member.name)[-1]
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None and name in names:
                    if member.size > MAX_FILE:
                        raise SourceError(
                            f"{name} in {path} has {member.size:,} bytes; {_official_is()}"
                        )
                    found[name] = content.read()
            while unpacked.read(2**20):
                pass  # gzip compares its checksum at the end
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        reason = " ".join(str(error).split())  # tarfile's have several lines
        raise SourceError(
            f"{path} is not a readable .tar.gz ({reason}); download {edition.archive} again, from "
            f"{CIFAR_SITE}, or unpack it and give its folder"
        ) from error
    return found


class _Unpacked(io.RawIOBase):
    """A .tar.gz or .tar unpacked, up to `MAX_ARCHIVE` bytes; SourceError beyond. The module
    tarfile's own unpacking would read whatever length a header announces."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._path = path
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self._content = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip else file

    def read(self, size: int = -1) -> bytes:
        self._check(self._content.tell() + (MAX_ARCHIVE if size < 0 else size))
        return self._content.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check(offset)
        return self._content.seek(offset, whence)

    def tell(self) -> int:
        return self._content.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._content.close()
        super().close()

    def _check(self, end: int) -> None:
        if end > MAX_ARCHIVE:
            raise SourceError(
                f"{self._path} unpacks to more than {MAX_ARCHIVE:,} bytes; {_official_is()}"
            )


def _official_is() -> str:
    return f"CIFAR's has far fewer: download the archive again, from {CIFAR_SITE}"


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


def _fine_label_names(content: bytes) -> tuple[str, ...]:
    names = _dictionary(content, "meta").get("fine_label_names")
    texts = [_text(name) for name in names] if isinstance(names, list) else []
    if not all(isinstance(text, str) for text in texts) or not len(set(texts)) == len(texts) == 100:
        raise SourceError(
            "meta is not CIFAR-100's: expected 100 different 'fine_label_names'; download "
            f"{_CIFAR100.archive} again, from {CIFAR_SITE}"
        )
    return tuple(texts)


def _dictionary(content: bytes, name: str) -> dict[Any, Any]:
    loaded = restricted_load(content, name)
    return {_text(key): value for key, value in loaded.items()} if isinstance(loaded, dict) else {}


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
