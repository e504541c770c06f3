from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from storage.files import open_regular


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
