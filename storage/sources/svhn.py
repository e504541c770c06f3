"""The cropped digits of the Street View House Numbers (SVHN; Netzer et al., 2011).

In the MATLAB version 5 files `X` is uint8 (32, 32, 3, n): row, column, channel, image; `y` a digit
per image, 10 for 0. scipy's reader runs nothing that is in them, and only the two variables are
read, once their announced kinds and shapes are what SVHN has.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError
from storage.files import open_regular
from storage.sources.pictures import Pictures

SVHN_CLASSES = tuple("0123456789")
SVHN_SITE = "http://ufldl.stanford.edu/housenumbers/"
MAX_IMAGES = 600_000
MAX_BYTES = 2**31
SVHN_FILES = {"train": "train_32x32.mat", "heldout": "test_32x32.mat"}

_COMPRESSED = 15
_NO_NUMBERS = ("cell", "struct", "object", "function", "opaque", "unknown", "sparse", "char")


def svhn_pictures(path: Path, split: str) -> Pictures:
    """Images (n, 3, 32, 32) and digits (n,) of a split's file in the folder `path`. Raises
    SourceError if it is missing, no MATLAB version 5 file, or not what SVHN has."""
    file = path / SVHN_FILES[split]
    if not path.is_dir():
        raise SourceError(
            f"{path} is not a folder; give svhn:PATH to the folder that {file.name} is in, from "
            f"{SVHN_SITE}"
        )
    if not file.is_file():
        raise SourceError(
            f"{path} has no {file.name}; download it (format 2, cropped digits) from {SVHN_SITE}"
        )
    variables = _variables(file)
    images = _images(variables.get("X"), file)
    labels = _labels(variables.get("y"), len(images), file)
    return "SVHN", images, labels, SVHN_CLASSES


def _variables(file: Path) -> dict[str, Any]:
    from scipy.io import loadmat, whosmat

    try:
        with open_regular(file) as content, warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # scipy warns of variables it cannot read
            if content.read(10).startswith((b"\x89HDF", b"MATLAB 7.3")):
                raise SourceError(
                    f"{file} is a MATLAB 7.3 file (HDF5), not version 5 as SVHN's are; download it "
                    f"again, from {SVHN_SITE}, or save X and y with MATLAB's option -v7"
                )
            content.seek(0)
            unpacked = _unpacked(content)
            for name, shape, kind in whosmat(unpacked):
                _check_announced(name, shape, kind, file)
            unpacked.seek(0)
            return dict(loadmat(unpacked, variable_names=["X", "y"]))
    except SourceError:
        raise
    except Exception as error:  # a broken file may fail in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SourceError(
            f"{file} cannot be read as a MATLAB file ({reason}); download it again, from "
            f"{SVHN_SITE}"
        ) from error


def _unpacked(content: BinaryIO) -> io.BytesIO:
    """The file with its compressed variables unpacked, so that it is as large as it can get. After
    128 bytes of header come elements, each of two 32-bit numbers, its type and its size, and its
    content; type 15 is a compressed element. Raises ValueError beyond `MAX_BYTES`."""
    header = content.read(128)
    order = "<" if header[126:128] == b"IM" else ">"
    made = io.BytesIO()
    made.write(header)
    while len(tag := content.read(8)) == 8:
        kind, n_bytes = struct.unpack(f"{order}II", tag)
        room = MAX_BYTES - made.tell()
        element = content.read(min(n_bytes, room + 1))
        if kind == _COMPRESSED:
            element = zlib.decompressobj().decompress(element, room + 1)
        else:
            element = tag + element
        if len(element) > room:
            raise ValueError(f"it unpacks to more than {MAX_BYTES:,} bytes")
        made.write(element)
    made.seek(0)
    return made


def _check_announced(name: str, shape: tuple[int, ...], kind: str, file: Path) -> None:
    if name in ("X", "y") and (kind in _NO_NUMBERS or max(shape, default=0) > MAX_IMAGES):
        raise SourceError(
            f"{file} has {name} as {kind} {shape}; expected numbers of at most {MAX_IMAGES:,} "
            f"images: download it again, from {SVHN_SITE}"
        )


def _images(X: Any, file: Path) -> npt.NDArray[np.uint8]:
    if (
        not isinstance(X, np.ndarray)
        or X.dtype != np.uint8
        or X.ndim != 4
        or X.shape[:3] != (32, 32, 3)
        or X.shape[3] == 0
    ):
        raise SourceError(
            f"{file} has {_described('X', X)}; expected uint8 (32, 32, 3, n): download it again, "
            f"from {SVHN_SITE}"
        )
    return np.ascontiguousarray(X.transpose(3, 2, 0, 1))


def _labels(y: Any, n_images: int, file: Path) -> npt.NDArray[np.int64]:
    if not isinstance(y, np.ndarray) or y.dtype.kind not in "iuf" or y.shape != (n_images, 1):
        raise SourceError(
            f"{file} has {_described('y', y)}; expected numbers ({n_images}, 1), one per image: "
            f"download it again, from {SVHN_SITE}"
        )
    digits = y[:, 0]
    wrong = np.flatnonzero(~np.isin(digits, np.arange(1, 11)))
    if len(wrong):
        raise SourceError(
            f"{file} has the label {digits[wrong[0]]} in row {wrong[0]}; SVHN has 1 to 10, and 10 "
            f"is the digit 0: download it again, from {SVHN_SITE}"
        )
    return digits.astype(np.int64) % 10


def _described(name: str, value: Any) -> str:
    if value is None:
        return f"no variable {name}"
    if not isinstance(value, np.ndarray):
        return f"{name} as {type(value).__name__}"
    return f"{name} as {value.dtype} {value.shape}"
