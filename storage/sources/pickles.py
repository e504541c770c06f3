"""Reading of the official CIFAR batches without running what is in them.

A pickle is a program. The batches need only dicts, lists, strings and one uint8 array, so
`restricted_load` resolves the five names that numpy's arrays are pickled with and refuses every
other one before it is called. Nor can a small file take much memory: the unpickler written in
Python allocates nothing by a number in the file, and what may be called is called only as often,
and on as much text, as the file itself can hold once.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from storage.errors import SourceError

MAX_ARRAYS = 8
"""In one file; CIFAR's have one."""


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
        if allowed is _reconstruct:
            return self._one_more_array
        return self._bounded_text if allowed is _encode else allowed

    def _one_more_array(self, *how: Any) -> Any:
        self._n_arrays += 1
        if self._n_arrays > MAX_ARRAYS:
            raise ValueError(f"more than {MAX_ARRAYS} arrays")
        return _reconstruct(*how)

    def _bounded_text(self, text: str, encoding: str) -> bytes:
        self._text_left -= len(text)
        if self._text_left < 0:
            raise ValueError("more text than is in the file")
        return _encode(text, encoding)

    def persistent_load(self, _pid: Any) -> Any:
        raise SourceError(f"{self._name} refers to outside objects, which CIFAR does not do")


class _NdArray:
    """Stands for numpy's ndarray, which is only named: called, it would allocate any shape."""


def _reconstruct(kind: Any, shape: tuple[int, ...], _typecode: Any) -> np.ndarray[Any, Any]:
    """Stands for numpy's `_reconstruct`: an empty array that the pickle fills afterwards."""
    if kind is not _NdArray or shape != (0,):
        raise ValueError(f"array of kind {kind!r} and initial shape {shape!r}")
    return np.ndarray((0,), np.int8)


def _frombuffer(
    buffer: Any, dtype: np.dtype[Any], shape: Any, order: str, axis_order: Any = None
) -> np.ndarray[Any, Any]:
    """Stands for numpy's `_frombuffer`, of pickle protocol 5."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject or axis_order is not None:
        raise ValueError(f"array of dtype {dtype!r}")
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order="F" if order == "F" else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, with which Python 3 pickles bytes in protocol 2."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"text encoding {encoding!r}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("numpy", "ndarray"): _NdArray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
}
