"""Files and arrays of the user's: read without pickle, refused in words, none waited for."""

from __future__ import annotations

import gc
import io
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.documents import read_array
from storage.errors import SourceError
from storage.files import open_regular


def saved(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=True)
    return content.getvalue()


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.float32(2), np.zeros((0, 3))])
def test_what_was_saved_is_read(tmp_path: Path, array: np.ndarray) -> None:
    (tmp_path / "a.npy").write_bytes(saved(array))
    back = read_array(tmp_path / "a.npy", "numbers")
    np.testing.assert_array_equal(back, array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"text", r"numpy\.save"),
        (b"", r"numpy\.save"),
        (b"PK\x03\x04 and no more", r"numpy\.save"),
        (b"\x93NUMPY\x01\x00", r"numpy\.save"),
        (saved(np.array([{"a": 1}], object)), "without pickle"),
        (None, "is not there; it should hold numbers"),
    ],
)
def test_what_is_no_array(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(SourceError, match=said):
        read_array(tmp_path / "a.npy", "numbers")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("shape", ["99999, 99999", "1099511627776, 1099511627776", "-1, 99999999"])
def test_a_header_that_announces_more_than_there_is(
    tmp_path: Path, version: Any, shape: str
) -> None:
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.zeros(3), version)
    assert np.array_equal(read_array(path, "numbers"), np.zeros(3))
    padded = b"(3,), }" + b" " * 30
    announced = f"({shape}), }}".ljust(len(padded)).encode()
    path.write_bytes(path.read_bytes().replace(padded, announced))
    with pytest.raises(SourceError, match="numbers with numpy"):
        read_array(path, "numbers")


def test_several_arrays_are_refused_and_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, a=np.zeros(3), b=np.ones(2))
    with pytest.raises(SourceError, match="several arrays; save the mean image alone") as e:
        read_array(path, "the mean image")
    gc.collect()
    links = [p.readlink() for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    assert path not in links  # while the error with its frames is alive
    assert e.value is not None


def test_regular_files_and_links_to_them_are_opened(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"content"


def test_what_would_hang_is_refused_at_once(tmp_path: Path):
    """A pipe without a writer and a device without an end, by themselves and behind a link."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(OSError, match="it is a pipe, not a regular file"):
            open_regular(path)
    with pytest.raises(OSError, match="it is a device, not a regular file"):
        open_regular(Path("/dev/zero"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device"):
            open_regular(tmp_path / "socket")


def test_folders_and_missing_files_are_what_they_are_elsewhere(tmp_path: Path):
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")
