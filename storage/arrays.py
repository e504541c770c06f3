"""One array from an .npy file that a user hands in; nothing is unpickled, no file is left open."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError
from storage.files import open_regular


def read_array(path: Path, what: str, *, at_most: int | None = None) -> npt.NDArray[Any]:
    """The array in `path`, an .npy file, of any shape and type but objects.

    `what` it should be, and `at_most` so many numbers, for the errors. Raises SourceError if the
    file is not there, is no regular file, none that numpy.save made, needs pickle, holds several
    arrays (.npz), or fewer numbers than its header announces.
    """
    try:
        with open_regular(path) as file:
            _check_size(file, at_most)
            array = np.load(file, allow_pickle=False)
            if isinstance(array, np.lib.npyio.NpzFile):
                array.close()
                raise SourceError(f"{path} holds several arrays; save {what} alone, as .npy")
    except FileNotFoundError:
        raise SourceError(f"{path} is not there; it should hold {what}") from None
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(
            f"{path} is not an array that can be read safely ({said}); save {what} with numpy.save "
            "as numbers, without pickle"
        ) from error
    return np.asarray(array)


def _check_size(file: BinaryIO, at_most: int | None) -> None:
    """ValueError if the header announces more than the file has, for which numpy would make room,
    or more than `at_most` numbers; the file is then where it was."""
    if file.read(6) == b"\x93NUMPY":
        file.seek(0)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, _in_columns, dtype = read(file)
        n_bytes, n_there = math.prod(shape) * dtype.itemsize, _left(file)
        if at_most is not None and math.prod(shape) > at_most:
            raise ValueError(f"its shape is {shape}, more than {at_most:,} numbers")
        if n_bytes > n_there and not dtype.hasobject:
            raise ValueError(
                f"its header announces shape {shape}, {n_bytes:,} bytes, but {n_there:,} are there"
            )
    file.seek(0)


def _left(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size - file.tell()
