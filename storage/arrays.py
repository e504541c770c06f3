"""One array from an .npy file that a user hands in; nothing is unpickled, no file is left open."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError


def read_array(path: Path, what: str) -> npt.NDArray[Any]:
    """The array in `path`, of any shape and type but objects.

    Args:
        path: An .npy file.
        what: What the array should be, for the errors: "the encodings", "the mean image".

    Raises:
        SourceError: The file is not there, is none that numpy.save made, needs pickle, or holds
            several arrays (.npz).
    """
    try:
        with path.open("rb") as file:
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
